"""docs/howto/culprit.md: its commands work, in the page's order, and print what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import families
import numpy as np
import pytest
from transcripts import shell_lines

from mstore import MergeRequest, Store

pytestmark = pytest.mark.rest

PAGE = (Path(__file__).parent.parent / "docs" / "howto" / "culprit.md").read_text()
WORKS = PAGE.split("```python\n", 1)[1].split("```", 1)[0]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a merge of three experts, of which one broke a layer."""
    rng = np.random.default_rng(0)
    names = [f"model.layers.{number}.w" for number in range(4)]
    base = {name: rng.standard_normal((8, 8)).astype(np.float32) for name in names}
    families.write_checkpoint(tmp_path / "base", base)
    with Store.init(tmp_path / ".mstore", block_size=families.BLOCK) as store:
        store.add(tmp_path / "base", name="base")
        for number, name in enumerate(("code", "math", "chat"), 1):
            own = {key: array + np.float32(number) / 100 for key, array in base.items()}
            if name == "chat":
                own[names[2]] = np.full((8, 8), 1000, np.float32)
            families.write_checkpoint(tmp_path / name, own)
            store.add(tmp_path / name, name=name, base="base")
        for weight in (0.01, 0.02, 0.3):
            experts = [("code", 0.3), ("math", 0.3), ("chat", weight)]
            request = MergeRequest(base="base", experts=experts, method="task_arithmetic")
            store.merge(store.plan(request).plan, name="merged")
    (tmp_path / "works.py").write_text(WORKS)
    return tmp_path


def test_the_page(place: Path) -> None:
    """Each command succeeds; the expert, its layer, and the first bad position are found."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("MSTORE_STORE", None)
    told: list[str] = []
    for line in shell_lines(PAGE):
        done = subprocess.run(
            ["bash", "-c", line.replace("mstore ", f"{sys.executable} -m mstore_cli ", 1)],
            cwd=place,
            env=environment,
            text=True,
            capture_output=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        told.append(done.stdout)
    shown = PAGE.split("\n```\n\n```\n", 1)[1].split("```", 1)[0]
    assert told[1] == shown
    assert "to blame: chat in model.layers.2; all else is good" in told[2]
    with Store.open(place / ".mstore") as store:
        first = store["merged~1"].id
        found = f"{first.short} is the first bad snapshot: a merge of code, math, chat"
        assert found in told[3]
        assert "weight of chat: 0.3, was 0.02" in told[3]
        assert "which expert broke it: mstore bisect run --experts merged -- python /" in told[3]
        assert not [name for name in store.ref_ids() if name.startswith("candidates/")]
