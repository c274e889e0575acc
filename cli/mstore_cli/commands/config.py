"""`mstore config`: look at a store's settings, and change them."""

from __future__ import annotations

from typing import Annotated

from mstore_cli.command import command
from mstore_cli.declared import Argument
from mstore_cli.output import Screen
from mstore_cli.session import Session


@command(
    example="mstore config codec dense",
    failure="no such setting or value, or another error; nothing was changed",
)
def config(
    session: Session,
    key: Annotated[
        str | None,
        Argument(
            metavar="KEY",
            help="codec, reflog_days or shared [default: show all].",
            show_default=False,
            completes="settings",
        ),
    ] = None,
    value: Annotated[
        str | None,
        Argument(
            metavar="VALUE",
            help="The new value.",
            show_default=False,
            completes="setting_values",
        ),
    ] = None,
) -> None:
    """Show the store's settings, or change one.

    codec: how new blocks are stored. auto compresses where that saves much, dense wherever it saves
    anything, raw never. Stored blocks stay as they are.

    reflog_days: for how many days the reflog keeps what a ref pointed at.

    shared: who may use the files of the store besides its owner. umask: as the umask says. group:
    the store's group reads and writes. all: everybody else reads too. Existing files get the added
    permissions at once; permissions are never taken away.
    """
    with session.open() as store:
        if key is not None and value is not None:
            store.configure(key, value)
            session.settled()
        settings = dict(store.config)
    if key is not None and key not in settings:
        from mstore.errors import BadRequest

        known = ", ".join(settings)
        raise BadRequest(f"no such setting: {key!r}; there are {known}", hint="mstore config")

    def human(screen: Screen) -> None:
        screen.fields([(key, settings[key])] if key is not None else settings.items())

    session.output.emit(settings, ids=[str(settings[key])] if key is not None else [], human=human)
