"""Error handling of the command line: exception -> text on standard error and an exit status.

`rules()` is the only such table in the program.  Nothing here writes to standard output.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TextIO

from mstore_cli.output import NotPrinted, is_terminal, printable
from mstore_cli.verbs import OF_NO_STORE, VERBS

if TYPE_CHECKING:
    from mstore.terms.errors import Told

SUCCESS = 0
FAILURE = 1
USAGE = 2
REFUSED = 3
"""A command judged a snapshot, and says no."""
INTERRUPTED = 130
BROKEN_PIPE = 141
DISK_FULL_HINT = "free some space and run the command again; nothing was published"
BUG_HINT = "this is a bug in mstore: please report the lines above, and what mstore doctor prints"
METHOD_HINT = "this is a bug of that package, not of mstore: the lines above say where"
# A command to type, anywhere in a sentence, but not "this mstore reads".
_COMMAND = (
    rf"(?<![\w/.-])mstore (?=({'|'.join(v for v in VERBS if v not in OF_NO_STORE)})\b)"
    r"(?!\S+ --store)(?!.*--help)"
)


class UsageError(Exception):
    """Wrong usage of the command line; `hint` is the command to try."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class Ended(Exception):
    """The end of a command that printed its whole result, with an exit status that is not 0."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during work that is partly kept; `hint` says how to resume."""

    def __init__(self, hint: str) -> None:
        super().__init__()
        self.hint = hint


class Rule(NamedTuple):
    """How to handle one class of exception: exit status, and a hint if the error has none."""

    kind: type[BaseException]
    status: int
    hint: str | None = None


def rules() -> tuple[Rule, ...]:
    """Return the table, most specific first: the first rule whose `kind` fits decides."""
    # Imported here because `mstore --help` must not pay for the library.
    from mstore.terms import errors

    return (
        Rule(UsageError, USAGE, "mstore --help"),
        Rule(KeyboardInterrupt, INTERRUPTED),
        Rule(BrokenPipeError, BROKEN_PIPE),
        Rule(NotPrinted, FAILURE),
        Rule(errors.BadName, USAGE, "mstore refs"),
        Rule(errors.BadRequest, USAGE),
        Rule(errors.BadCheckpoint, FAILURE),
        Rule(errors.NotFound, FAILURE, "mstore refs"),
        Rule(errors.Conflict, FAILURE, "mstore refs"),
        Rule(errors.Incompatible, FAILURE),
        Rule(errors.Corrupt, FAILURE, "mstore fsck --read-data"),
        Rule(errors.BudgetExceeded, FAILURE, "mstore fsck"),
        Rule(errors.StorageFailed, FAILURE),
        Rule(errors.Interrupted, FAILURE),
        Rule(errors.CommandFailed, FAILURE),
        Rule(errors.GateFailed, REFUSED),
        Rule(errors.Unavailable, FAILURE),
        Rule(errors.MstoreError, FAILURE),
        Rule(OSError, FAILURE),
        Rule(MemoryError, FAILURE, "try again with fewer --threads"),
        Rule(Exception, FAILURE, BUG_HINT),
    )


def with_store(hint: str, store: Path | None) -> str:
    """Add `--store` to the hint's commands, so that they act on the requested store."""
    if store is None:
        return hint
    command = f"mstore --store {shlex.quote(str(store))} "
    return re.sub(_COMMAND, lambda _: command, hint)


def report(
    error: BaseException,
    stream: TextIO | None = None,
    *,
    store: Path | None = None,
    document: TextIO | None = None,
) -> int:
    """Report an error on standard error; return the exit status.

    store: the store named by `--store`, to add to commands in hints. document: where to write the
    same as a JSON object, for `--json`.
    """
    rule = next((rule for rule in rules() if isinstance(error, rule.kind)), None)
    if rule is None:
        raise error
    stream = sys.stderr if stream is None else stream
    if rule.kind is BrokenPipeError:
        # The reader closed the pipe and wants no more output, not even errors.
        return rule.status
    if document is not None:
        try:
            _tell_programs(document, error, rule, store)
            document.flush()
        except BrokenPipeError:
            return BROKEN_PIPE
        except OSError:
            # Standard error still says what is wrong.
            pass
    # What cannot be told changes no status.
    with suppress(OSError):
        _tell_people(stream, error, rule, store)
    return rule.status


def _tell_people(stream: TextIO, error: BaseException, rule: Rule, store: Path | None) -> None:
    if rule.kind is KeyboardInterrupt:
        stream.write("interrupted\n")
        if isinstance(error, Interrupted):
            _say(stream, "hint", "36", with_store(error.hint, store))
        return
    if rule.kind is Exception:
        import traceback

        traceback.print_exception(error, file=stream)
    told = _told(error, rule, store)
    _say(stream, "error", "31", f"{told.where}: {told.what}" if told.where else told.what)
    if told.hint:
        _say(stream, "hint", "36", told.hint)
    stream.flush()


def _tell_programs(document: TextIO, error: BaseException, rule: Rule, store: Path | None) -> None:
    told = _told(error, rule, store)
    import json

    answer = {**told._asdict(), "code": _code(error), "exit_status": rule.status}
    json.dump({"error": answer}, document, indent=2)
    document.write("\n")


def _code(error: BaseException) -> str:
    """Return the error's kind for programs: the name of the library's error class."""
    if isinstance(error, UsageError):
        return "usage"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    from mstore.terms.errors import MstoreError

    if isinstance(error, MstoreError):
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(error).__name__).lower()
    if isinstance(error, OSError):
        return "storage-failed"
    return "out-of-memory" if isinstance(error, MemoryError) else "bug"


def warn(text: str, hint: str | None = None) -> None:
    """Warn on standard error; the command continues."""
    with suppress(OSError):
        _say(sys.stderr, "warning", "33", text)
        if hint is not None:
            _say(sys.stderr, "hint", "36", hint)
        sys.stderr.flush()


def note(text: str) -> None:
    """Tell people on standard error what happens."""
    with suppress(OSError):
        _say(sys.stderr, "note", "33", text)
        sys.stderr.flush()


def remarks(lines: Iterable[str], stream: TextIO | None = None) -> None:
    """Report on standard error what succeeded only after a correction, and the correction."""
    with suppress(OSError):
        for line in lines:
            _say(sys.stderr if stream is None else stream, "remark", "33", line)


def _told(error: BaseException, rule: Rule, store: Path | None) -> Told:
    """Return the error's texts with commands to type, for the store that `--store` names."""
    from mstore.terms.errors import MstoreError, Told
    from mstore_cli.spelling import Typed

    if isinstance(error, MstoreError):
        told = error.told(Typed(store))
        hint = told.hint if told.hint is not None else _hint(error, rule)
        return told._replace(hint=with_store(hint, store) if hint else None)
    if rule.kind is Exception:
        # Imported here because other errors must not pay for it.
        from mstore.merge.methods.registry import at_fault

        method = at_fault(error)
        if method is not None:
            return Told(f"{method} failed: {type(error).__name__}: {error}", None, METHOD_HINT)
    hint = error.hint if isinstance(error, Interrupted) else _hint(error, rule)
    return Told(_message(error), None, with_store(hint, store) if hint else None)


def _message(error: BaseException) -> str:
    if isinstance(error, UsageError):
        message = str(error).rstrip(".")
        return message[:1].lower() + message[1:]
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, NotPrinted):
        return str(error)
    if isinstance(error, OSError):
        words = os.strerror(error.errno).lower() if error.errno else str(error)
        return f"{os.fsdecode(error.filename)}: {words}" if _has_name(error) else words
    if isinstance(error, MemoryError):
        return "out of memory"
    return f"internal error: {type(error).__name__}: {error}"


def _has_name(error: OSError) -> bool:
    return isinstance(error.filename, str | bytes)


def _hint(error: BaseException, rule: Rule) -> str | None:
    own = getattr(error, "hint", None)
    if isinstance(own, str):
        return own
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return DISK_FULL_HINT
    denied = getattr(error, "errno", None) == errno.EACCES
    path = getattr(error, "where", None) or getattr(error, "filename", None)
    if denied and isinstance(path, str):
        return f"ls -ld {shlex.quote(path)} says who may read it: run as that user, or chmod u+r it"
    return rule.hint


def _say(stream: TextIO, label: str, colour: str, text: str) -> None:
    coloured = is_terminal(stream) and not os.environ.get("NO_COLOR")
    head = f"\x1b[1;{colour}m{label}:\x1b[0m" if coloured else f"{label}:"
    first, *rest = [printable(line) for line in text.splitlines()] or [""]
    stream.write(f"{head} {first}\n")
    stream.writelines(f"  {line}\n" for line in rest)
