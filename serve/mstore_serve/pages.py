"""The HTML page of a directory: for browsers, and for programs that follow links (`wget -r`).

Pure.  Names come from checkpoints: each is escaped, and a link is relative to the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from mstore_serve.addresses import segment
from mstore_serve.documents import ServedEntry


def page(title: str, entries: Sequence[ServedEntry], *, is_top: bool) -> bytes:
    """Return the page of a directory."""
    lines = [] if is_top else ['<li><a href="../">../</a></li>']
    for one in entries:
        tail = "/" if one.name.endswith("/") else ""
        link = segment(one.name.removesuffix("/")) + tail
        size = "" if one.size is None else f" {one.size}"
        lines.append(f'<li><a href="{link}">{escape(one.name)}</a>{size}</li>')
    listed = "\n".join(lines)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8">'
        f"<title>{escape(title)}</title></head>\n"
        f"<body>\n<h1>{escape(title)}</h1>\n<ul>\n{listed}\n</ul>\n</body>\n</html>\n"
    ).encode()
