"""Adding checkpoints: what is stored, what is not stored twice, and what is refused whole."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import families
import numpy as np
import pytest
from checkpoints import every_dtype_checkpoint, with_length, write_index, write_safetensors
from families import BLOCK, Family

from mstore import Store, fs
from mstore.api.reports import AddReport
from mstore.checkpoint.models import name_in_model
from mstore.models.stats.analysis import measure_squares
from mstore.numeric.codes import ITEMSIZES
from mstore.numeric.passes import Pass
from mstore.terms.errors import (
    BadCheckpoint,
    BadName,
    Conflict,
    Incompatible,
    MstoreError,
    NotFound,
    StorageFailed,
    Unavailable,
)
from mstore.terms.report import Progress

FAMILY = families.layered(rows=100)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        yield store


def nothing_new(store: Store, before: object) -> None:
    """No ref, snapshot, block or byte more than `before`, and nothing left behind."""
    assert state(store) == before
    assert list((store.path / "tmp").iterdir()) == []
    assert store.fsck(read_data=True).problems == ()


def state(store: Store) -> object:
    stats = store.stats()
    packs = sorted(path.name for path in (store.path / "packs").rglob("*.pack"))
    return store.refs(), stats.snapshots, stats.blocks, stats.tensors, stats.stored_bytes, packs


# -- dedup ---------------------------------------------------------------------------------------


def test_the_same_bytes_again_store_nothing(store: Store, tmp_path: Path) -> None:
    """Under the same name nothing happens; under another one only a snapshot is new."""
    path = families.write_checkpoint(tmp_path / "a", FAMILY.base, shards=2)
    first = store.add(path, name="a", message="one")
    assert first.new_snapshot
    assert first.blocks_new > 0
    before = state(store)
    again = store.add(path, name="a", message="two")
    assert (again.new_snapshot, again.blocks_new, again.bytes_written) == (False, 0, 0)
    assert (again.snapshot, again.manifest) == (first.snapshot, first.manifest)
    assert (again.blocks_total, again.plain_bytes) == (first.blocks_total, first.plain_bytes)
    nothing_new(store, before)
    assert len(store.reflog("a")) == 1
    other = store.add(path, name="b")
    assert (other.new_snapshot, other.manifest, other.blocks_new) == (True, first.manifest, 0)
    assert other.bytes_written < 16384


def test_squares_are_known_of_what_was_added(store: Store, tmp_path: Path) -> None:
    """Those of each tensor that can be merged, bit for bit what reading it again gives."""
    odd = {"whole": np.arange(9, dtype=np.int64), "none": np.zeros((0, 4), dtype=np.float32)}
    store.add(families.write_checkpoint(tmp_path / "a", FAMILY.base | odd, shards=2), name="a")
    records = {id: store._catalog.tensor(id) for id in store.view("a").tensors.values()}
    with ThreadPoolExecutor(2) as pool:
        for id, record in records.items():
            known = store._statistics.squares(id)
            if record.dtype in ITEMSIZES and record.nbytes:
                assert known == measure_squares(store._catalog, record, pool) > 0
            else:
                assert known is None
    assert any(record.block_count() > 1 for record in records.values())


def test_adding_raw_blocks_needs_no_kernel(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where compiled code cannot run, the sums of squares are left to planning."""

    def refuse(self: Pass, *arguments: int) -> None:
        raise Unavailable("compiled kernels cannot run here")

    store.configure("codec", "raw")
    path = families.write_checkpoint(tmp_path / "a", FAMILY.base)
    with monkeypatch.context() as patch:
        patch.setattr(Pass, "__call__", refuse)
        store.add(path, name="a")
    ids = list(store.view("a").tensors.values())
    assert store._statistics.squares_of(ids) == [None] * len(ids)
    assert store.fsck(read_data=True).problems == ()


def test_resharding_adds_only_headers(store: Store, tmp_path: Path) -> None:
    """The same tensors in other files, order and names are the same blocks: headers are new."""
    tensors = dict(FAMILY.base)
    first = store.add(families.write_checkpoint(tmp_path / "a", tensors, shards=3), name="a")
    turned = dict(reversed(tensors.items()))
    for shards, odd in ((1, False), (2, True)):
        path = families.write_checkpoint(tmp_path / f"b{shards}", turned, shards=shards)
        if odd:
            for number, file in enumerate(sorted(path.glob("*.safetensors"))):
                (path / "deep").mkdir(exist_ok=True)
                file.rename(path / "deep" / f"part-{number}.safetensors")
            (path / "model.safetensors.index.json").unlink()
        report = store.add(path, name=f"b{shards}")
        assert report.tensors == first.tensors == len(tensors)
        assert report.blocks_new == shards
        headers = sum(
            8 + int.from_bytes(file.read_bytes()[:8], "little")
            for file in path.rglob("*.safetensors")
        )
        # Headers and records, and what rounds a pack to pages; of 540 KiB of tensors nothing.
        assert report.bytes_written < headers + 20_000
        # Without an index, files of other names are models of their own.
        found = {name_in_model(name): id for name, id in store.view(f"b{shards}").tensors.items()}
        assert found == store.view("a").tensors


def test_equal_blocks_within_one_checkpoint(store: Store, tmp_path: Path) -> None:
    """A block that occurs often is stored once, and a block of one value takes one element."""
    tile = np.random.default_rng(0).standard_normal(BLOCK // 4).astype(np.float32)
    arrays = {"tiles": np.tile(tile, 20), "zeros": np.zeros(20 * BLOCK // 4, dtype=np.float32)}
    report = store.add(families.write_checkpoint(tmp_path / "a", arrays), name="a")
    others = report.blocks_total - 40
    assert report.blocks_new == 2 + others
    assert report.bytes_written < BLOCK + 30_000


def test_blocks_equal_to_the_base_are_counted(store: Store, tmp_path: Path) -> None:
    """With a base, exactly the tensor blocks that equal the base's at their place are counted."""
    root = FAMILY.write(tmp_path)
    assert store.add(root / "base", name="base").blocks_equal_base is None
    for number, expert in enumerate(FAMILY.experts):
        equal = 0
        for name, array in expert.items():
            mine, theirs = array.tobytes(), FAMILY.base[name].tobytes()
            starts = range(0, len(mine), BLOCK)
            equal += sum(mine[at : at + BLOCK] == theirs[at : at + BLOCK] for at in starts)
        report = store.add(root / f"e{number}", name=f"e{number}", base="base")
        assert report.blocks_equal_base == equal > 5


# -- the same, however it is done ----------------------------------------------------------------


def test_content_is_all_that_names_it(tmp_path: Path) -> None:
    """ManifestIds do not depend on store, threads, time or what was there before."""
    path = every_dtype_checkpoint(tmp_path / "odd")
    found = set()
    for threads in (1, 2, 7):
        with Store.init(tmp_path / f"s{threads}", block_size=BLOCK) as store:
            if threads == 2:
                store.add(families.write_checkpoint(tmp_path / "x", FAMILY.base), name="x")
            found.add(store.add(path, name="odd", threads=threads).manifest)
    assert len(found) == 1


def test_one_file_is_a_checkpoint(store: Store, tmp_path: Path) -> None:
    """A single .safetensors file is added under its own name."""
    path = families.write_checkpoint(tmp_path / "a", FAMILY.base) / "model.safetensors"
    report = store.add(path, name="one")
    assert (report.files, report.plain_bytes) == (1, path.stat().st_size)
    assert store["one"].read("model.safetensors") == path.read_bytes()


def test_progress_counts_every_byte(store: Store, tmp_path: Path) -> None:
    """Ticks rise to the total, which is what lies on disk."""
    path = families.write_checkpoint(tmp_path / "a", FAMILY.base, shards=2)
    ticks: list[Progress] = []
    report = store.add(path, name="a", progress=ticks.append)
    total = sum(len(content) for content in families.contents(path).values())
    assert report.plain_bytes == total
    assert [tick.done for tick in ticks] == sorted(tick.done for tick in ticks)
    assert (ticks[-1].done, ticks[-1].total, ticks[-1].phase) == (total, total, "add")


def test_lineage_of_an_add(store: Store, tmp_path: Path) -> None:
    """Parents are what the ref was and the base; naming the base later is a snapshot of its own."""
    root = FAMILY.write(tmp_path)
    base = store.add(root / "base", name="base").snapshot
    first = store.add(root / "e0", name="e", message="plain").snapshot
    second = store.add(root / "e0", name="e", base="base")
    assert second.new_snapshot
    assert second.blocks_new == 0
    assert [(p.role, p.snapshot) for p in store["e"].parents] == [
        ("previous", first),
        ("base", base),
    ]
    assert not store.add(root / "e0", name="e", base="base").new_snapshot
    assert not store.add(root / "e0", name="e").new_snapshot
    assert [move.action for move in store.reflog("e")] == ["add", "add: plain"]
    third = store.add(root / "e1", name="e").snapshot
    assert [(p.role, p.snapshot) for p in store["e"].parents] == [("previous", second.snapshot)]
    assert store.show("e~1").snapshot == second.snapshot
    assert store["e"].id == third


# -- memory --------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """A file of 144 MiB is added within 96 MiB of memory, though writing is slower than reading."""
    size = 144 << 20
    program = """
import sys, time
from mstore import Store

def peak():
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["VmHWM"].split()[0]) << 10

with Store.open(sys.argv[1]) as store:
    store.add(sys.argv[2], name="small", threads=2)
    before = peak()
    report = store.add(
        sys.argv[3], name="large", threads=2, progress=lambda tick: time.sleep(0.01)
    )
    print(peak() - before, report.blocks_new)
"""
    rng = np.random.default_rng(0)
    write_safetensors(tmp_path / "small.safetensors", [("w", "U8", (9,), bytes(range(9)))])
    header = {"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    with (tmp_path / "large.safetensors").open("wb") as file:
        file.write(with_length(json.dumps(header).encode()))
        for _ in range(size >> 20):
            file.write(rng.bytes(1 << 20))
    Store.init(tmp_path / "store").close()
    names = ["store", "small.safetensors", "large.safetensors"]
    done = subprocess.run(
        [sys.executable, "-c", program, *(str(tmp_path / name) for name in names)],
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    grown, blocks = map(int, done.stdout.split())
    assert blocks == 145
    assert grown < 96 << 20


# -- files that change meanwhile -----------------------------------------------------------------


def _touch(path: Path) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def _grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def _shrink(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100_000)


def _overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"other")


def _another_header(path: Path) -> None:
    status = path.stat()
    with path.open("r+b") as file:
        head = file.read(2000)
        file.seek(0)
        file.write(head.replace(b"model.norm", b"model.mron"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("change", [_touch, _grow, _shrink, _overwrite])
@pytest.mark.parametrize("which", [0, -1], ids=["being read", "still to come"])
def test_a_file_that_changes_is_refused(
    change: Callable[[Path], None], which: int, store: Store, tmp_path: Path
) -> None:
    """A file that another program writes while it is read stops the add, which names it."""
    path = tmp_path / "a"
    for number in range(2):
        array = np.random.default_rng(number).standard_normal(3 << 20).astype(np.float32)
        write_safetensors(path / f"{number}.safetensors", families.tensors_of({"w": array}))
    victim = sorted(path.iterdir())[which]
    seen: list[int] = []

    def meanwhile(tick: Progress) -> None:
        if not seen:
            change(victim)
        seen.append(tick.done)

    before = state(store)
    with pytest.raises(BadCheckpoint, match="changed while it was being read") as refused:
        store.add(path, name="a", threads=1, progress=meanwhile)
    assert refused.value.where == str(victim)
    nothing_new(store, before)


def test_a_header_that_changes_is_refused(store: Store, tmp_path: Path) -> None:
    """A header that is not the one that was parsed is found out, though size and time agree."""
    path = families.write_checkpoint(tmp_path / "a", FAMILY.base, shards=3)
    victim = sorted(path.glob("*.safetensors"))[1]
    assert b"model.norm" in victim.read_bytes()
    seen: list[int] = []

    def meanwhile(tick: Progress) -> None:
        if not seen:
            _another_header(victim)
        seen.append(tick.done)

    with pytest.raises(BadCheckpoint, match="changed while it was being read"):
        store.add(path, name="a", progress=meanwhile)
    assert store.refs() == []


def test_a_file_that_goes_is_refused(store: Store, tmp_path: Path) -> None:
    """A file that is removed meanwhile is named by the error."""
    path = families.write_checkpoint(tmp_path / "a", FAMILY.base, shards=3)
    victim = sorted(path.glob("*.safetensors"))[-1]
    before = state(store)
    with pytest.raises(MstoreError) as refused:
        store.add(path, name="a", progress=lambda tick: victim.unlink(missing_ok=True))
    assert refused.value.where == str(victim)
    nothing_new(store, before)


# -- bad input -----------------------------------------------------------------------------------


def _model(path: Path) -> Path:
    return families.write_checkpoint(path, {"a": np.ones(9, np.float32), "b": np.ones(2)})


def _raw(text: bytes, data: int = 0) -> Callable[[Path], None]:
    """A second shard with this JSON and so many bytes of data."""

    def write(path: Path) -> None:
        (path / "second.safetensors").write_bytes(with_length(text) + bytes(data))

    return write


def _entry(dtype: str, shape: list[int], begin: int, end: int) -> bytes:
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}).encode()


def _truncated(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def _endless(path: Path) -> None:
    (path / "second.safetensors").write_bytes(b"\xff" * 8 + b"{}")


def _missing_shard(path: Path) -> None:
    write_index(path / "unet.safetensors.index.json", {"a": "gone.safetensors"})


def _index_up(path: Path) -> None:
    write_index(path / "model.safetensors.index.json", {"a": "../model.safetensors"})


def _index_absolute(path: Path) -> None:
    write_index(path / "model.safetensors.index.json", {"a": str(path / "model.safetensors")})


def _index_nul(path: Path) -> None:
    write_index(path / "model.safetensors.index.json", {"a": "model\0.safetensors"})


def _case_twin(path: Path) -> None:
    (path / "CONFIG.json").write_text("{}")


def _link_out(path: Path) -> None:
    (path.parent / "outside").write_text("x")
    (path / "link").symlink_to("../outside")


def _pickle_only(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def _nothing(path: Path) -> None:
    (path / "model.safetensors").unlink()


HUGE = 1 << 62
BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated shard": (_truncated, "model.safetensors"),
    "header too long": (_endless, "second.safetensors"),
    "not JSON": (_raw(b"{nonsense"), "second.safetensors"),
    "duplicate keys": (
        _raw(b'{"x": %b, "x": %b}' % (_entry("U8", [1], 0, 1), _entry("U8", [1], 1, 2)), 2),
        "second.safetensors",
    ),
    "overlap": (
        _raw(b'{"x": %b, "y": %b}' % (_entry("U8", [2], 0, 2), _entry("U8", [2], 1, 3)), 3),
        "second.safetensors",
    ),
    "hole": (_raw(b'{"x": %b}' % _entry("U8", [1], 1, 2), 2), "second.safetensors"),
    "overflow": (_raw(b'{"x": %b}' % _entry("U8", [1], 0, 2**64), 1), "second.safetensors"),
    "absurd shape": (
        _raw(b'{"x": %b}' % _entry("U8", [0, HUGE, HUGE], 0, 0)),
        "second.safetensors",
    ),
    "missing shard": (_missing_shard, "gone.safetensors"),
    "index with ..": (_index_up, "../model.safetensors"),
    "index with an absolute path": (_index_absolute, "model.safetensors"),
    "index with NUL": (_index_nul, "index.json"),
    "names that differ in case": (_case_twin, "CONFIG.json"),
    "link out": (_link_out, "link"),
    "pickles only": (_pickle_only, "pytorch_model.bin"),
    "no weights": (_nothing, "no .safetensors"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", BAD)
def test_bad_input_leaves_nothing(kind: str, store: Store, tmp_path: Path) -> None:
    """What is not a sound checkpoint is refused by name; no ref, no block, nothing in tmp/."""
    path = _model(tmp_path / "model")
    store.add(path, name="good")
    before = state(store)
    spoil, names = BAD[kind]
    spoil(path)
    with pytest.raises(BadCheckpoint) as refused:
        store.add(path, name="bad")
    assert names in f"{refused.value} {refused.value.hint}"
    nothing_new(store, before)


def test_a_base_that_does_not_fit(store: Store, tmp_path: Path) -> None:
    """Tensors that the base lacks, that are missing and of other shapes are listed by name."""
    base: families.Arrays = {
        f"t{number:02}": np.zeros((2, 3), dtype=np.float32) for number in range(12)
    }
    odd = {name: array for name, array in base.items() if name != "t03"}
    odd["t05"] = np.zeros((3, 2), dtype=np.float32)
    odd["extra"] = np.zeros(1, dtype=np.float32)
    for name, arrays in (("base", base), ("odd", odd), ("few", {"t00": base["t00"]})):
        families.write_checkpoint(tmp_path / name, arrays)
    store.add(tmp_path / "base", name="base")
    before = state(store)
    with pytest.raises(Incompatible) as refused:
        store.add(tmp_path / "odd", name="odd", base="base")
    assert refused.value.what == (
        "not a fine-tune of this base: t03 is missing; "
        "t05 has shape [3, 2], the base [2, 3]; extra is not in the base"
    )
    assert "base=None" in (refused.value.hint or "")
    with pytest.raises(Incompatible, match="t08 is missing; and 3 more"):
        store.add(tmp_path / "few", name="few", base="base")
    nothing_new(store, before)


def test_names_that_cannot_be_added_to(store: Store, tmp_path: Path) -> None:
    """Bad names, tags, names below and above a ref, unknown bases and paths are refused."""
    path = _model(tmp_path / "model")
    store.add(path, name="llama/base")
    store.tag("v1", "llama/base")
    before = state(store)
    for name, kind in (
        ("a b", BadName),
        ("", BadName),
        ("../up", BadName),
        ("v1", Conflict),
        ("llama", Conflict),
        ("llama/base/child", Conflict),
    ):
        with pytest.raises(kind):
            store.add(path, name=name)
    with pytest.raises(NotFound, match="unknown"):
        store.add(path, name="x", base="unknown")
    with pytest.raises(NotFound):
        store.add(tmp_path / "nowhere", name="x")
    nothing_new(store, before)


# -- a disk that fails ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kinds"),
    [
        (errno.ENOSPC, {"create", "write", "mkdir"}),
        (errno.EIO, {"fsync", "syncdir", "rename"}),
    ],
    ids=["full", "broken"],
)
def test_a_failing_disk_leaves_nothing(
    code: int, kinds: set[str], store: Store, tmp_path: Path
) -> None:
    """A disk that is full, or breaks, at any step before the commit: an error, and nothing new."""
    path = families.write_checkpoint(tmp_path / "a", FAMILY.base, shards=2)
    before = state(store)
    failures = 0
    while _fails(store, path, code, kinds, failures):
        nothing_new(store, before)
        failures += 1
    assert failures >= 4
    assert [ref.name for ref in store.refs()] == ["a"]


def _fails(store: Store, path: Path, code: int, kinds: set[str], step: int) -> bool:
    """Add with a disk that refuses operation number `step` of these kinds; whether it came to it.

    From the first commit after a pack has its name, the add is published.
    """
    seen = 0
    named = published = False

    def refuse(operation: fs.Operation) -> None:
        nonlocal seen, named, published
        named = named or (operation.kind == "rename" and operation.target.endswith(".pack"))
        published = published or (named and operation.kind == "commit")
        if operation.kind in kinds and not published:
            seen += 1
            if seen == step + 1:
                raise OSError(code, os.strerror(code))

    try:
        with fs.observed(refuse):
            store.add(path, name="a")
    except StorageFailed as error:
        assert error.errno == code  # noqa: PT017  (an add that goes well ends the caller's loop)
        return True
    return False


def test_an_interrupt_leaves_nothing(store: Store, tmp_path: Path) -> None:
    """Ctrl-C in the middle publishes nothing and leaves nothing; the next add goes well."""
    path = families.write_checkpoint(tmp_path / "a", FAMILY.base, shards=2)
    before = state(store)

    def interrupt(tick: Progress) -> None:
        if tick.done > tick.total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.add(path, name="a", progress=interrupt)
    nothing_new(store, before)
    report: AddReport = store.add(path, name="a")
    assert report.new_snapshot


def test_a_family_in_one_go(store: Store, tmp_path: Path) -> None:
    """Experts of an expert: each add finds the blocks of all before it."""
    arrays = {"w": np.arange(BLOCK, dtype=np.float32)}
    later = {"w": arrays["w"].copy()}
    later["w"][-1] = -1
    root = Family(arrays, (later, arrays)).write(tmp_path)
    assert store.add(root / "base", name="base").blocks_total > 4
    assert store.add(root / "e0", name="e0", base="base").blocks_equal_base == 3
    # Four blocks of the tensor are known, and so is all but the header and the card.
    known = store.add(root / "e1", name="e1", base="e0")
    assert (known.blocks_equal_base, known.blocks_total - known.blocks_new >= 4) == (3, True)
