"""The compiled passes between the plain bytes of a block and its byte planes.

Owns the arithmetic of `planes`, whose docstring defines it: two entry points per element width,
which take addresses and lengths and check nothing. Importing this module imports the compiler: only
the build does so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from mstore.numeric import expansion
from mstore.numeric.compiling import compiled, entry, inlined
from mstore.numeric.expansion import IS_WIDE, TOGETHER, compress, expand
from mstore.numeric.expansion import count as count64

TILE: Final = 2048
LANES: Final = 4
"""Stretches of a block that are ordered side by side, where not 64 elements are at a time."""
PART: Final = TILE // LANES
TILES: Final = 16 * TILE
PLACES: Final = TILES + TILE
CLASSES: Final = 256
FREQUENT: Final = PLACES + 4 * CLASSES * LANES
MOST_FREQUENT: Final = 32
SCRATCH: Final = FREQUENT + 2 * MOST_FREQUENT
"""Bytes of scratch for a pass: two tiles of the widest elements, a tile of classes, places, and
frequent classes with their number. Behind them are as many bytes as the block has: its numbers,
ordered by class."""
SAMPLED: Final = 32
"""Groups of 64 elements that tell which classes are frequent."""
RARE: Final = 256
"""A class with less than this part of the elements is not frequent: most groups have none of it."""

PLAIN: Final = 0
FLOATS: Final = 1
INTEGERS: Final = 2
FLOATS_AGAIN: Final = 3
"""FLOATS where the scratch is as a pass with this base left it: classes are not counted again."""

# Each loop does a few simple operations on a tile in the L1 cache, from one array to another: LLVM
# vectorises such loops completely. numba widens integers on every operation; the explicit casts
# undo that, so that a vector holds as many as it can.

_Steps = tuple[Callable[..., None], Callable[..., None]]


def steps(word: Any, bits: int, *, is_wide: bool = IS_WIDE) -> _Steps:
    """Return (split, join) for elements of `bits` bits, as numba functions.

    is_wide: order 64 elements at a time, by instructions that not every processor has; the bytes
    are the same.
    """
    top = word(bits - 1)
    sign = word(1 << (bits - 1))
    one = word(1)
    key_shift = word(bits - 8)
    width = bits // 8
    nothing = word(0)

    @compiled
    def ordered(source: Any, target: Any) -> None:
        """Map bits of floats to integers in the same order: flip those of negative ones."""
        for j in range(target.size):
            x = source[j]
            target[j] = word(x ^ word(word(nothing - word(x >> top)) | sign))

    @compiled
    def subtract(tile: Any, base: Any) -> None:
        """Subtract and zigzag, so that small differences of either sign are small numbers."""
        for j in range(tile.size):
            d = word(tile[j] - base[j])
            tile[j] = word(word(d << one) ^ word(nothing - word(d >> top)))

    @compiled
    def add(tile: Any, base: Any) -> None:
        for j in range(tile.size):
            z = tile[j]
            d = word(word(z >> one) ^ word(nothing - word(z & one)))
            tile[j] = word(d + base[j])

    @compiled
    def unordered(tile: Any, target: Any) -> None:
        for j in range(target.size):
            m = tile[j]
            target[j] = word(m ^ word(word(word(m >> top) - one) | sign))

    @compiled
    def copy(source: Any, target: Any) -> None:
        for j in range(target.size):
            target[j] = source[j]

    @compiled
    def narrow(tile: Any, shift: Any, plane: Any) -> None:
        for j in range(plane.size):
            plane[j] = np.uint8(word(tile[j] >> shift))

    @compiled
    def widen(plane: Any, shift: Any, tile: Any) -> None:
        for j in range(plane.size):
            tile[j] = word(tile[j] | word(word(plane[j]) << shift))

    @compiled
    def clear(tile: Any) -> None:
        for j in range(tile.size):
            tile[j] = nothing

    @compiled
    def classify(base: Any, keys: Any) -> None:
        for j in range(keys.size):
            keys[j] = np.uint8(word(word(base[j] << one) >> key_shift))

    @inlined
    def take(places: Any, key: Any, lane: int) -> Any:
        """Return and advance the next place of a class."""
        k = np.uint64(np.uint64(lane * CLASSES) + np.uint64(key))
        at = places[k]
        places[k] = np.uint32(at + np.uint32(1))
        return at

    @compiled
    def rewind(places: Any, lanes: int) -> None:
        """Move places from the end of each class and lane, where a pass left them, to its begin."""
        before = np.uint32(0)
        for key in range(CLASSES):
            for lane in range(lanes):
                end = places[lane * CLASSES + key]
                places[lane * CLASSES + key] = before
                before = end

    @compiled
    def count_classes(bases: Any, size: int, places: Any, again: Any) -> None:
        """Compute where each class of each lane begins, ordered by class, then lane."""
        if again:
            rewind(places, LANES)
            return
        for place in range(places.size):
            places[place] = np.uint32(0)
        for j in range(size):
            for lane in range(LANES):
                take(places, word(bases[np.uint64(lane * size + j)] << one) >> key_shift, lane)
        for j in range(LANES * size, bases.size):
            take(places, word(bases[j] << one) >> key_shift, LANES - 1)
        total = np.uint32(0)
        for key in range(CLASSES):
            for lane in range(LANES):
                found = places[lane * CLASSES + key]
                places[lane * CLASSES + key] = total
                total = np.uint32(total + found)

    @compiled
    def scatter(tile: Any, keys: Any, lane: int, n: int, places: Any, planes: Any) -> None:
        """Write the bytes of each element to the next place of its class."""
        for j in range(tile.size):
            z = tile[j]
            at = take(places, keys[j], lane)
            for p in range(width):
                planes[np.uint64(np.uint64(p * n) + at)] = np.uint8(word(z >> word(8 * p)))

    @compiled
    def scatter_lanes(tiles: Any, keys: Any, count: int, places: Any, numbers: Any) -> None:
        # Successive elements of one class would wait for each other; four lanes do not.
        for j in range(count):
            for lane in range(LANES):
                at = take(places, keys[lane * PART + j], lane)
                numbers[np.uint64(at)] = tiles[lane * PART + j]

    @compiled
    def gather(tile: Any, keys: Any, lane: int, n: int, places: Any, planes: Any) -> None:
        for j in range(tile.size):
            at = take(places, keys[j], lane)
            z = nothing
            for p in range(width):
                z = word(z | word(word(planes[np.uint64(np.uint64(p * n) + at)]) << word(8 * p)))
            tile[j] = z

    @compiled
    def gather_lanes(tiles: Any, keys: Any, count: int, places: Any, numbers: Any) -> None:
        for j in range(count):
            for lane in range(LANES):
                at = take(places, keys[lane * PART + j], lane)
                tiles[lane * PART + j] = numbers[np.uint64(at)]

    @compiled
    def divide(numbers: Any, planes: Any) -> None:
        """Write the bytes of numbers to their planes."""
        n = numbers.size
        for start in range(0, n, TILE):
            count = min(TILE, n - start)
            for p in range(width):
                at = p * n + start
                narrow(numbers[start : start + count], word(8 * p), planes[at : at + count])

    @compiled
    def unite(planes: Any, numbers: Any) -> None:
        """Make numbers of the bytes of planes."""
        n = numbers.size
        for start in range(0, n, TILE):
            count = min(TILE, n - start)
            tile = numbers[start : start + count]
            clear(tile)
            for p in range(width):
                at = p * n + start
                widen(planes[at : at + count], word(8 * p), tile)

    @compiled
    def in_order(n: int, scratch: Any) -> Any:
        return scratch[SCRATCH : SCRATCH + n * width].view(word)

    @compiled
    def placed(scratch: Any) -> Any:
        return scratch[PLACES:FREQUENT].view(np.uint32)

    expand64, compress64 = expand(width), compress(width)

    @compiled
    def find_frequent(bases: Any, keys: Any, places: Any, frequent: Any) -> Any:
        """Write the classes that are frequent in a sample; return how many they are."""
        n = bases.size
        for place in range(places.size):
            places[place] = np.uint32(0)
        groups = n // TOGETHER
        step = max(1, groups // SAMPLED)
        sampled = 0
        for group in range(0, groups, step):
            start = group * TOGETHER
            classify(bases[start : start + TOGETHER], keys[:TOGETHER])
            for j in range(TOGETHER):
                take(places, keys[j], 0)
            sampled += TOGETHER
        most = 0
        for key in range(CLASSES):
            if most < MOST_FREQUENT and np.int64(places[key]) * RARE > sampled:
                frequent[most] = np.uint8(key)
                most += 1
        return most

    @compiled
    def begin_classes(bases: Any, keys: Any, places: Any, frequent: Any, again: Any) -> Any:
        """Compute where each class begins, in the first quarter of the places; return `most`."""
        if again:
            rewind(places, 1)
            return np.int64(frequent[MOST_FREQUENT])
        n = bases.size
        most = find_frequent(bases, keys, places, frequent)
        for place in range(places.size):
            places[place] = np.uint32(0)
        for start in range(0, n, TILE):
            count = min(TILE, n - start)
            classify(bases[start : start + count], keys[:count])
            whole = count - count % TOGETHER
            for j in range(0, whole, TOGETHER):
                count64(keys, places, frequent, most, j)
            for j in range(whole, count):
                take(places, keys[j], 0)
        total = np.uint32(0)
        for key in range(CLASSES):
            found = places[key]
            places[key] = total
            total = np.uint32(total + found)
        frequent[MOST_FREQUENT] = np.uint8(most)
        return most

    @compiled
    def split_floats_wide(
        n: int, words: Any, bases: Any, planes: Any, scratch: Any, again: Any
    ) -> None:
        rooms, keys, places = scratch[:TILES].view(word), scratch[TILES:PLACES], placed(scratch)
        frequent = scratch[FREQUENT:]
        most = begin_classes(bases, keys, places, frequent, again)
        for start in range(0, n, TILE):
            count = min(TILE, n - start)
            tile, other = rooms[:count], rooms[TILE : TILE + count]
            base = bases[start : start + count]
            ordered(words[start : start + count], tile)
            ordered(base, other)
            subtract(tile, other)
            classify(base, keys[:count])
            whole = count - count % TOGETHER
            for j in range(0, whole, TOGETHER):
                compress64(keys, places, frequent, most, planes, n, tile, j)
            scatter(tile[whole:], keys[whole:], 0, n, places, planes)

    @compiled
    def join_floats_wide(
        n: int, planes: Any, bases: Any, words: Any, scratch: Any, again: Any
    ) -> None:
        rooms, keys, places = scratch[:TILES].view(word), scratch[TILES:PLACES], placed(scratch)
        frequent = scratch[FREQUENT:]
        most = begin_classes(bases, keys, places, frequent, again)
        for start in range(0, n, TILE):
            count = min(TILE, n - start)
            tile, other = rooms[:count], rooms[TILE : TILE + count]
            base = bases[start : start + count]
            classify(base, keys[:count])
            whole = count - count % TOGETHER
            for j in range(0, whole, TOGETHER):
                expand64(keys, places, frequent, most, planes, n, tile, j)
            gather(tile[whole:], keys[whole:], 0, n, places, planes)
            ordered(base, other)
            add(tile, other)
            unordered(tile, words[start : start + count])

    @compiled
    def split_floats_narrow(
        n: int, words: Any, bases: Any, planes: Any, scratch: Any, again: Any
    ) -> None:
        rooms, keys, places = scratch[:TILES].view(word), scratch[TILES:PLACES], placed(scratch)
        numbers = in_order(n, scratch)
        lane = n // LANES
        count_classes(bases, lane, places, again)
        for start in range(0, lane, PART):
            count = min(PART, lane - start)
            for q in range(LANES):
                first = q * lane + start
                tile = rooms[q * PART : q * PART + count]
                other = rooms[TILE : TILE + count]
                base = bases[first : first + count]
                ordered(words[first : first + count], tile)
                ordered(base, other)
                subtract(tile, other)
                classify(base, keys[q * PART : q * PART + count])
            scatter_lanes(rooms, keys, count, places, numbers)
        rest = n - LANES * lane
        tile, other = rooms[:rest], rooms[TILE : TILE + rest]
        ordered(words[LANES * lane :], tile)
        ordered(bases[LANES * lane :], other)
        subtract(tile, other)
        classify(bases[LANES * lane :], keys[:rest])
        for j in range(rest):
            numbers[np.uint64(take(places, keys[j], LANES - 1))] = tile[j]
        divide(numbers, planes)

    @compiled
    def join_floats_narrow(
        n: int, planes: Any, bases: Any, words: Any, scratch: Any, again: Any
    ) -> None:
        rooms, keys, places = scratch[:TILES].view(word), scratch[TILES:PLACES], placed(scratch)
        numbers = in_order(n, scratch)
        unite(planes, numbers)
        lane = n // LANES
        count_classes(bases, lane, places, again)
        for start in range(0, lane, PART):
            count = min(PART, lane - start)
            for q in range(LANES):
                first = q * lane + start
                classify(bases[first : first + count], keys[q * PART : q * PART + count])
            gather_lanes(rooms, keys, count, places, numbers)
            for q in range(LANES):
                first = q * lane + start
                tile = rooms[q * PART : q * PART + count]
                other = rooms[TILE : TILE + count]
                ordered(bases[first : first + count], other)
                add(tile, other)
                unordered(tile, words[first : first + count])
        rest = n - LANES * lane
        tile, other = rooms[:rest], rooms[TILE : TILE + rest]
        classify(bases[LANES * lane :], keys[:rest])
        for j in range(rest):
            tile[j] = numbers[np.uint64(take(places, keys[j], LANES - 1))]
        ordered(bases[LANES * lane :], other)
        add(tile, other)
        unordered(tile, words[LANES * lane :])

    split_floats = split_floats_wide if is_wide else split_floats_narrow
    join_floats = join_floats_wide if is_wide else join_floats_narrow

    @compiled
    def split(mode: int, n: int, data: Any, base: Any, planes: Any, scratch: Any) -> None:
        words = data.view(word)
        bases = base.view(word)
        if mode in (FLOATS, FLOATS_AGAIN):
            split_floats(n, words, bases, planes, scratch, mode == FLOATS_AGAIN)
            return
        rooms = scratch[:TILES].view(word)
        for start in range(0, n, TILE):
            count = min(TILE, n - start)
            tile = words[start : start + count]
            if mode == INTEGERS:
                tile = rooms[:count]
                copy(words[start : start + count], tile)
                subtract(tile, bases[start : start + count])
            for p in range(width):
                at = p * n + start
                narrow(tile, word(8 * p), planes[at : at + count])

    @compiled
    def join(mode: int, n: int, planes: Any, base: Any, data: Any, scratch: Any) -> None:
        words = data.view(word)
        bases = base.view(word)
        if mode in (FLOATS, FLOATS_AGAIN):
            join_floats(n, planes, bases, words, scratch, mode == FLOATS_AGAIN)
            return
        rooms = scratch[:TILES].view(word)
        for start in range(0, n, TILE):
            count = min(TILE, n - start)
            tile = rooms[:count]
            clear(tile)
            for p in range(width):
                at = p * n + start
                widen(planes[at : at + count], word(8 * p), tile)
            if mode == INTEGERS:
                add(tile, bases[start : start + count])
            copy(tile, words[start : start + count])

    return split, join


@compiled
def _bytes(address: Any, length: int) -> Any:
    return carray(address, (length,), np.uint8)


_split1, _join1 = steps(np.uint8, 8)
_split2, _join2 = steps(np.uint16, 16)
_split4, _join4 = steps(np.uint32, 32)
_split8, _join8 = steps(np.uint64, 64)

# One entry per width: a process compiles only those that it needs.


@entry("iipppp", expansion)
def split1(mode: int, n: int, data: Any, base: Any, planes: Any, scratch: Any) -> None:
    """Split n elements of one byte, with the base's, into planes."""
    size, room = n, _bytes(scratch, SCRATCH + n)
    _split1(mode, n, _bytes(data, size), _bytes(base, size), _bytes(planes, size), room)


@entry("iipppp", expansion)
def join1(mode: int, n: int, planes: Any, base: Any, data: Any, scratch: Any) -> None:
    """Join planes, with the base's elements, to n elements of one byte."""
    size, room = n, _bytes(scratch, SCRATCH + n)
    _join1(mode, n, _bytes(planes, size), _bytes(base, size), _bytes(data, size), room)


@entry("iipppp", expansion)
def split2(mode: int, n: int, data: Any, base: Any, planes: Any, scratch: Any) -> None:
    """Split n elements of 2 bytes, with the base's, into planes."""
    size, room = 2 * n, _bytes(scratch, SCRATCH + 2 * n)
    _split2(mode, n, _bytes(data, size), _bytes(base, size), _bytes(planes, size), room)


@entry("iipppp", expansion)
def join2(mode: int, n: int, planes: Any, base: Any, data: Any, scratch: Any) -> None:
    """Join planes, with the base's elements, to n elements of 2 bytes."""
    size, room = 2 * n, _bytes(scratch, SCRATCH + 2 * n)
    _join2(mode, n, _bytes(planes, size), _bytes(base, size), _bytes(data, size), room)


@entry("iipppp", expansion)
def split4(mode: int, n: int, data: Any, base: Any, planes: Any, scratch: Any) -> None:
    """Split n elements of 4 bytes, with the base's, into planes."""
    size, room = 4 * n, _bytes(scratch, SCRATCH + 4 * n)
    _split4(mode, n, _bytes(data, size), _bytes(base, size), _bytes(planes, size), room)


@entry("iipppp", expansion)
def join4(mode: int, n: int, planes: Any, base: Any, data: Any, scratch: Any) -> None:
    """Join planes, with the base's elements, to n elements of 4 bytes."""
    size, room = 4 * n, _bytes(scratch, SCRATCH + 4 * n)
    _join4(mode, n, _bytes(planes, size), _bytes(base, size), _bytes(data, size), room)


@entry("iipppp", expansion)
def split8(mode: int, n: int, data: Any, base: Any, planes: Any, scratch: Any) -> None:
    """Split n elements of 8 bytes, with the base's, into planes."""
    size, room = 8 * n, _bytes(scratch, SCRATCH + 8 * n)
    _split8(mode, n, _bytes(data, size), _bytes(base, size), _bytes(planes, size), room)


@entry("iipppp", expansion)
def join8(mode: int, n: int, planes: Any, base: Any, data: Any, scratch: Any) -> None:
    """Join planes, with the base's elements, to n elements of 8 bytes."""
    size, room = 8 * n, _bytes(scratch, SCRATCH + 8 * n)
    _join8(mode, n, _bytes(planes, size), _bytes(base, size), _bytes(data, size), room)
