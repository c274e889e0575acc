"""The generator of the merge method table in docs/merge-methods.md, from the methods.

`python -m mstore_cli.method_table docs/merge-methods.md` replaces the table after the marker in
that page.  A test compares the page with `renewed()`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import Parameter
from mstore.merge.methods.registry import METHODS
from mstore_cli import page

_TABLE = re.compile(r"\A(\n|\|.*\n)*")
MARKER = page.marker("python -m mstore_cli.method_table docs/merge-methods.md")


def table() -> str:
    """Return the table, one row per method."""
    head = "| method | result | parameters (default) | bound on the error | source |\n"
    return f"{head}|---|---|---|---|---|\n{''.join(map(_row, METHODS.values()))}"


def renewed(text: str) -> str:
    """Return the page with a new table below the marker.  Raises ValueError if it has no marker."""
    head, found, rest = text.partition(MARKER)
    if not found:
        raise ValueError(f"no line {MARKER.strip()}")
    below = _TABLE.sub("", rest, count=1)
    return f"{head}{MARKER}\n{table()}\n{below}"


def _row(method: Method) -> str:
    parameters = ", ".join(_parameter(p) for p in method.parameters)
    bound = "certified" if method.has_bound else "estimate"
    formula = method.formula.replace("|", "\\|")
    return f"| `{method.name}` | {formula} | {parameters} | {bound} | {method.source} |\n"


def _parameter(one: Parameter) -> str:
    name = f"`{one.name}`{'*' if one.each else ''}"
    return name if one.default is None else f"{name} ({_word(one.default)})"


def _word(value: float) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


def main() -> None:
    """Rewrite the page named on the command line."""
    path = Path(sys.argv[1])
    path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
