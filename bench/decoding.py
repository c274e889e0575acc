"""What a block costs to decode and to encode: one thread, from memory to memory.

    python bench/decoding.py WORK [--rounds 20] [--other CHECKOUT] [--level NAME]

Writes and prints bench/results/decoding.json.  WORK is not written to.  Blocks are 1 MiB of normal
weights of deviation 0.02; a delta is to a base that is given, as it is after the base was read.
GB/s of plain bytes by processor time of the thread, the best of the rounds.  "checked": with the
block's BLAKE3, as readers do.  "encode": with the sample that chooses the codec, and the check by
decoding.  Also measured in turn: --other, a checkout of another version, with its kernels; and
--level, the code for lesser processors (`scripts/kernels.py NAME` makes it).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import ml_dtypes
import numpy as np
from blake3 import blake3
from measure import keep, machine, options

from mstore.blocks.codecs import Codec, Elements, Encoded, Policy, decode_into, encode
from mstore.terms.ids import BlockId

ROOT = Path(__file__).resolve().parent.parent
BYTES = 1 << 20
TURNS = 3
RATES = ("decode", "decode checked", "encode")
BLOCKS = 2
"""So few that a base is in the cache, as if it had just been read."""
DEVIATION = 0.02
NOISES = (1e-2, 3e-3, 1e-3)
TYPES: dict[str, Any] = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "f32": np.float32,
    "fp8 e4m3": ml_dtypes.float8_e4m3fn,
}
Pair = tuple[BlockId, bytes, bytes]
Figures = dict[str, Any]


def pairs(kind: Any, noise: float) -> list[Pair]:
    """(Id of the base, base, expert); fp8 has scales, so that its weights fill its range."""
    draw = np.random.default_rng(7)
    scale = 32.0 if np.dtype(kind).itemsize == 1 else 1.0
    found = []
    for _ in range(BLOCKS):
        count = BYTES // np.dtype(kind).itemsize
        base = draw.normal(0, DEVIATION * scale, count).astype(np.float32).astype(kind)
        # An expert is trained from what is stored.
        moved = base.astype(np.float32) + draw.normal(0, DEVIATION * scale * noise, count)
        expert = moved.astype(np.float32).astype(kind)
        found.append((BlockId.of(base.tobytes()), base.tobytes(), expert.tobytes()))
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
    for name, alone in (("delta", False), ("alone", True)):
        made = [(coded(pair, alone=alone), None if alone else pair[1]) for pair in of]
        found[name] = {
            "codec": Codec(made[0][0].codec).name.lower(),
            "share": sum(len(one.payload) for one, _ in made) / (len(made) * BYTES),
            "decode": rate(rounds, [lambda a=a, b=b: decoded(a, b) for a, b in made]),
            "decode checked": rate(rounds, [lambda a=a, b=b: checked(a, b) for a, b in made]),
            "encode": rate(rounds, [lambda p=p, x=alone: coded(p, alone=x) for p in of]),
        }
    return found


def turn(checkout: Path, level: str, rounds: int, name: str, noise: float) -> Figures:
    """What a version, or its code for a level of processor, takes, in a process of its own."""
    program = (
        "import json, sys; sys.argv[1:] = []; import decoding as bench\n"
        "from mstore.numeric import levels, passes\n"
        f"if {level!r}: passes.runnable = lambda: (levels.named({level!r}),)\n"
        f"print(json.dumps(bench.one({rounds}, {name!r}, {noise})))"
    )
    places = os.pathsep.join([str(checkout), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", program],
        # The directory that Python looks in first.
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": places},
        stdout=subprocess.PIPE,
        check=True,
    )
    found: Figures = json.loads(done.stdout)
    return found


def one(rounds: int, name: str, noise: float) -> Figures:
    """The figures of one kind of differences."""
    kind = TYPES[name]
    return measured(rounds, pairs(kind, noise), Elements(np.dtype(kind).itemsize, True))


def best(turns: list[Figures]) -> Figures:
    """The best rate of each kind."""
    return {
        way: own | {key: max(turn[way][key] for turn in turns) for key in RATES}
        for way, own in turns[0].items()
    }


def main() -> None:
    parser = options(__doc__, rounds=20, millions=0.0)
    parser.add_argument("--other", type=Path)
    parser.add_argument("--level", default="")
    given = parser.parse_args()
    results: Figures = {"machine": machine(), "rounds": given.rounds}
    for name in TYPES:
        # Of fp8, smaller noise moves nothing.
        for noise in NOISES if name != "fp8 e4m3" else (3e-2,):
            found: dict[str, list[Figures]] = {}
            # Who else is on the machine changes within seconds: each version has several turns.
            for _ in range(TURNS):
                for version, where, level in (
                    ("now", ROOT, ""),
                    ("before", given.other, ""),
                    (given.level, ROOT if given.level else None, given.level),
                ):
                    if where:
                        told = turn(where, level, given.rounds, name, noise)
                        found.setdefault(version, []).append(told)
            results[f"{name} {noise:g}"] = {key: best(turns) for key, turns in found.items()}
    keep(given.results, "decoding", results)


if __name__ == "__main__":
    main()
