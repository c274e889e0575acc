"""What units are ranked by."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mstore.errors import BadRequest
from mstore.ids import TensorId
from mstore.merge.methods.combinations.elected import Elected, agreement, dilution
from mstore.merge.methods.registry import METHODS, operation
from mstore.merge.methods.selections.trimmed import Trimmed
from mstore.merge.planning.scores import SCORES, lottery, score_of, seed
from mstore.stats.chunk import CHUNK, pack_sketch


def rows(*directions: list[float]) -> np.ndarray:
    """Rows whose sketches point there, one a chunk."""
    made = np.zeros(len(directions), dtype=CHUNK)
    for row, direction in zip(made, directions, strict=True):
        sums = np.zeros(32)
        sums[: len(direction)] = direction
        row["sketch"], row["sketch_exponent"] = pack_sketch(sums)
    return made


def test_defaults() -> None:
    """Unless asked: trimmed where a method trims, norm elsewhere."""
    found = {
        (method, density): score_of(operation(method, {"density": density}, [1.0]), None)
        for method in ("ties", "dare_ties", "dare_linear")
        for density in (0.5, 1)
    }
    assert {key for key, score in found.items() if score == "trimmed"} == {("ties", 0.5)}
    assert set(found.values()) == {"trimmed", "norm"}
    assert score_of(operation("linear", {}, [1.0]), None) == "norm"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("score", [*SCORES, "taste"])
def test_scores_that_a_method_has(method: str, score: str) -> None:
    """trimmed is for methods that trim, conflict for those that elect signs, others for all."""
    own = METHODS[method]
    trims = issubclass(own.select, Trimmed)
    elects = isinstance(own.combine, Elected)
    needed = {one.name: 0.5 for one in own.parameters if one.default is None}
    # Three: of fewer, two cannot need an element by default.
    weights = [1.0] * (own.experts or 3)
    missing = {"trimmed": not trims, "conflict": not elects, "taste": True}
    if missing.get(score, False):
        with pytest.raises(BadRequest):
            score_of(own.apply(needed, weights), score)
    else:
        assert score_of(own.apply(needed, weights), score) == score


def test_agreement() -> None:
    """1 along the consensus, 1/2 across it, 0 against it; 1 where no direction is known."""
    heavy, along, across, against = [4.0], [1.0], [0.0, 1e-3], [-1.0]
    sides = [rows(heavy, heavy), rows(along, []), rows(across, heavy), rows(against, heavy)]
    found = agreement(sides, [1.0, 1.0, 1.0, 1.0])
    assert found[:, 0] == pytest.approx([1, 1, 0.5, 0], abs=1e-3)
    assert found[1, 1] == 1
    assert agreement(sides, [1.0, 1.0, 1.0, -1.0])[3, 0] == pytest.approx(1)


def test_agreement_of_huge_and_tiny_deltas() -> None:
    """Cosines come out as such whatever the scale of the deltas."""
    for scale in (2.0**-120, 1.0, 2.0**120):
        found = agreement([rows([3 * scale]), rows([0, 4 * scale])], [1.0, 1.0])
        assert found[:, 0] == pytest.approx([(1 + 3 / 5) / 2, (1 + 4 / 5) / 2])


def test_dilution() -> None:
    """A light unit counts what it takes from heavier ones, by the share of places that it keeps."""
    squares = np.array([[16.0, 4.0, np.inf], [1.0, 4.0, 8.0], [0.0, 1.0, 2.0]])
    kept = np.array([[0.5, 0.5, 0.5], [0.5, 0.5, 0.5], [0.25, 0.25, 0.25]])
    found = dilution(squares, kept)
    assert found[:, 0].tolist() == [0.0, 1.0, 0.25 * 17 / 8]
    assert found[:, 1].tolist() == [0.0, 0.0, 0.25 * 8 / 8]
    assert found[:, 2].tolist()[1:] == [0.0, 0.25]


def test_lottery() -> None:
    """Draws follow from ids and chunk alone, differ between all of them, and fill [0, 1)."""
    base, expert, other = (TensorId.of(name) for name in (b"base", b"expert", b"other"))
    assert len({seed(base, expert), seed(base, other), seed(other, expert)}) == 3
    seeds = np.full(20000, seed(base, expert), dtype=np.uint64)
    drawn = lottery(seeds, np.arange(-1, 19999))
    assert len(set(drawn.tolist())) == 20000
    assert 0 <= drawn.min() < 0.01 < 0.99 < drawn.max() < 1
    assert math.isclose(drawn.mean(), 0.5, abs_tol=0.01)
    assert lottery(seeds[:1], np.array([5]))[0] == drawn[6]
