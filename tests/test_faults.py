"""The disk says no: every file operation of every command fails once, or from there on.

The fault comes from the observer of `mstore.fs`, right before the operation would be done; what
the library then removes is really removed.  One test fills a real, small filesystem, and empties
it again with gc.
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from checkpoints import write_safetensors
from proof_models import model_files, write_files
from small_models import BLOCK, files_of, small_model

from mstore import MergeRequest, fs
from mstore.api import Store
from mstore.terms.errors import MstoreError, StorageFailed
from mstore.terms.ids import SnapshotId

REMOVALS = {"unlink", "rmtree"}
NEW = "team/new"


class Fault:
    """An observer that counts operations and makes the one numbered `at` fail.

    `lasting`: also all later ones, but for removals, as on a disk that is full.
    """

    def __init__(self, at: int, code: int, *, lasting: bool = False) -> None:
        self._at = at
        self._code = code
        self._lasting = lasting
        self.kinds: list[str] = []
        self.hit: fs.Operation | None = None
        self.tried_again = False

    def __call__(self, operation: fs.Operation) -> None:
        if operation.kind == "committed":
            return
        number = len(self.kinds)
        self.kinds.append(operation.kind)
        if self.hit is not None and self.hit.kind == "fsync":
            same = operation.path == self.hit.path
            self.tried_again |= same and operation.kind in {"fsync", "rename", "link"}
        lasts = self._lasting and number > self._at and operation.kind not in REMOVALS
        if number == self._at or lasts:
            self.hit = self.hit or operation
            raise OSError(self._code, os.strerror(self._code))


@dataclass(frozen=True)
class Call:
    """A command under test.  `do` returns what the ref `team/new` is then, None if it says nothing.

    `prepare` runs before, without faults.  `alone`: no store may be open meanwhile.  `families`:
    which of `FAMILIES` the store holds; no more than the command is about, since every trial checks
    all of it twice.
    """

    do: Callable[[Path, Store | None], SnapshotId | None]
    prepare: Callable[[Path, Store], object] | None = None
    alone: bool = False
    families: str = "small"


def _add(sources: Path, store: Store | None) -> SnapshotId:
    assert store is not None
    return store.add(sources / "three", name=NEW, base="base", threads=1).snapshot


def _dense_add(sources: Path, store: Store | None) -> SnapshotId:
    assert store is not None
    return store.add(sources / "tuned", name=NEW, base="seven", codec="dense", threads=1).snapshot


def _merge(sources: Path, store: Store | None) -> SnapshotId:
    assert store is not None
    plan = store.plan(
        MergeRequest(
            base="base", experts=["one", "two"], method="ties", parameters={"density": 0.4}
        ),
        threads=1,
    )
    return store.merge(plan, name=NEW, threads=1).snapshot


def _merge_later(sources: Path, store: Store | None) -> SnapshotId:
    assert store is not None
    plan = store.plan(MergeRequest(base="base", experts=["one", "two"], method="linear"), threads=1)
    return store.merge(plan, name=NEW, virtual=True, threads=1).snapshot


def _materialize(sources: Path, store: Store | None) -> SnapshotId:
    assert store is not None
    return store.materialize(NEW, threads=1).snapshot


def _reset(sources: Path, store: Store | None) -> SnapshotId:
    assert store is not None
    return store.reset(NEW, "one").snapshot


def _tag(sources: Path, store: Store | None) -> SnapshotId:
    assert store is not None
    if NEW in names(store):
        return names(store)[NEW]
    return store.tag(NEW, "one").snapshot


def _add_scaled(sources: Path, store: Store) -> None:
    """A weight in fp8 with scales for its blocks."""
    scales = struct.pack("<6f", *(0.5 + number for number in range(6)))
    tensors = [
        ("a.weight", "F8_E4M3", (300, 256), bytes(range(1, 101)) * 768),
        ("a.weight_scale_inv", "F32", (3, 2), scales),
    ]
    scaled = sources / "scaled"
    if not scaled.exists():
        write_safetensors(scaled / "model.safetensors", tensors)
        config = '{"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}'
        (scaled / "config.json").write_text(config)
    store.add(scaled, name="scaled", threads=1)


def _cast(sources: Path, store: Store | None) -> SnapshotId:
    assert store is not None
    return store.cast("scaled", dtype="bfloat16", name=NEW, threads=1).snapshot


def _configure(sources: Path, store: Store | None) -> None:
    assert store is not None
    store.configure("codec", "dense")
    assert store.config["codec"] == "dense"


def _forget(sources: Path, store: Store) -> None:
    """Something to collect: a removed ref, in a pack of its own and partly in another's."""
    store.configure("reflog_days", 0)
    store.add(sources / "tuned", name="doomed", base="seven", codec="dense", threads=1)
    for name in ("doomed", "two"):
        store.remove(name)


def _gc(sources: Path, store: Store | None) -> None:
    assert store is not None
    store.gc()


def _age(sources: Path, store: Store) -> None:
    """History on a branch."""
    store.configure("reflog_days", 0)
    for name in ("three", "tuned"):
        store.add(sources / name, name="one", threads=1)


def _prune(sources: Path, store: Store | None) -> None:
    assert store is not None
    store.prune(keep_last=1, unnamed_inputs=True)


def _pin(sources: Path, store: Store | None) -> None:
    assert store is not None
    store.pin("tuned", raw=True, threads=1)


def _tune(sources: Path, store: Store) -> None:
    """A fine-tune whose blocks are differences."""
    store.configure("codec", "dense")
    store.add(sources / "tuned", name="tuned", base="seven", threads=1)


def _unpin(sources: Path, store: Store | None) -> None:
    assert store is not None
    if store.show("tuned").pinned:
        store.unpin("tuned", threads=1)


def _tune_and_pin(sources: Path, store: Store) -> None:
    _tune(sources, store)
    store.pin("tuned", raw=True, threads=1)


def _sign(sources: Path, store: Store | None) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from mstore.snapshots.signing import SigningKey

    assert store is not None
    store.sign("one", SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(32))))


def _note(sources: Path, store: Store | None) -> None:
    assert store is not None
    store.note("one", {"mmlu": 0.62})


def _reindex(sources: Path, store: Store | None) -> None:
    Store.reindex(sources / "copy")


def _repair(sources: Path, store: Store | None) -> None:
    assert store is not None
    copies = [sources / name for name in ("base", "one", "two")]
    store.repair(sources=copies, read_data=True, threads=1)


def _break(sources: Path, store: Store) -> None:
    """One bit of a payload of a whole block."""
    catalog = store._catalog
    with catalog.index.env.read() as transaction:
        places = [place for _, place in catalog.index.blocks(transaction)]
    location = max(places, key=lambda place: (place.stored_length, place.offset))
    path = Path(catalog.packs.where(location.pack))
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(location.offset + location.stored_length // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    path.chmod(0o444)


FAMILIES = {
    "small": ("base", "one", "two"),
    "tuned": ("seven",),
    "both": ("base", "one", "two", "seven"),
}
"""The models of each prepared store: families without a fine-tune, which is what is added."""

CALLS = {
    "add": Call(_add),
    "dense add": Call(_dense_add, families="tuned"),
    "merge": Call(_merge),
    "virtual merge": Call(_merge_later),
    "materialize": Call(_materialize, prepare=_merge_later),
    "cast": Call(_cast, prepare=_add_scaled),
    "reset": Call(_reset),
    "tag": Call(_tag),
    "config": Call(_configure),
    "gc": Call(_gc, prepare=_forget, families="both"),
    "prune": Call(_prune, prepare=_age),
    "pin": Call(_pin, prepare=_tune, families="tuned"),
    "unpin": Call(_unpin, prepare=_tune_and_pin, families="tuned"),
    "sign": Call(_sign),
    "note": Call(_note),
    "reindex": Call(_reindex, alone=True),
    "repair": Call(_repair, prepare=_break),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two families, and a store of each and of both, but for a fine-tune of each."""
    root = tmp_path_factory.mktemp("sources")
    small_model(root / "base", "base")
    for name in ("one", "two", "three"):
        small_model(root / name, "base" if name == "one" else name, changed=name)
    write_files(root / "seven", model_files(7))
    write_files(root / "tuned", model_files(7, 1))
    for families, members in FAMILIES.items():
        with Store.init(root / "stores" / families, block_size=BLOCK, codec="raw") as store:
            for name in members:
                base = None if name in ("base", "seven") else "base"
                store.add(root / name, name=name, base=base, threads=1)
    return root


def names(store: Store) -> dict[str, SnapshotId]:
    """Every ref."""
    return {ref.name: ref.snapshot for ref in store.refs()}


def prepared(call: Call, sources: Path, tmp_path: Path) -> dict[str, SnapshotId]:
    """Make the store that each of a call's trials begins with a copy of, and what it adds.

    Returns its refs.
    """
    shutil.copytree(sources / "stores" / call.families, tmp_path / "prepared")
    for name in ("base", "one", "two", "seven", "three", "tuned"):
        (tmp_path / name).symlink_to(sources / name)
    with Store.open(tmp_path / "prepared") as store:
        if call.prepare is not None:
            call.prepare(tmp_path, store)
        return names(store)


def trial(call: Call, sources: Path, before: dict[str, SnapshotId], fault: Fault) -> Iterator[str]:
    """Make one call with one fault; yields what is wrong afterwards."""
    root = sources / "copy"
    shutil.copytree(sources / "prepared", root)
    error: MstoreError | None = None
    expected = dict(before)
    outcome = ""
    with ExitStack() as stack:
        store = None if call.alone else stack.enter_context(Store.open(root))
        try:
            with fs.observed(fault):
                made = call.do(sources, store)
            if made is not None:
                expected[NEW] = made
        except MstoreError as caught:
            error = caught
        outcome = f"it {'fails' if error else 'returns'}, and the refs"
        if store is not None and names(store) != expected:
            yield f"{outcome} are {names(store)} at once"
    if error is not None and not isinstance(error, StorageFailed):
        yield f"it raises {error!r}"
    if error is not None and fault.hit is None:
        yield "it fails without a fault"
    if fault.tried_again:
        yield "a file whose fsync failed is used"
    with Store.open(root) as store:
        if names(store) != expected:
            yield f"{outcome} are {names(store)}"
        report = store.fsck(read_data=True)
        if call.do is not _repair or error is None:
            yield from (f"fsck: {problem}" for problem in report.problems)
        hit = fault.hit.kind if fault.hit else ""
        for path in report.garbage:
            # A pack stays where the commit itself failed: nobody knows what of it is on the disk.
            if hit not in REMOVALS and not (hit == "commit" and path.startswith("packs/")):
                yield f"{path} is left over"
        if not call.alone:
            yield from _afterwards(call, sources, store, expected)
    if call.alone:
        call.do(sources, None)
        with Store.open(root) as store:
            yield from _afterwards(call, sources, store, expected)


def _afterwards(
    call: Call, sources: Path, store: Store, expected: dict[str, SnapshotId]
) -> Iterator[str]:
    """The same again works, and gc leaves nothing that nobody needs."""
    if not call.alone:
        again = call.do(sources, store)
        if again is not None:
            expected[NEW] = again
    if names(store) != expected:
        yield "the same again does not work"
    store.gc()
    report = store.fsck(read_data=True)
    if report.problems or report.garbage or any((store.path / "tmp").iterdir()):
        yield f"the same again and gc leave a mess: {report.problems} {report.garbage}"


def fail_everywhere(
    call: Call, code: int, lasting: bool, sources: Path, tmp_path: Path, *, every: bool
) -> None:
    """Make one call again and again, with a fault at each of its operations.

    every: otherwise at each that decides, and of those of one kind at every second: the one half if
    the fault lasts, the other if not.
    """
    before = prepared(call, sources, tmp_path)
    whole = Fault(sys.maxsize, code)
    wrong = list(trial(call, tmp_path, before, whole))
    shutil.rmtree(tmp_path / "copy")
    assert {"commit", "map"} & set(whole.kinds) or call is CALLS["config"]
    assert len(whole.kinds) >= 2
    for at, kind in enumerate(whole.kinds):
        alike = whole.kinds.count(kind)
        half = whole.kinds[:at].count(kind) % 2 == lasting
        if not (every or half or alike == 1 or kind in {"commit", "map"}):
            continue
        # Ids of packs are random, and two that share a directory make an operation less.
        for _ in range(5):
            fault = Fault(at, code, lasting=lasting)
            problems = list(trial(call, tmp_path, before, fault))
            shutil.rmtree(tmp_path / "copy")
            if fault.hit is not None:
                break
        assert fault.hit is not None, f"{kind}, operation {at}, did not happen again"
        wrong += [f"{at}, {fault.hit.kind} {fault.hit.path}: {what}" for what in problems]
    assert wrong == []


@pytest.mark.sampled(32)
@pytest.mark.parametrize(
    ("code", "lasting"),
    [
        pytest.param(errno.EIO, False, id="EIO once"),
        pytest.param(errno.ENOSPC, True, id="ENOSPC from there on"),
    ],
)
@pytest.mark.parametrize(
    "name",
    # Of the operations of "add" it has all, and no other.
    [pytest.param(name, marks=[pytest.mark.rest] * (name == "dense add")) for name in CALLS],
)
def test_every_operation_may_fail(
    name: str, code: int, lasting: bool, sources: Path, tmp_path: Path
) -> None:
    """Whatever file operation fails: an error and nothing published, or none and all of it."""
    fail_everywhere(CALLS[name], code, lasting, sources, tmp_path, every=False)


@pytest.mark.slow
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from there on"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", CALLS)
def test_every_operation_may_fail_in_every_way(
    name: str, code: int, lasting: bool, sources: Path, tmp_path: Path
) -> None:
    """The same for each operation and each way to fail."""
    fail_everywhere(CALLS[name], code, lasting, sources, tmp_path, every=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from there on"])
def test_a_failed_init_leaves_nothing(lasting: bool, tmp_path: Path) -> None:
    """Whatever file operation of init fails: an error, no directory, and the next init works."""
    for at in count():
        fault = Fault(at, errno.ENOSPC, lasting=lasting)
        root = tmp_path / str(at) / "store"
        with fs.observed(fault), suppress(StorageFailed):
            Store.init(root, block_size=BLOCK).close()
        if fault.hit is None:
            break
        if fault.hit.kind == "map" and (root / "format").exists():
            # The store is made, and could not be opened at once.
            with Store.open(root) as store:
                assert store.fsck().problems == ()
            continue
        if fault.hit.kind not in REMOVALS:
            assert not root.exists(), fault.hit
        else:
            shutil.rmtree(root, ignore_errors=True)
        with Store.init(root, block_size=BLOCK) as store:
            assert store.fsck().problems == ()
    assert at > 20


# -- a real disk -------------------------------------------------------------------------------

ROOMS = [0, 4, 12, 20, 40, 60, 80, 90, 100, 120, 140, 180, 240, 400]
"""KiB that are left on the disk when an add begins; an add here needs about 150."""


def fill_a_disk(mount_point: str, scratch: str) -> list[str]:
    """Add to a disk that is full sooner or later; asserts what must hold, and tells how it went."""
    mount, models = Path(mount_point), Path(scratch)
    outcomes = []
    with Store.init(mount / "store", block_size=BLOCK) as store:
        store.add(small_model(models / "base", "base"), name="base", threads=1)
    for room in ROOMS:
        model = small_model(models / str(room), f"room {room}")
        _leave(mount, room << 10)
        with Store.open(mount / "store") as store:
            before = names(store)
            try:
                store.add(model, name=f"r{room}", base="base", threads=1)
                outcomes.append("stored")
            except StorageFailed as error:
                outcomes.append(_refusal(error))
                assert names(store) == before, "a failed add is visible"
            assert store.fsck(read_data=True).problems == ()
            assert list((mount / "store" / "tmp").iterdir()) == []
        (mount / "filler").unlink()
        with Store.open(mount / "store") as store:
            store.add(model, name=f"r{room}", base="base", threads=1)
            for path, contents in files_of(model).items():
                assert b"".join(store.read_file(f"r{room}", path)) == contents
    # Nothing at all is left: what is removed and collected then gives room for an add.
    _leave(mount, 0)
    with Store.open(mount / "store") as store:
        for room in ROOMS[:5]:
            store.remove(f"r{room}")
        freed = store.gc(reflog_days=0).freed_bytes
        assert freed > 200 << 10, freed
        store.add(small_model(models / "after", "after"), name="after", base="base", threads=1)
        report = store.fsck(read_data=True)
        assert report.problems == ()
        assert report.garbage == ()
    (mount / "filler").unlink()
    _collect_in_a_young_store(mount, models)
    for room in (0, 40, 80, 120):
        _leave(mount, room << 10)
        try:
            Store.init(mount / "another", block_size=BLOCK).close()
            shutil.rmtree(mount / "another")
        except StorageFailed as error:
            outcomes.append(_refusal(error))
            assert not (mount / "another").exists(), "a failed init left a directory"
        (mount / "filler").unlink()
    return outcomes


def _collect_in_a_young_store(mount: Path, models: Path) -> None:
    """An index without free pages must grow to commit: gc, and the removal of a ref before, are
    refused and name what the store can do without.  When that is removed, they do their work; where
    there is nothing of the kind, they say how little they take."""

    def removing(store: Store) -> None:
        store.remove("only")

    def collecting(store: Store) -> None:
        freed = store.gc(reflog_days=0).freed_bytes
        assert freed > 40 << 10, freed

    for call, has_stats in ((removing, True), (collecting, True), (collecting, False)):
        with Store.init(mount / "young", block_size=BLOCK) as store:
            store.add(small_model(models / "young", "young"), name="only", threads=1)
            if call is collecting:
                store.remove("only")
        stats = mount / "young" / "stats"
        if not has_stats:
            shutil.rmtree(stats)
        _leave(mount, 0)
        with Store.open(mount / "young") as store:
            with pytest.raises(StorageFailed) as refused:
                call(store)
            assert refused.value.errno == errno.ENOSPC
            hint = refused.value.hint or ""
            assert store.fsck(read_data=True).problems == ()
        if has_stats:
            assert (
                hint == f"rm -r {stats}    (computed again when needed), and run the command again"
            )
            subprocess.run(hint.partition("    ")[0], shell=True, check=True)
        else:
            assert hint.startswith("remove files of 8 MiB from this disk, outside the store, and")
            (mount / "filler").unlink()
            _leave(mount, 1 << 20)
        with Store.open(mount / "young") as store:
            call(store)
            assert store.fsck(read_data=True).problems == ()
        (mount / "filler").unlink()
        shutil.rmtree(mount / "young")
        shutil.rmtree(models / "young")


def _refusal(error: StorageFailed) -> str:
    return "refused" if error.errno == errno.ENOSPC and error.hint else f"{error!r}"


def _leave(mount: Path, room: int) -> None:
    disk = os.statvfs(mount)
    with (mount / "filler").open("wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, disk.f_bavail * disk.f_frsize - room)


@pytest.mark.rest
def test_a_full_disk_is_an_error_and_no_more(tmp_path: Path) -> None:
    """On a disk with room for nothing, for a part, or for all but the last page of an add: a clean
    error, a sound store, and the same add works when there is room again."""
    mount = tmp_path / "mount"
    mount.mkdir()
    small_disk = 'mount -t tmpfs -o size=8m tmpfs "$0" && exec "$@"'
    enter = next((way for way in (["-m"], ["-Urm"]) if _may_mount(way, small_disk, mount)), None)
    if enter is None:
        pytest.skip("this user may not mount a small disk")
    # A process of its own: a map of a full disk ends in SIGBUS if it is not an error.
    code = "import sys, test_faults; print(*test_faults.fill_a_disk(*sys.argv[1:]))"
    python = [sys.executable, "-c", code, str(mount), str(tmp_path / "models")]
    done = subprocess.run(
        ["unshare", *enter, "sh", "-c", small_disk, str(mount), *python],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcomes = done.stdout.split()
    assert outcomes[:3] == ["refused"] * 3
    assert outcomes[len(ROOMS) - 1] == "stored"
    assert set(outcomes) == {"refused", "stored"}


def _may_mount(way: list[str], small_disk: str, mount: Path) -> bool:
    command = ["unshare", *way, "sh", "-c", small_disk, str(mount), "true"]
    return shutil.which("unshare") is not None and (
        subprocess.run(command, capture_output=True, check=False).returncode == 0
    )
