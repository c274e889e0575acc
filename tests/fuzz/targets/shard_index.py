"""A shard index: which tensor lies in which file."""

from __future__ import annotations

from collections.abc import Iterable

from mutation import Form

from mstore.checkpoint.directory import read_weight_map
from mstore.checkpoint.header import DEFAULT_LIMITS
from targets.samples import scratch

FORM = Form.JSON


def target(data: bytes) -> None:
    path = scratch() / "model.safetensors.index.json"
    path.write_bytes(data)
    read = read_weight_map(path, where="input", limits=DEFAULT_LIMITS)
    assert all(isinstance(one, str) for pair in read.items() for one in pair)


def seeds() -> Iterable[bytes]:
    yield b'{"weight_map": {"a": "1.safetensors", "b": "x/2.safetensors"}, "metadata": {"n": 8}}'
