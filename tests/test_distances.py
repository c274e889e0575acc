"""Distances from statistics: what they promise, against the distances that blocks give."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import write_safetensors
from cli_runs import Program
from families import BLOCK
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mstore import Store
from mstore.store.catalog import Catalog

ELEMENTS = 4 * BLOCK // 2 + 100
"""Four blocks and a short one of BF16."""
KINDS = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "F16": np.float16, "F64": np.float64}


def write(path: Path, dtype: str, values: dict[str, np.ndarray]) -> Path:  # type: ignore[type-arg]
    """A checkpoint of these values, in this type."""
    tensors = [
        (name, dtype, one.shape, one.astype(KINDS[dtype]).tobytes()) for name, one in values.items()
    ]
    write_safetensors(path / "m.safetensors", tensors)
    return path


def family(root: Path, dtype: str, seed: int) -> Store:
    """A base and two experts: chunk by chunk, none, one or both of them differ from it."""
    draw = np.random.default_rng(seed)
    elements = ELEMENTS * 2 // np.dtype(KINDS[dtype]).itemsize
    base = {f"t{n}": draw.normal(0, 1, elements) for n in range(4)}
    store = Store.init(root / "store", block_size=BLOCK)
    store.add(write(root / "base", dtype, base), name="base")
    common = {name: draw.normal(0, 1e-1, elements) for name in base}
    for expert in ("one", "two"):
        moved = {}
        for name, values in base.items():
            delta = draw.choice([0.0, 0.5, 1.0]) * common[name] + draw.normal(0, 0.1, elements)
            parts = np.array_split(delta, 5)
            for part in parts:
                if draw.integers(3) == 0:
                    part[:] = 0
            moved[name] = values + np.concatenate(parts)
            if name == "t3":
                # Both experts have the same chunk here, which the base has not.
                moved[name][: BLOCK // 8] = values[: BLOCK // 8] + 0.25
        store.add(write(root / expert, dtype, moved), name=expert, base="base")
    return store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with family(tmp_path_factory.mktemp("family"), "BF16", 1) as store:
        yield store


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["BF16", "F32", "F16"])
@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6))
def test_bounds_hold_the_distance(
    dtype: str, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Between any two of a family, what blocks give is within the bounds, and so is the estimate;
    from the base on it is known but for rounding."""
    with family(tmp_path_factory.mktemp("any"), dtype, seed) as store:
        names = ("base", "one", "two")
        for a, b in ((a, b) for a in names for b in names if a != b):
            told, read = store.diff(a, b, blocks=True), store.diff(a, b, blocks=True, exact=True)
            assert (told.files, told.tensors_equal) == (read.files, read.tensors_equal)
            for one, other in zip(told.tensors, read.tensors, strict=True):
                assert (one.name, one.changed_blocks) == (other.name, other.changed_blocks)
                assert other.relative_l2 is not None
                assert other.relative_l2_bounds is None
                if one.relative_l2 is not None:
                    assert one.relative_l2_bounds is None
                    assert one.relative_l2 == pytest.approx(other.relative_l2, rel=1e-6)
                    continue
                assert a != "base"
                assert one.relative_l2_bounds is not None
                low, high = one.relative_l2_bounds
                assert one.relative_l2_estimate is not None
                assert low <= other.relative_l2 <= high
                assert low <= one.relative_l2_estimate <= high


def test_no_block_is_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """With statistics of both sides, or of b against a, a diff reads records only."""

    def refuse(*_: object) -> bytes:
        raise AssertionError("a block was read")

    monkeypatch.setattr(Catalog, "read_block", refuse)
    for a, b in (("one", "two"), ("base", "one"), ("one", "base")):
        assert all(
            (one.relative_l2 is None) != (one.relative_l2_bounds is None)
            for one in store.diff(a, b).tensors
        )
    with pytest.raises(AssertionError):
        store.diff("one", "two", exact=True)


def test_estimates_are_near(store: Store) -> None:
    """For deltas of many chunks the sketches tell the distance to within a third or so."""
    for one, other in zip(
        store.diff("one", "two").tensors,
        store.diff("one", "two", exact=True).tensors,
        strict=True,
    ):
        assert other.relative_l2 is not None
        assert one.relative_l2_estimate == pytest.approx(other.relative_l2, rel=0.4)


def test_a_block_that_both_have_adds_nothing(tmp_path: Path) -> None:
    """Where both have one block that is not the base's, and else one differs, the distance is known
    but for the norm of the first."""
    base = np.ones(3 * BLOCK // 4)
    one, two = base.copy(), base.copy()
    one[: BLOCK // 4] = two[: BLOCK // 4] = 1.5
    two[BLOCK // 2 :] = 1.01
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        store.add(write(tmp_path / "base", "F32", {"t": base}), name="base")
        store.add(write(tmp_path / "one", "F32", {"t": one}), name="one", base="base")
        store.add(write(tmp_path / "two", "F32", {"t": two}), name="two", base="base")
        (item,) = store.diff("one", "two").tensors
    assert item.relative_l2_bounds is not None
    moved, norm = np.linalg.norm(two - one), np.linalg.norm(base)
    spare = np.linalg.norm(one - base)
    wanted = moved / (norm + spare), moved / (norm - spare)
    assert item.relative_l2_bounds == pytest.approx(wanted, rel=1e-5)


def test_what_statistics_do_not_hold_is_read(tmp_path: Path) -> None:
    """F64, infinities, and snapshots without statistics have the distance that blocks give."""
    values = np.linspace(1, 2, 100)
    odd = values.copy()
    odd[3] = np.inf
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        store.add(write(tmp_path / "b64", "F64", {"t": values}), name="b64")
        store.add(write(tmp_path / "e64", "F64", {"t": values + 1e-12}), name="e64", base="b64")
        (item,) = store.diff("b64", "e64").tensors
        exact = np.linalg.norm((values + 1e-12) - values) / np.linalg.norm(values)
        assert item.relative_l2 == pytest.approx(exact, rel=1e-12)
        store.add(write(tmp_path / "b", "F32", {"t": values}), name="b")
        store.add(write(tmp_path / "e", "F32", {"t": odd}), name="e", base="b")
        (item,) = store.diff("b", "e").tensors
        assert (item.relative_l2, item.relative_l2_bounds) == (None, None)
        store.add(write(tmp_path / "alone", "F32", {"t": values * 2}), name="alone")
        (item,) = store.diff("b", "alone").tensors
        assert item.relative_l2 == pytest.approx(1.0, rel=1e-6)


def test_the_command_says_what_reads(store: Store) -> None:
    """Estimates are marked and have their bounds, and one line names the option that reads; with it
    they are gone."""
    mstore = Program(store.path)
    told = mstore.succeed("diff", "one", "two")
    estimates = [line for line in told.lines if "~" in line and "exact" not in line]
    assert estimates
    assert all(re.search(r"~\S+ \(\S+ to \S+\)", line) for line in estimates)
    assert "diff one two --exact" in told.out
    read = mstore.succeed("diff", "one", "two", "--exact")
    assert "~" not in read.out
    assert "--exact" not in mstore.succeed("diff", "base", "two").out
    document = mstore.succeed("diff", "one", "two", "--json").document
    assert all(len(one["relative_l2_bounds"]) == 2 for one in document["tensors"])
    refused = mstore("diff", "one", "./", "--exact")
    assert refused.status == 2
