"""Checkpoints that a command line names: paths, or ids of models in the Hub's cache.

Only the command line reads the environment variables that say where the cache is.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from mstore_cli.errors import remarks

if TYPE_CHECKING:
    from mstore.errors import NotFound


_URL = re.compile(
    r"(?:hf:|https?:/(?:www\.)?(?:huggingface\.co|hf\.co))/"
    r"(?P<id>(?!datasets/|spaces/)[^/@]+/[^/@]+)(?:@|/tree/)?(?P<revision>(?<=[@/])[^/]+)?(?:/.*)?"
)
"""An address of a model on the Hub, as a path: one slash for several."""


def cache() -> Path:
    """Return the directory of models in the Hub's cache, by the variables of huggingface_hub."""
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if given:
        return _expanded(given)
    home = os.environ.get("HF_HOME")
    above = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return _expanded(home or os.path.join(above, "huggingface")) / "hub"


def _expanded(text: str) -> Path:
    return Path(os.path.expandvars(text)).expanduser()


def checkpoint(path: Path) -> Path:
    """Return a path that exists, or that of the cached model whose id it is.

    A path is taken before a model of the same id, with a remark.  Raises NotFound, BadCheckpoint.
    """
    from mstore.checkpoint.hub import cached_model, is_id
    from mstore.errors import MstoreError

    id = str(path)
    url = _URL.fullmatch(id)
    if url is not None and not os.path.lexists(path):
        raise _is_url(url["id"], url["revision"])
    if not is_id(id):
        return path
    if not os.path.lexists(path):
        return cached_model(id, cache())
    try:
        other = cached_model(id, cache())
    except MstoreError:
        return path
    remarks([f"{id} is a path here, and a model of the Hub's cache: {shlex.quote(str(other))}"])
    return path


def _is_url(id: str, revision: str | None) -> NotFound:
    """Return the error for an address of a model: which command adds the model."""
    from mstore.checkpoint.hub import cached_model
    from mstore.errors import MstoreError, NotFound

    wanted = f"{id}@{revision}" if revision else id
    add = f"mstore add {shlex.quote(wanted)} --name REF"
    try:
        cached_model(wanted, cache())
    except MstoreError:
        download = f"hf download {shlex.quote(id)}"
        add = f"{download}{f' --revision {revision}' if revision else ''} && {add}"
    return NotFound(
        "add downloads nothing; a model of the Hub's cache is named by its id",
        where=wanted,
        hint=add,
    )
