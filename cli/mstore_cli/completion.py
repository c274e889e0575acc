"""Shell completion: refs, methods, settings.  Silent whatever goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import typer

from mstore_cli.session import Choices, Session

if TYPE_CHECKING:
    from mstore import Store


def refs(context: typer.Context, incomplete: str) -> list[str]:
    """Return matching refs of the store of this command line; REF=WEIGHT is left as it is."""
    return _of_store(context, incomplete, lambda store: (ref.name for ref in store.refs()))


def ever(context: typer.Context, incomplete: str) -> list[str]:
    """Return matching refs of the store of this command line, and removed ones."""
    return _of_store(
        context, incomplete, lambda store: dict.fromkeys(one.name for one in store.reflog())
    )


def mounted(context: typer.Context, incomplete: str) -> list[str]:
    """Return matching refs for the first word, and nothing for the directory after it."""
    return [] if context.params.get("target") else refs(context, incomplete)


def methods(incomplete: str) -> list[str]:
    """Return the names of merge methods."""
    from mstore.merge.methods import registry

    return _beginning(incomplete, registry.names())


def combinations(incomplete: str) -> list[str]:
    """Return the names of methods that combine adapters."""
    from mstore.merge.combination.methods import METHODS

    return _beginning(incomplete, METHODS)


def scores(incomplete: str) -> list[str]:
    """Return the ways to rank blocks."""
    from mstore.store.objects.plan import SCORES

    return _beginning(incomplete, SCORES)


def codecs(incomplete: str) -> list[str]:
    """Return the ways to store new blocks."""
    from mstore.blocks.codecs import Policy

    return _beginning(incomplete, Policy)


def settings(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of the user's settings with --user, else of a store's."""
    if context.params.get("user"):
        from mstore_cli.user_config import KEYS as OF_USER

        return _beginning(incomplete, OF_USER)
    from mstore.store.config import KEYS

    return _beginning(incomplete, KEYS)


def setting_values(context: typer.Context, incomplete: str) -> list[str]:
    """Return the values of the setting that the line names."""
    from mstore.store.config import WORDS

    return _beginning(incomplete, WORDS.get(context.params.get("key", ""), ()))


def _of_store(
    context: typer.Context, incomplete: str, names: Callable[[Store], Iterable[str]]
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
