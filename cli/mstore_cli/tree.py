"""The whole command line: the program's own options and help, and its commands by name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from mstore_cli import errors
from mstore_cli.command import (
    CONTEXT,
    GLOBALS,
    WRONG_USAGE,
    Command,
    Line,
    find,
    refuse_ambiguous,
    with_parameters,
)
from mstore_cli.errors import Ended, UsageError, with_store
from mstore_cli.session import Choices, Session
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
_VERSION = inspect.Parameter(
    "version",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option("--version", "-V", help="Print the version.")],
)


def parse(words: Sequence[str]) -> Line | None:
    """Parse a command line; None if it asked for help or the version, which are printed.

    Raises UsageError for what is wrong, and Ended for help that nobody asked for.
    """
    # The class of contexts is private to typer.
    root: Any = None
    try:
        root = build().make_context(PROGRAM, list(words))
        with root:
            line = root.command.invoke(root)
    except typer.Exit as end:
        if end.exit_code != errors.SUCCESS:
            raise Ended(end.exit_code) from end
        return None
    except typer.TyperException as error:
        # Only some errors know their command.
        context = getattr(error, "ctx", None)
        hint = f"{PROGRAM if context is None else context.command_path} --help"
        message = error.format_message().replace(": Value error, ", ": ")
        raise _for_store(UsageError(message, hint=hint), root) from error
    except UsageError as error:
        raise _for_store(error, root) from None
    assert isinstance(line, Line)
    return line


def _for_store(error: UsageError, root: Any) -> UsageError:
    """Let commands in the hint act on the store that the line names."""
    if error.hint is not None and root is not None and root.obj is not None:
        error.hint = with_store(error.hint, root.obj.store)
    return error


def build() -> TyperGroup:
    """Build the program, whose commands are imported when used."""
    app = typer.Typer(
        name=PROGRAM,
        cls=Program,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        invoke_without_command=True,
        context_settings=dict(CONTEXT),
        epilog=EPILOG,
    )
    app.callback()(with_parameters(_top, [_VERSION, *GLOBALS]))
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return group


def _top(context: typer.Context, version: bool, **given: Any) -> None:
    """git for model checkpoints, with merging built in."""
    context.obj = Choices(**given)
    if version:
        # Before the command, which it makes superfluous, is parsed.
        from mstore_cli.commands.version import show

        show(Session(context.obj))
        raise typer.Exit(errors.SUCCESS)
    if context.invoked_subcommand is None:
        if context.obj != Choices():
            raise UsageError("no command was given")
        sys.stderr.write(f"{context.get_help()}\n")
        raise typer.Exit(errors.USAGE)


# The types of contexts and formatters are private to typer.
class Program(TyperGroup):
    """The program: imports one command, and suggests one for words of other programs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        refuse_ambiguous(self, ctx, args)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Command | None:
        return find(cmd_name) if cmd_name in VERBS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name == "help":
            if len(args) == 1:
                typer.echo(ctx.get_help())
                raise typer.Exit
            return self.resolve_command(ctx, [args[1], "--help"])
        if name not in VERBS and not name.startswith("-"):
            from mstore.terms.errors import did_you_mean

            hint = OTHER_WORDS.get(name) or str(did_you_mean(name, VERBS, f"{PROGRAM} --help"))
            raise UsageError(f"no such command: {name!r}", hint=hint)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        longest = max(map(len, VERBS))
        for title, verbs in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(f"{verb:<{longest}}", find(verb).short_help) for verb in verbs]
                )
