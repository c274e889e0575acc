"""The random generator of DARE's masks: Philox4x32-10, compiled.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC11.  Owns the rounds
and which word an element takes; `masks` owns the keys.  Element i of a tensor takes word i % 4 of
the block whose counter is i // 4 (64 bits in the two low words, the two high words zero).  Has no
state; releases the GIL.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from mstore.numeric.compiling import compiled, inlined

_ROUNDS: Final = 10
_MULTIPLIER_0: Final = np.uint64(0xD2511F53)
_MULTIPLIER_1: Final = np.uint64(0xCD9E8D57)
_WEYL_0: Final = np.uint64(0x9E3779B9)
_WEYL_1: Final = np.uint64(0xBB67AE85)
_LOW: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)

# Each 32-bit word lives in a 64-bit lane: a round is then two vector multiplications with no
# shuffles between them.


@inlined
def philox(counter: Any, high: Any, key0: Any, key1: Any) -> Any:
    """Run ten rounds; return four 32-bit words, each in a uint64.

    `counter` is the low, `high` the high 64 bits of the counter; key words are uint64 too.
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
    """Write the words of `blocks` counters from `first_block` on into draws[: 4 * blocks]."""
    k0, k1 = np.uint64(key0), np.uint64(key1)
    for j in range(blocks):
        x0, x1, x2, x3 = philox(np.uint64(first_block + j), np.uint64(0), k0, k1)
        # An unsigned index needs no wraparound, which would prevent vectorising the loop.
        at = np.uint64(4) * np.uint64(j)
        draws[at] = np.uint32(x0)
        draws[at + np.uint64(1)] = np.uint32(x1)
        draws[at + np.uint64(2)] = np.uint32(x2)
        draws[at + np.uint64(3)] = np.uint32(x3)
