"""From a Python function to a command of typer: its parameters, the global options, help, session.

With `command`, a command function declares only its own parameters.  The global options stand
before the command or after it.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from functools import partial
from importlib import import_module
from itertools import chain, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import typer
from typer.core import TyperCommand
from typer.models import OptionInfo

from mstore_cli.errors import UsageError, remarks
from mstore_cli.options import GROUPS, OPTIONS, parse_number, parse_path, parse_text
from mstore_cli.session import STORE_VARIABLE, Choices, Session

WRONG_USAGE = "2  wrong usage of the command line, or a value or request that is wrong"
CONTEXT = MappingProxyType({"help_option_names": ["--help", "-h"], "max_content_width": 100})
_NO_BREAK = "\u2011"
"""A hyphen at which no line ends."""


def _global_options(
    store: Annotated[
        Path | None,
        typer.Option(
            "--store",
            metavar="DIR",
            help=f"The store [else ${STORE_VARIABLE}, the nearest .mstore upward, the user's own].",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", help="Print only ids or names, one per line; warnings stay."),
    ] = False,
    no_progress: Annotated[
        bool, typer.Option("--no-progress", help="Never show a progress bar.")
    ] = False,
) -> None:
    """Declares the options of every command; only the signature is used."""


class Line(NamedTuple):
    """A command line that was parsed: its global options, and what runs the command."""

    choices: Choices
    run: Callable[[], None]


class Mistakes(NamedTuple):
    """Command lines that people type by mistake, and what to type instead.

    options: options that do not exist. files: file name endings of other programs, and the message
    for each; files_hint: what to type instead. arguments: called with the values of a line and the
    arguments beyond those that the command takes.
    """

    options: Mapping[str, str] = MappingProxyType({})
    files: Mapping[str, str] = MappingProxyType({})
    files_hint: str = ""
    arguments: Callable[[Mapping[str, Any], list[str]], str | None] | None = None


_NO_MISTAKES = Mistakes()


# The types of contexts and formatters are private to typer.
class Command(TyperCommand):
    """A command whose help lists options by what they are for, and that knows common mistakes."""

    mistakes = _NO_MISTAKES

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        refuse_ambiguous(self, ctx, given)
        try:
            return super().parse_args(ctx, args)
        except typer.TyperException as error:
            self._raise_mistake(ctx, given, error)
            # Without it, the hint would be the help of the whole program.
            if getattr(error, "ctx", ctx) is None:
                error.__dict__["ctx"] = ctx
            raise

    def _raise_mistake(self, ctx: Any, args: list[str], error: typer.TyperException) -> None:
        """Raise UsageError, with what to type instead, if the mistake is a common one."""
        # The file of an option is where it should be.
        words = [] if "--recipe" in args else args
        for ending, message in self.mistakes.files.items():
            if any(word.endswith(ending) for word in words):
                raise UsageError(message, hint=self.mistakes.files_hint) from error
        name: Any = getattr(error, "option_name", None)
        if isinstance(name, str) and str(error).startswith("No such option"):
            raise self._no_such_option(ctx, name, args) from error
        instead = self._arguments_meant(ctx, args)
        if instead is not None:
            raise UsageError("unexpected arguments", hint=instead) from error

    def _no_such_option(self, ctx: Any, name: str, args: list[str]) -> UsageError:
        message = f"no such option: {name}"
        if re.fullmatch("-[0-9].*", name):
            if any("-n" in one.opts and not getattr(one, "is_flag", True) for one in self.params):
                words = [re.sub("^-([0-9]+)$", r"-n \1", shlex.quote(word)) for word in args]
                return UsageError(message, hint=f"{ctx.command_path} {' '.join(words)}")
            return UsageError(
                f"{message}; values that begin with - come after --",
                hint=f"{ctx.command_path} -- {shlex.join(args)}",
            )
        from mstore.terms.errors import did_you_mean

        options = [one for parameter in self.get_params(ctx) for one in parameter.opts]
        otherwise = f"{ctx.command_path} --help"
        meant = self.mistakes.options.get(name)
        return UsageError(
            message, hint=meant or str(did_you_mean(name, options, otherwise, prefix="--"))
        )

    def _arguments_meant(self, ctx: Any, args: list[str]) -> str | None:
        """Return what to type instead of arguments beyond those that the command takes."""
        if self.mistakes.arguments is None:
            return None
        try:
            values, loose, _ = self.make_parser(ctx).parse_args(args=list(args))
        except typer.TyperException:
            return None
        return self.mistakes.arguments(values, loose) if loose else None

    def get_help(self, ctx: Any) -> str:
        return super().get_help(ctx).replace(_NO_BREAK, "-")

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [one for one in self.get_params(ctx) if one.param_type_name == "argument"]
        return ["[OPTIONS]", *map(_usage, arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {
            title: [] for title in ("Arguments", *GROUPS, "Global options")
        }
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            name, text = record
            title = getattr(parameter, "rich_help_panel", None) or OPTIONS
            if parameter.param_type_name == "argument":
                title, name = "Arguments", _usage(parameter)
            elif parameter.name in Choices._fields:
                title = "Global options"
            sections[title].append((name, unbroken(text)))
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def refuse_ambiguous(command: Any, ctx: Any, args: list[str]) -> None:
    """Refuse what typer takes without a word: a wrong value, or the last of two.

    Of an option without its value it takes the next option for the value.  A value that looks so
    is written `--name=--value`.
    """
    hint = f"{ctx.command_path} --help"
    known = [one for one in command.get_params(ctx) if one.param_type_name == "option"]
    options = {name: one for one in known for name in (*one.opts, *one.secondary_opts)}
    end = args.index("--") if "--" in args else len(args)
    for word, following in pairwise(args[:end]):
        if word in options and not options[word].is_flag and following in options:
            raise UsageError(f"option {word!r} requires an argument", hint=hint)
    try:
        _, _, order = command.make_parser(ctx).parse_args(args=list(args))
    except typer.TyperException:
        # It is raised again when values are taken.
        return
    for one in known:
        if order.count(one) > 1 and not (one.multiple or one.is_flag or ctx.resilient_parsing):
            raise UsageError(f"{max(one.opts, key=len)} is given twice", hint=hint)


def unbroken(text: str) -> str:
    """Let no line of a help text end at a hyphen inside a word; `get_help` puts hyphens back."""
    return re.sub(r"(?<=\w)-(?=\w)", _NO_BREAK, text)


def _usage(argument: Any) -> str:
    """Return an argument as usage lines have it: `REF`, `[REF]`, `REF...` or `[REF]...`."""
    name = str(argument.metavar or argument.name.upper())
    if " " in name:
        # Arguments that are told apart by their number, written as one.
        return name
    return f"{name if argument.required else f'[{name}]'}{'' if argument.nargs == 1 else '...'}"


def command(
    *,
    example: str,
    failure: str = "an error",
    decodes: bool = False,
    mistakes: Mistakes = _NO_MISTAKES,
    has_json: bool = True,
) -> Callable[[Callable[..., None]], Command]:
    """Make a command from a function `(session, its own parameters) -> None`.

    A parameter whose type is a dataclass stands for its fields: options that commands share.
    The function's name, with dashes, is the command's, its docstring the help.  `example` is a
    realistic command line; `failure` says when the exit status is 1. decodes: whether it mostly
    reads blocks, one after the other (`mstore.terms.heap`).
    """

    def decorate(function: Callable[..., None]) -> Command:
        _session, *declared = _declared(function)
        groups = {one.name: one.annotation for one in declared if _is_group(one)}

        def run(choices: Choices, given: dict[str, Any]) -> None:
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

        def parsed(context: typer.Context, **given: Any) -> Line:
            root = context.find_root()
            root.obj = Choices(**{name: given.pop(name) for name in Choices._fields}).over(root.obj)
            return Line(root.obj, partial(run, root.obj, given))

        parts = [_unfolded(one.annotation) if _is_group(one) else [one] for one in declared]
        shared = GLOBALS
        if not has_json:
            shared = [_hidden(one) if one.name == "json" else one for one in GLOBALS]
        # typer makes a plain command of a program that has only one.
        app = typer.Typer(
            add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
        )
        text = inspect.getdoc(function) or ""
        app.command(
            function.__name__.replace("_", "-"),
            cls=Command,
            help=unbroken(text),
            short_help=text.partition("\n")[0],
            epilog=_epilog(example, failure),
            context_settings=dict(CONTEXT),
        )(with_parameters(parsed, [*chain(*parts), *shared]))
        made = typer.main.get_command(app)
        assert isinstance(made, Command)
        made.mistakes = mistakes
        return made

    return decorate


def find(name: str) -> Command:
    """Import the command of this name."""
    own = name.replace("-", "_")
    found = getattr(import_module(f"mstore_cli.commands.{own}"), own)
    assert isinstance(found, Command)
    return found


def with_parameters(
    function: Callable[..., Any], parameters: Iterable[inspect.Parameter]
) -> Callable[..., Any]:
    """Give a function the signature that typer reads: a context, and parameters by name."""
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    declared = [
        context,
        *(one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in map(_checked, parameters)),
    ]
    function.__annotations__ = {one.name: one.annotation for one in declared}
    # inspect lets a function override its signature by this attribute.
    function.__dict__["__signature__"] = inspect.Signature(declared)
    return function


def _checked(parameter: inspect.Parameter) -> inspect.Parameter:
    """Let values be refused in plain words, also empty paths, which typer takes for `.`."""
    kind, info = get_args(parameter.annotation)
    parser: Callable[[str], Any]
    if kind in (Path, Path | None, list[Path], list[Path] | None):
        parser = parse_path
    elif kind in (str, str | None, list[str], list[str] | None) and _is_text(info):
        parser = parse_text
    elif kind in (int, int | None, float, float | None):
        parser = parse_number(int if kind in (int, int | None) else float, info.min)
    else:
        return parameter
    if info.parser is not None:
        return parameter
    info = copy(info)
    info.parser = parser
    return parameter.replace(annotation=Annotated[kind, info])


def _is_text(info: Any) -> bool:
    """Return whether an option takes text, and not the name of a file, which may be any bytes."""
    return isinstance(info, OptionInfo) and "FILE" not in (info.metavar or "")


def _hidden(parameter: inspect.Parameter) -> inspect.Parameter:
    kind, info = get_args(parameter.annotation)
    info = copy(info)
    info.hidden = True
    return parameter.replace(annotation=Annotated[kind, info])


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


def _epilog(example: str, failure: str) -> str:
    # "\b" keeps the formatter from joining the lines of a paragraph.
    return (
        f"\b\nExample:\n  {example}\n\n"
        f"\b\nExit status:\n  0  success\n  1  {failure}\n  {WRONG_USAGE}"
    )


GLOBALS = _declared(_global_options)
