"""A family whose deltas compress (`generate.near`): plain files, and a store of each policy."""

from __future__ import annotations

import shutil
from pathlib import Path

from generate import BASE, near, write_family
from store import Store

EXPERTS = 4
CODECS = ("raw", "dense")


class NearStores:
    """A base and its experts below `work`; the plain files stay for the next run.

    checkout: of another version, which makes the stores.
    """

    def __init__(self, work: Path, millions: float, checkout: Path | None = None) -> None:
        self.work = work
        self.checkout = checkout
        self._suffix = "" if checkout is None else "-before"
        self.family = work / f"near{millions:g}"
        self.models = [BASE, *(near(number) for number in range(EXPERTS))]
        write_family(self.family, millions, self.models)
        self.plain_bytes = sum(path.stat().st_size for path in (self.family / "base").iterdir())
        self.scratch = Store(work / f"scratch{self._suffix}", checkout)

    def store(self, codec: str) -> Store:
        """The store of a policy."""
        return Store(self.work / f"store-{codec}{self._suffix}", self.checkout)

    def fill(self) -> None:
        """Base and experts, in both stores."""
        for codec in CODECS:
            self.store(codec).make(codec=codec)
            for model in self.models:
                self.store(codec).add(self.family / model.name, model.name)

    def close(self) -> None:
        """Remove the stores."""
        for store in (self.scratch, *map(self.store, CODECS)):
            shutil.rmtree(store.path, ignore_errors=True)
