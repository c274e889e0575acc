"""Type checks for the arguments of public calls; a bad argument is refused before any work.

Owns how one type is told from another, and the text of the error.  Does not own what a value means:
a number that is too large, an invalid name and an unknown method are for the call itself to refuse.

The annotations of a call, as written, say what each parameter takes.  Defining a class with an
unknown annotation is an error.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from mstore.terms.errors import BadRequest
from mstore.terms.ids import NoteId, PlanId, SnapshotId

_Class = TypeVar("_Class", bound=type)
_SHOWN = 60


class Kind(msgspec.Struct, frozen=True):
    """A type of argument: a test for its values, a description, and an optional hint."""

    fits: Callable[[Any], bool]
    words: str
    hint: str | None = None
    taken: Callable[[Any], Any] = lambda one: one
    """What the call gets in place of such a value."""

    def optional(self) -> Kind:
        """Return this kind extended by None."""
        words = f"{self.words}, or None"
        taken = lambda one: None if one is None else self.taken(one)  # noqa: E731
        return Kind(lambda one: one is None or self.fits(one), words, self.hint, taken)


def _is(*types: type) -> Callable[[Any], bool]:
    return lambda one: isinstance(one, types)


def _is_text(given: Any) -> bool:
    """Return whether it is text that UTF-8 can spell: bytes of another encoding are not."""
    try:
        return isinstance(given, str) and bool(given.isascii() or given.encode())
    except UnicodeEncodeError:
        return False


def _number(kind: type) -> Callable[[Any], bool]:
    """Return a test for numbers; a bool does not count as one."""
    return lambda one: isinstance(one, kind) and not isinstance(one, bool)


def _own(given: Any) -> Any:
    """Return Python's own number in place of another library's."""
    if type(given) in (int, float) or not isinstance(given, Real):
        return given
    return int(given) if isinstance(given, Integral) else float(given)


def _list(item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a test for collections that can be iterated repeatedly; a str is one item."""

    def fits(given: Any) -> bool:
        if isinstance(given, str | bytes | bytearray | Mapping) or _SNAPSHOT(given):
            return False
        return isinstance(given, Collection) and all(item(one) for one in given)

    return fits


def _mapping(key: Callable[[Any], bool], item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda given: (
        isinstance(given, Mapping) and all(key(one) and item(what) for one, what in given.items())
    )


def _named(module: str, name: str) -> Callable[[Any], bool]:
    """Return a test for a class without importing its module: if not imported, no values exist."""

    def fits(given: Any) -> bool:
        kind = getattr(sys.modules.get(module), name, None)
        return kind is not None and isinstance(given, kind)

    return fits


def _request(name: str) -> Callable[[Any], bool]:
    return _named("mstore.terms.requests", name)


def _dtype(given: Any) -> Any:
    from mstore.terms.requests import dtype_name  # late: few calls take one

    return dtype_name(given)


def _anything(_given: Any) -> bool:
    return True


def _at_home(path: Any) -> Any:
    """Return a path whose ~ stands for the home directory of this user's account."""
    text = os.fspath(path)
    if text != "~" and not text.startswith("~/"):
        return path
    import pwd  # late: few paths begin so

    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir, text[2:])
    except KeyError as error:
        raise BadRequest("this user has no home directory", where=text) from error


_TEXT = Kind(_is_text, "text")
_TEXTS = Kind(_list(_is_text), "a list of texts")
_NUMBER = Kind(_number(Real), "a number", taken=_own)
_COUNT = Kind(_number(Integral), "a whole number", taken=_own)
_INSIDE = Kind(_is(str, os.PathLike), "a path (text or os.PathLike)")
_PATH = Kind(_INSIDE.fits, _INSIDE.words, taken=_at_home)
_SNAPSHOT = _named("mstore.api.snapshot", "Snapshot")
_DTYPE = Kind(
    lambda one: _is_text(_dtype(one)),
    "the name of a dtype, or a dtype of torch or numpy",
    taken=_dtype,
)
_REVISION = Kind(
    lambda one: isinstance(one, str | SnapshotId) or _SNAPSHOT(one),
    "a revision: text, a SnapshotId or a Snapshot",
)
_SIGNERS = Kind(
    _mapping(_is(bytes), _is(str)),
    "names by public key, as mstore.snapshots.signing.read_signers gives them",
)
_PARAMETERS = Kind(_mapping(_is(str), _anything), "values by the names of parameters")
_NOTE = Kind(_is(NoteId, str), "the id of a note, or its beginning as text")
_PLAN_REPORT = _named("mstore.merge.planning.report", "PlanReport")
_CHECKED_BY_THE_CALL = Kind(_anything, "")

KINDS: Final[Mapping[str, Kind]] = {
    "str": _TEXT,
    "str | None": _TEXT.optional(),
    "str | Any": _DTYPE,
    "str | Any | None": _DTYPE.optional(),
    "str | int": Kind(
        lambda one: _TEXT.fits(one) or _COUNT.fits(one), "text or a whole number", taken=_own
    ),
    "bool": Kind(_is(bool), "True or False"),
    "int": _COUNT,
    "int | None": _COUNT.optional(),
    "float": _NUMBER,
    "float | None": _NUMBER.optional(),
    "str | Path": _PATH,
    "str | os.PathLike[str]": _INSIDE,
    "Snapshot | SnapshotId": Kind(
        lambda one: isinstance(one, SnapshotId) or _SNAPSHOT(one), "a Snapshot or a SnapshotId"
    ),
    "PlanReport | PlanId | str": Kind(
        lambda one: _PLAN_REPORT(one) or isinstance(one, PlanId | str),
        "a plan: what Store.plan gave, its PlanId, or that as text",
    ),
    "NoteId | str | None": _NOTE.optional(),
    "Sequence[NoteId | str]": Kind(_list(_NOTE.fits), "a list of ids of notes"),
    "str | Callable[[], str]": Kind(
        lambda one: _TEXT.fits(one) or callable(one), "text, or something to call for it"
    ),
    "Sequence[str]": _TEXTS,
    "Sequence[str] | None": _TEXTS.optional(),
    # Of another library, which knows what it takes.
    "Any": _CHECKED_BY_THE_CALL,
    "Sequence[str | Path]": Kind(
        _list(_PATH.fits), "a list of paths", taken=lambda paths: [_at_home(one) for one in paths]
    ),
    "Sequence[float] | None": Kind(_list(_NUMBER.fits), "a list of numbers").optional(),
    "Mapping[str, str] | None": Kind(
        _mapping(_is(str), _is(str)), "texts by the names of models"
    ).optional(),
    "Mapping[bytes, str]": _SIGNERS,
    "Mapping[bytes, str] | None": _SIGNERS.optional(),
    "ProgressCallback | None": Kind(callable, "something to call with a Progress").optional(),
    "Executor | None": Kind(
        lambda one: callable(getattr(one, "submit", None)), "a concurrent.futures.Executor"
    ).optional(),
    "SigningKey": Kind(
        _named("mstore.snapshots.signing", "SigningKey"),
        "what mstore.snapshots.signing.load_key gives",
    ),
    "CheckpointLimits | None": Kind(
        _named("mstore.checkpoint.directory", "CheckpointLimits"), "CheckpointLimits"
    ).optional(),
    "ConversionLimits | None": Kind(
        _named("mstore.checkpoint.convert.conversion", "ConversionLimits"), "ConversionLimits"
    ).optional(),
    "MergeRequest": Kind(
        _request("MergeRequest"),
        "a MergeRequest",
        'MergeRequest(base="llama", experts=["code"], method="ties")',
    ),
    "Revision": _REVISION,
    "Mapping[str, Revision]": Kind(
        _mapping(_is(str), _REVISION.fits), 'revisions by role, as {"fisher:code": "code-fisher"}'
    ),
    "Sequence[Revision]": Kind(_list(_REVISION.fits), "a list of revisions"),
    "Mapping[str, object]": _PARAMETERS,
    "Mapping[str, Any]": Kind(_mapping(_is_text, _anything), "values by their keys"),
    "Mapping[str, object] | None": _PARAMETERS.optional(),
    "Sequence[TensorRule]": Kind(
        _list(_request("TensorRule")),
        "a list of TensorRule",
        'TensorRule(tensors="*.mlp.*", method="ties")',
    ),
    "str | Sequence[str]": Kind(
        lambda one: _TEXT.fits(one) or _TEXTS.fits(one), "text or a list of texts"
    ),
    "Mapping[str, str | Sequence[str]]": Kind(
        _mapping(_is_text, lambda one: _TEXT.fits(one) or _TEXTS.fits(one)),
        "the names of sources by the names of tensors",
    ),
    "Sequence[tuple[Revision, int, int]]": Kind(
        _list(lambda one: isinstance(one, tuple | list)),
        "a list of (model, first layer, last layer + 1)",
        '("llama", 0, 16)',
    ),
    "Revision | None": _REVISION.optional(),
    "str | int | None": Kind(
        lambda one: one is None or _TEXT.fits(one) or _COUNT.fits(one),
        "text, a whole number, or None",
    ),
    "Vocabulary": Kind(_request("Vocabulary"), "a Vocabulary", 'Vocabulary(source="union")'),
    "Mapping[str, TokenRow]": Kind(
        _mapping(_is(str), _request("TokenRow")), "TokenRow by the names of tokens"
    ),
    "Experts": _CHECKED_BY_THE_CALL,
    "Budget | str | float | None": _CHECKED_BY_THE_CALL,
}
"""What each annotation of a public call means."""


def checked(owner: str) -> Callable[[_Class], _Class]:
    """Make every public call of a class check the types of its arguments.

    owner: the public name of the class.  The calls raise BadRequest that names the call, the
    parameter and the expected type.
    """

    def decorate(kind: _Class) -> _Class:
        for name, member in list(vars(kind).items()):
            if name.startswith("_") and name != "__getitem__":
                continue
            if isinstance(member, staticmethod | classmethod):
                setattr(kind, name, type(member)(_checking(owner, member.__func__)))
            elif inspect.isfunction(member):
                setattr(kind, name, _checking(owner, member))
        return kind

    return decorate


def _checking(owner: str, function: Callable[..., Any]) -> Callable[..., Any]:
    where = f"{owner}.{function.__name__}"
    # Python's own errors name it, and users know only the public class.
    function.__qualname__ = where
    parameters = inspect.signature(function).parameters.values()
    kinds = {one.name: KINDS[one.annotation] for one in parameters if one.annotation != one.empty}
    # None stands for the receiver, self or cls.
    in_order = [
        (one.name, kinds.get(one.name)) for one in parameters if one.kind != one.KEYWORD_ONLY
    ]
    several = next((one.name for one in parameters if one.kind == one.VAR_POSITIONAL), None)

    def taken(name: str, kind: Kind | None, value: Any) -> Any:
        if kind is None:
            return value
        if not kind.fits(value):
            raise _refused(where, name, kind, value)
        return kind.taken(value)

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        positional = list(given)
        for at, value in enumerate(given):
            # Python itself rejects too many arguments.
            if at < len(in_order) or several is not None:
                positional[at] = taken(*in_order[min(at, len(in_order) - 1)], value)
        named = {name: taken(name, kinds.get(name), value) for name, value in named.items()}
        return function(*positional, **named)

    return call


def check_fields(where: str, value: Any) -> None:
    """Raise BadRequest unless each field of a dataclass has its declared type."""
    for field in fields(value):
        kind, given = KINDS[str(field.type)], getattr(value, field.name)
        if not kind.fits(given):
            raise _refused(where, field.name, kind, given)


def _refused(where: str, name: str, kind: Kind, value: object) -> BadRequest:
    told = repr(value) if value is None else type(value).__name__
    if isinstance(value, str | int | float):
        told = f"{repr(value)[:_SHOWN]} ({told})"
    several = value if isinstance(value, Collection) and not isinstance(value, str) else [value]
    for one in several:
        if isinstance(one, str) and not _is_text(one):
            told = f"bytes that are not UTF-8: {repr(one)[:_SHOWN]}"
    return BadRequest(f"{name} must be {kind.words}, not {told}", where=where, hint=kind.hint)
