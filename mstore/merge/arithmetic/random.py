"""The keys of DARE's random draws: a draw is a pure function of its element's position.

Owns how seed, expert and tensor become the key of the generator (`philox`), which produces one
32-bit word per element from its flat index.  So a mask does not depend on chunk boundaries,
threads, or the order of work.  Does not own what a draw is compared with.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

KEY_CONTEXT: Final = "mstore 1 dare mask"
"""BLAKE3 derive_key context of the keys: part of the format, so it never changes."""


def mask_key(seed: int, position: int, tensor: str) -> npt.NDArray[np.uint32]:
    """Return the two key words of one expert (position in the plan) and one tensor (name).

    `seed` is an unsigned 64-bit number.  Raises OverflowError for numbers out of range.
    """
    hashed = seed.to_bytes(8, "little") + position.to_bytes(4, "little") + tensor.encode()
    digest = blake3(hashed, derive_key_context=KEY_CONTEXT).digest(length=8)
    return np.frombuffer(digest, dtype="<u4").astype(np.uint32)


def mask_keys(seed: int, experts: int, tensor: str) -> npt.NDArray[np.uint32]:
    """Return `mask_key` of positions 0..experts-1: uint32[experts, 2]."""
    keys = np.empty((experts, 2), dtype=np.uint32)
    for position in range(experts):
        keys[position] = mask_key(seed, position, tensor)
    return keys
