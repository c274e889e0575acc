"""docs/howto/search.md: its commands work, in the page's order, on a trained family."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from family_fixture import family
from transcripts import shell_lines

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "howto" / "search.md").read_text()
pytest_plugins = ["family_fixture"]


def recipe() -> str:
    """The page's recipe."""
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return block


def succeed(line: str, directory: Path) -> str:
    """What a command prints in a directory with the store `.mstore`, the family, the examples."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_CONFIG_HOME": str(directory / "config"),
    }
    environment.pop("MSTORE_STORE", None)
    done = subprocess.run(
        ["bash", "-c", line.replace("mstore ", f"{sys.executable} -m mstore_cli ", 1)],
        cwd=directory,
        env=environment,
        text=True,
        capture_output=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


def stored(trained: Path, directory: Path, names: list[str]) -> Path:
    """A directory with a store of a family, and the page's recipe."""
    (directory / "family").symlink_to(trained)
    (directory / "examples").symlink_to(ROOT / "examples")
    (directory / "search.yml").write_text(recipe())
    succeed("mstore init --block-size 64KiB", directory)
    succeed("mstore add family/base --name base", directory)
    for name in names:
        succeed(f"mstore add family/{name} --name {name} --base base", directory)
    return directory


@pytest.mark.rest
def test_the_page(quick_family: family.Family, tmp_path: Path) -> None:
    """A search by tpe and a greedy soup end with merges, which metrics and a page show."""
    place = stored(quick_family.root, tmp_path, ["code", "prose", "arithmetic"])
    # Each trial starts a program that imports torch.
    shorter = [line.replace("--trials 12", "--trials 4") for line in shell_lines(PAGE)]
    told = {line: succeed(line, place) for line in shorter}
    searched, metrics, _, soup = told.values()
    assert "merged best" in searched
    assert re.search(r"trials +4 by tpe, seed 0", searched)
    assert "all 3 experts, weights 1/3" in searched
    assert re.search(r"^best .* [0-9.]+ +[0-9.]+$", metrics, re.MULTILINE)
    assert "The search that it won" in (place / "best.html").read_text()
    assert re.search(r"experts +\w+", soup)
    steps = re.findall(r"^(code|prose|arithmetic) .*[0-9]  (kept|left out)$", soup, re.MULTILINE)
    assert {name for name, _ in steps} == {"code", "prose", "arithmetic"}
    assert steps[0][1] == "kept"


RECIPE = """\
merge_method: task_arithmetic
base_model: base
models:
"""


@pytest.mark.slow
def test_better_than_one_over_k_and_than_each_expert(tmp_path: Path) -> None:
    """Of eight experts, fifty trials find a merge with a better loss on the half that decided
    nothing than weights of 1/8, and than every expert."""
    made = family.train_family(tmp_path / "trained", experts=8, size=family.QUICK)
    names = list(made.experts)
    place = stored(made.root, tmp_path, names)
    weights = "".join(
        f"  - {{model: {name}, parameters: {{weight: {{min: 0, max: 1}}}}}}\n" for name in names
    )
    (place / "search.yml").write_text(RECIPE + weights)
    line = shell_lines(PAGE)[0].replace("--trials 12", "--trials 50 --json")
    found = json.loads(succeed(line, place))
    by_role: dict[str, list[float]] = {}
    for one in found["reported"]:
        by_role.setdefault(one["role"], []).append(one["score"])
    (winner,), (start,), experts = by_role["winner"], by_role["start"], by_role["expert"]
    assert len(experts) == 8
    assert winner < start
    assert winner < min(experts)
