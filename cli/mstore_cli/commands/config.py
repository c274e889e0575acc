"""`mstore config`: look at settings of a store or of the user, and change them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from mstore_cli import completion
from mstore_cli.command import command
from mstore_cli.errors import UsageError
from mstore_cli.options import Argument, Option
from mstore_cli.output import Screen
from mstore_cli.session import Session, author_and_why


@command(
    example="mstore config codec dense",
    failure="an error; nothing was changed",
)
def config(
    session: Session,
    key: Annotated[
        str | None,
        Argument(
            metavar="KEY",
            help="The setting [default: show all].",
            shell_complete=completion.settings,
        ),
    ] = None,
    values: Annotated[
        tuple[str, ...],
        Argument(
            metavar="VALUE",
            help="The new value; of a list, values to add.",
            may_be_empty=True,
            shell_complete=completion.setting_values,
        ),
    ] = (),
    user: Annotated[bool, Option("--user", help="Your own settings, whatever the store.")] = False,
    unset: Annotated[
        bool,
        Option("--unset", help="With --user: remove these values of KEY, without any all of them."),
    ] = False,
) -> None:
    """Show the settings of the store or the user, or change one.

    codec: how new blocks are stored. auto compresses where that saves much, dense wherever it saves
    anything, raw never. Stored blocks stay as they are.

    reflog_days: for how many days the reflog keeps what a ref pointed at.

    shared: who may use the files of the store besides its owner. umask: as the umask says. group:
    the store's group reads and writes. all: everybody else reads too. Existing files get the added
    permissions at once; permissions are never taken away.

    filesystem: a type of filesystem that the store may be on, though mstore does not know it as
    local. You vouch that locks and shared maps hold there for all who use the store. '' is none.

    require_signed: with true, fetch and pull move refs only to snapshots that a key you trust has
    signed, and mstore copy to this store likewise; see mstore sign and mstore verify.

    With --user, the settings are yours, in config.toml of your mstore configuration directory, and
    only the command line reads them. A change writes the file anew, without comments.

    safe_stores, with --user: stores of other users that your commands use where they find them,
    without being named.

    author, with --user: who makes your snapshots, as log and show tell it. The variable
    MSTORE_AUTHOR wins over it; without both it is user@host.

    cache_size, with --user: the most that each store keeps on its disk of what it reads at lazy
    remotes and computes of virtual merges, as 50GiB; 0 keeps nothing. It is a tenth of the disk
    unless it is set.

    signing_key, with --user: the private key that signs verdicts of your gates.

    Gates, [gates.NAME] in your config.toml, are changed with an editor, and kept as they are.

    endpoints, with --user: servers that get your credentials where the settings of a store name
    them as the endpoint of a remote. Those that AWS_ENDPOINT_URL and AWS_ENDPOINT_URL_S3 name get
    them, too. `mstore remote add --endpoint` adds to this list.
    """
    if unset and not (user and key):
        raise UsageError("--unset needs --user and KEY", hint="mstore config --user --unset KEY")
    if key is not None:
        _require_known(key, user=user)
    settings = _of_user(key, values, unset=unset) if user else _of_store(session, key, values)
    shown = settings if key is None else {key: settings[key]}

    def human(screen: Screen) -> None:
        told = {name: _text(value) for name, value in shown.items()}
        if "author" in shown:
            told["author"] = author_and_why()
        if not shown.get("cache_size", True):
            told["cache_size"] = "a tenth of the store's disk"
        screen.fields([*told.items()])

    ids = [] if key is None else _listed(settings[key])
    session.output.emit(settings, ids=ids, human=human)


def _of_store(session: Session, key: str | None, values: Sequence[str]) -> Mapping[str, object]:
    if len(values) > 1:
        raise UsageError(f"{key} takes one value", hint="mstore config --help")
    if key == "filesystem" and values:
        from mstore import Store

        # The store may be one that cannot be opened before.
        session.report_waiting()
        return Store.vouch(session.store_path(), values[0])
    with session.open() as store:
        if key is not None and values:
            store.configure(key, values[0])
            session.settled()
        return dict(store.config)


def _of_user(key: str | None, values: Sequence[str], *, unset: bool) -> Mapping[str, object]:
    from mstore_cli import user_config

    if key is not None and unset:
        user_config.remove(key, values)
    elif key is not None and values:
        user_config.add(key, values)
    return user_config.read()


def _require_known(key: str, *, user: bool) -> None:
    """Raise BadRequest for a setting that is not here, and say where it is."""
    from mstore.store.config import KEYS
    from mstore.terms.errors import BadRequest
    from mstore_cli.user_config import GATES, path
    from mstore_cli.user_config import KEYS as OF_USER

    here, elsewhere = (OF_USER, KEYS) if user else (KEYS, OF_USER)
    if key not in here:
        place = "mstore config" if user else "mstore config --user"
        hint = f"{place} {key}" if key in elsewhere else f"mstore config{' --user' * user}"
        if key.partition(".")[0] == GATES:
            hint = f"a gate is a table [gates.NAME]: edit {path()}; mstore gate shows yours"
        raise BadRequest(
            f"no such setting{' of a user' if user else ''}: {key!r}; there are {', '.join(here)}",
            hint=hint,
        )


def _listed(value: object) -> list[str]:
    if isinstance(value, bool):
        return [str(value).lower()]
    return [str(one) for one in value] if isinstance(value, list) else [str(value)]


def _text(value: object) -> str:
    return ", ".join(_listed(value)) or "none"
