"""How the command line spells phrases of the library: operations as commands, options as flags.

A name becomes words by a rule (`read_data` is `--read-data`); the tables hold what differs.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from mstore.terms.phrases import Call, Option
from mstore_cli.verbs import OF_NO_STORE

_COMMANDS: Final[Mapping[str, tuple[str, ...]]] = {
    "add_remote": ("remote", "add"),
    "bisect_log": ("bisect", "log"),
    "bisect_mark": ("bisect",),
    "bisect_reset": ("bisect", "reset"),
    "bisect_start": ("bisect", "start"),
    "bisect_status": ("bisect",),
    "configure": ("config",),
    "files": ("ls",),
    "judge": ("gate", "run"),
    "notes_of": ("note",),
    "remote_contents": ("remote", "show"),
    "remote_fsck": ("remote", "fsck"),
    "remote_gc": ("remote", "gc"),
    "remote_usage": ("remote", "du"),
    "remotes": ("remote",),
    "remove": ("rm",),
    "remove_remote": ("remote", "rm"),
    "rename_remote": ("remote", "rename"),
    "sweep": ("plan", "--sweep"),
    "tensors": ("ls", "--tensors"),
    "trust": ("config", "--user", "endpoints"),
}
"""Operations that are a form of another command."""
_FLAGS: Final[Mapping[str, str]] = {
    "branch": "--revision",
    "cache_bytes": "--cache",
    "expert_budget": "--per-expert-budget",
    "experts": "--expert",
    "gates": "--check",
    "companions": "--with",
    "every": "--all",
    "max_sparse_bytes": "--max-sparse",
    "output": "-o",
    "parameters": "--param",
    "pull_request": "--pr",
    "report_command": "--report-eval",
    "sources": "--from",
    "tokens": "--token",
    "vocabulary": "--vocab",
}
"""Options whose flag is not their name with two dashes."""
_SIZES: Final = frozenset({"block_size", "memory"})
"""Options whose value is a number of bytes, of whole MiB or else of whole KiB."""


class Typed(NamedTuple):
    """The words of a user who types commands; `store` is the one that `--store` names, if any."""

    store: Path | None = None

    def call(self, call: Call) -> str:
        """Return the command line: `mstore fsck --read-data --repair --from PLACE`."""
        call = _as_command(call)
        options = dict(call.options)
        # Python takes them as a list.
        refs: Any = options.pop("refs", ())
        command = _COMMANDS.get(call.operation) or (call.operation.replace("_", "-"),)
        store = options.pop("store", None)
        if store is None and command[0] not in OF_NO_STORE and "help" not in options:
            store = self.store
        words = ["mstore"]
        if store is not None:
            words += ["--store", shlex.quote(str(store))]
        words += [*command, *map(shlex.quote, (*call.arguments, *refs))]
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
    if call.operation in ("plan_moe", "prepare_moe"):
        return Call("moe", (), (("recipe", "FILE"), ("name", "REF")))
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
    else:
        yield flag(name)
        if isinstance(value, int) and name in _SIZES:
            value = f"{value >> 20}MiB" if value >> 20 else f"{value >> 10}KiB"
        yield "none" if value is None else shlex.quote(str(value))


def _word(value: object) -> str:
    """Return a value of a parameter as `--param` takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
