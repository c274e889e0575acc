"""The files of a checkpoint: the walk, and the rules for links and special files.

A checkpoint is a set of regular files: empty directories, permissions and the difference between a
file and a link to it are not part of it.  A link may lead only to a file of the same checkpoint,
with one exception, the cache of the Hugging Face Hub:

    models--ORG--NAME/
      blobs/<hash>                the files' bytes
      refs/main                   the name of a directory in snapshots/
      snapshots/<revision>/...    links to ../../blobs/<hash>

There a snapshot's links may lead to the files directly in its own `blobs`.  The directory
`models--ORG--NAME` itself stands for the snapshot that refs/main names.  `cached_model` finds
it by its id, and `origin_of` says where a snapshot is from; neither asks a network.  The caller
says where the cache is: environment variables decide it.

The walk enters directories by descriptor and never through a link.  It follows a link to a file
once, and from then on uses the file that the link led to.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from mstore.checkpoint.exclusion import (
    ASKED,
    IGNORE_FILE,
    INCLUDED,
    MAX_IGNORE_BYTES,
    NOTHING_EXCLUDED,
    WEIGHTS,
    Excluded,
    Exclusion,
    Pattern,
    escaped,
    is_needed,
    is_pickled_top,
    spares,
)
from mstore.checkpoint.origin import Origin
from mstore.checkpoint.paths import (
    check_case_twins,
    check_relative,
    is_safetensors,
    name_for,
    quoted,
)
from mstore.checkpoint.reading import (
    Stamp,
    changed,
    open_unlinked,
    read_part,
    storage_error,
)
from mstore.terms.errors import BadCheckpoint, MstoreError, NotFound
from mstore.terms.phrases import Call, Option, Phrase, Text, call, few, phrase
from mstore.terms.sizes import format_size

# Keeps a hint that lists paths to one line.
_PATHS_SHOWN = 16
STORE_MARK = b"mstore "
HUB_PREFIX = "models--"
# The unit of st_blocks, on every filesystem.
_UNIT = 512
# Some filesystems store small files inline and count no blocks for them.
_SMALL = 1 << 20
# A revision is a commit hash; this is the longest name that a file can have.
_MAX_REVISION_BYTES = 255


class TreeFile(msgspec.Struct, frozen=True):
    """A regular file: its path in the checkpoint, its location, and the result of `stat`.

    `absolute` contains no link.
    """

    path: str
    absolute: Path
    status: os.stat_result

    @property
    def stamp(self) -> Stamp:
        """The stamp by which the file is opened."""
        return Stamp.of(self.status)


class Tree(msgspec.Struct, frozen=True):
    """The regular files of a checkpoint, sorted by path; `shown` is `root` as the user named it.

    excluded: what the directory holds and the patterns left out, also sorted.
    """

    root: Path
    shown: Path
    files: tuple[TreeFile, ...]
    excluded: tuple[Excluded, ...] = ()


def walk(
    path: Path,
    *,
    max_files: int,
    max_sparse_bytes: int | None = None,
    exclusion: Exclusion = NOTHING_EXCLUDED,
    shown: Path | None = None,
) -> Tree:
    """Return every regular file of a checkpoint directory, also hidden, or the one file `path`.

    shown: what errors call the directory; None: as the caller named it.
    `path` itself may be a link: the caller named it.  In a directory, `exclusion` leaves out
    whatever it matches, of any type, and none of that is opened.  Raises NotFound, StorageFailed,
    and BadCheckpoint for a link to a directory or out of the checkpoint, a special file, a path
    that is not portable or has a twin in another case, an mstore store or models of a Hub cache
    inside, too many files, files that change meanwhile, and more bytes in sparse files than the
    limit.
    """
    status = _stat(path)
    if stat.S_ISREG(status.st_mode):
        check_relative(path.name, str(path.parent))
        resolved = path.resolve()
        only = TreeFile(path.name, resolved, _status(resolved, str(path)))
        tree = Tree(path.parent.resolve(), path.parent, (only,))
        _refuse_holes(tree, max_sparse_bytes)
        return tree
    if not stat.S_ISDIR(status.st_mode):
        raise BadCheckpoint("is neither a directory nor a regular file", where=str(path))
    own = hub_snapshot(path)
    shown = shown or own
    root = own.resolve()
    walker = _Walker(root, shown, _own_blobs(root), max_files, exclusion)
    if exclusion.reads_file:
        walker = walker.with_file()
    found, excluded = walker.files()
    _refuse_unloadable(found, excluded, shown)
    _refuse_hub(found, shown)
    check_case_twins((each.path for each in found), str(shown))
    tree = Tree(root, shown, tuple(found), tuple(excluded))
    _refuse_holes(tree, max_sparse_bytes)
    return tree


def _refuse_unloadable(
    found: Sequence[TreeFile], excluded: Sequence[Excluded], shown: Path
) -> None:
    """Refuse exclusions that leave no loadable model: weights, and the files they need."""
    weights = [one.path for one in found if is_safetensors(one.path)]
    if not weights:
        lost = next((one for one in excluded if one.has_weights), None)
        # If the final model of a run is pickled, its earlier states may be excluded.
        is_pickled = any(is_pickled_top(one.path) for one in found)
        if lost is not None and not (is_pickled and lost.path.endswith("/")):
            raise BadCheckpoint(
                phrase(
                    "all its weights are left out, {path} by {pattern}",
                    path=quoted(lost.path),
                    pattern=pattern_named(lost.pattern),
                ),
                where=str(shown),
                hint=_instead(lost.pattern, shown),
            )
        return
    homes = {os.path.dirname(path) for path in weights}
    for one in excluded:
        if is_needed(one.path) and os.path.dirname(one.path) in homes:
            raise BadCheckpoint(
                phrase(
                    "{pattern} leaves out {path}, and the weights beside it cannot be loaded "
                    "without",
                    pattern=pattern_named(one.pattern),
                    path=quoted(one.path),
                ),
                where=str(shown),
                hint=_beside(one),
            )


def _beside(one: Excluded) -> Phrase:
    """Return the next step if patterns leave out a file that weights need."""
    if one.pattern.source == INCLUDED:
        return phrase("also {include}", include=Option("include", (f"/{escaped(one.path)}",)))
    return phrase("after that pattern: {exclude}", exclude=Option("exclude", (f"!/{one.path}",)))


def pattern_named(pattern: Pattern) -> Phrase:
    """Describe a pattern and its source."""
    return phrase("{text} of {source}", text=quoted(pattern.text), source=pattern.source)


def _instead(pattern: Pattern, shown: Path) -> Text:
    """Return the next step if a pattern excludes too much."""
    name = name_for(shown)
    add = partial(call, "add", str(shown), name=name)
    if pattern.source == IGNORE_FILE:
        file = shlex.quote(str(shown / IGNORE_FILE))
        return phrase("change {file}, or: {add}", file=file, add=add(exclude=(f"!*{WEIGHTS}",)))
    if pattern.source == INCLUDED:
        return phrase("{add}    (without {asked})", add=add(), asked=INCLUDED)
    if pattern.source == ASKED:
        asked = Option("exclude", (pattern.text,))
        return phrase("{add}    (without {asked})", add=add(), asked=asked)
    return Call("add", (str(shown),), (("name", name), ("default_excludes", False)))


def _refuse_holes(tree: Tree, limit: int | None) -> None:
    """Refuse large sparse files: a hole costs nothing to make, but its full size to read."""
    sparse = [found for found in tree.files if _is_sparse(found.status)]
    total = sum(found.status.st_size for found in sparse)
    if limit is None or total <= limit:
        return
    largest = max(sparse, key=lambda found: found.status.st_size)
    status = largest.status
    more = f" with {len(sparse) - 1} more files like it, {format_size(total)}"
    where = str(tree.shown if len(tree.files) > 1 else tree.shown / largest.path)
    add = call("add", where, name=name_for(tree.shown), max_sparse_bytes=total)
    raise BadCheckpoint(
        f"is mostly holes: its size is {format_size(status.st_size)}"
        f"{more if len(sparse) > 1 else ''}, {format_size(status.st_blocks * _UNIT)} of it on the "
        f"disk, and the limit for such files is {format_size(limit)}, the free space of the "
        "store's disk unless told otherwise",
        where=str(tree.shown / largest.path),
        hint=phrase("if it is meant to be so: {add}", add=add),
    )


def _is_sparse(status: os.stat_result) -> bool:
    return status.st_size >= _SMALL and 2 * status.st_blocks * _UNIT < status.st_size


def several(where: Path, what: str, directories: Sequence[str]) -> BadCheckpoint:
    """Return the error for a directory of several models, with the call that adds them."""
    return BadCheckpoint(what, where=str(where), hint=each_alone(where, directories))


def each_alone(where: Path, below: Sequence[str]) -> Call:
    """Return the call that adds each of these files and directories as a snapshot of its own."""
    paths = [str(where / each) for each in below[:_PATHS_SHOWN]]
    more = ["..."] if len(below) > _PATHS_SHOWN else []
    return call("add", *paths, *more, name_prefix=f"{name_for(where)}/")


def _refuse_hub(files: Sequence[TreeFile], shown: Path) -> None:
    """Refuse the Hub's cache itself, or a directory that contains it: neither is a model."""
    models: set[str] = set()
    for found in files:
        parts = found.path.split("/")
        for at, (name, below) in enumerate(pairwise(parts)):
            if name.startswith(HUB_PREFIX) and below == "snapshots":
                models.add("/".join(parts[: at + 1]))
    if models:
        raise several(shown, "is a cache of the Hugging Face Hub, not a model", sorted(models))


def hub_snapshot(path: Path, revision: str = "main") -> Path:
    """Return the snapshot that a ref of a Hub cache model names; any other path unchanged.

    Raises BadCheckpoint if the ref is missing or names no snapshot.
    """
    model = path.resolve()
    if not model.name.startswith(HUB_PREFIX) or not (model / "snapshots").is_dir():
        return path
    where = str(path / "refs" / revision)
    try:
        told = read_part(model / "refs" / revision, 0, _MAX_REVISION_BYTES + 1)
        commit = told.decode().strip()
    except (NotFound, UnicodeDecodeError):
        commit = ""
    snapshot = path / "snapshots" / commit
    if not commit or "/" in commit or commit in (".", "..") or not _is_directory(snapshot):
        raise _no_revision(path, where)
    return snapshot


def _no_revision(path: Path, where: str) -> BadCheckpoint:
    try:
        there = sorted(each.name for each in (path / "snapshots").iterdir() if _is_directory(each))
    except OSError as error:
        raise storage_error(error, str(path / "snapshots")) from error
    what = "does not name a snapshot of this model in the Hub's cache"
    if not there:
        return BadCheckpoint(f"{what}, which has none", where=where)
    shown = few([quoted(each) for each in there], _PATHS_SHOWN)
    chosen = str(path / "snapshots" / there[0])
    return BadCheckpoint(
        f"{what}, which has {shown}",
        where=where,
        hint=call("add", chosen, name=given_name(path)),
    )


def given_name(path: Path) -> str:
    """Return the usual name of the checkpoint at `path`: its directory, or its file without suffix.

    In a Hub cache this is the name of the model: NAME for `models--ORG--NAME` and its snapshots.
    """
    resolved = path.resolve()
    for directory in (resolved, resolved.parent.parent):
        if directory.name.startswith(HUB_PREFIX) and (directory / "snapshots").is_dir():
            return directory.name.rpartition("--")[2]
    return path.stem if path.is_file() else path.absolute().name or resolved.name


def _is_directory(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except (OSError, ValueError):
        return False


def _own_blobs(root: Path) -> Path | None:
    """Return `blobs` of the model whose snapshot `root` is, if it lies in a Hub cache."""
    model = root.parent.parent
    if root.parent.name != "snapshots" or not model.name.startswith(HUB_PREFIX):
        return None
    # Not resolved: a link in its place must not make another directory's files the model's own.
    return model / "blobs"


def _stat(path: Path) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        raise storage_error(error, str(path)) from error
    except ValueError:
        raise NotFound(
            "no such file or directory", where=repr(str(path)), hint="check the path"
        ) from None


def _status(path: Path, where: str) -> os.stat_result:
    """Return the status of a link-free path, which may have become a link meanwhile."""
    try:
        descriptor = open_unlinked(path, os.O_PATH)
    except OSError as error:
        raise _read_error(error, where) from error
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def _read_error(error: OSError, where: str) -> MstoreError:
    """Return the error for a path that existed a moment ago."""
    is_link = error.errno in (errno.ELOOP, errno.ENOTDIR)
    return changed(where) if is_link else storage_error(error, where)


def _shown(path: str) -> str:
    """Return a path as text: an excluded entry may have any name."""
    return path.encode("utf-8", "backslashreplace").decode()


class _Walker(msgspec.Struct, frozen=True):
    """One walk below `root`; `blobs` is the other directory that links may lead to."""

    root: Path
    shown: Path
    blobs: Path | None
    max_files: int
    exclusion: Exclusion

    def with_file(self) -> _Walker:
        """Return this walker with the patterns of the checkpoint's own `.mstoreignore`."""
        path = self.root / IGNORE_FILE
        if not os.path.lexists(path):
            return self
        if path.is_symlink():
            path = self._linked(IGNORE_FILE).absolute
        data = read_part(path, 0, MAX_IGNORE_BYTES + 1)
        return replace(
            self, exclusion=self.exclusion.with_file(data, str(self.shown / IGNORE_FILE))
        )

    def files(self) -> tuple[list[TreeFile], list[Excluded]]:
        """Return what exists and what was left out, both sorted.  Iterative: uses no stack."""
        found: list[TreeFile] = []
        excluded: list[Excluded] = []
        pending = [""]
        while pending:
            prefix = pending.pop()
            try:
                with self._entries(prefix) as entries:
                    for entry in entries:
                        relative = f"{prefix}{entry.name}"
                        is_directory = entry.is_dir(follow_symlinks=False)
                        left_out = self._left_out(entry, relative, is_directory=is_directory)
                        if left_out is not None:
                            excluded.append(left_out)
                            continue
                        check_relative(relative, str(self.shown))
                        if is_directory:
                            pending.append(f"{relative}/")
                        else:
                            found.append(self._file(entry, relative))
                        self._check_count(len(found) + len(pending))
            except OSError as error:
                raise _read_error(error, str(self.shown / prefix)) from error
        found.sort(key=lambda each: each.path)
        excluded.sort(key=lambda each: each.path)
        return found, excluded

    def _left_out(
        self, entry: os.DirEntry[str], relative: str, *, is_directory: bool
    ) -> Excluded | None:
        pattern = self.exclusion.deciding(relative, is_directory=is_directory)
        if pattern is None:
            return None
        if not is_directory:
            size = entry.stat(follow_symlinks=False).st_size
            return Excluded(_shown(relative), pattern, 1, size, is_safetensors(relative))
        counted = self._counted(relative, pattern)
        return None if spares(pattern, has_weights=counted.has_weights) else counted

    def _counted(self, relative: str, pattern: Pattern) -> Excluded:
        """Count an excluded directory; what cannot be read counts as zero."""
        files = size = entries = 0
        has_weights = False
        pending = [f"{relative}/"]
        while pending and entries <= self.max_files:
            prefix = pending.pop()
            with suppress(OSError), self._entries(prefix) as listed:
                for entry in listed:
                    entries += 1
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(f"{prefix}{entry.name}/")
                        continue
                    files += 1
                    size += entry.stat(follow_symlinks=False).st_size
                    has_weights = has_weights or is_safetensors(entry.name)
        return Excluded(f"{_shown(relative)}/", pattern, files, size, has_weights)

    @contextmanager
    def _entries(self, prefix: str) -> Iterator[list[os.DirEntry[str]]]:
        """Yield the sorted entries of a directory; their `stat` calls go through its descriptor."""
        descriptor = open_unlinked(self.root / prefix, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with os.scandir(descriptor) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
            yield entries
        finally:
            os.close(descriptor)

    def _check_count(self, count: int) -> None:
        if count > self.max_files:
            raise BadCheckpoint(
                f"holds more files and directories than the limit of {self.max_files}",
                where=str(self.shown),
            )

    def _file(self, entry: os.DirEntry[str], relative: str) -> TreeFile:
        found = self._linked(relative) if entry.is_symlink() else self._own(entry, relative)
        if entry.name == "format":
            self._refuse_store(found)
        return found

    def _own(self, entry: os.DirEntry[str], relative: str) -> TreeFile:
        status = entry.stat(follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            raise BadCheckpoint(
                "is a fifo, socket or device, not a regular file",
                where=str(self.shown / relative),
            )
        return TreeFile(relative, self.root / relative, status)

    def _linked(self, relative: str) -> TreeFile:
        where = str(self.shown / relative)
        target = Path(os.path.realpath(self.root / relative))
        if not target.is_relative_to(self.root) and target.parent != self.blobs:
            raise BadCheckpoint(
                f"is a symlink out of the checkpoint, to {quoted(str(target))}",
                where=where,
                hint=phrase(
                    "cp -rL {here} copied && {add}",
                    here=shlex.quote(str(self.shown)),
                    add=call("add", "copied", name=name_for(self.shown)),
                ),
            )
        try:
            status = _status(target, where)
        except MstoreError:
            raise BadCheckpoint("is a symlink that leads nowhere", where=where) from None
        if stat.S_ISLNK(status.st_mode):
            raise BadCheckpoint("is a symlink that leads nowhere", where=where)
        if stat.S_ISDIR(status.st_mode):
            raise BadCheckpoint("is a symlink to a directory", where=where)
        if not stat.S_ISREG(status.st_mode):
            raise BadCheckpoint("is a symlink to a fifo, socket or device", where=where)
        return TreeFile(relative, target, status)

    def _refuse_store(self, found: TreeFile) -> None:
        """Refuse an mstore store; `found` is a file called `format`."""
        if read_part(found.absolute, 0, len(STORE_MARK), found.stamp) != STORE_MARK:
            return
        prefix = found.path[: -len("format")]
        store = str(self.shown / prefix)
        raise BadCheckpoint(
            "is an mstore store, not a checkpoint or a part of one",
            where=store,
            hint=f"mv {shlex.quote(store)} ELSEWHERE" if prefix else call("refs", store=store),
        )


_NAME: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_REVISION: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9_./-]{0,253}[A-Za-z0-9_])?"
_ID: Final = re.compile(rf"(?P<model>{_NAME}/{_NAME})(?:@(?P<revision>{_REVISION}))?")
_FOLDER: Final = re.compile(rf"{HUB_PREFIX}([A-Za-z0-9_.-]{{1,200}})")
_COMMIT: Final = re.compile(_NAME)
_REVISION_NAME: Final = re.compile(_REVISION)
_MOST_REFS: Final = 1000


def is_id(text: str) -> bool:
    """Return whether a text can be the id of a model, with a revision or without."""
    found = _ID.fullmatch(text)
    return found is not None and not any(two in text for two in ("--", ".."))


def cached_model(id: str, cache: Path) -> Path:
    """Return the directory of a model in a cache.

    id: ORG/NAME or ORG/NAME@REVISION: a branch, a tag or a commit; without a revision, main. cache:
    the directory that has `models--ORG--NAME`.

    Raises NotFound, which says how to get the model, and BadCheckpoint.
    """
    found = _ID.fullmatch(id)
    if found is None or not is_id(id):
        raise NotFound("is no id of a model", where=id, hint="ORG/NAME or ORG/NAME@REVISION")
    name, revision = found["model"], found["revision"]
    model = cache / f"{HUB_PREFIX}{name.replace('/', '--')}"
    if not (model / "snapshots").is_dir():
        raise NotFound(
            f"no such file or directory, and the Hub's cache at {cache} has no such model",
            where=id,
            hint=phrase("check the path, or from the Hub: {add}", add=_download(name, revision)),
        )
    commit = model / "snapshots" / (revision or "")
    if revision and "/" not in revision and commit.is_dir():
        return commit
    if not (model / "refs" / (revision or "main")).is_file():
        raise NotFound(
            f"the Hub's cache at {cache} has the model, but not its revision {revision or 'main'}",
            where=id,
            hint=_download(name, revision),
        )
    return hub_snapshot(model, revision or "main")


def hub_origin(
    model: str,
    revision: str,
    commit: str,
    directory: str = "",
    endpoint: str = "https://huggingface.co",
) -> Origin:
    """Return the origin of a model of the Hub, or of a directory of one.

    model: ORG/NAME. revision: a branch or tag that is this commit, empty for none. directory: in
    the repository, empty for all of it. endpoint: of the Hub.
    """
    below = f"/tree/{revision or commit}/{directory}" if directory else ""
    return Origin(f"{endpoint}/{model}{below}", revision, commit)


def origin_of(path: Path) -> Origin | None:
    """Return where a path is from if it is a snapshot of a Hub cache, or in one; else None."""
    for snapshot in (path, *path.parents):
        model = snapshot.parent.parent
        found = _FOLDER.fullmatch(model.name)
        if found and snapshot.parent.name == "snapshots" and _COMMIT.fullmatch(snapshot.name):
            revision = _revision_of(model / "refs", snapshot.name)
            return hub_origin(found[1].replace("--", "/", 1), revision, snapshot.name)
    return None


def _revision_of(refs: Path, commit: str) -> str:
    """Return the ref that names a commit: main before others, else the first by name."""
    try:
        found = sorted(path for path in islice(refs.rglob("*"), _MOST_REFS) if path.is_file())
    except OSError:
        return ""
    for path in sorted(found, key=lambda one: one != refs / "main"):
        with suppress(MstoreError):
            name = path.relative_to(refs).as_posix()
            told = read_part(path, 0, len(commit) + 2).strip()
            if told == commit.encode() and _REVISION_NAME.fullmatch(name):
                return name
    return ""


def _download(model: str, revision: str | None) -> Call:
    return call("add", f"hf://{model}" + (f"@{revision}" if revision else ""), name="REF")
