"""Shell completion: refs, methods.  Silent whatever goes wrong."""

from __future__ import annotations

from collections.abc import Iterable

import typer

from mstore_cli.session import Choices, Session


def refs(context: typer.Context, incomplete: str) -> list[str]:
    """Return matching refs of the store of this command line; REF=WEIGHT is left as it is."""
    try:
        given = [context.params.get("store"), context.find_root().params.get("store")]
        named = next((store for store in given if store is not None), None)
        with Session(Choices(store=named)).open_silently() as store:
            return _beginning(incomplete, (ref.name for ref in store.refs()))
    except Exception:  # noqa: BLE001 -- there is nobody to tell: the line is still being typed
        return []


def methods(incomplete: str) -> list[str]:
    """Return the names of merge methods."""
    from mstore.merge.methods import registry

    return _beginning(incomplete, registry.names())


def combinations(incomplete: str) -> list[str]:
    """Return the names of methods that combine adapters."""
    from mstore.combination.methods import METHODS

    return _beginning(incomplete, METHODS)


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
