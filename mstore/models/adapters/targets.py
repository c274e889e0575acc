"""Targets: which tensor of a base each tensor of a PEFT adapter belongs to, and whether it fits.

PEFT names an adapter's tensors by the modules of the model that was trained:
`base_model.model.` + module + `.lora_A.weight`.  Tensors of other modules that were trained whole
keep their own names.  Reads nothing: types and shapes come from records, or from the headers of
files that are not stored yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

import msgspec

from mstore.models.adapters.config import CONFIG, LORA, OFT, VERA, LoraConfig, parse_config
from mstore.models.adapters.forms import FORMS, form_of
from mstore.models.adapters.image import configs_of, targets_of_keys
from mstore.models.adapters.keys import key_of, starts_adapter
from mstore.models.adapters.multipliers import MultiplierForm
from mstore.models.adapters.products import (
    Product,
    Targets,
    Typed,
    divisor_of,
    form_named,
    misfit,
    require_product,
)
from mstore.terms.errors import Incompatible

PREFIX: Final = "base_model.model."

# How PEFT ends the names of an adapter's tensors: for linear layers, and for embeddings.
_LINEAR: Final = (".lora_A.weight", ".lora_B.weight")
_EMBEDDING: Final = (".lora_embedding_A", ".lora_embedding_B")
_TURNS: Final = {".oft_R.weight": "oft", ".oft_embedding_R.weight": "oft embedding"}
_MULTIPLIERS: Final = (".ia3_l", *_TURNS)
# The matrices of VeRA, for all layers.
_ALL: Final = "base_model."
_SHARED: Final = ("vera_A", "vera_B")
_KINDS: Final = (*_LINEAR, *_EMBEDDING, *_MULTIPLIERS, ".vera_lambda_b")
_MAGNITUDES: Final = (".lora_magnitude_vector.weight", ".lora_magnitude_vector")
_UNCHANGED: Final = ".base_layer.weight"
# A trained bias of a layer that has a product, too.
_BIAS: Final = ".base_layer.bias"
# What a layer's product adds to its bias, scaled as the product.
_SCALED_BIAS: Final = ".lora_B.bias"

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


def is_adapter(names: Iterable[str]) -> bool:
    """Return whether tensors of these names are those of an adapter, in any form."""
    return any(name.endswith(_KINDS) or starts_adapter(name) for name in names)


def has_keys(names: Iterable[str]) -> bool:
    """Return whether tensors are an adapter's whose keys say all: one without a config."""
    names = list(names)
    return any(map(starts_adapter, names)) and not any(name.startswith(PREFIX) for name in names)


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


def is_scaled_bias(name: str) -> bool:
    """Return whether a tensor of an adapter is a bias that counts as often as its product."""
    return name.endswith(_SCALED_BIAS)


def path_of_whole(name: str) -> str:
    """Return the path, in the trained model, of a tensor that an adapter has whole."""
    if name.endswith(_BIAS):
        name = f"{name.removesuffix(_BIAS)}.bias"
    return _path(name)


def targets_of(
    adapter: Collection[str], base: Collection[str], where: str, config: LoraConfig
) -> Targets:
    """Find the targets of an adapter of PEFT.

    Raises Incompatible listing the adapter's tensors that belong to none of the base.
    """
    finder = _Finder(base)
    products: list[Product] = []
    replaced: list[tuple[str, str]] = []
    kept: list[tuple[str, str]] = []
    # Another kind has other tensors: these then belong to no layer.
    pairs, missing = pairs_of(adapter) if config.kind == LORA else ((), ())
    problems: list[str] = [*missing]
    used = {name for pair in pairs for name in pair.names}
    for pair in pairs:
        tensor = finder.find(f"{pair.module}.weight")
        if tensor is None:
            problems.append(finder.told(f"{pair.module}.weight"))
            continue
        magnitude = pair.magnitudes[0] if pair.magnitudes and config.dora else None
        if config.dora and (magnitude is None or pair.embedding):
            why = "it is an embedding" if pair.embedding else "it has no magnitudes"
            raise Incompatible(f"cannot apply DoRA to {tensor}: {why}", where=where)
        form = "transposed" if pair.embedding or config.transposed else "lora"
        products.append(Product(tensor, pair.module, form, (pair.up, pair.down), magnitude))
    if config.kind != LORA:
        for layer, parts in _parts_of(adapter).items():
            own_form = form_of(parts)
            tensor = finder.find(f"{layer}.weight")
            used |= set(parts.values())
            if own_form is None:
                problems.append(f"{layer} has {', '.join(sorted(parts))}, which make no product")
            elif tensor is None:
                problems.append(finder.told(f"{layer}.weight"))
            else:
                own = tuple(parts[part] for part in FORMS[own_form].parts)
                if config.kind == VERA and config.transposed:
                    own_form = f"{own_form} transposed"
                products.append(Product(tensor, layer, own_form, own))
        for name, layer, form, settings in _multipliers_of(adapter, config):
            tensor = finder.find(f"{layer}.weight")
            used.add(name)
            if tensor is None:
                problems.append(finder.told(f"{layer}.weight"))
                continue
            products.append(Product(tensor, layer, form, (name,), settings=settings))
            bias = f"{tensor.removesuffix('.weight')}.bias"
            if form.startswith("ia3 outputs") and bias in base:
                products.append(Product(bias, layer, "ia3 outputs", (name,), settings=settings))
    for name in adapter:
        if is_scaled_bias(name) and config.kind == LORA:
            layer = _path(name.removesuffix(_SCALED_BIAS))
            tensor = finder.find(f"{layer}.bias")
            used.add(name)
            if tensor is None:
                problems.append(finder.told(f"{layer}.bias"))
            else:
                products.append(Product(tensor, layer, "difference", (name,)))
    changed = {one.tensor for one in products}
    for name in adapter:
        if name in used:
            continue
        is_kept = is_unchanged(name)
        path = _path(f"{name.removesuffix(_UNCHANGED)}.weight" if is_kept else path_of_whole(name))
        tensor = finder.find(path)
        if tensor is None:
            problems.append(finder.told(path))
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
        raise misfit(problems, where)
    return Targets(tuple(products), tuple(replaced), tuple(kept))


def _parts_of(adapter: Collection[str]) -> dict[str, dict[str, str]]:
    """Return the tensors of each layer's LoHa, LoKr or VeRA, by what they are."""
    found: dict[str, dict[str, str]] = {}
    for end in (".vera_lambda_b", ".vera_lambda_d"):
        for name in adapter:
            if name.endswith(end):
                parts = found.setdefault(_path(name.removesuffix(end)), {})
                parts |= {one: f"{_ALL}{one}" for one in _SHARED if f"{_ALL}{one}" in adapter}
                parts[end[1:]] = name
    for name in adapter:
        key = key_of(name)
        if key is not None and key.part.startswith(("hada_", "lokr_")):
            found.setdefault(_path(name.removesuffix(key.end)), {})[key.part] = name
    return found


def _multipliers_of(
    adapter: Collection[str], config: LoraConfig
) -> Iterator[tuple[str, str, str, tuple[float, ...]]]:
    """Yield name, layer, form and settings of each tensor that multiplies a weight."""
    for name in adapter:
        end = next((end for end in _MULTIPLIERS if name.endswith(end)), None)
        if end is None or (end in _TURNS) != (config.kind == OFT):
            continue
        layer = _path(name.removesuffix(end))
        if end in _TURNS:
            yield name, layer, _TURNS[end], config.turns
        else:
            side = "inputs" if layer.endswith(config.feedforward) else "outputs"
            yield name, layer, f"ia3 {side}{' transposed' * config.transposed}", ()


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


def is_any_adapter(names: Mapping[str, object], base: Mapping[str, object], config: bool) -> bool:
    """Return whether tensors are an adapter's, of any kind: PEFT's names, or its config.

    config: whether an adapter_config.json is beside them.
    """
    return is_adapter(names) or (config and not names.keys() & base.keys())


class AdapterPlan(msgspec.Struct, frozen=True):
    """What an adapter changes in a base, and how it scales.  config: PEFT's, None for others."""

    targets: Targets
    config: LoraConfig | None

    @property
    def tying(self) -> bool:
        """Whether products of tied layers are one product."""
        return self.config is not None and self.config.tying

    def require(
        self, product: Product, base: Mapping[str, Typed], adapter: Mapping[str, Typed], where: str
    ) -> None:
        """Raise Incompatible unless a product fits the base and can be computed."""
        rank = require_product(product, base, adapter, where)
        is_lora = self.config is not None and product.form in ("lora", "transposed")
        if is_lora and self.config and rank != self.config.rank_of(product.module):
            raise Incompatible(
                f"the adapter's product for {product.tensor} has rank {rank}, its {CONFIG} says "
                f"{self.config.rank_of(product.module)}",
                where=where,
            )

    def scale_of(
        self, product: Product, adapter: Mapping[str, Typed], alphas: Mapping[str, float]
    ) -> float:
        """Return the factor of a product.  alphas: the numbers of these tensors."""
        if self.config is not None:
            return self.config.scale_of(product.module)
        if product.scale is not None:
            return product.scale
        form = form_named(product.form)
        takes_alpha = isinstance(form, MultiplierForm) and form.takes_alpha
        if product.alpha is None or not (takes_alpha or form.divisor is not None):
            # Without alpha a product counts once, and an OFT has no constraint.
            return 0.0 if takes_alpha else 1.0
        return alphas[product.alpha] / divisor_of(product, adapter)


def check_adapter(
    config: bytes | None, adapter: Mapping[str, Typed], base: Mapping[str, Typed], where: str
) -> None:
    """Raise Incompatible unless mstore can apply an adapter to a base. config: its bytes."""
    if has_keys(adapter):
        plan = plan_of_keys(adapter, base, where)
    else:
        plan = plan_of_peft(config, adapter.keys(), base.keys(), where)
    for product in plan.targets.products:
        plan.require(product, base, adapter, where)
    for name, source in plan.targets.replaced:
        if base[name].shape != adapter[source].shape:
            raise Incompatible(
                f"the adapter's {name} has shape {list(adapter[source].shape)}, the base's "
                f"{list(base[name].shape)}",
                where=where,
            )


def plan_of_keys(
    adapter: Mapping[str, Typed],
    base: Mapping[str, Typed],
    where: str,
    metadata: Mapping[str, str] | None = None,
) -> AdapterPlan:
    """Return what an adapter changes whose keys say all.  Raises Incompatible.

    metadata: of its header.
    """
    configs = configs_of(metadata, where)
    return AdapterPlan(targets_of_keys(adapter, base, where, configs), None)


def plan_of_peft(
    config: bytes | None, adapter: Collection[str], base: Collection[str], where: str
) -> AdapterPlan:
    """Return what an adapter of PEFT changes, and how it scales.  Raises Incompatible.

    config: its adapter_config.json, None if there is none.
    """
    if config is None:
        raise Incompatible(
            f"an adapter without its {CONFIG}",
            where=where,
            hint=f"a directory as PEFT saves it has {CONFIG} beside the weights; add that one",
        )
    parsed = parse_config(config, where)
    return AdapterPlan(targets_of(adapter, base, where, parsed), parsed)
