"""From a Python function to a command of click: its parameters, the global options, help, session.

With `command`, a command function declares only its own parameters.  The global options stand
before the command or after it.
"""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import click

from mstore_cli import completion
from mstore_cli.errors import UsageError, remarks
from mstore_cli.options import GROUPS, OPTIONS, Argument, Option, parameter_of, parse_path
from mstore_cli.session import STORE_VARIABLE, Choices, Session
from mstore_cli.verbs import second_words

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

WRONG_USAGE = "2  wrong usage of the command line, or a value or request that is wrong"
CONTEXT = MappingProxyType(
    {"help_option_names": ["--help", "-h"], "max_content_width": 100, "show_default": True}
)
ARGUMENTS, COMMANDS, GLOBAL_OPTIONS = "Arguments", "Commands", "Global options"
_NO_BREAK = "\u2011"
"""A hyphen at which no line ends."""


def global_options(*, has_json: bool = True) -> list[click.Parameter]:
    """Return the options of every command, by the names of `Choices`."""
    where = f"The store [else ${STORE_VARIABLE}, the nearest .mstore upward, the user's own]."
    few = "Print only ids or names, one per line; warnings stay."
    switch = partial(click.Option, is_flag=True)
    return [
        click.Option(
            ["--store"],
            metavar="DIR",
            type=parse_path,
            shell_complete=completion.files,
            help=where,
        ),
        switch(["--json"], help="Print one JSON object.", hidden=not has_json),
        switch(["--quiet", "-q"], help=few),
        switch(["--no-progress"], help="Never show a progress bar."),
    ]


class Line(NamedTuple):
    """A command line that was parsed: its global options, and what runs the command."""

    choices: Choices
    run: Callable[[], None]


class Mistakes(NamedTuple):
    """Command lines that people type by mistake, and what to type instead.

    options: options that do not exist. files: file name endings of other programs, and the message
    for each; files_hint: what to type instead. In these hints, FILE and VALUE stand for what was
    typed, REF for the first expert. arguments: called with the values of a line and the arguments
    beyond those that the command takes. missing: called with the values of a line that lacks a
    required option; returns what else it lacks.
    """

    options: Mapping[str, str] = MappingProxyType({})
    files: Mapping[str, str] = MappingProxyType({})
    files_hint: str = ""
    arguments: Callable[[Mapping[str, Any], list[str]], str | None] | None = None
    missing: Callable[[Mapping[str, Any]], list[str]] | None = None


_NO_MISTAKES = Mistakes()


def _as_typed(hint: str, value: str | None, args: list[str]) -> str:
    """Return a hint with the words of the line in place of FILE, VALUE and REF, as far as typed."""
    expert = _value_of("--expert", args)
    ref = expert and expert.partition("=")[0]
    for placeholder, word in (("FILE", value), ("VALUE", value), ("REF", ref)):
        if word:
            hint = shlex.quote(word).join(re.split(rf"\b{placeholder}\b", hint))
    return hint


def _value_of(option: str, args: list[str]) -> str | None:
    """Return the first value that a line gives an option, also one that does not exist."""
    for word, following in pairwise((*args, "")):
        if word.startswith(f"{option}="):
            return word.removeprefix(f"{option}=")
        if word == option and not following.startswith("-"):
            return following
    return None


def no_such_option(
    command: click.Command,
    ctx: click.Context,
    name: str,
    args: list[str],
    meant: Mapping[str, str] = MappingProxyType({}),
) -> UsageError:
    """Return the error of an option that a command has not, with what is likely meant."""
    message = f"no such option: {name}"
    if re.fullmatch("-[0-9].*", name):
        if any("-n" in one.opts and not _is_flag(one) for one in command.params):
            words = [re.sub("^-([0-9]+)$", r"-n \1", shlex.quote(word)) for word in args]
            return UsageError(message, hint=f"{ctx.command_path} {' '.join(words)}")
        return UsageError(
            f"{message}; values that begin with - come after --",
            hint=f"{ctx.command_path} -- {shlex.join(args)}",
        )
    from mstore.terms.errors import did_you_mean

    options = [one for parameter in command.get_params(ctx) for one in parameter.opts]
    otherwise = f"{ctx.command_path} --help"
    if name in meant:
        return UsageError(message, hint=_as_typed(meant[name], _value_of(name, args), args))
    return UsageError(message, hint=str(did_you_mean(name, options, otherwise, prefix="--")))


class Command(click.Command):
    """A command whose help lists options by what they are for, and that knows common mistakes.

    declared: its own parameters by name.
    """

    mistakes = _NO_MISTAKES
    declared: Mapping[str | None, Option | Argument] = MappingProxyType({})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        refuse_ambiguous(self, ctx, given)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            self._raise_mistake(ctx, given, error)
            # Without it, the hint would be the help of the whole program.
            error.ctx = error.ctx or ctx
            raise

    def _raise_mistake(self, ctx: click.Context, args: list[str], error: click.UsageError) -> None:
        """Raise UsageError, with what to type instead, if the mistake is a common one."""
        # The file of an option is where it should be.
        words = [] if "--recipe" in args else args
        for ending, message in self.mistakes.files.items():
            file = next((word for word in words if word.endswith(ending)), None)
            if file is not None:
                hint = _as_typed(self.mistakes.files_hint, file, args)
                raise UsageError(message, hint=hint) from error
        if isinstance(error, click.NoSuchOption):
            meant = self.mistakes.options
            raise no_such_option(self, ctx, error.option_name, args, meant) from error
        instead = self._arguments_meant(ctx, args)
        if instead is not None:
            raise UsageError("unexpected arguments", hint=instead) from error
        if isinstance(error, click.MissingParameter):
            raise self._missing(ctx, args) from error

    def _missing(self, ctx: click.Context, args: list[str]) -> UsageError:
        """Return the error that names everything that the line lacks."""
        values, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        # What was not typed is a value of click's own, which differs by its version.
        typed = {
            name: value for name, value in values.items() if isinstance(value, str | list | tuple)
        }
        names = [
            _usage(one) if isinstance(one, click.Argument) else max(one.opts, key=len)
            for one in self.params
            if one.required and not typed.get(str(one.name))
        ]
        if self.mistakes.missing is not None:
            names += self.mistakes.missing(typed)
        return UsageError(f"missing: {', '.join(names)}", hint=f"{ctx.command_path} --help")

    def _arguments_meant(self, ctx: click.Context, args: list[str]) -> str | None:
        """Return what to type instead of arguments beyond those that the command takes."""
        if self.mistakes.arguments is None:
            return None
        try:
            values, loose, _ = self.make_parser(ctx).parse_args(args=list(args))
        except click.UsageError:
            return None
        return self.mistakes.arguments(values, loose) if loose else None

    def get_help(self, ctx: click.Context) -> str:
        return super().get_help(ctx).replace(_NO_BREAK, "-")

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [
            "[OPTIONS]",
            *(_usage(one) for one in self.params if isinstance(one, click.Argument)),
        ]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {
            title: [] for title in (ARGUMENTS, COMMANDS, *GROUPS, GLOBAL_OPTIONS)
        }
        for one in self.get_params(ctx):
            declared = self.declared.get(one.name)
            record = one.get_help_record(ctx)
            if isinstance(declared, Argument):
                sections[ARGUMENTS].append((_usage(one), unbroken(declared.help)))
            elif record is not None:
                shared = GLOBAL_OPTIONS if one.name in Choices._fields else OPTIONS
                title = declared.group if declared else shared
                sections[title].append((record[0], unbroken(record[1])))
        first = ctx.info_name or ""
        sections[COMMANDS] = [
            (word, find(f"{first} {word}").short_help or "") for word in second_words(first)
        ]
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        second = [word for word in second_words(ctx.info_name or "") if word.startswith(incomplete)]
        return [*map(CompletionItem, second), *super().shell_complete(ctx, incomplete)]


def refuse_ambiguous(command: click.Command, ctx: click.Context, args: list[str]) -> None:
    """Refuse what click takes without a word: a wrong value, or the last of two.

    Of an option without its value it takes the next option for the value.  A value that looks so
    is written `--name=--value`.
    """
    known = [one for one in command.get_params(ctx) if isinstance(one, click.Option)]
    options = {name: one for one in known for name in (*one.opts, *one.secondary_opts)}
    end = args.index("--") if "--" in args else len(args)
    for word, following in pairwise(args[:end]):
        if word in options and not options[word].is_flag and following in options:
            raise click.BadOptionUsage(word, f"Option {word!r} requires an argument.", ctx)
    try:
        _, _, order = command.make_parser(ctx).parse_args(args=list(args))
    except click.UsageError:
        # It is raised again when values are taken.
        return
    for one in known:
        if order.count(one) > 1 and not (one.multiple or one.is_flag or ctx.resilient_parsing):
            raise UsageError(
                f"{max(one.opts, key=len)} is given twice", hint=f"{ctx.command_path} --help"
            )


def _is_flag(parameter: click.Parameter) -> bool:
    return isinstance(parameter, click.Option) and parameter.is_flag


def unbroken(text: str) -> str:
    """Let no line of a help text end at a hyphen inside a word; `get_help` puts hyphens back."""
    return re.sub(r"(?<=\w)-(?=\w)", _NO_BREAK, text)


def _usage(argument: click.Parameter) -> str:
    """Return an argument as usage lines have it: `REF`, `[REF]`, `REF...` or `[REF]...`."""
    name = str(argument.metavar)
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

    A parameter whose type is a class, not `Annotated`, stands for those of that class: options that
    commands share.
    The function's name, with dashes, is the command's, its docstring the help.  `example` is a
    realistic command line; `failure` says when the exit status is 1. decodes: whether it mostly
    reads blocks, one after the other (`mstore.terms.heap`).
    """

    def decorate(function: Callable[..., None]) -> Command:
        _session, *own = _declared(function)
        groups = {
            one.name: (one.annotation, _declared(one.annotation))
            for one in own
            if isinstance(one.annotation, type)
        }
        parameters = [
            each for one in own for each in (groups[one.name][1] if one.name in groups else [one])
        ]

        def run(choices: Choices, given: dict[str, Any]) -> None:
            session = Session(choices)
            if decodes:
                from mstore.terms import heap

                heap.keep_freed()
            for name, (group, fields) in groups.items():
                given[name] = group(**{field.name: given.pop(field.name) for field in fields})
            try:
                function(session, **given)
            finally:
                remarks(map(session.typed, session.remarks()))

        @click.pass_context
        def parsed(context: click.Context, /, **given: Any) -> Line:
            root = context.find_root()
            root.obj = Choices(**{name: given.pop(name) for name in Choices._fields}).over(root.obj)
            return Line(root.obj, partial(run, root.obj, given))

        text = inspect.getdoc(function) or ""
        made = Command(
            function.__name__.replace("_", "-"),
            callback=parsed,
            params=[*map(parameter_of, parameters), *global_options(has_json=has_json)],
            help=unbroken(text),
            short_help=text.partition("\n")[0],
            epilog=_epilog(example, failure),
            context_settings=dict(CONTEXT),
        )
        made.mistakes = mistakes
        made.declared = {one.name: get_args(one.annotation)[1] for one in parameters}
        return made

    return decorate


def find(name: str) -> Command:
    """Import the command of this name."""
    own = re.sub("[- ]", "_", name)
    found = getattr(import_module(f"mstore_cli.commands.{own}"), own)
    assert isinstance(found, Command)
    return found


def _declared(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function, eval_str=True).parameters.values())


def _epilog(example: str, failure: str) -> str:
    # "\b" keeps the formatter from joining the lines of a paragraph.
    return (
        f"\b\nExample:\n  {example}\n\n"
        f"\b\nExit status:\n  0  success\n  1  {failure}\n  {WRONG_USAGE}"
    )
