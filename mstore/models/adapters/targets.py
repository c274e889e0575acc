"""Targets: which tensor of a base each tensor of a PEFT adapter belongs to.

PEFT names an adapter's tensors by the modules of the model that was trained:
`base_model.model.` + module + `.lora_A.weight`.  Tensors of other modules that were trained whole
keep their own names.  Owns names only; reads nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

import msgspec

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
