"""`mstore init`: make an empty store."""

from __future__ import annotations

import shlex
import stat
from pathlib import Path
from typing import Annotated

from mstore_cli import completion
from mstore_cli.command import command
from mstore_cli.errors import UsageError
from mstore_cli.options import Argument, Option
from mstore_cli.output import Screen
from mstore_cli.session import STORE_NAME, Session
from mstore_cli.sizes import format_size, parse_size


@command(
    example="mstore init --block-size 1MiB",
    failure="the store exists already, or another error",
)
def init(
    session: Session,
    directory: Annotated[
        Path | None,
        Argument(
            metavar="DIR", help=f"The store itself [default: --store, else {STORE_NAME} here]."
        ),
    ] = None,
    block_size: Annotated[
        str, Option("--block-size", metavar="SIZE", help="A power of two, 64KiB to 16MiB.")
    ] = "1MiB",
    codec: Annotated[
        str | None,
        Option(
            "--codec",
            metavar="POLICY",
            help="auto, raw or dense; see mstore config.",
            shell_complete=completion.codecs,
        ),
    ] = None,
    shared: Annotated[
        str | None,
        Option(
            "--shared",
            metavar="WHO",
            help="Who may use the store: group (its group reads and writes), all (others also "
            "read), umask [default: umask].",
        ),
    ] = None,
    filesystem: Annotated[
        str | None,
        Option(
            "--filesystem",
            metavar="NAME",
            help="Use this type of filesystem, too; see mstore config.",
        ),
    ] = None,
) -> None:
    """Create an empty store.

    The block size is fixed for the life of the store. Smaller blocks find more equal parts and
    make the index larger.

    --shared group lets the group of the store's directory read and write everything in it,
    whatever the umask of its members. A new directory gets the group of its parent directory if
    that has the setgid bit (set it first: chgrp GROUP DIR; chmod g+s DIR), else your own group. The
    command prints which. To change the group later: chgrp -R GROUP STORE.
    """
    given = session.given_store
    if directory and given and directory.absolute() != given.absolute():
        raise UsageError(f"two stores named: {directory} and, by --store, {given}")
    path = directory or session.named_store or Path(STORE_NAME)
    size = _block_size(block_size)
    from mstore import Store

    with Store.init(
        path, block_size=size, codec=codec, shared=shared, filesystem=filesystem
    ) as store:
        session.settled()
        document = {
            "path": str(path),
            "uuid": str(store.uuid),
            "block_size": store.block_size,
            "codec": store.config["codec"],
            "shared": store.config["shared"],
            "group": None if store.config["shared"] == "umask" else _group_of(store.path),
        }

    def human(screen: Screen) -> None:
        screen.line(
            f"empty store at {document['path']}, blocks of {format_size(size)}", style="green"
        )
        other = session.named_store
        if other is not None and other.absolute() != Path(str(document["path"])).absolute():
            screen.line(f"{session.named_by} names another store, which commands use: {other}")
        if document["group"] is None:
            return
        place = Path(str(document["path"])).absolute()
        others = ", and readable by all" if document["shared"] == "all" else ""
        screen.line(f"shared with the group {document['group']}{others}")
        if not place.parent.stat().st_mode & stat.S_ISGID:
            # In that case it is the group of the caller, which often has no other members.
            screen.line(f"to share it with another group: chgrp -R GROUP {shlex.quote(str(place))}")

    session.output.emit(document, ids=[document["uuid"]], human=human)


def _block_size(text: str) -> int:
    from mstore.terms.errors import BadRequest

    try:
        return parse_size(text, option="--block-size")
    except BadRequest as error:
        error.advise("a power of two, 64KiB to 16MiB, such as 1MiB")
        raise


def _group_of(path: Path) -> str:
    """Return the name of a directory's group, or its number."""
    import grp

    number = path.stat().st_gid
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
