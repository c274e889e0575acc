"""Targets: which tensor of a base each tensor of a PEFT adapter belongs to, and whether it fits.

PEFT names an adapter's tensors by the modules of the model that was trained:
`base_model.model.` + module + `.lora_A.weight`.  Tensors of other modules that were trained whole
keep their own names.  Reads nothing: types and shapes come from records, or from the headers of
files that are not stored yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final, Protocol

import msgspec

from mstore.models.adapters.config import CONFIG, LoraConfig, parse_config
from mstore.numeric.codes import CODES, cast_hint
from mstore.terms.errors import Incompatible

PREFIX: Final = "base_model.model."
_LISTED: Final = 8

# How PEFT ends the names of an adapter's tensors: for linear layers, and for embeddings.
_LINEAR: Final = (".lora_A.weight", ".lora_B.weight")
_EMBEDDING: Final = (".lora_embedding_A", ".lora_embedding_B")
_MAGNITUDES: Final = (".lora_magnitude_vector.weight", ".lora_magnitude_vector")
_UNCHANGED: Final = ".base_layer.weight"
# A trained bias of a layer that has a product, too.
_BIAS: Final = ".base_layer.bias"

# How names of one part of a model begin, in memory and on disk: transformers renames them when it
# loads and saves models of images or sound (its `conversion_mapping`).
_BEGINNINGS: Final = (
    # Text: in memory since transformers 5; LLaVA's files and others; Qwen2-VL's files.
    ("model.language_model.", "language_model.model.", "model."),
    # Towers that were one level deeper.
    (
        "model.vision_tower.",
        "vision_tower.vision_model.",
        "vision_tower.",
        "model.vision_tower.vision_model.",
    ),
)


class Pair(msgspec.Struct, frozen=True):
    """An adapter's tensors of one product.

    module: its path in the trained model. down, up: lora_A and lora_B. embedding: whether the
    product is that of an embedding, which lies transposed. magnitudes: of DoRA, if there are any.
    """

    module: str
    down: str
    up: str
    embedding: bool
    magnitudes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Its tensors."""
        return (self.down, self.up, *self.magnitudes)


class Product(msgspec.Struct, frozen=True):
    """A base's tensor and the adapter's tensors of its product.

    module: its path in the trained model. down, up: lora_A and lora_B. embedding: whether the
    product is that of an embedding, which lies transposed. magnitude: of DoRA.
    """

    tensor: str
    module: str
    down: str
    up: str
    embedding: bool
    magnitude: str | None

    def names(self, *, dora: bool) -> tuple[str, ...]:
        """Return the adapter's tensors that it is computed from.  dora: the magnitudes count."""
        more = (self.magnitude,) if dora and self.magnitude is not None else ()
        return (self.up, self.down, *more)


class Targets(msgspec.Struct, frozen=True):
    """What an adapter does to a base, by names.

    products: low-rank changes. replaced: (tensor of the base, tensor of the adapter), trained
    whole. kept: the same, where the adapter repeats the base's weights below a product.
    """

    products: tuple[Product, ...]
    replaced: tuple[tuple[str, str], ...]
    kept: tuple[tuple[str, str], ...]


def is_adapter(names: Iterable[str]) -> bool:
    """Return whether tensors of these names are those of a LoRA adapter in PEFT's form."""
    return any(name.endswith((*_LINEAR, *_EMBEDDING)) for name in names)


def factor_names(module: str, *, embedding: bool) -> tuple[str, str]:
    """Return the names of lora_A and lora_B of a module's product."""
    down, up = _EMBEDDING if embedding else _LINEAR
    return f"{PREFIX}{module}{down}", f"{PREFIX}{module}{up}"


def pairs_of(adapter: Collection[str]) -> tuple[tuple[Pair, ...], tuple[str, ...]]:
    """Return the products of an adapter, and what is wrong with the others, as text."""
    found: list[Pair] = []
    problems: list[str] = []
    known = set(adapter)
    for name in adapter:
        ends = next((ends for ends in (_LINEAR, _EMBEDDING) if name.endswith(ends[0])), None)
        if ends is None:
            continue
        module = name.removesuffix(ends[0])
        up = module + ends[1]
        if up not in known:
            problems.append(f"{up} is missing")
            continue
        own = tuple(module + end for end in _MAGNITUDES if module + end in known)
        found.append(Pair(_path(module), name, up, ends is _EMBEDDING, own))
    return tuple(found), tuple(problems)


def is_unchanged(name: str) -> bool:
    """Return whether a tensor of an adapter repeats the base's weights below a product."""
    return name.endswith(_UNCHANGED)


def targets_of(adapter: Collection[str], base: Collection[str], where: str) -> Targets:
    """Find the targets.

    Raises Incompatible listing the adapter's tensors that belong to none of the base.
    """
    finder = _Finder(base)
    products: list[Product] = []
    replaced: list[tuple[str, str]] = []
    kept: list[tuple[str, str]] = []
    pairs, missing = pairs_of(adapter)
    problems: list[str] = [*missing]
    used = {name for pair in pairs for name in pair.names}
    for pair in pairs:
        tensor = finder.find(f"{pair.module}.weight")
        if tensor is None:
            problems.append(finder.told(f"{pair.module}.weight"))
            continue
        magnitude = pair.magnitudes[0] if pair.magnitudes else None
        products.append(Product(tensor, pair.module, pair.down, pair.up, pair.embedding, magnitude))
    changed = {one.tensor for one in products}
    for name in adapter:
        if name in used:
            continue
        is_kept = is_unchanged(name)
        path = f"{name.removesuffix(_UNCHANGED)}.weight" if is_kept else name
        if name.endswith(_BIAS):
            path = f"{name.removesuffix(_BIAS)}.bias"
        tensor = finder.find(_path(path))
        if tensor is None:
            problems.append(finder.told(_path(path)))
        elif is_kept:
            kept.append((tensor, name))
        elif tensor in changed:
            problems.append(f"{tensor} has a product and new weights")
        else:
            replaced.append((tensor, name))
    every = [*changed, *(tensor for tensor, _ in replaced)]
    if len(every) < len(products) + len(replaced) or len(set(every)) < len(every):
        problems.append("several of its tensors belong to one of the base")
    if problems:
        more = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        raise Incompatible(
            f"the adapter does not fit the base: {'; '.join(problems[:_LISTED])}{more}",
            where=where,
        )
    return Targets(tuple(products), tuple(replaced), tuple(kept))


def _path(name: str) -> str:
    return name.removeprefix(PREFIX)


class _Finder:
    """Finds tensors of the base by the names of an adapter.

    A model is often trained without its head, or inside another: then one of the names begins with
    modules that the other does not have.  Or names begin otherwise in memory than in files.  A name
    that could be several tensors is none.
    """

    def __init__(self, base: Collection[str]) -> None:
        self._base = set(base)
        self._ends: dict[str, str | None] = {}
        for name in base:
            rest = name
            while "." in rest:
                rest = rest.partition(".")[2]
                self._ends[rest] = None if rest in self._ends else name

    def find(self, name: str) -> str | None:
        if name in self._base:
            return name
        inner = self._ends.get(name)
        if inner is not None:
            return inner
        rest = name
        while "." in rest:
            rest = rest.partition(".")[2]
            # Whatever is left must still name a place: `weight` alone is everywhere.
            if "." in rest and rest in self._base:
                return rest
        renamed = self._renamed(name)
        return renamed[0] if len(renamed) == 1 else None

    def told(self, name: str) -> str:
        """Say why no tensor is found."""
        renamed = self._renamed(name)
        if renamed:
            return f"{name} could be {' or '.join(renamed)} in the base"
        return f"{name} is not in the base"

    def _renamed(self, name: str) -> list[str]:
        """Return the tensors that have this name where transformers has renamed them."""
        found = {
            other + name.removeprefix(one)
            for group in _BEGINNINGS
            for one in group
            if name.startswith(one)
            for other in group
        }
        return sorted(found & self._base)


_WITHOUT_CONFIG: Final = f"an adapter without its {CONFIG}"


class Typed(Protocol):
    """What has an element type and a shape: a tensor's record, or its entry in a header."""

    @property
    def dtype(self) -> str:
        """The element type, as safetensors spells it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions."""


def is_any_adapter(names: Mapping[str, object], base: Mapping[str, object], config: bool) -> bool:
    """Return whether tensors are an adapter's, of any kind: PEFT's names, or its config.

    config: whether an adapter_config.json is beside them.
    """
    return is_adapter(names) or (config and not names.keys() & base.keys())


def check_adapter(
    config: bytes | None, adapter: Mapping[str, Typed], base: Mapping[str, Typed], where: str
) -> None:
    """Raise Incompatible unless mstore can apply an adapter to a base. config: its bytes."""
    parsed, targets = plan_adapter(config, adapter, base, where)
    for product in targets.products:
        require_product(product, parsed, base, adapter, where)
    for name, source in targets.replaced:
        if base[name].shape != adapter[source].shape:
            raise Incompatible(
                f"the adapter's {name} has shape {list(adapter[source].shape)}, the base's "
                f"{list(base[name].shape)}",
                where=where,
            )


def plan_adapter(
    config: bytes | None, adapter: Mapping[str, object], base: Mapping[str, object], where: str
) -> tuple[LoraConfig, Targets]:
    """Return how an adapter scales, and what it changes.  Raises Incompatible."""
    if config is None:
        raise Incompatible(
            _WITHOUT_CONFIG,
            where=where,
            hint=f"a directory as PEFT saves it has {CONFIG} beside the weights; add that one",
        )
    return parse_config(config, where), targets_of(adapter.keys(), base.keys(), where)


def require_product(
    product: Product,
    config: LoraConfig,
    base: Mapping[str, Typed],
    adapter: Mapping[str, Typed],
    where: str,
) -> None:
    """Raise Incompatible unless a product has the base's shape and can be computed."""
    name, own = product.tensor, base[product.tensor]
    up, down = adapter[product.up], adapter[product.down]
    dtypes = {own.dtype, up.dtype, down.dtype}
    if not dtypes <= CODES.keys():
        odd = dtypes - CODES.keys()
        raise Incompatible(
            f"cannot apply an adapter to elements of {', '.join(sorted(odd))}",
            where=where,
            hint=cast_hint(odd, "REF"),
        )
    rows, columns = up.shape, down.shape
    if is_transposed(product, config):
        rows, columns = down.shape[::-1], up.shape[::-1]
    if len(own.shape) != 2 or len(rows) != 2 or len(columns) != 2 or rows[1] != columns[0]:
        raise Incompatible(
            f"the adapter has {list(up.shape)} and {list(down.shape)} for {name}, "
            f"{list(own.shape)} in the base: mstore applies products of matrices to matrices",
            where=where,
        )
    if (rows[0], columns[1]) != own.shape:
        raise Incompatible(
            f"the adapter's product for {name} has shape {[rows[0], columns[1]]}, the base "
            f"{list(own.shape)}",
            where=where,
        )
    rank = config.rank_of(product.module)
    if rows[1] != rank:
        raise Incompatible(
            f"the adapter's product for {name} has rank {rows[1]}, its {CONFIG} says {rank}",
            where=where,
        )
    if config.dora:
        _require_magnitudes(product, own, adapter, where)


def _require_magnitudes(
    product: Product, own: Typed, adapter: Mapping[str, Typed], where: str
) -> None:
    name = product.tensor
    if product.magnitude is None or product.embedding:
        raise Incompatible(
            f"cannot apply DoRA to {name}: "
            + ("it is an embedding" if product.embedding else "it has no magnitudes"),
            where=where,
        )
    found = adapter[product.magnitude]
    wanted = ((own.shape[0],), (own.shape[0], 1))
    if not own.shape[0] or found.shape not in wanted or found.dtype not in CODES:
        raise Incompatible(
            f"the magnitudes of {name} are {found.dtype} {list(found.shape)}", where=where
        )


def is_transposed(product: Product, config: LoraConfig) -> bool:
    """Return whether a product lies as [inputs, outputs]: (up @ down) transposed."""
    return product.embedding or config.transposed
