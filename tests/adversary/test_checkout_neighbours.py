"""Checkout beside people who may write the directory above: nothing of theirs is lost."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_runs import Program
from small_models import BLOCK, files_of, small_model

from mstore import Store, fs
from mstore.terms.errors import Conflict, MstoreError, StorageFailed

PRECIOUS = {"weights": b"precious", "deep/notes": b"precious too"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = small_model(tmp_path_factory.mktemp("source") / "model", "m")
    (model / "sub" / "deeper").mkdir(parents=True)
    (model / "sub" / "deeper" / "notes.txt").write_text("notes")
    return model


@pytest.fixture(scope="module")
def store(model: Path) -> Iterator[Store]:
    with Store.init(model.parent / "store", block_size=BLOCK) as store:
        store.add(model, name="m")
        yield store


@pytest.fixture
def above(tmp_path: Path) -> Path:
    """The directory that neighbours may write, with something of theirs in it."""
    above = tmp_path / "above"
    for name, content in PRECIOUS.items():
        path = above / "precious" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return above


def staging(operation: fs.Operation, above: Path) -> Path | None:
    """Where the files lie while the checkout runs, as a neighbour finds it."""
    path = Path(operation.path)
    if above not in path.parents:
        return None
    first = above / path.relative_to(above).parts[0]
    return first if first.name.startswith(".out.") else None


class Swap:
    """A neighbour who, at the first operation of a kind, puts `precious` in the staging's place."""

    def __init__(self, above: Path, kind: str, *, then: OSError | None = None) -> None:
        self.above = above
        self.kind = kind
        self.then = then
        self.place: Path | None = None

    def __call__(self, operation: fs.Operation) -> None:
        place = staging(operation, self.above)
        if operation.kind == self.kind and place is not None and place.exists():
            if self.place is None:
                self.place = place
                place.rename(self.above / ".away")
                (self.above / "precious").rename(place)
            if self.then is not None:
                raise self.then


# -- a directory in the place of ours ------------------------------------------------------------


@pytest.mark.parametrize("kind", ["create", "write", "fsync", "syncdir", "rename", "rmtree"])
def test_what_is_in_the_place_of_the_staging_directory_stays(
    kind: str, store: Store, model: Path, above: Path
) -> None:
    """A directory renamed to the staging directory's name is not removed; the copy is whole."""
    swap = Swap(above, kind)
    with fs.observed(swap):
        store.checkout("m", above / "out", threads=1)
    assert swap.place is not None
    assert files_of(swap.place) == PRECIOUS
    assert files_of(above / "out") == files_of(model)
    assert sorted(path.name for path in above.iterdir()) == sorted([swap.place.name, "out"])


@pytest.mark.parametrize("kind", ["create", "write", "fsync", "syncdir", "rename"])
def test_a_checkout_that_fails_removes_only_its_own(kind: str, store: Store, above: Path) -> None:
    """After an error what was made is gone, wherever it was moved, and what was not is there."""
    swap = Swap(above, kind, then=OSError(errno.ENOSPC, "full"))
    with fs.observed(swap), pytest.raises(StorageFailed):
        store.checkout("m", above / "out", threads=1)
    assert swap.place is not None
    assert files_of(swap.place) == PRECIOUS
    assert [path.name for path in above.iterdir()] == [swap.place.name]


def test_a_strange_file_among_ours_stays(store: Store, above: Path) -> None:
    """Files that appear in the staging directory and its tree are left there by the clean-up."""
    placed: list[Path] = []

    def place(operation: fs.Operation) -> None:
        path = Path(operation.path)
        if operation.kind == "create" and path.name == "notes.txt" and staging(operation, above):
            for name in ("precious", "deep"):
                (path.parent / name).mkdir()
                (path.parent / name / "file").write_text("precious")
            placed.append(path.parent)
            raise OSError(errno.EIO, "no")

    with fs.observed(place), pytest.raises(StorageFailed):
        store.checkout("m", above / "out", threads=1)
    (where,) = placed
    assert set(files_of(where)) == {"precious/file", "deep/file"}
    left = next(path for path in above.iterdir() if path.name.startswith(".out."))
    assert len(files_of(left)) == 2


def test_what_takes_the_final_name_stays(
    store: Store, above: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory put in the place of the finished copy is told and kept; the copy goes."""
    rename = os.rename

    def swapped(source: str, target: str, **descriptors: int) -> None:
        rename(source, target, **descriptors)
        if target == "out":
            rename(above / "out", above / "away")
            rename(above / "precious", above / "out")

    monkeypatch.setattr(os, "rename", swapped)
    with pytest.raises(Conflict, match="something else was put in its place"):
        store.checkout("m", above / "out", threads=1)
    assert files_of(above / "out") == PRECIOUS
    assert [path.name for path in above.iterdir()] == ["out"]


RACER = """
import os, sys
above = sys.argv[1]
print("ready", flush=True)
turns = 0
while not os.path.exists(f"{above}/stop"):
    for name in os.listdir(above):
        if name.startswith(".out.") and os.path.isdir(f"{above}/precious"):
            try:
                os.rename(f"{above}/{name}", f"{above}/moved-{turns}")
                os.rename(f"{above}/precious", f"{above}/{name}")
                turns += 1
            except OSError:
                pass
"""


@pytest.mark.rest
def test_a_neighbour_who_never_stops_loses_nothing(store: Store, above: Path) -> None:
    """Another process swaps directories as fast as it can: its own is there after each checkout."""
    racer = subprocess.Popen([sys.executable, "-c", RACER, above], stdout=subprocess.PIPE)
    with racer:
        assert racer.stdout is not None
        assert racer.stdout.readline() == b"ready\n"
        try:
            for number in range(15):
                out = above / f"{number}" / "out"
                with suppress(MstoreError):
                    store.checkout("m", above / "out", threads=1)
                # It may be at work this very moment, so look twice.
                places = (above / "precious", *above.glob(".out.*"), above / "precious")
                assert any(files_of(place) == PRECIOUS for place in places)
                with suppress(OSError):
                    (above / "out").rename(out.parent.with_name(f"done-{number}"))
                for place in above.glob(".out.*"):
                    place.rename(above / "precious")
        finally:
            (above / "stop").touch()


# -- a directory above that others may write -----------------------------------------------------


def _everybody(above: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    above.chmod(0o777)


def _others_only(above: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    above.chmod(0o707)


def _a_group(above: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    above.chmod(0o2775)
    _group_of(monkeypatch, "team", [])


def _own_group_with_a_member(above: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    above.chmod(0o775)
    _group_of(monkeypatch, "me", ["me", "somebody"])


def _another_owner(above: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(above, 12345, -1)
    else:
        mine = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: mine + 1)


def _another_owner_and_sticky(above: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    above.chmod(0o1777)
    _another_owner(above, monkeypatch)


def _an_access_list(above: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _group_of(monkeypatch, "me", [])
    entries = [(1, 7, -1), (2, 7, 12345), (4, 5, -1), (16, 7, -1), (32, 5, -1)]
    packed = b"".join(struct.pack("<HHi", *entry) for entry in entries)
    try:
        os.setxattr(above, "system.posix_acl_access", struct.pack("<I", 2) + packed)
    except OSError:
        pytest.skip("no access lists here")


def _group_of(monkeypatch: pytest.MonkeyPatch, name: str, members: list[str]) -> None:
    """Let every user be called `me`, and every group be that user's first one, called `name`."""
    monkeypatch.setattr(
        pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name="me", pw_gid=os.getegid())
    )
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name=name, gr_mem=members))


UNSAFE = [
    _everybody,
    _others_only,
    _a_group,
    _own_group_with_a_member,
    _another_owner,
    _another_owner_and_sticky,
    _an_access_list,
]
Change = Callable[[Path, pytest.MonkeyPatch], None]


@pytest.mark.parametrize("change", UNSAFE)
def test_a_directory_that_others_may_write_is_refused(
    change: Change, store: Store, above: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others who may rename what we make: refused before anything is made, and the hint helps."""
    change(above, monkeypatch)
    made: list[fs.Operation] = []
    with fs.observed(made.append), pytest.raises(Conflict) as refused:
        store.checkout("m", above / "out")
    assert refused.value.where == str(above)
    assert "may rename and remove" in refused.value.what
    assert refused.value.hint is not None
    assert "shared" in refused.value.hint
    assert [each for each in made if above in Path(each.path).parents] == []
    assert [path.name for path in above.iterdir()] == ["precious"]


@pytest.mark.rest
@pytest.mark.parametrize("change", UNSAFE)
def test_who_trusts_them_may_go_on(
    change: Change, store: Store, model: Path, above: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `shared` the same directory is filled."""
    if change in (_another_owner, _another_owner_and_sticky) and os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    change(above, monkeypatch)
    store.checkout("m", above / "out", shared=True)
    assert files_of(above / "out") == files_of(model)


def _sticky(above: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    above.chmod(0o1777)


def _private_group(above: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    above.chmod(0o2775)
    _group_of(monkeypatch, "me", [])


def _readable(above: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    above.chmod(0o755)


@pytest.mark.parametrize("change", [_sticky, _private_group, _readable])
def test_a_directory_where_only_we_rename_will_do(
    change: Change, store: Store, model: Path, above: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sticky directories, a group of the user's own, and directories only others read are fine."""
    change(above, monkeypatch)
    store.checkout("m", above / "out")
    assert files_of(above / "out") == files_of(model)


def test_the_command_line_tells_and_takes_shared(store: Store, model: Path, above: Path) -> None:
    """`mstore checkout` names the directory and the option; with --shared it goes on."""
    mstore = Program(store.path)
    above.chmod(0o777)
    refused = mstore("checkout", "m", above / "out")
    assert refused.status == 1
    assert str(above) in refused.err
    assert f"chmod +t {above}" in refused.err
    assert not (above / "out").exists()
    mstore.succeed("checkout", "m", above / "out", "--shared")
    assert files_of(above / "out") == files_of(model)
