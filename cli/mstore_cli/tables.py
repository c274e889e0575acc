"""Tables that fit a width: which columns stand side by side, and where cells wrap.

Pure: takes cells, returns lines; knows no terminal and no style.  Never truncates: if a row is too
wide, its last columns move under the first ones, and only a cell wider than the whole width wraps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

GAP = 2
INDENT = 2
SHORTEST_SENTENCE = 24
"""Columns of sentences are not made narrower than this."""


class Piece(msgspec.Struct, frozen=True):
    """Text within a line, and the number of its column (None: a blank)."""

    text: str
    column: int | None = None


Line = list[Piece]


class _Band(msgspec.Struct, frozen=True):
    """Columns side by side: their numbers, widths and indentation."""

    columns: tuple[int, ...]
    widths: tuple[int, ...]
    indent: int


def lay_out(
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[bool],
    sentences: Sequence[bool],
    width: int | None,
) -> list[list[Line]]:
    """Return the lines of each row; the first row may be headings.

    right: columns whose cells are aligned right; sentences: columns that may be made
    narrower than their text, which wraps. width: None for unlimited.
    """
    columns = len(right)
    natural = [max((cell_len(row[n]) for row in rows), default=0) for n in range(columns)]
    least = [
        min(own, max(SHORTEST_SENTENCE, *(_longest_word(row[n]) for row in rows)))
        if sentences[n]
        else own
        for n, own in enumerate(natural)
    ]
    bands = _bands(natural, least, width)
    return [[line for band in bands for line in _lines(row, band, right)] for row in rows]


def lay_out_fields(pairs: Sequence[tuple[str, str]], width: int | None) -> list[list[Line]]:
    """Return the lines of `name  value` pairs, the values aligned: column 0 and column 1.

    A value with a word too long to fit beside the names goes under its name.
    """
    first = max((cell_len(name) for name, _ in pairs), default=0)
    found: list[list[Line]] = []
    for name, value in pairs:
        head = [Piece(name, 0)]
        beside = cell_len(value) if width is None else width - first - GAP
        if width is None or (
            beside >= SHORTEST_SENTENCE
            # A value that fits nowhere wraps in its normal place.
            and not beside < _longest_word(value) <= width - INDENT
        ):
            texts = _folded(value, beside)
            heads = [[*head, Piece(" " * (first - cell_len(name) + GAP))]]
            heads += [[Piece(" " * (first + GAP))]] * (len(texts) - 1)
        else:
            texts = wrapped(value, width - INDENT)
            found.append([head])
            heads = [[Piece(" " * INDENT)]] * len(texts)
        found.append([[*one, Piece(text, 1)] for one, text in zip(heads, texts, strict=True)])
    return found


def cell_len(text: str) -> int:
    """Return the columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    # Imported here: most tables are ASCII, and the widths of all other characters are a big table.
    from rich import cells

    return cells.cell_len(text)


def _chopped(text: str, width: int) -> list[str]:
    """Split the text into lines of at most `width` columns, anywhere."""
    from rich.cells import chop_cells

    return chop_cells(text, width)


def _longest_word(text: str) -> int:
    return max(map(cell_len, text.split(" ")))


def _bands(natural: Sequence[int], least: Sequence[int], width: int | None) -> list[_Band]:
    everything = tuple(range(len(natural)))
    if width is None or sum(natural) + GAP * (len(natural) - 1) <= width:
        return [_Band(everything, tuple(natural), 0)]
    bands: list[_Band] = []
    left = list(everything)
    while left:
        indent = INDENT if bands else 0
        room, taken = max(1, width - indent), [left.pop(0)]
        used = least[taken[0]]
        while left and used + GAP + least[left[0]] <= room:
            used += GAP + least[left[0]]
            taken.append(left.pop(0))
        spare = max(0, room - used)
        widths = []
        for column in taken:
            more = min(spare, natural[column] - least[column])
            spare -= more
            widths.append(min(least[column] + more, room))
        bands.append(_Band(tuple(taken), tuple(widths), indent))
    return bands


def _lines(row: Sequence[str], band: _Band, right: Sequence[bool]) -> Iterator[Line]:
    """Return the lines of one row in one band; none if only other bands have text."""
    cells = [
        _folded(row[column], width) for column, width in zip(band.columns, band.widths, strict=True)
    ]
    if band.indent and not any(row[column] for column in band.columns):
        return
    for number in range(max(map(len, cells))):
        line = [Piece(" " * band.indent)] if band.indent else []
        for place, (column, width) in enumerate(zip(band.columns, band.widths, strict=True)):
            text = cells[place][number] if number < len(cells[place]) else ""
            blank = " " * (width - cell_len(text))
            line.append(Piece(f"{blank}{text}" if right[column] else f"{text}{blank}", column))
            if place + 1 < len(band.columns):
                line.append(Piece(" " * GAP))
        yield line


def _folded(text: str, width: int) -> list[str]:
    """Return a text that fits as it is, blanks included; else wrap it."""
    return [text] if cell_len(text) <= width else wrapped(text, width)


def wrapped(text: str, width: int) -> list[str]:
    """Wrap the text to lines of at most `width`, between words, and within longer words."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if cell_len(longer) <= width:
            lines[-1] = longer
            continue
        *full, last = _chopped(word, width) or [""]
        lines += [*full, last]
    return [line for line in lines if line] or [""]
