"""Models in the cache of the Hugging Face Hub: where one lies, and which one lies somewhere.

Owns how ids of models and revisions are spelled there (`tree` shows the layout); asks no network.
Where the cache is, the caller says: environment variables decide it.
"""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from mstore.checkpoint.reading import open_regular, read_range
from mstore.checkpoint.tree import HUB_PREFIX, hub_snapshot
from mstore.terms.errors import MstoreError, NotFound

_NAME: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_REVISION: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9_./-]{0,253}[A-Za-z0-9_])?"
_ID: Final = re.compile(rf"(?P<model>{_NAME}/{_NAME})(?:@(?P<revision>{_REVISION}))?")
_FOLDER: Final = re.compile(rf"{HUB_PREFIX}([A-Za-z0-9_.-]{{1,200}})")
_COMMIT: Final = re.compile(_NAME)
_REVISION_NAME: Final = re.compile(_REVISION)
_MOST_REFS: Final = 1000


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


class HubOrigin(NamedTuple):
    """A snapshot of the Hub.

    model: ORG/NAME. revision: a branch or tag of the cache that is this commit, empty for none.
    """

    model: str
    revision: str
    commit: str


def origin_of(path: Path) -> HubOrigin | None:
    """Return where a path is from if it is a snapshot of a Hub cache, or in one; else None."""
    for snapshot in (path, *path.parents):
        model = snapshot.parent.parent
        found = _FOLDER.fullmatch(model.name)
        if found and snapshot.parent.name == "snapshots" and _COMMIT.fullmatch(snapshot.name):
            revision = _revision_of(model / "refs", snapshot.name)
            return HubOrigin(found[1].replace("--", "/", 1), revision, snapshot.name)
    return None


def _revision_of(refs: Path, commit: str) -> str:
    """Return the ref that names a commit: main before others, else the first by name."""
    try:
        found = sorted(path for path in islice(refs.rglob("*"), _MOST_REFS) if path.is_file())
    except OSError:
        return ""
    for path in sorted(found, key=lambda one: one != refs / "main"):
        with suppress(MstoreError), open_regular(path) as (descriptor, _):
            name = path.relative_to(refs).as_posix()
            told = read_range(descriptor, 0, len(commit) + 2).strip()
            if told == commit.encode() and _REVISION_NAME.fullmatch(name):
                return name
    return ""


def _download(model: str, revision: str | None) -> str:
    return f"hf download {model}" + (f" --revision {revision}" if revision else "")
