"""mstore_fuse.readahead: only sequential readers are read ahead for."""

from __future__ import annotations

import random
from itertools import pairwise

from mstore_fuse.readahead import PREFETCH, Sequence

MIB = 1 << 20


def plain(size: int) -> Sequence:
    """Of a file without tensors."""
    return Sequence(size, lambda offset, length: offset + length)


def asked(sequence: Sequence, offsets: list[int], size: int = MIB) -> list[tuple[int, int]]:
    found = [sequence.next_after(offset, size) for offset in offsets]
    return [ahead for ahead in found if ahead is not None]


def test_a_sequential_reader_is_read_ahead_for_once() -> None:
    """From front to back: every byte past the start is announced once, none twice, none beyond."""
    size = 64 * MIB + 17
    ahead = asked(plain(size), list(range(0, size, MIB)))
    assert len(ahead) < 24
    for (start, length), (following, _) in pairwise(ahead):
        assert start + length == following
    assert ahead[0][0] <= 4 * MIB
    assert sum(ahead[-1]) == size
    assert all(length <= PREFETCH for _, length in ahead)


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
    """Reads all over the file cause no prefetch."""
    draw = random.Random(7)
    offsets = [draw.randrange(0, 1 << 34) for _ in range(500)]
    assert not asked(plain(1 << 34), offsets, 128 << 10)


def test_after_a_jump_reading_ahead_starts_again() -> None:
    """A reader that jumps and goes on in sequence is announced from there."""
    sequence = plain(1 << 34)
    asked(sequence, list(range(0, 32 * MIB, MIB)))
    far = 1 << 33
    ahead = asked(sequence, list(range(far, far + 32 * MIB, MIB)))
    assert ahead
    assert far < ahead[0][0] <= far + 5 * MIB


def test_a_small_file_is_not_announced() -> None:
    """Where the file ends soon there is nothing to read ahead."""
    assert not asked(plain(2 * MIB), [0, MIB])


def test_a_tensor_is_announced_from_its_begin() -> None:
    """A jump to where a tensor begins is taken for a reader of that tensor, not of what follows."""
    begin, end = 100 * MIB + 4_000, 140 * MIB + 8_000
    sequence = Sequence(1 << 34, lambda offset, size: end if offset <= begin else offset + size)
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
