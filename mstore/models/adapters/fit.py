"""Whether an adapter fits a base: shapes, ranks and types of its factors.

Takes types and shapes, from records or from the headers of files that are not stored yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from mstore.models.adapters.config import CONFIG, LoraConfig, parse_config
from mstore.models.adapters.targets import Product, Targets, is_adapter, targets_of
from mstore.numeric.codes import CODES, cast_hint
from mstore.terms.errors import Incompatible

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
