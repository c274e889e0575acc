"""The generated ends of pages in docs/: from the program itself, its methods and its documents.

`python -m mstore_cli.reference docs/PAGE.md` replaces the text below the marker in that page (of
merge-methods.md, the table); the text above it is written by hand.  Tests compare each page with
`renewed`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Sequence
from copy import copy
from pathlib import Path

import click

from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import Parameter
from mstore.merge.methods.registry import METHODS
from mstore_cli import api_reference
from mstore_cli.command import Command, find
from mstore_cli.keys import DOCUMENTS, OBJECTS, SERVED, Key, keys_of
from mstore_cli.session import Choices
from mstore_cli.tree import PROGRAM, build
from mstore_cli.verbs import VERBS, verb_of
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
    "/reflog": documents.ReflogDocument,
    "an error": documents.ErrorDocument,
}
"""The document of each address of `mstore serve`."""
_LEFT_OUT = (
    "The sections below leave out what holds for every command: `--help` and the global options "
    "above, and the exit statuses; status 1 is listed where it says more than an error.\n"
)
_FEW = 8
"""Of fewer keys than half of these, and of less than half of a document, all are told again."""
# The longest first: a tensor difference is no tensor.
_OBJECT = re.compile(rf"\b({'|'.join(sorted(OBJECTS | SERVED, key=len, reverse=True))})\b")
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
    """Return the generated part of docs/cli.md: one section per command, then nested objects.

    What holds for every command stands in the first section only.
    """
    parts = [f"## {PROGRAM}\n\n{_block(_help(build()))}\n{_LEFT_OUT}"]
    for verb in VERBS:
        parts.append(f"## {PROGRAM} {verb}\n\n{_block(_help(_own(find(verb)), verb))}")
        if verb in DOCUMENTS:
            for line in (name for name in DOCUMENTS if verb_of(name.split()) == verb):
                options = f"{line.removeprefix(verb)} --json".strip()
                parts.append(f"With `{options}`:\n\n{_document(DOCUMENTS[line], OBJECTS)}")
        else:
            parts.append("It has no JSON form.\n")
    parts.append("## Objects inside objects\n")
    words = sorted(OBJECTS)
    for number, word in enumerate(words):
        parts.append(f"### {word}\n\n{_document(keys_of(OBJECTS[word]), words[:number])}")
    return "\n".join(parts)


def _own(command: Command) -> Command:
    """Return a command whose help says only what is its own."""
    own = copy(command)
    own.params = [one for one in command.params if one.name not in Choices._fields]
    own.add_help_option = False
    example, status, _ = str(command.epilog).partition("\b\nExit status:")
    failure = next(line for line in str(command.epilog).splitlines() if line.startswith("  1  "))
    own.epilog = example if failure.endswith("  an error") else f"{example}{status}\n{failure}"
    return own


def _document(keys: Sequence[Key], objects: Collection[str]) -> str:
    """Return a list of keys, but only the names of those that one of these objects has, too."""
    shared: dict[str, list[Key]] = {word: [] for word in objects}
    for word, same in shared.items():
        known = keys_of(OBJECTS[word])
        same += [key for key in keys if key in known]
    word = max(shared, key=lambda one: len(shared[one]), default="")
    if 2 * len(shared.get(word, ())) < max(_FEW, len(keys)):
        return listed(keys)
    same = shared[word]
    which = "all" if len(same) == len(keys_of(OBJECTS[word])) else _names(same)
    rest = [key for key in keys if key not in same]
    link = f"As in {_link(word)}: {which}.\n"
    return f"{link}\n{listed(rest)}" if rest else link


def _names(keys: Sequence[Key]) -> str:
    return ", ".join(f"`{key.name}`" for key in keys)


def _help(command: click.Command, *path: str) -> str:
    """Return a help text as the program prints it on a terminal of 80 columns."""
    context = build().make_context(PROGRAM, ["--version"], resilient_parsing=True)
    context.terminal_width = WIDTH - 2
    for name in path:
        context = command.make_context(name, [], parent=context, resilient_parsing=True)
    return command.get_help(context)


def _block(text: str) -> str:
    return f"```text\n{text}\n```\n"


def listed(keys: Sequence[Key], heading: str = "") -> str:
    """Return a list of some keys: each with the kind of its value, and its meaning.

    A kind that is an object links to its description.  heading: what the headings of objects begin
    with.
    """

    def linked(kind: str) -> str:
        return _OBJECT.sub(lambda found: _link(found[0], heading), kind)

    return "".join(f"- `{key.name}` ({linked(key.kind)}): {key.meaning}\n" for key in keys)


def _link(word: str, heading: str = "") -> str:
    return f"[{word}](#{f'{heading}{word}'.lower().replace(' ', '-')})"


def of_documents() -> str:
    """Return the generated part of docs/serving.md: a list of keys for each document and object."""
    objects = {word: OBJECTS[word] for word in ("ref", "tensor", "origin", "move")} | SERVED
    sections = ADDRESSES | {f"Object: {word}": one for word, one in objects.items()}
    parts = [f"### {title}\n\n{listed(keys_of(one), 'object-')}" for title, one in sections.items()]
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
