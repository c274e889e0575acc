"""Combine: several adapters of one base become one adapter.

Products of modules that only some adapters have are combined from these.  Every product of the
result has the same rank: what has a smaller one gets rows and columns of zeros.  The factors of one
module are in memory at a time; products come in runs, and the combined product is a mapped file.
The differences of tensors without a product (`whole`) are combined, too.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from mstore.checkpoint.declared import CARD
from mstore.merge.combination.members import INSTEAD, AdapterMember, members_of
from mstore.merge.combination.methods import CombineSetting
from mstore.merge.combination.products import ModuleProducts, Read
from mstore.merge.combination.whole import FoundBase, WholeTensor, put_whole, whole_tensors
from mstore.merge.running.model_card import number_text
from mstore.models.adapters.extract import branch_for_adapter, put_files, whole_settings
from mstore.models.adapters.low_rank import read_singles
from mstore.models.adapters.truncation import Errors, Singles, TruncatedTensor, linear_algebra
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
from mstore.store.models import Input, models_in
from mstore.store.objects.manifest import Manifest
from mstore.store.objects.snapshot import COMBINE, EXPERT, Parent
from mstore.store.objects.tensor import Tensor
from mstore.store.tied import Tied
from mstore.store.transaction import Transaction
from mstore.store.view import array_dtype
from mstore.terms.errors import BadRequest, Incompatible
from mstore.terms.ids import ManifestId, SnapshotId
from mstore.terms.phrases import Option, phrase
from mstore.terms.report import ProgressCallback, ProgressCounter, Report

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
    whole: int
    """tensors that are stored whole: the base's and combined differences"""
    relative_error: float | None
    """norm of all that truncation leaves out, relative to the norm of the combined products; null
    for methods that do not truncate, or of whose formula the rank is a part"""
    tensors: tuple[TruncatedTensor, ...]
    """matrices that were truncated, those with the largest errors first"""
    remarks: tuple[str, ...]
    """what is odd about the adapters, as text"""
    linear_algebra: str | None
    """what decomposed the matrices, and for which processor: another gives other bits; null for
    methods that do not truncate"""
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
    base: Input | None,
    message: str,
    progress: ProgressCallback | None = None,
) -> CombineReport:
    """Store the combination of adapters under a ref.

    adapters: name, snapshot and weight of each. rank: for methods that truncate, None for what the
    method takes. dtype: of the factors, BF16, F16 or F32; None for the adapters' own, or F32 if
    they differ. base: of the adapters, None for the one that they were added as those of.

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
    found = FoundBase.of(catalog, members, base)
    _require_one_name(catalog, found.base, members)
    work = _Work.of(catalog, members, setting, rank, dtype, found.base)
    used = found.base if work.whole else None
    card = card_of(catalog, members, setting, rank=work.rank, asked=rank, dtype=dtype, base=used)
    made = f"{setting}, rank {work.rank}: {_told(members)}"
    with Transaction(catalog, f"combine {name}") as transaction:
        run = _Combiner(catalog, transaction, members, setting, work, progress)
        manifest = run.manifest(card)
        remarks = (*found.remarks, *_odd(every), *work.remarks(rank))
        publication = Publication(catalog, transaction)
        record, is_new = publication.put(
            name,
            current,
            manifest,
            COMBINE,
            (*found.parents, *(Parent(EXPERT, member.snapshot) for member in members)),
            message=f"{message} ({made})" if message else made,
            action=f"combine: {made}",
        )
        publication.commit()
        written = transaction.bytes_written
    leaves_out = setting.method.truncates and not setting.method.of_rank
    return CombineReport(
        name=name,
        snapshot=record.id(),
        new_snapshot=is_new,
        method=str(setting),
        rank=work.rank,
        dtype=work.dtype,
        products=len(work.modules),
        of_some=sum(len(of) < len(members) for of in work.modules.values()),
        whole=len(work.whole),
        relative_error=run.errors.relative() if leaves_out else None,
        tensors=run.errors.tensors() if leaves_out else (),
        remarks=remarks,
        linear_algebra=linear_algebra() if setting.method.truncates else None,
        plain_bytes=manifest.plain_bytes(),
        bytes_written=written,
        seconds=time.monotonic() - began,
    )


def _check_rank(rank: int, setting: CombineSetting) -> None:
    if not setting.method.truncates:
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


def _require_one_name(
    catalog: Catalog, base: Input | None, members: Sequence[AdapterMember]
) -> None:
    """Raise Incompatible for adapters that change one tied tensor under different names.

    Each alone changes all its names; their combination would have a product for each.
    """
    if base is None:
        return
    model = catalog.manifest_of(base.snapshot)
    main = models_in(catalog, model).meant(base.name)
    modules = [module for member in members for module in member.products]
    for group in Tied.of(catalog, model, main, (f"{module}." for module in modules)).groups:
        own = {one.name: {n for n in group if _module(n) in one.products} for one in members}
        of = [name for name, names in own.items() if names]
        if any(own[name] != own[of[0]] for name in of):
            raise Incompatible(
                f"the adapters change {' or '.join(group)}, one tied tensor, under different names",
                where=", ".join(of),
                hint=INSTEAD,
            )


def _module(tensor: str) -> str:
    return tensor.removesuffix(".weight")


class _Work(msgspec.Struct, frozen=True):
    """What to combine.

    modules: by module, the numbers of the adapters that have it. whole: tensors without a product,
    by name.
    """

    modules: dict[str, tuple[int, ...]]
    whole: Mapping[str, WholeTensor]
    rank: int
    dtype: str

    @classmethod
    def of(
        cls,
        catalog: Catalog,
        members: Sequence[AdapterMember],
        setting: CombineSetting,
        rank: int | None,
        dtype: str | None,
        base: Input | None,
    ) -> _Work:
        modules = {
            module: tuple(k for k, member in enumerate(members) if module in member.products)
            for module in sorted({module for member in members for module in member.products})
        }
        found = max(
            setting.method.rank_of(
                [members[k].products[module].rank for k in of],
                module,
                ", ".join(members[k].name for k in of),
            )
            for module, of in modules.items()
        )
        if setting.method.truncates:
            # No product of the result has a larger rank.
            most = max(min(members[of[0]].products[m].shape) for m, of in modules.items())
            found = min(rank or found, most)
        dtypes = {
            factor.dtype
            for member in members
            for product in member.products.values()
            for factor in (product.up, product.down)
        }
        whole = whole_tensors(catalog, members, base, modules)
        return cls(modules, whole, found, dtype or (dtypes.pop() if len(dtypes) == 1 else "F32"))

    def remarks(self, rank: int | None) -> tuple[str, ...]:
        """Return a remark if the rank is not the one that was asked for."""
        if rank is None or rank == self.rank:
            return ()
        return (f"the rank is {self.rank}: no matrix of the adapters can have the rank {rank}",)


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
        whole = self._work.whole
        total = sum(map(self._size, self._work.modules))
        total += sum(one.base.nbytes for one in whole.values())
        counter = ProgressCounter("combine", total, self._progress)
        # What is not finite is refused by name.
        with np.errstate(over="ignore", invalid="ignore"):
            for module in self._work.modules:
                tensors |= self._combined(module)
                counter(self._size(module))
            for name, one in whole.items():
                tensors[name] = self._of_differences(name, one)
                counter(one.base.nbytes)
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
                **whole_settings([one.name for one in whole.values()]),
            },
            card,
        )

    def _size(self, module: str) -> int:
        return sum(self._members[k].products[module].nbytes for k in self._work.modules[module])

    def _of_differences(self, name: str, one: WholeTensor) -> Tensor:
        method = self._setting.method
        count = len(self._members) if method.takes_mean else 1
        weights = [member.weight / count for member in self._members]
        elements = self._setting.elements
        return put_whole(self._transaction, self._catalog, name, one, weights, elements)

    # -- one module ----------------------------------------------------------------------------

    def _combined(self, module: str) -> dict[str, Tensor]:
        """Return the two tensors of a module's product, and take note of what they leave out."""
        of = [(k, self._members[k]) for k in self._work.modules[module]]
        read = [self._read(k, member, module) for k, member in of]
        product = of[0][1].products[module]
        names = product.names
        rank = self._work.rank
        given = ModuleProducts(module, read, names, self._transaction.directory)
        found = self._setting.method.combined(given, rank, self._setting)
        down, up = self._rounded(module, found.down, found.up)
        if found.squares_left is not None:
            # The error is that of the factors as they are stored.
            self.errors.add(f"{module}.weight", *found.squares_left(down, up))
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
    base: Input | None,
) -> str:
    """Return the text of README.md.

    rank: of the result. asked, dtype: the rank and the type that were asked for. base: the one that
    was read, if any was.  Raises Corrupt, StorageFailed.
    """
    contents = (catalog.snapshot(member.snapshot).manifest_id() for member in members)
    told = [said(catalog, content) for content in contents]
    of_base = None if base is None else catalog.snapshot(base.snapshot).manifest_id()
    lines = [
        *_front_matter(members, told),
        "",
        *_body(members, told, setting, rank),
        *("", "## How it was made", "", "```sh"),
        _command(members, told, setting, asked, dtype, of_base),
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
    base: ManifestId | None,
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
    if base is not None:
        words += ["--base", base.hex()]
    return f"{shlex.join(words)} --name REF"
