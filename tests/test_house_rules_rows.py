"""The index's rows are private: its schema knows their bytes, all others ask with a table.

Read from the library's syntax trees, like the other house rules.  The rows of `blocks` and
`records` are also opaque to mypy: their type is an `object`, which nobody can slice.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_house_rules import ADAPTERS, LIBRARY, ROOT, _found, _nodes, _words

from mstore.blocks import location

WHOLE = {
    "mstore/blocks/index.py": "the index itself",
    "mstore/blocks/lmdb_files.py": "LMDB",
    "mstore/blocks/lmdb_types.py": "the types of LMDB",
    "mstore/blocks/tables.py": "makes and checks the bytes of any row",
    "mstore/upkeep/backup/copying.py": "copies rows as they are",
    "mstore/blocks/location.py": "knows the rows of blocks and records",
    "mstore/blocks/location_arrays.py": "reads all rows of blocks and records at once",
    "mstore/blocks/disposable.py": "environments whose rows may be lost",
    "mstore/models/stats/store.py": "the environment of statistics",
    "mstore/store/memo.py": "the environment of the memo table",
}
"""Modules that handle rows as bytes."""

CURSORS = {"cursor", "getmulti", "putmulti", "db", "databases"}
ROW_NAMES = {"row", "value"}
INDEX_MODULES = ("mstore.blocks.index", "mstore.blocks.lmdb_types")


def raw_rows(source: str) -> Iterator[str]:
    """Each access to a database or a cursor, and, where an index is imported, each slice of
    something that is called a row or a value.
    """
    if _words(source).isdisjoint(CURSORS) and not any(one in source for one in INDEX_MODULES):
        return
    nodes = _nodes(source)
    knows_index = any(
        isinstance(node, ast.ImportFrom) and (node.module or "").startswith(INDEX_MODULES)
        for node in nodes
    )
    for node in nodes:
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                yield from _called(node.func)
            if any(keyword.arg == "db" for keyword in node.keywords):
                yield f"line {node.lineno}: db="
        elif isinstance(node, ast.Subscript):
            if isinstance(node.value, ast.Attribute) and node.value.attr == "databases":
                yield f"line {node.lineno}: .databases[...]"
            elif knows_index and _last_name(node.value) in ROW_NAMES:
                yield f"line {node.lineno}: a part of a {_last_name(node.value)}"


def _called(method: ast.Attribute) -> Iterator[str]:
    if method.attr in CURSORS - {"databases"}:
        yield f"line {method.lineno}: .{method.attr}()"


def _last_name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def _path(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_rows_are_private() -> None:
    """No module but those that handle rows as bytes reads raw rows: the others ask with a table."""
    others = [path for path in (*LIBRARY, *ADAPTERS) if _path(path) not in WHOLE]
    assert len(others) == len(LIBRARY) + len(ADAPTERS) - len(WHOLE)
    assert _found(others, lambda path, source: raw_rows(source)) == []


def test_every_exception_is_needed() -> None:
    """Each module that may handle raw rows does: the list holds no name too many."""
    for name in WHOLE.keys() - {"mstore/blocks/lmdb_types.py"}:
        source = "from mstore.blocks.index import Index\n" + (ROOT / name).read_text()
        assert list(raw_rows(source)), name


def test_a_location_row_is_opaque() -> None:
    """To mypy the row of a block or record is an object: slicing or joining it is an error."""
    assert location.Row.__supertype__ is object


@pytest.mark.parametrize(
    "source",
    [
        "index.db('blocks')",
        "x = self._catalog.index.db(name)",
        "transaction.get(key, db=handle)",
        "with transaction.cursor(handle) as cursor: pass",
        "env.databases['refs']",
        "from mstore.blocks.index import Index\nnumber = value[:4]",
        "from mstore.blocks.lmdb_types import IndexTransaction\ncodec = row[20]",
    ],
)
def test_a_raw_row_is_seen(source: str) -> None:
    """Databases, cursors and parts of rows are breaches."""
    assert list(raw_rows(source))


@pytest.mark.parametrize(
    "source",
    [
        "index.pack_number(transaction, pack)",
        "index.get(transaction, PRUNED, id)",
        "refs.get(index, transaction, name)",
        "names.get(key)",
        "row[1:]",
        "from mstore.blocks.index import Index\nids[:4]",
    ],
)
def test_asking_is_free(source: str) -> None:
    """Rows by their table, typed methods, and slices of anything else break no rule."""
    assert not list(raw_rows(source))
