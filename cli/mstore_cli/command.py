"""From a Python function to a command: its parameters, the global options, help texts, session.

With `command`, a command function declares only its own parameters.  The global options stand
before the verb or after it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, get_type_hints

from mstore_cli.declared import Option, Parameter, parameters_of
from mstore_cli.errors import remarks
from mstore_cli.session import STORE_VARIABLE, Choices, Session


def _global_options(
    store: Annotated[
        Path | None,
        Option(
            "--store",
            metavar="DIR",
            show_default=False,
            help=f"The store [else ${STORE_VARIABLE}, the nearest .mstore upward, the user's own].",
        ),
    ] = None,
    json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
    quiet: Annotated[
        bool,
        Option("--quiet", "-q", help="Print only ids or names, one per line; warnings stay."),
    ] = False,
    no_progress: Annotated[
        bool, Option("--no-progress", help="Never show a progress bar.")
    ] = False,
) -> None:
    """Declares the options of every command; only the signature is used."""


def _declared(function: Callable[..., None]) -> list[inspect.Parameter]:
    return list(inspect.signature(function, eval_str=True).parameters.values())


def _is_group(one: inspect.Parameter) -> bool:
    return dataclasses.is_dataclass(one.annotation)


def _unfolded(group: Any) -> Iterator[inspect.Parameter]:
    """Yield the declarations of a group of options: the fields of a dataclass."""
    hints = get_type_hints(group, include_extras=True)
    for one in dataclasses.fields(group):
        if one.init:
            kind = inspect.Parameter.KEYWORD_ONLY
            yield inspect.Parameter(one.name, kind, default=one.default, annotation=hints[one.name])


def _version_option(
    version: Annotated[bool, Option("--version", "-V", help="Print the version.")] = False,
) -> None:
    """Declares the option that runs a command of its own; only the signature is used."""


GLOBALS = parameters_of(_declared(_global_options))
(VERSION,) = parameters_of(_declared(_version_option))


def choices_of(values: Mapping[str, Any]) -> Choices:
    """Return the global options of some values by name."""
    return Choices(**{one.name: values[one.name] for one in GLOBALS})


class Verb(NamedTuple):
    """A command: its own parameters, what runs it with a value for each, and its help.

    summary, text: the first line of its help, and all of it. bare: the value of an option given
    without one. foreign: file name endings of other programs that people may pass, and the message
    for each; foreign_hint: what to type instead. mistaken: options that do not exist, and what to
    type instead. misplaced: of the values
    of a line, and arguments beyond those that the command takes: what to type instead, if known.
    has_json: whether it has a JSON form.
    """

    name: str
    summary: str
    text: str
    parameters: tuple[Parameter, ...]
    run: Callable[..., None]
    epilog: str
    bare: Mapping[str, str]
    foreign: Mapping[str, str]
    foreign_hint: str
    mistaken: Mapping[str, str]
    misplaced: Callable[[Mapping[str, Any], list[str]], str | None] | None
    has_json: bool


def find(name: str) -> Verb:
    """Import the command of this name."""
    own = name.replace("-", "_")
    verb = getattr(import_module(f"mstore_cli.commands.{own}"), own)
    assert isinstance(verb, Verb)
    return verb


def command(
    *,
    example: str,
    failure: str = "an error",
    decodes: bool = False,
    bare: Mapping[str, str] = MappingProxyType({}),
    foreign: Mapping[str, str] = MappingProxyType({}),
    foreign_hint: str = "",
    mistaken: Mapping[str, str] = MappingProxyType({}),
    misplaced: Callable[[Mapping[str, Any], list[str]], str | None] | None = None,
    has_json: bool = True,
) -> Callable[[Callable[..., None]], Verb]:
    """Make a Verb from a function `(session, its own parameters) -> None`.

    A parameter whose type is a dataclass stands for its fields: options that commands share.
    The function's name, with dashes, is the verb, its docstring the help.  `example` is a realistic
    command line; `failure` says when the exit status is 1. decodes: whether it mostly reads blocks,
    one after the other (`mstore.terms.heap`). bare: options whose value follows an
    equals sign or is left out, and the value if left out. foreign, foreign_hint, mistaken,
    misplaced, has_json: as in `Verb`.
    """

    def decorate(function: Callable[..., None]) -> Verb:
        _session, *declared = _declared(function)
        groups = {one.name: one.annotation for one in declared if _is_group(one)}
        parts = [list(_unfolded(one.annotation)) if _is_group(one) else [one] for one in declared]
        own = [one for part in parts for one in part]

        def run(choices: Choices, **given: Any) -> None:
            session = Session(choices)
            if decodes:
                from mstore.terms import heap

                heap.keep_freed()
            for name, group in groups.items():
                fields = [one.name for one in _unfolded(group)]
                given[name] = group(**{field: given.pop(field) for field in fields})
            try:
                function(session, **given)
            finally:
                remarks(map(session.typed, session.remarks()))

        text = inspect.getdoc(function) or ""
        return Verb(
            name=function.__name__.replace("_", "-"),
            summary=text.partition("\n")[0],
            text=text,
            parameters=parameters_of(own),
            run=run,
            epilog=_epilog(example, failure),
            bare=bare,
            foreign=foreign,
            foreign_hint=foreign_hint,
            mistaken=mistaken,
            misplaced=misplaced,
            has_json=has_json,
        )

    return decorate


WRONG_USAGE = "2  wrong usage of the command line, or a value or request that is wrong"


def _epilog(example: str, failure: str) -> str:
    # "\b" keeps the formatter from joining the lines of a paragraph.
    return (
        f"\b\nExample:\n  {example}\n\n"
        f"\b\nExit status:\n  0  success\n  1  {failure}\n  {WRONG_USAGE}"
    )
