"""The options of `plan` and `merge`, from words to a request."""

from __future__ import annotations

import pytest

from mstore import Budget
from mstore.errors import BadRequest
from mstore_cli.merging import Wanted, make_request, parse_expert, parse_experts, parse_parameters


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
        experts=["a", "b=2"],
        method="ties",
        parameters=["density=0.2"],
        recipe=None,
    )
    request = make_request(
        wanted,
        budget="30%",
        max_error=None,
        dtype=None,
        no_analyze=True,
    )
    assert request.experts == (("a", 1.0), ("b", 2.0))
    assert request.parameters == {"density": 0.2}
    assert request.budget == Budget(0.3)
    assert not request.analyze
