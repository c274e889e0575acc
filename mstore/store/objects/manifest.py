"""The manifest: every file of a snapshot as a list of parts.

A file is the concatenation of its parts.  In a safetensors file the first part is the verbatim
header (eight length bytes and JSON) and the others are its tensors in data order; any other file is
one unnamed part.  No part of a manifest depends on how or when it was made: equal contents have
equal ManifestIds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

import msgspec

from mstore.blocks.packs import Kind
from mstore.checkpoint.paths import check_relative, quoted
from mstore.store.objects.canonical import Count, IdBytes, Record, RecordLimits, too_long, too_many
from mstore.terms.errors import BadCheckpoint
from mstore.terms.ids import ManifestId, TensorId

OPAQUE = 0
SAFETENSORS = 1


class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A tensor (`name` set), or a header or plain bytes (`name` None), of `nbytes` bytes.

    `tensor` names a tensor record, or, in a virtual snapshot, a virtual tensor record;
    `Catalog.content` tells which.
    """

    name: str | None
    tensor: IdBytes
    nbytes: Count

    def tensor_id(self) -> TensorId:
        """The record of this part."""
        return TensorId(self.tensor)


class File(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One file: relative POSIX path, form (OPAQUE or SAFETENSORS), size and parts."""

    path: str
    form: int
    size: Count
    parts: tuple[Part, ...]

    def tensors(self) -> Iterator[Part]:
        """The named parts."""
        return (part for part in self.parts if part.name is not None)

    def problem(self, limits: RecordLimits) -> str | None:
        """Return what is wrong with this file, or None."""
        try:
            check_relative(self.path, "")
        except BadCheckpoint as error:
            return error.what
        first, *rest = [part.name for part in self.parts] or [""]
        if self.form not in (OPAQUE, SAFETENSORS):
            return f"{quoted(self.path)} has an unknown form"
        if first is not None or None in rest or (rest and self.form == OPAQUE):
            return f"{quoted(self.path)} does not have the parts of its form"
        if self.size != sum([part.nbytes for part in self.parts]):
            return f"{quoted(self.path)} is not as long as its parts"
        # A character takes at most four bytes of UTF-8, so most names need no second look.
        if 4 * max(map(len, filter(None, rest)), default=0) <= limits.name_bytes:
            return None
        too = (too_long("a tensor name", name, limits.name_bytes) for name in rest if name)
        return next(filter(None, too), None)


class Manifest(Record, frozen=True, array_like=True, tag="manifest/1", dict=True):
    """Files sorted by path (by code point)."""

    kind: ClassVar[Kind] = Kind.MANIFEST
    id_type: ClassVar[type[ManifestId]] = ManifestId

    files: tuple[File, ...]

    def id(self) -> ManifestId:
        return ManifestId.of(self.encode())

    def problem(self, limits: RecordLimits) -> str | None:
        paths = [file.path for file in self.files]
        if any(before >= after for before, after in pairwise(paths)):
            return "its files are not sorted by path"
        tensors = sum(len(file.parts) - 1 for file in self.files)
        return (
            too_many("files", len(paths), limits.files)
            or too_many("tensors", tensors, limits.tensors)
            or next(filter(None, (file.problem(limits) for file in self.files)), None)
            or _clash(paths)
        )

    def file(self, path: str) -> File | None:
        """The file of this path, or None."""
        return self._by_path.get(path)

    @cached_property
    def _by_path(self) -> Mapping[str, File]:
        return {file.path: file for file in self.files}

    def plain_bytes(self) -> int:
        """Bytes that a checkout takes."""
        return sum(file.size for file in self.files)


def _clash(paths: Sequence[str]) -> str | None:
    """Return a path that is both a file and a directory, or None."""
    files = set(paths)
    for path in paths:
        at = path.find("/")
        while at >= 0:
            if path[:at] in files:
                return f"{quoted(path[:at])} is a file and a directory"
            at = path.find("/", at + 1)
    return None
