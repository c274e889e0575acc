"""Stores are made and opened with care, and nothing leaves one that was not checked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checkpoints import write_safetensors
from msgspec import structs
from sick_disk import sick_disk
from small_models import BLOCK, small_model

from mstore import fs
from mstore.api import Store
from mstore.blocks.codecs import PLAIN_BYTES, Codec, Policy, encode
from mstore.blocks.location import Location
from mstore.blocks.packs import Kind
from mstore.blocks.reader import Meter
from mstore.store.catalog import Catalog
from mstore.store.objects.manifest import Manifest
from mstore.store.objects.tensor import Tensor
from mstore.store.transaction import Transaction
from mstore.terms.errors import (
    BadRequest,
    BudgetExceeded,
    Conflict,
    Corrupt,
    Incompatible,
    MstoreError,
    NotFound,
    StorageFailed,
)
from mstore.terms.ids import BlockId, ManifestId, PackId, SnapshotId, TensorId
from mstore.terms.sizes import exact_size


def build(root: Path) -> None:
    """A store with one small model under `model`, closed."""
    with Store.init(root / "store", block_size=BLOCK, codec="raw") as store:
        store.add(small_model(root / "model", "seed"), name="model", threads=1)


@pytest.fixture
def catalog(template: Path, tmp_path: Path) -> Iterator[Catalog]:
    """A copy of it, open."""
    shutil.copytree(template / "store", tmp_path / "store")
    catalog = Catalog.open(tmp_path / "store")
    yield catalog
    catalog.close()


def blocks(catalog: Catalog) -> dict[BlockId, Location]:
    """Every block of a store."""
    with catalog.index.env.read() as rows:
        return dict(catalog.index.blocks(rows))


def flip(path: Path, place: int) -> None:
    """Change one bit of a read-only file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.chmod(0o600)
    path.write_bytes(data)


# -- making ------------------------------------------------------------------------------------


def test_a_new_store(tmp_path: Path) -> None:
    """A store is its format file and empty places; it opens at once, with the same identity."""
    with Store.init(tmp_path / "a" / "store", block_size=BLOCK) as store:
        uuid = store.uuid
        assert store.fsck(read_data=True).problems == ()
    root = tmp_path / "a" / "store"
    assert (root / "format").read_text() == f"mstore 3 {uuid} 65536\n"
    assert sorted(path.name for path in root.iterdir()) == [
        "config", "format", "index", "lock", "packs", "refs", "stats", "tmp",
    ]  # fmt: skip
    assert (root / "refs" / "mirror").read_text().startswith("mstore refs 2\ngeneration 0\nblake3 ")
    with Store.open(root) as store:
        assert (store.uuid, store.block_size, store.refs()) == (uuid, BLOCK, [])
    with Store.init(tmp_path / "another", block_size=BLOCK) as store:
        assert store.uuid != uuid


@pytest.mark.parametrize("size", [0, -1, 1, 1 << 15, (1 << 16) + 1, 100_000, 1 << 25])
def test_bad_block_sizes(size: int, tmp_path: Path) -> None:
    """A block size is a power of two from 64 KiB to 16 MiB; nothing is made with another."""
    with pytest.raises(BadRequest, match="power of two"):
        Catalog.create(tmp_path / "store", size)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [1 << 16, 1 << 20, 1 << 24])
def test_good_block_sizes(size: int, tmp_path: Path) -> None:
    """The ends of the range and the default are kept."""
    Catalog.create(tmp_path / "store", size).close()
    catalog = Catalog.open(tmp_path / "store")
    assert catalog.block_size == size
    catalog.close()


def test_a_second_init_is_refused(template: Path, tmp_path: Path) -> None:
    """init where a store is, open or not, is a Conflict that says so; the store stays as it is."""
    root = tmp_path / "store"
    shutil.copytree(template / "store", root)
    before = (root / "format").read_bytes()
    with pytest.raises(Conflict, match="store already") as conflict:
        Catalog.create(root, BLOCK)
    assert conflict.value.where == str(root)
    with Store.open(root) as store:
        with pytest.raises(Conflict, match="store already"):
            Store.init(root, block_size=1 << 20)
        assert store.fsck(read_data=True).problems == ()
        assert [ref.name for ref in store.refs()] == ["model"]
    assert (root / "format").read_bytes() == before


def test_init_takes_nobody_elses_directory(template: Path, tmp_path: Path) -> None:
    """A directory with any file in it is refused and untouched, also one that looks like a store
    whose format file was lost; an empty directory is taken."""
    for name, file in (("a", "notes.txt"), ("b", "tmp/mine"), ("c", "index/data.mdb.bak")):
        path = tmp_path / name / file
        path.parent.mkdir(parents=True)
        path.write_text("mine")
        with pytest.raises(Conflict, match="not empty"):
            Catalog.create(tmp_path / name, BLOCK)
        assert [p for p in (tmp_path / name).rglob("*") if p.is_file()] == [path]
    shutil.copytree(template / "store", tmp_path / "store")
    (tmp_path / "store" / "format").unlink()
    before = sorted((tmp_path / "store").rglob("*"))
    with pytest.raises(Conflict):
        Catalog.create(tmp_path / "store", BLOCK)
    assert sorted((tmp_path / "store").rglob("*")) == before
    for name in ("file", "link"):
        (tmp_path / "file").touch()
        (tmp_path / "link").symlink_to(tmp_path)
        with pytest.raises(Conflict):
            Catalog.create(tmp_path / name, BLOCK)
        (tmp_path / "link").unlink()
    (tmp_path / "empty").mkdir()
    Catalog.create(tmp_path / "empty", BLOCK).close()


@pytest.mark.rest
def test_a_killed_init_is_taken_up(tmp_path: Path) -> None:
    """init stopped at any operation leaves no store, and the next init there makes one."""

    class Killed(BaseException):
        pass

    made = 0
    for at in range(1000):
        root = tmp_path / str(at)
        seen = 0

        def kill(operation: fs.Operation, at: int = at) -> None:
            nonlocal seen
            seen += 1
            # From there on everything is refused, so that nothing is cleared away.
            if seen > at:
                raise Killed

        try:
            with fs.observed(kill):
                Catalog.create(root, BLOCK).close()
        except Killed:
            made += 1
        else:
            break
        if not (root / "format").exists():
            with pytest.raises(NotFound):
                Catalog.open(root)
            Catalog.create(root, BLOCK).close()
        Catalog.open(root).close()
    assert made > 20


@pytest.mark.rest
def test_of_many_inits_one_succeeds(tmp_path: Path) -> None:
    """Processes that init one directory at the same time: one makes the store, the others are
    told that there is one."""
    code = (
        "import sys; from pathlib import Path; from mstore.store.catalog import Catalog\n"
        "from mstore.terms.errors import MstoreError\n"
        "sys.stdin.readline()\n"
        "try: print(Catalog.create(Path(sys.argv[1]), 1 << 16).layout.uuid)\n"
        "except MstoreError as error: print(type(error).__name__)"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "store")],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    with ThreadPoolExecutor(len(children)) as pool:
        told = list(pool.map(lambda child: child.communicate("go\n", timeout=600)[0], children))
    said = sorted(line.strip() for line in told)
    catalog = Catalog.open(tmp_path / "store")
    assert said == sorted([str(catalog.layout.uuid), *["Conflict"] * 3])
    catalog.close()


# -- opening -----------------------------------------------------------------------------------


def test_no_store(tmp_path: Path) -> None:
    """A missing, an empty and an impossible path are NotFound, and the hint offers both ways on."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name in ("missing", "empty", "file", "file/below"):
        with pytest.raises(NotFound, match="no store") as missing:
            Catalog.open(tmp_path / name)
        made = f"mstore.Store.init({str(tmp_path / name)!r})"
        assert missing.value.hint == f"name another path, or make a store at this one: {made}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]


def test_a_newer_format_is_refused(template: Path, tmp_path: Path) -> None:
    """A store of another format version is Incompatible, whatever else its line says."""
    root = tmp_path / "store"
    shutil.copytree(template / "store", root)
    line = (root / "format").read_text()
    newer, older = "pip install -U mstore", "mstore.Store.migrate(PATH)"
    others = {
        line.replace("mstore 3", "mstore 4"): newer,
        line.replace("mstore 3", "mstore 2"): older,
        "mstore 10 something new\n": newer,
        "mstore 0\n": older,
    }
    for other, hint in others.items():
        (root / "format").write_text(other)
        with pytest.raises(Incompatible, match="format") as refusal:
            Catalog.open(root)
        assert (refusal.value.where, refusal.value.hint) == (str(root), hint)


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: "",
        lambda line: "\0" * len(line),
        lambda line: line[:-1],
        lambda line: line[:20],
        lambda line: line + "more\n",
        lambda line: line.upper(),
        lambda line: line.replace("65536", "065536"),
        lambda line: line.replace("65536", "many"),
        lambda line: line.replace("mstore 3", "mstore two"),
        lambda line: line.replace("mstore 3", "mstore 9" + "9" * 5000),
        lambda line: line.replace("mstore", "mst\u00f6re"),
        lambda line: line.replace(" ", "  "),
    ],
)
def test_a_damaged_format_file_is_refused(
    damage: Callable[[str], str], template: Path, tmp_path: Path
) -> None:
    """Anything but the exact line is Corrupt (or of another version), and names the file."""
    root = tmp_path / "store"
    shutil.copytree(template / "store", root)
    (root / "format").write_text(damage((root / "format").read_text()))
    with pytest.raises((Corrupt, Incompatible)):
        Catalog.open(root)


@pytest.mark.parametrize("size", [0, 1, 1 << 15, 100_000, 1 << 30])
def test_an_impossible_block_size_is_refused(size: int, template: Path, tmp_path: Path) -> None:
    """A format file with a block size that no store can have is Corrupt."""
    root = tmp_path / "store"
    shutil.copytree(template / "store", root)
    line = (root / "format").read_text()
    (root / "format").write_text(line.replace("65536", str(size)))
    with pytest.raises(Corrupt):
        Catalog.open(root)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["nfs4", "9p", "virtiofs", "fuse.juicefs", "fuse", "wekafs"])
def test_an_unknown_filesystem_is_refused(
    kind: str, template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a filesystem that is not known to be local, a store is neither made, opened, reindexed nor
    cloned, until its settings name that type; nothing is written there before."""
    root, new = tmp_path / "store", tmp_path / "new"
    shutil.copytree(template / "store", root)
    monkeypatch.setattr(fs, "filesystem_type", lambda path: kind)
    why = f"needs a local filesystem, and mstore does not know {kind} as one"
    for use in (Catalog.open, Store.reindex):
        with pytest.raises(Incompatible, match=why) as refused:
            use(root)
        assert f": mstore.Store.vouch(PATH, '{kind}')" in str(refused.value.hint)
    with pytest.raises(Incompatible, match=why) as refused:
        Store.init(new)
    made = f": mstore.Store.init({str(new)!r}, filesystem='{kind}')"
    assert str(refused.value.hint).endswith(made)
    Store.vouch(root, "another")
    with pytest.raises(Incompatible, match=why):
        Catalog.open(root)
    assert Store.vouch(root, kind)["filesystem"] == kind
    Store.reindex(root)
    with Store.open(root) as store:
        assert store.config["filesystem"] == kind
        store.clone(root, new)
        store.backup(tmp_path / "kept")
    for copy in (new, tmp_path / "kept"):
        Store.open(copy).close()
    Store.init(tmp_path / "other", filesystem=kind).close()
    Store.vouch(root, "")
    with pytest.raises(Incompatible, match=why) as refused:
        Store.clone(root, tmp_path / "cloned")
    assert list(tmp_path.glob("cloned*")) == []


@pytest.mark.skipif(not os.access("/dev/fuse", os.W_OK), reason="there is no FUSE")
def test_a_store_seen_through_fuse(template: Path, tmp_path: Path) -> None:
    """A store that another program shows through FUSE is refused, and read once its settings say
    that such a filesystem behaves as a local one."""
    root = tmp_path / "store"
    shutil.copytree(template / "store", root)
    with sick_disk(root, tmp_path), pytest.raises(Incompatible, match=r"know fuse\.sick as"):
        Catalog.open(root)
    Store.vouch(root, "fuse.sick")
    with sick_disk(root, tmp_path), Store.open(root) as store:
        assert store.fsck(read_data=True).problems == ()


def test_a_copy_of_a_store_goes_to_a_known_filesystem(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clone or backup on a filesystem that is not known is refused, and the store's settings are
    what to change; nothing is written there."""
    root = tmp_path / "store"
    shutil.copytree(template / "store", root)
    away = tmp_path / "away"
    kinds = {True: "fuse.s3fs", False: "ext4"}
    monkeypatch.setattr(fs, "filesystem_type", lambda path: kinds[path.is_relative_to(away)])
    away.mkdir()
    with Store.open(root) as store:
        with pytest.raises(Incompatible, match=r"fuse\.s3fs") as refused:
            store.backup(away / "kept")
        assert "mstore.Store.vouch(PATH, 'fuse.s3fs')\na backup is a store" in str(
            refused.value.hint
        )
    with pytest.raises(Incompatible, match=r"fuse\.s3fs") as refused:
        Store.clone(root, away / "cloned")
    assert f"mstore.Store.vouch({str(root)!r}, 'fuse.s3fs')" in str(refused.value.hint)
    assert list(away.iterdir()) == []
    Store.vouch(root, "fuse.s3fs")
    with Store.open(root) as store:
        store.backup(away / "kept")
    Store.open(away / "kept").close()


def test_a_lost_index_is_corrupt(template: Path, tmp_path: Path) -> None:
    """A store whose index is gone does not open as an empty one."""
    root = tmp_path / "store"
    shutil.copytree(template / "store", root)
    shutil.rmtree(root / "index")
    with pytest.raises(MstoreError):
        Catalog.open(root)
    (root / "index").mkdir()
    with pytest.raises(Corrupt, match="index"):
        Catalog.open(root)


# -- reading -----------------------------------------------------------------------------------


def test_every_block_reads_as_what_it_is(catalog: Catalog) -> None:
    """Each block, raw or constant, read whole or into a buffer, hashes to its id."""
    found = blocks(catalog)
    assert {location.codec for location in found.values()} == {0, 1}
    for id, location in found.items():
        assert BlockId.of(catalog.read_block(id)) == id
        target = bytearray(location.raw_length)
        catalog.read_block_into(id, location, memoryview(target))
        assert BlockId.of(target) == id
    assert catalog.has_blocks([*found, BlockId(bytes(32))]) == [True] * len(found) + [False]
    assert catalog.locate(found) == list(found.values())


def test_neighbours_are_read_together(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks come in the order asked for, wherever they lie; those side by side in one read."""
    found = blocks(catalog)
    raw = sorted(
        (location.pack, location.offset, id)
        for id, location in found.items()
        if location.codec == Codec.RAW
    )
    read: list[int] = []
    source = catalog.packs.read_scattered

    def counted(pack: PackId, offset: int, targets: Sequence[memoryview]) -> None:
        read.append(len(targets))
        source(pack, offset, targets)

    monkeypatch.setattr(catalog.packs, "read_scattered", counted)
    meter = Meter("expert")
    wanted = [id for *_, id in reversed(raw)]
    data = catalog.read_blocks(wanted, meter)
    assert data.tobytes() == b"".join(map(bytes, map(catalog.read_block, wanted)))
    assert sum(read) == len(raw) > len(read)
    assert meter.total == sum(found[id].stored_length for id in wanted)
    several = [*found, *found]
    data = catalog.read_blocks(several)
    assert data.tobytes() == b"".join(map(bytes, map(catalog.read_block, several)))


def test_a_flipped_bit_is_an_error_that_names_the_block(catalog: Catalog) -> None:
    """No damaged byte of any payload is handed out; the error says which block, pack and offset."""
    for id, location in blocks(catalog).items():
        path = Path(catalog.packs.where(location.pack))
        for place in (0, location.stored_length // 2, location.stored_length - 1):
            flip(path, location.offset + place)
            with pytest.raises(Corrupt) as refusal:
                catalog.read_block(id)
            assert refusal.value.where == f"block {id}"
            assert location.pack.short in refusal.value.what
            assert str(location.offset) in refusal.value.what
            with pytest.raises(Corrupt) as refusal:
                catalog.read_blocks(list(blocks(catalog)))
            assert refusal.value.where == f"block {id}"
            with pytest.raises(Corrupt, match=str(location.offset)):
                catalog.read_block_into(id, location, memoryview(bytearray(location.raw_length)))
            flip(path, location.offset + place)
        catalog.read_block(id)


def test_a_damaged_record_is_an_error_that_names_it(catalog: Catalog) -> None:
    """The same for tensor records, manifests and snapshots."""
    with catalog.index.env.read() as rows:
        records = list(catalog.index.records(rows))
    assert {kind for kind, _, _ in records} == {Kind.TENSOR, Kind.MANIFEST, Kind.SNAPSHOT}
    read: dict[Kind, Callable[[bytes], object]] = {
        Kind.TENSOR: lambda raw: catalog.tensor(TensorId(raw)),
        Kind.MANIFEST: lambda raw: catalog.manifest(ManifestId(raw)),
        Kind.SNAPSHOT: lambda raw: catalog.snapshot(SnapshotId(raw)),
    }
    for kind, raw, location in records:
        flip(
            Path(catalog.packs.where(location.pack)), location.offset + location.stored_length // 2
        )
        with pytest.raises(Corrupt, match="does not match") as refusal:
            read[kind](raw)
        assert refusal.value.where is not None
        assert raw.hex() in refusal.value.where
        flip(
            Path(catalog.packs.where(location.pack)), location.offset + location.stored_length // 2
        )
        read[kind](raw)


def test_a_lying_index_is_found_out(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with other offsets, lengths, codecs or widths give errors, never other bytes."""
    found = blocks(catalog)
    raw = next(id for id, where in found.items() if where.codec == 0 and where.raw_length > 500)
    where = found[raw]
    lies = [
        Location(where.pack, where.offset + 1, where.stored_length, where.raw_length, 0, 2),
        Location(where.pack, where.offset, where.stored_length - 1, where.raw_length - 1, 0, 2),
        Location(where.pack, where.offset, where.stored_length, where.raw_length - 1, 0, 2),
        Location(where.pack, where.offset, where.stored_length, BLOCK + 1, 0, 2),
        Location(where.pack, where.offset, (1 << 32) - 1, BLOCK, 0, 2),
        Location(where.pack, where.offset, 2, BLOCK, 1, 2),
        Location(where.pack, where.offset, 2, BLOCK, 1, 0),
        Location(where.pack, where.offset, 2, BLOCK, 3, 2),
        Location(where.pack, 1 << 60, where.stored_length, where.raw_length, 0, 2),
    ]
    for lie in lies:
        with monkeypatch.context() as index:
            index.setattr(catalog, "locate", lambda blocks, lie=lie: [lie])
            with pytest.raises((Corrupt, Incompatible, StorageFailed)):
                catalog.read_block(raw, lie)
    with pytest.raises(Corrupt, match="were expected"):
        catalog.read_block_into(raw, where, memoryview(bytearray(where.raw_length + 1)))


def test_what_is_not_stored(catalog: Catalog) -> None:
    """Unknown blocks are Corrupt (something named them), unknown records NotFound; both named."""
    missing = BlockId(bytes(32))
    with pytest.raises(Corrupt, match=r"does not have") as block:
        catalog.read_block(missing)
    assert block.value.where == f"block {missing}"
    with pytest.raises(NotFound, match="no such manifest"):
        catalog.manifest(ManifestId(bytes(32)))
    tensor = catalog.manifest(
        catalog.snapshot(catalog.resolve("model")).manifest_id()
    ).files[0].parts[0].tensor_id()  # fmt: skip
    with pytest.raises(NotFound, match="no such manifest"):
        catalog.record(Manifest, ManifestId(tensor))


def test_reads_are_metered(catalog: Catalog) -> None:
    """Stored bytes are charged before they are read, and beyond the limit nothing is read."""
    found = blocks(catalog)
    total = sum(location.stored_length for location in found.values())
    meter = Meter("expert", total)
    for id, location in found.items():
        catalog.read_block(id, location, meter)
    assert meter.total == total
    catalog.packs.close()
    shutil.rmtree(catalog.layout.packs)
    id, location = next(iter(found.items()))
    with pytest.raises(BudgetExceeded, match=re.escape(f"the plan allows {exact_size(total)}")):
        catalog.read_block(id, location, meter)
    target = memoryview(bytearray(location.raw_length))
    with pytest.raises(BudgetExceeded):
        catalog.read_block_into(id, location, target, meter)
    assert meter.total == total


def test_a_meter_is_exact_for_any_number_of_threads() -> None:
    """However charges race, their sum is exact and never beyond the limit."""
    meter = Meter("expert", 1000)
    refused = threading.Semaphore(0)

    def charge(_: int) -> None:
        try:
            meter.charge(7)
        except BudgetExceeded:
            refused.release()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(charge, range(500)))
    assert meter.total == 1000 // 7 * 7
    assert sum(refused.acquire(blocking=False) for _ in range(500)) == 500 - 1000 // 7


def test_a_record_is_decoded_once(catalog: Catalog) -> None:
    """The same record asked for twice is the same object, for many threads as for one."""
    manifest = catalog.snapshot(catalog.resolve("model")).manifest_id()
    first = catalog.manifest(manifest)
    with ThreadPoolExecutor(4) as pool:
        assert all(
            again is first for again in pool.map(lambda _: catalog.manifest(manifest), "abcd")
        )
    assert catalog.snapshots_of(manifest) == catalog.snapshot_ids()
    assert catalog.snapshots_of(ManifestId(bytes(32))) == []


def test_snapshots_of_equal_content_come_newest_first(catalog: Catalog, tmp_path: Path) -> None:
    """Of several snapshots with one manifest the last that was made is the first in the list."""
    model = small_model(tmp_path / "model", "seed")
    with Store.open(catalog.layout.root) as store:
        ids = [catalog.resolve("model")]
        ids += [store.add(model, name=f"again/{n}", threads=1).snapshot for n in range(3)]
    manifest = catalog.snapshot(ids[0]).manifest_id()
    assert catalog.snapshots_of(manifest) == ids[::-1]


def test_many_tensors_at_once(tmp_path: Path) -> None:
    """Many records come in the order asked for, repeated ones too; a missing one is NotFound."""
    catalog = Catalog.create(tmp_path / "store", BLOCK)
    made = [Tensor("F32", (n, 0), 0, b"") for n in range(3)]
    with Transaction(catalog, "test") as transaction:
        ids = [TensorId(transaction.put_record(record)) for record in made]
        transaction.commit()
    assert catalog.tensors([ids[2], ids[0], ids[2], ids[1]]) == [made[2], made[0], made[2], made[1]]
    assert catalog.tensors(ids) == made
    assert catalog.tensors([]) == []
    with pytest.raises(NotFound):
        catalog.tensors([ids[0], TensorId.of(b"nobody")])
    catalog.close()


def test_lengths_at_rest(tmp_path: Path) -> None:
    """`stored_lengths` counts what `locate` says, repeated blocks too, and names a missing one."""
    catalog = Catalog.create(tmp_path / "store", BLOCK)
    data = [bytes(range(250)), bytes(BLOCK), b"abc"]
    ids = [BlockId.of(one) for one in data]
    with Transaction(catalog, "test") as transaction:
        for number, (id, one) in enumerate(zip(ids, data, strict=True)):
            transaction.put_block(id, encode(one, PLAIN_BYTES, Policy.RAW), "file", number * BLOCK)
        transaction.commit()
    asked = [ids[1], ids[0], ids[1], ids[2]]
    wanted = [place.stored_length for place in catalog.locate(asked)]
    assert catalog.stored_lengths(b"".join(asked)).tolist() == wanted
    assert wanted[1] == 250
    assert catalog.stored_lengths(b"").tolist() == []
    missing = BlockId.of(b"missing")
    for look in (lambda blocks: catalog.stored_lengths(b"".join(blocks)), catalog.locate):
        with pytest.raises(Corrupt, match="does not have this block") as refused:
            look([ids[0], missing, ids[1], missing])
        assert refused.value.where == f"block {missing}"
    catalog.close()


def test_a_codec_of_a_newer_version_is_named_with_its_block(tmp_path: Path) -> None:
    """A codec that this version does not know is an error that names the block."""
    with Store.init(tmp_path / "store", block_size=1 << 16, codec="raw") as store:
        write_safetensors(tmp_path / "in" / "model.safetensors", [("x", "U8", (3,), b"xyz")])
        store.add(tmp_path / "in", name="a", threads=1)
        catalog = store._catalog
        block = next(catalog.tensor(store.view("a").tensors["x"]).block_ids())
        place = structs.replace(catalog.locate([block])[0], codec=8)
        with pytest.raises(Incompatible, match=f"block {block}"):
            catalog.read_block(block, place)
