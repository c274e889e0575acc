"""The names of all commands."""

from __future__ import annotations

from collections.abc import Sequence

GROUPS = {
    "Start": ("init", "add", "checkout", "mount", "mounts", "unmount", "config"),
    "Merge": ("plan", "merge", "methods", "plans"),
    "Prepare a merge": (
        *(
            "check-merge",
            "analyze",
            "align",
            "permute",
            "cast",
            "extract-lora",
            "combine-adapters",
            "convert-adapter",
        ),
        *("shuffle", "moe", "emr"),
    ),
    "Look": (
        *("log", "show", "find", "ls", "cat", "diff", "compare", "explain", "blame", "recipe"),
        "report",
    ),
    "Judge": ("eval", "metrics", "gate", "gate run", "gate drop", "gate require"),
    "Search": (
        *(
            "search",
            "bisect",
            "bisect start",
            "bisect good",
            "bisect bad",
            "bisect skip",
            "bisect run",
        ),
        *("bisect log", "bisect replay", "bisect reset"),
    ),
    "Names": ("refs", "tag", "reset", "rename", "reflog", "rm", "note"),
    "Share": (
        *(
            "remote",
            "remote add",
            "remote show",
            "remote rename",
            "remote rm",
            "remote du",
            "remote gc",
            "remote fsck",
        ),
        *("push", "fetch", "pull", "clone", "copy", "bundle create"),
        *("prefetch", "drop", "export", "outdated"),
        *("backup", "serve", "sign", "verify"),
    ),
    "Maintain": ("stats", "du", "prune", "gc", "pin", "unpin", "fsck", "doctor", "version"),
    "Rarely needed": ("materialize", "replay", "reindex", "migrate"),
}
"""The commands by what they are for, in the order of the help; some have a second word."""
VERBS = tuple(verb for verbs in GROUPS.values() for verb in verbs)
FIRST_WORDS = tuple(dict.fromkeys(verb.partition(" ")[0] for verb in VERBS))
# These act on no store, or on those given as arguments.
OF_NO_STORE = frozenset({"methods", "mounts", "unmount", "clone", "version"})

_ADD = "mstore add PATH --name REF (each add, merge and reset is a commit of its own)"
_LIST = "mstore refs lists branches and tags, mstore ls REF the files of one"
_MOVE = "mstore reset NAME REF moves a branch, or makes one"
OTHER_WORDS = {
    "commit": _ADD,
    "branch": f"mstore refs lists branches; {_MOVE}",
    "switch": f"mstore checkout REF DIR copies files out; {_MOVE}",
    "restore": f"mstore checkout REF DIR copies files out; {_MOVE}",
    "status": "mstore diff REF DIR compares a directory with a snapshot; mstore refs lists refs",
    "revert": "mstore reset NAME 'NAME@{1}' moves a branch back; mstore reflog lists its moves",
    "list": _LIST,
    "get": "mstore checkout REF DIR copies files out, mstore mount shows them",
    "upload": "mstore export REF hf://ORG/NAME (to the Hub), mstore push NAME (to a remote)",
    "import": "mstore add PATH --name REF",
    "delete": "mstore rm REF",
    "remove": "mstore rm REF",
    "remote remove": "mstore remote rm NAME",
    "remote delete": "mstore remote rm NAME",
    "remote list": "mstore remote",
    "remote ls": "mstore remote",
    "remote get-url": "mstore remote",
    "remote set-url": "mstore remote rm NAME, then mstore remote add NAME URL",
    "remote prune": "mstore fetch NAME removes refs that the remote removed",
    "move": "mstore rename OLD NEW",
    "mv": "mstore rename OLD NEW",
}
"""Commands of git and other programs that mstore lacks, and what to type instead."""


def second_words(first: str) -> tuple[str, ...]:
    """Return the second words of commands that begin with this word."""
    return tuple(verb.partition(" ")[2] for verb in VERBS if verb.startswith(f"{first} "))


def verb_of(words: Sequence[str]) -> str:
    """Return the command that a line of these words names."""
    two = " ".join(words[:2])
    return two if two in VERBS else words[0]
