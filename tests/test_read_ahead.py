"""Reading ahead: what the disk or a remote is asked for, and when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import families
import pytest
from families import BLOCK
from hypothesis import given
from hypothesis import strategies as st

from mstore import MergeRequest, Store
from mstore.merge.running.compute import Computer
from mstore.store.ahead import read_ahead


@dataclass(frozen=True)
class Item:
    number: int
    stored_bytes: int

    def size(self) -> int:
        return self.stored_bytes


@given(st.lists(st.integers(0, 50)), st.integers(0, 100))
def test_each_item_is_asked_for_once_before_it_is_yielded(lengths: list[int], most: int) -> None:
    """Items come in order, each asked for once and before; never more than `most` and an item."""
    items = [Item(*pair) for pair in enumerate(lengths)]
    asked: list[Item] = []
    done = 0
    for item in read_ahead(items, Item.size, asked.extend, most):
        assert item == items[done]
        done += 1
        assert asked == items[: len(asked)]
        assert len(asked) >= done
        assert sum(one.stored_bytes for one in asked[done:-1]) <= most
    assert done == len(items)
    assert asked == items


def test_the_window_grows_and_is_asked_for_in_few_calls() -> None:
    """The first item waits for no other; later ones are asked for several at a time."""
    calls: list[int] = []
    taken = 0

    def endless() -> Iterator[Item]:
        nonlocal taken
        for number in range(1000):
            taken += 1
            yield Item(number, 1)

    batches = read_ahead(endless(), Item.size, lambda news: calls.append(len(news)), 64)
    next(batches)
    assert taken == 1
    ahead = []
    for _, done in zip(batches, range(1, 1000), strict=False):
        ahead.append(taken - done - 1)
    assert ahead[:3] == sorted(ahead[:3])
    assert max(ahead) <= 64
    assert min(ahead[100:900]) >= 31
    assert len(calls) < 1000 / 25


def test_a_merge_asks_for_each_batch_before_it_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every batch of a merge is asked for, in order, before a thread computes it."""
    root = families.layered(3, rows=4000).write(tmp_path)
    seen: list[tuple[str, Any]] = []
    prefetch, compute = Computer.prefetch, Computer.batch

    def asked(self: Computer, batches: Sequence[Any]) -> None:
        seen.extend(("asked", batch) for batch in batches)
        prefetch(self, batches)

    def computed(self: Computer, batch: Any) -> Any:
        seen.append(("computed", batch))
        return compute(self, batch)

    monkeypatch.setattr(Computer, "prefetch", asked)
    monkeypatch.setattr(Computer, "batch", computed)
    with Store.init(tmp_path / "store", block_size=BLOCK, codec="raw") as store:
        store.add(root / "base", name="base")
        store.add(root / "e0", name="e0", base="base")
        plan = store.plan(MergeRequest(base="base", experts=["e0"], method="linear"))
        store.merge(plan, name="merged")
    asked_at = {id(batch): at for at, (what, batch) in enumerate(seen) if what == "asked"}
    computed_at = {id(batch): at for at, (what, batch) in enumerate(seen) if what == "computed"}
    assert len(asked_at) > 3
    assert asked_at.keys() == computed_at.keys()
    assert all(asked_at[batch] < at for batch, at in computed_at.items())
    assert all(a < b for a, b in pairwise(asked_at.values()))
