"""Sums of float64 in one order on every machine."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def halved(values: npt.NDArray[np.float64]) -> float:
    """Return the sum of numbers: of their halves, element by element, again and again."""
    while values.size > 1:
        half, odd = divmod(values.size, 2)
        total = values[:half] + values[half : 2 * half]
        if odd:
            total[0] += values[-1]
        values = total
    return float(values[0]) if values.size else 0.0
