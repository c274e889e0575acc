"""Strict parsing of untrusted JSON objects, with bounded cost and predictable types.

Refuses what `json.loads` accepts: repeated keys, NaN and Infinity, nesting beyond the stack. Knows
nothing of safetensors. Also writes JSON as the output has it, in headers and in small files.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any, Final

from mstore.checkpoint.paths import quoted
from mstore.terms.errors import BadCheckpoint

# 2**64 - 1 has 20 digits; longer numbers are never converted (that takes quadratic time).
_MAX_DIGITS = 20


class _Repeated(dict[str, object]):
    """An object with a repeated key, kept until its name in the enclosing object is known."""

    key: str = ""


def parse_object(raw: bytes, *, what: str, where: str, max_containers: int) -> dict[str, object]:
    """Parse the JSON object in `raw`, in source order; accepts white space around it.

    An integer that fits 64 bits becomes an int, every other number NaN: mstore needs no other
    numbers from a checkpoint's JSON. `what` starts the error ("the header"). `max_containers`
    bounds the memory: sixteen MiB of "[]," would take six hundred. It limits the count of opening
    brackets, including those inside strings.

    Raises BadCheckpoint at `where` for bytes that are not UTF-8, not JSON or not an object, for a
    repeated key in any object (naming the key, and the entry that contains it), and for too many
    objects and arrays or too deep nesting.
    """
    containers = raw.count(b"{") + raw.count(b"[")
    if containers > max_containers:
        raise BadCheckpoint(
            f"{what} opens {containers} objects and arrays; the limit is {max_containers}",
            where=where,
        )
    repeated: list[_Repeated] = []

    def build(pairs: list[tuple[str, object]]) -> dict[str, object]:
        built = dict(pairs)
        if len(built) == len(pairs):
            return built
        mark = _Repeated(built)
        mark.key = _first_repeat(pairs)
        repeated.append(mark)
        return mark

    try:
        tree = json.loads(
            str(raw, "utf-8"),
            object_pairs_hook=build,
            parse_int=_count,
            parse_float=_not_a_count,
            parse_constant=_no_constant,
        )
    except UnicodeDecodeError as error:
        raise BadCheckpoint(f"{what} is not UTF-8 (byte {error.start})", where=where) from None
    except json.JSONDecodeError as error:
        raise BadCheckpoint(
            f"{what} is not JSON: {error.msg} at character {error.pos}", where=where
        ) from None
    except RecursionError:
        raise BadCheckpoint(f"{what} is nested too deeply", where=where) from None
    except ValueError as error:
        raise BadCheckpoint(f"{what} is not JSON: {error}", where=where) from None
    if not isinstance(tree, dict):
        raise BadCheckpoint(f"{what} is not a JSON object", where=where)
    if repeated:
        raise BadCheckpoint(f"{what} {_describe_repeat(tree, repeated)}", where=where)
    return tree


def _first_repeat(pairs: list[tuple[str, object]]) -> str:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            return key
        seen.add(key)
    raise AssertionError("called for an object without a repeated key")


def _describe_repeat(tree: dict[str, object], repeated: list[_Repeated]) -> str:
    if isinstance(tree, _Repeated):
        return f"has the key {quoted(tree.key)} twice"
    for key, value in tree.items():
        if isinstance(value, _Repeated):
            return f"has the key {quoted(value.key)} twice in {quoted(key)}"
    return f"has the key {quoted(repeated[0].key)} twice in one object"


def _count(text: str) -> float:
    # "-0" is an int to Python and a float to every reader with unsigned fields.
    if len(text) > _MAX_DIGITS or text == "-0":
        return math.nan
    number = int(text)
    return number if number < 2**64 else math.nan


def _not_a_count(text: str) -> float:
    return math.nan


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


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


def entries_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return the entries of an object that are others after than before, as JSON, sorted by name.

    null for one that is gone; empty if there are none. Of objects in objects, whole ones.
    """
    found = {name: one for name, one in after.items() if before.get(name, after) != one}
    found |= dict.fromkeys(before.keys() - after.keys())
    return json.dumps(found, sort_keys=True, ensure_ascii=False) if found else ""


def with_entries(before: Mapping[str, Any], entries: str) -> dict[str, Any]:
    """Return an object with these entries (`entries_between`); what it had keeps its place."""
    found = json_object(entries.encode())
    merged = {**before, **found}
    return {name: one for name, one in merged.items() if one is not None or name not in found}


def json_bytes(fields: Mapping[str, Any]) -> bytes:
    """Return an object as people read it."""
    return (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode()
