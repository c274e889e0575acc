"""Checkout: the bytes that were added, in a directory that is whole or not there."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import families
import pytest
from checkpoints import every_dtype_checkpoint, write_index, write_safetensors
from families import BLOCK
from hypothesis import given, settings
from hypothesis import strategies as st

from mstore import BlockId, MergeRequest, Store, fs
from mstore.blocks.codecs import PLAIN_BYTES, Policy, encode
from mstore.store import leases
from mstore.store.objects.manifest import OPAQUE, File, Manifest, Part
from mstore.store.objects.snapshot import SnapshotRecord
from mstore.store.objects.tensor import BYTES, Tensor
from mstore.store.transaction import Transaction
from mstore.terms.errors import (
    BadCheckpoint,
    BadRequest,
    Conflict,
    Corrupt,
    MstoreError,
    NotFound,
    StorageFailed,
)
from mstore.terms.ids import SnapshotId
from mstore.terms.report import Progress

FAMILY = families.layered(rows=60)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return every_dtype_checkpoint(tmp_path_factory.mktemp("odd") / "odd")


@pytest.fixture(scope="module")
def store(odd: Path) -> Iterator[Store]:
    with Store.init(odd.parent / "store", block_size=BLOCK) as store:
        store.add(odd, name="odd")
        yield store


# -- the same bytes ------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 4])
def test_every_byte_comes_back(threads: int, store: Store, odd: Path, tmp_path: Path) -> None:
    """Every dtype, odd headers, hidden, empty and nested files: equal on every file and byte."""
    ticks: list[Progress] = []
    report = store.checkout("odd", tmp_path / "out", threads=threads, progress=ticks.append)
    wanted = families.contents(odd)
    assert families.contents(tmp_path / "out") == wanted
    assert report.files == len(wanted)
    assert report.bytes_written == sum(map(len, wanted.values()))
    assert report.directory == str(tmp_path / "out")
    assert (ticks[-1].done, ticks[-1].total) == (report.bytes_written, report.bytes_written)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert all(
        stat.S_ISREG(path.lstat().st_mode) and os.access(path, os.W_OK)
        for path in (tmp_path / "out").rglob("*")
        if not path.is_dir()
    )


def test_added_again_it_is_the_same_content(store: Store, tmp_path: Path) -> None:
    """What was checked out has the ManifestId of what it came from, and adds no block."""
    store.checkout("odd", tmp_path / "out")
    report = store.add(tmp_path / "out", name="copy")
    assert report.manifest == store["odd"].manifest
    assert report.blocks_new == 0


shapes = st.lists(st.integers(0, 40), max_size=3)
entries = st.lists(
    st.tuples(st.sampled_from(["BF16", "F32", "I64", "U8"]), shapes, st.integers(0, 255)),
    max_size=5,
)
files = st.dictionaries(
    st.text("abcdäß/", min_size=1, max_size=6).filter(
        lambda name: not name.startswith("/") and not name.endswith("/") and "//" not in name
    ),
    st.binary(max_size=200),
    max_size=4,
)


@settings(max_examples=15)
@given(entries, files, st.integers(0, 9), st.booleans())
def test_any_small_checkpoint(
    tensors: list[tuple[str, list[int], int]],
    others: dict[str, bytes],
    padding: int,
    twice: bool,
) -> None:
    """Whatever can be added comes back byte for byte."""
    sizes = {"BF16": 2, "F32": 4, "I64": 8, "U8": 1}
    written = []
    for number, (dtype, shape, fill) in enumerate(tensors):
        elements = 1
        for dimension in shape:
            elements *= dimension
        payload = bytes((fill + at // 7) % 256 for at in range(elements * sizes[dtype]))
        written.append((f"t{number}", dtype, tuple(shape), payload))
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for name in ("m.safetensors", "z/m.safetensors") if twice else ("m.safetensors",):
            write_safetensors(root / "a" / name, written, padding=padding)
        for name, content in others.items():
            path = root / "a" / f"x{name}"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            except (FileExistsError, NotADirectoryError, IsADirectoryError):
                continue
        with Store.init(root / "store", block_size=BLOCK) as store:
            try:
                store.add(root / "a", name="a")
            except BadCheckpoint:
                assert len({name.casefold() for name in others}) < len(others)
                return
            store.checkout("a", root / "out")
            assert families.contents(root / "out") == families.contents(root / "a")


# -- where it may go -----------------------------------------------------------------------------


def test_an_empty_directory_will_do(store: Store, odd: Path, tmp_path: Path) -> None:
    """A directory that is there and empty is filled; a relative path is taken from here."""
    (tmp_path / "out").mkdir()
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        store.checkout("odd", "out")
    finally:
        os.chdir(before)
    assert families.contents(tmp_path / "out") == families.contents(odd)


def _full(path: Path) -> None:
    path.mkdir()
    (path / "mine.txt").write_text("precious")


def _file(path: Path) -> None:
    path.write_text("precious")


def _link(path: Path) -> None:
    (path.parent / "elsewhere").mkdir()
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("make", [_full, _file, _link])
def test_nothing_is_overwritten(make: Callable[[Path], None], store: Store, tmp_path: Path) -> None:
    """A directory with something in it, a file or a link is refused and stays as it was."""
    make(tmp_path / "out")
    before = families.contents(tmp_path)
    with pytest.raises(Conflict) as refused:
        store.checkout("odd", tmp_path / "out")
    assert refused.value.where == str(tmp_path / "out")
    assert families.contents(tmp_path) == before


def test_an_impossible_place_is_named(store: Store) -> None:
    """Where nothing can be made, the error names the directory that was asked for."""
    with pytest.raises(StorageFailed) as refused:
        store.checkout("odd", "/proc/out")
    assert refused.value.where == "/proc/out"


def test_the_parent_must_be_there(store: Store, tmp_path: Path) -> None:
    """Directories above are not made unasked; the hint says how to make them."""
    with pytest.raises(BadRequest) as refused:
        store.checkout("odd", tmp_path / "a" / "b" / "out")
    assert refused.value.hint == f"mkdir -p {tmp_path / 'a' / 'b'}"
    assert list(tmp_path.iterdir()) == []


# -- who plants links ------------------------------------------------------------------------------


def _staging(operation: fs.Operation, above: Path) -> Path | None:
    """Where the files lie while the checkout runs, as an onlooker finds it."""
    path = Path(operation.path)
    return above / path.relative_to(above).parts[0] if above in path.parents else None


@pytest.mark.parametrize("kind", ["create", "mkdir"])
def test_a_planted_link_leads_nowhere(kind: str, store: Store, odd: Path, tmp_path: Path) -> None:
    """A link put where a file or directory is about to be made: nothing is written through it."""
    above, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    steps = 0
    while True:
        above.mkdir()
        elsewhere.mkdir()
        (elsewhere / "precious").write_text("precious")
        seen, planted = 0, False

        def plant(operation: fs.Operation, at: int = steps) -> None:
            nonlocal seen, planted
            if operation.kind == kind and _staging(operation, above):
                seen += 1
                if seen == at + 1:
                    target = elsewhere if kind == "mkdir" else elsewhere / "new"
                    Path(operation.path).symlink_to(target)
                    planted = True

        with fs.observed(plant), suppress(MstoreError):
            store.checkout("odd", above / "out", threads=2)
        assert [path.name for path in elsewhere.iterdir()] == ["precious"]
        if not planted:
            break
        assert not (above / "out").exists()
        shutil.rmtree(above)
        shutil.rmtree(elsewhere)
        steps += 1
    assert steps >= 3
    assert families.contents(above / "out") == families.contents(odd)


def test_a_directory_swapped_for_a_link_leads_nowhere(store: Store, tmp_path: Path) -> None:
    """A directory of the copy that is replaced by a link half way is not walked through."""
    (tmp_path / "elsewhere").mkdir()
    swapped = False

    def swap(operation: fs.Operation) -> None:
        nonlocal swapped
        nested = Path(operation.path)
        if operation.kind == "create" and nested.parent.name == "deeper" and not swapped:
            swapped = True
            nested.parent.rename(tmp_path / "moved")
            nested.parent.symlink_to(tmp_path / "elsewhere")

    with fs.observed(swap), pytest.raises(StorageFailed):
        store.checkout("odd", tmp_path / "out", threads=1)
    assert swapped
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert not (tmp_path / "out").exists()


def test_a_staging_directory_that_others_may_enter_is_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever puts an open directory where the private one was just made stops the checkout."""
    make = os.mkdir

    def replaced(path: str | Path, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        make(path, mode, dir_fd=dir_fd)
        os.chmod(path, 0o777, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", replaced)
    with pytest.raises(Conflict):
        store.checkout("odd", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("umask", "file", "folder"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700)]
)
def test_modes(umask: int, file: int, folder: int, store: Store, tmp_path: Path) -> None:
    """Files are 0644 and directories 0755 less the umask; until the end nobody else gets in."""
    seen: set[int] = set()

    def look(operation: fs.Operation) -> None:
        staging = _staging(operation, tmp_path)
        if operation.kind in ("create", "write", "fsync", "rename") and staging:
            seen.add(stat.S_IMODE(staging.stat().st_mode))

    before = os.umask(umask)
    try:
        with fs.observed(look):
            store.checkout("odd", tmp_path / "out")
    finally:
        os.umask(before)
    assert seen == {0o700}
    for path in (tmp_path / "out", *(tmp_path / "out").rglob("*")):
        assert stat.S_IMODE(path.lstat().st_mode) == (folder if path.is_dir() else file)


# -- all or nothing ------------------------------------------------------------------------------


@pytest.mark.parametrize("there", [False, True], ids=["missing", "empty"])
def test_a_full_disk_leaves_nothing(there: bool, store: Store, tmp_path: Path) -> None:
    """A disk that fails at any write, sync or rename leaves the place as it was."""
    (tmp_path / "out").mkdir() if there else None
    before = sorted(tmp_path.rglob("*"))
    kinds = {"create": 2, "write": 3, "mkdir": 2, "fsync": 2, "syncdir": 1, "rename": 1}
    for kind, times in kinds.items():
        for step in range(times):
            seen = 0

            def refuse(operation: fs.Operation, kind: str = kind, step: int = step) -> None:
                nonlocal seen
                if operation.kind == kind and not operation.path.startswith(f"{store.path}/"):
                    seen += 1
                    if seen == step + 1:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            with fs.observed(refuse), pytest.raises(StorageFailed) as failed:
                store.checkout("odd", tmp_path / "out", threads=1)
            assert failed.value.errno == errno.ENOSPC
            assert sorted(tmp_path.rglob("*")) == before


def test_an_interrupt_leaves_nothing(store: Store, tmp_path: Path) -> None:
    """Ctrl-C in the middle leaves no directory, neither the final one nor a half one beside it."""

    def interrupt(tick: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.checkout("odd", tmp_path / "out", progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_block_leaves_nothing(odd: Path, tmp_path: Path) -> None:
    """A flipped bit in a pack stops the checkout with the block's name, and nothing is left."""
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        store.add(odd, name="odd")
        block = store.view("odd").record("many.blocks").block(3)
        location = store._catalog.locate([block])[0]
        pack = Path(store._catalog.packs.where(location.pack))
        pack.chmod(0o644)
        with pack.open("r+b") as file:
            file.seek(location.offset)
            byte = file.read(1)[0]
            file.seek(location.offset)
            file.write(bytes([byte ^ 1]))
        (tmp_path / "here").mkdir()
        with pytest.raises(Corrupt) as found:
            store.checkout("odd", tmp_path / "here" / "out")
        file = "model-00002-of-00002.safetensors"
        assert found.value.where == f"odd:{file}, tensor many.blocks, block {block}"
        assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize(
    "paths",
    [
        ["../evil"],
        ["/tmp/evil"],
        ["a/../../evil"],
        ["a\0b"],
        [""],
        ["config.json", "CONFIG.json"],
        ["A/x", "a/y"],
        ["a", "a/b"],
        ["a", "a.b", "a/b/c"],
        ["a//b"],
        ["./a"],
        ["a/"],
        ["x" * 256],
        ["a/" * 64 + "b"],
        ["a\nb"],
    ],
    ids=lambda paths: json.dumps(paths)[:30],
)
def test_a_strangers_manifest_stays_in_its_directory(
    paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths of a manifest that `add` would not have written are refused before a file is made."""
    content = b"x"
    (tmp_path / "here").mkdir()
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        block = BlockId.of(content)
        with monkeypatch.context() as careless, Transaction(store._catalog, "test") as transaction:
            careless.setattr(Manifest, "problem", lambda manifest, limits: None)
            transaction.put_block(block, encode(content, PLAIN_BYTES, Policy.RAW), "f", 0)
            part = Part(None, transaction.put_record(Tensor(BYTES, (1,), 1, block)), 1)
            manifest = Manifest(tuple(File(path, OPAQUE, 1, (part,)) for path in sorted(paths)))
            record = SnapshotRecord(
                manifest=transaction.put_record(manifest),
                parents=(),
                made="add",
                origin=None,
                author="",
                plan=None,
                coverage=None,
                message="",
                time_ns=0,
                tool="test",
            )
            transaction.commit(snapshots=[record])
        with pytest.raises(MstoreError):
            store.checkout(str(record.id()), tmp_path / "here" / "out")
    assert list((tmp_path / "here").iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "store"]


def test_a_merge_can_be_checked_out_after_its_inputs_have_gone(tmp_path: Path) -> None:
    """A checkout reads the store alone: sources on disk and refs of the experts may be gone."""
    root = FAMILY.write(tmp_path / "family")
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        for name in ("base", "e0"):
            store.add(root / name, name=name)
        store.merge(
            store.plan(MergeRequest(base="base", experts=["e0"], method="linear")), name="merged"
        )
        store.remove("base")
        store.remove("e0")
        shutil.rmtree(root)
        store.checkout("merged", tmp_path / "out")
    wanted = FAMILY.experts[0]["model.norm.weight"]
    found = families.read_checkpoint(tmp_path / "out")["model.norm.weight"]
    assert families.bits(found).tolist() == families.bits(wanted).tolist()


def test_the_snapshot_is_pinned_while_it_is_copied(store: Store, tmp_path: Path) -> None:
    """Garbage collection leaves a snapshot alone that is being checked out, and only so long."""
    held: list[set[SnapshotId]] = []

    def look(tick: Progress) -> None:
        held.append(leases.holds(store._catalog.layout))

    store.checkout("odd", tmp_path / "out", progress=look)
    assert {frozenset(one) for one in held} == {frozenset([store["odd"].id])}
    assert leases.holds(store._catalog.layout) == set()


def test_only_what_matches(store: Store, odd: Path, tmp_path: Path) -> None:
    """With patterns, files that match are written and no others; none for a pattern is wrong."""
    ref = store.refs("odd")[0]
    every = {path.path for path in store.files(ref.name)}
    wanted = {path for path in every if path.endswith(".json")}
    assert wanted
    assert wanted != every
    report = store.checkout(ref.name, tmp_path / "some", only=["*.json"])
    found = {
        str(path.relative_to(tmp_path / "some"))
        for path in (tmp_path / "some").rglob("*")
        if path.is_file()
    }
    assert found == wanted
    assert report.files == len(wanted)
    for path in found:
        assert (tmp_path / "some" / path).read_bytes() == (odd / path).read_bytes()
    with pytest.raises(NotFound, match="no file of the snapshot matches"):
        store.checkout(ref.name, tmp_path / "none", only=["*.json", "absent*"])
    assert not (tmp_path / "none").exists()


def test_without_weights(tmp_path: Path) -> None:
    """What is left are the files that no tensor is in: no shards, no index, no single file."""
    shard, shape = tmp_path / "m" / "model-00001-of-00001.safetensors", (4,)
    (tmp_path / "m" / "part").mkdir(parents=True)
    write_safetensors(shard, [("w", "U8", shape, bytes(4))])
    write_index(tmp_path / "m" / "model.safetensors.index.json", {"w": shard.name})
    write_safetensors(tmp_path / "m" / "part" / "model.safetensors", [("v", "U8", shape, bytes(4))])
    for path in ("config.json", "part/config.json", "tokenizer.model"):
        (tmp_path / "m" / path).write_text(path)
    with Store.init(tmp_path / "store") as store:
        store.add(tmp_path / "m", name="m")
        report = store.checkout("m", tmp_path / "out", weights=False)
    found = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {str(path.relative_to(tmp_path / "out")): path.read_text() for path in found} == {
        path: path for path in ("config.json", "part/config.json", "tokenizer.model")
    }
    assert report.files == 3
