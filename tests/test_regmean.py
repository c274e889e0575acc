"""regmean and aim: Gram matrices at rest, and what is refused.  The arithmetic is that of
`tests/test_every_method.py`; real models are in conformance."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import families
import gram_reference
import numpy as np
import pytest
from families import Arrays
from hypothesis import given
from hypothesis import strategies as some
from msgspec import structs

from mstore import MergeRequest, Store
from mstore.merge.arithmetic import grams
from mstore.merge.planning.validate import check_fits
from mstore.store.objects.plan import Plan
from mstore.terms.errors import BadRequest, Incompatible


@given(width=some.integers(1, 40), blocks=some.integers(1, 3), seed=some.integers(0, 999))
def test_what_deltas_are_turned_by(width: int, blocks: int, seed: int) -> None:
    """The matrices have the bits of the reference, add up to 1, and are those of LAPACK within the
    rounding of float32; no singular value is above the norm, which is at most twice as large."""
    rng = np.random.default_rng(seed)
    packed = [gram_reference.packed(rng, width * blocks, width) for _ in range(3)]
    weights, shrink = [1.0, 0.25, 2.0], float(rng.choice([0.0, 0.5, 0.9]))
    found = grams.turns(packed, weights, shrink)
    assert isinstance(found, grams.Turns)
    assert (
        found.matrices.tobytes() == gram_reference.turns(packed, weights, shrink, width).tobytes()
    )
    assert np.allclose(found.matrices.sum(axis=0), np.eye(width), atol=1e-5)
    for block in range(blocks):
        sides = [gram_reference.unpacked(one[block], width) for one in packed]
        own = []
        for (roots, correlations), weight in zip(sides, weights, strict=True):
            shrunk = shrink * correlations + (1 - shrink) * np.eye(width)
            own.append(weight * shrunk * np.outer(roots, roots))
        total = sum(own)
        for k in range(width):
            if total[k, k] == 0:
                for matrix, weight in zip(own, weights, strict=True):
                    matrix[k, k] = weight
        exact = np.array([np.linalg.solve(sum(own).T, one.T).T for one in own])
        size = np.abs(exact).max()
        assert np.abs(found.matrices[:, block] - exact).max() <= 1e-6 * size
    values = np.linalg.svd(found.matrices.astype(np.float64), compute_uv=False)[..., 0].max(axis=1)
    assert (values <= found.norms).all()
    assert (found.norms <= 2 * values).all()


def test_a_sum_without_an_inverse_is_named() -> None:
    """Inputs that are one and the same have none: the block is told."""
    width = 4
    sound = gram_reference.packed(np.random.default_rng(0), 2 * width, width)
    ones = np.frombuffer(np.ones(width, "<f4").tobytes() + bytes([127] * 6), dtype=np.uint8)
    packed = [np.stack([one[0], ones]) for one in (sound, sound)]
    with pytest.raises(Incompatible, match="inputs 4 to 7 vary together"):
        grams.turns(packed, [1.0, 1.0], 1.0)
    assert isinstance(grams.turns(packed, [1.0, 1.0], 0.9), grams.Turns)


def test_sizes_of_blocks_are_told_apart() -> None:
    """Each number of bytes is that of one width, or of none."""
    sizes = {grams.bytes_of(width): width for width in range(1, 300)}
    assert len(sizes) == 299
    assert {size: grams.width_of(size) for size in range(20000)} == {
        size: sizes.get(size) for size in range(20000)
    }


# -- what is refused -----------------------------------------------------------------------------


class Place:
    """A base, two experts and Gram matrices of blocks of 8, in a store."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.store = Store.init(root / "store", block_size=families.BLOCK)
        rng = np.random.default_rng(2)
        self.base: Arrays = {
            "w": families.cast(rng.standard_normal((40, 20)), "F32"),
            "v": families.cast(rng.standard_normal((40, 20)), "F32"),
            "n": families.cast(rng.standard_normal(20), "F32"),
        }
        self.grams = [{n: gram_reference.packed(rng, 20, 8) for n in ("w", "v")} for _ in range(2)]
        self.add("base", self.base)
        for k in range(2):
            moved = {n: one + np.float32(0.1) * (k + 1) for n, one in self.base.items()}
            self.add(f"e{k}", moved)
            self.add(f"g{k}", self.grams[k])

    def add(self, name: str, arrays: Arrays) -> str:
        self.store.add(families.write_checkpoint(self._root / name, arrays), name=name)
        return name

    def plan(self, *companions: str, **options: Any) -> Any:
        pairs = zip(("gram:e0", "gram:e1"), companions, strict=True)
        own: dict[str, Any] = {"parameters": {"block": 8}, "companions": dict(pairs)}
        own |= {"base": "base", "experts": ["e0", "e1"], "method": "regmean"}
        request = MergeRequest(**own | options)
        return self.store.plan(request)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    found = Place(tmp_path_factory.mktemp("grams"))
    yield found
    found.store.close()


def test_blocks_of_another_size_are_refused(place: Place) -> None:
    """With the size that the matrices have."""
    with pytest.raises(
        Incompatible, match="has 3 blocks of 8, and the merge takes 1 of 20"
    ) as refused:
        place.plan("g0", "g1", parameters={"block": "full"})
    assert "'block': 8" in str(refused.value.hint)


def test_what_is_no_gram_matrix(place: Place) -> None:
    """A model, a root that is no number, and bytes of no block are refused by the tensor."""
    with pytest.raises(Incompatible, match=r"is F32 \[40, 20\]: a Gram matrix has the shape \[any"):
        place.plan("g0", "e1")
    wild = {name: one.copy() for name, one in place.grams[1].items()}
    wild["v"][0, :4] = np.frombuffer(np.float32(np.nan).tobytes(), dtype=np.uint8)
    with pytest.raises(Incompatible, match="roots that are no numbers") as refused:
        place.plan("g0", place.add("wild", wild))
    assert refused.value.where == "v"
    cut = {name: np.ascontiguousarray(one[:, :-1]) for name, one in place.grams[1].items()}
    with pytest.raises(Incompatible, match="blocks of no size that one has"):
        place.plan("g0", place.add("cut", cut))


def test_what_only_some_experts_tell_of_is_refused(place: Place) -> None:
    """A tensor has the matrices of all experts, or of none: then it is averaged."""
    fewer = place.add("fewer", {"w": place.grams[1]["w"]})
    with pytest.raises(Incompatible, match="1 of the 2 Gram matrices have this tensor") as refused:
        place.plan("g0", fewer)
    assert refused.value.where == "v"
    both = [place.add(f"few{k}", {"w": place.grams[k]["w"]}) for k in range(2)]
    place.store.merge(place.plan(*both), name="merged")
    found = place.store["merged"].tensor("v")
    assert np.allclose(found, place.base["v"] + 0.15, atol=1e-6)


def test_a_plan_with_another_companion_is_refused(place: Place) -> None:
    """What has no Gram matrices is none, in a plan from elsewhere, too."""
    catalog = place.store._catalog
    plan = catalog.record(Plan, place.plan("g0", "g1").plan)
    check_fits(catalog, plan)
    *others, last = plan.inputs
    changed = structs.replace(last, manifest=bytes(place.store["e0"].manifest))
    with pytest.raises(BadRequest, match="does not fit this tensor"):
        check_fits(catalog, structs.replace(plan, inputs=(*others, changed)))


def test_the_gram_matrix_of_another_model(place: Place) -> None:
    """It is told by its names, and by how many inputs it is of."""
    rng = np.random.default_rng(4)
    named = place.add("named", {"other": gram_reference.packed(rng, 20, 8)})
    with pytest.raises(Incompatible, match="it is the Gram matrix of another model") as refused:
        place.plan("g0", named)
    assert refused.value.where == "named"
    small = place.add("small", {n: gram_reference.packed(rng, 8, 8) for n in ("w", "v")})
    with pytest.raises(Incompatible, match="of 1 to 8 inputs, and the layer has 20"):
        place.plan("g0", small)
    full = {n: gram_reference.packed(rng, 20, 20) for n in ("w", "v")}
    with pytest.raises(Incompatible, match="has one block, and the merge takes 3 of 8") as refused:
        place.plan(place.add("full0", full), place.add("full1", full))
    assert "'block': 'full'" in str(refused.value.hint)


def test_weights_divide(place: Place) -> None:
    """None is negative, and one at least is not zero."""
    for weights in ((1.0, -0.5), (0.0, 0.0)):
        pairs = list(zip(("e0", "e1"), weights, strict=True))
        with pytest.raises(BadRequest, match="must not be negative, nor all zero"):
            place.plan("g0", "g1", experts=pairs)


def test_it_needs_a_matrix_for_each_expert(place: Place) -> None:
    """The refusal says how one is given."""
    request = MergeRequest(base="base", experts=["e0", "e1"], method="regmean")
    with pytest.raises(BadRequest, match="takes a Gram matrix for each expert") as refused:
        place.store.plan(request)
    assert "gram:e0" in str(refused.value.hint)


def test_magnitudes_are_numbers_from_0_on(place: Place) -> None:
    """A negative one is refused by the tensor."""
    vector = {"w": families.cast(-np.ones(20), "F32")}
    request = MergeRequest(
        base="base",
        experts=["e0"],
        method="aim",
        companions={"activation:base": place.add("negative", vector)},
    )
    with pytest.raises(Incompatible, match="numbers from 0 on") as refused:
        place.store.plan(request)
    assert refused.value.where == "w"


def test_workers_elsewhere_make_the_same(place: Place) -> None:
    """Gram matrices and magnitudes travel with the tasks to other processes."""
    rng = np.random.default_rng(6)
    place.add("known", {n: families.cast(rng.random(20), "F32") for n in ("w", "v")})
    aim = MergeRequest(
        base="base", experts=["e0"], method="aim", companions={"activation:base": "known"}
    )
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        for plan in (place.plan("g0", "g1"), place.store.plan(aim)):
            here = place.store.merge(plan, name="here", memo=False)
            there = place.store.merge(plan, name="there", memo=False, cluster=pool)
            assert there.manifest == here.manifest
