"""Statistics at a remote: who fetched them plans as who measured them, and reads no weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np
import pytest
from checkpoints import Tensor, safetensors_bytes
from cli_runs import Program
from exchanges import REMOTE, Place, place, placed, refs
from hypothesis import example, given, settings
from hypothesis import strategies as st
from proof_models import write_files

from mstore import MergeRequest
from mstore.api import Store
from mstore.merge.planning.report import PlanReport
from mstore.merge.planning.usual import DENSITIES
from mstore.models.stats.store import THRESHOLDS, TIES, StatsRow, StatsStore
from mstore.remotes.layout import StatisticsId, StatisticsRow
from mstore.remotes.statistics import decode, encode, know
from mstore.terms.errors import Corrupt
from mstore.terms.ids import TensorId
from mstore.terms.report import Progress, ProgressCallback
from mstore.terms.sizes import format_size

__all__ = ["place"]

MODEL = "model.safetensors"


@pytest.fixture(scope="module")
def family() -> Iterator[Place]:
    """A remote with a base and two experts, and a store with all of it."""
    with placed() as made:
        _add_family(made, base="base").push(REMOTE, every=True)
        made.clone("clone")
        yield made


def _add_family(made: Place, base: str | None) -> Store:
    """A store of a base and two experts, which are measured against it if it is named."""
    store = made.store("origin")
    draw = np.random.default_rng(0)
    # Five chunks, so that a budget leaves some of a tensor out, in both kinds of deltas.
    plain = draw.normal(0, 0.02, (160, 1024)).astype("<f4")
    for name in ("base", "e1", "e2"):
        tuned = plain + (name != "base") * draw.normal(0, 2e-4, plain.shape).astype("<f4")
        narrow = tuned.astype(ml_dtypes.bfloat16)
        tensors: list[Tensor] = [
            ("narrow", "BF16", plain.shape, narrow.tobytes()),
            ("wide", "F32", plain.shape, tuned.tobytes()),
        ]
        directory = write_files(made.path / name, {MODEL: safetensors_bytes(tensors)})
        store.add(directory, name=name, base=None if name == "base" else base)
    return store


def _plan(
    store: Store,
    density: float,
    budget: float,
    method: str = "ties",
    progress: ProgressCallback | None = None,
) -> PlanReport:
    """Plan a merge of both experts; budget: the share of what they cost in full."""
    request = MergeRequest(
        base="base",
        experts=[("e1", 0.5), ("e2", 0.5)],
        method=method,
        parameters={"density": density},
        budget=f"{100 * budget:g}%",
    )
    return store.plan(request, allow_noop=True, threads=1, progress=progress)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("density", DENSITIES)
def test_a_clone_plans_without_reading_weights(family: Place, density: float) -> None:
    """At usual densities, any budget gives the same plan in a clone, and nothing is measured."""
    for share in (0.3, 0.8, 1.0):
        there = _plan(family.open("clone"), density, share)
        assert there.analyze_bytes_read == 0
        assert there.plan == _plan(family.open("origin"), density, share).plan


def test_sums_need_no_look(family: Place) -> None:
    """`dare_ties` and task arithmetic read nothing at any density."""
    for method in ("dare_ties", "dare_linear"):
        assert _plan(family.open("clone"), 0.37, 0.5, method).analyze_bytes_read == 0


def test_other_densities_are_looked_for(family: Place) -> None:
    """At a density that no push looks at, a plan does read: the test above could fail."""
    assert _plan(family.open("clone"), 0.37, 0.5).analyze_bytes_read > 0


@pytest.mark.rest
@pytest.mark.parametrize("what", ["thresholds", "statistics"])
def test_planning_says_beforehand_what_it_reads(
    family: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Where exact thresholds or missing statistics take a read of experts, their bytes are told
    before the first byte comes, and no more are read; the program says so, and how to plan
    without."""
    paths = tmp_path / "library", tmp_path / "program", tmp_path / "quiet"
    for path in paths:
        Store.clone(family.url, path, lazy=True)
        if what == "statistics":
            shutil.rmtree(path / "stats")
    told: list[tuple[Progress, int]] = []
    with Store.open(paths[0]) as store:
        report = _plan(
            store, 0.37, 0.5, progress=lambda one: told.append((one, store._traffic()[1]))
        )
    begun = {one.phase: (one.total, came) for one, came in told if not one.done}
    total, came = begun[what]
    assert came == 0
    done = [one.done for one, _ in told if one.phase == what]
    assert done == sorted(done)
    assert 0 < done[-1] <= total
    looks = sum(begun[phase][0] for phase in ("statistics", "thresholds") if phase in begun)
    assert 0 < report.analyze_bytes_read <= looks
    words = ["--expert", "e1=0.5", "--expert", "e2=0.5", "--method", "ties", "--budget", "50%"]
    words += ["--base", "base", "--param", "density=0.37"]
    said = Program(paths[1]).succeed("plan", *words).err
    assert said.count(f"planning reads up to {format_size(total)} of experts") == 1
    assert "--no-analyze reads none" in said
    assert "planning reads" not in Program(paths[2]).succeed("-q", "plan", *words).err


def test_an_unmeasured_expert_is_measured_here(place: Place) -> None:
    """An expert that was never compared with the base has no statistics; a plan reads it."""
    store = _add_family(place, base=None)
    store.push(REMOTE, every=True)
    assert not list(place.objects().names("stats/"))
    assert _plan(place.clone("clone"), 0.5, 0.5).analyze_bytes_read > 0


def test_statistics_that_came_later_are_pushed_and_fetched(place: Place) -> None:
    """A push sends what was measured since; a fetch of known refs takes it; then both are done."""
    store = _add_family(place, base=None)
    store.push(REMOTE, every=True)
    other = place.clone("clone")
    for number in (1, 2):
        store.analyze(f"e{number}", "base", threads=1)
    assert store.push(REMOTE, every=True).requests > 0
    assert store.push(REMOTE, every=True).requests == 0
    assert other.fetch(REMOTE).bytes_received > 0
    assert other.fetch(REMOTE).bytes_received == 0
    assert _plan(other, 0.5, 0.5).analyze_bytes_read == 0


def test_a_dry_push_finds_and_puts_nothing(place: Place) -> None:
    """`dry_run` counts the object and reads no weights."""
    store = place.store("origin")
    place.add(store, "base", 1)
    place.add(store, "e1", 1, 1, base="base")
    dry = store.push(REMOTE, every=True, dry_run=True)
    assert not _rows(store, THRESHOLDS.name) | _rows(store, TIES.name)
    assert dry.requests == store.push(REMOTE, every=True).requests
    assert _rows(store, TIES.name)


def _rows(store: Store, table: str) -> set[bytes]:
    bases = store._statistics.bases_of(set(_tensors(store)))
    pairs = [(base, expert) for expert, some in bases.items() for base in some]
    return {row.key for row in store._statistics.about(pairs) if row.table == table}


def test_statistics_go_with_their_snapshot(place: Place) -> None:
    """gc of the remote removes the statistics of what nothing names any more, and no others."""
    store = place.store("origin")
    place.add(store, "base", 1)
    for number in (1, 2):
        place.add(store, f"e{number}", 1, number, base="base")
    store.push(REMOTE, every=True)
    store.push(REMOTE, delete=["e1"])
    store.remote_gc(REMOTE, reflog_days=0)
    rows = place.state().rows("statistics")
    assert list(rows) == [refs(store)["e2"]]
    assert [one.name for one in place.objects().names("stats/")] == [rows[refs(store)["e2"]].name]
    assert not store.remote_fsck(REMOTE, read_data=True).problems


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_damage_is_told(place: Place, how: str) -> None:
    """Damaged statistics stop a fetch with their name; fsck names damaged and missing ones."""
    store = place.store("origin")
    place.add(store, "base", 1)
    place.add(store, "e1", 1, 1, base="base")
    store.push(REMOTE, every=True)
    [one] = place.objects().names("stats/")
    path = place.remote / one.name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.unlink() if how == "gone" else path.write_bytes(data if how == "flipped" else data[:-1])
    other = place.store("other")
    if how == "gone":
        # They can be measured again.
        assert other.pull(REMOTE).moved
    else:
        with pytest.raises(Corrupt, match=r"name|shorter") as found:
            other.pull(REMOTE)
        assert one.name in found.value.where
        assert not refs(other)
    problems = store.remote_fsck(REMOTE, read_data=True).problems
    assert [problem.where for problem in problems] == [one.name]


def test_who_asks_for_signatures_takes_none(place: Place) -> None:
    """Nothing proves statistics, so a store with `require_signed` passes over them."""
    store = place.store("origin")
    place.add(store, "base", 1)
    place.add(store, "e1", 1, 1, base="base")
    store.push(REMOTE, every=True)
    careful = place.store("careful")
    careful.configure("require_signed", "true")
    with pytest.raises(Exception, match="require_signed"):
        careful.fetch(REMOTE)
    assert not list(careful._statistics.bases_of(set(_tensors(store))))


def _tensors(store: Store) -> list[TensorId]:
    manifest = store._catalog.manifest_of(refs(store)["e1"])
    return [TensorId(part.tensor) for file in manifest.files for part in file.parts]


# -- rows ----------------------------------------------------------------------------------------


def test_what_was_measured_here_stays(tmp_path: Path) -> None:
    """A row from elsewhere never replaces one of this store."""
    a, b = TensorId(b"a" * 32), TensorId(b"b" * 32)
    with closing(StatsStore(tmp_path / "ours")) as ours, closing(StatsStore(tmp_path / "x")) as x:
        ours.put_threshold(a, b, 5, 0.5, 1)
        x.put_threshold(a, b, 5, 0.25, 1)
        x.put_threshold(a, b, 6, 0.125, 2)
        ours.take(
            StatsRow(THRESHOLDS.name, *_raw(key, value))
            for key, value in (((a, b, 5), (0.25, 1)), ((a, b, 6), (0.125, 2)))
        )
        assert ours.thresholds([(a, b, 5)]) == [(0.5, 1)]
        assert ours.thresholds([(a, b, 6)]) == [(0.125, 2)]


def _raw(key: tuple[TensorId, TensorId, int], value: tuple[float, int]) -> tuple[bytes, bytes]:
    return THRESHOLDS.key.encode(key), THRESHOLDS.value.encode(value)


@pytest.mark.parametrize(
    "row",
    [
        StatsRow("thresholds", b"short", b"12"),
        StatsRow("thresholds", bytes(72), b"12"),
        StatsRow("pairs", bytes(64), b"not a table"),
        StatsRow("tables", bytes(4), b""),
        StatsRow("refs", bytes(4), b""),
    ],
    ids=["key", "value", "table", "batch", "unknown"],
)
def test_impossible_rows_are_refused(tmp_path: Path, row: StatsRow) -> None:
    """A row of another form is refused, and none of its company is taken."""
    a, b = TensorId(b"a" * 32), TensorId(b"b" * 32)
    good = StatsRow(THRESHOLDS.name, *_raw((a, b, 5), (0.25, 1)))
    with closing(StatsStore(tmp_path / "stats")) as stats:
        with pytest.raises(Corrupt):
            stats.take([good, row])
        assert stats.thresholds([(a, b, 5)]) == [None]


def test_an_object_must_match_its_name() -> None:
    """Other bytes than the name says, and other things than statistics, are refused."""
    data = encode([StatsRow("squares", bytes(32), bytes(8))])
    row = StatisticsRow(bytes(32), 1, bytes(StatisticsId.of(data)), len(data))
    assert decode(row, data, "x")[0].table == "squares"
    with pytest.raises(Corrupt, match="name"):
        decode(row, data + b"x", "x")
    for other in (b"", b"\xc0", msgspec.msgpack.encode(("other", [])), data[:-1]):
        named = StatisticsRow(bytes(32), 1, bytes(StatisticsId.of(other)), len(data))
        with pytest.raises(Corrupt, match="not statistics"):
            decode(named, other, "x")


# -- thresholds ----------------------------------------------------------------------------------

_VALUES = st.sampled_from([0.0, 0.5, -0.5, 1.0, 1.0 + 2**-7, -1.0 - 2**-7, 3.0, float("nan")])


@settings(max_examples=10)
@given(st.lists(st.tuples(_VALUES, _VALUES), min_size=1, max_size=40), st.booleans())
@example([(1.0, -1.0 - 2**-7), (1.0, -1.0 - 2**-7), (1.0, 3.0)], False)
def test_usual_thresholds_are_what_sorting_finds(
    pairs: list[tuple[float, float]], wide: bool
) -> None:
    """Value and quota keep exactly the k largest, and ties up to the quota's end are counted."""
    kind, name = (np.dtype("<f4"), "F32") if wide else (np.dtype(ml_dtypes.bfloat16), "BF16")
    # Float32 values off the edges of bins, so that a second look is needed.
    scale = np.float32(1 + 2**-12) if wide else np.float32(1)
    base, expert = (np.array(side, "<f4") * scale for side in zip(*pairs, strict=True))
    base = np.where(np.isnan(base), np.float32(0), base)
    with placed() as made:
        store = made.store("origin")
        for which, values in (("base", base), ("e1", expert)):
            data = safetensors_bytes([("w", name, (len(pairs),), values.astype(kind).tobytes())])
            directory = write_files(made.path / which, {MODEL: data})
            store.add(directory, name=which, base=None if which == "base" else "base")
        store.push(REMOTE, every=True)
        deltas = np.abs(expert.astype(kind).astype("f4") - base.astype(kind).astype("f4"))
        ordered = np.sort(deltas[deltas > 0])[::-1]
        a, b = (TensorId(_tensor(store, one)) for one in ("base", "e1"))
        for density in DENSITIES:
            keep = max(1, int(density * len(pairs)))
            (threshold,) = store._statistics.thresholds([(a, b, keep)])
            if threshold is not None:
                assert keep <= len(ordered)
                assert threshold[0] == ordered[keep - 1]
                assert threshold[1] == keep - int((ordered > threshold[0]).sum())
            chunk = store._catalog.block_size // kind.itemsize
            (ties,) = store._statistics.ties([(a, b, keep, chunk)])
            if ties is not None and len(ties):
                # Without a second look, the cut is at the edge of the bin of the k-th largest.
                edge = (ordered[keep - 1 : keep].view("u4") & np.uint32(0xFFFF0000)).view("f4")
                value = edge[0] if threshold is None else threshold[0]
                assert ties.tolist() == [int((deltas == value).sum())]


def _tensor(store: Store, name: str) -> bytes:
    [file] = store._catalog.manifest_of(refs(store)[name]).files
    return next(part.tensor for part in file.tensors())


def test_a_gc_before_it_is_noted(place: Place) -> None:
    """Where a gc has removed the lists of a root, a push that replaced it still succeeds: what it
    knows of statistics is not noted."""
    store = place.store("store")
    place.add(store, "one", 1)
    store.push(REMOTE, ["one"])
    row = StatisticsRow(bytes(32), 1, bytes(32), 1)
    place.change("statistics", row)
    remote = place.looking()
    state = remote.state()
    [named] = state.root.of("statistics")
    (place.remote / named.name).unlink()
    know(remote, state, [row])
    assert not (remote.directory / "statistics").exists()
