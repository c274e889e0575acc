"""The random draws of DARE: one 32-bit word an element, a pure function of where the element is.

Owns the generator, Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy
as 1, 2, 3", SC11), and how an expert and a tensor become its key.  Does not own what a draw is
compared with.

Element i of a tensor takes word i % 4 of the block whose counter is i // 4 (64 bits in the two
low words, the two high words zero).  So a mask does not depend on how a tensor is cut into
chunks, on threads, or on the order of work.  No state; compiled functions release the GIL.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mstore.numeric.compiling import compiled, inlined

KEY_CONTEXT: Final = "mstore 1 dare mask"
"""BLAKE3 derive_key context of the keys: part of the format, it never changes."""

_ROUNDS: Final = 10
_MULTIPLIER_0: Final = np.uint64(0xD2511F53)
_MULTIPLIER_1: Final = np.uint64(0xCD9E8D57)
_WEYL_0: Final = np.uint64(0x9E3779B9)
_WEYL_1: Final = np.uint64(0xBB67AE85)
_LOW: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)


def mask_key(seed: int, position: int, tensor: str) -> npt.NDArray[np.uint32]:
    """The two key words for one expert (its position in the plan) and one tensor (its name).

    `seed` is an unsigned 64-bit number.  Raises OverflowError for numbers out of range.
    """
    hashed = seed.to_bytes(8, "little") + position.to_bytes(4, "little") + tensor.encode()
    digest = blake3(hashed, derive_key_context=KEY_CONTEXT).digest(length=8)
    return np.frombuffer(digest, dtype="<u4").astype(np.uint32)


def mask_keys(seed: int, experts: int, tensor: str) -> npt.NDArray[np.uint32]:
    """`mask_key` of positions 0..experts-1: uint32[experts, 2]."""
    keys = np.empty((experts, 2), dtype=np.uint32)
    for position in range(experts):
        keys[position] = mask_key(seed, position, tensor)
    return keys


# Each 32-bit word lives in a 64-bit lane: a round is then two vector multiplications with no
# shuffles between them.


@inlined
def philox(counter: Any, high: Any, key0: Any, key1: Any) -> Any:
    """Ten rounds: four 32-bit words, each in a uint64.

    `counter` is the low, `high` the high 64 bits of the counter; key words come as uint64 too.
    """
    x0, x1 = counter & _LOW, counter >> _HALF
    x2, x3 = high & _LOW, high >> _HALF
    for _ in range(_ROUNDS):
        product0 = x0 * _MULTIPLIER_0
        product1 = x2 * _MULTIPLIER_1
        x0, x1 = (product1 >> _HALF) ^ x1 ^ key0, product1 & _LOW
        x2, x3 = (product0 >> _HALF) ^ x3 ^ key1, product0 & _LOW
        key0 = (key0 + _WEYL_0) & _LOW
        key1 = (key1 + _WEYL_1) & _LOW
    return x0, x1, x2, x3


@compiled
def fill_draws(key0: int, key1: int, first_block: int, blocks: int, draws: Any) -> None:
    """Words of `blocks` consecutive counters from `first_block` on into draws[: 4 * blocks]."""
    k0, k1 = np.uint64(key0), np.uint64(key1)
    for j in range(blocks):
        x0, x1, x2, x3 = philox(np.uint64(first_block + j), np.uint64(0), k0, k1)
        # An unsigned index is not wrapped around, which would keep the loop from vectorising.
        at = np.uint64(4) * np.uint64(j)
        draws[at] = np.uint32(x0)
        draws[at + np.uint64(1)] = np.uint32(x1)
        draws[at + np.uint64(2)] = np.uint32(x2)
        draws[at + np.uint64(3)] = np.uint32(x3)
