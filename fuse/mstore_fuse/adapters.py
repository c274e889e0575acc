"""The adapters of a store as a directory, in the form that serving engines look for.

    /<ref>/adapter_config.json
    /<ref>/adapter_model.safetensors

An adapter is a snapshot with these two files at its top, and is called by its branch or tag, with
slashes as directories.  Owns which refs are shown, and what their configs call the base: an engine
takes an adapter if that is the name under which it serves the base.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

from mstore import Store
from mstore.store import refs
from mstore.terms.errors import MstoreError, NotFound
from mstore_fuse.store_tree import BelowTree, StoreTree
from mstore_fuse.tree import About, MountHold, MountView

_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = "adapter_model.safetensors"
_BASE: Final = "base_model_name_or_path"

log = logging.getLogger("mstore_fuse")


class AdaptersTree(BelowTree):
    """The tree of the adapters whose refs match a pattern; new ones appear in it at once.

    base: what the configs say that the adapters are of; None for what they say themselves.
    """

    def __init__(
        self, store: Store, pattern: str, base: str | None, about: About, *, show_about: bool
    ) -> None:
        def replaced(view: Any) -> Mapping[str, bytes]:
            return (
                {} if base is None else _of_base(view.read(_CONFIG, 0, view.files[_CONFIG]), base)
            )

        source = _Adapters(store, pattern)
        tree = StoreTree(source, about, show_about=show_about, replaced=replaced)
        super().__init__(tree, "refs")


def _of_base(config: bytes, base: str) -> Mapping[str, bytes]:
    """Return the config with this base; nothing if that is what it says, or it is no object."""
    try:
        fields = json.loads(config)
    except ValueError:
        return {}
    if not isinstance(fields, dict) or fields.get(_BASE) == base:
        return {}
    return {_CONFIG: json.dumps({**fields, _BASE: base}, indent=2).encode() + b"\n"}


class _Adapters:
    """A store in which there are only the refs of adapters.  Thread-safe."""

    def __init__(self, store: Store, pattern: str) -> None:
        self._store = store
        self._pattern = pattern
        # Contents never change, so each snapshot is looked at once.
        self._known: dict[object, bool] = {}
        self.generation = store.generation

    def ref_ids(self) -> Mapping[str, object]:
        known = self._store.ref_ids()
        names: list[str] = []
        with suppress(NotFound):
            names = refs.chosen(known, [self._pattern])
        return {
            name: known[name] for name in names if name in known and self._is(name, known[name])
        }

    def _is(self, name: str, snapshot: Any) -> bool:
        if snapshot not in self._known:
            try:
                files = self._store.view(snapshot).files
            except MstoreError as error:
                # One that cannot be read now must not hide the others.
                log.warning("%s is not shown: %s", name, error)
                return False
            self._known[snapshot] = {_CONFIG, _WEIGHTS} <= files.keys()
        return self._known[snapshot]

    def snapshot_ids(self) -> Iterable[object]:
        return ()

    def view(self, revision: str) -> MountView:
        return self._store.view(revision)

    def hold(self, snapshot: Any, *, sure: bool = False) -> MountHold:
        return self._store.hold(snapshot, sure=sure)

    def close(self) -> None:
        self._store.close()
