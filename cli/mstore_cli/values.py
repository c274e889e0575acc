"""Plain values of the command line, without the library that typer checks values with.

typer converts every value with pydantic, whose import takes longer than most commands.  Owns the
conversion of texts, paths, whole numbers, lists of them, and defaults.  Whatever else there is, and
whatever is wrong, typer converts or refuses, in its own words: both give the same value.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from enum import Enum
from inspect import Parameter
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

_DIGITS = 9
_OTHER = object()
"""The result for a value that typer must see."""


def convert_plain(parameters: Any, declared: Mapping[str, Parameter]) -> None:
    """Make typer's parameters convert plain values themselves; declared: the function's own."""
    for parameter in parameters:
        if "process_value" not in vars(parameter):
            # typer has options of its own, for help and completion.
            own = declared.get(parameter.name)
            convert = _typer_does if own is None else _converter(own.annotation)
            parameter.process_value = _processed(parameter, convert)


def _processed(parameter: Any, convert: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    # The class is private to typer; its method is the one that click documents.
    whole = parameter.process_value
    several = parameter.multiple or parameter.nargs == -1

    def process_value(context: Any, value: Any) -> Any:
        if value is None:
            found = _OTHER if parameter.required else () if several else None
        elif not several:
            found = convert(value)
        elif isinstance(value, (list, tuple)) and value:
            found = [convert(one) for one in value]
            found = _OTHER if any(one is _OTHER for one in found) else found
        else:
            found = _OTHER
        if found is _OTHER:
            return whole(context, value)
        return (
            found if parameter.callback is None else parameter.callback(context, parameter, found)
        )

    return process_value


def _converter(annotation: Any) -> Callable[[Any], Any]:
    """Return the conversion for `Annotated[KIND | None, OPTION]`, or of one element of a list."""
    kind, option = get_args(annotation)[:2] if get_args(annotation) else (annotation, None)
    kind = next((one for one in get_args(kind) if one is not NoneType), kind)
    if get_origin(kind) is list:
        (kind,) = get_args(kind)
    if getattr(option, "parser", None) is not None:
        return _typer_does
    if kind is str:
        return _text
    if kind is Path:
        return _path
    if kind in (int, float):
        return _number(kind, getattr(option, "min", None), getattr(option, "max", None))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return lambda value: value if isinstance(value, kind) else _OTHER
    return _typer_does


def _typer_does(value: object) -> object:
    return _OTHER


def _text(value: object) -> object:
    if type(value) is not str:
        return _OTHER
    try:
        value.encode()
    except UnicodeEncodeError:
        # Bytes that are no text in this locale.
        return _OTHER
    return value


def _path(value: object) -> object:
    if type(value) is not str or _text(value) is _OTHER:
        return _OTHER
    path = Path(value)
    # typer refuses what is there and cannot be read.
    return path if os.access(path, os.R_OK) or not os.path.exists(path) else _OTHER


def _number(
    kind: type[int | float], least: float | None, most: float | None
) -> Callable[[object], object]:
    def convert(value: object) -> object:
        if kind is int and type(value) is str and value.isascii() and value.isdigit():
            value = int(value) if len(value) <= _DIGITS else value
        if type(value) is not kind:
            return _OTHER
        number: Any = value
        fits = (least is None or least <= number) and (most is None or number <= most)
        return number if fits else _OTHER

    return convert
