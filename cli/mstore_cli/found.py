"""A store that was found, and not named: whose it has to be.

Whoever may create a directory above the one where a command runs decides which store it finds, as
in /tmp; and who writes a store decides what its models are (CVE-2022-24765 was the same in git).
So a store that was only found is used if it is the user's own, or if the user listed it as safe.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Collection
from pathlib import Path

STORE_NAME = ".mstore"
"""What a store is called that commands find by looking upward."""


def own_users() -> frozenset[int]:
    """Return the numbers of whoever runs this program: for root, also of the caller of sudo."""
    me = os.geteuid()
    caller = os.environ.get("SUDO_UID", "") if me == 0 else ""
    is_number = caller.isascii() and caller.isdigit()
    return frozenset({me, int(caller)} if is_number else {me})


def nearest(here: Path) -> Path:
    """Return the nearest `.mstore` upward, else the user's own store.  Raises NotFound."""
    for directory in (here, *here.parents):
        if (directory / STORE_NAME).is_dir():
            return directory / STORE_NAME
    from platformdirs import user_data_path

    users = user_data_path("mstore") / "store"
    if users.is_dir():
        return users
    from mstore.terms.errors import NotFound

    raise NotFound(
        f"no store: no {STORE_NAME} in {here} or above it, and none at {users}",
        hint="mstore init",
    )


def require_own(store: Path, safe_stores: Callable[[], Collection[str]]) -> None:
    """Raise Conflict, with the ways to use it, unless the store is this user's or listed as safe.

    safe_stores: called for a store of somebody else only.
    """
    from mstore import fs

    stranger = next((one for one in fs.owners(store) if one not in own_users()), None)
    if stranger is None:
        return
    from mstore.terms.errors import Conflict

    if os.path.realpath(store) in safe_stores():
        return

    named = shlex.quote(str(store))
    raise Conflict(
        f"this store belongs to user {fs.user_name(stranger)}, and was only found, not named",
        where=str(store),
        hint=f"if you trust it: mstore --store {named} ...    (for one command)\n"
        f"export MSTORE_STORE={named}    (for this shell)\n"
        f"mstore config --user safe_stores {named}    (for all your commands)",
    )
