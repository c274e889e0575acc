"""Folders of the models of a store, in the forms in which programs look for them.

    adapters   /<ref>/adapter_config.json         vLLM, LoRAX: a directory for each adapter
               /<ref>/adapter_model.safetensors
    models     /<ref>.safetensors                 ComfyUI, A1111: a file for each model, and
               /<ref>.preview.png                 what is told of it beside it
               /<ref>/<model>.safetensors         the other models of the snapshot

A ref is a branch or tag; slashes in its name are directories.  Owns which refs are shown, and what
of their snapshots under which names.  Where two refs give one path, the first by name has it.
"""

from __future__ import annotations

import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from mstore import Store
from mstore.checkpoint.paths import SAFETENSORS_SUFFIX, without_suffix
from mstore.store import refs
from mstore.terms.errors import MstoreError, NotFound
from mstore_fuse.store_tree import MovingTree, ShownPath
from mstore_fuse.tree import NAME_MAX, About, Attributes, SnapshotTree

_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = "adapter_model.safetensors"
_BASE: Final = "base_model_name_or_path"
_BESIDE: Final = (".preview.png", ".png", ".jpg", ".civitai.info", ".json", ".txt", ".yaml")
"""What follows the stem of a model in the names of files that tell of it."""

log = logging.getLogger("mstore_fuse")


class Folder(ABC):
    """A form in which a program looks for models."""

    @abstractmethod
    def shown(self, view: Any) -> Mapping[str, str]:
        """Return the paths of a snapshot that are shown, by what follows the name of the ref.

        '' is the whole snapshot.
        """

    def replaced(self, view: Any) -> Mapping[str, bytes]:
        """Return what files of a snapshot show in place of what they have."""
        return {}


class AdapterFolder(Folder):
    """Snapshots with an adapter at their top, each as a directory.

    base: what the configs say that the adapters are of; None for what they say themselves.  An
    engine takes an adapter if that is the name under which it serves the base.
    """

    def __init__(self, base: str | None) -> None:
        self._base = base

    def shown(self, view: Any) -> Mapping[str, str]:
        return {"": ""} if {_CONFIG, _WEIGHTS} <= view.files.keys() else {}

    def replaced(self, view: Any) -> Mapping[str, bytes]:
        """Return the config with this base; nothing if that is what it says, or it is no object."""
        if self._base is None:
            return {}
        try:
            fields = json.loads(view.read(_CONFIG, 0, view.files[_CONFIG]))
        except ValueError:
            return {}
        if not isinstance(fields, dict) or fields.get(_BASE) == self._base:
            return {}
        return {_CONFIG: json.dumps({**fields, _BASE: self._base}, indent=2).encode() + b"\n"}


class ModelFolder(Folder):
    """Models of one file, each as a file with what lies beside it.

    The model that a ref alone means (its only one, or that of the top) is called as the ref.
    """

    def shown(self, view: Any) -> Mapping[str, str]:
        files, models = view.files, view.models.named
        found: dict[str, str] = {}
        for name, model in models.items():
            after = f"/{name}" if name and len(models) > 1 else ""
            if len(model.files) > 1 or not _is_path(after + SAFETENSORS_SUFFIX):
                continue
            stem = without_suffix(model.files[0])
            found[after + SAFETENSORS_SUFFIX] = model.files[0]
            for end in _BESIDE:
                if stem + end in files:
                    found[after + end] = stem + end
        return found


def _is_path(path: str) -> bool:
    """Return whether a file system can have these names; those of models have %40 for @."""
    return all(len(os.fsencode(name)) <= NAME_MAX for name in path.split("/"))


class FolderTree(MovingTree):
    """The folder of the branches and tags that match a pattern."""

    def __init__(
        self, store: Store, pattern: str, folder: Folder, about: About, *, show_about: bool = False
    ) -> None:
        super().__init__(store, about, show_about=show_about, replaced=folder.replaced)
        self._pattern = pattern
        self._folder = folder
        # Contents never change, so each snapshot is looked at once.
        self._known: dict[object, list[tuple[str, str, Attributes | None]]] = {}

    def lasts(self, path: str) -> float:
        return 0.0

    def absent_for(self, path: str) -> float:
        return 0.0

    def _read(self) -> Mapping[str, ShownPath]:
        ids = self._source.ref_ids()
        names: list[str] = []
        with suppress(NotFound):
            names = refs.chosen(ids, [self._pattern])
        shown: dict[str, ShownPath] = {}
        seen = {}
        for name in names:
            if name not in ids:
                continue
            id = ids[name]
            try:
                if id not in seen:
                    seen[id] = self._known[id] if id in self._known else self._look_at(id)
            except MstoreError as error:
                # One that cannot be read now must not hide the others.
                log.warning("%s is not shown: %s", name, error)
                continue
            for after, tail, file in seen[id]:
                shown.setdefault(name + after, ShownPath(str(id), name, tail, file))
        self._known = seen
        return shown

    def _look_at(self, id: Any) -> list[tuple[str, str, Attributes | None]]:
        """Return what is shown of a snapshot: what follows the ref's name, path, attributes."""
        view = self._source.view(id)
        # It refuses paths that form no tree.
        tree = SnapshotTree(view)
        shown = self._folder.shown(view).items()
        return [(end, tail, tree.entry(tail) if tail else None) for end, tail in shown]
