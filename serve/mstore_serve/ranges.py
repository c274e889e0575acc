"""Which bytes a request asks for: the Range header, and answers of several ranges.  Pure.

A single range, a suffix, an open end and several ranges are answered (RFC 9110, section 14).
Ranges that overlap or touch are joined, which also puts them in order; so an answer is never longer
than the whole, but for the lines between its parts. What is no range of bytes is ignored, as that
section says: the answer is the whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

MOST_RANGES: Final = 64
"""More in one request are refused."""

_SPEC: Final = re.compile(r"([0-9]*)-([0-9]*)")
_HUGE: Final = 1 << 63
_LONGEST: Final = 18
"""Digits of a number that is converted; a longer one is beyond any file."""


class Span(msgspec.Struct, frozen=True):
    """The bytes from `start` to before `stop`; at least one unless the file is empty."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


class Unsatisfiable(Exception):
    """No byte of the file is in the ranges, or they are too many."""


def parse(header: str, size: int) -> list[Span] | None:
    """Return the ranges of a file of `size` bytes, None if the header is to be ignored.

    Raises Unsatisfiable.
    """
    unit, _, listed = header.partition("=")
    specs = [one for one in (part.strip(" \t") for part in listed.split(",")) if one]
    if unit.strip(" \t").lower() != "bytes" or not specs:
        return None
    pairs = [_SPEC.fullmatch(one) for one in specs]
    found: list[Span] = []
    is_suffix_of_nothing = False
    for pair in pairs:
        if pair is None or pair[0] == "-":
            return None
        first, last = (_number(text) for text in pair.groups())
        if first is None:
            assert last is not None
            start, stop = max(0, size - last), size
            is_suffix_of_nothing |= last > 0 and size == 0
        else:
            if last is not None and last < first:
                return None
            start, stop = first, size if last is None else min(size, last + 1)
        if start < stop:
            found.append(Span(start, stop))
    if len(specs) > MOST_RANGES:
        raise Unsatisfiable
    if not found:
        if is_suffix_of_nothing:
            # The last bytes of an empty file are the whole of it, which no Content-Range can say.
            return None
        raise Unsatisfiable
    return _joined(found)


def _number(text: str) -> int | None:
    if not text:
        return None
    text = text.lstrip("0") or "0"
    return int(text) if len(text) <= _LONGEST else _HUGE


def _joined(spans: list[Span]) -> list[Span]:
    """Join those that overlap or touch; without such, keep the order of the request."""
    merged: list[Span] = []
    for one in sorted(spans, key=lambda span: span.start):
        if merged and one.start <= merged[-1].stop:
            merged[-1] = Span(merged[-1].start, max(merged[-1].stop, one.stop))
        else:
            merged.append(one)
    return spans if len(merged) == len(spans) else merged


def content_range(span: Span, size: int) -> str:
    """Return the value of Content-Range."""
    return f"bytes {span.start}-{span.stop - 1}/{size}"


Part = bytes | Span
"""Bytes of an answer: these, or those of the file."""


def length_of(parts: Sequence[Part]) -> int:
    """Return the bytes that the parts are together."""
    return sum(one.length if isinstance(one, Span) else len(one) for one in parts)


def multipart(spans: Sequence[Span], size: int, media_type: str, boundary: str) -> list[Part]:
    """Return the body of an answer with several ranges, of type multipart/byteranges."""
    parts: list[Part] = []
    for span in spans:
        lead = "\r\n" if parts else ""
        head = (
            f"{lead}--{boundary}\r\nContent-Type: {media_type}\r\n"
            f"Content-Range: {content_range(span, size)}\r\n\r\n"
        )
        parts += [head.encode("latin-1"), span]
    return [*parts, f"\r\n--{boundary}--\r\n".encode("latin-1")]
