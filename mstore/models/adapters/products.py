"""Products: what the tensors of an adapter make of a base's tensors, by name, and whether it fits.

Whatever the adapter's form, these are what planning and merging know of it.  Reads nothing: types
and shapes come from records, or from the headers of files that are not stored yet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, Protocol

import msgspec

from mstore.models.adapters.forms import FORMS, FactorForm, product_shape
from mstore.models.adapters.multipliers import MULTIPLIERS, MultiplierForm
from mstore.numeric.codes import CODES, cast_hint
from mstore.terms.errors import Incompatible

_LISTED: Final = 8
WHOLE: Final = "I64"
"""The type of a whole number that an adapter may have, as torch writes it."""


class Typed(Protocol):
    """What has an element type and a shape: a tensor's record, or its entry in a header."""

    @property
    def dtype(self) -> str:
        """The element type, as safetensors spells it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions."""


class Product(msgspec.Struct, frozen=True):
    """A base's tensor and the adapter's tensors of its product.

    module: what the adapter calls the layer. form: how these tensors make a product. names: the
    adapter's tensors, in the form's order. magnitude: of DoRA. alpha: the tensor with the number
    that the product is multiplied by and its rank divides. scale: what it is multiplied by, if
    a header says so; None for both: the config says.
    first, rows, at: rows of the product from `first` on come to the tensor's from `at` on, so
    many; all if 0. total: how many the product has, if not as many as the tensor. settings: numbers
    of the config that a multiplier needs (`multipliers`); None for a sum.
    """

    tensor: str
    module: str
    form: str
    names: tuple[str, ...]
    magnitude: str | None = None
    alpha: str | None = None
    scale: float | None = None
    first: int = 0
    rows: int = 0
    at: int = 0
    total: int = 0
    settings: tuple[float, ...] | None = None


class Targets(msgspec.Struct, frozen=True):
    """What an adapter does to a base, by names.

    products: low-rank changes. replaced: (tensor of the base, tensor of the adapter), trained
    whole. kept: the same, where the adapter repeats the base's weights below a product. without:
    tensors of text encoders, where the base has none.
    """

    products: tuple[Product, ...]
    replaced: tuple[tuple[str, str], ...]
    kept: tuple[tuple[str, str], ...]
    without: tuple[str, ...] = ()


def form_named(name: str) -> FactorForm | MultiplierForm:
    """Return a form, of a sum or of a multiplier."""
    return FORMS.get(name) or MULTIPLIERS[name]


def misfit(problems: list[str], where: str) -> Incompatible:
    """Return the error for an adapter of which some tensors belong to none of the base."""
    more = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
    return Incompatible(
        f"the adapter does not fit the base: {'; '.join(problems[:_LISTED])}{more}", where=where
    )


def require_product(
    product: Product, base: Mapping[str, Typed], adapter: Mapping[str, Typed], where: str
) -> int:
    """Return a product's rank.  Raises Incompatible unless it fits the base and can be computed."""
    name, own = product.tensor, base[product.tensor]
    theirs = [adapter[one] for one in product.names]
    # LyCORIS has a whole number that says which side an IA3 is of.
    own_types = {one.dtype for one in theirs if one.dtype != WHOLE or math.prod(one.shape) != 1}
    dtypes = {own.dtype, *own_types}
    if not dtypes <= CODES.keys():
        odd = dtypes - CODES.keys()
        raise Incompatible(
            f"cannot apply an adapter to elements of {', '.join(sorted(odd))}",
            where=where,
            hint=cast_hint(odd, "REF"),
        )
    shapes = [one.shape for one in theirs]
    if product.settings is not None:
        try:
            if product.magnitude is not None or product.rows or not all(own.shape):
                raise ValueError("DoRA, rows of a tensor and empty tensors are not multiplied")
            MULTIPLIERS[product.form].require(own.shape, *shapes)
        except ValueError as error:
            raise Incompatible(
                f"the adapter has {' and '.join(str(list(one)) for one in shapes)} for {name}, "
                f"{list(own.shape)} in the base, which it cannot multiply ({error})",
                where=where,
            ) from error
        return 0
    try:
        if len(own.shape) < 2 and product.form != "difference":
            raise ValueError("mstore applies products of matrices to matrices")
        rows, columns, rank = product_shape(product.form, shapes)
    except ValueError as error:
        raise Incompatible(
            f"the adapter has {' and '.join(str(list(one)) for one in shapes)} for {name}, "
            f"{list(own.shape)} in the base, which make no product of matrices ({error})",
            where=where,
        ) from error
    wanted = product.total or own.shape[0], math.prod(own.shape[1:])
    if not own.shape or not FORMS[product.form].fits((rows, columns), wanted):
        raise Incompatible(
            f"the adapter's product for {name} has shape {[rows, columns]}, the base "
            f"{list(own.shape)}",
            where=where,
        )
    if product.magnitude is not None:
        _require_magnitudes(product, own, adapter, where)
    return rank


def _require_magnitudes(
    product: Product, own: Typed, adapter: Mapping[str, Typed], where: str
) -> None:
    name = product.tensor
    assert product.magnitude is not None
    found = adapter[product.magnitude]
    rows = own.shape[0]
    is_of_rows = found.shape[:1] == (rows,) and math.prod(found.shape) == rows
    if not rows or not is_of_rows or found.dtype not in CODES or product.rows:
        raise Incompatible(
            f"the magnitudes of {name} are {found.dtype} {list(found.shape)}: mstore applies one "
            "for each row of a whole tensor",
            where=where,
        )


def divisor_of(product: Product, adapter: Mapping[str, Typed]) -> int:
    """Return what a product's alpha is divided by."""
    divisor = form_named(product.form).divisor
    return 1 if divisor is None else adapter[product.names[divisor]].shape[0]
