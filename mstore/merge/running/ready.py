"""A plan made ready: what follows from it and from its inputs alone.

A report of a plan looks at every chunk, to tell what the memo table saves.  The merge that follows
needs the same tasks and keys, and takes them from here.  All of it follows from contents: what
happens to the store meanwhile changes nothing.  Belongs to one run at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mstore.merge.running.memo_keys import MemoKeys
from mstore.merge.running.task import Tasks, TensorTask
from mstore.objects.plan import Plan
from mstore.store.catalog import Catalog

MOST: Final = 1 << 20
"""The most chunks of experts in a plan that is worth keeping: some 100 MB of ids and keys."""


class Ready:
    """The tasks of a plan that fits this store, and the memo keys of its chunks."""

    def __init__(self, catalog: Catalog, plan: Plan) -> None:
        self.plan = plan
        self.tasks = Tasks(catalog, plan)
        self._makes = MemoKeys(self.tasks)
        # By tensor: the chunks last asked for, and their keys.
        self._made: dict[str, tuple[list[int], list[bytes]]] = {}

    @property
    def is_small(self) -> bool:
        """Whether it may wait in memory for a merge that perhaps never comes."""
        return sum([len(one) for tensor in self.plan.tensors for one in tensor.states]) <= MOST

    def keys(self, tensor: TensorTask, numbers: Sequence[int]) -> dict[int, bytes]:
        """Return the memo keys of some chunks of a tensor, by number; numbers ascending."""
        asked = list(numbers)
        known = self._made.get(tensor.name)
        if known is None or known[0] != asked:
            known = self._made[tensor.name] = asked, self._makes.chunks(tensor, asked)
        return dict(zip(*known, strict=True))
