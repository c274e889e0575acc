"""Adapters of image models: which tensor of a base each of their tensors belongs to.

They have no config: keys name modules (`keys`), and a base's modules have several names each
(`modules`).  What is unknown or could be several is an error with its name, never a guess.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from mstore.checkpoint.strict_json import json_bytes, json_object
from mstore.models.adapters.config import LoraConfig, parse_config
from mstore.models.adapters.forms import form_of
from mstore.models.adapters.keys import (
    ALPHA,
    BIAS,
    DENOISER,
    MAGNITUDE,
    SCALED_BIAS,
    TEXT,
    TEXT_2,
    TEXT_3,
    Key,
    key_of,
    kind_of,
)
from mstore.models.adapters.modules import Place, modules_of
from mstore.models.adapters.multipliers import MULTIPLIERS, multiplier_of
from mstore.models.adapters.products import Product, Targets, Typed, form_named, misfit
from mstore.terms.errors import Incompatible
from mstore.terms.phrases import few

_BIAS: Final = ".bias"
METADATA: Final = "lora_adapter_metadata"
"""The entry of a header in which diffusers writes the configs that PEFT had."""
_CONFIGS: Final = {
    "unet.": DENOISER,
    "transformer.": DENOISER,
    "text_encoder.": TEXT,
    "text_encoder_2.": TEXT_2,
    "text_encoder_3.": TEXT_3,
}


def configs_of(metadata: Mapping[str, str] | None, where: str) -> dict[str, LoraConfig]:
    """Return the configs in a header of diffusers, by model.  Raises Incompatible."""
    raw = (metadata or {}).get(METADATA)
    if raw is None:
        return {}
    fields = json_object(raw.encode(errors="replace"))
    found = {}
    for prefix, model in _CONFIGS.items():
        own = {
            key.removeprefix(prefix): value
            for key, value in fields.items()
            if key.startswith(prefix)
        }
        if own:
            found[model] = parse_config(json_bytes({"peft_type": "LORA", **own}), where)
    return found


class AdapterLayer(msgspec.Struct, frozen=True):
    """A layer of an adapter: how its tensors make a product, and how that scales.

    module: as the keys call it. form, names, magnitude, alpha, scale: as in `Product`.
    """

    module: str
    form: str
    names: tuple[str, ...]
    magnitude: str | None
    alpha: str | None
    scale: float | None


def layers_of(
    adapter: Mapping[str, Typed], where: str, configs: Mapping[str, LoraConfig]
) -> dict[tuple[str, str], AdapterLayer]:
    """Return the layers of an adapter by model and path (`_` for `.`), of a bias with `.bias`.

    configs: by model, where its header has some: they scale what has no alpha of its own.

    Raises Incompatible for keys and parts of no form that is known.
    """
    found: dict[tuple[str, str], dict[str, str]] = {}
    written: dict[tuple[str, str], str] = {}
    unknown: list[str] = []
    for name in adapter:
        key = _key_of(name, adapter)
        if key is None:
            unknown.append(name)
        elif key.part in found.setdefault((key.model, key.path), {}):
            raise Incompatible(f"has two tensors for {key.part} of {key.path}", where=where)
        else:
            found[key.model, key.path][key.part] = name
            written[key.model, key.path] = key.module
    if unknown:
        kind = kind_of(unknown)
        what = f"cannot apply {kind}" if kind else "keys of no form of adapters that is known"
        raise Incompatible(f"{what}: {few(unknown)}", where=where)
    layers: dict[tuple[str, str], AdapterLayer] = {}
    problems: list[str] = []
    for (model, path), parts in found.items():
        alpha, magnitude = parts.pop(ALPHA, None), parts.pop(MAGNITUDE, None)
        bias, scaled = parts.pop(BIAS, None), parts.pop(SCALED_BIAS, None)
        if bias is not None:
            layers[model, path + _BIAS] = _of_bias(written[model, path], bias, None)
            if not parts:
                continue
        form = form_of(parts) or multiplier_of(parts)
        if form is None:
            told = ", ".join(sorted(parts)) or "no factors"
            problems.append(f"{path} has {told}, which make no product")
            continue
        names = tuple(parts[part] for part in form_named(form).parts)
        module, config, scale = written[model, path], configs.get(model), None
        divisor = form_named(form).divisor
        if alpha is None and config is not None and divisor is not None:
            rank = adapter[names[divisor]].shape[0]
            own = config.alphas.value(module, config.alpha)
            scale = own / (math.sqrt(rank) if config.rank_stabilized else rank)
        layers[model, path] = AdapterLayer(module, form, names, magnitude, alpha, scale)
        if scaled is not None and (bias, alpha) != (None, None):
            problems.append(f"{path} has {scaled} beside another bias or an alpha")
        elif scaled is not None:
            layers[model, path + _BIAS] = _of_bias(module, scaled, scale)
    if problems:
        raise misfit(problems, where)
    return layers


def _key_of(name: str, adapter: Mapping[str, Typed]) -> Key | None:
    """Return what a key says; LyCORIS calls the vector of an IA3 as any weight."""
    stem = name.removesuffix(".weight")
    side = f"{stem}.on_input"
    key = key_of(side if stem != name and side in adapter else name)
    return key and (key if name.endswith(key.end) else key._replace(part="vector"))


def _of_bias(module: str, name: str, scale: float | None) -> AdapterLayer:
    return AdapterLayer(module, "difference", (name,), None, None, scale)


def targets_of_keys(
    adapter: Mapping[str, Typed],
    base: Mapping[str, Typed],
    where: str,
    configs: Mapping[str, LoraConfig] | None = None,
) -> Targets:
    """Find the targets of an adapter without a config.  configs: as of `layers_of`.

    Raises Incompatible listing keys of no form that is known, or of no one module of the base.
    """
    layers = layers_of(adapter, where, configs or {})
    modules = modules_of({name: one.shape for name, one in base.items()})
    # A text encoder that the base does not have is left out; one that it has in part is wrong.
    own = {(model, path.removesuffix(_BIAS)) for model, path in layers}
    models = {model for model, _ in own & modules.keys()} | {DENOISER}
    products: list[Product] = []
    problems: list[str] = []
    without: list[str] = []
    for (model, path), layer in layers.items():
        places = modules.get((model, path.removesuffix(_BIAS)), ())
        if path.endswith(_BIAS):
            places = _of_biases(places, base)
        if not places and model not in models:
            more = (layer.magnitude, layer.alpha)
            without += (*layer.names, *(one for one in more if one is not None))
        elif len(places) != 1:
            told = " or ".join("+".join(one.tensor for one in some) for some in places)
            problems.append(f"{path} could be {told}" if told else f"{path} is not in the base")
        else:
            products += _products(layer, places[0])
    taken: dict[str, list[Product]] = {}
    for one in products:
        taken.setdefault(one.tensor, []).append(one)
    problems += [
        f"{tensor} has several products for the same rows"
        for tensor, several in taken.items()
        if _overlap(several)
    ]
    if problems:
        raise misfit(problems, where)
    return Targets(tuple(products), (), (), tuple(without))


def _of_biases(
    places: Sequence[Sequence[Place]], base: Mapping[str, Typed]
) -> tuple[tuple[Place, ...], ...]:
    """Return where the biases of modules are, of those that have any."""
    found = (
        tuple(one._replace(tensor=f"{one.tensor.removesuffix('weight')}bias") for one in some)
        for some in places
    )
    return tuple(some for some in found if all(one.tensor in base for one in some))


def _products(layer: AdapterLayer, places: Sequence[Place]) -> Iterator[Product]:
    """Yield the product of a layer, at each of its places."""
    for place in places:
        yield Product(
            place.tensor,
            layer.module,
            layer.form,
            layer.names,
            layer.magnitude,
            layer.alpha,
            layer.scale,
            first=place.first,
            rows=place.rows,
            at=place.at,
            total=sum(one.rows for one in places),
            settings=() if layer.form in MULTIPLIERS else None,
        )


def _overlap(products: Sequence[Product]) -> bool:
    ordered = sorted(products, key=lambda one: one.at)
    ends = [one.at + one.rows if one.rows else None for one in ordered]
    return any(end is None or end > after.at for end, after in zip(ends, ordered[1:], strict=False))
