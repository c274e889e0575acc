"""What a block costs to decode and to encode: one thread, from memory to memory.

    python bench/decoding.py WORK [--rounds 20]

Writes and prints bench/results/decoding.json.  WORK is not written to.  Blocks are 1 MiB of normal
weights of deviation 0.02; a delta is to a base that is given, as it is after the base was read.
GB/s of plain bytes by processor time of the thread, the best of the rounds.  bf16 is coded by
class, and, beside that, ordered by class, as before.  What is ordered: with the ordering that this
processor has, and one element at a time, as where AVX-512 VBMI2 is missing (the rest of that code
still takes what the processor has).  "checked": with the block's BLAKE3, as readers do.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from blake3 import blake3
from measure import keep, machine, options
from numba import carray

from mstore.blocks import classes, codecs, planes
from mstore.blocks.codecs import Elements, Encoded, Policy, decode_into, encode
from mstore.blocks.plane_passes import SCRATCH, steps
from mstore.ids import BlockId
from mstore.numeric.compiling import compiled, pointer
from mstore.numeric.expansion import IS_WIDE

BYTES = 1 << 20
BLOCKS = 2
"""So few that a base is in the cache, as if it had just been read."""
DEVIATION = 0.02
NOISES = (1e-2, 3e-3, 1e-3)
TYPES = {"bf16": np.uint16, "f32": np.uint32}
Numbers = np.ndarray[Any, np.dtype[Any]]
Pair = tuple[BlockId, bytes, bytes]
Figures = dict[str, Any]


def stored(values: Numbers, word: Any) -> bytes:
    """Float32 values as bf16, rounded to nearest, or as they are."""
    bits = values.astype(np.float32).view(np.uint32)
    if word is np.uint32:
        return bits.tobytes()
    return ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16).tobytes()


def pairs(word: Any, noise: float) -> list[Pair]:
    """(Id of the base, base, expert)."""
    draw = np.random.default_rng(7)
    found = []
    for _ in range(BLOCKS):
        of_base = stored(draw.normal(0, DEVIATION, BYTES // word().itemsize), word)
        # An expert is trained from what is stored.
        bits = np.frombuffer(of_base, dtype=word).astype(np.uint32) << np.uint32(
            32 - 8 * word().itemsize
        )
        expert = bits.view(np.float32) + draw.normal(0, DEVIATION * noise, bits.size)
        found.append((BlockId.of(of_base), of_base, stored(expert, word)))
    return found


def rate(rounds: int, calls: list[Callable[[], Any]]) -> float:
    """GB/s of plain bytes, of one thread, in the best round."""
    best = float("inf")
    for number in range(rounds + 1):
        began = time.thread_time()
        for call in calls:
            call()
        if number:
            best = min(best, time.thread_time() - began)
    return len(calls) * BYTES / best / 1e9


@contextmanager
def one_at_a_time(word: Any) -> Iterator[None]:
    """Let `planes` order elements one at a time, whatever the processor has."""
    width = word().itemsize
    split, join = steps(word, 8 * width, is_wide=False)

    @compiled
    def array(address: Any, size: int) -> Any:
        return carray(pointer(address), (size,), np.uint8)

    @compiled
    def split_at(mode: int, n: int, data: Any, base: Any, into: Any, scratch: Any) -> None:
        size = n * width
        room = array(scratch, SCRATCH + size)
        split(mode, n, array(data, size), array(base, size), array(into, size), room)

    @compiled
    def join_at(mode: int, n: int, source: Any, base: Any, into: Any, scratch: Any) -> None:
        size = n * width
        room = array(scratch, SCRATCH + size)
        join(mode, n, array(source, size), array(base, size), array(into, size), room)

    own = planes._split[width], planes._join[width]
    planes._split[width], planes._join[width] = split_at, join_at
    try:
        yield
    finally:
        planes._split[width], planes._join[width] = own


@contextmanager
def ordered() -> Iterator[None]:
    """Let `codecs` order all differences by class, and code none by class."""
    own = codecs._CLASSES_WIDTH
    codecs._CLASSES_WIDTH = 0
    try:
        yield
    finally:
        codecs._CLASSES_WIDTH = own


def measured(rounds: int, of: list[Pair], elements: Elements) -> Figures:
    target = memoryview(bytearray(BYTES))

    def coded(pair: Pair, *, alone: bool) -> Encoded:
        id, base, expert = pair
        return encode(expert, elements, Policy.DENSE, None if alone else (id, base))

    def decoded(made: Encoded, base: bytes | None) -> None:
        decode_into(made.codec, made.payload, made.width, target, base)

    def checked(made: Encoded, base: bytes | None) -> None:
        decoded(made, base)
        blake3(target).digest()

    found: Figures = {}
    for name, alone in (("delta", False), ("planes", True)):
        made = [(coded(pair, alone=alone), None if alone else pair[1]) for pair in of]
        found[name] = {
            "share": sum(len(one.payload) for one, _ in made) / (len(made) * BYTES),
            "decode": rate(rounds, [lambda a=a, b=b: decoded(a, b) for a, b in made]),
            "decode checked": rate(rounds, [lambda a=a, b=b: checked(a, b) for a, b in made]),
            "encode": rate(rounds, [lambda p=p, x=alone: coded(p, alone=x) for p in of]),
        }
    return found


def main() -> None:
    given = options(__doc__, rounds=20, millions=0.0).parse_args()
    results: Figures = {"machine": machine(), "rounds": given.rounds, "wide": IS_WIDE}
    for name, word in TYPES.items():
        for noise in NOISES:
            of = pairs(word, noise)
            elements = Elements(word().itemsize, True)
            found = {}
            if word().itemsize == classes.WIDTH:
                found["by class"] = measured(given.rounds, of, elements)
            with ordered():
                found["own"] = measured(given.rounds, of, elements)
                with one_at_a_time(word):
                    found["one at a time"] = measured(given.rounds, of, elements)
            results[f"{name} {noise:g}"] = found
    keep(given.results, "decoding", results)


if __name__ == "__main__":
    main()
