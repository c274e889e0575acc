"""From a Python function to a command: global options, help text, session.

With `command`, a command function declares only its own parameters.  The global options are added
to its signature, so that they work after the verb as well as before it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from mstore_cli.errors import UsageError, notes
from mstore_cli.session import STORE_VARIABLE, Choices, Session
from mstore_cli.values import convert_plain
from mstore_cli.verbs import OTHER_WORDS

StoreOption = Annotated[
    Path | None,
    typer.Option(
        "--store",
        metavar="DIR",
        show_default=False,
        help=f"The store [else ${STORE_VARIABLE}, the nearest .mstore upward, the user's own].",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
QuietOption = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Print only ids or names, one per line; warnings stay."),
]
NoProgressOption = Annotated[bool, typer.Option("--no-progress", help="Never show a progress bar.")]


def _global_options(
    store: StoreOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    no_progress: NoProgressOption = False,
) -> None:
    """Declares the options of every command; only the signature is used."""


_GLOBALS = tuple(
    parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
    for parameter in inspect.signature(_global_options, eval_str=True).parameters.values()
)
GLOBAL_NAMES = tuple(parameter.name for parameter in _GLOBALS)


class Verb(NamedTuple):
    """A command ready for typer: its function with the global options, and help for mistakes.

    bare: the value of an option given without one. foreign: file name endings of other programs
    that people may pass, and the message for each; foreign_hint: what to type instead. mistaken:
    options that do not exist, and what to type instead.
    """

    name: str
    summary: str
    run: Callable[..., None]
    epilog: str
    bare: Mapping[str, str]
    foreign: Mapping[str, str]
    foreign_hint: str
    mistaken: Mapping[str, str]


class VerbGroup(TyperGroup):
    """The program: suggests a command for words that other programs have as commands."""

    # The types of contexts and options are private to typer.
    def get_help_option(self, ctx: Any) -> Any:
        return _plain(super().get_help_option(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except typer.TyperException as error:
            if args[:1] and args[0] in OTHER_WORDS:
                raise UsageError(
                    f"no such command: {args[0]!r}", hint=OTHER_WORDS[args[0]]
                ) from error
            raise


class VerbCommand(TyperCommand):
    """A command whose help lists the global options under their own heading."""

    bare: Mapping[str, str] = MappingProxyType({})
    foreign: Mapping[str, str] = MappingProxyType({})
    foreign_hint: str = ""
    mistaken: Mapping[str, str] = MappingProxyType({})

    # The types of contexts, options and formatters are private to typer.
    def get_help_option(self, ctx: Any) -> Any:
        return _plain(super().get_help_option(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # The parser empties the list.
        words = list(args)
        end = args.index("--") if "--" in args else len(args)
        given = [f"{arg}={self.bare[arg]}" if arg in self.bare else arg for arg in args[:end]]
        try:
            return super().parse_args(ctx, [*given, *args[end:]])
        except typer.TyperException as error:
            # The file of an option is where it should be.
            loose = [] if "--recipe" in words else words
            told = next(
                (what for end, what in self.foreign.items() if any(w.endswith(end) for w in loose)),
                None,
            )
            if told is not None:
                raise UsageError(told, hint=self.foreign_hint) from error
            name: Any = getattr(error, "option_name", None)
            if name in self.mistaken:
                raise UsageError(f"no such option: {name}", hint=self.mistaken[name]) from error
            # Without it, the hint would be the help of the whole program.
            if getattr(error, "ctx", ctx) is None:
                error.__dict__["ctx"] = ctx
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [p for p in self.get_params(ctx) if p.param_type_name == "argument"]
        return ["[OPTIONS]", *(_usage(parameter) for parameter in arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if parameter.name in GLOBAL_NAMES:
                title = "Global options"
            elif parameter.param_type_name == "argument":
                title = "Arguments"
            else:
                title = "Options"
            record = parameter.get_help_record(ctx)
            if record is not None:
                if parameter.param_type_name == "argument":
                    record = (_usage(parameter), record[1])
                sections.setdefault(title, []).append(record)
        for title in ("Arguments", "Options", "Global options"):
            if title in sections:
                with formatter.section(title):
                    formatter.write_dl(sections[title])


def _plain(option: Any) -> Any:
    """Return the option of typer's own that every command line has, converted without pydantic."""
    convert_plain([] if option is None else [option], {})
    return option


def _usage(argument: Any) -> str:
    """Return an argument as usage lines have it: `REF`, `[REF]`, `REF...` or `[REF]...`."""
    name = argument.metavar or str(argument.name).upper()
    if " " in name:
        # Arguments that are told apart by their number, written as one.
        return str(name)
    return f"{name if argument.required else f'[{name}]'}{'' if argument.nargs == 1 else '...'}"


def command(
    *,
    example: str,
    failure: str = "an error",
    decodes: bool = False,
    bare: Mapping[str, str] = MappingProxyType({}),
    foreign: Mapping[str, str] = MappingProxyType({}),
    foreign_hint: str = "",
    mistaken: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[Callable[..., None]], Verb]:
    """Make a Verb from a function `(session, its own parameters) -> None`.

    The function's name, with dashes, is the verb, its docstring the help.  `example` is a realistic
    command line; `failure` says when the exit status is 1. decodes: whether it mostly reads blocks,
    one after the other (`mstore.heap`). bare: options whose value follows an
    equals sign or is left out, and the value if left out. foreign, foreign_hint, mistaken: as in
    `Verb`.
    """

    def decorate(function: Callable[..., None]) -> Verb:
        signature = inspect.signature(function, eval_str=True)
        _session, *own = signature.parameters.values()
        context = inspect.Parameter(
            "context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context
        )
        parameters = [
            context,
            *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own),
            *_GLOBALS,
        ]

        def entry(**given: Any) -> None:
            context = given.pop("context")
            inner = Choices(**{name: given.pop(name) for name in GLOBAL_NAMES})
            choices = inner.over(context.find_object(Choices) or Choices())
            # Error reporting knows only the outermost context.
            context.find_root().obj = choices
            session = Session(choices)
            if decodes:
                from mstore import heap

                heap.keep_freed()
            try:
                function(session, **given)
            finally:
                notes(map(session.typed, session.notes()))

        entry.__name__ = function.__name__
        entry.__doc__ = function.__doc__
        entry.__annotations__ = {p.name: p.annotation for p in parameters}
        # typer reads the signature; inspect lets a wrapper override it by this attribute.
        entry.__dict__["__signature__"] = inspect.Signature(parameters)
        summary = (function.__doc__ or "").partition("\n")[0]
        told = _epilog(example, failure)
        return Verb(
            name=function.__name__.replace("_", "-"),
            summary=summary,
            run=entry,
            epilog=told,
            bare=bare,
            foreign=foreign,
            foreign_hint=foreign_hint,
            mistaken=mistaken,
        )

    return decorate


def _epilog(example: str, failure: str) -> str:
    # "\b" keeps the formatter from joining the lines of a paragraph.
    return (
        f"\b\nExample:\n  {example}\n\n"
        f"\b\nExit status:\n  0  success\n  1  {failure}\n  2  wrong usage of the command line"
    )
