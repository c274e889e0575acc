"""Cutting a tensor (or an opaque file) into blocks: from its own start, all full but the last.

Arithmetic only, so that every layer agrees on where a block begins. Blocks cut bytes, not elements;
block sizes are powers of two, so an element of a whole number of bytes never straddles two blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def block_count(nbytes: int, block_size: int) -> int:
    """Return how many blocks `nbytes` bytes take; 0 for no bytes.

    Raises ValueError for a negative length or a block size below 1.
    """
    if nbytes < 0:
        raise ValueError(f"a length cannot be negative: {nbytes}")
    if block_size < 1:
        raise ValueError(f"a block holds at least one byte, not {block_size}")
    return -(-nbytes // block_size)


def partition(nbytes: int, block_size: int) -> list[tuple[int, int]]:
    """Return (offset, length) of each block, in bytes, in order, without gap or overlap.

    Raises ValueError as `block_count` does.
    """
    starts = (index * block_size for index in range(block_count(nbytes, block_size)))
    return [(start, min(block_size, nbytes - start)) for start in starts]


def in_blocks(pieces: Iterable[bytes], block_size: int) -> Iterator[bytes]:
    """Yield the bytes of pieces of any length in blocks; all are full but the last."""
    rest = b""
    for piece in pieces:
        rest += piece
        whole = len(rest) - len(rest) % block_size
        for start in range(0, whole, block_size):
            yield rest[start : start + block_size]
        rest = rest[whole:]
    if rest:
        yield rest
