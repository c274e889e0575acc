"""The index's rows are private: one module knows the bytes of a table, all others ask it.

Read from the library's syntax trees, like the other house rules.  The rows of `blocks` and
`records` are also opaque to mypy: their type is an `object`, which nobody can slice.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_house_rules import ADAPTERS, LIBRARY, ROOT, _found, _nodes

from mstore.blocks import index, location_rows
from mstore.blocks.index import DATABASES

ENVIRONMENT = {f"mstore/blocks/{name}.py" for name in ("index", "lmdb_env", "lmdb_types")}
"""The index itself, and LMDB below it."""

OWNERS = {
    "mstore/blocks/location_arrays.py": ("blocks", "records"),
    "mstore/blocks/location_rows.py": ("blocks", "records"),
    "mstore/blocks/pack_numbers.py": ("packs", "pack_ids", "condemned"),
    "mstore/store/backup_row.py": ("counters",),
    "mstore/store/leases.py": ("leases",),
    "mstore/store/pin_rows.py": ("counters",),
    "mstore/store/plan_rows.py": ("plans",),
    "mstore/store/pruned_rows.py": ("pruned",),
    "mstore/store/refs.py": ("refs", "reflog"),
    "mstore/store/signature_rows.py": ("signatures",),
    "mstore/store/snapshot_rows.py": ("snapshots", "edges"),
}
"""Which module knows the bytes of which table."""

WHOLE = {
    "mstore/blocks/checked_rows.py": "puts the check behind a value, whatever the value is",
    "mstore/blocks/index_copy.py": "copies rows as they are",
    "mstore/blocks/row_batches.py": "reads rows in batches for their owners",
}
"""Modules that handle rows of any table, without knowing what they mean."""

OTHER = {
    "mstore/stats/store.py": "the environment of statistics",
    "mstore/store/memo.py": "the environment of the memo table",
}
"""Modules that own a whole environment, which is not the index."""

CURSORS = {"cursor", "getmulti", "putmulti", "db", "databases"}
ROW_METHODS = {"get", "put", "delete", "walk", "keys"}
ROW_NAMES = {"row", "value"}
INDEX_MODULES = ("mstore.blocks.index", "mstore.blocks.lmdb_types", "mstore.blocks.location_rows")


def raw_rows(source: str) -> Iterator[str]:
    """Each access to a database or a cursor, each generic row method of an index, and, where an
    index is imported, each slice of something that is called a row or a value.
    """
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
    owner = _last_name(method.value)
    is_index = owner is not None and owner.removeprefix("_") == "index"
    if method.attr in CURSORS - {"databases"} or (is_index and method.attr in ROW_METHODS):
        yield f"line {method.lineno}: .{method.attr}()"


def _last_name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def _path(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_rows_are_private() -> None:
    """No module but the owner of a table, and those that handle any rows whole, reads raw rows."""
    allowed = ENVIRONMENT | OWNERS.keys() | WHOLE.keys() | OTHER.keys()
    others = [path for path in (*LIBRARY, *ADAPTERS) if _path(path) not in allowed]
    assert len(others) == len(LIBRARY) + len(ADAPTERS) - len(allowed)
    assert _found(others, lambda path, source: raw_rows(source)) == []


def test_every_exception_is_needed() -> None:
    """Each module that may handle raw rows does: no list holds a name too many."""
    pure = {"mstore/blocks/lmdb_types.py", "mstore/blocks/location_rows.py"}
    for name in (ENVIRONMENT | OWNERS.keys() | WHOLE.keys() | OTHER.keys()) - pure:
        source = "from mstore.blocks.index import Index\n" + (ROOT / name).read_text()
        assert list(raw_rows(source)), name


def test_every_table_has_an_owner() -> None:
    """Each database of the index is the business of one module; the index counts its own rows."""
    owned = {table for tables in OWNERS.values() for table in tables}
    assert owned == set(DATABASES)
    listed = index.__doc__ or ""
    for name, tables in OWNERS.items():
        module = name.removeprefix("mstore/").removesuffix(".py").replace("/", ".")
        if module != "blocks.location_arrays":
            assert module in listed
        assert all(table in listed for table in tables)


def test_a_location_row_is_opaque() -> None:
    """To mypy the row of a block or record is an object: slicing or joining it is an error."""
    assert location_rows.Row.__supertype__ is object


@pytest.mark.parametrize(
    "source",
    [
        "index.db('blocks')",
        "x = self._catalog.index.db(name)",
        "transaction.get(key, db=handle)",
        "with transaction.cursor(handle) as cursor: pass",
        "env.databases['refs']",
        "index.get(transaction, 'packs', number)",
        "self._index.walk(transaction, table)",
        "catalog.index.put(transaction, 'pruned', id, b'')",
        "from mstore.blocks.index import Index\nnumber = value[:4]",
        "from mstore.blocks.lmdb_types import IndexTransaction\ncodec = row[20]",
    ],
)
def test_a_raw_row_is_seen(source: str) -> None:
    """Databases, cursors, generic row methods and parts of rows are breaches."""
    assert list(raw_rows(source))


@pytest.mark.parametrize(
    "source",
    [
        "index.pack_number(transaction, pack)",
        "refs.get(index, transaction, name)",
        "names.get(key)",
        "row[1:]",
        "from mstore.blocks.index import Index\nids[:4]",
    ],
)
def test_asking_is_free(source: str) -> None:
    """Typed methods, functions of a table's module, and slices of anything else break no rule."""
    assert not list(raw_rows(source))
