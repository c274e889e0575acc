"""The generated ends of pages in docs/: from the program itself, its methods and its documents.

`python -m mstore_cli.reference docs/PAGE.md` replaces the text below the marker in that page (of
merge-methods.md, the table); the text above it is written by hand.  Tests compare each page with
`renewed`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import Parameter
from mstore.merge.methods.registry import METHODS
from mstore_cli import api_reference
from mstore_cli.command import find
from mstore_cli.keys import DOCUMENTS, OBJECTS, SERVED, Key, keys_of
from mstore_cli.tree import PROGRAM, build
from mstore_cli.verbs import VERBS
from mstore_serve import documents

WIDTH = 80
ADDRESSES: dict[str, type] = {
    "/": documents.RootDocument,
    "/refs": documents.RefsDocument,
    "/refs/NAME": OBJECTS["ref"],
    "/snapshots": documents.SnapshotsDocument,
    "/snapshots/ID": documents.SnapshotDocument,
    "/snapshots/ID/files/": documents.DirectoryDocument,
    "/snapshots/ID/tensors/": documents.TensorsDocument,
    "an error": documents.ErrorDocument,
}
"""The document of each address of `mstore serve`."""
_METHODS = re.compile(r"\A(\n|\|.*\n)*")


def marker(page: str) -> str:
    """Return the line of docs/PAGE below which it is generated."""
    return f"<!-- below: made by `python -m mstore_cli.reference docs/{page}` -->\n"


def renewed(page: str, text: str) -> str:
    """Return the text of docs/PAGE, made anew below its marker.

    Raises KeyError for a page that is not generated, ValueError for a text without the marker.
    """
    head, found, rest = text.partition(marker(page))
    if not found:
        raise ValueError(f"no line {marker(page).strip()}")
    # Below the table of methods, people write on.
    below = f"\n{_METHODS.sub('', rest, count=1)}" if page == "merge-methods.md" else ""
    return f"{head}{found}\n{PAGES[page]()}{below}"


def of_commands() -> str:
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


def _help(group: click.Group, path: Sequence[str]) -> str:
    """Return a help text as the program prints it on a terminal of 80 columns."""
    context = group.make_context(PROGRAM, ["--version"], resilient_parsing=True)
    context.terminal_width = WIDTH - 2
    for name in path:
        context = find(name).make_context(name, [], parent=context, resilient_parsing=True)
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


def of_documents() -> str:
    """Return the generated part of docs/serving.md: a table for each document and object."""
    parts = [f"### {address}\n\n{table(keys_of(one))}" for address, one in ADDRESSES.items()]
    objects = {"ref": OBJECTS["ref"], "tensor": OBJECTS["tensor"], **SERVED}
    parts += [f"### Object: {word}\n\n{table(keys_of(one))}" for word, one in objects.items()]
    return "\n".join(parts)


def of_methods() -> str:
    """Return the table of methods, one row each."""
    head = "| method | result | parameters (default) | bound on the error | source |\n"
    return f"{head}|---|---|---|---|---|\n{''.join(map(_method, METHODS.values()))}"


def _method(method: Method) -> str:
    parameters = ", ".join(_parameter(p) for p in method.parameters)
    bound = "certified" if method.has_bound else "estimate"
    formula = method.formula.replace("|", "\\|")
    return f"| `{method.name}` | {formula} | {parameters} | {bound} | {method.source} |\n"


def _parameter(one: Parameter) -> str:
    name = f"`{one.name}`{'*' if one.each else ''}"
    return name if one.default is None else f"{name} ({_word(one.default)})"


def _word(value: float) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


PAGES = {
    "api.md": api_reference.reference,
    "cli.md": of_commands,
    "merge-methods.md": of_methods,
    "serving.md": of_documents,
}


def main() -> None:
    """Rewrite the pages named on the command line."""
    for path in map(Path, sys.argv[1:]):
        text = path.read_text(encoding="utf-8")
        path.write_text(renewed(path.name, text), encoding="utf-8")


if __name__ == "__main__":
    main()
