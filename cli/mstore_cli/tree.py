"""The whole command line: the program's own options and help, and its commands by name."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from mstore_cli import completion, errors
from mstore_cli.command import (
    CONTEXT,
    WRONG_USAGE,
    Command,
    Line,
    find,
    global_options,
    no_such_option,
    refuse_ambiguous,
)
from mstore_cli.errors import Ended, UsageError, with_store
from mstore_cli.session import Choices, Session
from mstore_cli.verbs import FIRST_WORDS, GROUPS, OTHER_WORDS, VERBS, second_words

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


def parse(words: Sequence[str]) -> Line | None:
    """Parse a command line; None if it asked for help or the version, which are printed.

    Raises UsageError for what is wrong, and Ended for help that nobody asked for.
    """
    root: click.Context | None = None
    try:
        root = build().make_context(PROGRAM, list(words))
        with root:
            line = root.command.invoke(root)
    except click.exceptions.Exit as end:
        if end.exit_code != errors.SUCCESS:
            raise Ended(end.exit_code) from end
        return None
    except click.UsageError as error:
        # Only some errors know their command.
        hint = f"{error.ctx.command_path if error.ctx else PROGRAM} --help"
        raise _for_store(UsageError(error.format_message(), hint=hint), root) from error
    except UsageError as error:
        raise _for_store(error, root) from None
    assert isinstance(line, Line)
    return line


def _for_store(error: UsageError, root: click.Context | None) -> UsageError:
    """Let commands in the hint act on the store that the line names."""
    if error.hint is not None and root is not None and root.obj is not None:
        error.hint = with_store(error.hint, root.obj.store)
    return error


def build() -> Program:
    """Build the program, whose commands are imported when used."""
    return Program(
        PROGRAM,
        callback=_top,
        params=[
            click.Option(["--version", "-V"], is_flag=True, help="Print the version."),
            *global_options(),
            *completion.options(),
        ],
        help="git for model checkpoints, with merging built in.",
        invoke_without_command=True,
        subcommand_metavar="COMMAND [ARGS]...",
        context_settings=dict(CONTEXT),
        epilog=EPILOG,
    )


@click.pass_context
def _top(context: click.Context, /, version: bool, **given: Any) -> None:
    context.obj = Choices(**given)
    if version:
        # Before the command, which it makes superfluous, is parsed.
        from mstore_cli.commands.version import show

        show(Session(context.obj))
        context.exit()
    if context.invoked_subcommand is None:
        if context.obj != Choices():
            raise UsageError("no command was given")
        sys.stderr.write(f"{context.get_help()}\n")
        context.exit(errors.USAGE)


class Program(click.Group):
    """The program: imports one command, and suggests one for words of other programs."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        refuse_ambiguous(self, ctx, given)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise no_such_option(self, ctx, error.option_name, given) from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(FIRST_WORDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> Command | None:
        return find(cmd_name) if cmd_name in VERBS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name == "help":
            if ctx.resilient_parsing:
                return None, None, []
            if len(args) == 1:
                click.echo(ctx.get_help())
                ctx.exit()
            named = [word for word in args[1:] if not word.startswith("-")] or args[1:2]
            if len(named) > 1 + bool(second_words(named[0])):
                raise UsageError(
                    f"help describes one command, not {len(named)}: {' '.join(named)}",
                    hint=f"{PROGRAM} help {named[0]}",
                )
            return self.resolve_command(ctx, [*named, "--help"])
        if name not in FIRST_WORDS and not name.startswith("-") and not ctx.resilient_parsing:
            from mstore.terms.errors import did_you_mean

            hint = did_you_mean(name, FIRST_WORDS, f"{PROGRAM} --help")
            raise UsageError(f"no such command: {name!r}", hint=OTHER_WORDS.get(name) or str(hint))
        if len(args) > 1 and not args[1].startswith("-") and second_words(name):
            return self._of_two_words(ctx, name, args[1], args[2:])
        if name in FIRST_WORDS and name not in VERBS and not ctx.resilient_parsing:
            hints = [f"{PROGRAM} {name} {word} --help" for word in second_words(name)]
            raise UsageError(f"{name!r} is followed by another word", hint="\n".join(hints))
        return super().resolve_command(ctx, args)

    def _of_two_words(
        self, ctx: click.Context, first: str, second: str, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = f"{first} {second}"
        if name in VERBS:
            return name, find(name), args
        if ctx.resilient_parsing:
            return None, None, []
        from mstore.terms.errors import did_you_mean

        hint = did_you_mean(second, second_words(first), f"{PROGRAM} {first} --help")
        raise UsageError(f"no such command: {name!r}", hint=OTHER_WORDS.get(name) or str(hint))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        longest = max(map(len, VERBS))
        for title, verbs in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(f"{verb:<{longest}}", find(verb).short_help or "") for verb in verbs]
                )
