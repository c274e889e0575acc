"""An index that lies: older than the store, fallen back, flipped, or rebuilt beside others.

The rule that all of this proves: the index is never believed alone where something is deleted or
overwritten.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from lives import Life, attempt, packs
from lmdb_page import PAGE
from small_models import small_model

from mstore import MergeRequest
from mstore.api import Store
from mstore.blocks.pack_store import HERE
from mstore.blocks.schema import BACKUP, CONDEMNED, PINNED, PRUNED, TABLES
from mstore.snapshots.signing import SigningKey
from mstore.store import mirror
from mstore.terms.errors import Corrupt, MstoreError, Unavailable
from mstore.terms.ids import PackId, SnapshotId
from mstore.upkeep.check import reindex as reindexing

TRANSACTION = 16 + 24 + 2 * 48 + 8
"""Where in a meta page its transaction number lies."""
KEY = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
WRITES = ["gc", "tag", "repair", "add", "rm", "prune"]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Life:
    """Three models of one family and a tag."""
    life = Life.begin(tmp_path_factory.mktemp("three"))
    life.add("base", "base")
    life.add("one", "base", changed="1")
    life.add("two", "base", changed="2")
    life.tag("v1", "one")
    return life


@pytest.fixture
def life(three: Life, tmp_path: Path) -> Life:
    """A copy of it."""
    root = tmp_path / "store"
    shutil.copytree(three.root, root)
    copied = Life(root, tmp_path / "sources", count=100)
    copied.promises.refs |= three.promises.refs
    copied.promises.contents |= three.promises.contents
    return copied


@pytest.fixture
def extra(tmp_path: Path) -> Path:
    """A model that is in no store."""
    return small_model(tmp_path / "extra", "extra")


def refused(life: Life, extra: Path) -> None:
    """Every write refuses and names reindex; the mirror and the packs stay as they are."""
    before = life.root.joinpath("refs", "mirror")
    told = before.read_bytes() if before.exists() else None
    there = packs(life.root)
    for call in WRITES:
        error = attempt(life.root, call, extra)
        assert isinstance(error, Corrupt), call
        assert error.hint == "mstore.Store.reindex(PATH)", call
    assert (before.read_bytes() if before.exists() else None) == told
    assert packs(life.root) == there


# -- an older index ----------------------------------------------------------------------------


def put_back(life: Life, old: Path) -> None:
    """Restore an index as a backup tool would."""
    shutil.rmtree(life.root / "index")
    shutil.copytree(old, life.root / "index")


@pytest.fixture
def older(life: Life, tmp_path: Path) -> Path:
    """The index as it was, after which more was added, moved and removed."""
    shutil.copytree(life.root / "index", tmp_path / "older")
    life.add("three")
    life.add("one", "base", changed="1 again")
    life.tag("v2", "three")
    life.remove("two")
    return tmp_path / "older"


@pytest.mark.rest
def test_an_older_index_is_read_and_not_written_by(life: Life, older: Path, extra: Path) -> None:
    """With an older index over newer packs, all writes refuse; reindex takes the mirror's refs."""
    expected = life.promises.refs
    put_back(life, older)
    with Store.open(life.root) as store:
        assert "older than the mirror" in (store.doubt() or "")
        assert {ref.name for ref in store.refs()} == {"base", "one", "two", "v1"}
        found = store.fsck()
        assert found.index_only
        assert found.hint == "mstore.Store.reindex(PATH)"
    refused(life, extra)
    report = Store.reindex(life.root)
    assert report.remarks
    assert report.kept_index is not None
    kept = Path(report.kept_index, "data.mdb")
    with Store.open(life.root) as store:
        assert store.doubt() is None
        assert not store.fsck().index_only
        assert store.stats().lost_found_bytes >= kept.stat().st_size
        assert {ref.name: ref.snapshot for ref in store.refs()} == expected
    life.promises.require_kept(life.root)


@pytest.mark.rest
def test_an_older_index_without_a_mirror(life: Life, older: Path, extra: Path) -> None:
    """Where the mirror is gone too, the packs tell that the index is older."""
    put_back(life, older)
    shutil.rmtree(life.root / "refs")
    for call in WRITES:
        error = attempt(life.root, call, extra)
        assert isinstance(error, Corrupt), call
        assert error.hint == "mstore.Store.reindex(PATH)", call
    there = packs(life.root)
    report = Store.reindex(life.root)
    assert report.recovered
    assert packs(life.root) == there
    life.promises.require_kept(life.root)


@pytest.mark.rest
def test_an_older_index_with_an_older_mirror(life: Life, tmp_path: Path, extra: Path) -> None:
    """Index, mirror and lists restored from one old backup, in place of what was there: also where
    it is one commit behind, that is told, and the newer pack is kept, and comes back."""
    shutil.copytree(life.root / "index", tmp_path / "older")
    shutil.copytree(life.root / "refs", tmp_path / "refs")
    life.add("three")
    put_back(life, tmp_path / "older")
    shutil.rmtree(life.root / "refs")
    shutil.copytree(tmp_path / "refs", life.root / "refs")
    there = packs(life.root)
    # One pack is enough, because it had a line before it had its name.
    for call in ("gc", "add", "repair"):
        error = attempt(life.root, call, extra)
        assert isinstance(error, Corrupt), call
        assert error.hint == "mstore.Store.reindex(PATH)", call
    assert packs(life.root) == there
    report = Store.reindex(life.root)
    assert len(report.recovered) == 1
    life.promises.require_kept(life.root)


@pytest.mark.rest
def test_an_older_backup_over_the_store(life: Life, older: Path, tmp_path: Path) -> None:
    """A backup of index and refs copied over newer ones: the newest mirror that is left counts."""
    expected = life.promises.refs
    mirrors = sorted((life.root / "refs").glob("mirror.*"), key=lambda path: int(path.suffix[1:]))
    put_back(life, older)
    # As `cp -a` does it: what the backup has not, stays.
    shutil.copy(mirrors[0], life.root / "refs" / "mirror")
    report = Store.reindex(life.root)
    assert any(mirrors[-1].name in remark for remark in report.remarks)
    # That mirror was replaced by the last move, the removal of `two`.
    with Store.open(life.root) as store:
        found = {ref.name: ref.snapshot for ref in store.refs()}
    assert {name: found.get(name) for name in expected} == expected
    assert found.keys() - expected.keys() == {"two"}
    assert any("two" in remark or "may be back" in remark for remark in report.remarks)
    life.promises.require_kept(life.root)


@pytest.mark.rest
def test_the_directory_of_the_mirror_is_gone(life: Life) -> None:
    """Without refs/ everything goes on, and the next command that writes makes a mirror again."""
    shutil.rmtree(life.root / "refs")
    life.tag("later", "one")
    assert mirror_lines(life).keys() == life.promises.refs.keys()
    shutil.rmtree(life.root / "refs")
    life.add("law", "law")
    assert mirror_lines(life).keys() == life.promises.refs.keys()
    shutil.rmtree(life.root / "refs")
    with Store.open(life.root) as store:
        assert store.repair().after.problems == ()
    assert mirror_lines(life).keys() == life.promises.refs.keys()
    shutil.rmtree(life.root / "index")
    Store.reindex(life.root)
    with Store.open(life.root) as store:
        assert {ref.name: ref.snapshot for ref in store.refs()} == life.promises.refs
    life.promises.require_kept(life.root)


@pytest.mark.rest
def test_a_command_warns(life: Life, older: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A command that reads by such an index says so on standard error, and what to type."""
    put_back(life, older)
    done = subprocess.run(
        [sys.executable, "-m", "mstore_cli", "--store", str(life.root), "refs"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "warning: " in done.stderr
    assert f"mstore --store {life.root} reindex" in done.stderr
    assert "base" in done.stdout


# -- one bit -----------------------------------------------------------------------------------


def meta_transactions(data: Path) -> list[int]:
    """The transaction numbers of the two meta pages."""
    raw = data.read_bytes()
    return [struct.unpack_from("<Q", raw, page * PAGE + TRANSACTION)[0] for page in (0, 1)]


@pytest.mark.rest
@pytest.mark.parametrize("which", ["the newest falls", "the older rises"])
def test_a_bit_in_a_meta_page(life: Life, extra: Path, which: str) -> None:
    """LMDB falls back one commit: the last acknowledged add is not collected, and comes back."""
    life.add("last")
    data = life.root / "index" / "data.mdb"
    numbers = meta_transactions(data)
    newest = numbers.index(max(numbers))
    page = newest if which == "the newest falls" else 1 - newest
    bits = range(64)
    for bit in bits:
        changed = list(numbers)
        changed[page] ^= 1 << bit
        if (changed[newest] < changed[1 - newest]) and max(changed) < 1 << 40:
            break
    else:
        pytest.fail("no such bit")
    raw = bytearray(data.read_bytes())
    struct.pack_into("<Q", raw, page * PAGE + TRANSACTION, changed[page])
    data.write_bytes(raw)
    (life.root / "index" / "lock.mdb").unlink()
    refused(life, extra)
    Store.reindex(life.root)
    life.promises.require_kept(life.root)


def keys_of(life: Life, database: str) -> list[bytes]:
    """All keys of a database, in order."""
    with Store.open(life.root) as store:
        index = store._catalog.index
        with index.env.read() as rows, rows.cursor(db=index.db(database)) as cursor:
            return [bytes(key) for key, _ in cursor]


@pytest.mark.rest
@pytest.mark.parametrize("byte", [0, 31])
@pytest.mark.parametrize("bit", [0, 7])
def test_a_bit_in_the_key_of_a_live_block(life: Life, byte: int, bit: int, extra: Path) -> None:
    """gc sees a needed block without a row, and a row that nobody needs: it takes neither."""
    # What one alone needs, so that gc has something to write.
    life.add("four")
    life.remove("four")
    for key in keys_of(life, "blocks"):
        shutil.copytree(life.root, life.root.with_name("copy"))
        data = life.root.with_name("copy") / "index" / "data.mdb"
        raw = data.read_bytes()
        changed = bytearray(key)
        changed[byte] ^= 1 << bit
        assert key in raw
        data.write_bytes(raw.replace(key, bytes(changed)))
        copied = Life(life.root.with_name("copy"), life.sources, promises=life.promises)
        error = attempt(copied.root, "gc", extra)
        # A block that only what was removed needs may go.
        assert error is None or error.hint in ("mstore.Store.reindex(PATH)", "repair()"), error
        Store.reindex(copied.root)
        copied.promises.require_kept(copied.root)
        shutil.rmtree(copied.root)


def flips(row: bytes) -> Iterator[bytes]:
    """The row with one bit changed, in a few places."""
    for at in {0, len(row) // 2, len(row) - 1}:
        changed = bytearray(row)
        changed[at] ^= 4
        yield bytes(changed)


@pytest.fixture(scope="module")
def every_row(three: Life, tmp_path_factory: pytest.TempPathFactory) -> Life:
    """A store with rows in every database."""
    root = tmp_path_factory.mktemp("rows") / "store"
    shutil.copytree(three.root, root)
    with Store.open(root) as store:
        plan = store.plan(MergeRequest(base="base", experts=["one"], method="linear"), threads=1)
        store.merge(plan, name="merged", threads=1)
        store.sign("v1", KEY)
        store.prune(["merged", "one"], keep_last=1, unnamed_inputs=True)
        index = store._catalog.index
        with index.env.write() as rows:
            index.put(rows, CONDEMNED, 256, (PackId(bytes(32)), 4096, HERE, ()))
            for marks in (PRUNED, PINNED):
                index.put(rows, marks, SnapshotId(b"\1" * 32), 0)
            index.put(rows, BACKUP, 1, ())
    return Life(root, three.sources, promises=three.promises)


@pytest.mark.sampled(30)
@pytest.mark.parametrize("database", sorted(table.name for table in TABLES if table.has_check))
@pytest.mark.parametrize("part", ["key", "value"])
def test_a_bit_in_a_row(
    every_row: Life, database: str, part: str, extra: Path, tmp_path: Path
) -> None:
    """fsck names a flipped row, nothing is deleted or overwritten by it, and reindex mends it."""
    life = every_row
    keys = keys_of(life, database)
    mirrored = mirror_lines(life)
    with Store.open(life.root) as store:
        named = {ref.name: (ref.kind, ref.snapshot) for ref in store.refs()}
        index = store._catalog.index
        with index.env.read() as rows:
            row = bytes(rows.get(keys[-1], db=index.db(database)))
    for changed in flips(keys[-1] if part == "key" else row):
        root = tmp_path / "copy"
        shutil.copytree(life.root, root)
        with Store.open(root) as store:
            index = store._catalog.index
            with index.env.write() as rows:
                if part == "key":
                    rows.delete(keys[-1], db=index.db(database))
                    rows.put(changed, row, db=index.db(database))
                else:
                    rows.put(keys[-1], changed, db=index.db(database))
            found = store.fsck()
            assert found.problems
            assert found.hint == "mstore.Store.reindex(PATH)"
            with pytest.raises(Corrupt) as refusal:
                store.repair()
            assert refusal.value.hint == "mstore.Store.reindex(PATH)"
        there = packs(root)
        error = attempt(root, "gc", extra)
        assert error is None or error.hint == "mstore.Store.reindex(PATH)"
        assert packs(root) == there
        copied = Life(root, life.sources, promises=life.promises)
        assert mirror_lines(copied) == mirrored
        Store.reindex(root)
        with Store.open(root) as store:
            assert {ref.name: (ref.kind, ref.snapshot) for ref in store.refs()} == named
        copied.promises.require_kept(root)
        shutil.rmtree(root)


def mirror_lines(life: Life) -> dict[str, Any]:
    """What the mirror says of refs."""
    with Store.open(life.root) as store:
        return dict(mirror.read(store._catalog.layout).refs)


@pytest.mark.rest
def test_rows_of_refs_that_are_gone(life: Life) -> None:
    """A ref that the mirror has and the index not, with nothing that tells why, is a finding."""
    with Store.open(life.root) as store:
        index = store._catalog.index
        with index.env.write() as rows:
            rows.delete(b"two", db=index.db("refs"))
        assert "two" in " ".join(problem.what for problem in store.fsck().problems)
        with pytest.raises(Corrupt) as refusal:
            store.gc(reflog_days=0)
        assert refusal.value.hint == "mstore.Store.reindex(PATH)"
    Store.reindex(life.root)
    life.promises.require_kept(life.root)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("database", ["refs", "reflog"])
def test_names_that_nobody_tells(life: Life, database: str) -> None:
    """Where rows of names are lost, and the mirror, what the index lists gets a branch."""
    moves = [key for key in keys_of(life, "reflog") if key.startswith(b"two\0")]
    with Store.open(life.root) as store:
        index = store._catalog.index
        with index.env.write() as rows:
            # The ref cannot be read; of its reflog nothing is left, or only what cannot be read.
            rows.put(b"two", b"damaged", db=index.db("refs"))
            for key in moves:
                rows.delete(key, db=index.db("reflog"))
                if database == "reflog":
                    rows.put(key, b"damaged", db=index.db("reflog"))
    shutil.rmtree(life.root / "refs")
    (life.root / "refs").mkdir()
    report = Store.reindex(life.root)
    assert report.remarks
    with Store.open(life.root) as store:
        recovered = {r.snapshot for r in store.refs() if r.name.startswith("recovered/")}
    assert recovered == {life.promises.refs["two"]}
    life.promises.require_kept(life.root)


# -- a new index beside others -----------------------------------------------------------------

CHILD = """
import sys
from mstore.api import Store
store = Store.open(sys.argv[1])
print("open", len(store.refs()), flush=True)
for line in sys.stdin:
    try:
        print(repr(eval(line)), flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
"""


class Neighbour:
    """Another process that has the store open, and does what it is told."""

    def __init__(self, root: Path) -> None:
        command = [sys.executable, "-c", CHILD, str(root)]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.first = self._line()

    def _line(self) -> str:
        assert self._child.stdout is not None
        return self._child.stdout.readline().strip()

    def does(self, expression: str) -> str:
        """What it says of a Python expression in which `store` is the store."""
        assert self._child.stdin is not None
        self._child.stdin.write(expression + "\n")
        self._child.stdin.flush()
        return self._line()

    def ends(self) -> int:
        """Let it close the store."""
        self._child.communicate()
        return self._child.returncode


@pytest.mark.rest
def test_whoever_opens_while_the_index_is_rebuilt(
    life: Life, monkeypatch: pytest.MonkeyPatch, extra: Path
) -> None:
    """He keeps the old index for reading; what he would commit, collect or mirror is refused."""
    life.remove("two")
    neighbours = []
    put_in_place = reindexing._put_in_place

    def meddled(*given: Any, **more: Any) -> Any:
        neighbours.append(Neighbour(life.root))
        return put_in_place(*given, **more)

    monkeypatch.setattr(reindexing, "_put_in_place", meddled)
    Store.reindex(life.root)
    (neighbour,) = neighbours
    count = len(life.promises.refs)
    assert neighbour.first == f"open {count}"
    # What is acknowledged by the new index, nobody takes away by the old one.
    life.add("after")
    told = (life.root / "refs" / "mirror").read_bytes()
    there = packs(life.root)
    assert neighbour.does("len(store.refs())") == str(count)
    for call in (
        "store.gc(reflog_days=0)",
        "store.tag('t', 'base')",
        "store.remove('base')",
        f"store.add({str(extra)!r}, name='extra', threads=1)",
        "store.repair()",
        "store.prune(keep_last=1)",
    ):
        assert neighbour.does(call).startswith(Unavailable.__name__), call
    assert neighbour.ends() == 0
    assert (life.root / "refs" / "mirror").read_bytes() == told
    assert packs(life.root) == there
    life.promises.require_kept(life.root)


@pytest.mark.rest
def test_a_writer_that_comes_meanwhile_stops_it(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who took a lease while the index was rebuilt does not lose his work: reindex gives up."""
    neighbours = []
    run = reindexing._Building.run

    def meddled(self: Any) -> Any:
        built = run(self)
        neighbour = Neighbour(life.root)
        neighbour.does("__import__('mstore.store.leases', fromlist=['Lease'])")
        neighbour.does(
            "setattr(store, 'held', __import__('mstore.store.leases', fromlist=['Lease'])"
            ".Lease(store._catalog.layout, store._catalog.index, 'add'))"
        )
        neighbours.append(neighbour)
        return built

    monkeypatch.setattr(reindexing._Building, "run", meddled)
    with pytest.raises(MstoreError, match="came into use"):
        Store.reindex(life.root)
    for neighbour in neighbours:
        neighbour.ends()
    monkeypatch.undo()
    life.promises.require_kept(life.root)


@pytest.mark.rest
def test_many_open_while_the_index_is_rebuilt(life: Life) -> None:
    """Processes that open and close the store all the time never see it without its refs."""
    program = (
        "import sys, time\n"
        "from mstore.api import Store\n"
        "from mstore.terms.errors import MstoreError\n"
        "ends = time.monotonic() + 6\n"
        "while time.monotonic() < ends:\n"
        "    try:\n"
        "        with Store.open(sys.argv[1]) as store:\n"
        "            found = {ref.name for ref in store.refs()}\n"
        "    except MstoreError as error:\n"
        "        sys.exit(f'{error}')\n"
        "    if found != set(sys.argv[2:]):\n"
        "        sys.exit(f'{found}')\n"
    )
    names = sorted(life.promises.refs)
    command = [sys.executable, "-c", program, str(life.root), *names]
    children = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    done = 0
    while any(child.poll() is None for child in children):
        try:
            Store.reindex(life.root)
            done += 1
        except MstoreError as error:
            assert "in use" in str(error) or "came into use" in str(error)  # noqa: PT017
    for child in children:
        _, told = child.communicate()
        assert child.returncode == 0, told
    assert done
    life.promises.require_kept(life.root)


# -- what gc had dropped -----------------------------------------------------------------------


@pytest.mark.rest
def test_what_was_collected_does_not_come_back(life: Life) -> None:
    """reindex of a healthy store leaves out what gc had dropped, and gc goes on as before."""
    life.remove("two")
    life.remove("v1")
    life.remove("one")
    with Store.open(life.root) as store:
        store.gc(reflog_days=0)
        before = store.snapshot_ids()
    for _ in range(2):
        report = Store.reindex(life.root)
        assert report.remarks == ()
        assert report.recovered == ()
        with Store.open(life.root) as store:
            assert store.snapshot_ids() == before
            assert store.fsck(read_data=True).problems == ()
            store.gc()
            store.gc(reflog_days=0)
    life.promises.require_kept(life.root)


def shared(directory: Path, *seeds: str) -> Path:
    """A model with one tensor for each seed."""
    import random

    from checkpoints import write_safetensors

    tensors = [(seed, "U8", (90_000,), random.Random(seed).randbytes(90_000)) for seed in seeds]
    write_safetensors(directory / "model.safetensors", tensors)
    return directory


@pytest.mark.rest
def test_what_shares_with_the_dropped_stays_whole(tmp_path: Path) -> None:
    """Z={t1}, X={t1,t2}, Y={t2,t3}; Z and X dropped: reindex, gc and repair go on working."""
    with Store.init(tmp_path / "store", block_size=1 << 16) as store:
        for name, seeds in (("Z", ("t1",)), ("X", ("t1", "t2")), ("Y", ("t2", "t3"))):
            store.add(shared(tmp_path / name, *seeds), name=name, threads=1)
        store.remove("Z", "X")
        store.gc(reflog_days=0)
    Store.reindex(tmp_path / "store")
    with Store.open(tmp_path / "store") as store:
        assert [ref.name for ref in store.refs()] == ["Y"]
        assert store.fsck(read_data=True).problems == ()
        store.gc()
        store.gc(reflog_days=0)
        assert store.repair().before.problems == ()
        view = store.view("Y")
        assert (
            b"".join(view.stream("model.safetensors"))
            == (tmp_path / "Y" / "model.safetensors").read_bytes()
        )


@pytest.mark.rest
@pytest.mark.parametrize("damage", ["key", "offset", "pack"])
def test_a_pack_goes_only_when_its_footer_agrees(life: Life, damage: str) -> None:
    """A row that names another pack, place or key cannot make gc remove the pack that has it."""
    # A pack that gc would write anew, and remove: of its blocks, some are needed and some not.
    life.add("big")
    life.add("kin", f"s{life.count}", changed="kin")
    life.remove("big")
    there = packs(life.root)
    with Store.open(life.root) as store:
        index = store._catalog.index
        with index.env.write() as rows:
            with rows.cursor(db=index.db("blocks")) as cursor:
                entries = [(bytes(key), bytes(value)) for key, value in cursor]
            numbers = sorted({value[:4] for _, value in entries})
            for key, value in entries:
                other = next(number for number in numbers if number != value[:4])
                match damage:
                    case "key":
                        rows.delete(key, db=index.db("blocks"))
                        rows.put(bytes(32 - 4) + key[:4], value, db=index.db("blocks"))
                    case "offset":
                        rows.put(key, value[:4] + bytes(8) + value[12:], db=index.db("blocks"))
                    case "pack":
                        rows.put(key, other + value[4:], db=index.db("blocks"))
    error = attempt(life.root, "gc", life.root)
    # What cannot be read at its place is not copied, so that its pack stays.
    assert (error is None) == (damage == "offset")
    assert there <= packs(life.root)
    Store.reindex(life.root)
    life.promises.require_kept(life.root)
