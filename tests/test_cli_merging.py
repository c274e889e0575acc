"""The options of `plan` and `merge`, from words to a request."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from adapters import Adapter
from cli_runs import Program
from families import layered, read_checkpoint

from mstore import Budget
from mstore.api.reports import MergeReport
from mstore.terms.errors import BadRequest
from mstore_cli.merging import Wanted, parse_expert, parse_experts, parse_parameters
from mstore_cli.plan_output import error_fields


@pytest.mark.parametrize(
    ("text", "expert"),
    [
        ("llama/math", ("llama/math", 1.0)),
        ("llama/math=0.5", ("llama/math", 0.5)),
        ("math~2=-1", ("math~2", -1.0)),
        ("math@{1}=1e-2", ("math@{1}", 0.01)),
    ],
)
def test_expert(text: str, expert: tuple[str, float]) -> None:
    """An expert is a revision, with a weight behind the equals sign or 1."""
    assert parse_expert(text) == expert


@pytest.mark.parametrize("text", ["", "=1", "math=", "math=x", "math=nan", "math=-inf", "a=b=1"])
def test_bad_expert(text: str) -> None:
    """A weight that is no finite number, and a weight without a ref, are refused by name."""
    with pytest.raises(BadRequest) as caught:
        parse_expert(text)
    assert caught.value.where == "--expert"


def test_the_last_snapshots_of_a_branch() -> None:
    """REF@{N..M} is an expert for each, with one weight; more than 1000 are refused."""
    assert parse_experts("run@{0..2}") == [(f"run@{{{n}}}", 1.0) for n in range(3)]
    assert parse_experts("a/run@{3..3}=0.5") == [("a/run@{3}", 0.5)]
    assert parse_experts("run@{1}=2") == [("run@{1}", 2.0)]
    for text in ("run@{2..1}", "run@{0..1000}", "run@{0..2}=x"):
        with pytest.raises(BadRequest) as caught:
            parse_experts(text)
        assert caught.value.where == "--expert"


def test_parameters() -> None:
    """Values are what they look like: whole numbers, numbers, truth, else text."""
    parsed = parse_parameters(["seed=7", "density=0.2", "normalize=True", "x=false", "mode=a=b"])
    assert parsed == {"seed": 7, "density": 0.2, "normalize": True, "x": False, "mode": "a=b"}
    assert [type(value) for value in parsed.values()] == [int, float, bool, bool, str]


@pytest.mark.parametrize("texts", [["density"], ["=1"], [""], ["k=1", "k=2"]])
def test_bad_parameters(texts: list[str]) -> None:
    """A parameter without a key or a value, or given twice, is refused."""
    with pytest.raises(BadRequest) as caught:
        parse_parameters(texts)
    assert caught.value.where == "--param"


def test_request() -> None:
    """The options make one request; what was not said is left to the library."""
    wanted = Wanted(
        base="llama/base",
        expert=["a", "b=2"],
        method="ties",
        param=["density=0.2"],
        budget="30%",
        no_analyze=True,
    )
    request = wanted.limits()
    assert request.experts == (("a", 1.0), ("b", 2.0))
    assert request.parameters == {"density": 0.2}
    assert request.budget == Budget(0.3)
    assert not request.analyze


# -- patterns --------------------------------------------------------------------------------------


def build(root: Path) -> None:
    """A base, three fine-tunes and two adapters of it, all below m/."""
    program = Program(root / "store")
    program.succeed("init", "--block-size", "64KiB")
    family = layered().write(root / "family")
    paths = [family / one for one in ("base", "e0", "e1", "e2")]
    for tokenizer in family.rglob("tokenizer*"):
        tokenizer.unlink()
    program.succeed("add", *paths, "--name-prefix", "m/", "--base", "m/base")
    name, weight = next(iter(sorted(read_checkpoint(family / "base").items())))
    rows, columns = weight.shape
    for number in range(2):
        factors = np.ones((rows, 2), "f4"), np.ones((2, columns), "f4")
        made = Adapter({name.removesuffix(".weight"): factors})
        program.succeed("add", made.write(root / f"lora{number}"), "--name", f"m/lora{number}")


@pytest.fixture
def mstore(copied: Path) -> Program:
    return Program(copied / "store")


def told_experts(mstore: Program, ref: str) -> list[str]:
    parents = mstore.succeed("show", ref, "--json").document["parents"]
    return [name for one in parents if one["role"] == "expert" for name in one["refs"]]


def test_experts_by_a_pattern(mstore: Program) -> None:
    """A pattern is each ref that matches, by name, with one weight; never the base or the result,
    so the same command makes the same merge."""
    line = ("--base", "m/base", "--expert", "m/[be]*=0.5", "--method", "task_arithmetic")
    for word in ("merged", "nothing"):
        done = mstore.succeed("merge", *line, "--name", "m/e9")
        assert done.out.startswith(word)
        assert told_experts(mstore, "m/e9") == ["m/e0", "m/e1", "m/e2"]
    planned = mstore.succeed("plan", *line, "--json").document
    assert planned["experts"] == [[f"m/e{n}", 0.5] for n in (0, 1, 2, 9)]
    checked = mstore.succeed("check-merge", "--base", "m/base", "--expert", "m/[be]*", "--json")
    assert checked.document["experts"] == ["m/e0", "m/e1", "m/e2", "m/e9"]


def test_adapters_by_a_pattern(mstore: Program) -> None:
    """combine-adapters takes patterns, too, and never its own result."""
    line = ("combine-adapters", "--expert", "m/lora*", "--method", "cat", "--name", "m/lora-all")
    for rank in (4, 4):
        assert mstore.succeed(*line, "--json").document["rank"] == rank
    assert told_experts(mstore, "m/lora-all") == ["m/lora0", "m/lora1"]


@pytest.mark.parametrize("pattern", ["x/*", "m/base*", "m/e*@{1}"])
def test_a_pattern_of_nothing(mstore: Program, pattern: str) -> None:
    """A pattern that matches no ref, or none but the base, is an error that names it."""
    for verb in (("plan", "--method", "linear"), ("check-merge",)):
        done = mstore(*verb, "--base", "m/base", "--expert", pattern)
        assert done.status == 1
        assert f"{pattern}: no " in done.err
        assert "ref matches the pattern" in done.err


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (None, ["not known", "none", "none"]),
        (
            0.5,
            ["50 % (estimate)", "0.5 of the base's norm (certified)", "0.5 of the base's norm"],
        ),
    ],
)
def test_errors_that_are_not_known(number: float | None, told: list[str]) -> None:
    """Where an error is no number, no unit follows, nor how it was found."""
    report = SimpleNamespace(error_share_estimate=number, error_bound=number, error_estimate=number)
    assert [text for _, text in error_fields(cast(MergeReport, report))] == told
