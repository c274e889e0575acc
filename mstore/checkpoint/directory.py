"""A checkpoint on disk: all its files and every safetensors header.

Owns what makes a set of files a checkpoint: valid headers, shard indexes that match the shards, at
least one safetensors file.  `tree` owns which files there are.  Opens no tensor data and never a
pickle.

`scan` sees each file at one moment and keeps its stamp.  Later reads open the file by that stamp,
because nothing stops another program from writing meanwhile.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec.structs import replace

from mstore.checkpoint.exclusion import (
    ASKED,
    NOTHING_EXCLUDED,
    PICKLE_SUFFIXES,
    Excluded,
    Exclusion,
    escaped,
    is_pickled_top,
)
from mstore.checkpoint.header import (
    LFS_POINTER,
    MIB,
    Header,
    HeaderLimits,
    TensorSlot,
    read_header,
    stranger_by_name,
)
from mstore.checkpoint.models import (
    Model,
    full_name,
    is_index,
    models_of,
    own_name,
    place_of,
    single_of,
    split_name,
)
from mstore.checkpoint.origin import Origin
from mstore.checkpoint.paths import (
    INDEX_SUFFIX,
    SAFETENSORS_SUFFIX,
    check_case_twins,
    check_relative,
    is_safetensors,
    name_for,
    quoted,
)
from mstore.checkpoint.reading import OpenSource, Stamp, StampedFile, read_part, storage_error
from mstore.checkpoint.strict_json import parse_object
from mstore.checkpoint.tree import (
    Tree,
    TreeFile,
    each_alone,
    origin_of,
    pattern_named,
    several,
    walk,
)
from mstore.terms.errors import BadCheckpoint
from mstore.terms.phrases import Phrase, call, few, joined, phrase
from mstore.terms.sizes import format_size

# Files that mark the top of one model; a directory of several models has none of them.
_TOP_OF_ONE = frozenset(
    {"config.json", "model_index.json", "modular_model_index.json", "modules.json"}
)
# These files name parts in subdirectories; the parts may be of one kind.
_TOP_OF_A_PIPELINE = frozenset({"model_index.json", "modular_model_index.json"})
_NUMBERED = re.compile(r"checkpoint-[0-9]+")
# The names that transformers and peft use for pickled weights.
_PICKLED_WEIGHTS = re.compile(r"(pytorch_model|adapter_model)[^/]*\.bin")
_SHARD = re.compile(r"(?P<stem>.+)-[0-9]+-of-(?P<of>[0-9]{1,6})\.(safetensors|sft)")
_POINTER = b"version https://git-lfs.github.com/spec/"
_MAX_POINTER = 1024
_CONFIGS = ("config.json", "adapter_config.json")

# Keeps an error that lists file names to one readable line.
_NAMES_SHOWN = 5


class CheckpointLimits(HeaderLimits, frozen=True):
    """How large a checkpoint may be before it is refused.  Raise them for a trusted checkpoint.

    The header's limits apply to each file, these to all files together. max_sparse_bytes: the sizes
    of files that are mostly holes; None: no limit, for `Store.add` the free space of the store's
    disk.
    """

    max_files: int = 100_000
    max_all_tensors: int = 1_000_000
    max_all_header_bytes: int = 512 * MIB
    max_sparse_bytes: int | None = None


DEFAULT_LIMITS = CheckpointLimits()


class SourceFile(msgspec.Struct, frozen=True):
    """One file of a checkpoint.

    `path` is relative, with `/`; `absolute` is the real location of its bytes (behind a link, if it
    is one) and contains no link.  `header` is None for an opaque file.  A kind of file whose bytes
    are elsewhere (`mstore.origins`) has its own `open` and `read`.
    """

    path: str
    absolute: Path
    stamp: Stamp
    header: Header | None

    def open(self) -> OpenSource:
        """Open the file: for reading most of it.  Raises BadCheckpoint, StorageFailed."""
        return StampedFile(self.absolute, self.stamp)

    def read(self, offset: int, length: int) -> bytes:
        """Return up to `length` bytes, without the rest of the file.  Raises as `open`."""
        return read_part(self.absolute, offset, length, self.stamp)

    @property
    def is_remote(self) -> bool:
        """Whether opening it brings its bytes from another machine."""
        return False

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.stamp.size

    @property
    def data_start(self) -> int:
        """Where its tensors begin: behind the header, or behind all of an opaque file."""
        return self.size if self.header is None else self.header.data_start

    @property
    def slots(self) -> tuple[TensorSlot, ...]:
        """Its tensors, in data order."""
        return () if self.header is None else self.header.tensors


class Checkpoint(msgspec.Struct, frozen=True):
    """The files below `root`, sorted by path; at least one has a header.

    models: which files loaders load together. shown: the checkpoint as the user named it. origin:
    the repository and commit that it is from, if known. excluded: what the directory holds and the
    patterns left out. remarks: what loaders may stumble over.
    """

    root: Path
    shown: Path
    files: tuple[SourceFile, ...]
    models: tuple[Model, ...]
    origin: Origin | None = None
    excluded: tuple[Excluded, ...] = ()
    remarks: tuple[str, ...] = ()

    def tensors(self) -> dict[str, tuple[SourceFile, TensorSlot]]:
        """Return the tensors of all models by what they are called, each with its file.

        Of a tensor in two shards, the last counts.
        """
        files = {file.path: file for file in self.files}
        return {
            full_name(model.name, slot.name): (files[path], slot)
            for model in self.models
            for path in model.files
            for slot in files[path].slots
        }

    @property
    def named(self) -> tuple[str, ...]:
        """The names of its models."""
        return tuple(one.name for one in self.models)

    def models_by_file(self) -> dict[str, str]:
        """Return the name of the model that each file is of, without files that no loader reads."""
        return {path: one.name for one in self.models for path in one.files}


class Replacement(msgspec.Struct, frozen=True):
    """Generated files that replace some of a checkpoint's own, by path.

    The files in `gone` are left out; those in `made` are added.
    """

    gone: frozenset[str]
    made: Mapping[str, Path]


NOTHING_REPLACED = Replacement(frozenset(), {})


def scan(
    path: Path,
    *,
    limits: CheckpointLimits = DEFAULT_LIMITS,
    replacement: Replacement = NOTHING_REPLACED,
    exclusion: Exclusion = NOTHING_EXCLUDED,
    shown: Path | None = None,
) -> Checkpoint:
    """Read a checkpoint directory, or a single .safetensors or .sft file, without its tensor data.

    shown: what errors call it; None: as `path`.

    A link to a regular file inside the directory counts as that file; in a snapshot of a Hub cache,
    so does a link into its `blobs`.

    Raises NotFound if `path` does not exist, StorageFailed on I/O errors, and BadCheckpoint for
    what `tree.walk` refuses, a header that `read_header` refuses, an index that names a missing
    shard, some of several numbered shards without an index, more tensors than the limits allow, a
    model with earlier states below, and a checkpoint without any .safetensors file.  What loaders
    read all the same is kept as it is, with a remark.
    """
    tree = walk(
        path,
        max_files=limits.max_files,
        max_sparse_bytes=limits.max_sparse_bytes,
        exclusion=exclusion,
        shown=shown,
    )
    tree = _replaced(tree, replacement)
    path = shown or path
    _require_safetensors(tree, path)
    _refuse_pickled_top(tree)
    files = _sources(tree, replacement, limits)
    _refuse_copies(tree, files)
    by_path = {file.path: file for file in files}
    remarks: list[str] = []
    maps: dict[str, dict[str, str]] = {}
    with _excluded_told(tree):
        for file in files:
            if is_index(file.path):
                where = str(tree.shown / file.path)
                maps[file.path] = read_weight_map(
                    file.absolute, where=where, limits=limits, stamp=file.stamp
                )
                remarks += _index_remarks(file, maps[file.path], by_path, where)
        remarks += _require_all_shards(by_path, str(path))
    remarks += filter(None, map(_pointer_remark, files))
    models = models_of(by_path, lambda index: maps[index])
    origin = origin_of(tree.root)
    found = Checkpoint(tree.root, path, files, models, origin, tree.excluded, tuple(remarks))
    return replace(found, remarks=(*remarks, *_remark_of_several(found)))


@contextmanager
def _excluded_told(tree: Tree) -> Iterator[None]:
    """If an index names an excluded file, add to the error which pattern excluded it."""
    try:
        yield
    except BadCheckpoint as error:
        lost = next((one for one in tree.excluded if one.has_weights), None)
        if lost is not None:
            path, pattern = quoted(lost.path), pattern_named(lost.pattern)
            error.advise(phrase("{path} is left out by {pattern}", path=path, pattern=pattern))
        raise


def _replaced(tree: Tree, replacement: Replacement) -> Tree:
    if not replacement.gone and not replacement.made:
        return tree
    files = [found for found in tree.files if found.path not in replacement.gone]
    for path, absolute in replacement.made.items():
        try:
            resolved = absolute.resolve()
            files.append(TreeFile(path, resolved, os.stat(resolved, follow_symlinks=False)))
        except OSError as error:
            raise storage_error(error, str(absolute)) from error
    check_case_twins((each.path for each in files), str(tree.shown))
    files.sort(key=lambda each: each.path)
    return Tree(tree.root, tree.shown, tuple(files), tree.excluded)


def _sources(
    tree: Tree, replacement: Replacement, limits: CheckpointLimits
) -> tuple[SourceFile, ...]:
    files: list[SourceFile] = []
    tensors = header_bytes = 0
    for found in tree.files:
        # Errors name a file as the user reaches it, not by the target of links.
        made = replacement.made.get(found.path)
        file = _source(found, str(made or tree.shown / found.path), limits)
        files.append(file)
        if file.header is not None:
            tensors += len(file.header.tensors)
            header_bytes += len(file.header.raw)
        if tensors > limits.max_all_tensors:
            raise BadCheckpoint(
                f"its files name more tensors than the limit of {limits.max_all_tensors}",
                where=str(tree.shown),
            )
        if header_bytes > limits.max_all_header_bytes:
            raise BadCheckpoint(
                "the headers of its files take more than the limit of "
                f"{format_size(limits.max_all_header_bytes)}",
                where=str(tree.shown),
            )
    return tuple(files)


def _source(found: TreeFile, where: str, limits: HeaderLimits) -> SourceFile:
    header: Header | None = None
    if is_safetensors(found.path):
        header = read_header(found.absolute, limits=limits, where=where, stamp=found.stamp)
    return SourceFile(found.path, found.absolute, found.stamp, header)


def _require_safetensors(tree: Tree, path: Path) -> None:
    names = [each.path for each in tree.files]
    if any(is_safetensors(name) or name.endswith(INDEX_SUFFIX) for name in names):
        # A lone index passes: the check of the index names the missing shards.
        return
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        asked = dict.fromkeys(o.pattern.text for o in tree.excluded if o.pattern.source == ASKED)
        exclude = tuple(asked) or None
        raise BadCheckpoint(
            f"has only pickled weights ({_listed(pickles)}), which can run code when loaded; "
            "mstore reads safetensors",
            where=str(path),
            hint=call("add", str(path), name=name_for(path), convert=True, exclude=exclude),
        )
    for name in names:
        known = stranger_by_name(name)
        if known is not None:
            raise known.error(str(tree.shown / name))
    raise BadCheckpoint("holds no .safetensors file", where=str(path), hint=call("add", help=True))


def _refuse_pickled_top(tree: Tree) -> None:
    """Refuse pickled weights above safetensors models: a training run and its earlier states.

    If it counted as one model, the weights at the top would be stored and never read.  A model in
    parts may have pickles at its top: it is refused only for directories that a trainer numbered,
    or for pickled weights by name.
    """
    paths = {each.path for each in tree.files}
    top = {path for path in paths if "/" not in path}
    pickles = sorted(filter(is_pickled_top, top))
    is_one = any(is_safetensors(path) or path.endswith(INDEX_SUFFIX) for path in top)
    if not pickles or is_one or top & (_TOP_OF_ONE - {"config.json"}):
        return
    is_named = any(_PICKLED_WEIGHTS.fullmatch(path) for path in pickles)
    homes = {posixpath.dirname(path) for path in paths if is_safetensors(path)}
    below = sorted(
        home
        for home in homes
        if _NUMBERED.fullmatch(posixpath.basename(home))
        or (is_named and any(posixpath.join(home, one) in paths for one in _CONFIGS))
    )
    if not below:
        return
    refusal = several(
        tree.shown,
        f"holds {len(below) + 1} models, not one: pickled weights at its top "
        f"({_listed(pickles)}), and safetensors in {_listed(below)}",
        below,
    )
    _, _, hint = refusal.texts
    top_one = phrase("the one at the top, with torch: {add}", add=_add_without(tree, below, True))
    refusal.advise(joined(hint, top_one))
    raise refusal


def _remark_of_several(checkpoint: Checkpoint) -> Iterator[Phrase]:
    """Yield a remark about models side by side: each may be meant as a snapshot of its own.

    Forms of one model may have the same tensors, and so may those that a file at the top names.
    """
    top = {file.path for file in checkpoint.files if "/" not in file.path}
    places = {place_of(one.name): one for one in reversed(checkpoint.models)}
    paths = {
        own: one.directory if own_name(one.directory) == own else one.files[0]
        for own, one in sorted(places.items())
    }
    is_one = "" in places or any(path.endswith(PICKLE_SUFFIXES) for path in top)
    if is_one or top & _TOP_OF_ONE:
        return
    seen: dict[str, str] = {}
    for full in checkpoint.tensors():
        model, name = split_name(full)
        place = place_of(model)
        other = seen.setdefault(name, place)
        if other != place:
            remark = phrase(
                "one snapshot of {count} models: {one} and {other} both have the tensor {name}",
                count=len(places),
                one=quoted(paths[other]),
                other=quoted(paths[place]),
                name=quoted(name),
            )
            # Shards beside those of another model cannot be added alone.
            if all(
                paths[own] == one.directory or len(one.files) == 1 for own, one in places.items()
            ):
                add = each_alone(checkpoint.shown, [*paths.values()])
                text = "{remark}; {add} stores each as a snapshot of its own"
                remark = phrase(text, remark=remark, add=add)
            yield remark
            return


def _refuse_copies(tree: Tree, files: tuple[SourceFile, ...]) -> None:
    """Refuse a model with earlier states of it below, as a training run leaves them."""
    paths = {file.path for file in files}
    models: dict[str, set[str]] = {}
    for file in files:
        directory = posixpath.dirname(file.path)
        if file.header is not None and posixpath.join(directory, "config.json") in paths:
            names = models.setdefault(directory, set())
            names.update(slot.name for slot in file.header.tensors)
    own = models.pop("", set())
    if paths & _TOP_OF_A_PIPELINE:
        return
    shared = {directory: own & names for directory, names in models.items() if own & names}
    if not shared:
        return
    first = min(shared)
    what = (
        f"holds {len(shared) + 1} models, not one: the one at its top and {quoted(first)} "
        f"both have the tensor {quoted(min(shared[first]))}"
    )
    hint = _add_without(tree, sorted(shared), False)
    raise BadCheckpoint(what, where=str(tree.shown), hint=hint)


def _add_without(tree: Tree, directories: list[str], convert: bool) -> Phrase:
    """Return the call that adds what lies at the top, without these directories."""
    patterns = _leaving_out(directories)
    add = call(
        "add",
        str(tree.shown),
        name=name_for(tree.shown),
        convert=convert,
        exclude=tuple(patterns[:_NAMES_SHOWN]),
    )
    return phrase("{add} ..." if len(patterns) > _NAMES_SHOWN else "{add}", add=add)


def _leaving_out(directories: list[str]) -> list[str]:
    """Return patterns that match these directories; one pattern for all that a trainer numbered."""
    numbered = [each for each in directories if _NUMBERED.fullmatch(posixpath.basename(each))]
    if len(numbered) > 1:
        rest = [f"{escaped(each)}/" for each in directories if each not in numbered]
        return ["checkpoint-*/", *rest]
    return [f"{escaped(each)}/" for each in directories]


def _index_remarks(
    index: SourceFile, weight_map: dict[str, str], by_path: dict[str, SourceFile], where: str
) -> Iterator[str]:
    """Yield what is odd about an index.  Raises BadCheckpoint for one that is of no use."""
    single = single_of(index.path)
    shards, missing = _shards(index, weight_map, by_path, where)
    if missing:
        what = f"the index names a missing shard: {_listed(missing)}"
        if single not in by_path:
            hint = "download or copy what is missing, and add the directory"
            raise BadCheckpoint(what, where=where, hint=hint)
        yield f"{quoted(index.path)}: {what}; loaders read {quoted(single)}"
        return
    held = {shard: {slot.name for slot in header.tensors} for shard, header in shards.items()}
    absent = sorted(
        (name for name, shard in weight_map.items() if name not in held[shard]), key=_sortable
    )
    if absent:
        first = f"tensor {quoted(absent[0])} is not in the shard {quoted(weight_map[absent[0]])}"
        yield f"{quoted(index.path)}: {first}{_and_more(absent)}"
    if single in by_path and posixpath.basename(single) not in held:
        yield (
            f"{quoted(single)} is not in {quoted(index.path)}: they are two models, and "
            "transformers reads the single file"
        )
    owner: dict[str, str] = {}
    twice: dict[str, str] = {}
    for file, names in held.items():
        for name in names:
            if owner.setdefault(name, file) != file:
                twice[name] = file
    if twice:
        name = min(twice, key=_sortable)
        first, last = owner[name], twice[name]
        counts = weight_map.get(name, last)
        but = "" if counts == last else f"; transformers reads {quoted(last)}"
        yield (
            f"{quoted(index.path)}: tensor {quoted(name)} is in {quoted(first)} and in "
            f"{quoted(last)}, of which {quoted(counts)} counts{_and_more(twice)}{but}; the model "
            "cannot be merged"
        )


def _and_more(names: Collection[str]) -> str:
    return f", and so {len(names) - 1} more" if len(names) > 1 else ""


def _require_all_shards(by_path: Mapping[str, SourceFile], where: str) -> Iterator[str]:
    """Raise BadCheckpoint for some of several numbered shards, if nothing else says what to load.

    Yield a remark where something does.
    """
    parts: dict[tuple[str, int], list[str]] = {}
    for path in by_path:
        found = _SHARD.fullmatch(path)
        if found is not None:
            parts.setdefault((found["stem"], int(found["of"])), []).append(path)
    indexed = {
        single_of(path).removesuffix(SAFETENSORS_SUFFIX) for path in by_path if is_index(path)
    }
    for (stem, count), paths in parts.items():
        if len(paths) >= count or stem in indexed:
            continue
        what = f"{len(paths)} of {count} shards, and no index: {_listed(paths)}"
        single = f"{stem}{SAFETENSORS_SUFFIX}"
        if single not in by_path:
            raise BadCheckpoint(
                f"is not whole: it has {what}",
                where=where,
                hint="download the other shards and the index, and add the directory",
            )
        yield f"{what}; loaders read {quoted(single)}"


def _pointer_remark(file: SourceFile) -> str | None:
    """Return a remark about a file that Git LFS has not downloaded."""
    if file.header is not None or file.size > _MAX_POINTER:
        return None
    is_pointer = read_part(file.absolute, 0, len(_POINTER), file.stamp) == _POINTER
    what, hint = LFS_POINTER.what, LFS_POINTER.hint
    return f"{quoted(file.path)} {what}: {hint}" if is_pointer else None


def read_weight_map(
    path: Path, *, where: str, limits: HeaderLimits, stamp: Stamp | None = None
) -> dict[str, str]:
    """Return tensor -> shard from a shard index.  Raises BadCheckpoint at `where`."""
    raw = read_part(path, 0, limits.max_index_bytes + 1, stamp)
    if len(raw) > limits.max_index_bytes:
        raise BadCheckpoint(
            f"the index is longer than the limit of {format_size(limits.max_index_bytes)}",
            where=where,
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
) -> tuple[dict[str, Header], list[str]]:
    """Return the header of every shard that the index names, by the name it uses; and the missing.

    Raises BadCheckpoint for a shard that is no safetensors file.
    """
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
    return shards, missing


def _sortable(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _listed(names: list[str]) -> str:
    return few([quoted(name) for name in names], _NAMES_SHOWN)
