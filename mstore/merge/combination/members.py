"""The adapters of a combination: their products by module, read from configs and records.

Owns what can be combined; the rest is refused by the name of the tensor or of the setting.  Reads
no weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec

from mstore.checkpoint.strict_json import json_object
from mstore.models.adapters.config import CONFIG, LORA, MAX_CONFIG, LoraConfig, parse_config
from mstore.models.adapters.forms import product_shape
from mstore.models.adapters.image import configs_of, layers_of
from mstore.models.adapters.low_rank import read_singles
from mstore.models.adapters.targets import (
    has_keys,
    is_adapter,
    is_scaled_bias,
    is_unchanged,
    pairs_of,
)
from mstore.models.made import metadata_of
from mstore.numeric.codes import CODES, cast_hint
from mstore.store.catalog import Catalog
from mstore.store.models import models_in
from mstore.store.objects.canonical import DEFAULT_LIMITS
from mstore.store.objects.snapshot import BASE
from mstore.store.objects.tensor import Tensor
from mstore.terms.errors import BadRequest, Incompatible
from mstore.terms.ids import SnapshotId, TensorId
from mstore.terms.phrases import call, few, phrase

_NAMED: Final = 4
INSTEAD: Final = phrase(
    "merge the adapters into their base, which takes all of them: {help}",
    help=call("merge", help=True),
)


class AdapterProduct(msgspec.Struct, frozen=True):
    """One product of an adapter.

    down: float[rank, columns]. up: float[rows, rank]; those of a convolution have more dimensions,
    and count as such. scale: what the product is multiplied by. names: of down and up, as this
    adapter has them.
    """

    down: Tensor
    up: Tensor
    scale: float
    embedding: bool
    names: tuple[str, str]

    @property
    def rank(self) -> int:
        """The rank."""
        return self.down.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of up @ down."""
        return self.up.shape[0], math.prod(self.down.shape[1:])

    @property
    def nbytes(self) -> int:
        """Length of both factors in bytes."""
        return self.up.nbytes + self.down.nbytes


class AdapterMember(msgspec.Struct, frozen=True):
    """An adapter to combine.

    products: by module. unchanged: tensors that repeat the base's below a product, by name. whole:
    the others, by name: they replace the base's. settings: its config. bases: what it was added as
    an adapter of. weights: the path of its file, if its keys say all (it has no config), else None.
    """

    name: str
    snapshot: SnapshotId
    weight: float
    config: LoraConfig
    products: Mapping[str, AdapterProduct]
    unchanged: Mapping[str, TensorId]
    whole: Mapping[str, TensorId]
    settings: Mapping[str, Any]
    bases: tuple[SnapshotId, ...]
    weights: str | None = None

    @property
    def names(self) -> list[str]:
        """The names of all its tensors."""
        factors = [name for one in self.products.values() for name in one.names]
        return [*factors, *self.unchanged, *self.whole]


def members_of(
    catalog: Catalog, adapters: Sequence[tuple[str, SnapshotId, float]]
) -> tuple[AdapterMember, ...]:
    """Return adapters, each named by what it was asked for as, that can be combined.

    Raises BadRequest (none, too many), Incompatible, Corrupt, StorageFailed.
    """
    if not adapters:
        raise BadRequest("there is no adapter to combine")
    if len(adapters) > DEFAULT_LIMITS.experts:
        raise BadRequest(f"{len(adapters)} adapters; the limit is {DEFAULT_LIMITS.experts}")
    found = tuple(_member(catalog, *one) for one in adapters)
    for one, other in pairwise(found):
        if one.config.transposed != other.config.transposed:
            raise Incompatible(
                f"is transposed, or {one.name} is: one of them is of another base (fan_in_fan_out)",
                where=other.name,
            )
    _require_same_modules(found)
    return found


def _member(catalog: Catalog, name: str, id: SnapshotId, weight: float) -> AdapterMember:
    snapshot = catalog.snapshot(id)
    manifest = catalog.manifest(snapshot.manifest_id())
    models = models_in(catalog, manifest)
    own = models.meant(name)
    tensors = models.in_model(own)
    raw = catalog.read_small(manifest.file(models.named[own].path(CONFIG)), MAX_CONFIG)
    bases = tuple(snapshot.of_role(BASE))
    if raw is None and has_keys(tensors):
        return _of_keys(catalog, name, id, weight, models.named[own].files[0], tensors, bases)
    if raw is None or not is_adapter(tensors):
        raise Incompatible(
            f"is not a LoRA adapter with its {CONFIG}",
            where=name,
            hint=phrase(
                "{extract} makes an adapter of a fine-tune",
                extract=call("extract_lora", name, base="BASE", name="NAME"),
            ),
        )
    config, settings = parse_config(raw, name), json_object(raw)
    if config.kind != LORA:
        raise Incompatible(
            f"is a {config.kind}, and mstore combines products of LoRA", where=name, hint=INSTEAD
        )
    pairs, problems = pairs_of(tensors)
    for what in problems:
        raise Incompatible(what, where=name)
    if config.dora or any(pair.magnitudes for pair in pairs):
        raise Incompatible(
            "the products of DoRA have norms of their own, which do not add (use_dora)",
            where=name,
            hint=INSTEAD,
        )
    if settings.get("ensure_weight_tying"):
        raise Incompatible(
            "its output layer repeats the product of its embeddings (ensure_weight_tying)",
            where=name,
            hint="combine adapters that were saved without it",
        )
    used = {one for pair in pairs for one in pair.names}
    unchanged = {one: id for one, id in tensors.items() if is_unchanged(one)}
    whole = {one: id for one, id in tensors.items() if one not in used and one not in unchanged}
    biases = [one for one in whole if is_scaled_bias(one)]
    if biases:
        raise Incompatible(
            f"has biases of its products: {few(biases, _NAMED)} (lora_bias)",
            where=name,
            hint=INSTEAD,
        )
    records = iter(
        catalog.tensors([tensors[one] for pair in pairs for one in (pair.down, pair.up)])
    )
    products = {
        pair.module: AdapterProduct(
            next(records),
            next(records),
            config.scale_of(pair.module),
            pair.embedding,
            (pair.down, pair.up),
        )
        for pair in pairs
    }
    if len(products) < len(pairs):
        raise Incompatible("has two products for one module", where=name)
    for module, product in products.items():
        _require_matrices(module, product, config, name)
    return AdapterMember(name, id, weight, config, products, unchanged, whole, settings, bases)


_PLAIN: Final = parse_config(b'{"peft_type": "LORA"}', "an adapter")


def _of_keys(
    catalog: Catalog,
    name: str,
    id: SnapshotId,
    weight: float,
    file: str,
    tensors: Mapping[str, TensorId],
    bases: tuple[SnapshotId, ...],
) -> AdapterMember:
    """Return an adapter without a config.  Its modules are called by model and path."""
    stored = dict(zip(tensors, catalog.tensors(list(tensors.values())), strict=True))
    weights = catalog.manifest_of(id).file(file)
    metadata = None if weights is None else metadata_of(catalog.read_parts(weights.parts[:1]))
    layers = layers_of(stored, name, configs_of(metadata, name))
    products: dict[str, AdapterProduct] = {}
    numbers = iter(
        read_singles(catalog, [stored[one.alpha] for one in layers.values() if one.alpha])
    )
    for (model, path), one in layers.items():
        if one.form != "lora" or one.magnitude is not None:
            what = "DoRA" if one.form == "lora" else one.form
            raise Incompatible(
                f"{path} is {what}, and mstore combines products of LoRA", where=name, hint=INSTEAD
            )
        up, down = (stored[part] for part in one.names)
        scale = float(next(numbers).reshape(())) / down.shape[0] if one.alpha else one.scale
        products[f"{model}: {path}"] = AdapterProduct(
            down, up, 1.0 if scale is None else scale, False, (one.names[1], one.names[0])
        )
    for module, product in products.items():
        _require_matrices(module, product, None, name)
    return AdapterMember(name, id, weight, _PLAIN, products, {}, {}, {}, bases, file)


def _require_matrices(
    module: str, product: AdapterProduct, config: LoraConfig | None, where: str
) -> None:
    up, down = product.up, product.down
    odd = {up.dtype, down.dtype} - CODES.keys()
    if odd:
        raise Incompatible(
            f"cannot combine elements of {', '.join(sorted(odd))}",
            where=where,
            hint=cast_hint(odd, where),
        )
    try:
        if config is not None and not len(up.shape) == len(down.shape) == 2:
            raise ValueError("no matrices")
        product_shape("lora", [up.shape, down.shape])
    except ValueError as error:
        raise Incompatible(
            f"has {list(up.shape)} and {list(down.shape)} for {module}: mstore combines products "
            "of matrices",
            where=where,
        ) from error
    if config is not None and product.rank != config.rank_of(module):
        raise Incompatible(
            f"its product for {module} has rank {product.rank}, its {CONFIG} says "
            f"{config.rank_of(module)}",
            where=where,
        )


_STYLES: Final = {
    "the authors of the model": re.compile(
        r"denoiser: (input_blocks|middle_block|output_blocks|double_blocks|single_blocks)_"
    ),
    "diffusers": re.compile(
        r"denoiser: (down_blocks|mid_block|up_blocks|transformer_blocks|single_transformer_blocks)_"
    ),
}


def _styles(member: AdapterMember) -> Iterator[str]:
    """Yield whose names an adapter of an image model has for its layers."""
    if member.weights is not None:
        for style, pattern in _STYLES.items():
            if any(map(pattern.match, member.products)):
                yield style


def _require_same_modules(members: Sequence[AdapterMember]) -> None:
    """Raise Incompatible for products that differ in shape, or modules in how they are named."""
    for one, other in pairwise(members):
        if (one.weights is None) != (other.weights is None):
            with_config, without = (one, other) if one.weights is None else (other, one)
            raise Incompatible(
                f"has keys of image models, and {with_config.name} is PEFT's", where=without.name
            )
    first: dict[str, AdapterMember] = {}
    unchanged: dict[str, tuple[TensorId, AdapterMember]] = {}
    for member in members:
        for module, product in member.products.items():
            own = first.setdefault(module, member)
            before = own.products[module]
            if (before.shape, before.embedding) != (product.shape, product.embedding):
                raise Incompatible(
                    f"its product for {module} has shape {list(product.shape)}, that of "
                    f"{own.name} {list(before.shape)}",
                    where=member.name,
                )
        for name, id in member.unchanged.items():
            known, other = unchanged.setdefault(name, (id, member))
            if known != id:
                raise Incompatible(
                    f"was trained on other weights of {name} than {other.name}", where=member.name
                )
    styles = [(style, one) for one in members for style in _styles(one)]
    for (style, one), (other_style, other) in pairwise(styles):
        if style != other_style:
            raise Incompatible(
                f"names layers as {other_style} do, and {one.name} as {style}: combine adapters "
                "with names of one kind, or merge them into their base",
                where=other.name,
            )
    for module, member in first.items():
        rest = module
        while "." in rest:
            rest = rest.partition(".")[2]
            if rest not in first or rest in member.products:
                continue
            other = first[rest]
            if module not in other.products:
                raise Incompatible(
                    f"has {module}, and {other.name} has {rest}: they name the modules of one "
                    "base in two ways",
                    where=member.name,
                )
