"""mstore_fuse.mount_table: what the kernel's table says about our mounts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstore_fuse import mount_table
from mstore_fuse.mount_table import MountedSnapshot, TableEntry

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)


def as_kernel_shows(text: str) -> bytes:
    """mountinfo writes blanks, backslashes and `#` as octal numbers."""
    escaped = {ord(c): f"\\{ord(c):03o}" for c in " \t\n\\#"}
    return os.fsencode(text.translate(escaped))


@given(TEXT.filter(lambda text: text != "*"), TEXT, st.integers(1, 1 << 22))
def test_source_round_trip(revision: str, folder: str, pid: int) -> None:
    """Any revision, store path and pid come back from the source that they were written into."""
    for shown in (revision, None):
        source = MountedSnapshot(Path("/", folder.replace("/", "-")), shown, pid)
        assert MountedSnapshot.parse(str(source)) == source


@given(TEXT, TEXT)
def test_source_has_nothing_that_mount_options_would_split(revision: str, folder: str) -> None:
    """No comma, backslash, blank or line end of a name reaches the mount options."""
    text = str(MountedSnapshot(Path("/", folder.replace("/", "-")), revision, 1))
    assert not set(text) & set(",\\ \t\r\n\"'")


@given(TEXT, TEXT, st.text("0123456789abcdef", min_size=16, max_size=16))
def test_image_round_trip(revision: str, folder: str, lease: str) -> None:
    """Any revision and store path come back from the path of a kernel mount's image."""
    store = Path("/", folder.replace("/", "-"))
    text = str(store / "tmp" / lease / mount_table.image_name(revision))
    assert MountedSnapshot.of_image(text) == MountedSnapshot(store, revision, None)


def test_whose_mount_it_is() -> None:
    """Type and source together say what is ours; a bind mount of a part is not."""
    image = "/srv/models/tmp/0123456789abcdef/mstore:team%2Fa"
    kernel = TableEntry(Path("/mnt"), "erofs", image, True)
    assert MountedSnapshot.of(kernel) == MountedSnapshot(Path("/srv/models"), "team/a", None)
    fuse = TableEntry(Path("/mnt"), "fuse.mstore", "mstore:main@/srv#7", True, 0)
    assert MountedSnapshot.of(fuse) == MountedSnapshot(Path("/srv"), "main", 7)
    for foreign in (
        TableEntry(Path("/mnt"), "erofs", image, False),
        TableEntry(Path("/mnt"), "erofs", "/dev/sda1", True),
        TableEntry(Path("/mnt"), "ext4", image, True),
        TableEntry(Path("/mnt"), "fuse.mstore", image, True, 0),
        TableEntry(Path("/mnt"), "erofs", "/srv/tmp/images/mstore:a", True),
    ):
        assert MountedSnapshot.of(foreign) is None


def test_source_reads_well() -> None:
    """An ordinary mount says in plain words what it is."""
    assert str(MountedSnapshot(Path("/srv/models"), "llama/merged", 42)) == (
        "mstore:llama/merged@/srv/models#42"
    )
    assert str(MountedSnapshot(Path("/srv/models"), None, 42)) == "mstore:*@/srv/models#42"
    assert str(MountedSnapshot(Path("/a@b"), "main@{2}", 1)) == "mstore:main@{2}@/a%40b#1"


@pytest.mark.parametrize("text", ["sshfs", "mstore:", "mstore:a@/b", "mstore:a@/b#", "a@/b#1"])
def test_foreign_sources_are_refused(text: str) -> None:
    """A source that we did not write is nothing, not something odd."""
    assert MountedSnapshot.parse(text) is None


def test_entries_are_decoded(tmp_path: Path) -> None:
    """Octal escapes, optional fields, bind mounts and stacked mounts are read as they are."""
    source = str(MountedSnapshot(Path("/srv/my store"), "main", 7))
    lines = [
        b"22 1 254:0 / / rw,relatime shared:1 master:2 - ext4 /dev/vda rw",
        b"42 22 0:39 / /mnt/a\\040b ro - fuse.mstore "
        + as_kernel_shows(source)
        + b" ro,user_id=1007,group_id=0",
        b"43 22 0:39 /sub /mnt/bound ro - fuse.mstore " + as_kernel_shows(source) + b" ro",
    ]
    table = tmp_path / "mountinfo"
    table.write_bytes(b"\n".join(lines) + b"\n")
    assert mount_table.entries(table) == [
        TableEntry(Path("/"), "ext4", "/dev/vda", True),
        TableEntry(Path("/mnt/a b"), "fuse.mstore", source, True, 1007),
        TableEntry(Path("/mnt/bound"), "fuse.mstore", source, False),
    ]


def test_a_process_that_is_not_a_daemon_is_not_alive() -> None:
    """A pid that is free, or was given to another program since, does not count as serving."""
    assert not MountedSnapshot(Path("/"), None, os.getpid()).alive
    assert not MountedSnapshot(Path("/"), None, 1 << 22).alive
