"""Sealed texts: files of lines that state a generation and end with a hash of themselves.

    <head>                        what it is, and the version of its form
    generation <decimal>
    ...                           its lines
    blake3 <64 hex digits>        of all bytes before this line

Each line ends in a newline. Such a text is replaced as a whole (`fs.replace_file`), so a crash
leaves the old one or the new one. Those that are kept beside it have a generation as their suffix.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from blake3 import blake3

from mstore import fs
from mstore.terms.errors import Corrupt, StorageFailed
from mstore.terms.phrases import call
from mstore.terms.sizes import format_size

MAX_BYTES: Final = 1 << 28
"""Longest text that is read, in bytes: about a million refs with the longest names."""
_GENERATION: Final = re.compile(rb"generation (0|[1-9][0-9]{0,18})\n")
_CHECK: Final = b"blake3 "
_CHECK_BYTES: Final = len(_CHECK) + 64 + 1
_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,18}")


def is_number(text: str) -> bool:
    """Return whether this is a generation, as these texts have it."""
    return _NUMBER.fullmatch(text) is not None


def encode(head: str, generation: int, lines: Sequence[bytes]) -> bytes:
    """Return the text of these lines, each with its newline."""
    body = f"{head}\ngeneration {generation}\n".encode() + b"".join(lines)
    return body + _CHECK + blake3(body).hexdigest().encode() + b"\n"


def read(path: Path) -> bytes | None:
    """Return the bytes of a text; None if it is missing. Raises Corrupt, StorageFailed."""
    try:
        data = fs.read_file(path, MAX_BYTES + 1)
    except StorageFailed as error:
        if error.errno == errno.ENOENT:
            return None
        raise
    if len(data) > MAX_BYTES:
        raise Corrupt(f"longer than {format_size(MAX_BYTES)}", where=str(path))
    return data


def decode(path: Path, data: bytes, head: str, called: str) -> tuple[int, list[bytes]]:
    """Return generation and lines of the text at `path`. Raises Corrupt; `called` says of what."""
    body, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
    if check != _CHECK + blake3(body).hexdigest().encode() + b"\n":
        raise Corrupt(f"not a {called}, or damaged", where=str(path), hint=call("reindex"))
    lines = body.splitlines(keepends=True)
    match = _GENERATION.fullmatch(lines[1]) if len(lines) > 1 else None
    if lines[:1] != [f"{head}\n".encode()] or match is None or not body.endswith(b"\n"):
        raise Corrupt(f"not a {called}", where=str(path), hint=call("reindex"))
    return int(match[1]), lines[2:]


def read_lines(path: Path, head: str, called: str) -> tuple[int, list[bytes]]:
    """Read a text and decode it.  Raises Corrupt (also if it is missing), StorageFailed."""
    data = read(path)
    if data is None:
        raise Corrupt("no such file or directory", where=str(path))
    return decode(path, data, head, called)


def drop_old(path: Path, most: int) -> None:
    """Remove all but the latest of the files that are kept beside `path`, as far as possible."""
    for _, old in kept(path)[most:]:
        with suppress(StorageFailed):
            fs.unlink(old, missing_ok=True)


def kept(path: Path) -> list[tuple[int, Path]]:
    """Return the files beside `path` with its name and a generation, the latest first."""
    found = []
    prefix = f"{path.name}."
    # A copy of a store may lack the directory.
    with fs.translated(path.parent):
        try:
            names = fs.listed(path.parent)
        except FileNotFoundError:
            return []
    for name in names:
        number = name.removeprefix(prefix)
        if name != number and is_number(number):
            found.append((int(number), path.with_name(name)))
    return sorted(found, reverse=True)
