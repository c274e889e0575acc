"""Checkpoints for tests, written by hand: the format byte by byte, without the safetensors library.

`write_safetensors` writes what it is told, sound or not: tests of bad input lie to it on purpose.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

# name, dtype, shape, the tensor's bytes
Tensor = tuple[str, str, tuple[int, ...], bytes]

BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


def size_of(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor, by this module's own table."""
    elements = 1
    for dimension in shape:
        elements *= dimension
    return elements * BITS[dtype] // 8


def safetensors_bytes(
    tensors: Sequence[Tensor],
    *,
    metadata: dict[str, str] | None = None,
    padding: int = 0,
    order: Sequence[int] | None = None,
) -> bytes:
    """A safetensors file with its data in the order of `tensors`.

    `order` permutes the entries of the JSON (indices into `tensors`); `padding` spaces end it.
    """
    entries: list[tuple[str, object]] = []
    data = bytearray()
    for name, dtype, shape, payload in tensors:
        begin = len(data)
        data += payload
        entry = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, len(data)]}
        entries.append((name, entry))
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    header.update(entries[index] for index in (order or range(len(entries))))
    return with_length(json.dumps(header, ensure_ascii=False).encode() + b" " * padding) + data


def with_length(text: bytes) -> bytes:
    """A header's JSON behind its length."""
    return len(text).to_bytes(8, "little") + text


def write_safetensors(
    path: Path,
    tensors: Sequence[Tensor],
    *,
    metadata: dict[str, str] | None = None,
    padding: int = 0,
    order: Sequence[int] | None = None,
) -> None:
    """Write `safetensors_bytes` to `path`, making its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(safetensors_bytes(tensors, metadata=metadata, padding=padding, order=order))


def write_index(path: Path, weight_map: dict[str, str]) -> None:
    """Write a shard index as transformers reads it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    path.write_text(json.dumps(index, ensure_ascii=False, indent=2))


def every_dtype_checkpoint(directory: Path) -> Path:
    """Make the checkpoint with everything odd that the format allows; the same bytes each time.

    Two indexed shards (every dtype; 0-d, empty, constant and many-block tensors), one more file in
    a subdirectory, one without tensors, and opaque files: nested, hidden, empty, binary.
    Between them: unsorted and non-ASCII names, metadata, and padding that leaves data
    at odd offsets.  Returns `directory`.
    """
    draw = random.Random("every dtype")

    def tensor(name: str, dtype: str, *shape: int) -> Tensor:
        size = size_of(dtype, shape)
        payload = draw.randbytes(size)
        return name, dtype, shape, bytes(b & 1 for b in payload) if dtype == "BOOL" else payload

    every = [tensor(f"z.{dtype.lower()}", dtype, 4, 6) for dtype in BITS]
    order = list(range(len(every)))
    draw.shuffle(order)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    write_safetensors(directory / first, every, metadata={"format": "pt"}, padding=5, order=order)

    odd = [
        tensor("model.norm.weight", "BF16", 33),
        tensor("a.empty.first", "F32", 0),
        tensor("scalar", "F32"),
        tensor("多言語.重み", "F16", 3, 5),
        tensor("many.blocks", "BF16", 331, 1024),
        ("zeros", "BF16", (200, 1024), bytes(200 * 1024 * 2)),
        tensor("a.empty.middle", "BF16", 4, 0, 7),
        tensor("ünïcödé 🦙", "I8", 7),
        tensor("a.empty.last", "C64", 2, 0),
        tensor("A/path/../like name", "U8", 1),
        tensor('quote"back\\slash', "I64", 1, 1),
    ]
    write_safetensors(
        directory / second,
        odd,
        metadata={"format": "pt", "Lizenz": "frei für alle 🦙", "": ""},
        padding=3,
        order=[5, 2, 8, 0, 9, 6, 1, 10, 3, 7, 4],
    )
    weight_map = {name: first for name, *_ in every} | {name: second for name, *_ in odd}
    write_index(directory / "model.safetensors.index.json", weight_map)

    write_safetensors(directory / "nested" / "deeper" / "extra.safetensors", every[:3], padding=64)
    write_safetensors(directory / "nothing.safetensors", [])
    opaque = {
        "config.json": b'{"model_type": "none"}\n',
        "empty.txt": b"",
        ".hidden": b"kept\r\n",
        "nested/vocab.txt": "<s>\n</s>\n日本\n".encode(),
        "nested/deeper/blob.bin": draw.randbytes(70_001),
        "name with spaces and ünïcödé.md": b"# card\n",
    }
    for name, content in opaque.items():
        (directory / name).write_bytes(content)
    return directory


def await_tick(path: Path) -> None:
    """Return once a change of this file would get another time: clocks of files move in steps."""
    probe = path.with_name(f"{path.name}.probe")
    last = path.stat().st_ctime_ns
    while True:
        probe.touch()
        now = probe.stat().st_ctime_ns
        probe.unlink()
        if now > last:
            return
