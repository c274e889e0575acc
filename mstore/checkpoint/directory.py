"""A checkpoint as it lies on disk: every file below a directory, every safetensors header.

Owns the walk, the rules for links and special files, and the check of shard indexes.  Opens no
tensor data and never a pickle.  A checkpoint is a set of regular files: empty directories,
permissions and the difference between a file and a link to it are not part of it.

`scan` sees one moment of each file; whoever reads the data afterwards asks `unchanged` when
done, because nothing stops another program from writing meanwhile.
"""

from __future__ import annotations

import os
import posixpath
import re
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path

from mstore.checkpoint.header import DEFAULT_LIMITS, Header, HeaderLimits, read_header
from mstore.checkpoint.paths import check_case_twins, check_relative, quoted
from mstore.checkpoint.reading import open_regular, read_range, storage_error
from mstore.checkpoint.strict_json import parse_object
from mstore.errors import BadCheckpoint, NotFound

SAFETENSORS_SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
STORE_MARK = b"mstore "

# An error that lists file names stays one readable line.
_NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a checkpoint.

    `path` is relative, with `/`; `absolute` is where its bytes are (behind the link, if it
    is one).  `header` is None for an opaque file.
    """

    path: str
    absolute: Path
    size: int
    mtime_ns: int
    header: Header | None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The files below `root`, sorted by path; at least one has a header."""

    root: Path
    files: tuple[SourceFile, ...]


@dataclass(frozen=True, slots=True)
class _Found:
    path: str
    absolute: Path
    status: os.stat_result


def scan(path: Path, *, limits: HeaderLimits = DEFAULT_LIMITS) -> Checkpoint:
    """Read a checkpoint directory, or a single .safetensors file, without its tensor data.

    Walks every regular file, hidden ones too.  A link to a regular file inside the directory
    counts as that file.  `path` itself may be a link: whoever named it meant it.

    Raises NotFound where `path` does not exist, StorageFailed where the disk refuses, and
    BadCheckpoint for: a header that `read_header` refuses, an index that names a missing
    shard or tensor or has one name in two shards, a link to a directory or out of the
    checkpoint, a special file, a path that is not portable or has a twin in another
    case, an mstore store inside, and a checkpoint without any .safetensors file.
    """
    status = _stat_root(path)
    if stat.S_ISDIR(status.st_mode):
        root = path.resolve()
        found = _walk(root, path)
    elif stat.S_ISREG(status.st_mode):
        check_relative(path.name, str(path.parent))
        root = path.parent.resolve()
        found = [_Found(path.name, path.resolve(), status)]
    else:
        raise BadCheckpoint("is neither a directory nor a regular file", where=str(path))
    found.sort(key=lambda each: each.path)
    check_case_twins((each.path for each in found), str(path))
    # A file is named in errors as the user reaches it, not by where links lead.
    shown = path if stat.S_ISDIR(status.st_mode) else path.parent
    _require_safetensors(found, path, shown)
    files = tuple(_source(each, shown, limits) for each in found)
    by_path = {file.path: file for file in files}
    for file in files:
        if file.path.endswith(INDEX_SUFFIX):
            _check_index(file, by_path, str(shown / file.path), limits)
    return Checkpoint(root=root, files=files)


def unchanged(file: SourceFile) -> bool:
    """Whether the file still has the size and modification time that `scan` saw."""
    try:
        status = os.stat(file.absolute)
    except OSError:
        return False
    return (
        stat.S_ISREG(status.st_mode)
        and status.st_size == file.size
        and status.st_mtime_ns == file.mtime_ns
    )


def _stat_root(path: Path) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        raise storage_error(error, str(path)) from error
    except ValueError:
        raise NotFound(
            "no such file or directory", where=repr(str(path)), hint="check the path"
        ) from None


def _walk(root: Path, shown: Path) -> list[_Found]:
    """Every regular file below `root`; iterative, so that depth costs no stack."""
    found: list[_Found] = []
    pending = [""]
    while pending:
        prefix = pending.pop()
        try:
            with os.scandir(root / prefix) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
            for entry in entries:
                relative = f"{prefix}{entry.name}"
                check_relative(relative, str(shown))
                if entry.is_dir(follow_symlinks=False):
                    pending.append(f"{relative}/")
                    continue
                file = _file(entry, relative, root, shown)
                if entry.name == "format":
                    _refuse_store(file, prefix, shown)
                found.append(file)
        except OSError as error:
            raise storage_error(error, str(shown / prefix)) from error
    return found


def _file(entry: os.DirEntry[str], relative: str, root: Path, shown: Path) -> _Found:
    where = str(shown / relative)
    if entry.is_symlink():
        return _linked_file(entry, relative, root, shown)
    status = entry.stat(follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode):
        raise BadCheckpoint("is a fifo, socket or device, not a regular file", where=where)
    return _Found(relative, root / relative, status)


def _linked_file(entry: os.DirEntry[str], relative: str, root: Path, shown: Path) -> _Found:
    where = str(shown / relative)
    target = Path(os.path.realpath(entry.path))
    if not target.is_relative_to(root):
        raise BadCheckpoint(
            f"is a symlink out of the checkpoint, to {quoted(str(target))}",
            where=where,
            hint=f"cp -rL {shlex.quote(str(shown))} COPY && mstore add COPY --name NAME",
        )
    try:
        status = os.stat(target)
    except OSError:
        raise BadCheckpoint("is a symlink that leads nowhere", where=where) from None
    if stat.S_ISDIR(status.st_mode):
        raise BadCheckpoint("is a symlink to a directory", where=where)
    if not stat.S_ISREG(status.st_mode):
        raise BadCheckpoint("is a symlink to a fifo, socket or device", where=where)
    return _Found(relative, target, status)


def _refuse_store(file: _Found, prefix: str, shown: Path) -> None:
    """`file` is the one called `format` in the directory `prefix` of the checkpoint."""
    with open_regular(file.absolute) as (descriptor, _):
        if read_range(descriptor, 0, len(STORE_MARK)) != STORE_MARK:
            return
    store = str(shown / prefix)
    raise BadCheckpoint(
        "is an mstore store, not a checkpoint or a part of one",
        where=store,
        hint=f"mv {shlex.quote(store)} ELSEWHERE"
        if prefix
        else "mstore refs --store " + shlex.quote(store),
    )


def _source(found: _Found, shown: Path, limits: HeaderLimits) -> SourceFile:
    header: Header | None = None
    if found.path.endswith(SAFETENSORS_SUFFIX):
        header = read_header(found.absolute, limits=limits, where=str(shown / found.path))
    return SourceFile(
        path=found.path,
        absolute=found.absolute,
        size=found.status.st_size,
        mtime_ns=found.status.st_mtime_ns,
        header=header,
    )


def _require_safetensors(found: list[_Found], path: Path, shown: Path) -> None:
    names = [each.path for each in found]
    if any(name.endswith((SAFETENSORS_SUFFIX, INDEX_SUFFIX)) for name in names):
        # An index alone goes on: its check names the shards that are missing.
        return
    pickles = [each for each in found if each.path.endswith(PICKLE_SUFFIXES)]
    if pickles:
        raise BadCheckpoint(
            f"has only pickled weights ({_listed([each.path for each in pickles])}), which can "
            "run code when loaded; mstore reads safetensors",
            where=str(path),
            hint=_conversion(pickles, shown),
        )
    raise BadCheckpoint(
        "holds no .safetensors file", where=str(path), hint="mstore add MODEL_DIRECTORY --name NAME"
    )


def _conversion(pickles: list[_Found], shown: Path) -> str:
    """One shell line that writes the weights as safetensors next to the pickles.

    weights_only keeps a pickle from running code; clone() parts tensors that share memory,
    which save_file refuses.
    """
    # The largest pickle holds weights, and so do the shards named like it; an
    # optimizer state or training_args.bin would only make the conversion fail.
    largest = max(pickles, key=lambda each: each.status.st_size)
    kind = _numberless(largest.path)
    weights = [str(shown / each.path) for each in pickles if _numberless(each.path) == kind]
    program = (
        "import sys, torch; from safetensors.torch import save_file; "
        "[save_file({name: tensor.clone().contiguous() for name, tensor in "
        'torch.load(path, weights_only=True, map_location="cpu").items()}, '
        'path.rpartition(".")[0] + ".safetensors", metadata={"format": "pt"}) '
        "for path in sys.argv[1:]]"
    )
    return shlex.join(["python3", "-c", program, *weights])


def _numberless(path: str) -> str:
    return re.sub(r"[0-9]+", "#", path)


def _check_index(
    index: SourceFile, by_path: dict[str, SourceFile], where: str, limits: HeaderLimits
) -> None:
    weight_map = _weight_map(index, where, limits)
    shards = _shards(index, weight_map, by_path, where)
    names = {shard: {slot.name for slot in header.tensors} for shard, header in shards.items()}
    for name, shard in weight_map.items():
        if name not in names[shard]:
            raise BadCheckpoint(
                f"tensor {quoted(name)} is not in the shard {quoted(shard)}", where=where
            )
    owner: dict[str, str] = {}
    for shard, held in names.items():
        for name in held:
            if owner.setdefault(name, shard) != shard:
                raise BadCheckpoint(
                    f"tensor {quoted(name)} is in two shards, {quoted(owner[name])} and "
                    f"{quoted(shard)}",
                    where=where,
                )


def _weight_map(index: SourceFile, where: str, limits: HeaderLimits) -> dict[str, str]:
    with open_regular(index.absolute) as (descriptor, _):
        raw = read_range(descriptor, 0, limits.max_index_bytes + 1)
    if len(raw) > limits.max_index_bytes:
        raise BadCheckpoint(
            f"the index is longer than the limit of {limits.max_index_bytes} bytes", where=where
        )
    index_object = parse_object(
        raw, what="the index", where=where, max_containers=limits.max_json_containers
    )
    entries = index_object.get("weight_map")
    if not isinstance(entries, dict):
        raise BadCheckpoint("the index has no weight_map object", where=where)
    weight_map: dict[str, str] = {}
    for name, shard in entries.items():
        if not isinstance(shard, str):
            raise BadCheckpoint(
                f"the index: tensor {quoted(name)} is not mapped to a file name", where=where
            )
        weight_map[name] = shard
    return weight_map


def _shards(
    index: SourceFile, weight_map: dict[str, str], by_path: dict[str, SourceFile], where: str
) -> dict[str, Header]:
    """The header of every shard the index names, by the name it uses."""
    shards: dict[str, Header] = {}
    missing: list[str] = []
    for shard in sorted(set(weight_map.values()), key=_sortable):
        check_relative(shard, where)
        file = by_path.get(posixpath.join(posixpath.dirname(index.path), shard))
        if file is None:
            missing.append(shard)
        elif file.header is None:
            raise BadCheckpoint(
                f"the shard {quoted(shard)} is not a .safetensors file", where=where
            )
        else:
            shards[shard] = file.header
    if missing:
        raise BadCheckpoint(f"the index names a missing shard: {_listed(missing)}", where=where)
    return shards


def _sortable(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _listed(names: list[str]) -> str:
    shown = ", ".join(quoted(name) for name in names[:_NAMES_SHOWN])
    return f"{shown} and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else shown
