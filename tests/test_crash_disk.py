"""The model of a disk that loses power (`crash_disk`) against what POSIX promises."""

from __future__ import annotations

from crash_disk import Crash, Disk, Event, Tree


def left_by(*steps: Event) -> list[Tree]:
    """The different trees that a power loss after these operations on an empty disk may leave."""
    disk = Disk.empty()
    for step in steps:
        disk.apply(step)
    found = {Crash(0, tree).digest(): tree for tree in disk.states()}
    return list(found.values())


def test_unsynced_data_may_be_lost_in_any_way() -> None:
    """A file with a lasting name and no fsync may be empty, whole, cut, zero, or whole pages."""
    data = b"".join(bytes([page]) * 4096 for page in (1, 2, 3))
    trees = left_by(Event("create", "f"), Event("syncdir", "."), Event("write", "f", data=data))
    zero = bytes(4096)
    assert sorted(tree["f"] or b"" for tree in trees) == sorted(
        [
            b"",
            data,
            data[:6144],
            zero * 3,
            zero + data[4096:8192] + zero,
            zero * 2 + data[8192:],
        ]
    )


def test_synced_data_without_a_synced_name() -> None:
    """A synced file whose directory was not synced is whole or not there."""
    trees = left_by(Event("create", "f"), Event("write", "f", data=b"data"), Event("fsync", "f"))
    assert trees == [{}, {"f": b"data"}]


def test_what_is_synced_stays() -> None:
    """After fsync, rename and directory sync there is one outcome."""
    written = [Event("create", "t"), Event("write", "t", data=b"data"), Event("fsync", "t")]
    trees = left_by(*written, Event("rename", "t", target="f"), Event("syncdir", "."))
    assert trees == [{"f": b"data"}]


def test_a_rename_is_lost_in_parts() -> None:
    """Before the directory sync a renamed file has either name, both, or none."""
    written = [
        Event("create", "t"),
        Event("write", "t", data=b"data"),
        Event("fsync", "t"),
        Event("syncdir", "."),
    ]
    trees = left_by(*written, Event("rename", "t", target="f"))
    whole = b"data"
    assert {tuple(sorted(tree)) for tree in trees} == {("t",), ("f",), ("f", "t"), ()}
    assert all(contents == whole for tree in trees for contents in tree.values())


def test_a_lost_directory_takes_its_files_along() -> None:
    """A synced name in a directory whose own name was not synced may be gone with it."""
    trees = left_by(Event("mkdir", "d"), Event("create", "d/f"), Event("syncdir", "d"))
    assert trees == [{}, {"d": None, "d/f": b""}]


def test_removals_may_come_back() -> None:
    """Unlinked and recursively removed names are there again, in any combination."""
    made = [
        Event("mkdir", "d"),
        Event("create", "d/f"),
        Event("syncdir", "d"),
        Event("syncdir", "."),
    ]
    trees = left_by(*made, Event("rmtree", "d"))
    assert {tuple(tree) for tree in trees} == {(), ("d",), ("d", "d/f")}


def test_an_index_commit_is_durable_in_one_step() -> None:
    """A committed database survives whole as soon as its name does."""
    trees = left_by(
        Event("mkdir", "i"),
        Event("syncdir", "."),
        Event("commit", "i"),
        Event("committed", "i", data=b"db"),
    )
    assert trees == [{"i": None}, {"i": None, "i/data.mdb": b"db"}]
