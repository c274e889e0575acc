"""The steps of `class_passes` that make contexts and tables, and the places of both in scratch.

Owns how classes are divided into contexts, how counts become frequencies, and how frequencies
become the states of a coder (tANS: Duda 2013, in the form of Collet's FSE). Knows no payload.
Everything is arithmetic of integers, so that all processors make the same tables.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from mstore.numeric.compiling import compiled

TILE: Final = 2048
GROUP: Final = 64
CONTEXTS: Final = 32
SYMBOLS: Final = 256
ESCAPE: Final = 255
BITS: Final = 10
STATES: Final = 1 << BITS
LANES: Final = 4
HEADER: Final = 24
SLACK: Final = 8
"""Zero bytes at the end of a payload, so that a word can be read where the last lane ends."""

SAMPLED: Final = 512
"""Groups of the base that tell which classes share a context."""
RARE: Final = 128
"""A context has more than this part of the elements,"""
FEW: Final = 1024
"""and about so many elements or more: a table takes some twenty bytes."""
SELDOM: Final = 16
"""Empty groups are listed if they are at least this part of all."""

# Scratch, in bytes: tables of all contexts, tiles, and results.
COUNTS: Final = 0
FREQUENCIES: Final = COUNTS + 4 * LANES * CONTEXTS * SYMBOLS
FOLLOWING: Final = FREQUENCIES + 4 * CONTEXTS * SYMBOLS
STEPS: Final = FOLLOWING + 2 * CONTEXTS * STATES
FROM: Final = STEPS + 4 * CONTEXTS * SYMBOLS
TABLE: Final = FROM + 4 * CONTEXTS * SYMBOLS
SPREAD: Final = TABLE + 4 * CONTEXTS * STATES
NEXT: Final = SPREAD + STATES
OFFSETS: Final = NEXT + 4 * SYMBOLS
LOWEST: Final = OFFSETS + 2 * SYMBOLS
NUMBERS: Final = LOWEST + 64
KEYS: Final = NUMBERS + 2 * TILE
TAKEN: Final = KEYS + TILE
RESULTS: Final = TAKEN + TILE
SCRATCH: Final = RESULTS + 64
"""Behind it, `measure2` and `encode2` need room for the block (`class_passes.lane_room`)."""

LENGTH: Final = 0
CONTEXTS_USED: Final = 1
ESCAPED: Final = 2
EMPTY: Final = 3
"""Results: of the payload in bytes (or -1: a payload that cannot be), of contexts, of escapes, of
groups that are listed as empty."""

U = np.uint64


@compiled
def clear(values: Any) -> None:
    """Fill with zeros."""
    for j in range(values.size):
        values[j] = 0


# -- contexts ------------------------------------------------------------------------------------


@compiled
def choose(bases: Any, counts: Any, lowest: Any) -> Any:
    """Divide the classes into contexts by a sample of the base; return how many they are.

    lowest: uint8[CONTEXTS], the lowest class of each context, falling.
    """
    n = bases.size
    for key in range(SYMBOLS):
        counts[key] = np.uint32(0)
    total = 0
    step = max(1, n // GROUP // SAMPLED)
    for start in range(0, n, step * GROUP):
        end = min(n, start + GROUP)
        for j in range(start, end):
            counts[U(np.uint16(bases[j] << 1) >> 8)] += np.uint32(1)
        total += end - start
    least = max(1, total // RARE, FEW * total // n)
    found = 0
    own: Any = 0
    left: Any = total
    for number in range(SYMBOLS):
        key = SYMBOLS - 1 - number
        own += np.int64(counts[key])
        left -= np.int64(counts[key])
        if own >= least and left >= least and found < CONTEXTS - 1:
            lowest[found] = np.uint8(key)
            found += 1
            own = 0
    lowest[found] = np.uint8(0)
    return found + 1


@compiled
def spread_out(lowest: Any, count: int, offsets: Any) -> None:
    """Write where the table of each class begins."""
    key = SYMBOLS - 1
    for context in range(count):
        while key >= np.int64(lowest[context]):
            offsets[key] = np.uint16(context << BITS)
            key -= 1


# -- tables --------------------------------------------------------------------------------------


@compiled
def log2(x: Any) -> Any:
    """Return the logarithm of x >= 1, rounded down."""
    found = 0
    while x > 1:
        x >>= 1
        found += 1
    return found


@compiled
def normalise(counts: Any, frequencies: Any) -> None:
    """Turn counts into frequencies, with the sum STATES, and none zero of a symbol that occurs."""
    total = U(0)
    for s in range(SYMBOLS):
        total += U(counts[s])
    if total == 0:
        for s in range(SYMBOLS):
            frequencies[s] = np.uint32(0)
        frequencies[0] = np.uint32(STATES)
        return
    left, most = np.int64(STATES), 0
    for s in range(SYMBOLS):
        own = U(counts[s])
        share = own * U(STATES) // total
        if own > 0 and share == 0:
            share = U(1)
        frequencies[s] = np.uint32(share)
        left -= np.int64(share)
        if counts[s] > counts[most]:
            most = s
    if left > 0:
        frequencies[most] += np.uint32(left)
    while left < 0:
        most = 0
        for s in range(SYMBOLS):
            if frequencies[s] > frequencies[most]:
                most = s
        frequencies[most] -= np.uint32(1)
        left += 1


@compiled
def spread(frequencies: Any, symbols: Any) -> None:
    """Write the symbol of each state: those of one symbol are far from each other."""
    at = U(0)
    for s in range(SYMBOLS):
        for _ in range(frequencies[s]):
            symbols[at] = np.uint8(s)
            at = (at + U((STATES >> 1) + (STATES >> 3) + 3)) & U(STATES - 1)


@compiled
def decoding(frequencies: Any, symbols: Any, following: Any, table: Any) -> None:
    """Write a row for each state: bits to read, the symbol, and what to add to these bits."""
    for s in range(SYMBOLS):
        following[s] = frequencies[s]
    for state in range(STATES):
        s = symbols[state]
        x = np.int64(following[s])
        following[s] += np.uint32(1)
        bits = BITS - log2(x)
        table[state] = np.uint32(bits | (np.int64(s) << 8) | (((x << bits) - STATES) << 16))


@compiled
def encoding(
    frequencies: Any, symbols: Any, next: Any, states: Any, steps: Any, first: Any, begin: int
) -> None:
    """Write the inverse: how many bits a symbol takes, and where its states are listed.

    begin: where those of this context begin among all.
    """
    total: Any = 0
    for s in range(SYMBOLS):
        next[s] = np.uint32(total)
        own = np.int64(frequencies[s])
        if own > 0:
            bits = BITS if own == 1 else BITS - log2(own - 1)
            steps[s] = np.uint32((bits << 16) - (own << bits))
            first[s] = np.int32(begin + total - own)
        total += own
    for state in range(STATES):
        s = symbols[state]
        states[next[s]] = np.uint16(STATES + state)
        next[s] += np.uint32(1)
