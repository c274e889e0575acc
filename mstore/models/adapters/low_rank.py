"""Low-rank products: the elements of an applied tensor, for one run of them at a time.

An element is base + scale * sum, where the sum adds the products left[i, r] * right[r, j] in
float32, one after the other by r.  So it is the same on every machine, for any runs, and equals
PEFT's within rounding.  DoRA then gives each row its norm.  Other adapters multiply the base
(`multipliers`).  Never holds a whole product.

Every call may run in any thread and releases the GIL for its pass.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from mstore.blocks.reader import Meter
from mstore.models.adapters.forms import FORMS, Pair, stacked
from mstore.models.adapters.multipliers import MULTIPLIERS, BaseProduct, Multiplier, VectorScale
from mstore.models.adapters.products import WHOLE
from mstore.numeric.casts import singles
from mstore.numeric.codes import CODES, ITEMSIZES
from mstore.numeric.passes import Pass
from mstore.store.catalog import Catalog
from mstore.store.objects.tensor import AppliedTensor, FactoredProduct, MultipliedTensor, Tensor
from mstore.store.remembered import Recent

_BLOCK: Final = 32, 64
"""The most rows, and columns, that a pass computes at a time."""
_PANEL: Final = 1 << 22
"""So many elements of a tensor are read at a time, or a block."""
PRODUCTS: Final = ("models/adapters/low_rank.c", "numeric/codes.py")
"""The source of the passes that compute products."""
_ROWS: Final = ("numeric/floats.py", "models/adapters/low_rank_passes.py")
_apply: Final = Pass("mstore.models.adapters.low_rank", "apply", "ipiiiippp", PRODUCTS)
_squares: Final = Pass("mstore.models.adapters.low_rank", "squares", "pipiiiipp", PRODUCTS)
_scale_rows: Final = Pass("mstore.models.adapters.low_rank_passes", "scale_rows", "piip", _ROWS)

_PRODUCT: Final = np.dtype(
    [("left", "i8"), ("right", "i8"), ("rank", "i8"), ("scale", "f4"), ("weight", "f4")]
)

Singles = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]


class Squares(NamedTuple):
    """Sums of squares: of the widest column of right, of all of right, and of rows of each chunk.

    chunks: of the rows that a chunk has a part of, in the product; in left; of the longest in left.
    """

    widest: float
    right: float
    chunks: list[tuple[float, float, float]]


class Factors(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What an applied tensor is made of beside its base, in memory.

    left: float32[rows, rank]. right: float32[rank, columns]. scale: float32[1]. magnitude:
    float32[rows] for DoRA, else None. multiplier: of the base, else None; then the product is
    empty, and nothing else is applied.
    """

    left: Singles
    right: Singles
    scale: Singles
    magnitude: Singles | None
    multiplier: Multiplier | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        more = sum(one.nbytes for one in (self.magnitude, self.multiplier) if one is not None)
        return int(self.left.nbytes + self.right.nbytes + more)

    @property
    def is_sum(self) -> bool:
        """Whether base + product is all."""
        return self.magnitude is None and self.multiplier is None

    def apply(self, base: Bytes, dtype: str, first: int, n: int, out: Bytes) -> None:
        """Write elements [first, first + n) of the applied tensor: uint8[>= 4 n] of float32.

        base: the stored bytes of these elements, of type `dtype`.  Whole rows, unless it is a sum.
        """
        if self.multiplier is not None:
            self._multiply(self.multiplier, base, dtype, first, n, out)
            return
        run, products, block = operands([self], [1.0], base, dtype, first, n)
        assert out.size >= 4 * n
        _apply(*run, products.ctypes.data, block.ctypes.data, out.ctypes.data)
        if self.magnitude is not None:
            columns = self.right.shape[1]
            assert first % columns == 0
            assert n % columns == 0
            start, rows = first // columns, n // columns
            own = self.magnitude[start : start + rows]
            _scale_rows(out.ctypes.data, rows, columns, own.ctypes.data)

    def _multiply(
        self, multiplier: Multiplier, base: Bytes, dtype: str, first: int, n: int, out: Bytes
    ) -> None:
        columns, start = self.right.shape[1], first // self.right.shape[1]
        assert first % columns == 0
        assert n % columns == 0
        found = out[: 4 * n].view(np.float32).reshape(-1, columns)
        own = singles(base[: n * ITEMSIZES[dtype]], dtype, n).reshape(-1, columns)
        if isinstance(multiplier, VectorScale):
            values = multiplier.values
            scale = values[start : start + len(own), None] if multiplier.of_rows else values
            with np.errstate(all="ignore"):
                np.multiply(own, scale, out=found)
            found[np.isnan(found)] = np.nan
            return
        if isinstance(multiplier, BaseProduct):
            # Rows of inputs, one for each place of a convolution.
            inputs = len(multiplier.a)
            places = own.reshape(len(own), inputs, -1).transpose(0, 2, 1).reshape(-1, inputs)
            nothing = np.zeros((len(places), multiplier.a.shape[1]), np.float32)
            left = _added(nothing, places, multiplier.a)
            made = _added(places, left, multiplier.b, multiplier.scale)
            made = made.reshape(len(own), -1, inputs).transpose(0, 2, 1).reshape(own.shape)
            up = multiplier.up[start : start + len(own)]
            found[:] = _added(made, up, multiplier.down, multiplier.scale)
            return
        size = multiplier.changes.shape[1]
        if multiplier.of_rows:
            assert start % size == len(own) % size == 0
            for at in range(0, len(own), size):
                change = multiplier.changes[(start + at) // size]
                found[at : at + size] = _added(own[at : at + size], change, own[at : at + size])
            if multiplier.scales is not None:
                found *= multiplier.scales[start : start + len(own), None]
                found[np.isnan(found)] = np.nan
            return
        for number, change in enumerate(multiplier.changes):
            run = slice(number * size, (number + 1) * size)
            rows = np.ascontiguousarray(own[:, run])
            found[:, run] = _added(rows, rows, change)

    def squares(self, n: int, chunk: int) -> Squares:
        """Return sums of squares of left @ right, of n elements, and of what it is made of.

        From the factors alone, without scale and magnitude.  A row of the product is off by at most
        (columns + 2 rank) 2^-52 times the squares of its row of left and of all of right.
        """
        rows, rank = self.left.shape
        columns = self.right.shape[1]
        scratch = np.empty(rank * (rank + 128) + 2 * (rows + 8), dtype=np.float64)
        out = np.empty(2 + 3 * -(-n // chunk), dtype=np.float64)
        addresses = (self.left.ctypes.data, rows, self.right.ctypes.data, rank, columns)
        _squares(*addresses, n, chunk, scratch.ctypes.data, out.ctypes.data)
        widest, right, *chunks = out.tolist()
        return Squares(widest, right, list(zip(*[iter(chunks)] * 3, strict=True)))


_ONE: Final = np.ones(1, dtype=np.float32)


def _added(base: Singles, left: Singles, right: Singles, scale: Singles = _ONE) -> Singles:
    """Return base + scale * left @ right, as a pass computes it."""
    base, left, right = map(np.ascontiguousarray, (base, left, right))
    out = np.empty(4 * base.size, np.uint8)
    data = base.reshape(-1).view(np.uint8)
    Factors(left, right, scale, None).apply(data, "F32", 0, base.size, out)
    return out.view(np.float32).reshape(base.shape)


class Operands(NamedTuple):
    """What a pass over a run of elements takes first; valid while base and factors are kept.

    run: code and address of the base; elements of the first row before the run, elements, rows,
    columns. products: of each expert. block: scratch.
    """

    run: tuple[int, ...]
    products: npt.NDArray[np.void]
    block: Singles


def operands(
    factors: Sequence[Factors],
    weights: Sequence[float],
    base: Bytes,
    dtype: str,
    first: int,
    n: int,
) -> Operands:
    """Return what a pass takes for elements [first, first + n) of the products of one tensor.

    base: the stored bytes of these elements, of type `dtype`, contiguous.
    """
    columns = factors[0].right.shape[1]
    start, skipped = divmod(first, columns)
    rows = -(-(skipped + n) // columns)
    assert base.size >= n * ITEMSIZES[dtype]
    assert all(one.right.shape[1] == columns for one in factors)
    assert all(len(one.left) >= start + rows for one in factors)
    products = np.array(
        [
            (one.left[start:].ctypes.data, one.right.ctypes.data, len(one.right), one.scale[0], own)
            for one, own in zip(factors, weights, strict=True)
        ],
        dtype=_PRODUCT,
    )
    rows_of_block, panel = _BLOCK
    block = np.empty(panel * (2 * rows_of_block + int(products["rank"].max())), dtype=np.float32)
    run = CODES[dtype], base.ctypes.data, skipped, n, rows, columns
    return Operands(run, products, block)


class FactorCache:
    """Factors that were read, the last ones used; safe for any number of threads.

    Each product is charged to `meter` when it is first read.  One that is read again, because
    others took its place, is not charged again.
    """

    def __init__(self, catalog: Catalog, meter: Meter | None, limit: int = 64 << 20) -> None:
        self._catalog = catalog
        self._meter = meter
        self._lock = threading.Lock()
        self._kept: Recent[AppliedTensor, Factors] = Recent(limit)
        self._charged: set[AppliedTensor] = set()

    def of(self, records: Iterable[AppliedTensor]) -> dict[AppliedTensor, Factors]:
        """Return the factors of applied tensors; raises as `load_factors`."""
        with self._lock:
            wanted = dict.fromkeys(records)
            known = ((one, self._kept.get(one)) for one in wanted)
            found = {one: factors for one, factors in known if factors is not None}
            missing = [one for one in wanted if one not in found]
            again = [one for one in missing if one in self._charged]
            first = [one for one in missing if one not in self._charged]
            # A failure leaves the charge: those bytes may have been read.
            self._charged.update(first)
            for news, meter in ((first, self._meter), (again, None)):
                found |= zip(news, load_factors(self._catalog, news, meter), strict=True)
            for one in missing:
                self._kept.put(one, found[one], found[one].nbytes)
            return found


def load_factors(
    catalog: Catalog, records: Sequence[AppliedTensor], meter: Meter | None
) -> list[Factors]:
    """Read the factors of products, with one look into the index; `meter` counts their bytes at
    rest.

    Raises BudgetExceeded, Corrupt, StorageFailed.
    """
    read = iter(read_singles(catalog, [one for own in records for one in own.factors], meter))
    found = []
    for record in records:
        if isinstance(record, MultipliedTensor):
            [product], shape = record.products, record.base.shape
            form = MULTIPLIERS[product.form]
            settings = (*record.settings, product.scale)
            multiplier = form.made(shape, settings, *(next(read) for _ in product.factors))
            empty = np.empty((0, math.prod(shape[1:])), np.float32)
            rows = np.empty((shape[0], 0), np.float32)
            found.append(Factors(rows, empty, np.ones(1, np.float32), None, multiplier))
            continue
        made = []
        for product in record.products:
            left, right = FORMS[product.form].factors(*(next(read) for _ in product.factors))
            # Matrices of all layers are as wide as the widest.
            made.append((product, (left, right[:, : math.prod(record.shape[1:])])))
        magnitude = None if record.magnitude is None else next(read).reshape(-1)
        found.append(_joined(made, record.shape[0], magnitude))
    return found


def _joined(
    made: Sequence[tuple[FactoredProduct, Pair]], rows: int, magnitude: Singles | None
) -> Factors:
    """Return products of some rows each as one of all rows."""
    if len(made) == 1 and (made[0][0].at, made[0][0].rows) == (0, rows):
        [(product, (left, right))] = made
        scale = np.array([product.scale], dtype=np.float32)
        left = np.ascontiguousarray(left[product.first : product.first + rows])
        return Factors(left, np.ascontiguousarray(right), scale, magnitude)
    parts = []
    for product, (own, other) in made:
        taken = own[product.first : product.first + product.rows]
        parts.append((product.at, np.float32(product.scale) * taken, other))
    left, right = stacked(rows, parts)
    return Factors(left, right, np.ones(1, dtype=np.float32), magnitude)


def stored_bytes(catalog: Catalog, records: Sequence[AppliedTensor]) -> list[int]:
    """Return bytes at rest of each one's factors: what `load_factors` charges.  Raises Corrupt."""
    lists = [one.blocks for record in records for one in record.factors]
    lengths = iter(catalog.lengths.of(lists))
    return [sum(int(next(lengths).sum()) for _ in record.factors) for record in records]


def read_singles(
    catalog: Catalog, records: Sequence[Tensor], meter: Meter | None = None
) -> list[Singles]:
    """Return stored tensors as float32, each of its shape; also those of whole numbers."""
    data = catalog.read_blocks([block for one in records for block in one.block_ids()], meter)
    found, end = [], 0
    for one in records:
        own = data[end : end + one.nbytes]
        end += one.nbytes
        if own.ctypes.data % 8:
            own = own.copy()
        is_whole = one.dtype == WHOLE
        values = own.view(np.int64) if is_whole else singles(own, one.dtype, math.prod(one.shape))
        found.append(values.astype(np.float32, copy=False).reshape(one.shape))
    return found


def read_panels(catalog: Catalog, records: Sequence[Tensor]) -> Iterator[list[Singles]]:
    """Yield the elements of tensors of one shape as float32, some blocks at a time."""
    count = math.prod(records[0].shape)
    # Both are powers of two, so a step is whole blocks of any type.
    step = max(_PANEL, catalog.block_size)
    for start in range(0, count, step):
        end = min(start + step, count)
        yield [_elements(catalog, one, start, end) for one in records]


def _elements(catalog: Catalog, record: Tensor, start: int, end: int) -> Singles:
    """Return some elements, the first one of a block."""
    each = catalog.block_size // ITEMSIZES[record.dtype]
    numbers = range(start // each, -(-end // each))
    data = catalog.read_blocks([record.block(number) for number in numbers])
    return singles(data, record.dtype, end - start)
