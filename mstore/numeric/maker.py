"""A program: makes the machine code of passes.  `making` runs it by path, in a child process.

Reads one line of JSON from standard input: "path", the module search path; "levels", names; and
"passes": pairs of module and name, each with the digest that the file begins with, as hex.  Writes,
for each pass and level, its length (4 bytes, little-endian) and its file to standard output.

It takes part in nothing else, so the compiler stays out of the process that asked.
"""

from __future__ import annotations

import importlib
import json
import os
import struct
import sys


def main() -> None:
    """Answer one request."""
    request = json.loads(sys.stdin.readline())
    sys.path[:] = request["path"]
    # Whatever else speaks, speaks to standard error.
    answer = os.dup(1)
    os.dup2(2, 1)
    from mstore.numeric import compiling, images, levels

    wanted = [levels.named(name) for name in request["levels"]]
    for module, name, stamp in request["passes"]:
        assembly = getattr(importlib.import_module(module), name).assembly()
        for level in wanted:
            made = images.encoded(compiling.made(assembly, level), bytes.fromhex(stamp))
            _send(answer, struct.pack("<I", len(made)) + made)


def _send(to: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(to, left) :]


if __name__ == "__main__":
    main()
