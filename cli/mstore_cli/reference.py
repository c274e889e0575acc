"""The generator of the reference in docs/cli.md, from the program itself.

`python -m mstore_cli.reference docs/cli.md` replaces the text below the marker in that page; the
text above it is written by hand.  A test compares the page with `reference()`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from typer.core import TyperCommand, TyperGroup

from mstore_cli import page
from mstore_cli.keys import DOCUMENTS, OBJECTS, Key, keys_of
from mstore_cli.tree import PROGRAM, build
from mstore_cli.verbs import VERBS

MARKER = page.marker("python -m mstore_cli.reference docs/cli.md")
WIDTH = 80


def reference() -> str:
    """Return the generated part of docs/cli.md: one section per command, then nested objects."""
    group = build()
    parts = [f"## {PROGRAM}\n\n{_block(_help(group, ()))}"]
    for verb in VERBS:
        parts.append(f"## {PROGRAM} {verb}\n\n{_block(_help(group, (verb,)))}")
        if verb in DOCUMENTS:
            for line in (name for name in DOCUMENTS if name.split()[0] == verb):
                options = " ".join((*line.split()[1:], "--json"))
                parts.append(f"With `{options}`:\n\n{table(DOCUMENTS[line])}")
        else:
            parts.append("It has no JSON form.\n")
    parts.append("## Objects inside objects\n")
    for word, report in sorted(OBJECTS.items()):
        parts.append(f"### {word}\n\n{table(keys_of(report))}")
    return "\n".join(parts)


def _help(group: TyperGroup, path: Sequence[str]) -> str:
    """Return a help text as the program prints it on a terminal of 80 columns."""
    context = group.make_context(PROGRAM, ["--version"], resilient_parsing=True)
    context.terminal_width = WIDTH - 2
    for name in path:
        command = group.commands[name]
        assert isinstance(command, TyperCommand)
        context = command.make_context(name, [], parent=context, resilient_parsing=True)
    return context.get_help()


def _block(text: str) -> str:
    return f"```text\n{text}\n```\n"


def table(keys: Sequence[Key]) -> str:
    """Return the table of some keys."""
    return "".join(_rows(keys))


def _rows(keys: Sequence[Key]) -> Iterator[str]:
    yield "| key | value | meaning |\n| --- | --- | --- |\n"
    for key in keys:
        yield f"| `{key.name}` | {key.kind} | {key.meaning} |\n"


def main() -> None:
    """Rewrite the page named on the command line."""
    page.renew(Path(sys.argv[1]), MARKER, reference())


if __name__ == "__main__":
    main()
