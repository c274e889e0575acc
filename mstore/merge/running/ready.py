"""A plan made ready: what follows from it and from its inputs alone.

A report of a plan looks at every chunk, to tell what the memo table saves.  The merge that follows
needs the same tasks and keys, and takes them from here.  All of it follows from contents: what
happens to the store meanwhile changes nothing.  Belongs to one run at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mstore.merge.running.memo_keys import MemoKeys, Remembered
from mstore.merge.running.task import Tasks, TensorTask
from mstore.objects.plan import Plan
from mstore.store.catalog import Catalog

MOST: Final = 1 << 20
"""The most chunks of experts in a plan that is worth keeping: some 100 MB of ids, keys and rows."""


class Ready:
    """The tasks of a plan that fits this store, and the memo keys of its chunks.

    keeps: keys and rows are kept for another look, if the plan is not too large; otherwise each is
    computed when it is asked for.
    """

    def __init__(self, catalog: Catalog, plan: Plan, *, keeps: bool = False) -> None:
        self.plan = plan
        self.tasks = Tasks(catalog, plan)
        self.keeps = keeps and _chunks(plan) <= MOST
        self._rows: dict[bytes, Remembered] = {}
        self._makes = MemoKeys(self.tasks)
        # By tensor: the chunks last asked for, and their keys.
        self._made: dict[str, tuple[list[int], list[bytes]]] = {}

    @property
    def rows(self) -> dict[bytes, Remembered]:
        """Rows of the memo table by key, as far as they were looked up; takes new ones."""
        return self._rows if self.keeps else {}

    def keys(self, tensor: TensorTask, numbers: Sequence[int]) -> dict[int, bytes]:
        """Return the memo keys of some chunks of a tensor, by number; numbers ascending."""
        asked = list(numbers)
        known = self._made.get(tensor.name)
        if known is None or known[0] != asked:
            known = asked, self._makes.chunks(tensor, asked)
            if self.keeps:
                self._made[tensor.name] = known
        return dict(zip(*known, strict=True))


def _chunks(plan: Plan) -> int:
    return sum([len(states) for tensor in plan.tensors for states in tensor.states])
