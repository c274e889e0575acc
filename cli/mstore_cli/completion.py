"""Shell completion: refs, methods, settings.  Silent whatever goes wrong.

Also the options that print and install what a shell needs for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mstore_cli.session import Choices, Session

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from mstore import Store

VARIABLE = "_MSTORE_COMPLETE"
"""Set by the shell's script when it requests completions, and to request the script."""
_LINES = {
    "bash": (".bashrc", f'eval "$({VARIABLE}=bash_source mstore)"'),
    "zsh": (".zshrc", f'autoload -Uz compinit && compinit; eval "$({VARIABLE}=zsh_source mstore)"'),
    "fish": (".config/fish/completions/mstore.fish", f"{VARIABLE}=fish_source mstore | source"),
}
"""For each shell, a file of the user's home that it reads, and the line for it."""


def options() -> list[click.Parameter]:
    """Return the options of the program that install and show completion."""
    return [
        click.Option(
            [f"--{name}-completion"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=callback,
            help=f"{help} (bash, zsh or fish).",
        )
        for name, callback, help in (
            ("install", _install, "Complete words of mstore in new shells like this one"),
            ("show", _show, "Print what completes them, for this shell"),
        )
    ]


def _install(context: click.Context, _of: click.Parameter, is_given: bool) -> None:
    if not is_given or context.resilient_parsing:
        return
    name, line = _LINES[_shell()]
    path = Path.home() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8", errors="surrogateescape") as file:
        file.seek(0)
        if line not in file.read():
            file.write(f"\n{line}\n")
    click.echo(f"new shells read this line of {path}:\n{line}")
    context.exit()


def _show(context: click.Context, _of: click.Parameter, is_given: bool) -> None:
    if not is_given or context.resilient_parsing:
        return
    from click.shell_completion import get_completion_class

    kind = get_completion_class(_shell())
    assert kind is not None
    click.echo(kind(context.command, {}, "mstore", VARIABLE).source())
    context.exit()


def _shell() -> str:
    """Return the shell that started the program, else the one in which the user logs in."""
    parent = Path(f"/proc/{os.getppid()}/comm")
    names = [parent.read_text().strip()] if parent.exists() else []
    names.append(os.path.basename(os.environ.get("SHELL", "")))
    found = next((name for name in names if name in _LINES), None)
    if found is None:
        raise click.UsageError("words are completed in bash, zsh and fish, not in this shell")
    return found


def files(_context: click.Context, _of: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Leave it to the shell: it knows its files."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def refs(context: click.Context, _of: click.Parameter, incomplete: str) -> list[str]:
    """Return matching refs of the store of this command line; REF=WEIGHT is left as it is.

    Remote refs come as REMOTE/NAME, and candidates only if the word begins like one.
    """
    from mstore.store.refs import DIRECTORIES, is_candidate

    begun = incomplete.startswith(tuple(DIRECTORIES.values()))
    return _of_store(
        context,
        incomplete,
        lambda store: (
            name if begun else name.removeprefix("remotes/")
            for name in store.ref_ids()
            if begun or not is_candidate(name)
        ),
    )


def named(context: click.Context, _of: click.Parameter, incomplete: str) -> list[str]:
    """Return matching branches and tags of the store of this command line."""
    return _of_store(context, incomplete, lambda store: (ref.name for ref in store.refs()))


def remotes(context: click.Context, _of: click.Parameter, incomplete: str) -> list[str]:
    """Return matching names of remotes."""
    return _of_store(context, incomplete, lambda store: (one.name for one in store.remotes()))


def refs_of_remote(context: click.Context, _of: click.Parameter, incomplete: str) -> list[str]:
    """Return matching refs that the remote of this command line had when it was last asked."""
    # click knows no argument yet where the value of an option is completed.
    remote = context.params.get("name")
    begin = "remotes/" if remote is None else f"remotes/{remote}/"

    def names(store: Store) -> Iterable[str]:
        from mstore.store.refs import branch_of

        found = (branch_of(name) for name in store.ref_ids() if name.startswith(begin))
        return dict.fromkeys(found)

    return _of_store(context, incomplete, names)


def ever(context: click.Context, _of: click.Parameter, incomplete: str) -> list[str]:
    """Return matching refs of the store of this command line, and removed ones."""
    return _of_store(
        context, incomplete, lambda store: dict.fromkeys(one.name for one in store.reflog())
    )


def mounted(
    context: click.Context, of: click.Parameter, incomplete: str
) -> list[str] | list[CompletionItem]:
    """Return matching refs for the first word, and files for the directory after it."""
    return (files if context.params.get("target") else refs)(context, of, incomplete)


def methods(_context: click.Context, _of: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of merge methods."""
    from mstore.merge.methods import registry

    return _beginning(incomplete, registry.names())


def combinations(_context: click.Context, _of: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of methods that combine adapters."""
    from mstore.merge.combination.methods import METHODS

    return _beginning(incomplete, METHODS)


def scores(_context: click.Context, _of: click.Parameter, incomplete: str) -> list[str]:
    """Return the ways to rank blocks."""
    from mstore.store.objects.plan import SCORES

    return _beginning(incomplete, SCORES)


def codecs(_context: click.Context, _of: click.Parameter, incomplete: str) -> list[str]:
    """Return the ways to store new blocks."""
    from mstore.blocks.codecs import Policy

    return _beginning(incomplete, Policy)


def settings(context: click.Context, _of: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of the user's settings with --user, else of a store's."""
    if context.params.get("user"):
        from mstore_cli.user_config import KEYS as OF_USER

        return _beginning(incomplete, OF_USER)
    from mstore.store.config import KEYS

    return _beginning(incomplete, KEYS)


def setting_values(context: click.Context, _of: click.Parameter, incomplete: str) -> list[str]:
    """Return the values of the setting that the line names."""
    from mstore.store.config import WORDS

    return _beginning(incomplete, WORDS.get(context.params.get("key", ""), ()))


def _of_store(
    context: click.Context, incomplete: str, names: Callable[[Store], Iterable[str]]
) -> list[str]:
    try:
        given = [context.params.get("store"), context.find_root().params.get("store")]
        named = next((store for store in given if store is not None), None)
        with Session(Choices(store=named)).open_silently() as store:
            return _beginning(incomplete, names(store))
    except Exception:  # noqa: BLE001 -- there is nobody to tell: the line is still being typed
        return []


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
