"""Low-rank products: the elements of an applied tensor, for one run of them at a time.

An element is base + scale * sum, where the sum adds the products left[i, r] * right[r, j] in
float32, one after the other by r.  So it is the same on every machine, for any runs, and equals
PEFT's within rounding.  DoRA then gives each row its norm.  Never holds a whole product.

Every call may run in any thread and releases the GIL for its pass.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from mstore.blocks.reader import Meter
from mstore.numeric.casts import singles
from mstore.numeric.codes import CODES, ITEMSIZES
from mstore.numeric.passes import Pass
from mstore.store.catalog import Catalog
from mstore.store.objects.tensor import AppliedTensor, Tensor
from mstore.terms.ids import TensorId

_BLOCK: Final = 32
"""Rows, and columns, that a pass computes at a time."""
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
    """The factors of one product in memory.

    left: float32[rows, rank]. right: float32[rank, columns]. scale: float32[1]. magnitude:
    float32[rows] for DoRA, else None.
    """

    left: Singles
    right: Singles
    scale: Singles
    magnitude: Singles | None

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        more = 0 if self.magnitude is None else self.magnitude.nbytes
        return int(self.left.nbytes + self.right.nbytes + more)

    def apply(self, base: Bytes, dtype: str, first: int, n: int, out: Bytes) -> None:
        """Write elements [first, first + n) of the applied tensor: uint8[>= 4 n] of float32.

        base: the stored bytes of these elements, of type `dtype`.  With magnitudes, whole rows.
        """
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
    block = np.empty(_BLOCK * (3 * _BLOCK + int(products["rank"].max())), dtype=np.float32)
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
        self._limit = limit
        self._lock = threading.Lock()
        self._kept: OrderedDict[TensorId, Factors] = OrderedDict()
        self._size = 0
        self._charged: set[TensorId] = set()

    def of(self, record: AppliedTensor) -> Factors:
        """Return the factors of an applied tensor; raises as `load_factors`."""
        id = record.id()
        with self._lock:
            found = self._kept.get(id)
            if found is not None:
                self._kept.move_to_end(id)
                return found
            # A failure leaves the charge: those bytes may have been read.
            meter = None if id in self._charged else self._meter
            self._charged.add(id)
            found = self._kept[id] = load_factors(self._catalog, record, meter)
            self._size += found.nbytes
            while self._size > self._limit and len(self._kept) > 1:
                _, gone = self._kept.popitem(last=False)
                self._size -= gone.nbytes
            return found


def load_factors(catalog: Catalog, record: AppliedTensor, meter: Meter | None) -> Factors:
    """Read the factors of a product; `meter` counts their bytes at rest.

    Raises BudgetExceeded, Corrupt, StorageFailed.
    """
    left, right = (read_singles(catalog, one, meter) for one in (record.left, record.right))
    if record.transposed:
        left, right = left.T, right.T
    magnitude = None
    if record.magnitude is not None:
        magnitude = read_singles(catalog, record.magnitude, meter).reshape(-1)
    return Factors(
        np.ascontiguousarray(left),
        np.ascontiguousarray(right),
        np.array([record.scale], dtype=np.float32),
        magnitude,
    )


def stored_bytes(catalog: Catalog, record: AppliedTensor) -> int:
    """Return bytes at rest of the factors: what `load_factors` charges.  Raises Corrupt."""
    blocks = [bytes(block) for one in record.factors for block in one.block_ids()]
    return int(catalog.stored_lengths(blocks).sum())


def read_singles(catalog: Catalog, record: Tensor, meter: Meter | None = None) -> Singles:
    """Return a stored tensor as float32, of its shape."""
    data = catalog.read_blocks(list(record.block_ids()), meter)
    return singles(data, record.dtype, math.prod(record.shape)).reshape(record.shape)
