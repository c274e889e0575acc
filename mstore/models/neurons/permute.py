"""Permute: a model with its channels, neurons and heads in the order of another model's.

A model of another training has the same parts elsewhere, so the mean of the two is none.  The model
made here computes what the given one does, in every element type: bytes are moved, and sign bits
flipped.  The permutation is stored as a small checkpoint and used from there, so the result is the
same on every machine; the fine-tunes of a model that was permuted take the same one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from blake3 import blake3

from mstore.models.adapters.targets import is_adapter
from mstore.models.made import Publication, assembled, texts_of
from mstore.models.neurons import permutation as permutations
from mstore.models.neurons.matching import matched
from mstore.models.neurons.permutation import Bits, Permutation, is_identity, moved
from mstore.models.neurons.symmetries import HEADS, NEURONS, RESIDUAL, Symmetries, symmetries_of
from mstore.models.optional import is_optional
from mstore.models.vocabulary.tokenizer import tokenizer_of
from mstore.numeric.casts import SIZES
from mstore.store.catalog import Catalog
from mstore.store.models import Input, config_of, models_in
from mstore.store.objects import snapshot as kinds
from mstore.store.objects.manifest import Part
from mstore.store.objects.shapes import require_same_shapes
from mstore.store.objects.snapshot import ALIGN, Parent
from mstore.store.objects.tensor import Tensor
from mstore.store.transaction import Transaction, branch_to_move
from mstore.store.view import array_dtype
from mstore.terms.errors import BadRequest, Incompatible
from mstore.terms.ids import SnapshotId, TensorId
from mstore.terms.phrases import Option, call, phrase
from mstore.terms.report import ProgressCallback, ProgressCounter, Report
from mstore.terms.requests import PREPARED

_DTYPES: Final = ("BF16", "F16", "F32")
_SLAB: Final = 8 << 20
"""Bytes that are put at a time, and elements that are compared."""


class MovedKind(Report, frozen=True):
    """What became of the channels, neurons or heads of a model."""

    kind: str
    """residual, neurons or heads"""
    total: int
    """how many there are, in all layers"""
    moved: int
    """those at another place"""
    flipped: int
    """those with the other sign"""


class PermuteReport(Report, frozen=True):
    """A model that was permuted."""

    ref: str
    """the branch of the result"""
    snapshot: SnapshotId
    """the result"""
    new_snapshot: bool
    """false if the branch already was this"""
    previous: SnapshotId | None
    """what the branch pointed at before; None: it is new"""
    permutation: str
    """the branch or revision of the permutation"""
    rounds: int | None
    """in how many rounds it was found; None: it was stored already"""
    kinds: tuple[MovedKind, ...]
    """what was moved"""
    cosine_before: float | None
    """mean cosine of the tensors of the model and of the other; None: there is no other"""
    cosine: float | None
    """the same of the result"""
    bytes_written: int
    """bytes added to the store"""
    remarks: tuple[str, ...]
    """what else is worth knowing, as text"""
    seconds: float
    """how long it took"""


class _Member:
    """One model: its tensors and their bits."""

    def __init__(self, catalog: Catalog, given: Input) -> None:
        self._catalog = catalog
        self.given = given
        self.manifest = catalog.manifest_of(given.snapshot)
        self.models = models_in(catalog, self.manifest)
        if is_adapter(self.models.tensors):
            raise Incompatible(
                "is an adapter, which has no order of its own",
                where=given.name,
                hint=phrase(
                    "permute its base with the adapter in it: {merge}",
                    merge=call("merge", help=True),
                ),
            )
        self.model = self.models.meant(given.name)
        self.ids = self.models.in_model(self.model)
        records = catalog.tensors(list(self.ids.values()))
        self.tensors: Mapping[str, Tensor] = dict(zip(self.ids, records, strict=True))
        self.config = config_of(catalog, self.manifest, self.models.config(self.model))

    @property
    def kind(self) -> object:
        """Its architecture."""
        return self.config.get("model_type")

    def symmetries(self) -> Symmetries:
        """Return its symmetries.  Raises Incompatible, also for elements of other types."""
        found = symmetries_of(self.config, self.tensors, self.given.name)
        for name in found.axes:
            dtype = self.tensors[name].dtype
            if dtype not in _DTYPES:
                raise Incompatible(
                    f"tensor {name} is of {dtype}, not of {', '.join(_DTYPES)}",
                    where=self.given.name,
                    hint=call("cast", self.given.name, dtype="bfloat16"),
                )
        return found

    def bits(self, name: str) -> Bits:
        """Return a tensor.  Raises Corrupt, StorageFailed."""
        record = self.tensors[name]
        data = self._catalog.read_blocks(list(record.block_ids()))
        return data.view(f"u{SIZES[record.dtype]}").reshape(record.shape)


def permute(
    catalog: Catalog,
    given: Input,
    branch: str,
    *,
    to: Input | None = None,
    permutation: Input | None = None,
    message: str = "",
    progress: ProgressCallback | None = None,
) -> PermuteReport:
    """Store the model on a branch, in the order of another model or by a stored permutation.

    Exactly one of the two is given.

    Raises BadRequest, Incompatible (other architectures, tensors or types, models that are aligned
    already), Unavailable (scipy), Conflict, Corrupt, StorageFailed; then nothing is published but
    the permutation.
    """
    began = time.monotonic()
    if (to is None) == (permutation is None):
        raise BadRequest(
            "an order is that of a model, or of a stored permutation",
            where=Option("to"),
            hint=Option("to", "REF") if to is None else None,
        )
    if branch in {one.name for one in (given, to, permutation) if one is not None}:
        raise BadRequest(
            "names a model that is needed: the result needs a name of its own",
            where=Option("name"),
        )
    current = branch_to_move(catalog, branch)  # before what may take hours
    model = _Member(catalog, given)
    other = None if to is None else _Member(catalog, to)
    if other is not None:
        _require_alike(catalog, model, other)
    symmetries = model.symmetries()
    written, rounds = 0, None
    if permutation is None:
        assert other is not None
        permutation, rounds, written = _found(catalog, model, other, symmetries, progress)
    orders = permutations.read(catalog, permutation, symmetries)
    with Transaction(catalog, f"permute {branch}") as transaction:
        output = _Output(catalog, transaction, model, other, symmetries, orders, progress)
        content = assembled(
            model.manifest.files,
            texts_of(catalog, model.manifest, dict.fromkeys(output.paths)),
            output.paths,
            output.parts,
            transaction.put_bytes,
        )
        publication = Publication(catalog, transaction)
        told = f"{given.name} in the order of {permutation.name if to is None else to.name}"
        companions = [one.snapshot for one in (to, permutation) if one is not None]
        record, is_new = publication.put(
            branch,
            branch_to_move(catalog, branch),
            content,
            ALIGN,
            (
                Parent(kinds.BASE, given.snapshot),
                *(Parent(kinds.COMPANION, one) for one in companions),
            ),
            message=message or told,
            action=f"permute: {told}",
        )
        publication.commit()
        written += transaction.bytes_written
    moves = _moves(symmetries, orders)
    return PermuteReport(
        ref=branch,
        snapshot=record.id(),
        new_snapshot=is_new,
        previous=None if current is None else current.snapshot_id(),
        permutation=permutation.name,
        rounds=rounds,
        kinds=moves,
        cosine_before=output.before.mean(),
        cosine=output.after.mean(),
        bytes_written=written,
        remarks=_remarks(catalog, model, other, moves),
        seconds=time.monotonic() - began,
    )


# -- what is compared ----------------------------------------------------------------------------


def _require_alike(catalog: Catalog, model: _Member, other: _Member) -> None:
    """Raise Incompatible for models that no order makes alike, or that have one base."""
    ours, theirs = model.given, other.given
    base = _origin(catalog, ours.snapshot)
    if base == _origin(catalog, theirs.snapshot):
        raise _aligned("comes of the same base", model, other, base)
    if model.kind != other.kind:
        raise Incompatible(
            f"is a {model.kind}, and {theirs.name} a {other.kind}: neurons are matched within one "
            "architecture",
            where=ours.name,
        )
    known = [
        {name: one.shape for name, one in each.tensors.items() if not is_optional(name, one.dtype)}
        for each in (other, model)
    ]
    require_same_shapes(
        *known,
        what=f"cannot get the order of {theirs.name}",
        where=ours.name,
        hint="neurons are matched one to one: in models of equal sizes and vocabularies",
    )


def _origin(catalog: Catalog, snapshot: SnapshotId) -> SnapshotId:
    """Return the base of all that a snapshot was made of, or what was permuted or aligned last."""
    while (record := catalog.snapshot(snapshot)).made != ALIGN:
        bases = record.of_role(kinds.BASE)
        if not bases:
            break
        snapshot = bases[0]
    return snapshot


def _aligned(
    why: str, model: _Member, other: _Member, base: SnapshotId | None = None
) -> Incompatible:
    """Return the error for models that are aligned; base: what both were made of, if known."""
    ours, theirs = model.given.name, other.given.name
    members = {model.given.snapshot, other.given.snapshot}
    of = theirs if base is None or base in members else base.short
    experts = (ours,) if of == theirs else (theirs, ours)
    return Incompatible(
        f"{why} as {theirs}: neurons are at the same places already, and there is nothing to "
        "permute",
        where=ours,
        hint=phrase(
            "{merge} takes them as they are",
            merge=call("merge", base=of, experts=experts, method="METHOD", name="NAME"),
        ),
    )


def _remarks(
    catalog: Catalog, model: _Member, other: _Member | None, moves: Sequence[MovedKind]
) -> tuple[str, ...]:
    if other is None:
        return ()
    found = []
    total = sum(one.total for one in moves)
    stay = total - sum(one.moved for one in moves)
    if stay > total / 2:
        found.append(
            f"{stay} of {total} stay where they are, as in fine-tunes of one base: if these are, "
            "merge them as they were"
        )
    tokens = [
        None if one is None else one.ids
        for one in (
            tokenizer_of(catalog, each.manifest, each.given.name) for each in (model, other)
        )
    ]
    if tokens[0] != tokens[1]:
        found.append(
            "their tokenizers differ: a row of the embeddings is not the same token in both"
        )
    return tuple(found)


# -- the permutation -----------------------------------------------------------------------------


def _found(
    catalog: Catalog,
    model: _Member,
    other: _Member,
    symmetries: Symmetries,
    progress: ProgressCallback | None,
) -> tuple[Input, int | None, int]:
    """Return the stored permutation, in how many rounds it was found, and the bytes written.

    What is stored already is taken.
    """
    key = blake3()
    for name in sorted(symmetries.axes):
        key.update(name.encode() + bytes(model.ids[name]) + bytes(other.ids[name]))
    branch = f"{PREPARED}permutation-{key.hexdigest()[:16]}"
    there = branch_to_move(catalog, branch)
    if there is not None:
        return Input(there.snapshot_id(), branch), None, 0
    work = sum(
        model.tensors[name].nbytes * sum(axis is not None for axis in axes)
        for name, axes in symmetries.axes.items()
    )
    dtypes = {name: (model.tensors[name].dtype, other.tensors[name].dtype) for name in model.ids}
    orders, rounds = matched(
        symmetries,
        dtypes,
        model.bits,
        other.bits,
        lambda: ProgressCounter("match", work, progress),
    )
    if is_identity(orders):
        raise _aligned("has the same order", model, other)
    with Transaction(catalog, "permute") as transaction:
        snapshot = permutations.stored(catalog, transaction, branch, symmetries, orders)
        return Input(snapshot, branch), rounds, transaction.bytes_written


def _moves(symmetries: Symmetries, orders: Permutation) -> tuple[MovedKind, ...]:
    found = []
    for kind in (RESIDUAL, NEURONS, HEADS):
        own = [orders[name] for name in symmetries.named if name.endswith(kind)]
        counts = ([len(one.order), one.moved, one.flipped] for one in own)
        found.append(MovedKind(kind, *map(sum, zip(*counts, strict=True))))
    return tuple(found)


# -- the model -----------------------------------------------------------------------------------


class _Cosines:
    """The mean cosine of the tensors of two models."""

    def __init__(self) -> None:
        self._found: list[float] = []

    def add(self, ours: Bits, dtype: str, theirs: Bits, their_dtype: str) -> None:
        """Add a tensor, unless it has zeros alone."""
        sides = ours.view(array_dtype(dtype)).ravel(), theirs.view(array_dtype(their_dtype)).ravel()
        sums = np.zeros(3)
        for start in range(0, ours.size, _SLAB):
            a, b = (side[start : start + _SLAB].astype(np.float64) for side in sides)
            sums += a @ b, a @ a, b @ b
        product, squares, others = sums.tolist()
        if squares * others > 0:
            self._found.append(product / math.sqrt(squares * others))

    def mean(self) -> float | None:
        """Return it; None if there is none."""
        return math.fsum(self._found) / len(self._found) if self._found else None


class _Output:
    """Puts the tensors of the result.

    paths: of its files of weights. before, after: of the model and of the result with the other.
    """

    def __init__(
        self,
        catalog: Catalog,
        transaction: Transaction,
        model: _Member,
        other: _Member | None,
        symmetries: Symmetries,
        orders: Permutation,
        progress: ProgressCallback | None,
    ) -> None:
        self._transaction = transaction
        self._model = model
        self._other = other
        self._symmetries = symmetries
        self._orders = orders
        self.paths = model.models.named[model.model].files
        self.before, self.after = _Cosines(), _Cosines()
        total = sum(one.nbytes for one in model.tensors.values())
        self._tick = ProgressCounter("permute", total, progress)

    def parts(self, path: str) -> list[Part]:
        """Store the tensors of a file, and return them in their order."""
        file = self._model.manifest.file(path)
        assert file is not None
        return [self._part(path, part) for part in file.tensors()]

    def _part(self, path: str, part: Part) -> Part:
        name = str(part.name)
        axes = self._symmetries.axes.get(name)
        if axes is None:
            self._tick(part.nbytes)
            return part
        record, bits = self._model.tensors[name], self._model.bits(name)
        made = np.ascontiguousarray(moved(bits, axes, self._symmetries, self._orders))
        if self._other is not None:
            theirs, dtype = self._other.bits(name), self._other.tensors[name].dtype
            self.before.add(bits, record.dtype, theirs, dtype)
            self.after.add(made, record.dtype, theirs, dtype)
        raw = made.reshape(-1).view(np.uint8)
        pieces = (raw[at : at + _SLAB].tobytes() for at in range(0, len(raw), _SLAB))
        put = self._transaction.put_tensor(record.dtype, record.shape, pieces, path)
        [id] = self._transaction.put_records([put])
        self._tick(part.nbytes)
        return Part(name, TensorId(id), part.nbytes)
