"""No command line in the library: it names operations and options as data (`mstore.terms.phrases`).

The rule reads every text of every module, except docstrings and comments: a text with a command
(`mstore fsck`) or a flag (`--budget`) is a breach. Texts that mean something else are listed here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from mstore_cli.verbs import VERBS

ROOT = Path(__file__).resolve().parent.parent

EXEMPT = {
    ("mstore/clusters/slurm.py", "--cpus-per-task={}"): "an option of srun",
    (
        "mstore/upkeep/backup/destination.py",
        "mstore backup {} {}\n",
    ): "the first line of a backup's file",
    (
        "mstore/upkeep/backup/destination.py",
        "mstore backup ([0-9]+) ([0-9a-f-]{36})\\n",
    ): "the pattern of that line",
    (
        "mstore/blocks/lmdb_files.py",
        (
            "run the two one after the other, or with one PID namespace "
            "(docker run --pid=host, or --pid=container:NAME)"
        ),
    ): "flags of docker",
    ("mstore/store/layout.py", "mstore {} {} {}\n"): "the line of the file format",
    ("mstore/store/mirror.py", "mstore refs 2"): "the first line of the mirror of the refs",
    ("mstore/merge/analysis/exchange.py", "mstore plan 1"): "the first line of a plan as text",
    ("mstore/terms/__init__.py", "mstore {}"): "the program that wrote a snapshot, and its version",
}
"""Texts that look like commands and are none, with the reason for each."""

DOCUMENTS = {
    # A model card tells people which commands made the model.
    "mstore/merge/running/model_card.py",
    "mstore/merge/combination/combine.py",
    # A plan's id covers the bytes that versions without phrases wrote.
    "mstore/merge/planning/tensors.py",
}
"""Modules whose texts are kept, in documents and in plans."""

# `{}` stands for a value: the verb may be one.
_COMMAND = re.compile(rf"\bmstore\s+(?:--|\{{\}}|(?:{'|'.join(map(re.escape, VERBS))})\b)")
_FLAG = re.compile(r"(?<![\w-])--[a-z]")
# What a source with such a text holds, however the text is written and put together.
_MENTION = re.compile(r"""\bmstore(?! import\b)[\s\\"'{]|--[a-z]""")


def breaches(source: str) -> Iterator[tuple[int, str]]:
    """The line and text of each constant that holds a command or a flag, docstrings aside."""
    if not _MENTION.search(source):
        # Most files: a syntax tree takes a hundred times as long.
        return
    tree = ast.parse(source)
    aside: set[int] = set()
    for node in ast.walk(tree):
        # Docstrings, and the texts below fields, are statements of their own.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            aside.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            aside |= {id(part) for part in ast.walk(node) if part is not node}
    for node in ast.walk(tree):
        if id(node) in aside and not isinstance(node, ast.JoinedStr):
            continue
        text = _text(node)
        if text is not None and (_COMMAND.search(text) or _FLAG.search(text)):
            yield node.lineno, text  # type: ignore[attr-defined] -- a constant has a line


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        return "".join(map(str, parts))
    return None


@cache
def _in_the_library() -> list[tuple[str, int, str]]:
    """The module, line and text of each breach; every module is read once for all tests."""
    paths = sorted((ROOT / "mstore").rglob("*.py"))
    assert len(paths) > 100
    sources = [(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths]
    return [(name, line, text) for name, source in sources for line, text in breaches(source)]


def test_no_command_line_in_the_library() -> None:
    """A text of the library holds no command and no flag: each face spells them."""
    found = [
        f"{name}:{line}: {text!r}"
        for name, line, text in _in_the_library()
        if name not in DOCUMENTS and (name, text) not in EXEMPT
    ]
    assert not found, "name operations and options with mstore.terms.phrases:\n" + "\n".join(found)


def test_every_exemption_is_needed() -> None:
    """A text that is gone is not exempt any more."""
    there = {(name, text) for name, _, text in _in_the_library()}
    assert set(EXEMPT) <= there
    assert {name for name, _ in there} >= DOCUMENTS


@pytest.mark.parametrize(
    "source",
    [
        'hint = "mstore reindex"',
        'hint = f"mstore rm {name}"',
        'hint = f"mstore {verb}"',
        'hint = f"mstore --store {store} fsck"',
        'hint = "run mstore\\nfsck"',
        'hint = ("mstore " "gc")',
        "hint = f\"{one} and {f'mstore gc {two}'}\"",
        'def option(name="--budget"): ...',
        'notes = f"raise --budget to {least}"',
        'what = "choose another --name"',
    ],
)
def test_a_command_line_is_seen(source: str) -> None:
    """Commands and flags are found in texts, in texts with values, and in defaults."""
    assert list(breaches(source))


@pytest.mark.parametrize(
    "source",
    [
        '"""`mstore gc` collects."""',
        'class Report:\n    alive: bool\n    """cleared by `mstore unmount`"""',
        "# mstore gc\nhint = 1",
        'what = "this mstore reads format 2"',
        'what = f"this mstore writes version {version}"',
        'what = "mstore stores safetensors"',
        'hint = "mkdir -p models; chmod +t ."',
        'hint = call("fsck", read_data=True)',
        'line = "----"',
    ],
)
def test_words_are_free(source: str) -> None:
    """Docstrings, comments, the name of the program and commands of other programs are free."""
    assert not list(breaches(source))
