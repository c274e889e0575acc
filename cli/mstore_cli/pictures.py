"""Files that commands draw besides what they print: pictures as SVG, pages as HTML.

`mstore_pages` draws; here it is written, whole or not at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mstore_pages.markup import Markup
    from mstore_pages.matrix import Matrix


def write_svg(path: Path, drawn: Markup) -> None:
    """Write a picture.  Raises StorageFailed."""
    from mstore_pages.figures import svg_file

    write(path, svg_file(drawn))


def write_matrix(path: Path, matrix: Matrix) -> None:
    """Draw a table of numbers and write it.  Raises StorageFailed."""
    from mstore_pages import matrix as pictures

    write_svg(path, pictures.draw(matrix))


def write(path: Path, text: str) -> None:
    """Write a page or a picture.  Raises StorageFailed."""
    from mstore.fs import replace_file

    replace_file(path, text)
