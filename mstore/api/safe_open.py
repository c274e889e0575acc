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
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Final, Protocol, Self

import numpy as np

from mstore.store.objects.tensor import Tensor, VirtualTensor
from mstore.store.view import SnapshotView, array_form
from mstore.terms.errors import BadRequest, Unavailable

_NUMPY: Final = ("np", "numpy")
_TORCH: Final = ("pt", "torch", "pytorch")

_LEAST_LOADED: Final = 1 << 20
"""Smaller tensors are read by the caller's thread: starting others would take longer."""


class Source(Protocol):
    """The snapshot that it reads: a `Snapshot`."""

    def _view(self, file: str | None) -> SnapshotView: ...

    def _load_one(
        self, view: SnapshotView, name: str, *, for_torch: bool
    ) -> np.ndarray[Any, Any]: ...


class SafeOpen:
    """The tensors of a snapshot, read when they are asked for.

    framework: "np" or "numpy" for read-only arrays, "pt", "torch" or "pytorch" for torch tensors.
    device: where torch puts them.  file: whose tensors and metadata; None: those of all files.

    It may travel to other processes, as its snapshot may.
    """

    def __init__(self, snapshot: Source, framework: str, device: Any, file: str | None) -> None:
        if framework not in (*_NUMPY, *_TORCH):
            raise BadRequest(f"framework is np or pt, not {framework!r}")
        self._snapshot = snapshot
        self._device = device if framework in _TORCH else None
        self._is_torch = framework in _TORCH
        self._file = file
        self._kept: tuple[SnapshotView, list[str], dict[str, str] | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_kept": None}

    def _opened(self) -> tuple[SnapshotView, list[str], dict[str, str] | None]:
        """Return the view, the names of the tensors and the metadata.

        Raises NotFound (no such file).
        """
        if self._kept is None:
            view, file = self._snapshot._view(self._file), self._file
            if file is None and len(files := view.tensor_files()) == 1:
                (file,) = files
            self._kept = view, *((list(view.tensors), None) if file is None else view.header(file))
        return self._kept

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close: the store that it reads from stays open."""

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._opened()[1])

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, name: object) -> bool:
        return name in self._opened()[1]

    def offset_keys(self) -> list[str]:
        """Return the names in the order in which the tensors lie."""
        return list(self._opened()[1])

    def metadata(self) -> dict[str, str] | None:
        """Return the header's metadata, None if there is none."""
        metadata = self._opened()[2]
        return None if metadata is None else dict(metadata)

    def get_tensor(self, name: str) -> Any:
        """Return a tensor.  Raises NotFound, Corrupt, Incompatible, Unavailable (no torch)."""
        view = self._opened()[0]
        record = view.record(name)
        if record.nbytes < _LEAST_LOADED:
            return self._given(name, view.tensor(name, for_torch=self._is_torch), record.dtype)
        array = self._snapshot._load_one(view, name, for_torch=self._is_torch)
        return to_torch(name, array, record.dtype, self._device) if self._is_torch else array

    def get_slice(self, name: str) -> TensorSlice:
        """Return a tensor that is read when it is indexed.  Raises NotFound."""
        return TensorSlice(self, self._opened()[0].record(name), name)

    def _given(self, name: str, array: np.ndarray[Any, Any], dtype: str) -> Any:
        return to_torch(name, array.copy(), dtype, self._device) if self._is_torch else array


class TensorSlice:
    """A tensor that is read when it is indexed, and only the rows that the index names."""

    def __init__(self, file: SafeOpen, record: Tensor | VirtualTensor, name: str) -> None:
        self._file = file
        self._name = name
        self._record = record

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self._record.shape)

    def get_dtype(self) -> str:
        """Return the element type, as safetensors spells it: BF16."""
        return self._record.dtype

    def __getitem__(self, index: Any) -> Any:
        """Return what the index names, as numpy would: whole numbers, slices, `...`.

        Of pairs of F4 in torch it names pairs.

        Raises IndexError for a row that is not there, Corrupt, Incompatible, Unavailable.
        """
        if index is Ellipsis:
            return self._file.get_tensor(self._name)
        view, kind = self._file._opened()[0], self._record.dtype
        for_torch = self._file._is_torch
        dtype, shape = array_form(self._name, self._record, for_torch=for_torch)
        whole = index if isinstance(index, tuple) else (index,)
        if not shape or not whole or whole[0] is Ellipsis:
            array = view.tensor(self._name, for_torch=for_torch)
            return self._file._given(self._name, array[index], kind)
        first, rest = whole[0], whole[1:]
        start, stop, own = _rows(first, shape[0])
        row = math.prod(shape[1:]) * dtype.itemsize
        data = view.tensor_bytes(self._name, start * row, stop * row)
        rows = np.frombuffer(data, dtype=dtype).reshape(stop - start, *shape[1:])
        return self._file._given(self._name, rows[(own, *rest)], kind)


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


def torch_module() -> Any:
    """Return torch.  Raises Unavailable if it is not installed."""
    try:
        # Imported by name: the library needs no framework, and a test checks that.
        return import_module("torch")
    except ImportError as error:
        raise Unavailable("torch is not installed", hint="pip install torch") from error


def to_torch(name: str, array: np.ndarray[Any, Any], dtype: str, device: Any = None) -> Any:
    """Return a writable array as a torch tensor that shares its memory; moved to `device`, if any.

    Keeps bfloat16 and float8; an array of bytes whose dtype (as safetensors names it) is F4 becomes
    pairs.  name: for errors.  Raises BadRequest for an element type that torch lacks, Unavailable.
    """
    torch = torch_module()
    known = "float4_e2m1fn_x2" if dtype == "F4" else array.dtype.name
    kind = getattr(torch, known, None)
    if not isinstance(kind, torch.dtype):
        raise BadRequest(f"torch has no {known}", where=f"tensor {name}")
    if not array.size:
        tensor = torch.empty(array.shape, dtype=kind)
    else:
        # Goes through plain bytes: torch does not take ml_dtypes arrays.
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        tensor = torch.from_numpy(raw).view(kind).reshape(array.shape)
    return tensor if device is None else tensor.to(device)
