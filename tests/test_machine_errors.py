"""What this machine, or this process, cannot do now is no damage of the store.

Each thing that reads a store is done where kernels cannot be loaded, descriptors run out, or the
system refuses to read packs: it ends with that error, changes nothing, and reports no damage.
Only a disk that has lost bytes (EIO) is damage, and even for that nothing is given up.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_safetensors
from machine_errors import DOINGS, NO_KERNELS
from mount_drivers import why_not
from sick_disk import Disk, sick_disk

from mstore import MergeRequest, Store
from mstore.blocks.schema import DATABASES
from mstore.upkeep.check.fsck import CheckReport

PROGRAM = Path(__file__).with_name("machine_errors.py")
BLOCK = 1 << 16
NEW = {"backup", "clone"}
"""What makes a directory."""
DOING = sorted({*DOINGS, "reindex"} - {"repair from"})


def model(path: Path, **seeds: int) -> Path:
    """A checkpoint with a tensor of each seed; those of 100 and more are fine-tunes."""
    tensors = []
    for name, seed in seeds.items():
        values = np.random.default_rng(seed % 100).normal(0, 0.02, (256, 257)).astype("f4")
        if seed >= 100:
            values += np.random.default_rng(seed).normal(0, 1e-5, values.shape).astype("f4")
        tensors.append((name, "F32", values.shape, values.tobytes()))
    write_safetensors(path / "model.safetensors", tensors)
    (path / "config.json").write_text(json.dumps(seeds))
    return path


def build(root: Path) -> None:
    """A store whose blocks are coded, some as differences, with dead bytes beside live ones; a
    backup of it from before its last commit."""
    with Store.init(root / "store", block_size=BLOCK, codec="dense") as store:
        store.configure("reflog_days", 0)
        store.add(model(root / "gone", a=1, b=2), name="gone", base=None)
        store.add(model(root / "base", a=1, b=3), name="base", base=None)
        store.add(model(root / "tuned", a=101, b=103), name="tuned", base="base")
        store.remove("gone")
        assert store.backup(root / "older").problems == ()
        store.add(model(root / "other", a=201, b=4), name="other", base="base")
        inputs = {"base": "base", "experts": ["tuned", "other"]}
        store.plan(MergeRequest(**inputs, method="ties", budget="100%"))
    model(root / "new", a=101, b=303)


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    shutil.copytree(template, tmp_path / "root")
    return tmp_path / "root"


class Machine:
    """The process that does what the tests name, each time in a child of its own."""

    def __init__(self, errors: Path) -> None:
        self._errors = errors
        with errors.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )

    def does(self, *line: str) -> list[dict[str, Any]]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()
        said = self.process.stdout.readline()
        assert said, self._errors.read_text()
        found: list[dict[str, Any]] = json.loads(said)
        return found


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    made = Machine(tmp_path_factory.mktemp("machine") / "errors")
    yield made
    # After the last line it ends.
    made.process.communicate(timeout=300)
    assert made.process.returncode == 0


Tries = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def tries(machine: Machine) -> Tries:
    """What a process on such a machine does and says."""

    def call(doing: str, root: Path, other: str, *given: str) -> list[dict[str, Any]]:
        return machine.does(doing, str(root / "store"), str(root / other), *given)

    return call


def state(path: Path) -> dict[str, Any]:
    """All that a store holds, but for leases and what is lying in tmp/."""
    names = ("packs/**/*.pack", "refs/*", "format", "config", "lost+found/**/*.pack")
    found: dict[str, Any] = {
        str(file.relative_to(path)): file.read_bytes() for name in names for file in path.glob(name)
    }
    with Store.open(path) as store:
        index = store._catalog.index
        with index.env.read() as rows:
            for name in set(DATABASES) - {"leases"}:
                with rows.cursor(db=index.db(name)) as cursor:
                    found[name] = [(bytes(key), bytes(value)) for key, value in cursor]
    return found


def checked(path: Path) -> CheckReport:
    with Store.open(path) as store:
        return store.fsck(read_data=True)


@contextmanager
def unchanged(*stores: Path) -> Iterator[None]:
    """What the stores hold is the same afterwards, and sound."""
    before = [state(path) for path in stores]
    yield
    for path, was in zip(stores, before, strict=True):
        assert state(path) == was
        assert checked(path).problems == ()


def other_of(doing: str) -> str:
    return "new" if doing == "add" else "copy"


@contextmanager
def sick_packs(root: Path) -> Iterator[Disk]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    scratch = root / "scratch"
    scratch.mkdir()
    with sick_disk(root / "store" / "packs", scratch) as disk:
        yield disk


def every_pack(root: Path, code: str) -> dict[str, str]:
    return {pack.name: code for pack in (root / "store" / "packs").glob("*/*.pack")}


@pytest.mark.rest
def test_each_is_done_where_nothing_is_wrong(root: Path, tries: Tries) -> None:
    """What the other tests do succeeds on a machine that refuses nothing, and reports no damage."""
    for doing in DOING:
        assert tries(doing, root, other_of(doing)) == [{"damage": []}], doing
        shutil.rmtree(root / "copy", ignore_errors=True)
    assert tries("backup", root, "older") == [{"damage": []}]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("doing", DOING)
def test_without_kernels(doing: str, root: Path, tries: Tries) -> None:
    """Where compiled code cannot be loaded, whoever needs it ends with that, and nobody finds
    damage: fsck, repair, backup, clone, gc, pin, merge, verify and readers."""
    if doing == "reindex":
        # It decodes only what several packs have.
        assert tries(doing, root, "copy", "kernels") == [{"damage": []}]
        assert checked(root / "store").problems == ()
        return
    with unchanged(root / "store"):
        (said,) = tries(doing, root, other_of(doing), "kernels")
        assert (said.get("error"), said.get("text")) == ("Unavailable", NO_KERNELS)
    assert not (root / "copy" / "format").exists()


@pytest.mark.rest
def test_a_backup_is_as_it_was_without_kernels(root: Path, tries: Tries) -> None:
    """The same for a backup that is updated: it holds its last state, and tells of no damage."""
    with unchanged(root / "store", root / "older"):
        (said,) = tries("backup", root, "older", "kernels")
        assert said["error"] == "Unavailable"
    assert tries("backup", root, "older") == [{"damage": []}]
    assert checked(root / "older").problems == ()


@pytest.mark.sampled(11)
@pytest.mark.parametrize("code", ["EACCES", "ENOMEM"])
@pytest.mark.parametrize("doing", DOING)
def test_packs_that_this_machine_cannot_read_now(
    doing: str, code: str, root: Path, tries: Tries
) -> None:
    """Where the system refuses to read packs, it all ends with that errno, and nothing changes."""
    with unchanged(root / "store"), sick_packs(root) as disk:
        disk.tell(every_pack(root, code))
        (said,) = tries(doing, root, other_of(doing))
        assert (said.get("error"), said.get("errno")) == ("StorageFailed", code), said
        assert ".pack" in said["text"]
    assert not (root / "copy" / "format").exists()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("code", ["EACCES", "ENOMEM"])
def test_a_backup_is_as_it_was_if_packs_cannot_be_read_now(
    code: str, root: Path, tries: Tries
) -> None:
    """The same for a backup that is updated; the next one, on a sound machine, is whole."""
    with unchanged(root / "store", root / "older"), sick_packs(root) as disk:
        disk.tell(every_pack(root, code))
        (said,) = tries("backup", root, "older")
        assert said["errno"] == code
    assert tries("backup", root, "older") == [{"damage": []}]
    assert checked(root / "older").problems == ()


@pytest.mark.sampled(11)
@pytest.mark.parametrize("doing", DOING)
def test_too_few_descriptors(doing: str, root: Path, tries: Tries) -> None:
    """However many files may be opened: the system's error and nothing changed, or success."""
    before = state(root / "store")
    *refused, done = tries(doing, root, other_of(doing), "files")
    assert done == {"damage": []}
    assert refused
    for said in refused:
        assert "Too many open files".lower() in said["text"].lower(), said
    if doing in ("fsck", "repair", "backup", "clone", "verify", "read"):
        assert state(root / "store") == before
    assert checked(root / "store").problems == ()
    assert list((root / "store").glob("*.damaged*")) == []
    if doing in NEW:
        assert checked(root / "copy").problems == ()


@pytest.mark.rest
def test_a_backup_is_updated_with_few_descriptors(root: Path, tries: Tries) -> None:
    """The same for a backup that is updated."""
    *refused, done = tries("backup", root, "older", "files")
    assert done == {"damage": []}
    assert refused
    assert checked(root / "older").problems == ()


@pytest.mark.rest
def test_an_outdated_index_is_not_taken_for_the_newest(root: Path, tries: Tries) -> None:
    """Where the packs that show that the index is an older one cannot be read now, their names show
    it: nothing is written, and they are not moved to lost+found/."""
    shutil.copytree(root / "store" / "index", root / "index")
    known = set(every_pack(root, ""))
    with Store.open(root / "store") as store:
        for seed in (71, 72):
            store.add(model(root / f"later{seed}", a=seed), name=f"later{seed}", base=None)
    shutil.rmtree(root / "store" / "index")
    shutil.rmtree(root / "store" / "refs")
    (root / "index").rename(root / "store" / "index")
    later = {name: "EACCES" for name in every_pack(root, "") if name not in known}
    with sick_packs(root) as disk:
        disk.tell(later)
        for doing in ("gc", "add", "backup", "clone", "repair"):
            (said,) = tries(doing, root, other_of(doing))
            assert "has no line in the pack list" in said.get("text", ""), (doing, said)
        (said,) = tries("fsck", root, "copy")
        assert any("has no line in the pack list" in one for one in said["damage"])
    assert set(every_pack(root, "")) == {*known, *later}
    assert not (root / "copy" / "format").exists()


# -- a disk that has lost bytes ------------------------------------------------------------------


@pytest.mark.rest
def test_a_sick_disk_is_damage_for_which_nothing_is_dropped(root: Path, tries: Tries) -> None:
    """EIO for every pack: fsck and repair report it, repair drops no row, and once the disk works
    again all is sound."""
    before = state(root / "store")
    with sick_packs(root) as disk:
        disk.tell(every_pack(root, "EIO"))
        (said,) = tries("fsck", root, "copy")
        assert any("input/output error" in one for one in said["damage"])
        (said,) = tries("repair", root, "copy")
        assert any("input/output error" in one for one in said["damage"])
        assert [one for one in said["damage"] if "dropped" in one] == []
    after = state(root / "store")
    # The repair is a commit.
    for commit in ("counters", "refs/mirror"):
        del before[commit], after[commit]
    assert after == before
    assert checked(root / "store").problems == ()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("doing", ["clone", "gc", "pin", "verify", "read", "merge"])
def test_what_a_sick_disk_has_lost_ends_others_as_damage(
    doing: str, root: Path, tries: Tries
) -> None:
    """EIO for every pack ends a command as other damage does; nothing changes."""
    with unchanged(root / "store"), sick_packs(root) as disk:
        disk.tell(every_pack(root, "EIO"))
        (said,) = tries(doing, root, "copy")
        if doing == "gc":
            # As from other damaged packs, it takes nothing from these.
            assert said.get("error") in ("Corrupt", "Unreadable") or said["damage"]
            return
        assert said.get("error") in ("Corrupt", "Unreadable"), said
    assert not (root / "copy" / "format").exists()


@pytest.mark.rest
def test_a_backup_gets_away_what_a_sick_disk_can_still_read(root: Path, tries: Tries) -> None:
    """EIO for one pack: the backup has the others, and its report names this one; the next backup,
    from a disk that works again, is whole."""
    with unchanged(root / "store"), sick_packs(root) as disk:
        sick = sorted(every_pack(root, "EIO").items())[0]
        disk.tell(dict([sick]))
        (said,) = tries("backup", root, "copy")
        assert any("input/output error" in one for one in said["damage"])
    assert tries("backup", root, "copy") == [{"damage": []}]
    assert checked(root / "copy").problems == ()


@pytest.mark.rest
def test_reindex_leaves_out_what_a_sick_disk_has_lost(root: Path, tries: Tries) -> None:
    """EIO for one pack: reindex says that it leaves it out; the next one takes it again."""
    before = {name: rows for name, rows in state(root / "store").items() if name == "blocks"}
    with sick_packs(root) as disk:
        sick = sorted(every_pack(root, "EIO").items())[0]
        disk.tell(dict([sick]))
        (said,) = tries("reindex", root, "copy")
        assert any("left out: input/output error" in one for one in said["damage"])
    tries("reindex", root, "copy")
    assert checked(root / "store").problems == ()
    after = state(root / "store")["blocks"]
    assert [id for id, _ in after] == [id for id, _ in before["blocks"]]


@pytest.mark.rest
def test_a_copy_that_cannot_be_read_now_drops_nothing(root: Path, tries: Tries) -> None:
    """A source of copies that this machine cannot read ends the repair: its copies might heal what
    would be dropped without them."""
    shutil.copytree(root / "store", root / "copies")
    for pack in (root / "store" / "packs").glob("*/*.pack"):
        pack.chmod(0o644)
        data = bytearray(pack.read_bytes())
        data[5000] ^= 1
        pack.write_bytes(data)
    before = state(root / "store")
    scratch = root / "scratch"
    scratch.mkdir()
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with sick_disk(root / "copies" / "packs", scratch) as disk:
        disk.tell({pack.name: "EACCES" for pack in (root / "copies/packs").glob("*/*.pack")})
        (said,) = tries("repair from", root, "copies")
        assert said.get("errno") == "EACCES", said
        assert state(root / "store") == before
    (said,) = tries("repair from", root, "copies")
    assert not any("dropped" in one for one in said["damage"])
    assert checked(root / "store").problems == ()
