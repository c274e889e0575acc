"""Arrays of numpy as tensors of other frameworks, which are imported only here and when needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from mstore.errors import BadRequest, Unavailable


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
