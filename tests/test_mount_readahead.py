"""mstore_fuse.readahead: only sequential readers are read ahead for."""

from __future__ import annotations

import random
from itertools import pairwise

from mstore_fuse.readahead import Sequence

MIB = 1 << 20
WINDOW = 8 * MIB


def plain(size: int) -> Sequence:
    """Of a file without tensors."""
    return Sequence(size, lambda offset, length: offset + length, WINDOW)


def asked(sequence: Sequence, offsets: list[int], size: int = MIB) -> list[tuple[int, int]]:
    found = [sequence.next_after(offset, size) for offset in offsets]
    return [ahead for ahead in found if ahead is not None]


def test_a_sequential_reader_is_read_ahead_for_once() -> None:
    """From front to back: every byte past the start is announced once, none twice, and as many of
    what follows the file as of what follows in it."""
    size = 64 * MIB + 17
    ahead = asked(plain(size), list(range(0, size, MIB)))
    assert len(ahead) < 40
    for (start, length), (following, _) in pairwise(ahead):
        assert start + length == following
    assert ahead[0][0] == 2 * MIB
    assert size + WINDOW * 3 // 4 <= sum(ahead[-1]) <= size + WINDOW
    assert all(length <= WINDOW for _, length in ahead)


def test_what_is_announced_grows_with_what_was_read() -> None:
    """A reader of little is not read ahead for far: no more than twice what it has read."""
    sequence = plain(64 * MIB)
    furthest = 0
    for number in range(20):
        told = sequence.next_after(number * MIB // 8, MIB // 8)
        furthest = max(furthest, sum(told or (0, 0)))
        assert furthest <= 3 * (number + 1) * MIB // 8
    assert furthest > 5 * MIB


def test_threads_may_shuffle_a_sequential_reader() -> None:
    """Requests of one read-ahead that arrive out of order are still sequential."""
    draw = random.Random(7)
    offsets = list(range(0, 64 * MIB, MIB))
    for start in range(0, len(offsets), 4):
        part = offsets[start : start + 4]
        draw.shuffle(part)
        offsets[start : start + 4] = part
    ahead = asked(plain(64 * MIB), offsets)
    assert ahead
    assert sum(length for _, length in ahead) > 48 * MIB


def test_a_random_reader_is_left_alone() -> None:
    """Reads all over the file cause next to no prefetch: some are neighbours by chance."""
    draw = random.Random(7)
    offsets = [draw.randrange(0, 1 << 34) for _ in range(500)]
    ahead = asked(plain(1 << 34), offsets, 128 << 10)
    assert sum(length for _, length in ahead) < 500 * (128 << 10) // 20


def test_after_a_jump_reading_ahead_starts_again() -> None:
    """A reader that jumps and goes on in sequence is announced from there."""
    sequence = plain(1 << 34)
    asked(sequence, list(range(0, 32 * MIB, MIB)))
    far = 1 << 33
    ahead = asked(sequence, list(range(far, far + 32 * MIB, MIB)))
    assert ahead
    assert far < ahead[0][0] <= far + 5 * MIB


def test_a_header_is_not_announced() -> None:
    """Who reads only the begin of a file is not read ahead for."""
    assert not asked(plain(64 * MIB), [0])


def test_a_tensor_is_announced_from_its_begin() -> None:
    """A jump to where a tensor begins is taken for a reader of that tensor, not of what follows."""
    begin, end = 100 * MIB + 4_000, 140 * MIB + 8_000

    def continues_to(offset: int, size: int) -> int:
        return end if offset <= begin < offset + size else offset + size

    sequence = Sequence(1 << 34, continues_to, WINDOW)
    asked(sequence, [0, MIB])
    ahead = asked(sequence, list(range(100 * MIB, 141 * MIB, MIB)))
    assert ahead[0][0] == 101 * MIB
    inside = [(start, length) for start, length in ahead if start < end]
    assert all(start + length <= end for start, length in inside)
    assert sum(length for _, length in inside) == end - 101 * MIB


def test_several_readers_of_one_file() -> None:
    """Threads that go through different tensors of one open file are each read ahead for."""
    sequence = plain(1 << 34)
    begins = [n << 30 for n in range(8)]
    ahead = asked(sequence, [begin + n * MIB for n in range(32) for begin in begins])
    for begin in begins:
        mine = sum(length for start, length in ahead if begin <= start < begin + (1 << 30))
        assert mine >= 28 * MIB
