"""Methods that draw by rank within rows, and the rescaling that restores L1 norms."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from checkpoints import write_safetensors
from hypothesis import given
from hypothesis import strategies as st

from mstore import MergeRequest, Store
from mstore.merge.arithmetic import masks
from mstore.merge.arithmetic.masks import mask_key
from mstore.models.stats.chunks import whole_rows
from mstore.terms.errors import BadRequest

BLOCK = 1 << 16
SHAPES = {
    "square": (260, 128),  # rows of which several make a block
    "odd": (600, 96),  # rows that end within blocks
    "long": (2, 32768),  # rows of several blocks
    "flat": (20_000,),
    "column": (17_000, 1),
    "cube": (6, 50, 20),
}
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("della", {"density": 0.4, "epsilon": 0.2, "seed": 5}),
    ("della", {"density": 0.7, "rescale": False, "lambda": 0.6, "normalize": False}),
    ("della_linear", {"density": (0.3, 0.8), "epsilon": (0.1, 0.15), "normalize": True}),
    ("della_linear", {"density": (1.0, 0.5)}),
    ("dare_ties", {"density": 0.3, "rescale": "l1"}),
    ("dare_linear", {"density": (0.3, 1.0), "rescale": "l1", "seed": 9}),
]


@dataclasses.dataclass
class Family:
    """A store with a base and two experts, one of another type."""

    store: Store
    base: dict[str, Any]
    experts: list[dict[str, Any]]

    def reference(self, method: str, given: dict[str, Any], name: str) -> Any:
        sides = [expert[name] for expert in self.experts]
        return reference.merge(method, given, [1.0, 0.5], self.base[name], sides, tensor=name)

    def request(self, method: str, given: dict[str, Any]) -> MergeRequest:
        experts = [("e0", 1.0), ("e1", 0.5)]
        return MergeRequest(base="base", experts=experts, method=method, parameters=given)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    root = tmp_path_factory.mktemp("della")
    rng = np.random.default_rng(3)
    kinds = ("BF16", "BF16", "F32")
    members: list[dict[str, Any]] = [{}, {}, {}]
    for name, shape in SHAPES.items():
        base = rng.normal(0, 1, shape).astype(reference.DTYPES["BF16"])
        members[0][name] = base
        for member, kind in zip(members[1:], kinds[1:], strict=True):
            moved = base.astype(np.float32) + rng.normal(0, 0.1, shape).astype(np.float32)
            member[name] = moved.astype(reference.DTYPES[kind])
    with Store.init(root / "store", block_size=BLOCK) as store:
        for name, kind, tensors in zip(("base", "e0", "e1"), kinds, members, strict=True):
            (root / name).mkdir()
            write_safetensors(
                root / name / "model.safetensors",
                [(one, kind, SHAPES[one], tensors[one].tobytes()) for one in SHAPES],
            )
            store.add(root / name, name=name)
        yield Family(store, members[0], members[1:])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("method", "given"), METHODS, ids=str)
def test_it_equals_the_reference(family: Family, method: str, given: dict[str, Any]) -> None:
    """Rows of any length, types and own values of experts: the reference's bits; replayed."""
    store = family.store
    plan = store.plan(family.request(method, given))
    store.merge(plan, name="merged")
    for name in SHAPES:
        found, wanted = store["merged"].tensor(name), family.reference(method, given, name)
        assert np.array_equal(found.view(np.uint16), wanted.view(np.uint16)), name
    assert store.replay("merged").same
    store.merge(plan, name="virtual", virtual=True)
    for name in SHAPES:
        assert np.array_equal(store["virtual"].tensor(name), store["merged"].tensor(name)), name
    for one in store.blame("merged").tensors:
        assert sum(share.share or 0 for share in one.experts) == pytest.approx(1, abs=1e-5)
    assert store.import_plan(store.export_plan(str(plan.plan))).plan == plan.plan


@pytest.mark.parametrize(("method", "given"), [METHODS[2], METHODS[5]], ids=str)
def test_a_bound_holds_under_a_budget(family: Family, method: str, given: dict[str, Any]) -> None:
    """What is left out of a sum of drawn deltas has a certified bound; the budget is kept."""
    store, asked = family.store, family.request(method, given)
    whole = dataclasses.replace(asked, dtype="F32")
    store.merge(store.plan(whole), name="whole")
    plan = store.plan(dataclasses.replace(whole, budget="50%"))
    assert 0 < plan.planned_expert_bytes <= plan.full_expert_bytes / 2
    merged = store.merge(plan, name="half")
    assert merged.expert_bytes_read + merged.memo_expert_bytes == plan.planned_expert_bytes
    gaps = (store["half"].tensor(n) - store["whole"].tensor(n) for n in SHAPES)
    error = sum(float((gap.astype(np.float64) ** 2).sum()) for gap in gaps) ** 0.5
    norm = sum(float((b.astype(np.float64) ** 2).sum()) for b in family.base.values()) ** 0.5
    assert plan.error_bound is not None
    assert 0 < error / norm <= plan.error_bound


def test_norms_are_restored_and_remembered(family: Family) -> None:
    """The kept part of a delta gets the whole delta's L1 norm; the norms are measured once."""
    store = family.store
    asked = MergeRequest(
        base="base",
        experts=["e1"],
        method="della_linear",
        parameters={"density": 0.5, "seed": 77},
        dtype="F32",
    )
    with pytest.raises(BadRequest, match="not all are known"):
        store.plan(dataclasses.replace(asked, analyze=False))
    store.merge(store.plan(asked), name="restored")
    for name in ("square", "flat"):
        base = family.base[name].astype(np.float32)
        whole = np.abs(family.experts[1][name] - base).sum(dtype=np.float64)
        moved = np.abs(store["restored"].tensor(name) - base).sum(dtype=np.float64)
        assert moved == pytest.approx(whole, rel=1e-5)
    store.plan(dataclasses.replace(asked, analyze=False, budget="70%"))


def test_larger_elements_are_kept_more_often() -> None:
    """Over many draws, the share of kept elements rises from density - epsilon to + epsilon."""
    sizes = np.tile(np.linspace(0, 1, 50, dtype=np.float32), 4000)
    kept = masks.ranked(sizes, mask_key(1, 0, "t"), 0, 50, 0.5, 0.3).reshape(-1, 50)
    share = kept.mean(axis=0)
    assert np.allclose(share, np.linspace(0.2, 0.8, 50), atol=0.04)


@given(
    st.integers(1, 40),
    st.integers(1, 60),
    st.floats(0.05, 0.9),
    st.integers(0, 2**32),
    st.integers(0, 20),
)
def test_ranks_are_those_of_the_reference(
    rows: int, length: int, density: float, seed: int, skipped: int
) -> None:
    """Any rows, from any row on: the masks of the reference, ties too."""
    epsilon = min(density, 1 - density) / 2
    rng = np.random.default_rng(seed)
    sizes = np.abs(rng.integers(-3, 4, rows * length)).astype(np.float32)
    wanted = reference.by_rank(sizes, length, density, epsilon)
    first = skipped * length
    drawn = reference.draws(seed, 0, "t", first + sizes.size)[first:].astype(np.uint64)
    kept = masks.ranked(sizes, mask_key(seed, 0, "t"), first, length, density, epsilon)
    assert np.array_equal(kept, drawn < np.rint(wanted * 2.0**32))


def test_rows_that_are_ranked_in_turns() -> None:
    """More rows than are ranked at a time: each element has the draw of its place."""
    sizes = np.abs(np.random.default_rng(2).normal(0, 1, 1500 * 100)).astype(np.float32)
    wanted = reference.by_rank(sizes, 100, 0.5, 0.2)
    drawn = reference.draws(4, 0, "t", 300 + sizes.size)[300:].astype(np.uint64)
    kept = masks.ranked(sizes, mask_key(4, 0, "t"), 300, 100, 0.5, 0.2)
    assert np.array_equal(kept, drawn < np.rint(wanted * 2.0**32))


def test_a_result_is_that_of_its_rows(tmp_path: Path) -> None:
    """The same blocks in rows of another length have other ranks: no remembered result is taken."""
    rng = np.random.default_rng(6)
    base = rng.normal(0, 1, 6000).astype(np.float32)
    expert = (base + rng.normal(0, 0.1, 6000)).astype(np.float32)
    parameters = {"density": 0.5, "rescale": False}
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        for rows, shape in (("long", (6, 1000)), ("short", (1000, 6))):
            for name, values in (("base", base), ("expert", expert)):
                directory = tmp_path / rows / name
                directory.mkdir(parents=True)
                tensors = [("w", "F32", shape, values.tobytes())]
                write_safetensors(directory / "model.safetensors", tensors)
                store.add(directory, name=f"{rows}/{name}")
            asked = MergeRequest(
                base=f"{rows}/base",
                experts=[f"{rows}/expert"],
                method="della_linear",
                parameters=parameters,
            )
            store.merge(store.plan(asked), name=f"{rows}/merged")
            sides = base.reshape(shape), [expert.reshape(shape)]
            wanted = reference.merge("della_linear", parameters, [1.0], *sides, tensor="w")
            assert np.array_equal(store[f"{rows}/merged"].tensor("w"), wanted), rows


@pytest.mark.parametrize(
    ("chunk", "shape", "wanted"),
    [(2048, (96, 128), 2048), (2048, (60, 100), 6144), (2048, (5, 5000), 26624), (64, (640,), 640)],
)
def test_chunks_of_whole_rows(chunk: int, shape: tuple[int, ...], wanted: int) -> None:
    """A chunk is whole blocks and whole rows, or the whole tensor where that is less."""
    assert whole_rows(chunk, shape) == wanted


@pytest.mark.parametrize(
    ("method", "given", "match"),
    [
        ("della", {"density": 0.1}, "between 0 and 1"),
        ("della", {"density": 0.9, "epsilon": 0.2}, "between 0 and 1"),
        ("della_linear", {"density": (0.5, 0.05)}, "between 0 and 1"),
        ("dare_ties", {"rescale": "l2"}, "or l1"),
        ("dare_ties", {"rescale": 0.5}, "true or false"),
    ],
)
def test_senseless_values_are_refused(
    family: Family, method: str, given: dict[str, Any], match: str
) -> None:
    """Probabilities stay between 0 and 1, and there is one other way to rescale."""
    with pytest.raises(BadRequest, match=match):
        family.store.plan(family.request(method, given))
