"""Stored elements as float32 arrays, in numpy: for what is too small to compile."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def singles(data: npt.NDArray[np.uint8], dtype: str, n: int) -> npt.NDArray[np.float32]:
    """Return the first n elements of type BF16, F16 or F32 as float32[n], exactly.

    data: their stored bytes, little-endian.  Of F32 the result is a view.
    """
    if dtype == "F32":
        return data[: 4 * n].view(np.float32)
    words = data[: 2 * n].view(np.uint16)
    if dtype == "F16":
        return words.view(np.float16).astype(np.float32)
    return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
