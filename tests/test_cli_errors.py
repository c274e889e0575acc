"""Exceptions become words on standard error and an exit status."""

from __future__ import annotations

import errno
import io

import pytest

from mstore.terms import errors as library
from mstore_cli import errors


def said(error: BaseException) -> tuple[int, str]:
    stream = io.StringIO()
    status = errors.report(error, stream)
    return status, stream.getvalue()


def library_errors(kind: type[library.MstoreError]) -> list[type[library.MstoreError]]:
    return [kind] + [found for sub in kind.__subclasses__() for found in library_errors(sub)]


@pytest.mark.parametrize("kind", library_errors(library.MstoreError))
def test_every_library_error_has_a_status(kind: type[library.MstoreError]) -> None:
    """Every error of the library says what, where and its own hint, and exits with 1, with 2 if
    the request itself is wrong, or with 3 if a gate says no."""
    status, text = said(kind("it broke", where="shard-1", hint="mstore fsck"))
    is_wrong = issubclass(kind, library.BadRequest | library.BadName)
    assert status == (2 if is_wrong else 3 if issubclass(kind, library.GateFailed) else 1)
    assert text == "error: shard-1: it broke\nhint: mstore fsck\n"


def test_hint_of_the_table() -> None:
    """Where an error brings no hint, the table's is given."""
    assert said(library.NotFound("no such ref", where="x")) == (
        1,
        "error: x: no such ref\nhint: mstore refs\n",
    )
    assert said(library.Corrupt("bad block"))[1].endswith("hint: mstore fsck --read-data\n")


def test_special_rules_come_first() -> None:
    """No rule of the table is hidden behind a more general one."""
    rules = errors.rules()
    for place, rule in enumerate(rules):
        assert not any(issubclass(rule.kind, earlier.kind) for earlier in rules[:place])


def test_usage() -> None:
    """Wrong usage exits with 2 and names the help of the command."""
    assert said(errors.UsageError("this and that", hint="mstore log --help")) == (
        2,
        "error: this and that\nhint: mstore log --help\n",
    )
    assert said(errors.UsageError("Nonsense.")) == (2, "error: nonsense\nhint: mstore --help\n")


def test_interrupt_and_broken_pipe() -> None:
    """Ctrl-C says one word and exits with 130; a reader that left is told nothing."""
    assert said(KeyboardInterrupt()) == (130, "interrupted\n")
    assert said(BrokenPipeError(errno.EPIPE, "Broken pipe")) == (141, "")


def test_full_disk() -> None:
    """A full disk reads as such, whether the library or the interpreter noticed."""
    raw = OSError(errno.ENOSPC, "No space left on device", "plan.json")
    status, text = said(raw)
    assert status == 1
    assert text.startswith("error: plan.json: no space left on device\nhint: free some space")
    wrapped = library.StorageFailed("no space left on device", where="p", errno=errno.ENOSPC)
    assert "hint: free some space" in said(wrapped)[1]


def test_other_os_errors() -> None:
    """An unexpected error of the operating system is one readable line."""
    assert said(PermissionError(errno.EACCES, "Permission denied", "/x")) == (
        1,
        (
            "error: /x: permission denied\n"
            "hint: ls -ld /x says who may read it: run as that user, or chmod u+r it\n"
        ),
    )
    assert said(OSError("odd")) == (1, "error: odd\n")


def test_a_bug_shows_its_traceback() -> None:
    """What nobody foresaw is reported as a bug, with the traceback, and exits with 1."""
    try:
        raise ZeroDivisionError("division by zero")
    except ZeroDivisionError as error:
        status, text = said(error)
    assert status == 1
    assert text.startswith("Traceback")
    assert "error: internal error: ZeroDivisionError: division by zero\nhint: this is a bug" in text


def test_names_in_errors_are_escaped() -> None:
    """A file name cannot send control sequences through an error; lists keep their lines."""
    error = library.BadCheckpoint("missing tensors:\na\nb\x1b[2J", where="\x1b]0;x\x07")
    assert said(error)[1] == ("error: \\x1b]0;x\\x07: missing tensors:\n  a\n  b\\x1b[2J\n")


def test_exit_is_not_an_error() -> None:
    """SystemExit is not swallowed."""
    with pytest.raises(SystemExit):
        errors.report(SystemExit(3), io.StringIO())
