"""The compiled passes between the numbers of a block and their code by class.

Owns the arithmetic of `classes`, whose docstring defines the code: entry points that take addresses
and lengths. `encode` and `measure` check nothing. `decode` checks everything that it reads, since a
payload may come from anywhere: no payload makes it read or write outside of what it was given.
Importing this module imports the compiler: only the build does so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from mstore.blocks import class_tables
from mstore.blocks.class_tables import (
    BITS,
    CONTEXTS,
    CONTEXTS_USED,
    COUNTS,
    EMPTY,
    ESCAPE,
    ESCAPED,
    FOLLOWING,
    FREQUENCIES,
    FROM,
    GROUP,
    HEADER,
    KEYS,
    LANES,
    LENGTH,
    LOWEST,
    NEXT,
    NUMBERS,
    OFFSETS,
    RESULTS,
    SCRATCH,
    SELDOM,
    SLACK,
    SPREAD,
    STATES,
    STEPS,
    SYMBOLS,
    TABLE,
    TAKEN,
    TILE,
    choose,
    clear,
    decoding,
    encoding,
    normalise,
    spread,
    spread_out,
)
from mstore.numeric import unaligned
from mstore.numeric.compiling import compiled, entry, inlined
from mstore.numeric.unaligned import leading, load, store

U = np.uint64


@compiled
def _bytes(address: Any, length: int) -> Any:
    return carray(address, (length,), np.uint8)


@compiled
def groups_of(n: Any) -> Any:
    """Return the number of groups of n elements; the last one may be filled up."""
    return (n + GROUP - 1) // GROUP


@compiled
def lane_room(n: Any) -> Any:
    """Return the most bytes of a lane, with room to write whole words."""
    return groups_of(n) * (GROUP // LANES) * BITS // 8 + 32


# -- numbers -------------------------------------------------------------------------------------


@compiled
def subtract(words: Any, bases: Any, numbers: Any, keys: Any) -> None:
    """Write the numbers of elements, and the classes of those of the base."""
    for j in range(words.size):
        x, b = words[j], bases[j]
        m = np.uint16(
            x ^ np.uint16(np.uint16(np.uint16(0) - np.uint16(x >> 15)) | np.uint16(32768))
        )
        o = np.uint16(
            b ^ np.uint16(np.uint16(np.uint16(0) - np.uint16(b >> 15)) | np.uint16(32768))
        )
        d = np.uint16(m - o)
        numbers[j] = np.uint16(np.uint16(d << 1) ^ np.uint16(np.uint16(0) - np.uint16(d >> 15)))
        keys[j] = np.uint8(np.uint16(b << 1) >> 8)


@compiled
def add(numbers: Any, bases: Any, words: Any) -> None:
    """Write the elements that have these numbers."""
    for j in range(words.size):
        z, b = numbers[j], bases[j]
        o = np.uint16(
            b ^ np.uint16(np.uint16(np.uint16(0) - np.uint16(b >> 15)) | np.uint16(32768))
        )
        d = np.uint16(np.uint16(z >> 1) ^ np.uint16(np.uint16(0) - np.uint16(z & np.uint16(1))))
        m = np.uint16(d + o)
        words[j] = np.uint16(
            m ^ np.uint16(np.uint16(np.uint16(m >> 15) - np.uint16(1)) | np.uint16(32768))
        )


@compiled
def classify(bases: Any, keys: Any) -> None:
    for j in range(keys.size):
        keys[j] = np.uint8(np.uint16(bases[j] << 1) >> 8)


# -- encoding ------------------------------------------------------------------------------------


@compiled
def model(
    n: int, words: Any, bases: Any, places: Any, escapes: Any, empty: Any, scratch: Any
) -> None:
    """Write places, escapes and empty groups of a block, and count them in scratch.

    places: uint16[], of each element 256 times its context, and its symbol.
    """
    counts = scratch[COUNTS:FREQUENCIES].view(np.uint32)
    offsets = scratch[OFFSETS:LOWEST].view(np.uint16)
    lowest = scratch[LOWEST:NUMBERS]
    room, keys = scratch[NUMBERS:KEYS].view(np.uint16), scratch[KEYS:TAKEN]
    results = scratch[RESULTS:SCRATCH].view(np.int64)
    used = choose(bases, counts, lowest)
    spread_out(lowest, used, offsets)
    clear(counts[: LANES * SYMBOLS * used])
    escaped: Any = U(0)
    empties = 0
    for start in range(0, n, TILE):
        real = min(TILE, n - start)
        filled = groups_of(real) * GROUP
        if filled > real:
            clear(room[real:filled])
            clear(keys[real:filled])
        subtract(words[start : start + real], bases[start : start + real], room[:real], keys[:real])
        for first in range(0, filled, GROUP):
            numbers, classes = room[first : first + GROUP], keys[first : first + GROUP]
            own = places[start + first : start + first + GROUP]
            largest = np.uint16(0)
            for j in range(GROUP):
                largest = max(largest, numbers[j])
            for j in range(GROUP):
                symbol = min(numbers[j], np.uint16(ESCAPE))
                own[j] = np.uint16(np.uint16(offsets[classes[j]] >> np.uint16(BITS - 8)) | symbol)
            group = (start + first) // GROUP
            empty[group] = np.uint8(largest == 0)
            if largest == 0:
                empties += 1
                continue
            if largest >= ESCAPE:
                for j in range(GROUP):
                    escapes[escaped] = numbers[j]
                    escaped += U(numbers[j] >= ESCAPE)
            for j in range(0, GROUP, LANES):
                for lane in range(LANES):
                    counts[U(own[U(j + lane)]) * U(LANES) + U(lane)] += np.uint32(1)
    groups = groups_of(n)
    if empties * SELDOM < groups:
        for group in range(groups):
            if empty[group]:
                empty[group] = np.uint8(0)
                for j in range(GROUP):
                    counts[U(places[U(group * GROUP + j)]) * U(LANES)] += np.uint32(1)
        empties = 0
    for place in range(SYMBOLS * used):
        total = np.uint32(0)
        for lane in range(LANES):
            total += counts[place * LANES + lane]
        counts[place] = total
    results[CONTEXTS_USED] = used
    results[ESCAPED] = np.int64(escaped)
    results[EMPTY] = empties


@inlined
def put(state: Any, word: Any, place: Any, tables: Any) -> Any:
    """Encode the symbol that is before those that are encoded already."""
    states, steps, first = tables
    own = U(place)
    bits = U(np.uint32(state + steps[own]) >> np.uint32(16))
    word = (word << bits) | (U(state) & ((U(1) << bits) - U(1)))
    return np.uint32(states[U(np.int64(U(state) >> bits) + np.int64(first[own]))]), word


@inlined
def flush(room: Any, end: Any, word: Any) -> Any:
    """Write what a lane holds before `end`; return the new end, and what is left of whole bytes.

    word: at most 63 bits, below a one.
    """
    free = leading(word)
    store(room, end - U(8), (word << free) << U(1))
    held = U(63) - free
    left = held & U(7)
    return end - (held >> U(3)), (word & ((U(1) << left) - U(1))) | (U(1) << left)


@inlined
def length(begin: Any, end: Any, word: Any) -> Any:
    """Return how many bits a lane has."""
    return (U(begin) - end) * U(8) + U(63) - leading(word)


@compiled
def encode_lanes(
    groups: int, places: Any, empty: Any, room: Any, scratch: Any, bits: Any, ends: Any
) -> None:
    """Encode the groups from the last to the first; each lane from its end in `room` downwards."""
    tables = (
        scratch[FOLLOWING:STEPS].view(np.uint16),
        scratch[STEPS:FROM].view(np.uint32),
        scratch[FROM:TABLE].view(np.int32),
    )
    s0 = s1 = s2 = s3 = np.uint32(STATES)
    w0 = w1 = w2 = w3 = U(1)
    e0, e1, e2, e3 = U(ends[0]), U(ends[1]), U(ends[2]), U(ends[3])
    for number in range(groups):
        group = groups - 1 - number
        if empty[group]:
            continue
        for back in range(4 * LANES, GROUP + 1, 4 * LANES):
            begin = group * GROUP + GROUP - back
            for step in range(0, 4 * LANES, LANES):
                at = U(begin + 3 * LANES - step)
                # A step of each lane in turn: they wait for themselves only.
                s3, w3 = put(s3, w3, places[at + U(3)], tables)
                s2, w2 = put(s2, w2, places[at + U(2)], tables)
                s1, w1 = put(s1, w1, places[at + U(1)], tables)
                s0, w0 = put(s0, w0, places[at], tables)
            e0, w0 = flush(room, e0, w0)
            e1, w1 = flush(room, e1, w1)
            e2, w2 = flush(room, e2, w2)
            e3, w3 = flush(room, e3, w3)
    mask, ten = U(STATES - 1), U(BITS)
    e0, w0 = flush(room, e0, (w0 << ten) | (U(s0) & mask))
    e1, w1 = flush(room, e1, (w1 << ten) | (U(s1) & mask))
    e2, w2 = flush(room, e2, (w2 << ten) | (U(s2) & mask))
    e3, w3 = flush(room, e3, (w3 << ten) | (U(s3) & mask))
    bits[0], bits[1] = length(ends[0], e0, w0), length(ends[1], e1, w1)
    bits[2], bits[3] = length(ends[2], e2, w2), length(ends[3], e3, w3)


@inlined
def put32(payload: Any, at: Any, value: Any) -> None:
    for byte in range(4):
        payload[at + byte] = np.uint8((U(value) >> U(8 * byte)) & U(255))


@compiled
def write_table(frequencies: Any, payload: Any, at: Any) -> Any:
    """Write the symbols that occur, from the lowest to the highest; return where it ends."""
    low, high = 0, SYMBOLS - 1
    while frequencies[low] == 0:
        low += 1
    while frequencies[high] == 0:
        high -= 1
    payload[at] = np.uint8(low)
    payload[at + 1] = np.uint8(high)
    at += 2
    for s in range(low, high + 1):
        own = np.int64(frequencies[s])
        if own < 128:
            payload[at] = np.uint8(own)
            at += 1
        else:
            payload[at] = np.uint8(128 | (own & 127))
            payload[at + 1] = np.uint8(own >> 7)
            at += 2
    return at


@entry("ippp", unaligned, class_tables)
def measure2(n: int, data: Any, base: Any, scratch: Any) -> None:
    """Count what `encode2` would encode: its symbols by context, and escapes."""
    groups = groups_of(n)
    room = _bytes(scratch, SCRATCH + groups + 4 * GROUP * groups)
    own, rest = room[:SCRATCH], room[SCRATCH:]
    size = GROUP * groups
    model(
        n,
        _bytes(data, 2 * n).view(np.uint16),
        _bytes(base, 2 * n).view(np.uint16),
        rest[2 * size : 4 * size].view(np.uint16),
        rest[: 2 * size].view(np.uint16),
        rest[4 * size :],
        own,
    )


@entry("ipppp", unaligned, class_tables)
def encode2(n: int, data: Any, base: Any, payload: Any, scratch: Any) -> None:
    """Encode n elements of two bytes; the results tell how long the payload is."""
    groups = groups_of(n)
    size, lane = GROUP * groups, lane_room(n)
    room = _bytes(scratch, SCRATCH + groups + 4 * size + LANES * lane)
    own, rest = room[:SCRATCH], room[SCRATCH:]
    escapes = rest[: 2 * size].view(np.uint16)
    places = rest[2 * size : 4 * size].view(np.uint16)
    empty, lanes = rest[4 * size : 4 * size + groups], rest[4 * size + groups :]
    model(
        n,
        _bytes(data, 2 * n).view(np.uint16),
        _bytes(base, 2 * n).view(np.uint16),
        places,
        escapes,
        empty,
        own,
    )
    results = own[RESULTS:SCRATCH].view(np.int64)
    used, escaped = results[CONTEXTS_USED], results[ESCAPED]
    out = _bytes(payload, longest(n))
    clear(out[:HEADER])
    out[0] = np.uint8(used)
    out[1] = np.uint8(results[EMPTY] > 0)
    put32(out, 4, escaped)
    at = HEADER
    for context in range(used):
        out[at + context] = own[LOWEST + context]
    at += used
    counts = own[COUNTS:FREQUENCIES].view(np.uint32)
    frequencies = own[FREQUENCIES:FOLLOWING].view(np.uint32)
    states = own[FOLLOWING:STEPS].view(np.uint16)
    steps, first = own[STEPS:FROM].view(np.uint32), own[FROM:TABLE].view(np.int32)
    spreads, next = own[SPREAD:NEXT], own[NEXT:OFFSETS].view(np.uint32)
    for context in range(used):
        begin, end = SYMBOLS * context, SYMBOLS * (context + 1)
        normalise(counts[begin:end], frequencies[:SYMBOLS])
        at = write_table(frequencies[:SYMBOLS], out, at)
        spread(frequencies[:SYMBOLS], spreads)
        encoding(
            frequencies[:SYMBOLS],
            spreads,
            next,
            states[STATES * context : STATES * (context + 1)],
            steps[begin:end],
            first[begin:end],
            STATES * context,
        )
    if results[EMPTY] > 0:
        whole = (groups + 7) // 8
        clear(out[at : at + whole])
        for group in range(groups):
            out[at + group // 8] |= np.uint8(empty[group] << (group % 8))
        at += whole
    for number in range(escaped):
        out[at] = np.uint8(escapes[number] & np.uint16(255))
        out[at + 1] = np.uint8(escapes[number] >> np.uint16(8))
        at += 2
    # Counts are no longer needed: their place is lent to what the lanes return.
    ends, bits = own[:32].view(np.int64), own[32:64].view(np.uint64)
    for number in range(LANES):
        ends[number] = (number + 1) * lane
    encode_lanes(groups, places, empty, lanes, own, bits, ends)
    for number in range(LANES):
        put32(out, 8 + 4 * number, bits[number])
        length = np.int64((bits[number] + U(7)) >> U(3))
        begin = ends[number] - length
        for j in range(length):
            out[at + j] = lanes[begin + j]
        at += length
    clear(out[at : at + SLACK])
    results[LENGTH] = at + SLACK


@compiled
def longest(n: Any) -> Any:
    """Return the most bytes that a payload of n elements takes."""
    tables = CONTEXTS * (3 + 2 * SYMBOLS)
    return HEADER + tables + groups_of(n) + 2 * n + LANES * lane_room(n) + SLACK


# -- decoding ------------------------------------------------------------------------------------


@compiled
def get32(payload: Any, at: Any) -> Any:
    found: Any = 0
    for byte in range(4):
        found |= np.int64(payload[at + byte]) << (8 * byte)
    return found


@compiled
def read_table(payload: Any, at: Any, end: int, frequencies: Any) -> Any:
    """Read a table; return where it ends, or -1 if it is none."""
    if at + 2 > end:
        return -1
    low, high = np.int64(payload[at]), np.int64(payload[at + 1])
    at += 2
    for s in range(SYMBOLS):
        frequencies[s] = np.uint32(0)
    total: Any = 0
    for s in range(low, high + 1):
        if at + 2 > end:
            return -1
        own = np.int64(payload[at])
        at += 1
        if own >= 128:
            own = (own & 127) | (np.int64(payload[at]) << 7)
            at += 1
        frequencies[s] = np.uint32(own)
        total += own
        if total > STATES:
            return -1
    return at if total == STATES else -1


@compiled
def read_tables(payload: Any, end: int, used: Any, scratch: Any) -> Any:
    """Read the contexts and their tables; return where they end, or -1."""
    at = HEADER
    if used < 1 or used > CONTEXTS or at + used > end:
        return -1
    lowest = payload[at : at + used]
    for context in range(1, used):
        if lowest[context] >= lowest[context - 1]:
            return -1
    if lowest[used - 1] != 0:
        return -1
    spread_out(lowest, used, scratch[OFFSETS:LOWEST].view(np.uint16))
    at += used
    frequencies = scratch[FREQUENCIES:FOLLOWING].view(np.uint32)[:SYMBOLS]
    table = scratch[TABLE:SPREAD].view(np.uint32)
    spreads, following = scratch[SPREAD:NEXT], scratch[NEXT:OFFSETS].view(np.uint32)
    for context in range(used):
        at = read_table(payload, at, end, frequencies)
        if at < 0:
            return -1
        spread(frequencies, spreads)
        decoding(frequencies, spreads, following, table[STATES * context : STATES * (context + 1)])
    return at


@inlined
def fill(payload: Any, at: Any, last: Any) -> Any:
    """Return the 56 bits from bit `at` on, below a one; never read behind word `last`."""
    return (load(payload, min(at >> U(3), last)) >> (at & U(7))) | (U(1) << U(63))


@inlined
def take(word: Any, state: Any, row: Any) -> Any:
    """Return what is left of a lane's bits after the symbol of a row, and the next state."""
    bits = row & U(63)
    return word >> bits, (row >> U(16)) + (word & ((U(1) << bits) - U(1)))


@compiled
def decode_groups(
    n: int,
    payload: Any,
    last: int,
    begins: Any,
    empties: Any,
    escapes: Any,
    bases: Any,
    words: Any,
    scratch: Any,
) -> Any:
    """Decode all groups; return whether every lane ends where it should, and all escapes are used.

    begins: uint64[8], the first bit of each lane, and the one after its last. empties: bits of the
    groups that are empty; none if it has no bytes.
    """
    table = scratch[TABLE:SPREAD].view(np.uint32)
    offsets = scratch[OFFSETS:LOWEST].view(np.uint16)
    room, keys = scratch[NUMBERS:KEYS].view(np.uint16), scratch[KEYS:TAKEN]
    taken = scratch[TAKEN:RESULTS]
    word, mask, ten = U(last), U(STATES - 1), U(BITS)
    b0, b1, b2, b3 = begins[0], begins[1], begins[2], begins[3]
    s0, s1 = fill(payload, b0, word) & mask, fill(payload, b1, word) & mask
    s2, s3 = fill(payload, b2, word) & mask, fill(payload, b3, word) & mask
    b0, b1, b2, b3 = b0 + ten, b1 + ten, b2 + ten, b3 + ten
    used, lists = 0, empties.size > 0
    for start in range(0, n, TILE):
        real = min(TILE, n - start)
        filled = groups_of(real) * GROUP
        classify(bases[start : start + real], keys[:real])
        if filled > real:
            clear(keys[real:filled])
        for first in range(0, filled, GROUP):
            group = (start + first) // GROUP
            if lists and (empties[group >> 3] >> (group & 7)) & 1:
                clear(taken[first : first + GROUP])
                continue
            for place in range(first, first + GROUP, 4 * LANES):
                w0, w1 = fill(payload, b0, word), fill(payload, b1, word)
                w2, w3 = fill(payload, b2, word), fill(payload, b3, word)
                for step in range(0, 4 * LANES, LANES):
                    at = U(place + step)
                    # A step of each lane in turn: they wait for themselves only.
                    r0 = U(table[U(offsets[U(keys[at])]) + s0])
                    r1 = U(table[U(offsets[U(keys[at + U(1)])]) + s1])
                    r2 = U(table[U(offsets[U(keys[at + U(2)])]) + s2])
                    r3 = U(table[U(offsets[U(keys[at + U(3)])]) + s3])
                    taken[at] = np.uint8(r0 >> U(8))
                    taken[at + U(1)] = np.uint8(r1 >> U(8))
                    taken[at + U(2)] = np.uint8(r2 >> U(8))
                    taken[at + U(3)] = np.uint8(r3 >> U(8))
                    w0, s0 = take(w0, s0, r0)
                    w1, s1 = take(w1, s1, r1)
                    w2, s2 = take(w2, s2, r2)
                    w3, s3 = take(w3, s3, r3)
                b0, b1 = b0 + leading(w0), b1 + leading(w1)
                b2, b3 = b2 + leading(w2), b3 + leading(w3)
        largest = np.uint8(0)
        for j in range(filled):
            largest = max(largest, taken[j])
        for j in range(filled):
            room[j] = np.uint16(taken[j])
        if largest == ESCAPE:
            for j in range(filled):
                if taken[j] == ESCAPE:
                    if 2 * used >= escapes.size:
                        return False
                    room[j] = np.uint16(escapes[2 * used]) | (np.uint16(escapes[2 * used + 1]) << 8)
                    used += 1
        add(room[:real], bases[start : start + real], words[start : start + real])
    ends = (b0 == begins[4]) & (b1 == begins[5]) & (b2 == begins[6]) & (b3 == begins[7])
    return ends and (s0 | s1 | s2 | s3) == 0 and 2 * used == escapes.size


@entry("iipppp", unaligned, class_tables)
def decode2(n: int, length: int, payload: Any, base: Any, data: Any, scratch: Any) -> None:
    """Decode n elements of two bytes; LENGTH is -1 if no block has this payload."""
    own = _bytes(scratch, SCRATCH)
    results = own[RESULTS:SCRATCH].view(np.int64)
    results[LENGTH] = -1
    found = _bytes(payload, length)
    end = length - SLACK
    if end < HEADER:
        return
    at = read_tables(found, end, np.int64(found[0]), own)
    groups = groups_of(n)
    whole = (groups + 7) // 8 if found[1] == 1 else 0
    escaped = get32(found, 4)
    if at < 0 or found[1] > 1 or at + whole + 2 * escaped > end:
        return
    empties = found[at : at + whole]
    at += whole
    if whole > 0 and groups % 8 > 0 and empties[whole - 1] >> (groups % 8) != 0:
        return
    escapes = found[at : at + 2 * escaped]
    at += 2 * escaped
    # Counts are not needed here: their place is lent to what the lanes begin and end with.
    begins = own[:64].view(np.uint64)
    for lane in range(LANES):
        bits = get32(found, 8 + 4 * lane)
        size = (bits + 7) >> 3
        if at + size > end:
            return
        begins[lane] = U(8 * (at + size) - bits)
        if load(found, U(at)) & ((U(1) << (begins[lane] & U(7))) - U(1)) != 0:
            return
        begins[LANES + lane] = U(8 * (at + size))
        at += size
    if at != end or found[2] != 0 or found[3] != 0 or load(found, U(end)) != 0:
        return
    if decode_groups(
        n,
        found,
        end,
        begins,
        empties,
        escapes,
        _bytes(base, 2 * n).view(np.uint16),
        _bytes(data, 2 * n).view(np.uint16),
        own,
    ):
        results[LENGTH] = length
