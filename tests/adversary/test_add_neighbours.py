"""Add beside people who may write the checkpoint: what was listed is what is stored, or nothing."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from checkpoints import await_tick
from cli_runs import Program
from conversion_here import convert_here
from small_models import BLOCK, files_of, small_model
from test_checkpoint_tree import cached_model

from mstore import Store
from mstore.checkpoint import conversion, directory, tree
from mstore.checkpoint.directory import CheckpointLimits
from mstore.snapshots import add as adding
from mstore.snapshots import nearest as searching
from mstore.terms.errors import BadCheckpoint
from mstore.terms.report import Progress
from mstore.terms.sizes import parse_size

TIB = 1 << 40
CHANGED = "changed while it was being read"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        yield store


@pytest.fixture
def model(tmp_path: Path) -> Path:
    model = small_model(tmp_path / "model", "m")
    (model / "sub").mkdir()
    (model / "sub" / "notes.txt").write_bytes(b"n" * 5000)
    return model


def twin(path: Path, place: Path) -> Path:
    """A secret elsewhere that `stat` tells from the file at `path` by its inode alone."""
    place.mkdir(parents=True, exist_ok=True)
    secret = place / path.name
    content = bytearray(path.read_bytes())
    content[-4:] = b"SEEN"[: len(content)]
    secret.write_bytes(content)
    shutil.copystat(path, secret)
    return secret


def before(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, act: Callable[[], None]
) -> None:
    """Do something right before the first call of a function, whatever it is called with."""
    function, done = getattr(module, name), []

    @functools.wraps(function)
    def acting(*arguments: Any, **named: Any) -> Any:
        if not done:
            done.append(True)
            act()
        return function(*arguments, **named)

    monkeypatch.setattr(module, name, acting)


def nothing_of(store: Store) -> None:
    """Nothing was published, and nothing lies in the store that a later command would show."""
    assert store.refs() == []
    assert store.log(every=True) == []


# -- between the list and the reading -------------------------------------------------------------


def _link_to_a_file(model: Path, tmp_path: Path) -> None:
    path = model / "config.json"
    secret = twin(path, tmp_path / "secret")
    path.unlink()
    path.symlink_to(secret)


def _link_to_weights(model: Path, tmp_path: Path) -> None:
    path = model / "model.safetensors"
    secret = twin(path, tmp_path / "secret")
    path.unlink()
    path.symlink_to(secret)


def _link_to_a_directory(model: Path, tmp_path: Path) -> None:
    secret = twin(model / "sub" / "notes.txt", tmp_path / "secret")
    shutil.rmtree(model / "sub")
    (model / "sub").symlink_to(secret.parent)


def _another_file(model: Path, tmp_path: Path) -> None:
    path = model / "sub" / "notes.txt"
    twin(path, tmp_path / "secret").rename(path)


def _another_directory(model: Path, tmp_path: Path) -> None:
    secret = twin(model / "sub" / "notes.txt", tmp_path / "secret")
    (model / "sub").rename(tmp_path / "away")
    secret.parent.rename(model / "sub")


def _rewritten(model: Path, tmp_path: Path) -> None:
    path = model / "sub" / "notes.txt"
    await_tick(path)
    status = path.stat()
    with path.open("r+b") as file:
        file.write(b"SEEN")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _gone(model: Path, tmp_path: Path) -> None:
    (model / "sub" / "notes.txt").unlink()


def _a_directory(model: Path, tmp_path: Path) -> None:
    (model / "config.json").unlink()
    (model / "config.json").mkdir()


CHANGES = [
    _link_to_a_file,
    _link_to_weights,
    _link_to_a_directory,
    _another_file,
    _another_directory,
    _rewritten,
    _gone,
    _a_directory,
]
Change = Callable[[Path, Path], None]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", CHANGES)
def test_what_was_listed_is_what_is_read(
    change: Change, store: Store, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is another one by the time it is read, of equal size and time, stops the add."""
    before(monkeypatch, adding, "add", lambda: change(model, tmp_path))
    with pytest.raises(BadCheckpoint, match=CHANGED) as refused:
        store.add(model, name="m")
    assert Path(refused.value.where or "").is_relative_to(model)
    nothing_of(store)


WAITING = """
import os, sys
from pathlib import Path
from mstore import Store
from mstore.snapshots import add as adding
from mstore.terms.errors import MstoreError
model, add = Path(sys.argv[1]), adding.add
def swapped(*arguments, **named):
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    return add(*arguments, **named)
adding.add = swapped
with Store.open(sys.argv[2]) as store:
    try:
        store.add(model, name="m")
    except MstoreError as error:
        print(type(error).__name__, error.what)
"""


@pytest.mark.rest
def test_a_fifo_keeps_nobody_waiting(store: Store, model: Path) -> None:
    """A file that became a fifo is an error at once: nobody ever writes there."""
    command = [sys.executable, "-c", WAITING, str(model), str(store.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.stdout == f"BadCheckpoint the file {CHANGED}\n", done.stderr
    nothing_of(store)


@pytest.mark.parametrize("change", [_link_to_a_file, _link_to_weights])
def test_the_search_for_a_base_reads_what_was_listed(
    change: Change, store: Store, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Configs and sampled blocks that the search reads are those of the files that were listed."""
    store.add(small_model(tmp_path / "other", "m", changed="a bit"), name="other")
    before(monkeypatch, searching, "nearest", lambda: change(model, tmp_path))
    with monkeypatch.context() as alone:
        # Nothing but the search gets to read.
        alone.setattr(adding, "add", None)
        with pytest.raises(BadCheckpoint, match=CHANGED):
            store.add(model, name="m", detect_base=True)
    assert [ref.name for ref in store.refs()] == ["other"]


# -- while it is read -----------------------------------------------------------------------------


@pytest.mark.parametrize("change", [_rewritten, _another_file, _gone])
def test_a_file_that_changes_under_the_reader_is_refused(
    change: Change, store: Store, model: Path, tmp_path: Path
) -> None:
    """A file of several groups that changes after the first, its time set back: nothing is kept."""
    (model / "sub" / "notes.txt").write_bytes(b"n" * (9 << 20))
    done: list[int] = []

    def meanwhile(tick: Progress) -> None:
        if tick.done > 5 << 20 and not done:
            change(model, tmp_path)
            done.append(tick.done)

    with pytest.raises(BadCheckpoint, match=CHANGED) as refused:
        store.add(model, name="m", threads=1, progress=meanwhile)
    assert done
    assert refused.value.where == str(model / "sub" / "notes.txt")
    nothing_of(store)


# -- while they are listed ------------------------------------------------------------------------


def test_a_directory_that_becomes_a_link_is_not_entered(
    store: Store, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory swapped for a link after it was seen is not walked through."""
    secret = twin(model / "sub" / "notes.txt", tmp_path / "secret")
    check = tree.check_relative

    def swapping(path: str, where: str) -> None:
        check(path, where)
        if path == "sub":
            shutil.rmtree(model / "sub")
            (model / "sub").symlink_to(secret.parent)

    monkeypatch.setattr(tree, "check_relative", swapping)
    with pytest.raises(BadCheckpoint) as refused:
        store.add(model, name="m")
    assert Path(refused.value.where or "").is_relative_to(model)
    nothing_of(store)


def test_a_header_is_read_of_the_file_that_was_listed(
    store: Store, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights swapped for a link between the list and the reading of their header are refused."""
    before(monkeypatch, directory, "read_header", lambda: _link_to_weights(model, tmp_path))
    with pytest.raises(BadCheckpoint, match=CHANGED) as refused:
        store.add(model, name="m")
    assert refused.value.where == str(model / "model.safetensors")
    nothing_of(store)


# -- the Hub's cache ------------------------------------------------------------------------------


def test_a_link_that_turns_away_leads_nowhere(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links of a cached snapshot are followed once: turned later, they change nothing."""
    cached = cached_model(tmp_path / "hub")
    wanted = files_of(cached / "snapshots" / ("a" * 40))
    link = next((cached / "snapshots").glob("*/config.json"))
    secret = twin(link, tmp_path / "secret")

    def turn() -> None:
        link.unlink()
        link.symlink_to(secret)

    before(monkeypatch, adding, "add", turn)
    store.add(cached, name="m")
    assert {path: store["m"].read(path) for path in wanted} == wanted


def test_a_blob_that_becomes_a_link_is_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a link of a cached snapshot ended must be that very file when it is read."""
    cached = cached_model(tmp_path / "hub")
    blob = next((cached / "snapshots").glob("*/config.json")).resolve()
    secret = twin(blob, tmp_path / "secret")

    def turn() -> None:
        blob.unlink()
        blob.symlink_to(secret)

    before(monkeypatch, adding, "add", turn)
    with pytest.raises(BadCheckpoint, match=CHANGED) as refused:
        store.add(cached, name="m")
    assert refused.value.where == str(blob)
    nothing_of(store)


def test_links_above_a_checkpoint_are_its_owner_s(
    store: Store, model: Path, tmp_path: Path
) -> None:
    """The path that a person names may lead over links, to a directory and to a file."""
    (tmp_path / "way").symlink_to(tmp_path)
    (tmp_path / "here").symlink_to("way/model")
    (tmp_path / "one.safetensors").symlink_to("here/model.safetensors")
    store.add(tmp_path / "here", name="m")
    store.add(tmp_path / "one.safetensors", name="one")
    assert store["m"].read("sub/notes.txt") == b"n" * 5000
    assert store["one"].read("one.safetensors") == (model / "model.safetensors").read_bytes()


# -- conversion -----------------------------------------------------------------------------------


@pytest.mark.rest
def test_a_pickle_that_becomes_a_link_is_not_loaded(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program that loads a pickle opens the file that was listed, or none."""
    import torch

    model = tmp_path / "pickled"
    model.mkdir()
    path = model / "pytorch_model.bin"
    torch.save({"w": torch.ones(3)}, path)
    (tmp_path / "secret").mkdir()
    secret = tmp_path / "secret" / path.name
    torch.save({"w": torch.zeros(3)}, secret)
    shutil.copystat(path, secret)

    def swap() -> None:
        path.unlink()
        path.symlink_to(secret)

    convert_here(monkeypatch)
    before(monkeypatch, conversion, "_spawn", swap)
    with pytest.raises(BadCheckpoint, match=CHANGED) as refused:
        store.add(model, name="m", convert=conversion.ConversionLimits())
    assert refused.value.where == str(path)
    nothing_of(store)


# -- files that are mostly holes ------------------------------------------------------------------


def hole(path: Path, size: int) -> None:
    """A file of this size that takes nothing on the disk."""
    path.touch()
    try:
        os.truncate(path, size)
    except OSError:
        pytest.skip("no file of this size can be made here")
    if path.stat().st_blocks * 1024 >= size:
        pytest.skip("files have no holes here")


def refuse_to_read(tick: Progress) -> None:
    assert tick.done == 0, "it was read"


def test_a_hole_larger_than_the_disk_is_refused(store: Store, model: Path) -> None:
    """A sparse file of 8 TiB is refused before it is read: file, size, free space and a way out."""
    hole(model / "hole.bin", 8 * TIB)
    room = os.statvfs(store.path)
    with pytest.raises(BadCheckpoint, match="mostly holes") as refused:
        store.add(model, name="m", progress=refuse_to_read)
    assert refused.value.where == str(model / "hole.bin")
    assert "8.0 TiB" in refused.value.what
    assert "free space of the store's disk" in refused.value.what
    told = refused.value.what.split("for such files is ")[1].split(",")[0]
    assert parse_size(told.replace(" ", ""), option="") <= room.f_blocks * room.f_frsize
    assert refused.value.hint is not None
    assert "max_sparse" in refused.value.hint
    nothing_of(store)


def test_many_holes_count_together(store: Store, model: Path) -> None:
    """Sparse files that are within the limit each may not go beyond it together."""
    limits = CheckpointLimits(max_sparse_bytes=10 << 20)
    for number in range(3):
        hole(model / f"{number}.bin", (4 << 20) + number)
    with pytest.raises(BadCheckpoint, match="mostly holes") as refused:
        store.add(model, name="m", limits=limits, progress=refuse_to_read)
    assert refused.value.where == str(model / "2.bin")
    (model / "0.bin").unlink()
    store.add(model, name="m", limits=limits)
    assert store["m"].read("1.bin") == bytes((4 << 20) + 1)


def test_a_full_file_has_no_such_limit(store: Store, model: Path) -> None:
    """Files without holes are read whatever is free: what the store has already takes no room."""
    (model / "full.bin").write_bytes(os.urandom(2 << 20))
    os.sync()
    report = store.add(model, name="m", limits=CheckpointLimits(max_sparse_bytes=0))
    assert report.plain_bytes > 2 << 20


def test_a_small_hole_is_no_hole(store: Store, model: Path) -> None:
    """Files below 1 MiB count as full: some filesystems keep them where no block is counted."""
    hole(model / "small.bin", 1 << 19)
    store.add(model, name="m", limits=CheckpointLimits(max_sparse_bytes=0))
    assert store["m"].read("small.bin") == bytes(1 << 19)


def test_a_sparse_pickle_is_refused_before_it_is_loaded(
    store: Store, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits of the child follow from a pickle's size, so that is looked at first."""
    hole(model / "pytorch_model.bin", 8 * TIB)
    with (model / "pytorch_model.bin").open("r+b") as file:
        file.write(b"\x80\x02")
    monkeypatch.setattr(conversion, "_run", None)
    with pytest.raises(BadCheckpoint, match="mostly holes"):
        store.add(model, name="m", convert=conversion.ConversionLimits())


def test_the_command_line_takes_a_limit(model: Path, tmp_path: Path) -> None:
    """`mstore add` refuses a hole beyond the disk; --max-sparse says how much may be read."""
    mstore = Program(tmp_path / "cli")
    mstore.succeed("init")
    hole(model / "hole.bin", 8 * TIB)
    refused = mstore("add", model, "--name", "m")
    assert refused.status == 1
    assert "mostly holes" in refused.err
    assert "--max-sparse" in refused.err
    os.truncate(model / "hole.bin", 5 << 20)
    assert mstore("add", model, "--name", "m", "--max-sparse", "4MiB").status == 1
    mstore.succeed("add", model, "--name", "m", "--max-sparse", "5MiB")
