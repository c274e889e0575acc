"""A well-formed command line, parsed by what its command declares, without typer.

Importing typer and building its objects takes as long as a short command.  Owns the common forms of
a line.  Everything else is left to `mstore_cli.tree`: help, rare forms (`-qn5`) and all that is
wrong, so that there is one place for messages.  For every line that is parsed here, both give the
same values; a test compares them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from mstore_cli.command import GLOBALS, VERSION, Verb, choices_of, find
from mstore_cli.declared import REQUIRED, Parameter
from mstore_cli.errors import UsageError
from mstore_cli.session import Choices
from mstore_cli.values import NotPlain, convert
from mstore_cli.verbs import VERBS


class Line(NamedTuple):
    """A command, its global options, and a value for each of its own parameters."""

    verb: Verb
    choices: Choices
    values: dict[str, Any]

    def run(self) -> None:
        """Run the command."""
        self.verb.run(self.choices, **self.values)


def parse(words: Sequence[str]) -> Line | None:
    """Parse a command line; None for what only typer parses or refuses."""
    place = _place_of_verb(words)
    try:
        if place is None:
            return _version(words)
        if words[place] not in VERBS:
            return None
        verb = find(words[place])
        outer, _ = _given(GLOBALS, words[:place])
        inner, loose = _given((*verb.parameters, *GLOBALS), with_bare(verb, words[place + 1 :]))
        inner.update(_places(verb.parameters, loose))
        choices = choices_of(_completed(GLOBALS, inner))
        values = _completed(verb.parameters, inner)
        return Line(verb, choices.over(choices_of(_completed(GLOBALS, outer))), values)
    except NotPlain:
        return None


def without_help_word(words: Sequence[str]) -> Sequence[str]:
    """Return `mstore merge --help` for `mstore help merge`; other lines as they are."""
    place = _place_of_verb(words)
    if place is None or words[place] != "help":
        return words
    return [*words[:place], *words[place + 1 : place + 2], "--help"]


def with_bare(verb: Verb, words: Sequence[str]) -> list[str]:
    """Give options that may go without a value the value that this means."""
    end = _end_of_options(words)
    given = [f"{word}={verb.bare[word]}" if word in verb.bare else word for word in words[:end]]
    return [*given, *words[end:]]


def require_values(parameters: Iterable[Parameter], words: Sequence[str], hint: str) -> None:
    """Raise UsageError, with a hint, for an option whose value is missing.

    Parsers take any word for the value, even the option that follows; a value that looks so is
    written `--name=--value`.  And `--store=$UNSET` would be the working directory.
    """
    options = _by_name(parameters)
    end = _end_of_options(words)
    for word, following in zip_longest(words[:end], words[1:end]):
        name, value = (word, following) if word in options else _split(word)
        if name not in options or options[name][0].kind is bool:
            continue
        if (name == word and value in options) or (value == "" and options[name][0].kind is Path):
            raise UsageError(f"option {name!r} requires an argument", hint=hint)


def _end_of_options(words: Sequence[str]) -> int:
    return words.index("--") if "--" in words else len(words)


def _version(words: Sequence[str]) -> Line:
    """Parse a line without a command.  Raises NotPlain, unless it asks for the version."""
    given, loose = _given((*GLOBALS, VERSION), words)
    if loose or VERSION.name not in given:
        raise NotPlain
    return Line(find(VERSION.name), choices_of(_completed(GLOBALS, given)), {})


def store_before_verb(words: Sequence[str]) -> Path | None:
    """Return the store that a line names before its command, also if the rest is wrong."""
    try:
        store: Path | None = _given(GLOBALS, words[: _place_of_verb(words)])[0].get("store")
    except NotPlain:
        return None
    return store


def _place_of_verb(words: Sequence[str]) -> int | None:
    """Return where the command is: the first word that is neither a global option nor its value."""
    takes_value = {name for one in GLOBALS if one.kind is not bool for name in one.shown.names}
    place = 0
    while place < len(words) and words[place].startswith("-"):
        place += 2 if words[place] in takes_value else 1
    return place if place < len(words) and not {"-", "--"} & {*words[:place]} else None


def _given(
    parameters: Iterable[Parameter], words: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the options that are given, and the other words.

    Raises NotPlain, also for an option of one value that is given twice.
    """
    options = _by_name(parameters)
    given: dict[str, Any] = {}
    loose: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--":
            loose += rest
        elif not word.startswith("-") or word == "-":
            loose.append(word)
        else:
            name, value = _split(word)
            if name not in options:
                raise NotPlain
            one, truth = options[name]
            if one.kind is bool:
                if value is not None:
                    # A value, or more options in one word.
                    raise NotPlain
                given[one.name] = truth
                continue
            if value is None:
                value = next(rest, None)
                if value is None or value in options:
                    raise NotPlain
            if one.name in given and not one.several:
                raise NotPlain
            if one.several:
                given.setdefault(one.name, []).append(convert(one, value))
            else:
                given[one.name] = convert(one, value)
    return given, loose


def _by_name(parameters: Iterable[Parameter]) -> dict[str, tuple[Parameter, bool]]:
    """Return the option of each name, and for a switch, what the name means."""
    return {
        name: (one, not number)
        for one in parameters
        for names in one.shown.names
        for number, name in enumerate(names.split("/"))
    }


def _split(word: str) -> tuple[str, str | None]:
    """Return the name of an option, and the value in the same word: `--name=VALUE`, `-nVALUE`."""
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        return name, value if equals else None
    return word[:2], word[2:] or None


def _places(parameters: Iterable[Parameter], words: list[str]) -> dict[str, Any]:
    """Return the values of arguments, in the order of their declaration.  Raises NotPlain."""
    arguments = [one for one in parameters if not one.is_option]
    given: dict[str, Any] = {}
    for number, one in enumerate(arguments):
        behind = len(arguments) - number - 1
        taken = words[: max(0, len(words) - behind)] if one.several else words[:1]
        words = words[len(taken) :]
        if taken:
            values = [convert(one, word) for word in taken]
            given[one.name] = values if one.several else values[0]
    if words:
        raise NotPlain
    return given


def _completed(parameters: Iterable[Parameter], given: dict[str, Any]) -> dict[str, Any]:
    """Return a value for each parameter: the default of one not given.  Raises NotPlain."""
    values = {one.name: given.get(one.name, one.default) for one in parameters}
    if any(value is REQUIRED for value in values.values()):
        raise NotPlain
    return values
