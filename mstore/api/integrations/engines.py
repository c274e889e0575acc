"""The tensors of a model for serving engines, which load models in processes of their own.

    {"store": "/srv/models/.mstore", "ref": "llama/merged"}

is what an engine is told.  `StoredWeights` is what all engines read; `vllm` and `sglang` only say
where each of them asks for it.  Each process opens the store for itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, Final

import msgspec

from mstore.api import Snapshot, Store
from mstore.api.load import load, to_torch
from mstore.api.open_store import thread_count
from mstore.store.ahead import in_groups, in_order
from mstore.store.models import model_of, snapshot_of
from mstore.store.view import SnapshotView
from mstore.terms.errors import BadRequest

_BATCH_BYTES: Final = 256 << 20
"""What is read at a time; twice as much is in memory, or two tensors where they are larger."""


class StoredWeights(msgspec.Struct, frozen=True):
    """The weights of one model in a store; it may travel to other processes.

    store: the store's directory. ref: a revision, or REVISION:MODEL.
    """

    store: str
    ref: str

    @classmethod
    def of(cls, told: Mapping[str, Any], where: str) -> StoredWeights:
        """Return what an engine was told, in its setting `where`.

        Raises BadRequest for other keys, and where one is missing.
        """
        names = cls.__struct_fields__
        if told.keys() != set(names) or not all(isinstance(one, str) for one in told.values()):
            raise BadRequest(
                f"needs {' and '.join(names)}, as text, and takes nothing else: {dict(told)!r}",
                where=where,
                hint='{"store": "/PATH/OF/STORE", "ref": "NAME"}',
            )
        return cls(**told)

    def check(self) -> None:
        """Raise as `tensors` would where store, snapshot or model are not there."""
        with self._opened():
            pass

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Yield names and torch tensors in file and data order; each may be changed.

        All processors read and decode the next tensors meanwhile; every block is checked.  Holds
        the snapshot.  Raises NotFound, Conflict (collected), Corrupt, StorageFailed, Unavailable
        (no torch), and as `Store.open`.
        """
        with (
            self._opened() as (snapshot, view),
            snapshot._store.hold(snapshot, sure=True),
            ThreadPoolExecutor(1, "weights") as pool,
        ):
            read = partial(
                load,
                snapshot._store._catalog,
                view,
                threads=thread_count(None),
                for_torch=True,
            )
            batches = in_groups(view.tensors, lambda name: view.record(name).nbytes, _BATCH_BYTES)
            with closing(in_order(partial(pool.submit, read), batches, ahead=1)) as loaded:
                for names, arrays in loaded:
                    for name in names:
                        yield name, to_torch(name, arrays.pop(name), view.record(name).dtype)

    @contextmanager
    def _opened(self) -> Iterator[tuple[Snapshot, SnapshotView]]:
        with Store.open(self.store) as store:
            snapshot = store[snapshot_of(self.ref)]
            yield snapshot, snapshot._view().of_model(model_of(self.ref), snapshot_of(self.ref))
