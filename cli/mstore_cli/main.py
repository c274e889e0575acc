"""The program `mstore`: assembles the commands, runs one, exits with its status.

Starting it imports neither the library nor numpy, numba or torch, nor the modules of other
commands: each command imports what it needs when it runs.
"""

from __future__ import annotations

import atexit
import gc
import inspect
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from mstore_cli import completion, errors
from mstore_cli.command import (
    JsonOption,
    NoProgressOption,
    QuietOption,
    StoreOption,
    Verb,
    VerbCommand,
    VerbGroup,
)
from mstore_cli.output import Output
from mstore_cli.session import Choices, Session
from mstore_cli.values import convert_plain
from mstore_cli.verbs import VERBS

PROGRAM = "mstore"
EPILOG = (
    "Global options stand before or after the command. A snapshot is named by branch, tag, id or "
    "the beginning of an id (4 digits or more), REF~N (N steps to the first parent) or REF@{N} "
    "(N moves ago). mstore help COMMAND prints what mstore COMMAND --help does.\n\n"
    "\b\nExit status:\n  0  success\n  1  an error\n  2  wrong usage of the command line\n"
    "  130  interrupted"
)
CONTEXT = {"help_option_names": ["--help", "-h"], "max_content_width": 100}


def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    store: StoreOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    no_progress: NoProgressOption = False,
) -> None:
    """git for model checkpoints, with merging built in."""
    context.obj = Choices(store=store, json=json, quiet=quiet, no_progress=no_progress)
    if version:
        _print_version(Session(context.obj).output)
        raise typer.Exit(errors.SUCCESS)
    if context.invoked_subcommand is None:
        sys.stderr.write(f"{context.get_help()}\n")
        raise typer.Exit(errors.USAGE)


def _print_version(output: Output) -> None:
    from mstore.version import __version__

    output.emit(
        {"version": __version__},
        ids=[__version__],
        human=lambda screen: screen.line(f"{PROGRAM} {__version__}"),
    )


class _Commands(Mapping[str, TyperCommand]):
    """All commands by name, each imported and built when it is looked up: a run needs one."""

    def __init__(self) -> None:
        self._built: dict[str, TyperCommand] = {}

    def __getitem__(self, name: str) -> TyperCommand:
        if name not in self._built:
            if name not in VERBS:
                raise KeyError(name)
            self._built[name] = _build_command(name)
        return self._built[name]

    def __iter__(self) -> Iterator[str]:
        return iter(VERBS)

    def __len__(self) -> int:
        return len(VERBS)


def _build_command(name: str) -> TyperCommand:
    own = name.replace("-", "_")
    verb: Verb = getattr(import_module(f"mstore_cli.commands.{own}"), own)
    # typer makes a plain command of a program that has only one.
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(
        verb.name,
        cls=type(
            "VerbCommand",
            (VerbCommand,),
            {
                "bare": verb.bare,
                "foreign": verb.foreign,
                "foreign_hint": verb.foreign_hint,
                "mistaken": verb.mistaken,
            },
        ),
        short_help=verb.summary,
        epilog=verb.epilog,
        context_settings=dict(CONTEXT),
    )(verb.run)
    command = typer.main.get_command(app)
    assert isinstance(command, TyperCommand)
    convert_plain(command.params, inspect.signature(verb.run).parameters)
    return command


def build() -> TyperGroup:
    """Build the whole command line as one command tree, whose commands are built when used."""
    app = typer.Typer(
        name=PROGRAM,
        cls=VerbGroup,
        add_completion=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        invoke_without_command=True,
        context_settings=CONTEXT,
        epilog=EPILOG,
    )
    app.callback()(_top)
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    convert_plain(group.params, inspect.signature(_top, eval_str=True).parameters)
    # Declared mutable; nothing changes it.
    commands: Any = _Commands()
    group.commands = commands
    return group


def run(arguments: Sequence[str]) -> int:
    """Run one command line; return its exit status.  All errors are handled here.

    Once a command has published its result, Ctrl-C is ignored (`Session.settled`).
    """
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    # The class of contexts is private to typer.
    context: Any = None
    try:
        try:
            with build().make_context(PROGRAM, list(arguments)) as context:
                context.command.invoke(context)
        except typer.Exit as end:
            sys.stdout.flush()
            return end.exit_code
        sys.stdout.flush()
        return errors.SUCCESS
    except BaseException as error:  # noqa: BLE001 -- this is the boundary: report() knows them all
        choices = context.obj if context else None
        store = choices.store if isinstance(choices, Choices) else None
        # Errors in the command line itself occur before its options are parsed.
        document = sys.stdout if "--json" in arguments else None
        status = errors.report(error, store=store, document=document)
        _discard_output()
        return status


def _discard_output() -> None:
    """Discard the remaining buffer of standard output.

    The interpreter flushes it on exit, and would fail again on a closed pipe or a full disk.
    """
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """The entry point of the installed program."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            # A name that the locale cannot encode must not turn a success into a failure.
            reconfigure(errors="backslashreplace")
    # Importing numpy starts threads for large matrices, which do not occur here; they busy-wait,
    # which costs 0.04 s of CPU time.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if completion.is_asked():
        # Exits the process.
        build()(prog_name=PROGRAM)
    status = run(sys.argv[1:])
    _end(status)


def _end(status: int) -> NoReturn:
    """End the process.  Everything is closed, and standard output is flushed.

    Taking the interpreter apart module by module takes 8 ms after a merge, and frees memory that
    the process gives back anyway.
    """
    if threading.active_count() > 1:
        # Python waits for threads, as it should.
        gc.freeze()
        sys.exit(status)
    # What modules registered for the end still runs, as in a child of `multiprocessing`.
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
