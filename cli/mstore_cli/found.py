"""A store that was found, and not named: whose it has to be.

Whoever may create a directory above the one where a command runs decides which store it finds, as
in /tmp; and who writes a store decides what its models are (CVE-2022-24765 was the same in git).
So a store that was only found is used if it is the user's own, or if the user listed it as safe.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path


def own_users() -> frozenset[int]:
    """Return the numbers of whoever runs this program: for root, also of the caller of sudo."""
    me = os.geteuid()
    caller = os.environ.get("SUDO_UID", "") if me == 0 else ""
    is_number = caller.isascii() and caller.isdigit()
    return frozenset({me, int(caller)} if is_number else {me})


def require_own(store: Path) -> None:
    """Raise Conflict, with the ways to use it, unless the store is this user's or listed as safe.

    Raises as `user_config.read` for a store of somebody else.
    """
    from mstore import fs

    stranger = next((one for one in fs.owners(store) if one not in own_users()), None)
    if stranger is None:
        return
    from mstore.errors import Conflict
    from mstore_cli import user_config

    if os.path.realpath(store) in user_config.read()["safe_stores"]:
        return

    named = shlex.quote(str(store))
    raise Conflict(
        f"this store belongs to user {_name(stranger)}, and was only found, not named",
        where=str(store),
        hint=f"if you trust it: mstore --store {named} ...    (for one command)\n"
        f"export MSTORE_STORE={named}    (for this shell)\n"
        f"mstore config --user safe_stores {named}    (for all your commands)",
    )


def _name(user: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"#{user}"
