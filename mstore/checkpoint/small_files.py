"""The bytes of headers and of small JSON files, as the output has them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, Final

LENGTH_BYTES: Final = 8
"""Bytes of a safetensors header before its JSON."""
METADATA_KEY: Final = "__metadata__"
"""Its key that names no tensor."""
_ALIGNMENT: Final = 8


def header_bytes(fields: Mapping[str, Any]) -> bytes:
    """Return a safetensors header, padded so that data is aligned."""
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def json_object(data: bytes) -> dict[str, Any]:
    """Return the object in a file, empty if it is none."""
    try:
        fields = json.loads(data)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def json_bytes(fields: Mapping[str, Any]) -> bytes:
    """Return an object as people read it."""
    return (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode()
