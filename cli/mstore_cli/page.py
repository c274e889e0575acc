"""A docs/ page with a generated end.  The text above its marker is written by hand."""

from __future__ import annotations

from pathlib import Path


def marker(command: str) -> str:
    """Return the line below which `command` generates the page."""
    return f"<!-- below: made by `{command}` -->\n"


def renewed(page: str, marker: str, made: str) -> str:
    """Return the page with `made` below the marker.  Raises ValueError if it has no marker."""
    head, found, _old = page.partition(marker)
    if not found:
        raise ValueError(f"no line {marker.strip()}")
    return f"{head}{marker}\n{made}"


def renew(path: Path, marker: str, made: str) -> None:
    """Do that to a file."""
    page = path.read_text(encoding="utf-8")
    path.write_text(renewed(page, marker, made), encoding="utf-8")
