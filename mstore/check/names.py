"""Which refs to restore, where several witnesses state them: mirrors, the old index, its reflog.

Each witness states what a name was when a generation was published. For each name, the latest
statement wins. A mirror knows all names of its generation, also that a name was removed. An index
knows the names that are readable; a missing name counts as removed only if none of its refs is
lost. A move of the reflog knows its own name. Of two witnesses that differ about one generation, a
mirror wins, because it is checked as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from mstore.check.old_index import OldIndex
from mstore.errors import Corrupt
from mstore.frozen import frozen
from mstore.store import mirror, pack_list
from mstore.store.layout import Layout
from mstore.store.mirror import Mirror
from mstore.store.refs import Move, Ref

_MIRROR: Final = "the mirror"
_INDEX: Final = "the old index"
_REFLOG: Final = "its reflog"


@frozen
class _Word:
    """A statement: this ref, or none, as of a generation. rank: breaks ties of generations."""

    generation: int
    rank: int
    witness: str
    ref: Ref | None


@frozen
class Names:
    """The refs to restore.

    removed: names that have a reflog and no ref. generation: the latest that any witness states.
    remarks: where witnesses differ, and which one won.
    """

    refs: dict[str, Ref]
    removed: set[str]
    generation: int
    remarks: list[str]


def settle(layout: Layout, old: OldIndex) -> Names:
    """Choose the refs from all witnesses."""
    remarks = []
    mirrors: list[tuple[str, Mirror]] = []
    newest = -1
    try:
        mirrors.append((_MIRROR, mirror.read(layout)))
        newest = mirrors[0][1].generation
    except Corrupt as error:
        remarks.append(f"ref mirror: {error.what}")
    # If the mirror is lost or outdated, a replaced mirror knows more.
    for path, found in mirror.earlier(layout)[:1]:
        if found.generation > newest:
            mirrors.append((path.name, found))
            what = "in its place" if newest < 0 else f"too: the mirror is of generation {newest}"
            remarks.append(
                f"{path.name} (generation {found.generation}) was read {what}; a ref that moved "
                "since may be where it was then, and one that was removed since may be back"
            )
    index_generation = _index_generation(old)
    names = {name for _, found in mirrors for name in found.refs} | old.refs.keys()
    names |= old.moves.keys()
    settled: dict[str, Ref] = {}
    removed = set()
    for name in sorted(names):
        words = sorted(_words(name, mirrors, old, index_generation), key=_order, reverse=True)
        if not words:
            continue
        chosen = words[0]
        if chosen.ref is not None:
            settled[name] = chosen.ref
        elif name in old.moves:
            removed.add(name)
        others = [
            word
            for word in words[1:]
            if word.ref != chosen.ref
            and word.witness != _REFLOG
            and not _is_explained(word, chosen, old.moves.get(name))
        ]
        if others:
            remarks.append(f"{name}: taken from {_told(chosen)}; {'; '.join(map(_told, others))}")
    told = [found.generation for _, found in mirrors]
    # Whoever wrote a list for the next commit saw the one before it.
    told += [mirror.replaced_by(layout), pack_list.newest(layout) - 1]
    return Names(
        refs=settled,
        removed=removed,
        generation=max([*told, index_generation], default=0),
        remarks=remarks,
    )


def _index_generation(old: OldIndex) -> int:
    """Return the index's generation, else the latest in its reflog."""
    if old.generation is not None:
        return old.generation
    return max((move.generation for move in old.moves.values()), default=0)


def _words(
    name: str, mirrors: list[tuple[str, Mirror]], old: OldIndex, generation: int
) -> Iterator[_Word]:
    for witness, found in mirrors:
        yield _Word(found.generation, 2, witness, found.refs.get(name))
    if name in old.refs or old.are_refs_whole:
        yield _Word(generation, 1, _INDEX, old.refs.get(name))
    move = old.moves.get(name)
    if move is not None:
        ref = None if move.new is None else Ref(move.kind, move.new)
        yield _Word(move.generation, 0, _REFLOG, ref)


def _is_explained(word: _Word, chosen: _Word, last: Move | None) -> bool:
    """Return whether the reflog explains the change from one state to the other."""
    if last is None or not word.generation < last.generation <= chosen.generation:
        return False
    return last.new == (None if chosen.ref is None else chosen.ref.snapshot)


def _order(word: _Word) -> tuple[int, int]:
    return word.generation, word.rank


def _told(word: _Word) -> str:
    what = "no such ref" if word.ref is None else f"{word.ref.kind} {word.ref.snapshot_id().short}"
    return f"{word.witness} ({what}, generation {word.generation})"
