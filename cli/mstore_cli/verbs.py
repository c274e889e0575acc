"""The names of all commands."""

from __future__ import annotations

# In the order of the help: make and fill, merge, look, take out, name, vouch, keep sound.
VERBS = (
    *("init", "config", "add", "analyze", "plan", "plans", "merge", "materialize"),
    *("log", "show", "ls", "cat", "diff", "explain", "blame", "replay"),
    *("checkout", "mount", "mounts", "unmount"),
    *("refs", "tag", "reset", "rename", "reflog", "rm"),
    *("sign", "verify"),
    *("prune", "gc", "backup", "clone"),
    *("fsck", "reindex", "migrate", "stats", "du"),
)
# These act on no store, or on those that they are given.
OF_NO_STORE = frozenset({"mounts", "unmount", "clone"})
