"""Who may use what is made: the table of docs/sharing.md."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from checkpoints import write_safetensors
from cli_runs import Program
from hypothesis import given
from hypothesis import strategies as st

from mstore import fs
from mstore.fs.rights import DIRECTORY, FILE, SEALED, Sharing, mode_of

KINDS = (FILE, SEALED, DIRECTORY)
ANY_UMASK = st.integers(0, 0o777)


@pytest.mark.parametrize(
    ("sharing", "umask", "plain", "private", "directory", "private_directory", "sealed"),
    [
        (Sharing.UMASK, 0o022, 0o644, 0o600, 0o755, 0o700, 0o444),
        (Sharing.UMASK, 0o002, 0o664, 0o660, 0o775, 0o770, 0o444),
        (Sharing.UMASK, 0o077, 0o600, 0o600, 0o700, 0o700, 0o400),
        (Sharing.UMASK, 0o000, 0o666, 0o666, 0o777, 0o777, 0o444),
        (Sharing.GROUP, 0o077, 0o660, 0o660, 0o2770, 0o2770, 0o440),
        (Sharing.GROUP, 0o022, 0o664, 0o660, 0o2775, 0o2770, 0o444),
        (Sharing.ALL, 0o077, 0o664, 0o660, 0o2775, 0o2770, 0o444),
    ],
)
def test_modes(
    sharing: Sharing,
    umask: int,
    plain: int,
    private: int,
    directory: int,
    private_directory: int,
    sealed: int,
) -> None:
    """Each kind of file has the mode that the table says."""
    assert mode_of(sharing, FILE, umask) == plain
    assert mode_of(sharing, FILE, umask, private=True) == private
    assert mode_of(sharing, DIRECTORY, umask) == directory
    assert mode_of(sharing, DIRECTORY, umask, private=True) == private_directory
    assert mode_of(sharing, SEALED, umask) == sealed


@given(st.sampled_from(Sharing), st.sampled_from(KINDS), ANY_UMASK)
def test_who_reads_what_is_private_may_write_it(sharing: Sharing, kind: int, umask: int) -> None:
    """Nobody but the owner is let into something private whom the plain thing's mode would not
    let write, and sharing takes nothing from anybody."""
    plain = mode_of(sharing, kind, umask)
    private = mode_of(sharing, kind, umask, private=True)
    for shift in (3, 0):
        assert not private >> shift & 0o4 or plain >> shift & 0o2
    assert private & plain == private
    assert mode_of(Sharing.UMASK, kind, umask) & plain == mode_of(Sharing.UMASK, kind, umask)
    assert kind != SEALED or not plain & 0o222


@given(st.sampled_from(Sharing), st.sampled_from([0o022, 0o077, 0o002, 0o000]))
def test_what_is_made_has_its_mode(
    tmp_path_factory: pytest.TempPathFactory, sharing: Sharing, umask: int
) -> None:
    """Files, directories, locks and replaced files get it, whatever the umask of who makes them."""
    root = tmp_path_factory.mktemp("shared")
    before = os.umask(umask)
    try:
        fs.share(root, sharing)
        file = fs.NewFile(root / "pack")
        assert is_like(root / "pack", mode_of(sharing, FILE, umask, private=True))
        file.protect()
        file.close()
        fs.LockFile(root / "lock").release()
        fs.make_directory(root / "plain")
        fs.make_directory(root / "private", private=True)
        fs.replace_file(root / "plain" / "text", "1", staging=root / "private")
        fs.overwrite(root / "stamp", b"1")
        fs.create_whole(root / "whole", b"1")
    finally:
        fs.share(root, Sharing.UMASK)
        os.umask(before)
    assert is_like(root / "pack", mode_of(sharing, SEALED, umask))
    assert is_like(root / "lock", mode_of(sharing, FILE, umask, private=True))
    assert is_like(root / "plain", mode_of(sharing, DIRECTORY, umask))
    assert is_like(root / "private", mode_of(sharing, DIRECTORY, umask, private=True))
    for name in ("plain/text", "stamp", "whole"):
        assert is_like(root / name, mode_of(sharing, FILE, umask))


def test_no_umask_closes_a_groups_store(tmp_path: Path) -> None:
    """In a store that a group shares, whatever a member with a umask of 077 runs leaves every file
    for the group to read, and all but sealed ones to write."""
    for name, data in (("base", bytes(4000)), ("tuned", b"1" * 4000), ("third", b"2" * 4000)):
        write_safetensors(tmp_path / name / "m.safetensors", [("t", "F32", (1000,), data)])
    mstore = Program(tmp_path / "store")
    merge = ["merge", "--base", "base", "--method", "linear", "--name"]
    lines = [
        ["init", "--shared", "group"],
        *(["add", str(tmp_path / name), "--name", name] for name in ("base", "tuned", "third")),
        ["analyze", "third", "--base", "base"],
        [*merge, "merged", "--expert", "tuned"],
        [*merge, "virtual", "--expert", "third", "--virtual"],
        ["materialize", "virtual"],
        ["tag", "v1", "merged"],
        ["rm", "merged", "v1", "third"],
        ["gc", "--reflog-days", "0", "--all"],
        ["config", "codec", "dense"],
        ["reindex"],
        ["fsck", "--repair"],
        ["migrate"],
    ]
    before = os.umask(0o077)
    try:
        for line in lines:
            mstore.succeed(*line)
            for path in (mstore.store, *mstore.store.rglob("*")):
                bits = stat.S_IMODE(path.stat().st_mode)
                wanted = 0o2070 if path.is_dir() else 0o040 if path.suffix == ".pack" else 0o060
                assert bits & wanted == wanted, (line, path, oct(bits))
    finally:
        os.umask(before)


def is_like(path: Path, wanted: int) -> bool:
    return stat.S_IMODE(path.stat().st_mode) == wanted


def test_a_tree_is_opened_and_never_closed(tmp_path: Path) -> None:
    """What is there is shared too: sealed files stay sealed, private ones private, links alone."""
    root, outside = tmp_path / "store", tmp_path / "outside"
    for directory in (root, root / "tmp"):
        directory.mkdir(mode=0o700)
    for name, bits in (("file", 0o600), ("pack", 0o400), ("tmp/pin", 0o600), ("open", 0o666)):
        (root / name).touch()
        (root / name).chmod(bits)
    outside.touch()
    outside.chmod(0o600)
    (root / "link").symlink_to(outside)
    fs.share_tree(root, Sharing.ALL, private=[root / "tmp"])
    for name, bits in (
        (".", 0o2775),
        ("file", 0o664),
        ("pack", 0o444),
        ("tmp", 0o2770),
        ("tmp/pin", 0o660),
        ("open", 0o666),
    ):
        assert is_like(root / name, bits), name
    assert is_like(outside, 0o600)
    fs.share_tree(root, Sharing.UMASK)
    assert is_like(root / "file", 0o664)
