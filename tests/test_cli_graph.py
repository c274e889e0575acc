"""The text graph of `mstore log --graph`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mstore.api.reports import NoteReport, ParentReport, SnapshotReport
from mstore.terms.ids import ManifestId, NoteId, SnapshotId
from mstore_cli.graph import draw


def identity(number: int) -> SnapshotId:
    return SnapshotId(bytes([number]) * 32)


def snapshot(
    number: int,
    *parents: tuple[str, int],
    refs: tuple[str, ...] = (),
    made: str = "add",
    virtual: bool = False,
    notes: Mapping[str, object] | None = None,
) -> SnapshotReport:
    return SnapshotReport(
        snapshot=identity(number),
        manifest=ManifestId(bytes(32)),
        parents=tuple(ParentReport(role, identity(parent)) for role, parent in parents),
        made=made,
        origin=None,
        author="",
        plan=None,
        method="ties" if made == "merge" else None,
        virtual=virtual,
        message=f"number {number}\nand more",
        time_ns=number,
        refs=refs,
        plain_bytes=0,
        files=0,
        tensors=0,
        notes=tuple(
            NoteReport(NoteId(bytes(32)), identity(number), "value", key, value, "", 0, "counts")
            for key, value in (notes or {}).items()
        ),
    )


def test_family() -> None:
    """A merge of two experts of one base: roles on the edges, names where they are known."""
    family = [
        snapshot(1, refs=("llama/base",)),
        snapshot(2, ("base", 1), refs=("math",)),
        snapshot(3, ("base", 1), refs=("code",)),
        snapshot(4, ("base", 1), ("expert", 2), ("expert", 3), refs=("merged", "v1"), made="merge"),
        snapshot(5, ("previous", 4), ("base", 1), ("expert", 3), made="merge"),
    ]
    assert draw(family) == [
        "*      050505050505 merge ties number 5",
        "|      previous 040404040404 merged, v1",
        "+-.    base     010101010101 llama/base",
        "+-|-.  expert   030303030303 code",
        "* | |  040404040404 merge ties (merged, v1) number 4",
        "+-+ |  base     010101010101 llama/base",
        "| | |  expert   020202020202 math",
        "+-|-+  expert   030303030303 code",
        "| | *  030303030303 add (code) number 3",
        "| +-'  base     010101010101 llama/base",
        "* |    020202020202 add (math) number 2",
        "'-+    base     010101010101 llama/base",
        "  *    010101010101 add (llama/base) number 1",
    ]


def test_parents_outside_the_list() -> None:
    """With a limit, parents that are not drawn are still named."""
    assert draw([snapshot(4, ("previous", 3), ("base", 1))]) == [
        "*  040404040404 add number 4",
        "|  previous 030303030303 (not shown)",
        "'  base     010101010101 (not shown)",
    ]


def test_notes() -> None:
    """Notes stand below their snapshot, beside the lanes that pass it; a root has none below it."""
    family = [
        snapshot(1, notes={"seen": True}),
        snapshot(2, ("base", 1)),
        snapshot(3, ("base", 1), ("expert", 2), made="merge", notes={"mmlu": 0.6, "by": "ada"}),
    ]
    assert draw(family, notes=True) == [
        "*    030303030303 merge ties number 3",
        "|    note     mmlu = 0.6",
        "|    note     by = ada",
        "|    base     010101010101",
        "+-.  expert   020202020202",
        "| *  020202020202 add number 2",
        "+-'  base     010101010101",
        "*    010101010101 add number 1",
        "     note     seen = true",
    ]
    assert draw(family) == [line for line in draw(family, notes=True) if " = " not in line]


def test_nothing() -> None:
    """No snapshots, no lines."""
    assert draw([]) == []


@given(st.data())
def test_any_history_is_drawn(data: st.DataObject) -> None:
    """Whatever the history and its order: every snapshot once, children first, every edge named.

    Columns tell the truth: a line drawn downwards from an edge ends at the star of its parent.
    """
    history = []
    for number in range(data.draw(st.integers(1, 9))):
        older = st.integers(0, max(number - 1, 0))
        parents = data.draw(st.lists(older, max_size=4 if number else 0))
        history.append(snapshot(number, *(("expert", parent) for parent in parents)))
    lines = draw(data.draw(st.permutations(history)))
    start = lines[0].index("  0") + 2
    drawings = [line[:start] for line in lines]
    texts = [line[start:] for line in lines]
    stars = [int(text[:2], 16) for text, drawn in zip(texts, drawings, strict=True) if "*" in drawn]
    assert sorted(stars) == list(range(len(history)))
    for one in history:
        for parent in one.parents:
            assert stars.index(one.time_ns) < stars.index(parent.snapshot[0])
    edges = sum(len(one.parents) for one in history)
    assert len(lines) == len(history) + edges
    for above, below in pairwise(drawings):
        for column, mark in enumerate(above[: len(below)]):
            # Even columns hold lines: one that goes on downwards is met, none begins from nothing.
            if column % 2 == 0 and mark in "|+.":
                assert below[column] in "|*+'"
            if column % 2 == 0 and below[column] in "|+'":
                assert mark in "|*+."
