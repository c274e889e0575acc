"""Tensors of a snapshot one by one, with the interface of `safetensors.safe_open`.

    with snapshot.safe_open("pt") as file:
        file.get_tensor("model.norm.weight")
        file.get_slice("model.embed_tokens.weight")[:1000]

A slice reads the blocks of its rows only.  Programs that take what safetensors opens take this; no
file and no mount is needed (huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from mstore.errors import BadRequest
from mstore.frameworks import to_torch
from mstore.view import SnapshotView, array_dtype

_NUMPY: Final = ("np", "numpy")
_TORCH: Final = ("pt", "torch", "pytorch")

_LEAST_LOADED: Final = 1 << 20
"""Smaller tensors are read by the caller's thread: starting others would take longer."""


class SafeOpen:
    """The tensors of a snapshot, read when they are asked for.

    framework: "np" or "numpy" for read-only arrays, "pt", "torch" or "pytorch" for torch tensors.
    device: where torch puts them.  names: which tensors, in this order.  load: reads a tensor with
    several threads, as an array that may be changed if it is told so.
    """

    def __init__(
        self,
        view: SnapshotView,
        names: Sequence[str],
        metadata: Mapping[str, str] | None,
        framework: str,
        device: Any,
        load: Callable[[str, bool], np.ndarray[Any, Any]],
    ) -> None:
        if framework not in (*_NUMPY, *_TORCH):
            raise BadRequest(f"framework is np or pt, not {framework!r}")
        self._view = view
        self._names = tuple(names)
        self._metadata = metadata
        self._device = device if framework in _TORCH else None
        self._is_torch = framework in _TORCH
        self._load = load

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing to close: the store that it reads from stays open."""

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._names)

    def offset_keys(self) -> list[str]:
        """Return the names in the order in which the tensors lie."""
        return list(self._names)

    def metadata(self) -> dict[str, str] | None:
        """Return the header's metadata, None if there is none."""
        return None if self._metadata is None else dict(self._metadata)

    def get_tensor(self, name: str) -> Any:
        """Return a tensor.  Raises NotFound, Corrupt, Incompatible, Unavailable (no torch)."""
        if self._view.record(name).nbytes < _LEAST_LOADED:
            return self._given(name, self._view.tensor(name))
        array = self._load(name, self._is_torch)
        return to_torch(name, array, self._device) if self._is_torch else array

    def get_slice(self, name: str) -> TensorSlice:
        """Return a tensor that is read when it is indexed.  Raises NotFound."""
        return TensorSlice(self, self._view, name)

    def _given(self, name: str, array: np.ndarray[Any, Any]) -> Any:
        return to_torch(name, array.copy(), self._device) if self._is_torch else array


class TensorSlice:
    """A tensor that is read when it is indexed, and only the rows that the index names."""

    def __init__(self, opened: SafeOpen, view: SnapshotView, name: str) -> None:
        self._opened = opened
        self._view = view
        self._name = name
        self._record = view.record(name)

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self._record.shape)

    def get_dtype(self) -> str:
        """Return the element type, as safetensors spells it: BF16."""
        return self._record.dtype

    def __getitem__(self, index: Any) -> Any:
        """Return what the index names, as numpy would: whole numbers, slices, `...`.

        Raises IndexError for a row that is not there, Corrupt, Incompatible, Unavailable.
        """
        record = self._record
        dtype = array_dtype(record.dtype)
        whole = index if isinstance(index, tuple) else (index,)
        if not record.shape or not whole or whole[0] is Ellipsis:
            array = self._view.tensor(self._name)
            return self._opened._given(self._name, array[index])
        first, rest = whole[0], whole[1:]
        start, stop, own = _rows(first, record.shape[0])
        row = math.prod(record.shape[1:]) * dtype.itemsize
        data = self._view.tensor_bytes(self._name, start * row, stop * row)
        rows = np.frombuffer(data, dtype=dtype).reshape(stop - start, *record.shape[1:])
        return self._opened._given(self._name, rows[(own, *rest)])


def _rows(index: Any, count: int) -> tuple[int, int, Any]:
    """Return the first and the last + 1 of the rows that an index names, and its place in them."""
    if isinstance(index, slice):
        start, stop, step = index.indices(count)
        named = range(start, stop, step)
        if not named:
            return 0, 0, slice(None)
        low, high = min(named[0], named[-1]), max(named[0], named[-1]) + 1
        return low, high, slice(None, None, step)
    number = operator.index(index)
    if not -count <= number < count:
        raise IndexError(f"row {number} of {count}")
    number += count if number < 0 else 0
    return number, number + 1, 0
