"""The names of all commands."""

from __future__ import annotations

# In the order of the help: create and fill, merge, inspect, export, name, sign, maintain.
VERBS = (
    *("init", "config", "add", "analyze", "plan", "plans", "merge", "materialize"),
    *("log", "show", "ls", "cat", "diff", "explain", "blame", "replay"),
    *("checkout", "mount", "mounts", "unmount"),
    *("refs", "tag", "reset", "rename", "reflog", "rm"),
    *("sign", "verify"),
    *("prune", "gc", "backup", "clone"),
    *("fsck", "reindex", "migrate", "stats", "du"),
)
# These act on no store, or on those given as arguments.
OF_NO_STORE = frozenset({"mounts", "unmount", "clone"})
