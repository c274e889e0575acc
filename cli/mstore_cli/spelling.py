"""How the command line spells phrases of the library: operations as commands, options as flags.

A name becomes words by a rule (`read_data` is `--read-data`); the tables hold what differs.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from mstore.phrases import Call, Option

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


_COMMANDS: Final[Mapping[str, tuple[str, ...]]] = {
    "configure": ("config",),
    "files": ("ls",),
    "notes_of": ("note",),
    "remove": ("rm",),
    "sweep": ("plan", "--sweep"),
    "tensors": ("ls", "--tensors"),
}
"""Operations that are a form of another command."""
_FLAGS: Final[Mapping[str, str]] = {
    "cache_bytes": "--cache",
    "expert_budget": "--per-expert-budget",
    "experts": "--expert",
    "companions": "--with",
    "every": "--all",
    "max_sparse_bytes": "--max-sparse",
    "output": "-o",
    "parameters": "--param",
    "sources": "--from",
    "vocabulary": "--vocab",
}
"""Options whose flag is not their name with two dashes."""
_SIZES: Final = frozenset({"block_size", "memory"})
"""Options whose value is a number of bytes, of whole MiB or else of whole KiB."""
_JOINED: Final = frozenset({"reflink"})
"""Options that also go without a value: one is joined to them, as in `--reflink=never`."""


class Typed(NamedTuple):
    """The words of a user who types commands; `store` is the one that `--store` names, if any."""

    store: Path | None = None

    def call(self, call: Call) -> str:
        """Return the command line: `mstore fsck --read-data --repair --from PLACE`."""
        call = _as_command(call)
        options = dict(call.options)
        command = _COMMANDS.get(call.operation) or (call.operation.replace("_", "-"),)
        store = options.pop("store", None)
        if store is None and command[0] not in OF_NO_STORE and "help" not in options:
            store = self.store
        words = ["mstore"]
        if store is not None:
            words += ["--store", shlex.quote(str(store))]
        words += [*command, *map(shlex.quote, call.arguments)]
        for name, value in options.items():
            words += _given(name, value)
        return " ".join(words)

    def option(self, option: Option) -> str:
        """Return the flag, with its value if there is one."""
        return " ".join(_given(option.name, True if option.value is None else option.value))


def _as_command(call: Call) -> Call:
    """Return the operation as its command takes it, where that is more than another name."""
    if call.operation == "repair":
        read = [option for option in call.options if option[0] == "read_data"]
        other = [option for option in call.options if option[0] != "read_data"]
        return Call("fsck", call.arguments, (*read, ("repair", True), *other))
    if call.operation == "export_plan":
        return Call("plan", ("...",), (("output", "plan.json"),))
    if call.operation == "remove_notes":
        return Call("note", call.arguments, (("remove", dict(call.options)["ids"]),))
    if call.operation == "vouch":
        return Call("configure", ("filesystem", *call.arguments), call.options)
    if call.operation == "read_file":
        return Call("cat", (":".join(call.arguments),), call.options)
    return call


def flag(name: str, *, on: bool = True) -> str:
    """Return the flag of an option: `read_data` is `--read-data`; off, `analyze` `--no-analyze`."""
    off = "" if on else "no-"
    return _FLAGS.get(name) or f"--{off}{name.rstrip('_').replace('_', '-')}"


def _given(name: str, value: object) -> Iterator[str]:
    """Yield the words that give an option a value; True turns a switch on, False turns one off."""
    if isinstance(value, Mapping):
        value = tuple(f"{key}={_word(one)}" for key, one in value.items())
    if isinstance(value, bool):
        yield flag(name, on=value)
    elif isinstance(value, tuple):
        for one in value:
            yield from _given(name, one)
    elif name in _JOINED:
        yield f"{flag(name)}={value}"
    else:
        yield flag(name)
        if isinstance(value, int) and name in _SIZES:
            value = f"{value >> 20}MiB" if value >> 20 else f"{value >> 10}KiB"
        yield "none" if value is None else shlex.quote(str(value))


def _word(value: object) -> str:
    """Return a value of a parameter as `--param` takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
