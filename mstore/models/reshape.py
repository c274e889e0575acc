"""Reshape: which tensors a model made of another has, what they are called, and their channels.

In this order: tensors are left out, those of another model take their place, tensors get as many
input channels as another model has, and names lose or get a prefix.  All patterns and prefixes but
the last two see the names that the model has.  A tensor whose bytes stay is the same tensor under
any name.

Does not own files, element types or snapshots (`cast`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec
import numpy.typing as npt

from mstore.checkpoint.models import full_name, renamed, split_name
from mstore.checkpoint.strict_json import METADATA_KEY
from mstore.models.optional import optional_differences
from mstore.numeric.casts import SIZES, narrowed, widened
from mstore.numeric.codes import CASTABLE
from mstore.store.catalog import Catalog
from mstore.store.models import Input, Models, models_in, paired
from mstore.store.objects.canonical import DEFAULT_LIMITS
from mstore.store.objects.manifest import Part
from mstore.store.objects.shapes import (
    CHANNELS,
    differ_in_channels,
    matching,
    require_patterns,
    require_same_shapes,
    unmatched,
)
from mstore.store.objects.tensor import Tensor
from mstore.store.transaction import Transaction
from mstore.terms.errors import BadRequest
from mstore.terms.phrases import Option, call, phrase

NAME_BYTES: Final = DEFAULT_LIMITS.name_bytes


class Reshape(msgspec.Struct, frozen=True):
    """What is asked for.

    without: patterns of tensors to leave out. take, below: a model whose tensors take the place of
    those whose names begin so. channels_of: a model whose number of input channels tensors get.
    strip_prefix, prefix: what names lose, and what they then get.
    """

    without: tuple[str, ...] = ()
    take: Input | None = None
    below: str = ""
    channels_of: Input | None = None
    strip_prefix: str = ""
    prefix: str = ""

    @property
    def others(self) -> tuple[Input, ...]:
        """The other models that are needed."""
        return tuple(one for one in (self.take, self.channels_of) if one is not None)

    def renamed(self, name: str) -> str:
        """Return what a tensor of this name is called then."""
        return self.prefix + name.removeprefix(self.strip_prefix)


NO_RESHAPE: Final = Reshape()


class Placed(msgspec.Struct, frozen=True):
    """A tensor of the result.

    own: what it was called. part: what it is called, and its contents. channels: the tensor of
    whose channels it gets as many; None: it stays.
    """

    own: str
    part: Part
    channels: Tensor | None = None


class Reshaped:
    """The tensors of each weight file of a model, and how many were left out, taken and renamed.

    of: the model that is reshaped; None: all.  where: what errors call it.
    """

    def __init__(
        self, catalog: Catalog, models: Models, of: str | None, asked: Reshape, where: str
    ) -> None:
        self._catalog = catalog
        self._models = models
        self._asked = asked
        self._where = where
        self.files: dict[str, list[Placed]] = {
            file.path: [Placed(str(part.name), part) for part in file.tensors()]
            for model in models.named
            for file in models.weights(model)
        }
        self._reshaped = [one for one in models.named if of in (None, one)]
        self.left_out = self.taken = self.renamed = 0
        if asked.without:
            self._leave_out()
        if asked.take is not None:
            self._take(asked.take)
        elif asked.below:
            raise BadRequest(
                "says where the tensors of another model go",
                where=Option("below"),
                hint=Option("take", "REF"),
            )
        if asked.channels_of is not None:
            self._find_channels(asked.channels_of)
        if asked.strip_prefix or asked.prefix:
            self._rename()

    def _paths(self) -> Iterator[tuple[str, str]]:
        """Yield the files that are reshaped, and the model of each."""
        for model in self._reshaped:
            for path in self._models.named[model].files:
                yield path, model

    def _leave_out(self) -> None:
        option, patterns = Option("without"), self._asked.without
        require_patterns(patterns, option)
        names = [one for one in self._models.tensors if split_name(one)[0] in self._reshaped]
        pattern = unmatched(names, patterns)
        if pattern is not None:
            raise BadRequest(
                f"no tensor's name matches {pattern!r}",
                where=option,
                hint=call("tensors", self._where),
            )
        gone = matching(names, patterns)
        for path, model in self._paths():
            before = self.files[path]
            self.files[path] = [one for one in before if full_name(model, one.own) not in gone]
            self.left_out += len(before) - len(self.files[path])
        if self._asked.take is None and not any(self.files.values()):
            raise BadRequest("the patterns leave no tensor", where=option)

    def _take(self, other: Input) -> None:
        below = self._asked.below
        if not below:
            raise BadRequest(
                "tensors of another model take the place of some: say what their names begin with",
                where=Option("take"),
                hint=Option("below", "first_stage_model."),
            )
        theirs, records = self._found_in(other, below)
        paths = self._models.named[self._models.meant(self._where)].files
        place = {
            one.own: one.part
            for path in paths
            for one in self.files[path]
            if one.own.startswith(below)
        }
        if place:
            ours = dict(zip(place, self._records(place.values()), strict=True))
            odd = optional_differences(_types(ours), _types(records))
            require_same_shapes(
                {name: one.shape for name, one in ours.items() if name not in odd},
                {name: one.shape for name, one in records.items() if name not in odd},
                what=f"cannot take the place of {below}*",
                where=other.name,
                hint=phrase(
                    "{without} makes room for tensors of any names and shapes",
                    without=Option("without", (f"{below}*",)),
                ),
            )
            theirs = {name: part for name, part in theirs.items() if name not in odd}
        self.taken = len(theirs)
        for path in paths:
            self.files[path] = [
                Placed(one.own, theirs.pop(one.own, one.part)) for one in self.files[path]
            ]
        self.files[paths[-1]] += [Placed(name, part) for name, part in theirs.items()]

    def _found_in(self, other: Input, below: str) -> tuple[dict[str, Part], dict[str, Tensor]]:
        """Return the tensors of another model by the names that they get, and their records.

        Those whose names begin so already, if there are any; else all.
        """
        models = models_in(self._catalog, self._catalog.manifest_of(other.snapshot))
        own = models.in_model(models.meant(other.name))
        chosen = {name: id for name, id in own.items() if name.startswith(below)}
        named = chosen or {f"{below}{name}": id for name, id in own.items()}
        records = dict(zip(named, self._catalog.tensors(list(named.values())), strict=True))
        parts = {name: Part(name, id, records[name].nbytes) for name, id in named.items()}
        return parts, records

    def _find_channels(self, other: Input) -> None:
        models = models_in(self._catalog, self._catalog.manifest_of(other.snapshot))
        of = self._reshaped[0] if len(self._reshaped) == 1 else None
        pairs = paired(models.named, self._reshaped, (other.model, of if other.model else None))
        theirs = renamed(models.tensors, pairs)
        records = dict(zip(theirs, self._catalog.tensors(list(theirs.values())), strict=True))
        found = 0
        for path, model in self._paths():
            placed = self.files[path]
            own = self._records([one.part for one in placed])
            for number, record in enumerate(own):
                like = records.get(full_name(model, placed[number].own))
                if like is None or not {record.dtype, like.dtype} <= CASTABLE:
                    continue
                if differ_in_channels(record.shape, like.shape):
                    placed[number] = msgspec.structs.replace(placed[number], channels=like)
                    found += 1
        if not found:
            raise BadRequest(
                f"no tensor has other input channels than in {other.name}",
                where=Option("channels_of"),
                hint=call("diff", other.name, self._where),
            )

    def _rename(self) -> None:
        strip, prefix = self._asked.strip_prefix, self._asked.prefix
        own = [one.own for path, _ in self._paths() for one in self.files[path]]
        if strip and not any(name.startswith(strip) for name in own):
            raise BadRequest(
                f"no tensor's name begins with {strip!r}",
                where=Option("strip_prefix"),
                hint=call("tensors", self._where),
            )
        if prefix and not strip and any(name.startswith(prefix) for name in own):
            raise BadRequest(
                f"names of tensors begin with {prefix!r} already", where=Option("prefix")
            )
        for model in self._reshaped:
            seen: dict[str, str] = {}
            for path in self._models.named[model].files:
                self.files[path] = [self._renamed(one, seen) for one in self.files[path]]

    def _renamed(self, one: Placed, seen: dict[str, str]) -> Placed:
        name = self._asked.renamed(one.own)
        if not _is_name(name):
            raise BadRequest(f"would leave {one.own!r} no name", where=Option("strip_prefix"))
        other = seen.setdefault(name, one.own)
        if other != one.own:
            raise BadRequest(
                f"{other!r} and {one.own!r} would have one name", where=Option("strip_prefix")
            )
        self.renamed += name != one.own
        return msgspec.structs.replace(one, part=Part(name, one.part.tensor, one.part.nbytes))

    def _records(self, parts: Iterable[Part]) -> list[Tensor]:
        return self._catalog.tensors([part.tensor_id() for part in parts])


def _types(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: one.dtype for name, one in tensors.items()}


def _is_name(name: str) -> bool:
    return name.isprintable() and 0 < len(name.encode()) <= NAME_BYTES and name != METADATA_KEY


def with_channels(
    catalog: Catalog, transaction: Transaction, own: Tensor, like: Tensor, dtype: str, path: str
) -> tuple[Tensor, int]:
    """Store a tensor with as many input channels as another: its own first, then the other's.

    Return it, which is not stored, and how many elements were too large for the type.
    """
    (mine, lost), (made, more) = (_array(catalog, one, dtype) for one in (own, like))
    both = min(own.shape[CHANNELS], like.shape[CHANNELS])
    made[:, :both] = mine[:, :both]
    return transaction.put_tensor(dtype, like.shape, [made.tobytes()], path), lost + more


def _array(catalog: Catalog, record: Tensor, dtype: str) -> tuple[npt.NDArray[Any], int]:
    """Return the bits of a tensor in a type, and how many elements were too large for it."""
    data, lost = catalog.read_blocks(list(record.block_ids())), 0
    if record.dtype != dtype:
        data, lost = narrowed(widened(data, record.dtype), dtype)
    return data.reshape(-1).view(f"u{SIZES[dtype]}").reshape(record.shape).copy(), lost
