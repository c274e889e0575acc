"""`mstore backup` and `mstore clone` at the terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_runs import Program
from small_models import BLOCK, small_model


@pytest.fixture
def mstore(tmp_path: Path) -> Program:
    """A store with one model."""
    mstore = Program(tmp_path / "store")
    mstore.succeed("init", "--block-size", str(BLOCK))
    mstore.succeed("add", small_model(tmp_path / "one", "one"), "--name", "one")
    return mstore


def test_backup_and_read_it(mstore: Program, tmp_path: Path) -> None:
    """A backup says what it copied, and is a store that --store names."""
    first = mstore.succeed("backup", tmp_path / "backup")
    assert "up to date" in first.out
    assert "1 pack" in first.out
    assert "0 packs" in mstore.succeed("backup", tmp_path / "backup").out
    copy = Program(tmp_path / "backup")
    assert copy.succeed("refs", "-q").lines == ["one"]
    assert copy.succeed("fsck", "--read-data", "-q").out == ""
    assert copy.succeed("cat", "one:config.json").raw == (tmp_path / "one/config.json").read_bytes()


def test_no_directory_above(mstore: Program, tmp_path: Path) -> None:
    """A backup below a directory that is missing is refused, and makes nothing: the disk may not be
    mounted."""
    done = mstore("backup", tmp_path / "disk" / "backup")
    assert done.status == 2
    assert "the directory above it does not exist" in done.err
    assert f"mkdir -p {tmp_path / 'disk'}" in done.err
    assert not (tmp_path / "disk").exists()


def test_damage_is_an_error_that_names_it(mstore: Program, tmp_path: Path) -> None:
    """A damaged block ends in status 1, its id, the model it hurts, and the next command."""
    [pack] = (mstore.store / "packs").glob("*/*.pack")
    pack.chmod(0o644)
    data = bytearray(pack.read_bytes())
    data[4196] ^= 1
    pack.write_bytes(data)
    target = tmp_path / "backup"
    done = mstore("backup", target)
    assert done.status == 1
    assert "1 problem" in done.out
    assert f"next: mstore --store {mstore.store} fsck --read-data --repair" in done.out
    document = mstore("backup", tmp_path / "other", "--json").document
    [problem] = document["problems"]
    assert problem["kind"] == "block"
    assert problem["where"] in done.out
    assert document["affected"][0]["refs"] == ["one"]
    assert mstore("backup", tmp_path / "third", "-q").lines == [problem["where"]]
    clone = mstore("clone", mstore.store, tmp_path / "clone")
    assert clone.status == 1
    assert problem["where"] in clone.err
    assert "fsck --read-data" in clone.err


def test_wrong_places(mstore: Program, tmp_path: Path) -> None:
    """What is no backup is refused with a hint, and two names for one source are wrong usage."""
    assert "name a directory on another disk" in mstore("backup", mstore.store / "tmp" / "x").err
    full = mstore("backup", tmp_path / "one")
    assert full.status == 1
    assert "name a new directory" in full.err
    done = mstore("clone", tmp_path / "backup", tmp_path / "clone")
    assert done.status == 2
    assert "two stores named" in done.err
    absent = Program(tmp_path / "none")("clone", tmp_path / "none", tmp_path / "clone")
    assert absent.status == 1
    assert "no store here" in absent.err
    assert not (tmp_path / "clone").exists()


def test_a_damaged_backup_is_mended_by_the_next_one(mstore: Program, tmp_path: Path) -> None:
    """In a backup the hint of fsck is no repair, after which no backup would go there: it removes
    the damaged pack, and the next backup copies that anew."""
    target = tmp_path / "backup"
    mstore.succeed("backup", target)
    copy = Program(target)
    [pack] = (target / "packs").glob("*/*.pack")
    pack.chmod(0o644)
    data = bytearray(pack.read_bytes())
    data[4196] ^= 1
    pack.write_bytes(data)
    done = copy("fsck", "--read-data")
    assert done.status == 1
    assert f"next: rm -f {pack}" in done.out
    assert f"mstore --store STORE backup {target}" in done.out
    pack.unlink()
    assert f"rm -f {pack}" in copy("fsck").out
    assert "up to date" in mstore.succeed("backup", target).out
    assert copy.succeed("fsck", "--read-data", "-q").out == ""
    copy.succeed("rm", "one")
    pack.unlink()
    assert "fsck --repair --from PLACE" in copy("fsck").out


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_whole_pack", [False, True])
def test_a_backup_that_lacks_blocks_names_its_store(
    mstore: Program, tmp_path: Path, is_whole_pack: bool
) -> None:
    """Where a backup lacks what its store had lost, fsck in it names no repair of the backup, after
    which no backup would go there: it is the store that is mended, and backed up again."""
    [pack] = (mstore.store / "packs").glob("*/*.pack")
    pack.chmod(0o644)
    data = bytearray(pack.read_bytes())
    data[4196] ^= 1
    pack.write_bytes(data)
    if is_whole_pack:
        mstore.succeed("add", small_model(tmp_path / "two", "two"), "--name", "two")
        pack.unlink()
    target = tmp_path / "backup"
    assert mstore("backup", target).status == 1
    done = Program(target)("fsck", "--read-data")
    assert done.status == 1
    told = done.out[done.out.index("next: ") :]
    first, _, second = told.partition(", then: ")
    assert first == "next: mstore --store STORE fsck --read-data --repair --from PLACE"
    assert second.startswith(f"mstore --store STORE backup {target}    (this is a backup")
    if is_whole_pack:
        # Its record of the snapshot is lost too, and no checkpoint has one.
        return
    # The line does what it says, with the checkpoint as the place.
    mstore.succeed("fsck", "--read-data", "--repair", "--from", tmp_path / "one")
    mstore.succeed("backup", target)
    assert Program(target).succeed("fsck", "--read-data", "-q").out == ""


def test_gc_of_a_store_that_dropped_rows_names_the_repair(mstore: Program, tmp_path: Path) -> None:
    """After a repair has dropped rows, gc refuses and names another repair: reindex would bring the
    rows of damaged blocks back."""
    mstore.succeed("backup", tmp_path / "backup")
    [pack] = (mstore.store / "packs").glob("*/*.pack")
    pack.chmod(0o644)
    data = bytearray(pack.read_bytes())
    data[4196] ^= 1
    pack.write_bytes(data)
    done = mstore("fsck", "--read-data", "--repair")
    assert done.status == 1
    done = mstore("gc")
    assert done.status == 1
    assert f"mstore --store {mstore.store} fsck --read-data --repair --from PLACE" in done.err
    place = tmp_path / "backup"
    assert mstore("fsck", "--read-data", "--repair", "--from", place).status == 0
    assert mstore("gc").status == 0
