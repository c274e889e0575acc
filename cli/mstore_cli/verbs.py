"""The names of all commands."""

from __future__ import annotations

GROUPS = {
    "Start": ("init", "add", "checkout", "mount", "mounts", "unmount", "config"),
    "Merge": ("plan", "merge", "methods", "plans"),
    "Prepare a merge": (
        *("check-merge", "analyze", "align", "cast", "extract-lora", "combine-adapters"),
    ),
    "Look": ("log", "show", "ls", "cat", "diff", "compare", "explain", "blame", "recipe"),
    "Names": ("refs", "tag", "reset", "rename", "reflog", "rm", "note"),
    "Share": ("backup", "clone", "serve", "sign", "verify"),
    "Maintain": ("stats", "du", "prune", "gc", "pin", "unpin", "fsck", "doctor", "version"),
    "Rarely needed": ("materialize", "replay", "reindex", "migrate"),
}
"""The commands by what they are for, in the order of the help."""
VERBS = tuple(verb for verbs in GROUPS.values() for verb in verbs)
# These act on no store, or on those given as arguments.
OF_NO_STORE = frozenset({"methods", "mounts", "unmount", "clone", "version"})

_ADD = "mstore add PATH --name REF (each add, merge and reset is a commit of its own)"
_COPY = "mstore clone SRC DST copies a whole store, and mstore backup DEST brings a copy up to date"
_LIST = "mstore refs lists branches and tags, mstore ls REF the files of one"
_MOVE = "mstore reset NAME REF moves a branch, or makes one"
OTHER_WORDS = {
    "commit": _ADD,
    "branch": f"mstore refs lists branches; {_MOVE}",
    "switch": f"mstore checkout REF DIR copies files out; {_MOVE}",
    "restore": f"mstore checkout REF DIR copies files out; {_MOVE}",
    "push": _COPY,
    "pull": _COPY,
    "fetch": _COPY,
    "remote": _COPY,
    "status": "mstore diff REF DIR compares a directory with a snapshot; mstore refs lists refs",
    "revert": "mstore reset NAME 'NAME@{1}' moves a branch back; mstore reflog lists its moves",
    "list": _LIST,
    "get": "mstore checkout REF DIR copies files out, mstore mount shows them",
    "export": "mstore checkout REF DIR copies files out, mstore mount shows them",
    "import": "mstore add PATH --name REF",
    "delete": "mstore rm REF",
    "remove": "mstore rm REF",
    "move": "mstore rename OLD NEW",
    "mv": "mstore rename OLD NEW",
}
"""Commands of git and other programs that mstore lacks, and what to type instead."""
