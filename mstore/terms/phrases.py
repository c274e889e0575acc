"""Phrases: messages that name operations and options as data.

The library does not know whether a person types commands or a program calls functions. So a hint
is a template and its parts: a `Call` is an operation with arguments, an `Option` is one parameter.
As a string a phrase is Python, `store.fsck(read_data=True)`. A program that shows errors otherwise
gives a `Spelling`: the command line writes `call("fsck", read_data=True)` as
`mstore fsck --read-data`.

    phrase("{reset}, then {fsck}", reset=call("reset", "NAME", name), fsck=call("fsck"))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, Self

import msgspec


class Call(msgspec.Struct, frozen=True):
    """An operation of mstore with its arguments, as the next step to take.

    operation: its name, `fsck`. arguments: positional, in order; `REF`, `PATH` and the like
    where the reader fills them in, `...` for those that do not matter. options: by their Python
    names, in order, with values as in an `Option`; True is a switch, the key `store` names another
    store than the present one, and `help=True` stands for the description of the operation.
    """

    operation: str
    arguments: tuple[str, ...] = ()
    options: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        if ("help", True) in self.options:
            return f"help(mstore.Store.{self.operation})"
        given = [_python(one) for one in self.arguments]
        place = next((_python(value) for key, value in self.options if key == "store"), None)
        if self.operation in _OF_PLACES:
            given.insert(0, place or "PATH")
        given += [f"{key}={_python(value)}" for key, value in self.options if key != "store"]
        home = _HOMES.get(self.operation)
        if home is None:
            home = "store" if place is None else f"mstore.Store.open({place})"
        return f"{home}.{self.operation}({', '.join(given)})"


class Option(msgspec.Struct, frozen=True):
    """A parameter of the operation that failed, by its Python name, and a value if there is one.

    A tuple is a list, a mapping gives values by name (`parameters={"density": 0.2}`), and False
    turns off what is on unless a caller says otherwise (`analyze=False`).
    """

    name: str
    value: object = None

    def __str__(self) -> str:
        return self.name if self.value is None else f"{self.name}={_python(self.value)}"


class Spelling(Protocol):
    """How a face writes the parts of a phrase."""

    def call(self, call: Call) -> str:
        """Return the text that runs the operation."""

    def option(self, option: Option) -> str:
        """Return the text that gives the option."""


class Phrase(str):
    """A template (as of `str.format`, with named parts only) and its parts.

    A part is a Call, an Option, another Phrase, or a value that reads the same in every face. As a
    string it has the words of Python, so that reports hold text that a caller can search and join;
    joining loses the parts.
    """

    template: str
    parts: Mapping[str, object]
    __slots__ = ("parts", "template")

    def __new__(cls, template: str, parts: Mapping[str, object] | None = None) -> Self:
        given = dict(parts or {})
        made = super().__new__(cls, _filled(template, given, str))
        made.template, made.parts = template, given
        return made

    def spelled(self, spelling: Spelling) -> str:
        """Return the text in the words of a face."""

        def spell(part: object) -> object:
            if isinstance(part, Call):
                return spelling.call(part)
            if isinstance(part, Option):
                return spelling.option(part)
            return part.spelled(spelling) if isinstance(part, Phrase) else part

        return _filled(self.template, self.parts, spell)

    def __reduce__(self) -> tuple[object, ...]:
        return (Phrase, (self.template, self.parts))


def _filled(template: str, parts: Mapping[str, object], spell: Callable[[object], object]) -> str:
    if not parts:
        return template
    return template.format_map({key: spell(part) for key, part in parts.items()})


Text = str | Call | Option | Phrase
"""What a message may be made of: plain text reads the same in every face."""


def call(operation: str, *arguments: str, **options: object) -> Call:
    """Return the operation with its arguments: options that are None or False are left out.

    So a switch that is on by default cannot be turned off here; an `Option` says so (`analyze`).
    """
    given = tuple((k, v) for k, v in options.items() if v is not None and v is not False)
    return Call(operation, arguments, given)


def phrase(template: str, **parts: object) -> Phrase:
    """Return the template with its parts."""
    return Phrase(template, parts)


def as_phrase(text: Text) -> Phrase:
    """Return the text as a phrase, which every face can spell."""
    if isinstance(text, Phrase):
        return text
    return Phrase(text) if isinstance(text, str) else Phrase("{it}", {"it": text})


def to_json(text: Text) -> object:
    """Return the text as JSON types, to cross from one process to another; see `from_json`."""
    if isinstance(text, Call):
        options = [[key, _told(value)] for key, value in text.options]
        return {"call": text.operation, "arguments": list(text.arguments), "options": options}
    if isinstance(text, Option):
        return {"option": text.name, "value": _told(text.value)}
    if isinstance(text, Phrase):
        return {
            "template": text.template,
            "parts": {key: _told(part) for key, part in text.parts.items()},
        }
    return text


def from_json(value: object) -> Text:
    """Return the text that `to_json` returned this for.  Raises ValueError for anything else."""
    found = _heard(value)
    if isinstance(found, str | Call | Option | Phrase):
        return found
    raise ValueError(f"not a text: {value!r}")


def _told(value: object) -> object:
    """Return a part or value as JSON types; other types become the text that every face prints."""
    if isinstance(value, Call | Option | Phrase):
        return to_json(value)
    if isinstance(value, Mapping):
        return {"values": {str(key): _told(one) for key, one in value.items()}}
    if isinstance(value, tuple | list):
        return [_told(one) for one in value]
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _heard(value: object) -> object:
    """Return a part or value from its JSON types."""
    match value:
        case {"call": str(operation), "arguments": [*arguments], "options": [*options]}:
            given = tuple((str(key), _heard(one)) for key, one in options)
            return Call(operation, tuple(map(str, arguments)), given)
        case {"option": str(name), "value": given}:
            return Option(name, _heard(given))
        case {"template": str(template), "parts": {**parts}}:
            return Phrase(template, {str(key): _heard(part) for key, part in parts.items()})
        case {"values": {**values}}:
            return {str(key): _heard(one) for key, one in values.items()}
        case list():
            return tuple(map(_heard, value))
        case dict():
            raise ValueError(f"not a part of a text: {value!r}")
    return value


def joined(*texts: Text | None, between: str = "\n") -> Phrase | None:
    """Return the texts that there are, one after the other; None if there is none."""
    present = [as_phrase(text) for text in texts if text is not None]
    if not present:
        return None
    names = [f"part{number}" for number in range(len(present))]
    template = between.join(f"{{{name}}}" for name in names)
    return Phrase(template, dict(zip(names, present, strict=True)))


_HOMES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("init", "methods", "migrate", "reindex", "vouch"), "mstore.Store"),
    **dict.fromkeys(("mount", "mounts", "unmount"), "mstore_fuse.mounts"),
}
"""Where Python finds operations that are no methods of an open store."""
_OF_PLACES: Final = ("init", "migrate", "mount", "reindex", "vouch")
"""Operations whose first argument in Python is the directory of a store."""
_PLACEHOLDERS: Final = frozenset(
    {"...", "BACKUP", "BASE", "DIR", "DIRECTORY", "NAME", "OTHER", "PATH", "PATTERN", "PLACE"}
    | {"PLAN", "REF", "STORE", "TEXT", "URL", "WEIGHT"}
)
"""What the reader fills in; `...` stands for other arguments, which the reader knows."""


def _python(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_python(one) for one in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_python(key)}: {_python(one)}' for key, one in value.items())}}}"
    if isinstance(value, str) and value in _PLACEHOLDERS:
        return value
    return repr(value)


def few(names: Sequence[str], most: int = 3) -> str:
    """Name the first of several, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def is_text(given: object) -> bool:
    """Return whether it is text that UTF-8 can spell: bytes of another encoding are not."""
    try:
        return isinstance(given, str) and bool(given.isascii() or given.encode())
    except UnicodeEncodeError:
        return False
