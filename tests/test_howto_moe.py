"""docs/howto/moe.md: its commands work, in the page's order, and the mixture generates from a mount
what it generates from a checkout.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hub import Hub, environment
from moe_models import with_words, write
from mount_drivers import on_disk
from small_models import files_of
from test_cli_mount import needs_fuse
from transcripts import shell_lines

from mstore import Store

pytestmark = pytest.mark.rest

tmp_path_factory = on_disk
ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "howto" / "moe.md").read_text()


def recipe(mode: str) -> str:
    """The recipe of the page."""
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert "gate_mode: hidden" in text
    return str(text).replace("gate_mode: hidden", f"gate_mode: {mode}")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory with a store of the page's models, and nothing mounted when the test ends."""
    words = ["<unk>", "<s>", "</s>", *re.findall(r"[\w():.]+", recipe("hidden"))]
    base = with_words(write(tmp_path / "base", "llama", 1), list(dict.fromkeys(words)))
    with Store.init(tmp_path / "store", block_size=1 << 16) as store:
        store.add(base, name="base")
        for seed, name in enumerate(("code", "law"), 2):
            store.add(write(tmp_path / name, "llama", seed, like=base), name=name, base="base")
    yield tmp_path
    for name in ("base-files", "moe-files"):
        if os.path.ismount(tmp_path / name):
            run(tmp_path, f"mstore unmount {name}")


def run(place: Path, line: str, **more: str) -> str:
    """What a command of the page prints."""
    program, *words = shlex.split(line)
    if program == "python":
        words[0] = str(ROOT / words[0])
    own = {"mstore": [sys.executable, "-m", "mstore_cli"], "python": [sys.executable]}
    done = subprocess.run(
        [*own.get(program, [program]), *words],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "MSTORE_STORE": str(place / "store"), **more},
        cwd=place,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def generated(directory: Path) -> Any:
    """Tokens that transformers makes of a model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory)
    said = AutoTokenizer.from_pretrained(directory)("import numpy", return_tensors="pt")
    with torch.no_grad():
        return model.generate(**said, max_new_tokens=12, do_sample=False).tolist()


@needs_fuse
@pytest.mark.parametrize("mode", ["hidden", "lda"])
def test_the_page(mode: str, place: Path) -> None:
    """Each command succeeds; what is mounted is what is checked out; experts come back."""
    (place / "moe.yml").write_text(recipe(mode))
    told = {line: run(place, line) for line in shell_lines(PAGE)}
    (load,) = (text for line, text in told.items() if line.startswith("python"))
    assert "2 for each token" in load
    run(place, "mkdir moe-files")
    run(place, "mstore mount moe moe-files")
    run(place, "mstore checkout moe moe-copy")
    assert files_of(place / "moe-files") == files_of(place / "moe-copy")
    assert generated(place / "moe-files") == generated(place / "moe-copy")
    with Store.open(place / "store") as store:
        for number, name in enumerate(("code", "law")):
            own, back = store[name], store[f"dense/{number}"]
            for tensor in own.tensor_names():
                assert (own.tensor(tensor) == back.tensor(tensor)).all()


def test_the_figures() -> None:
    """The table is what bench/moe_quality.py measured."""
    told = json.loads((ROOT / "bench" / "results" / "moe_quality.json").read_text())["groups"]
    checked = 0
    names = {"one": "1", "one expert for each token": "1", "two": "2"}
    for row in re.findall(r"^\| (.+?) \| (1\..*) \|$", PAGE, re.MULTILINE):
        mode = re.fullmatch(r"mixture, `(\w+)`, (.+)", row[0])
        cells = []
        for group in told.values():
            if mode is not None:
                one = group["mixtures"][f"{mode[1]} {names[mode[2]]}"]
            elif row[0].startswith("best merged"):
                assert len(group["merges"]) == 5
                one = min(group["merges"].values(), key=lambda one: fmean(one["losses"].values()))
            else:
                rows = {"base": "base", "each expert": "dense", "its MLPs": "right"}
                one = group[next(key for start, key in rows.items() if row[0].startswith(start))]
            own = one.get("own")
            cells += [f"{fmean(one['losses'].values()):.3f}"]
            cells += [f"{100 * fmean(own.values()):.0f} %" if own else ""]
        checked += 1
        assert [cell.strip() for cell in row[1].split("|")] == cells
    assert checked == 9


def test_an_export_comes_back(place: Path) -> None:
    """A mixture that was checked out and added again is the same content; so is one from the Hub,
    but for its card.
    """
    (place / "moe.yml").write_text(recipe("random"))
    run(place, "mstore moe --recipe moe.yml --name moe")
    run(place, "mstore checkout moe moe-copy")
    run(place, "mstore add moe-copy --name again")
    hub = Hub()
    hub.xet = place / "cas"
    hub.xet.mkdir()
    more = {**environment(hub.url, place / "hf"), "HF_TOKEN": "hf_good"}
    more["MSTORE_STORE"] = str(place / "store")
    with hub.running():
        run(place, "mstore export moe hf://org/moe", **more)
        run(place, "mstore add hf://org/moe --name there", **more)
    with Store.open(place / "store") as store:
        assert store["again"].manifest == store["moe"].manifest
        for tensor in store["moe"].tensor_names():
            assert (store["there"].tensor(tensor) == store["moe"].tensor(tensor)).all()
    sent = hub.models["org/moe"].tip()
    assert sent["mergekit_moe_config.yml"].decode() == recipe("random")
