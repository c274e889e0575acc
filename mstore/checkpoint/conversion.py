"""Converting pickles: which files are pickles, what replaces each, and the child process.

Weights that `torch.save` wrote become safetensors files with the usual names, and their index
becomes the index of those.  Training state (optimizer, schedule, random state, arguments) is left
out; so is a pickle whose safetensors twin already exists.  Every other file stays as it is,
including a `.bin` that is not a pickle.

The child is killed together with its parent, at its time limit, and when the caller is interrupted.
It writes only to the directory that the caller gave, and the caller removes that.
"""

from __future__ import annotations

import json
import os
import posixpath
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from mstore import fs
from mstore.checkpoint.directory import (
    DEFAULT_LIMITS,
    CheckpointLimits,
    Replacement,
    read_weight_map,
)
from mstore.checkpoint.exclusion import (
    NOTHING_EXCLUDED,
    PICKLE_SUFFIXES,
    Exclusion,
    is_of_training,
)
from mstore.checkpoint.paths import (
    CONTROL,
    INDEX_SUFFIX,
    SAFETENSORS_SUFFIX,
    is_safetensors,
    quoted,
)
from mstore.checkpoint.reading import read_part
from mstore.checkpoint.tree import Tree, TreeFile, walk
from mstore.terms.errors import BadCheckpoint, Unavailable
from mstore.terms.phrases import few

PROGRAM = Path(__file__).with_name("conversion_program.py")
PICKLE_INDEX_SUFFIX = ".bin.index.json"
GIB = 1 << 30

# An archive of torch 1.6 and later, or a bare pickle of protocol 2 and later.
_MAGICS = (b"PK\x03\x04", b"\x80")
_MAX_ANSWER = 16 << 20
_LEFT_OUT_SHOWN = 5


class ConversionLimits(msgspec.Struct, frozen=True):
    """What the child may use.  Raise them for a trusted file.

    memory: bytes beyond what torch itself maps; None: twice the largest file and 2 GiB.
    seconds: limit of wall time and of processor time.
    growth: how many times as large as its pickle a converted file may be.
    """

    memory: int | None = None
    seconds: int = 3600
    growth: int = 4


class Conversion(NamedTuple):
    """What replaces the pickles, and a description of what was done."""

    replacement: Replacement
    remarks: tuple[str, ...]


class _Task(NamedTuple):
    pickle: TreeFile
    path: str
    target: Path


class _ConvertedFile(msgspec.Struct):
    tensors: int
    bytes: int
    left_out: list[str]


class _Answer(msgspec.Struct):
    """The child's answer: `files` on success, otherwise the other three fields."""

    files: list[_ConvertedFile] | None = None
    kind: str = ""
    what: str = ""
    file: str | None = None


def convert(
    path: Path,
    scratch: Path,
    *,
    limits: ConversionLimits,
    checkpoint_limits: CheckpointLimits = DEFAULT_LIMITS,
    exclusion: Exclusion = NOTHING_EXCLUDED,
) -> Conversion:
    """Write a checkpoint's pickled weights to the directory `scratch`, as safetensors.

    Raises BadCheckpoint for a file that holds anything but tensors by name, exceeds a limit or
    crashes the loader, Unavailable if torch is missing or too old, and what `walk` raises.
    """
    tree = walk(
        path,
        max_files=checkpoint_limits.max_files,
        max_sparse_bytes=checkpoint_limits.max_sparse_bytes,
        exclusion=exclusion,
    )
    pickles = [found for found in tree.files if _is_pickle(found)]
    own = {found.path for found in tree.files}
    tasks: list[_Task] = []
    remarks: list[str] = []
    for found in pickles:
        target = safetensors_path(found.path)
        if is_of_training(found.path):
            remarks.append(f"left out {found.path}: it is of training, not weights")
        elif target in own:
            remarks.append(f"left out {found.path}: {target} is there")
        else:
            tasks.append(_Task(found, target, scratch / f"{len(tasks)}{SAFETENSORS_SUFFIX}"))
    _check_tasks(tasks, own, tree)
    made = {task.path: task.target for task in tasks}
    if tasks:
        files = _run(tasks, scratch, tree, limits)
        remarks += _remarks(tasks, files)
    indexes = [found for found in tree.files if found.path.endswith(PICKLE_INDEX_SUFFIX)]
    made |= _indexes(indexes, made, own, scratch, tree, checkpoint_limits)
    gone = frozenset(found.path for found in (*pickles, *indexes))
    return Conversion(Replacement(gone, made), tuple(remarks))


def safetensors_path(path: str) -> str:
    """Return the name of a pickle's safetensors file, as transformers looks for it."""
    directory, name = posixpath.split(path)
    if name.endswith(PICKLE_INDEX_SUFFIX):
        name = name.removesuffix(PICKLE_INDEX_SUFFIX) + INDEX_SUFFIX
    else:
        name = posixpath.splitext(name)[0] + SAFETENSORS_SUFFIX
    if name.startswith("pytorch_model"):
        name = name.removeprefix("pytorch_")
    return posixpath.join(directory, name)


def _is_pickle(found: TreeFile) -> bool:
    if not found.path.endswith(PICKLE_SUFFIXES):
        return False
    return read_part(found.absolute, 0, 4, found.stamp).startswith(_MAGICS)


def _check_tasks(tasks: list[_Task], own: set[str], tree: Tree) -> None:
    if not tasks and not any(map(is_safetensors, own)):
        raise BadCheckpoint(
            "holds no weights: no .safetensors file, and no pickle that torch.save wrote",
            where=str(tree.shown),
        )
    seen: dict[str, str] = {}
    for task in tasks:
        other = seen.setdefault(task.path, task.pickle.path)
        if other != task.pickle.path:
            raise BadCheckpoint(
                f"{quoted(other)} and {quoted(task.pickle.path)} would both become "
                f"{quoted(task.path)}",
                where=str(tree.shown),
            )


def _remarks(tasks: Iterable[_Task], files: Iterable[_ConvertedFile]) -> Iterable[str]:
    for task, file in zip(tasks, files, strict=True):
        noun = "tensor" if file.tensors == 1 else "tensors"
        yield f"converted {task.pickle.path} to {task.path}: {file.tensors} {noun}"
        if file.left_out:
            shown = few([quoted(name) for name in file.left_out], _LEFT_OUT_SHOWN)
            yield f"left out of {task.pickle.path}: {shown}"


def _indexes(
    indexes: Iterable[TreeFile],
    made: dict[str, Path],
    own: set[str],
    scratch: Path,
    tree: Tree,
    limits: CheckpointLimits,
) -> dict[str, Path]:
    """Convert the shard indexes of the pickles to indexes of the files made from them."""
    found: dict[str, Path] = {}
    for index in indexes:
        path = safetensors_path(index.path)
        if path in own:
            continue
        where = str(tree.shown / index.path)
        weight_map = read_weight_map(index.absolute, where=where, limits=limits, stamp=index.stamp)
        renamed = {name: safetensors_path(shard) for name, shard in weight_map.items()}
        directory = posixpath.dirname(index.path)
        shards = {posixpath.join(directory, shard) for shard in renamed.values()}
        total = sum(made[shard].stat().st_size for shard in shards if shard in made)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": renamed}, indent=2)
        target = scratch / f"{len(found)}{INDEX_SUFFIX}"
        fs.replace_file(target, text + "\n")
        found[path] = target
    return found


# -- the child -----------------------------------------------------------------------------------


def _run(
    tasks: list[_Task], scratch: Path, tree: Tree, limits: ConversionLimits
) -> list[_ConvertedFile]:
    with fs.translated(scratch), fs.directory(scratch) as descriptor:
        return _converted(tasks, scratch, descriptor, tree, limits)


def _converted(
    tasks: list[_Task], scratch: Path, descriptor: int, tree: Tree, limits: ConversionLimits
) -> list[_ConvertedFile]:
    # The child writes below the open directory, wherever its path may lead by now.
    place = Path(f"/proc/self/fd/{descriptor}")
    largest = max(task.pickle.status.st_size for task in tasks)
    request = {
        "parent": os.getpid(),
        "memory": limits.memory if limits.memory is not None else 2 * largest + 2 * GIB,
        "seconds": limits.seconds,
        "file_bytes": limits.growth * largest + GIB,
        "growth": limits.growth,
        "tasks": [
            [str(task.pickle.absolute), task.pickle.stamp, str(place / task.target.name)]
            for task in tasks
        ],
    }
    result = scratch / "answer.json"
    command = [sys.executable, "-I", str(PROGRAM), str(place / result.name)]
    status = _spawn(command, request, limits, tree, descriptor)
    shown = {str(task.pickle.absolute): str(tree.shown / task.pickle.path) for task in tasks}
    if status != 0 or not result.exists():
        raise BadCheckpoint(
            f"its conversion ended before it was done: {_ending(status)}", where=str(tree.shown)
        )
    raw = read_part(result, 0, _MAX_ANSWER)
    try:
        answer = msgspec.json.decode(raw, type=_Answer)
    except msgspec.DecodeError:
        raise BadCheckpoint("its conversion gave no sound answer", where=str(tree.shown)) from None
    if answer.files is None or len(answer.files) != len(tasks):
        _refuse(answer, shown.get(answer.file or "", str(tree.shown)))
    return answer.files


def _spawn(
    command: list[str],
    request: dict[str, object],
    limits: ConversionLimits,
    tree: Tree,
    descriptor: int,
) -> int:
    """Run the child until it ends, for whatever reason; return its status as `subprocess` does.

    It inherits `descriptor`.
    """
    if not sys.executable:
        raise Unavailable(
            "conversion needs a Python to run, and this program does not name its own"
        )
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        pass_fds=[descriptor],
        # Ctrl-C goes to the parent only, which then kills the child and cleans up.
        start_new_session=True,
    )
    try:
        child.communicate(json.dumps(request).encode(), timeout=limits.seconds)
        return child.returncode
    except subprocess.TimeoutExpired:
        raise BadCheckpoint(
            f"its conversion took longer than the limit of {limits.seconds} seconds",
            where=str(tree.shown),
        ) from None
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()


def _ending(status: int) -> str:
    if status == -signal.SIGXCPU:
        return "it used up its processor time"
    if status == -signal.SIGKILL:
        return "it was killed; most often that is for want of memory"
    if status < 0:
        return f"signal {signal.Signals(-status).name}"
    return f"status {status}"


def _refuse(answer: _Answer, where: str) -> NoReturn:
    what = CONTROL.sub(" ", answer.what)
    if answer.kind == "missing":
        raise Unavailable(what, hint="pip install 'torch>=2.6'    (a CPU build is enough)")
    if answer.kind == "limit":
        raise BadCheckpoint(
            what,
            where=where,
            hint="if you trust this file: Store.add(..., convert=ConversionLimits(...)) in Python",
        )
    hint = None
    if answer.kind == "code":
        hint = (
            "ask its author for safetensors; or, where nothing can be harmed, load it and save its "
            "tensors with safetensors.torch.save_file"
        )
    raise BadCheckpoint(what, where=where, hint=hint)
