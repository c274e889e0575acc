"""The survey's own comparisons: twins among block lists, and names among patterns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstore.merge.planning.costs import twins
from mstore.merge.planning.tensors import left_out_names
from mstore.terms.errors import BadRequest

NAMES = {name: name for name in ("model.a.w", "model.b.w", "head", "lm[1]")} | {"tied": "head"}


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 2), st.data())
def test_twins(experts: int, chunks: int, blocks: int, data: st.DataObject) -> None:
    """The first expert of the same type whose blocks are all the same; mostly oneself."""
    pool = np.random.default_rng(0).integers(1, 1 << 62, (3, 4), dtype=np.uint64)
    draws = st.lists(st.integers(0, 2), min_size=blocks, max_size=blocks)
    picked = [
        [data.draw(draws, label=f"{k}, {chunk}") for chunk in range(chunks)] for k in range(experts)
    ]
    sides = [np.array([pool[row].reshape(-1) for row in side]) for side in picked]
    dtypes = [data.draw(st.sampled_from(["BF16", "F16"])) for _ in range(experts)]
    found = twins(sides, dtypes)
    for k in range(experts):
        for chunk in range(chunks):
            wanted = next(
                j
                for j in range(k + 1)
                if dtypes[j] == dtypes[k] and picked[j][chunk] == picked[k][chunk]
            )
            assert found[k, chunk] == wanted


def test_blocks_that_collide_in_the_key_are_no_twins() -> None:
    """Blocks that agree in the words that are sorted by, and nowhere else, are told apart."""
    one = np.array([[1, 2, 3, 4]], dtype=np.uint64)
    other = np.array([[1, 2, 3, 5]], dtype=np.uint64)
    assert twins([one, other, one], ["F32"] * 3)[:, 0].tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("only", "skip", "left_out"),
    [
        ([], [], set()),
        (["model.*"], [], {"head", "lm[1]"}),
        (["model.*", "head"], ["*.b.*"], {"lm[1]", "model.b.w"}),
        ([], ["lm[[]1]"], {"lm[1]"}),
        ([], ["tied"], {"head"}),
        (["tied"], [], {"model.a.w", "model.b.w", "lm[1]"}),
        (["head"], ["tied"], {"model.a.w", "model.b.w", "lm[1]", "head"}),
    ],
)
def test_patterns(only: list[str], skip: list[str], left_out: set[str]) -> None:
    """What `only` does not name and `skip` does is left out, by the first of its names."""
    assert set(left_out_names(NAMES, only, skip, base="base")) == left_out


@pytest.mark.parametrize(("only", "skip"), [(["modle.*"], []), (["head"], ["lm[1]"])])
def test_a_pattern_without_a_match(only: list[str], skip: list[str]) -> None:
    """A pattern that no name matches is named, with its option."""
    with pytest.raises(BadRequest, match="no tensor's name matches") as refused:
        left_out_names(NAMES, only, skip, base="base")
    assert refused.value.where == ("skip" if skip else "only")
    assert refused.value.hint == "store.tensors('base')"
