"""Tensors that adapters have whole: norms, biases, layers that were trained without a product.

They do not add, but their differences to the base's do, element by element: as the method combines
elements, or as their mean.  So only these tensors of the base are read, some blocks at a time.

Owns which base that is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec
import numpy as np

from mstore.merge.combination.elements import ElementRule, Term
from mstore.merge.combination.members import INSTEAD, AdapterMember
from mstore.models.adapters.extract import whole_name
from mstore.models.adapters.low_rank import Singles, read_panels
from mstore.models.adapters.targets import path_of_whole, targets_of
from mstore.numeric.codes import CODES, cast_hint
from mstore.store.catalog import Catalog
from mstore.store.models import Input, models_in
from mstore.store.objects.snapshot import BASE, Parent
from mstore.store.objects.tensor import Tensor
from mstore.store.tied import Tied
from mstore.store.transaction import Transaction
from mstore.store.view import array_dtype
from mstore.terms.errors import Incompatible
from mstore.terms.phrases import Option, few

_NAMED: Final = 4


class FoundBase(msgspec.Struct, frozen=True):
    """The base of the adapters, if it is known, and what is odd about it, as text."""

    base: Input | None
    remarks: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, catalog: Catalog, members: Sequence[AdapterMember], given: Input | None
    ) -> FoundBase:
        """Return the base that is given, or the one that the adapters were added as those of.

        Raises Incompatible if it is not known, and adapters have whole tensors.
        """
        stated = [(member, id) for member in members for id in member.bases]
        names = {ref.snapshot_id(): name for name, ref in catalog.refs().items()}
        of = {id: names.get(id, id.short) for _, id in stated}
        if given is not None:
            content = catalog.snapshot(given.snapshot).manifest_id()
            others = [
                f"{member.name} was added as an adapter of {of[id]}"
                for member, id in stated
                if catalog.snapshot(id).manifest_id() != content
            ]
            return cls(given, tuple(others))
        several = len({catalog.snapshot(id).manifest for _, id in stated}) > 1
        told = ", ".join(f"{member.name} of {of[id]}" for member, id in stated)
        needing = [member for member in members if member.whole]
        unknown = [member for member in needing if not member.bases]
        if unknown or (needing and several):
            first = (unknown or needing)[0]
            why = "its base is not known" if unknown else f"they are of several bases: {told}"
            raise Incompatible(
                f"has tensors that are not products ({few([*first.whole], _NAMED)}): their "
                f"differences to the base are combined, and {why}",
                where=first.name,
                hint=Option("base", "REF"),
            )
        if several:
            return cls(None, (f"the adapters were added as those of several bases: {told}",))
        if not stated:
            return cls(None)
        id = stated[0][1]
        return cls(Input(id, of[id]))

    @property
    def parents(self) -> tuple[Parent, ...]:
        """The parents of the result that are bases."""
        return () if self.base is None else (Parent(BASE, self.base.snapshot),)


class WholeTensor(msgspec.Struct, frozen=True):
    """A tensor of the base, by its name, and those of adapters that replace it, by their number."""

    name: str
    base: Tensor
    own: tuple[tuple[int, Tensor], ...]


def whole_tensors(
    catalog: Catalog, members: Sequence[AdapterMember], base: Input | None, modules: Collection[str]
) -> Mapping[str, WholeTensor]:
    """Return what adapters have whole, by the names that it has in the result.

    modules: those of the result that have a product.  Raises Incompatible, Corrupt, StorageFailed.
    """
    if base is None or not any(member.whole for member in members):
        return {}
    manifest = catalog.manifest_of(base.snapshot)
    models = models_in(catalog, manifest)
    main = models.meant(base.name)
    names = [name for member in members for name in member.names]
    theirs = Tied.of(catalog, manifest, main, names).both(models.in_model(main))
    keys: dict[str, str] = {}
    own: dict[str, list[tuple[int, Tensor]]] = {}
    products: dict[str, str] = {}
    for number, member in enumerate(members):
        targets = targets_of(member.names, theirs, member.name, member.config)
        products |= {one.tensor: member.name for one in targets.products}
        records = catalog.tensors([member.whole[name] for _, name in targets.replaced])
        for (tensor, name), record in zip(targets.replaced, records, strict=True):
            keys.setdefault(tensor, whole_name(path_of_whole(name), modules))
            own.setdefault(tensor, []).append((number, record))
    before = dict(zip(own, catalog.tensors([theirs[tensor] for tensor in own]), strict=True))
    for tensor, found in own.items():
        for number, record in found:
            _require_fits(tensor, record, before[tensor], members[number].name, products)
    return {
        keys[tensor]: WholeTensor(tensor, before[tensor], tuple(found))
        for tensor, found in own.items()
    }


def _require_fits(
    tensor: str, record: Tensor, base: Tensor, where: str, products: Mapping[str, str]
) -> None:
    if tensor in products:
        raise Incompatible(
            f"has {tensor} whole, and {products[tensor]} a product for it",
            where=where,
            hint=INSTEAD,
        )
    if record.shape != base.shape:
        raise Incompatible(
            f"its {tensor} has shape {list(record.shape)}, the base's {list(base.shape)}",
            where=where,
        )
    odd = {record.dtype, base.dtype} - CODES.keys()
    if odd:
        raise Incompatible(
            f"cannot combine elements of {', '.join(sorted(odd))} ({tensor})",
            where=where,
            hint=cast_hint(odd, where),
        )


def put_whole(
    transaction: Transaction,
    catalog: Catalog,
    key: str,
    whole: WholeTensor,
    weights: Sequence[float],
    elements: ElementRule,
) -> Tensor:
    """Store the base's tensor plus the combined differences, with the base's type.

    weights: of all adapters.  Raises Incompatible for what that type does not hold.
    """
    terms = [
        Term(partial(_differences, catalog, whole.base, record), weights[number], number)
        for number, record in whole.own
    ]
    sums = elements.combined(terms, whole.name, math.prod(whole.base.shape))
    return transaction.put_tensor(
        whole.base.dtype, whole.base.shape, _applied(catalog, whole, sums), key
    )


def _differences(catalog: Catalog, base: Tensor, own: Tensor) -> Iterator[Singles]:
    return (after - before for before, after in read_panels(catalog, (base, own)))


def _applied(catalog: Catalog, whole: WholeTensor, sums: Iterator[Singles]) -> Iterator[bytes]:
    dtype = array_dtype(whole.base.dtype)
    for (before,), change in zip(read_panels(catalog, [whole.base]), sums, strict=True):
        values = (before + change).astype(dtype)
        if not np.isfinite(values.astype(np.float32)).all():
            raise Incompatible(
                "its combination has elements that are not finite, or too large for "
                f"{whole.base.dtype}",
                where=whole.name,
            )
        yield values.tobytes()
