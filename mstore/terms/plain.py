"""Reports as JSON types: the one conversion, for every face that shows them."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from mstore.terms.phrases import Phrase, Text


def plain(value: object, typed: Callable[[Text], str] = str) -> Any:
    """Convert a value to JSON types: ids to hex, reports to objects, NaN and infinities to null.

    typed: formats a phrase, with its commands as the user types them.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name), typed) for f in dataclasses.fields(value)}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item, typed) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, typed) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return typed(value) if isinstance(value, Phrase) else value
