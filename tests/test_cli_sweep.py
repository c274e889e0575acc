"""`mstore plan --sweep`, the options behind a plan's criteria, and `mstore plans`."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_runs import Program, run_once
from test_cli_commands import SHAREABLE, write_model

from mstore_cli.keys import DOCUMENTS, OBJECTS, keys_of


@pytest.fixture(scope="module")
def mstore(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """A store with a base and two experts.  Tests that use it may add plans."""
    root = tmp_path_factory.mktemp("family")
    program = Program(root / "store")
    program.succeed("init", "--block-size", "64KiB")
    moved: dict[str, tuple[str, ...]] = {"base": (), "math": ("layer",), "code": ("layer", "norm")}
    for seed, (name, tensors) in enumerate(moved.items()):
        path = write_model(root / name, seed=seed, moved=tensors)
        base = () if name == "base" else ("--base", "tiny/base")
        program.succeed("add", path, "--name", f"tiny/{name}", *base)
    return program


def test_sweep_json(mstore: Program) -> None:
    """--sweep --json prints the keys of docs/cli.md, and points that plans agree with."""
    found = mstore.succeed("plan", *SHAREABLE, "--sweep", "--json").document
    assert list(found) == [key.name for key in DOCUMENTS["plan --sweep"]]
    names = [key.name for key in keys_of(OBJECTS["sweep point"])]
    assert all(list(point) == names for point in found["points"])
    assert [point["share"] for point in found["points"]] == [n / 100 for n in range(5, 101, 5)]
    plan = mstore.succeed("plan", *SHAREABLE, "--budget", "40%", "--json").document
    point = found["points"][7]
    for name in ("budget_bytes", "planned_expert_bytes", "error_bound", "error_estimate"):
        assert point[name] == plan[name]
    assert all(point["measured_error"] is None for point in found["points"])


def test_sweep_for_people(mstore: Program, tmp_path: Path) -> None:
    """A line a budget; --measure adds a column and says what it read, --svg draws."""
    plain = mstore.succeed("plan", *SHAREABLE, "--sweep").lines
    assert len([line for line in plain if line.lstrip()[:1].isdigit()]) == 20
    assert "REALLY LOST" not in plain[0]
    picture = tmp_path / "sweep.svg"
    done = mstore.succeed("plan", *SHAREABLE, "--sweep", "--measure", "--svg", picture)
    assert "REALLY LOST" in done.lines[0]
    assert any(line.startswith("measuring read ") for line in done.lines)
    assert "certified bound" in picture.read_text()
    assert str(picture) in done.out


@pytest.mark.rest
def test_a_sweep_of_a_lazy_store_has_seconds(mstore: Program, tmp_path: Path) -> None:
    """Where blocks are only at a remote, a sweep shows how much of them each plan needs, and with
    --rate how long that takes to come; elsewhere it does not."""
    url = (tmp_path / "remote").as_uri()
    mstore.succeed("remote", "add", "origin", url)
    mstore.succeed("push", "origin", "--all")
    mstore.succeed("remote", "rm", "origin")
    lazy = Program(tmp_path / "lazy")
    assert run_once(["clone", "--lazy", url, str(lazy.store)]).status == 0
    link = ["--rate", "8Mbit", "--latency", "100ms"]
    told = lazy.succeed("plan", *SHAREABLE, "--sweep", *link).lines
    assert "TO DOWNLOAD" in told[0]
    assert "TAKES" in told[0]
    points = lazy.succeed("plan", *SHAREABLE, "--sweep", "--json").document["points"]
    sizes = [point["bytes_not_here"] for point in points]
    assert sizes == sorted(sizes)
    assert 0 < sizes[0] < sizes[-1]
    seconds = [float(line.split(" s ")[0].split()[-1]) for line in told[1:21]]
    for size, took in zip(sizes, seconds, strict=True):
        assert size / 1e6 + 0.1 <= took + 0.01 <= size / 1e6 + 0.5
    assert "to download" in lazy.succeed("plan", *SHAREABLE).out
    assert "TO DOWNLOAD" not in mstore.succeed("plan", *SHAREABLE, "--sweep").lines[0]


@pytest.mark.parametrize(
    "line",
    [
        ["--sweep", "--budget", "30%"],
        ["--sweep", "--max-error", "0.1"],
        ["--sweep", "-o", "plan.json"],
        ["--measure"],
        ["--rate", "200Mbit"],
        ["--sweep", "--rate", "fast"],
        ["--sweep", "--rate", "200Mbit", "--latency", "20"],
        ["--svg", "x.svg"],
    ],
)
def test_options_that_do_not_go_together(line: list[str], mstore: Program) -> None:
    """A sweep sets budgets itself; measuring and drawing need a sweep: wrong usage."""
    assert mstore("plan", *SHAREABLE, *line).status == 2


def test_criteria_reach_the_plan(mstore: Program) -> None:
    """The options are in the plan as asked, on `plan` and on `merge`, and in what people read."""
    options = ["--score", "random", "--only", "la*", "--only", "norm", "--skip", "no*"]
    options += ["--per-expert-budget", "30%", "--top-p", "50%"]
    plan = mstore.succeed("plan", *SHAREABLE, *options, "--json").document
    assert (plan["score"], plan["only"], plan["skip"]) == ("random", ["la*", "norm"], ["no*"])
    assert plan["top_p"] == 0.5
    assert plan["expert_budget_bytes"] == int(0.3 * plan["full_expert_bytes"])
    merged = mstore.succeed("merge", "--name", "tiny/m", *SHAREABLE, *options, "--json").document
    assert merged["plan"] == plan["plan"]
    text = mstore.succeed("plan", *SHAREABLE, *options).out
    for word in ("random", "la* norm", "no*", "0.5 of the blocks", "to read now"):
        assert word in text
    assert mstore("merge", "--plan", plan["plan"], "--name", "x", "--top-p", "0.5").status == 2


@pytest.mark.parametrize("text", ["half", "%", "20%%", "", "0x1p-2"])
def test_shares_that_are_none(text: str, mstore: Program) -> None:
    """--top-p takes 20% or 0.2."""
    done = mstore("plan", *SHAREABLE, "--top-p", text)
    assert done.status == 2
    assert "--top-p 20% or --top-p 0.2" in done.err


def test_plans(mstore: Program, tmp_path: Path) -> None:
    """`plans` lists what was planned, and what it lists can be merged; an empty store says so."""
    plan = mstore.succeed("plan", *SHAREABLE, "--budget", "60%", "-q").lines
    assert plan[0] in mstore.succeed("plans", "-q").lines
    assert any(plan[0].startswith(line.split()[0]) for line in mstore.succeed("plans").lines[1:])
    mstore.succeed("merge", "--plan", plan[0], "--name", "tiny/listed")
    empty = Program(tmp_path / "empty")
    empty.succeed("init")
    assert "no plans yet" in empty.succeed("plans").out
    assert empty.succeed("plans", "--json").document == {"plans": []}
