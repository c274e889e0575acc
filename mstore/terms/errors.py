"""Every error the library raises, grouped by what a caller would do about it.

    MstoreError
    ├── InvalidInput          fix the input and call again
    │   ├── BadCheckpoint     a file or directory that is not a valid checkpoint
    │   ├── BadRequest        an unknown method or parameter, an invalid budget
    │   └── BadName           an invalid name for a ref, tag or revision
    ├── NotFound              name something that exists
    ├── Conflict              look at the current state, then decide
    ├── Incompatible          another version, another filesystem, another model
    ├── Corrupt               the store is damaged: bytes do not match their id, or are missing
    │   └── Unreadable        the disk cannot read them: it may again, so nothing is given up
    ├── BudgetExceeded        a read outside the plan was refused
    ├── StorageFailed         a file operation failed (carries errno)
    ├── Interrupted           run the same call again: it continues where this one ended
    ├── CommandFailed         a command that judges a snapshot failed, hung, or gave no score
    │   └── WrongCommand      it cannot be started, or its scores have other names or places
    ├── GateFailed            a ref stays, as the snapshot did not pass a gate that guards it
    └── Unavailable           something outside the store is missing (FUSE, a lock)
        └── RemoteAway        a block is only at a remote, and that does not answer or refuses

Only `Corrupt` says that the store is damaged.  All others, StorageFailed and Unavailable above all,
say what this machine, or this process, cannot do now: no check counts them as damage, no repair and
no collection acts on them, and who meets one ends with it.  `mstore.fs.unread` decides which of the
two an error of the system is.

An error says *what* is wrong, *where* (path, ref, tensor, block), and the *hint*: the next thing
to do.  `str(error)` is one line without the hint, which tracebacks show below it, as a note of the
exception.  Where a text names operations or options of mstore, it is a phrase (`terms.phrases`):
the attributes give it as Python code, and `told` as the command line, or another program that shows
errors, spells it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from mstore.terms.phrases import Spelling, Text, as_phrase, joined


class Told(NamedTuple):
    """The texts of an error in the words of one face."""

    what: str
    where: str | None
    hint: str | None


class MstoreError(Exception):
    """Base of all errors of this library: `what`, `where` and `hint` are fields, not prose."""

    def __init__(self, what: Text, *, where: Text | None = None, hint: Text | None = None) -> None:
        self._what = what
        self._where = where
        self._hint: Text | None = None
        super().__init__(str(what))
        self.advise(hint)

    @property
    def what(self) -> str:
        """What is wrong."""
        return str(self._what)

    @property
    def where(self) -> str | None:
        """The path, ref, tensor, block or parameter."""
        return None if self._where is None else str(self._where)

    @property
    def hint(self) -> str | None:
        """What to do next."""
        return None if self._hint is None else str(self._hint)

    @property
    def texts(self) -> tuple[Text, Text | None, Text | None]:
        """What, where and hint as they were given, to raise them again in another error."""
        return self._what, self._where, self._hint

    def advise(self, hint: Text | None) -> None:
        """Replace the hint, where a caller knows better what to do next."""
        if self._hint is not None:
            self.__notes__.remove(_noted(self._hint))
        self._hint = hint
        if hint is not None:
            # Tracebacks show notes, and so do those who make a text of a worker's traceback.
            self.add_note(_noted(hint))

    def locate(self, where: Text | None) -> None:
        """Replace the place, where a caller knows it better."""
        self._where = where

    def told(self, spelling: Spelling) -> Told:
        """Return the texts in the words of a face."""
        what, where, hint = (
            None if text is None else as_phrase(text).spelled(spelling) for text in self.texts
        )
        return Told(what or "", where, hint)

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" if self.where else self.what

    def __reduce__(self) -> tuple[object, ...]:
        # The attributes carry what a subclass adds: a worker's error comes back whole.
        return (_rebuild, (type(self), *self.texts), self.__dict__)


def _noted(hint: Text) -> str:
    return "\n".join(f"hint: {line}" for line in str(hint).splitlines())


def _rebuild(
    kind: type[MstoreError], what: Text, where: Text | None, hint: Text | None
) -> MstoreError:
    return kind(what, where=where, hint=hint)


class InvalidInput(MstoreError):
    """The caller's input cannot be used as it is."""


class BadCheckpoint(InvalidInput):
    """A checkpoint on disk is invalid: `where` is the file."""


class BadRequest(InvalidInput):
    """An argument of a command or call is invalid."""


class BadName(InvalidInput):
    """A ref, tag or revision breaks the naming rules."""


class NotFound(MstoreError):
    """The named thing does not exist in this store."""


class Conflict(MstoreError):
    """The thing already exists, or changed since it was read."""


class Incompatible(MstoreError):
    """Versions, filesystems or model shapes do not match."""


class Corrupt(MstoreError):
    """Stored bytes do not match their id, checksum or length; `block` is the damaged block's id."""

    def __init__(
        self,
        what: Text,
        *,
        where: Text | None = None,
        hint: Text | None = None,
        block: bytes | None = None,
    ) -> None:
        super().__init__(what, where=where, hint=hint)
        self.block = block


class Unreadable(Corrupt):
    """The disk, or the filesystem on it, says that it has lost these bytes.

    A check reports them and a repair looks for a copy. But nothing is given up for it: a disk may
    work again.
    """


class BudgetExceeded(MstoreError):
    """A read of expert bytes would have exceeded the plan; it did not happen."""


class StorageFailed(MstoreError):
    """The operating system refused a file operation; `errno` says why."""

    def __init__(
        self,
        what: Text,
        *,
        where: Text | None = None,
        hint: Text | None = None,
        errno: int | None = None,
    ) -> None:
        super().__init__(what, where=where, hint=hint)
        self.errno = errno


class Interrupted(MstoreError):
    """Something outside the store ended the operation; what it had finished is kept."""


class CommandFailed(MstoreError):
    """A command that judges a snapshot could not be started, failed, hung, or gave no score."""


class WrongCommand(CommandFailed):
    """A command that judges cannot be started, or its scores are not where the caller said.

    It says nothing of the snapshot, so no gate takes it for a verdict.
    """


class GateFailed(MstoreError):
    """A ref does not move: the snapshot did not pass a gate that guards it, or nobody has seen."""


class Unavailable(MstoreError):
    """Something that mstore needs and does not own is missing or busy."""


class RemoteAway(Unavailable):
    """A block is only at a remote, and that does not answer or refuses: `where` names it.

    Nothing is damaged; reads go on when the remote is back.
    """


_LONGEST_NAME = 500
"""Characters of what is compared with names: a pattern of many stars takes minutes to compile."""


_NEAR = 0.66
"""How alike a name must be to what was given (`difflib`): `lgo` is to `log`."""


def did_you_mean(
    given: str, known: Iterable[str], hint: Text | None = None, *, prefix: str = ""
) -> Text | None:
    """Return a hint: the known name that was probably meant, if any, then `hint`, if given.

    A name is a candidate if its last part alone was given, or if few letters and no digits differ:
    `v2` and `layers.2` are no slips for `v1` and `layers.1`. For a pattern, up to three names that
    it matches are. prefix: what all names begin with, and which makes no two of them alike.
    """
    import re
    from difflib import get_close_matches
    from fnmatch import fnmatchcase

    given = given.removeprefix(prefix)
    names = sorted(one.removeprefix(prefix) for one in known if one.startswith(prefix))
    if len(given) > _LONGEST_NAME:
        names = []
    found = [name for name in names if name.rpartition("/")[2] == given]
    if any(character in given for character in "*?["):
        found = [name for name in names if fnmatchcase(name, given)][:3]
    else:
        alike = [name for name in names if re.findall(r"\d", name) == re.findall(r"\d", given)]
        found = found[:1] if len(found) == 1 else get_close_matches(given, alike, 1, _NEAR)
    return joined(*(f"did you mean {prefix}{name}?" for name in found), hint)
