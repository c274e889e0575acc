"""Which relative paths may become files of a snapshot.

An accepted path can be created below any directory, on any filesystem that mstore checks out to,
without leaving that directory and without touching another file. Paths are POSIX: `/` separates, a
backslash is an ordinary character.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath

from mstore.terms.errors import BadCheckpoint

INDEX_SUFFIX = ".safetensors.index.json"
"""How the file that says which tensors are in which shard ends."""
SAFETENSORS_SUFFIX = ".safetensors"
_SAFETENSORS = (SAFETENSORS_SUFFIX, ".sft")
MAX_PATH_BYTES = 4096
MAX_COMPONENT_BYTES = 255
MAX_DEPTH = 64
"""Maximum number of components: bounds the work per path, so it is linear in the paths."""

# C0, DEL and C1: unprintable, and commands on a terminal.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")


def quoted(text: str, width: int = 120) -> str:
    """Format untrusted text for one line of an error: escaped, cut to about `width` characters."""
    return repr(text if len(text) <= width else f"{text[:width]}…")


def name_for(path: PurePath) -> str:
    """Return a ref name for a checkpoint at `path`: its own, with `-` for what refs cannot have."""
    found = re.sub(r"[^A-Za-z0-9._-]+", "-", path.name).strip("-.")
    return without_suffix(found) or "x"


def is_safetensors(path: str) -> bool:
    """Return whether a file of this name is one of weights; some programs cut the suffix short."""
    return path.endswith(_SAFETENSORS)


def without_suffix(path: str) -> str:
    """Return the path of a file of weights without its suffix; any other path stays."""
    for suffix in _SAFETENSORS:
        path = path.removesuffix(suffix)
    return path


def check_relative(path: str, where: str) -> None:
    """Raise BadCheckpoint unless a path is relative, with plain components.

    The error (at `where`, naming the path) covers a path that is empty or absolute, has an empty,
    `.` or `..` component, a control character (including NUL) or text that is not valid UTF-8, or
    is longer than 4096 bytes, 255 bytes per component or 64 components.
    """
    problem = _problem(path)
    if problem is not None:
        raise BadCheckpoint(f"the file name {quoted(path)} {problem}", where=where)


def _problem(path: str) -> str | None:
    if not path:
        return "is empty"
    if path.startswith("/"):
        return "is absolute"
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        return "is not valid UTF-8"
    if CONTROL.search(path):
        return "holds a control character"
    if len(encoded) > MAX_PATH_BYTES:
        return f"is longer than {MAX_PATH_BYTES} bytes"
    components = encoded.split(b"/")
    if len(components) > MAX_DEPTH:
        return f"is deeper than {MAX_DEPTH} components"
    for component in components:
        if component in (b".", b".."):
            return f"has a {component.decode()!r} component"
        if not component:
            return "has an empty component"
        if len(component) > MAX_COMPONENT_BYTES:
            return f"has a component of more than {MAX_COMPONENT_BYTES} bytes"
    return None


def check_case_twins(paths: Iterable[str], where: str | None = None) -> None:
    """Raise BadCheckpoint, naming both, if two paths differ only in case.

    Compares whole paths and every directory on the way with Unicode case folding: `A/x` and `a/y`
    are twins because the directories are.
    """
    spelling: dict[str, str] = {}
    for path in paths:
        # Go up from the whole path: once a directory is known in this exact spelling, so is
        # everything above it, and a large flat directory costs two look-ups per file.
        prefix = path
        while prefix:
            known = spelling.setdefault(prefix.casefold(), prefix)
            if known != prefix:
                raise BadCheckpoint(
                    f"{quoted(known)} and {quoted(prefix)} differ only in case",
                    where=where,
                    hint="rename one of them: many filesystems would make them one file",
                )
            above, _, _ = prefix.rpartition("/")
            if spelling.get(above.casefold()) == above:
                break
            prefix = above
