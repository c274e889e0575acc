"""The compiled pass of DoRA: gives rows their norms.

Takes addresses and lengths and checks nothing.  Importing this module imports the compiler: only
the build does so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from mstore.numeric import floats
from mstore.numeric.compiling import entry
from mstore.numeric.floats import quieten_all


@entry("piip", floats)
def scale_rows(values_address: Any, rows: int, columns: int, magnitudes_address: Any) -> None:
    """Give each row of float32[rows, columns] the norm that `magnitudes`, float32[rows], says.

    The norm of a row is the root of a float64 sum in four lanes, rounded to float32.
    """
    values = carray(values_address, (rows, columns), np.float32)
    bits = carray(values_address, (rows, columns), np.uint32)
    magnitudes = carray(magnitudes_address, (rows,), np.float32)
    for i in range(rows):
        row = values[i]
        l0, l1, l2, l3 = 0.0, 0.0, 0.0, 0.0
        j = 0
        while j + 4 <= columns:
            l0 += np.float64(row[j]) * np.float64(row[j])
            l1 += np.float64(row[j + 1]) * np.float64(row[j + 1])
            l2 += np.float64(row[j + 2]) * np.float64(row[j + 2])
            l3 += np.float64(row[j + 3]) * np.float64(row[j + 3])
            j += 4
        while j < columns:
            l0 += np.float64(row[j]) * np.float64(row[j])
            j += 1
        factor = magnitudes[i] / np.float32(np.sqrt((l0 + l1) + (l2 + l3)))
        for k in range(columns):
            row[k] = factor * row[k]
        quieten_all(bits[i])
