"""Models in the cache of the Hugging Face Hub: where one lies, and which one lies somewhere.

Owns how ids of models and revisions are spelled there (`tree` shows the layout); asks no network.
Where the cache is, the caller says: environment variables decide it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from mstore.checkpoint.tree import HUB_PREFIX, hub_snapshot
from mstore.errors import NotFound

_NAME: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_REVISION: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9_./-]{0,253}[A-Za-z0-9_])?"
_ID: Final = re.compile(rf"(?P<model>{_NAME}/{_NAME})(?:@(?P<revision>{_REVISION}))?")
_FOLDER: Final = re.compile(rf"{HUB_PREFIX}([A-Za-z0-9_.-]{{1,200}})")
_COMMIT: Final = re.compile(_NAME)


def is_id(text: str) -> bool:
    """Return whether a text can be the id of a model, with a revision or without."""
    found = _ID.fullmatch(text)
    return found is not None and not any(two in text for two in ("--", ".."))


def cached_model(id: str, cache: Path) -> Path:
    """Return the directory of a model in a cache.

    id: ORG/NAME or ORG/NAME@REVISION: a branch, a tag or a commit; without a revision, main. cache:
    the directory that has `models--ORG--NAME`.

    Raises NotFound, which says how to get the model, and BadCheckpoint.
    """
    found = _ID.fullmatch(id)
    if found is None or not is_id(id):
        raise NotFound("is no id of a model", where=id, hint="ORG/NAME or ORG/NAME@REVISION")
    name, revision = found["model"], found["revision"]
    model = cache / f"{HUB_PREFIX}{name.replace('/', '--')}"
    if not (model / "snapshots").is_dir():
        raise NotFound(
            f"no such file or directory, and the Hub's cache at {cache} has no such model",
            where=id,
            hint=f"check the path, or download the model: {_download(name, revision)}",
        )
    commit = model / "snapshots" / (revision or "")
    if revision and "/" not in revision and commit.is_dir():
        return commit
    if not (model / "refs" / (revision or "main")).is_file():
        raise NotFound(
            f"the Hub's cache at {cache} has the model, but not its revision {revision or 'main'}",
            where=id,
            hint=_download(name, revision),
        )
    return hub_snapshot(model, revision or "main")


def origin_of(path: Path) -> str | None:
    """Return ORG/NAME@COMMIT if a path is a snapshot of a Hub cache, or in one; else None."""
    for snapshot in (path, *path.parents):
        model = snapshot.parent.parent
        found = _FOLDER.fullmatch(model.name)
        if found and snapshot.parent.name == "snapshots" and _COMMIT.fullmatch(snapshot.name):
            return f"{found[1].replace('--', '/', 1)}@{snapshot.name}"
    return None


def _download(model: str, revision: str | None) -> str:
    return f"hf download {model}" + (f" --revision {revision}" if revision else "")
