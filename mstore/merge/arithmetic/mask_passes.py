"""The compiled pass of masks: the words of the random generator for a run of elements.

Importing this module imports the compiler; `masks` does so only if no machine code is cached on
disk (`mstore.numeric.code_cache`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from mstore.merge.arithmetic import philox
from mstore.merge.arithmetic.philox import fill_draws
from mstore.numeric.compiling import entry


@entry("iiiip", philox)
def words(key0: int, key1: int, first_block: int, blocks: int, words_at: Any) -> None:
    """Write the words of `blocks` counters from `first_block` on: uint32[4 * blocks]."""
    fill_draws(key0, key1, first_block, blocks, carray(words_at, (4 * blocks,), np.uint32))
