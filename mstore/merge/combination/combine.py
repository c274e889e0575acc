"""Combine: several adapters of one base become one adapter, as PEFT's `add_weighted_adapter` does.

Products of modules that only some adapters have are combined from these.  Every product of the
result has the same rank: what has a smaller one gets rows and columns of zeros.  The factors of one
module are in memory at a time; products come in runs, and the combined product is a mapped file.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import numpy as np

from mstore.checkpoint.declared import CARD
from mstore.merge.combination.members import INSTEAD, AdapterMember, members_of
from mstore.merge.combination.methods import CombineSetting
from mstore.merge.combination.products import Read, joined, truncated, united
from mstore.merge.running.model_card import number_text
from mstore.models.adapters.extract import branch_for_adapter, put_files
from mstore.models.adapters.low_rank import read_singles
from mstore.models.adapters.truncation import Errors, Singles, TruncatedTensor
from mstore.models.made import (
    NAME,
    Publication,
    Said,
    licence_lines,
    licence_section,
    put_array,
    put_model,
    said,
)
from mstore.store.catalog import Catalog
from mstore.store.models import models_in
from mstore.store.objects.manifest import Manifest
from mstore.store.objects.snapshot import BASE, COMBINE, EXPERT, Parent
from mstore.store.objects.tensor import Tensor
from mstore.store.tied import Tied
from mstore.store.transaction import Transaction
from mstore.store.view import array_dtype
from mstore.terms.errors import BadRequest, Incompatible
from mstore.terms.ids import SnapshotId
from mstore.terms.phrases import Option, phrase
from mstore.terms.report import Progress, ProgressCallback, Report

MOST: Final = 4096
"""The largest rank that can be asked for."""

_KEPT: Final = ("auto_mapping", "base_model_name_or_path", "revision", "task_type")
"""Settings that say what an adapter is of: the first one's count."""


class CombineReport(Report, frozen=True):
    """An adapter that was made of several."""

    name: str
    """the ref"""
    snapshot: SnapshotId
    """the snapshot's id"""
    new_snapshot: bool
    """false if the ref already held this adapter"""
    method: str
    """the method, with its parameters"""
    rank: int
    """rank of each product"""
    dtype: str
    """element type of the factors"""
    products: int
    """products of the result"""
    of_some: int
    """how many of them are of modules that not all adapters have"""
    relative_error: float | None
    """norm of all that truncation leaves out, relative to the norm of the combined products; null
    for methods that do not truncate"""
    tensors: tuple[TruncatedTensor, ...]
    """matrices that were truncated, those with the largest errors first"""
    remarks: tuple[str, ...]
    """what is odd about the adapters, as text"""
    plain_bytes: int
    """size of the adapter"""
    bytes_written: int
    """bytes added to the store"""
    seconds: float
    """how long it took"""


def combine(
    catalog: Catalog,
    adapters: Sequence[tuple[str, SnapshotId, float]],
    setting: CombineSetting,
    *,
    name: str,
    rank: int | None,
    dtype: str | None,
    message: str,
    progress: ProgressCallback | None = None,
) -> CombineReport:
    """Store the combination of adapters under a ref.

    adapters: name, snapshot and weight of each. rank: for methods that truncate, None for the
    largest of the adapters. dtype: of the factors, BF16, F16 or F32; None for the adapters' own, or
    F32 if they differ.

    Raises BadRequest (a rank), Incompatible (what cannot be combined), Conflict, Corrupt,
    StorageFailed; then nothing is published.
    """
    began = time.monotonic()
    if rank is not None:
        _check_rank(rank, setting)
    if name in [one for one, _, _ in adapters]:
        raise BadRequest(
            "is one of the adapters: the result needs a name of its own", where=Option("name")
        )
    current = branch_for_adapter(catalog, name)
    every = members_of(catalog, adapters)
    members = _with_weight(every)
    base, remarks = _base_of(catalog, members)
    _require_one_name(catalog, base, members)
    work = _Work.of(members, setting, rank, dtype)
    card = card_of(catalog, members, setting, rank=work.rank, asked=rank, dtype=dtype)
    made = f"{setting}, rank {work.rank}: {_told(members)}"
    with Transaction(catalog, f"combine {name}") as transaction:
        run = _Combiner(catalog, transaction, members, setting, work, progress)
        manifest = run.manifest(card)
        remarks += (*_odd(every), *work.remarks(rank))
        publication = Publication(catalog, transaction)
        record, is_new = publication.put(
            name,
            current,
            manifest,
            COMBINE,
            (*base, *(Parent(EXPERT, member.snapshot) for member in members)),
            message=f"{message} ({made})" if message else made,
            action=f"combine: {made}",
        )
        publication.commit()
        written = transaction.bytes_written
    return CombineReport(
        name=name,
        snapshot=record.id(),
        new_snapshot=is_new,
        method=str(setting),
        rank=work.rank,
        dtype=work.dtype,
        products=len(work.modules),
        of_some=sum(len(of) < len(members) for of in work.modules.values()),
        relative_error=run.errors.relative() if setting.method.of_products else None,
        tensors=run.errors.tensors(),
        remarks=remarks,
        plain_bytes=manifest.plain_bytes(),
        bytes_written=written,
        seconds=time.monotonic() - began,
    )


def _check_rank(rank: int, setting: CombineSetting) -> None:
    if not setting.method.of_products:
        raise BadRequest(
            f"the rank of {setting.method.name} follows from the adapters",
            where=Option("rank"),
            hint=phrase("a method that truncates: {svd}", svd=Option("method", "svd")),
        )
    if not 1 <= rank <= MOST:
        raise BadRequest(f"a rank is 1 to {MOST}, not {rank}", where=Option("rank"))


def _told(members: Sequence[AdapterMember]) -> str:
    return ", ".join(f"{one.name}={one.weight:g}" for one in members)


def _with_weight(members: Sequence[AdapterMember]) -> tuple[AdapterMember, ...]:
    """Return the adapters that have a weight: others would add ranks and modules of zeros.

    Raises BadRequest if none has.
    """
    found = tuple(one for one in members if one.weight != 0)
    if not found:
        raise BadRequest("every adapter has weight 0", hint=Option("experts", {"REF": 0.5}))
    return found


def _odd(members: Sequence[AdapterMember]) -> Iterator[str]:
    """Yield what is likely to be a mistake: an adapter without weight, or the same one twice."""
    for number, one in enumerate(members):
        if one.weight == 0:
            yield f"{one.name} has weight 0, so nothing of it is in the result"
            continue
        for other in members[:number]:
            if other.weight != 0 and other.products == one.products:
                also = "" if other.name == one.name else f": it has the content of {other.name}"
                yield f"{one.name} is given more than once{also}"
                break


def _base_of(
    catalog: Catalog, members: Sequence[AdapterMember]
) -> tuple[tuple[Parent, ...], tuple[str, ...]]:
    """Return the base that the adapters were added as those of, if they are, else a remark."""
    stated = [(member, id) for member in members for id in member.bases]
    contents = {catalog.snapshot(id).manifest for _, id in stated}
    if len(contents) == 1:
        return (Parent(BASE, stated[0][1]),), ()
    if not contents:
        return (), ()
    names = {ref.snapshot_id(): name for name, ref in catalog.refs().items()}
    told = (f"{member.name} of {names.get(id, id.short)}" for member, id in stated)
    return (), (f"the adapters were added as those of several bases: {', '.join(told)}",)


def _require_one_name(
    catalog: Catalog, base: Sequence[Parent], members: Sequence[AdapterMember]
) -> None:
    """Raise Incompatible for adapters that change one tied tensor under different names.

    Each alone changes all its names; their combination would have a product for each.
    """
    for parent in base:
        model = catalog.manifest_of(parent.snapshot_id())
        main = models_in(catalog, model).meant(parent.snapshot_id().short)
        modules = [module for member in members for module in member.products]
        for group in Tied.of(catalog, model, main, (f"{module}." for module in modules)).groups:
            own = {one.name: {n for n in group if _module(n) in one.products} for one in members}
            of = [name for name, names in own.items() if names]
            if any(own[name] != own[of[0]] for name in of):
                raise Incompatible(
                    f"the adapters change {' or '.join(group)}, one tied tensor, under different "
                    "names",
                    where=", ".join(of),
                    hint=INSTEAD,
                )


def _module(tensor: str) -> str:
    return tensor.removesuffix(".weight")


class _Work(msgspec.Struct, frozen=True):
    """What to combine: by module, the numbers of the adapters that have it."""

    modules: dict[str, tuple[int, ...]]
    rank: int
    dtype: str

    @classmethod
    def of(
        cls,
        members: Sequence[AdapterMember],
        setting: CombineSetting,
        rank: int | None,
        dtype: str | None,
    ) -> _Work:
        modules = {
            module: tuple(k for k, member in enumerate(members) if module in member.products)
            for module in sorted({module for member in members for module in member.products})
        }
        if setting.method.of_products:
            found = rank or max(max(_ranks(members, module, of)) for module, of in modules.items())
            # No product of the result has a larger rank.
            found = min(found, max(_most(members, module, of) for module, of in modules.items()))
        elif setting.method.joins:
            found = max(sum(_ranks(members, module, of)) for module, of in modules.items())
        else:
            found = max(
                _one_rank(members, module, of, setting.method.name)
                for module, of in modules.items()
            )
        dtypes = {
            factor.dtype
            for member in members
            for product in member.products.values()
            for factor in (product.up, product.down)
        }
        return cls(modules, found, dtype or (dtypes.pop() if len(dtypes) == 1 else "F32"))

    def remarks(self, rank: int | None) -> tuple[str, ...]:
        """Return a remark if the rank is not the one that was asked for."""
        if rank is None or rank == self.rank:
            return ()
        return (f"the rank is {self.rank}: no matrix of the adapters can have the rank {rank}",)


def _most(members: Sequence[AdapterMember], module: str, of: Sequence[int]) -> int:
    return min(members[of[0]].products[module].shape)


def _ranks(members: Sequence[AdapterMember], module: str, of: Sequence[int]) -> list[int]:
    return [members[k].products[module].rank for k in of]


def _one_rank(members: Sequence[AdapterMember], module: str, of: Sequence[int], method: str) -> int:
    """Return the rank that all products of a module have.  Raises Incompatible."""
    ranks = _ranks(members, module, of)
    if len(set(ranks)) > 1:
        raise Incompatible(
            f"{method} adds factors of one rank, and those of {module} have "
            f"{', '.join(map(str, ranks))}",
            where=", ".join(members[k].name for k in of),
            hint=phrase("{cat} or {svd}", cat=Option("method", "cat"), svd=Option("method", "svd")),
        )
    return ranks[0]


class _Combiner:
    """Makes the files of one combination."""

    def __init__(
        self,
        catalog: Catalog,
        transaction: Transaction,
        members: Sequence[AdapterMember],
        setting: CombineSetting,
        work: _Work,
        progress: ProgressCallback | None,
    ) -> None:
        self._catalog = catalog
        self._transaction = transaction
        self._members = members
        self._setting = setting
        self._work = work
        self._progress = progress
        self.errors = Errors()

    def manifest(self, card: str) -> Manifest:
        """Store the adapter's tensors and files. card: the text of its model card."""
        tensors: dict[str, Tensor] = {}
        total = sum(self._size(module) for module in self._work.modules)
        done = 0
        for module in self._work.modules:
            # `_rounded` refuses what is not finite.
            with np.errstate(over="ignore", invalid="ignore"):
                tensors |= self._combined(module)
            done += self._size(module)
            if self._progress is not None:
                self._progress(Progress("combine", done, total))
        unchanged = {name: id for one in self._members for name, id in one.unchanged.items()}
        records = self._catalog.tensors(list(unchanged.values()))
        tensors |= dict(zip(unchanged, records, strict=True))
        first = self._members[0]
        if first.weights is not None:
            put = self._transaction
            return put_model(put, first.weights, tensors, {CARD: card.encode()})
        settings = {key: first.settings[key] for key in _KEPT if key in first.settings}
        return put_files(
            self._transaction,
            tensors,
            {
                **settings,
                "r": self._work.rank,
                "lora_alpha": self._work.rank,
                "fan_in_fan_out": first.config.transposed,
                "target_modules": list(self._work.modules),
            },
            card,
        )

    def _size(self, module: str) -> int:
        products = [self._members[k].products[module] for k in self._work.modules[module]]
        return sum(product.up.nbytes + product.down.nbytes for product in products)

    # -- one module ----------------------------------------------------------------------------

    def _combined(self, module: str) -> dict[str, Tensor]:
        """Return the two tensors of a module's product, and take note of what they leave out."""
        of = [(k, self._members[k]) for k in self._work.modules[module]]
        read = [self._read(k, member, module) for k, member in of]
        product = of[0][1].products[module]
        names = product.names
        setting, rank = self._setting, self._work.rank
        if setting.method.of_products:
            # The error is that of the factors as they are stored.
            found = truncated(read, module, rank, setting, self._transaction.directory)
            down, up = self._rounded(module, found.down, found.up)
            self.errors.add(f"{module}.weight", *found.squares_left(down, up))
        elif setting.method.joins:
            down, up = self._rounded(module, *joined(read))
        else:
            down, up = self._rounded(module, *united(read, names, setting))
        missing = rank - len(down)
        down, up = np.pad(down, ((0, missing), (0, 0))), np.pad(up, ((0, 0), (0, missing)))
        # Those of a convolution have its dimensions.
        full = (
            down.reshape(-1, *product.down.shape[1:]),
            up.reshape(*up.shape, *product.up.shape[2:]),
        )
        return {
            name: put_array(self._transaction, name, factor, self._work.dtype)
            for name, factor in zip(names, full, strict=True)
        }

    def _read(self, position: int, member: AdapterMember, module: str) -> Read:
        product = member.products[module]
        down, up = read_singles(self._catalog, [product.down, product.up])
        if not (np.isfinite(down).all() and np.isfinite(up).all()):
            raise Incompatible(f"{member.name} has elements that are not finite", where=module)
        down, up = (one.reshape(one.shape[0], -1) for one in (down, up))
        return Read(down, up, product.scale, member.weight, position)

    def _rounded(self, module: str, *factors: Singles) -> tuple[Singles, Singles]:
        """Return lora_A and lora_B as they will be stored, as float32.  Raises Incompatible."""
        dtype = array_dtype(self._work.dtype)
        down, up = (one.astype(dtype).astype(np.float32) for one in factors)
        if not (np.isfinite(down).all() and np.isfinite(up).all()):
            raise Incompatible(
                f"the result has elements that are too large for {self._work.dtype}",
                where=module,
                hint=Option("dtype", "float32"),
            )
        return down, up


_BASE: Final = "base_model_name_or_path"
_OF_NAMES: Final = """\
A name is what an adapter's own card says (`model_name`). Content is mstore's id of all of an
adapter's files. Put the name of the base in `base_model`, if it is not there, before you publish
this."""


def card_of(
    catalog: Catalog,
    members: Sequence[AdapterMember],
    setting: CombineSetting,
    *,
    rank: int,
    asked: int | None,
    dtype: str | None,
) -> str:
    """Return the text of README.md.

    rank: of the result. asked, dtype: the rank and the type that were asked for.  Raises Corrupt,
    StorageFailed.
    """
    contents = (catalog.snapshot(member.snapshot).manifest_id() for member in members)
    told = [said(catalog, content) for content in contents]
    lines = [
        *_front_matter(members, told),
        "",
        *_body(members, told, setting, rank),
        *("", "## How it was made", "", "```sh", _command(members, told, setting, asked, dtype)),
        "```",
    ]
    return "\n".join(lines) + "\n"


def _declared_base(members: Sequence[AdapterMember]) -> str | None:
    """Return the base that all configs name, None if they name none, several, or a directory."""
    names = {member.settings.get(_BASE) for member in members}
    name = names.pop() if len(names) == 1 else None
    return name if isinstance(name, str) and NAME.fullmatch(name) else None


def _front_matter(members: Sequence[AdapterMember], told: Sequence[Said]) -> Iterator[str]:
    yield "---"
    base = _declared_base(members)
    if base is not None:
        yield f"base_model: {json.dumps(base)}"
        yield "base_model_relation: adapter"
    yield "library_name: peft"
    yield from licence_lines([one.licence for one in told])
    yield from ("tags:", "- lora", "- merge", "- mstore", "---")


def _body(
    members: Sequence[AdapterMember], told: Sequence[Said], setting: CombineSetting, rank: int
) -> Iterator[str]:
    count = "one adapter" if len(members) == 1 else f"{len(members)} adapters"
    yield f"# A LoRA adapter of rank {rank}, made of {count} by {setting.method.name}"
    yield from ("", "Made by mstore.", "", "## Parents", "")
    yield "| adapter | weight | licence as its card states it | content |"
    yield "|---|---|---|---|"
    for member, one in zip(members, told, strict=True):
        name = one.name or "not named by its card"
        licence = one.licence or "none stated"
        yield f"| {name} | {number_text(member.weight)} | {licence} | `{one.content.hex()}` |"
    base = _declared_base(members)
    yield from (
        "",
        f"They are adapters of {base}."
        if base is not None
        else "Their configs do not name one base: they name several, none, or a directory.",
    )
    yield from ("", _OF_NAMES)
    yield from licence_section([one.licence for one in told])


def _command(
    members: Sequence[AdapterMember],
    told: Sequence[Said],
    setting: CombineSetting,
    rank: int | None,
    dtype: str | None,
) -> str:
    words = ["mstore", "combine-adapters"]
    for member, one in zip(members, told, strict=True):
        words += ["--expert", f"{one.content.hex()}={number_text(member.weight)}"]
    method, *parameters = str(setting).split(" ")
    words += ["--method", method]
    for parameter in parameters:
        words += ["--param", parameter]
    if rank is not None:
        words += ["--rank", str(rank)]
    if dtype is not None:
        words += ["--dtype", dtype]
    return f"{shlex.join(words)} --name REF"
