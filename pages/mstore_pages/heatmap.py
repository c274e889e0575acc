"""The heat map of layers and parts: a strip of cells for each part, as wide as the page.

A strip is a path for each colour, so that a thousand cells are a few KiB.  Names of parts are text
of the page beside the strips.  `pixels` draws the same as a small image, for many at once.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Iterable, Sequence

import msgspec

from mstore_pages.figures import Levels, hatching, legend
from mstore_pages.markup import Markup, join, tag

Row = Sequence[float | None]
_COLOURS = {
    "h0": "f1f3f6",
    "h1": "e0ebf9",
    "h2": "c6dbf4",
    "h3": "a0c4eb",
    "h4": "76a9de",
    "h5": "4e8ccb",
    "h6": "3171b5",
    "h7": "1f5693",
    "h8": "123a6a",
    "n1": "fbe9d3",
    "n2": "f3c48d",
    "n3": "d98736",
    "n4": "a34d06",
    "": "ffffff",
}
"""Those of figures.css; an image has them for both schemes, and the page inverts it in the dark."""
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
    """Return the cells as an image, a pixel each.  told: what it shows, for those who do not."""
    names = ["", *dict.fromkeys(levels.classes)]
    lines = []
    for row in rows:
        codes = [names.index(levels.class_of(value) or "") for value in row]
        halves = zip(codes[::2], [*codes[1::2], 0], strict=False)
        lines.append(bytes([0, *(high << 4 | low for high, low in halves)]))
    palette = b"".join(bytes.fromhex(_COLOURS[name]) for name in names)
    # Four bits a pixel, by palette.  Not compressed: other libraries would give other bytes.
    size = len(rows[0]).to_bytes(4) + len(rows).to_bytes(4) + bytes([4, 3, 0, 0, 0])
    image = b"\x89PNG\r\n\x1a\n" + _chunks(
        (b"IHDR", size),
        (b"PLTE", palette),
        (b"IDAT", zlib.compress(b"".join(lines), 0)),
        (b"IEND", b""),
    )
    address = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    return tag("img", src=address, alt=told, class_="pixels")


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


_STEPS = 64 * 64 - 3
_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"


class Packing(msgspec.Struct, frozen=True):
    """How numbers are packed for the page's script: two letters each, one of 4094 steps.

    low, high: what the first and the last step mean.  is_log: whether steps are factors; then zero
    has a code of its own.  is_short: one letter, for shares from 0 to 1: 0 and 1 are exact.
    """

    low: float
    high: float
    is_log: bool = False
    is_short: bool = False

    @classmethod
    def of(cls, values: Iterable[float | None], *, is_log: bool = False) -> Packing:
        """Return the packing in which all of some numbers have a place."""
        known = [one for one in values if one is not None and (one > 0 or not is_log)]
        return cls(min(known, default=0.0), max(known, default=1.0), is_log)

    def packed(self, rows: Sequence[Row]) -> str:
        """Return the numbers row by row."""
        return "".join(self._code(value) for row in rows for value in row)

    def _code(self, value: float | None) -> str:
        is_known = value is not None and math.isfinite(value)
        if self.is_short:
            return _ALPHABET[_short_step(value) if is_known and value is not None else 0]
        step = 0
        if value is not None and is_known:
            step = 1 if self.is_log and value <= 0 else 2 + round(_STEPS * self._part(value))
        return _ALPHABET[step >> 6] + _ALPHABET[step & 63]

    def _part(self, value: float) -> float:
        """Return how far a number lies from `low` to `high`."""
        if self.is_log:
            wide = math.log(self.high / self.low)
            return math.log(value / self.low) / wide if wide else 0.0
        wide = self.high - self.low
        return (value - self.low) / wide if wide else 0.0


SHARE = Packing(0.0, 1.0, is_short=True)
"""Shares from 0 to 1."""


def _short_step(share: float) -> int:
    """Return 1 for nothing, 63 for all, and a step between for all else."""
    return 1 if share <= 0 else 63 if share >= 1 else min(62, max(2, round(1 + 62 * share)))
