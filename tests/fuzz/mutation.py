"""Changing inputs: of bytes, of text, and of the values that MessagePack and JSON spell.

A seeded generator decides, so a run can be had again from its number.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any

import msgspec


class Form(Enum):
    """What an input is made of, besides bytes."""

    BYTES = "bytes"
    TEXT = "text"
    JSON = "json"
    HEADER = "header"
    MESSAGEPACK = "messagepack"


LIMIT = 1 << 20
NUMBERS = (0, 1, -1, 7, 127, 128, 255, 256, 65535, 65536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
NUMBERS += (1 << 32, (1 << 53) + 1, (1 << 62), (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63))
FLOATS = (0.0, -0.0, 0.5, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "",
    "a",
    "..",
    "../x",
    "/x",
    "a\0b",
    "\x1b[2J",
    "ü",
    "\U0001f999",
    "x" * 300,
    "F32",
    "BYTES",
)
PIECES = (
    b"",
    b"\0",
    b"\xff" * 8,
    b"\0" * 40,
    b'"',
    b"{",
    b"[" * 50,
    b"\n",
    b"\r",
    b"---\n",
    b" " * 99,
)


def mutate(data: bytes, form: Form, draw: random.Random, others: Sequence[bytes]) -> bytes:
    """The input after one to four changes."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        structured = _STRUCTURED.get(form)
        if structured is not None and draw.random() < 0.6:
            data = structured(data, draw)
        else:
            data = draw.choice(_PLAIN)(data, draw, others)
    return data[:LIMIT]


# -- bytes ---------------------------------------------------------------------------------------


def _flip(data: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    if not data:
        return data
    at = draw.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]


def _set(data: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    at = draw.randrange(len(data) + 1)
    width = draw.choice((1, 2, 4, 8))
    number = draw.choice(NUMBERS) % (1 << 8 * width)
    return data[:at] + number.to_bytes(width, draw.choice(("little", "big"))) + data[at + width :]


def _cut(data: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _remove(data: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    at = draw.randrange(len(data) + 1)
    return data[:at] + data[at + draw.randrange(1, 40) :]


def _insert(data: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    at = draw.randrange(len(data) + 1)
    piece = draw.choice(PIECES) if draw.random() < 0.5 else draw.randbytes(draw.randrange(1, 9))
    return data[:at] + piece * draw.choice((1, 1, 1, 3, 2000)) + data[at:]


def _repeat(data: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    at = draw.randrange(len(data) + 1)
    end = at + draw.randrange(1, 200)
    return data[:at] + data[at:end] * draw.choice((2, 3, 500)) + data[end:]


def _splice(data: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    other = draw.choice(others)
    return data[: draw.randrange(len(data) + 1)] + other[draw.randrange(len(other) + 1) :]


_PLAIN: tuple[Callable[[bytes, random.Random, Sequence[bytes]], bytes], ...] = (
    _flip, _flip, _set, _set, _cut, _remove, _insert, _repeat, _splice,
)  # fmt: skip


# -- values --------------------------------------------------------------------------------------


def _messagepack(data: bytes, draw: random.Random) -> bytes:
    try:
        return msgspec.msgpack.encode(_changed(msgspec.msgpack.decode(data), draw))
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        return data


def _json(data: bytes, draw: random.Random) -> bytes:
    try:
        changed = _changed(json.loads(data), draw)
        return json.dumps(changed, ensure_ascii=False, default=repr).encode()
    except (ValueError, RecursionError):
        return data


def _header(data: bytes, draw: random.Random) -> bytes:
    text = _json(data[8 : 8 + int.from_bytes(data[:8], "little")], draw)
    return len(text).to_bytes(8, "little") + text


_STRUCTURED: dict[Form, Callable[[bytes, random.Random], bytes]] = {
    Form.MESSAGEPACK: _messagepack,
    Form.JSON: _json,
    Form.HEADER: _header,
}


def _changed(value: Any, draw: random.Random) -> Any:
    """The value with one node of its tree changed."""
    places = list(_places(value))
    if not places:
        return _other(value, draw)
    inside, key = draw.choice(places)
    kind = draw.randrange(6)
    if kind == 0:
        del inside[key]
    elif kind == 1 and isinstance(inside, list):
        inside.extend([inside[key]] * draw.choice((1, 2, 100, 5000)))
    elif kind == 2:
        other, at = draw.choice(places)
        inside[key] = other[at] if other is not inside else None
    else:
        inside[key] = _other(inside[key], draw)
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    waiting = [value]
    while waiting:
        inside = waiting.pop()
        keys: Any = ()
        if isinstance(inside, dict):
            keys = list(inside)
        elif isinstance(inside, list):
            keys = range(len(inside))
        for key in keys:
            yield inside, key
            waiting.append(inside[key])


def _other(value: Any, draw: random.Random) -> Any:
    if isinstance(value, bool) or value is None or draw.random() < 0.15:
        return draw.choice((None, True, False, 0, 1.5, "", b"", [], {}, "text", [[]]))
    if isinstance(value, int):
        return draw.choice((*NUMBERS, value + 1, value - 1, value * 2))
    if isinstance(value, float):
        return draw.choice((*FLOATS, value * 2, -value))
    if isinstance(value, str):
        return draw.choice((*TEXTS, value + value, value[:-1], value.upper(), value * 50))
    if isinstance(value, bytes):
        return (
            _set(value, draw, ())
            if draw.random() < 0.5
            else draw.choice((b"", value * 2, value[:-1]))
        )
    if isinstance(value, list):
        return draw.choice(([], value[::-1], value * 2))
    return {}
