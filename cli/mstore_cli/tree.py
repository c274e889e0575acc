"""The whole command line as typer's command tree: help, completion, and lines that are not plain.

Made from what commands declare (`mstore_cli.declared`), each command when it is looked up.
Importing typer takes longer than most commands, so that `mstore_cli.main` imports this module only
for lines that `mstore_cli.lines` leaves to it.
"""

from __future__ import annotations

import inspect
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from mstore_cli import completion, errors
from mstore_cli.command import GLOBALS, VERSION, WRONG_USAGE, Verb, choices_of, find
from mstore_cli.declared import GROUPS as OPTION_GROUPS
from mstore_cli.declared import OPTIONS, Parameter
from mstore_cli.errors import Ended, UsageError
from mstore_cli.lines import Line, require_values, with_bare
from mstore_cli.session import Choices
from mstore_cli.values import what_is_wrong
from mstore_cli.verbs import GROUPS, OTHER_WORDS, VERBS

PROGRAM = "mstore"
EPILOG = (
    "\b\nExamples:\n"
    "  mstore init\n"
    "  mstore add llama --name llama\n"
    "  mstore add code --name code\n"
    "  mstore merge --base llama --expert code --method linear --name merged\n"
    "  mstore mount merged mnt\n\n"
    "Global options stand before or after the command. A snapshot is named by branch, tag, id or "
    "the beginning of an id (4 digits or more), REF~N (N steps to the first parent) or REF@{N} "
    "(N moves ago). mstore help COMMAND prints what mstore COMMAND --help does.\n\n"
    f"\b\nExit status:\n  0  success\n  1  an error\n  {WRONG_USAGE}\n"
    "  130  interrupted"
)
CONTEXT = {"help_option_names": ["--help", "-h"], "max_content_width": 100}
_NO_BREAK = "\u2011"
"""A hyphen at which no line ends."""
_GLOBAL_NAMES = frozenset(one.name for one in GLOBALS)


def parse(words: Sequence[str]) -> Line | None:
    """Parse a command line, whatever its form; None if it asked for help, which is printed.

    Raises UsageError for what is wrong, and Ended for help that nobody asked for.
    """
    try:
        # The class of contexts is private to typer.
        context: Any
        with build().make_context(PROGRAM, list(words)) as context:
            line = context.command.invoke(context)
    except typer.Exit as end:
        if end.exit_code != errors.SUCCESS:
            raise Ended(end.exit_code) from end
        return None
    except typer.TyperException as error:
        # Only some errors know their command.
        of_error = getattr(error, "ctx", None)
        hint = None if of_error is None else f"{of_error.command_path} --help"
        raise UsageError(error.format_message(), hint=hint) from error
    assert isinstance(line, Line)
    return line


def build() -> TyperGroup:
    """Build the command tree, whose commands are built when used."""
    app = typer.Typer(
        name=PROGRAM,
        cls=_Group,
        add_completion=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        invoke_without_command=True,
        context_settings=CONTEXT,
        epilog=EPILOG,
    )
    app.callback()(_entry(_top, (VERSION, *GLOBALS)))
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    _spare_pydantic(group.params)
    # Declared mutable; nothing changes it.
    commands: Any = _Commands()
    group.commands = commands
    return group


def _top(context: Any, version: bool, **given: Any) -> None:
    """git for model checkpoints, with merging built in."""
    context.obj = choices_of(given)
    if version:
        # Before the command, which it makes superfluous, is parsed.
        find(VERSION.name).run(context.obj)
        raise typer.Exit(errors.SUCCESS)
    if context.invoked_subcommand is None:
        if context.obj != Choices():
            raise UsageError("no command was given")
        sys.stderr.write(f"{context.get_help()}\n")
        raise typer.Exit(errors.USAGE)


class _Commands(Mapping[str, TyperCommand]):
    """All commands by name, each imported and built when it is looked up: a run needs one."""

    def __init__(self) -> None:
        self._built: dict[str, TyperCommand] = {}

    def __getitem__(self, name: str) -> TyperCommand:
        if name not in self._built:
            if name not in VERBS:
                raise KeyError(name)
            self._built[name] = _build_command(find(name))
        return self._built[name]

    def __iter__(self) -> Iterator[str]:
        return iter(VERBS)

    def __len__(self) -> int:
        return len(VERBS)


def _check_values(parameters: Iterable[Any], verb: Verb) -> None:
    """Refuse values that are empty paths or no numbers, in plain words.

    typer takes an empty path for the working directory, and describes wrong numbers in the words of
    pydantic.
    """
    declared = {one.name: one for one in (*verb.parameters, *GLOBALS)}

    def process(whole: Any, parameter: Any, context: Any, value: object) -> object:
        for word in value if isinstance(value, list | tuple) else [value]:
            wrong = what_is_wrong(declared[parameter.name], word) if isinstance(word, str) else None
            if wrong is not None:
                raise UsageError(wrong, hint=f"{context.command_path} --help")
        return whole(context, value)

    for parameter in parameters:
        if parameter.name in declared:
            _process_by(parameter, process)


def _build_command(verb: Verb) -> TyperCommand:
    def line(context: Any, **given: Any) -> Line:
        inner = choices_of({name: given.pop(name) for name in _GLOBAL_NAMES})
        return Line(verb, inner.over(context.find_object(Choices) or Choices()), given)

    line.__doc__ = verb.text
    # typer makes a plain command of a program that has only one.
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(
        verb.name,
        cls=type("Command", (_Command,), {"verb": verb}),
        short_help=verb.summary,
        epilog=verb.epilog,
        context_settings=dict(CONTEXT),
    )(_entry(line, (*verb.parameters, *GLOBALS)))
    command = typer.main.get_command(app)
    assert isinstance(command, TyperCommand)
    _check_values(command.params, verb)
    return command


def _entry(function: Callable[..., Any], parameters: Sequence[Parameter]) -> Callable[..., Any]:
    """Give a function the signature that typer reads: a context, and parameters by name."""
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    declared = [context, *map(_for_typer, parameters)]
    function.__annotations__ = {one.name: one.annotation for one in declared}
    # inspect lets a function override its signature by this attribute.
    function.__dict__["__signature__"] = inspect.Signature(declared)
    return function


_COMPLETED: Mapping[str, Callable[..., list[str]]] = MappingProxyType(
    {
        "refs": completion.refs,
        "ever": completion.ever,
        "mounted": completion.mounted,
        "methods": completion.methods,
        "combinations": completion.combinations,
        "scores": completion.scores,
        "codecs": completion.codecs,
        "settings": completion.settings,
        "setting_values": completion.setting_values,
    }
)


def _for_typer(parameter: Parameter) -> inspect.Parameter:
    """Return the declaration of a parameter in typer's own words."""
    shown = parameter.shown
    about: dict[str, Any] = {
        "metavar": shown.metavar,
        "help": shown.help,
        "show_default": shown.show_default,
        "min": shown.least,
        "parser": shown.parser,
        "autocompletion": None if shown.completes is None else _COMPLETED[shown.completes],
    }
    made: Any = typer.Option if parameter.is_option else typer.Argument
    return inspect.Parameter(
        parameter.name,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[parameter.annotation, made(*shown.names, **about)],
        default=parameter.default,
    )


def _spare_pydantic(parameters: Iterable[Any]) -> None:
    """Let help and most messages come without pydantic, whose import takes longer than they do.

    typer converts every value with it, even defaults and those of switches.
    """

    def process(whole: Any, parameter: Any, context: Any, value: object) -> object:
        if value is not parameter.default and not isinstance(value, bool):
            return whole(context, value)
        return (
            value if parameter.callback is None else parameter.callback(context, parameter, value)
        )

    for parameter in parameters:
        if "process_value" not in vars(parameter):
            _process_by(parameter, process)


def _process_by(parameter: Any, process: Callable[..., object]) -> None:
    """Let `process` handle values: it gets what handled them so far, and the parameter, first."""
    # The class is private to typer; its method is the one that click documents.
    parameter.process_value = partial(process, parameter.process_value, parameter)


# The types of contexts, options and formatters are private to typer.
class _Group(TyperGroup):
    """The program: suggests a command for words that other programs have as commands."""

    def get_help(self, ctx: Any) -> str:
        return _help_of(self, ctx)

    def get_help_option(self, ctx: Any) -> Any:
        return _plain(super().get_help_option(ctx))

    def make_parser(self, ctx: Any) -> Any:
        return _once(super().make_parser(ctx), ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        require_values((VERSION, *GLOBALS), args, f"{PROGRAM} --help")
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        longest = max(map(len, VERBS))
        for title, verbs in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{verb:<{longest}}", find(verb).summary) for verb in verbs])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except typer.TyperException as error:
            if not args or args[0].startswith("-"):
                raise
            hint = OTHER_WORDS.get(args[0]) or _meant(args[0], VERBS, f"{PROGRAM} --help")
            raise UsageError(f"no such command: {args[0]!r}", hint=hint) from error


class _Command(TyperCommand):
    """A command whose help lists the global options under their own heading."""

    verb: Verb

    def get_help(self, ctx: Any) -> str:
        return _help_of(self, ctx)

    def get_help_option(self, ctx: Any) -> Any:
        return _plain(super().get_help_option(ctx))

    def make_parser(self, ctx: Any) -> Any:
        return _once(super().make_parser(ctx), ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = with_bare(self.verb, args)
        require_values((*self.verb.parameters, *GLOBALS), given, f"{ctx.command_path} --help")
        try:
            return super().parse_args(ctx, given)
        except typer.TyperException as error:
            # The file of an option is where it should be.
            loose = [] if "--recipe" in args else args
            foreign = self.verb.foreign.items()
            told = next(
                (what for end, what in foreign if any(w.endswith(end) for w in loose)), None
            )
            if told is not None:
                raise UsageError(told, hint=self.verb.foreign_hint) from error
            name: Any = getattr(error, "option_name", None)
            if isinstance(name, str) and re.fullmatch("-[0-9].*", name):
                counts = [one for one in self.verb.parameters if "-n" in one.shown.names]
                if any(one.kind is int for one in counts):
                    words = [re.sub("^-([0-9]+)$", r"-n \1", shlex.quote(one)) for one in args]
                    raise UsageError(
                        f"no such option: {name}", hint=f"{ctx.command_path} {' '.join(words)}"
                    ) from error
                raise UsageError(
                    f"no such option: {name}; values that begin with - come after --",
                    hint=f"{ctx.command_path} -- {' '.join(map(shlex.quote, args))}",
                ) from error
            if name is not None and str(error).startswith("No such option"):
                known = [one for parameter in self.get_params(ctx) for one in parameter.opts]
                hint = self.verb.mistaken.get(name) or _meant(
                    name, known, f"{ctx.command_path} --help", prefix="--"
                )
                raise UsageError(f"no such option: {name}", hint=hint) from error
            instead = self._hint_of_misplaced(ctx, with_bare(self.verb, args))
            if instead is not None:
                raise UsageError("unexpected arguments", hint=instead) from error
            # Without it, the hint would be the help of the whole program.
            if getattr(error, "ctx", ctx) is None:
                error.__dict__["ctx"] = ctx
            raise

    def _hint_of_misplaced(self, ctx: Any, words: list[str]) -> str | None:
        """Return what to type instead of arguments beyond those that the command takes."""
        if self.verb.misplaced is None:
            return None
        try:
            values, loose, _ = self.make_parser(ctx).parse_args(args=words)
        except typer.TyperException:
            return None
        return self.verb.misplaced(values, loose) if loose else None

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [p for p in self.get_params(ctx) if p.param_type_name == "argument"]
        return ["[OPTIONS]", *(_usage(parameter) for parameter in arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups = {one.name: one.shown.group for one in self.verb.parameters}
        sections: dict[str, list[tuple[str, str]]] = {
            title: [] for title in ("Arguments", *OPTION_GROUPS, "Global options")
        }
        for parameter in self.get_params(ctx):
            if parameter.name == "json" and not self.verb.has_json:
                continue
            if parameter.name in _GLOBAL_NAMES:
                title = "Global options"
            elif parameter.param_type_name == "argument":
                title = "Arguments"
            else:
                title = groups.get(parameter.name, OPTIONS)
            record = parameter.get_help_record(ctx)
            if record is not None:
                if parameter.param_type_name == "argument":
                    record = (_usage(parameter), record[1])
                sections[title].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _once(parser: Any, ctx: Any) -> Any:
    """Let a parser refuse an option of one value that is given twice: it would take the last."""
    whole = parser.parse_args

    def parse_args(args: list[str]) -> Any:
        parsed = whole(args=args)
        seen = set()
        for one in () if ctx.resilient_parsing else parsed[2]:
            if one.param_type_name != "option" or one.multiple or one.is_flag or one.count:
                continue
            if one.name in seen:
                name = max(one.opts, key=len)
                raise UsageError(f"{name} is given twice", hint=f"{ctx.command_path} --help")
            seen.add(one.name)
        return parsed

    parser.parse_args = parse_args
    return parser


def _help_of(command: Any, ctx: Any) -> str:
    """Return a help text whose lines end between words, and not after the hyphens in them."""
    formatter = ctx.make_formatter()
    text, rows = formatter.write_text, formatter.write_dl

    def whole(words: str) -> str:
        return re.sub(r"(?<=\w)-(?=\w)", _NO_BREAK, words)

    formatter.write_text = lambda words: text(whole(words))
    formatter.write_dl = lambda pairs: rows([(name, whole(words)) for name, words in pairs])
    command.format_help(ctx, formatter)
    return str(formatter.getvalue()).replace(_NO_BREAK, "-").rstrip("\n")


def _meant(given: str, known: Iterable[str], otherwise: str, prefix: str = "") -> str:
    """Return the name that was probably meant, as a question, and what to type to see all."""
    from mstore.terms.errors import did_you_mean

    return str(did_you_mean(given, known, otherwise, prefix=prefix))


def _plain(option: Any) -> Any:
    _spare_pydantic([] if option is None else [option])
    return option


def _usage(argument: Any) -> str:
    """Return an argument as usage lines have it: `REF`, `[REF]`, `REF...` or `[REF]...`."""
    name = argument.metavar or str(argument.name).upper()
    if " " in name:
        # Arguments that are told apart by their number, written as one.
        return str(name)
    return f"{name if argument.required else f'[{name}]'}{'' if argument.nargs == 1 else '...'}"
