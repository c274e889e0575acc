"""The heat map of layers and parts: a strip of cells for each part, as wide as the page.

A strip is a path for each colour, so that a thousand cells are a few KiB.  Names of parts are text
of the page beside the strips.  `pixels` draws the same as a small image, for many at once.
"""

from __future__ import annotations

import base64
import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import TypeGuard

import msgspec

from mstore_pages.figures import DIGITS, Levels, hatching, legend, style
from mstore_pages.markup import Markup, join, tag

Row = Sequence[float | None]
LEAST_COLUMNS = 12
"""A strip of fewer layers leaves the rest of the width empty: cells do not become bars."""
TICKS = 12


def strip(row: Row, levels: Levels) -> Markup:
    """Return the cells of one part, stretched to the width that there is."""
    runs: dict[str, list[str]] = {}
    start = 0
    names = [levels.class_of(value) for value in row]
    for at in range(1, len(row) + 1):
        if at == len(row) or names[at] != names[start]:
            name = names[start]
            if name:
                runs.setdefault(name, []).append(f"M{start} 0h{at - start}v1h-{at - start}z")
            start = at
    paths = [tag("path", class_=name, d="".join(drawn)) for name, drawn in sorted(runs.items())]
    wide = max(len(row), LEAST_COLUMNS)
    cells = tag("svg", *paths, viewBox=f"0 0 {wide} 1", preserveAspectRatio="none")
    # Below the cells, where nothing is stretched.
    share = f"{100 * len(row) / wide:.4g}%"
    unknown = tag("rect", width=share, height="100%", fill="url(#unknown)")
    return tag("svg", unknown, cells, class_="strip", aria_hidden="true")


def axis(layers: Sequence[str]) -> Markup:
    """Return the numbers of layers below the strips."""
    wide = max(len(layers), LEAST_COLUMNS)
    step = max(1, -(-len(layers) // TICKS))
    marks = [
        tag("text", name, x=f"{100 * (at + 0.5) / wide:.2f}%", y=13, class_="quiet middle")
        for at, name in enumerate(layers)
        if at % step == 0
    ]
    return tag("svg", *marks, class_="figure ticks", aria_hidden="true")


def swatches(levels: Levels, *, unknown: str = "", id: str = "", hidden: bool = False) -> Markup:
    """Return the scale as a list: each colour with the numbers that it stands for."""
    items = [
        tag("li", tag("svg", tag("rect", width="100%", height="100%", class_=name)), told)
        for name, told in legend(levels)
    ]
    if unknown:
        empty = tag("svg", tag("rect", width="100%", height="100%", fill="url(#unknown)"))
        items.append(tag("li", empty, unknown))
    return tag("ul", *items, class_="legend", id=id or None, hidden=hidden)


def hatch() -> Markup:
    """Return the hatching of unknown cells, once for a page."""
    return tag("svg", hatching("unknown"), class_="defs figure", aria_hidden="true")


def pixels(rows: Sequence[Row], levels: Levels, told: str) -> Markup:
    """Return the cells as an image, a pixel each, for light and dark.

    told: what it shows, for those who do not see it.
    """
    light, dark = (_png(rows, levels, palette) for palette in palettes())
    source = tag("source", srcset=dark, media="(prefers-color-scheme:dark)")
    return tag("picture", source, tag("img", src=light, alt=told, class_="pixels"))


@cache
def palettes() -> tuple[dict[str, str], dict[str, str]]:
    """Return the colours of classes in figures.css, for light and for dark; "": the background."""
    light, _, dark = style().partition("@media (prefers-color-scheme:dark)")
    found = [dict(re.findall(r"\.([hn]\d|paper){fill:#(\w+)}", text)) for text in (light, dark)]
    for one in found:
        # Three letters stand for six.
        paper = one.pop("paper")
        one[""] = paper if len(paper) == 6 else "".join(2 * letter for letter in paper)
    return found[0], found[1]


def _png(rows: Sequence[Row], levels: Levels, colours: Mapping[str, str]) -> str:
    classes = [[levels.class_of(value) or "" for value in row] for row in rows]
    names = list(dict.fromkeys(name for row in classes for name in row))
    # By palette, as few bits a pixel as it needs.
    bits = next(bits for bits in (1, 2, 4) if len(names) <= 1 << bits)
    lines = []
    for row in classes:
        line = 0
        for name in row:
            line = line << bits | names.index(name)
        size = -(-len(row) * bits // 8)
        lines.append(b"\0" + (line << (8 * size - len(row) * bits)).to_bytes(size))
    palette = b"".join(bytes.fromhex(colours[name]) for name in names)
    head = len(rows[0]).to_bytes(4) + len(rows).to_bytes(4) + bytes([bits, 3, 0, 0, 0])
    image = b"\x89PNG\r\n\x1a\n" + _chunks(
        (b"IHDR", head),
        (b"PLTE", palette),
        # Not compressed: other libraries would give other bytes.
        (b"IDAT", zlib.compress(b"".join(lines), 0)),
        (b"IEND", b""),
    )
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def _chunks(*chunks: tuple[bytes, bytes]) -> bytes:
    """Return chunks of a PNG: length, kind, data and checksum of each."""
    return b"".join(
        len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4)
        for kind, data in chunks
    )


def rows_of(parts: Sequence[str], rows: Sequence[Row], levels: Levels) -> Markup:
    """Return all strips, each with the name of its part."""
    return join(
        tag("div", tag("span", part, class_="name"), strip(row, levels), class_="row")
        for part, row in zip(parts, rows, strict=True)
    )


_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
_LEAST = 1e-8
"""What is smaller is packed as zero, as `percent` writes it."""
_MANTISSAS = 900
"""Of three digits: 100 to 999."""


class Packing(msgspec.Struct, frozen=True):
    """How numbers are packed for the page's script: with the digits that `percent` shows.

    A number is `letters` letters: 0 for unknown, 1 for zero, else 2 and its place among the codes
    in use; `A~80.` is 80 times A.  `steps` are the distances from each code to the next.  A code
    counts numbers of three digits from 100 * 10**low: 900 for each of `decades`, and then the
    negative ones.
    """

    letters: int
    low: int
    decades: int
    steps: tuple[int, ...]

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Packing:
        """Return the packing in which all of some numbers have a place."""
        known = [one for one in values if _is_told(one)]
        exponents = [_digits(one)[1] for one in known]
        low = min(exponents, default=0)
        decades = max(exponents, default=0) - low + 1
        codes = sorted({_code(one, low, decades) for one in known})
        letters = 1
        while 64**letters < 2 + len(codes):
            letters += 1
        return cls(letters, low, decades, tuple(b - a for a, b in pairwise([0, *codes])))

    def packed(self, rows: Sequence[Row]) -> str:
        """Return the numbers row by row."""
        places = {code: n for n, code in enumerate(accumulate(self.steps), 2)}

        def place(value: float | None) -> int:
            if _is_told(value):
                return places[_code(value, self.low, self.decades)]
            return 0 if value is None or not math.isfinite(value) else 1

        shifts = [6 * n for n in reversed(range(self.letters))]
        every = (place(value) for row in rows for value in row)
        text = "".join(_ALPHABET[one >> shift & 63] for one in every for shift in shifts)
        return re.sub(r"(.)\1{5,}", lambda run: f"{run[1]}~{len(run[0])}.", text)


def _code(value: float, low: int, decades: int) -> int:
    mantissa, exponent = _digits(value)
    at = mantissa - 100 + _MANTISSAS * (exponent - low)
    return at + (_MANTISSAS * decades if value < 0 else 0)


def _is_told(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value) and abs(value) >= _LEAST


def _digits(value: float) -> tuple[int, int]:
    """Return three digits as a whole number, and the power of ten that it is multiplied by."""
    # Of the percentage: so it is rounded as the page's other numbers are.
    mantissa, _, exponent = f"{100 * abs(value):.{DIGITS - 1}e}".partition("e")
    return int(mantissa.replace(".", "")), int(exponent) - DIGITS + 1 - 2
