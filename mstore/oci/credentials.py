"""Credentials for registries, as `docker login` and `podman login` leave them.

    $REGISTRY_AUTH_FILE                                     if it is set
    $DOCKER_CONFIG/config.json, else ~/.docker/config.json
    $XDG_RUNTIME_DIR/containers/auth.json, ~/.config/containers/auth.json

The first file that knows the host counts.  In a file, a helper for the host (`credHelpers`) comes
before the store of all hosts (`credsStore`), and that before what the file itself says (`auths`).
Podman's keys may name a part of a host: the longest that fits counts.

A helper is a program `docker-credential-NAME` on the PATH, which says what the user stored in the
keychain.  No error, report or file of mstore has a secret.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from mstore.checkpoint.reading import read_part
from mstore.oci.address import DOCKER_HUB
from mstore.terms.errors import MstoreError, Unavailable

_MOST_BYTES: Final = 1 << 20
_PATIENCE: Final = 60.0
"""Seconds: a helper may ask its user."""
_HELPER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TOKEN_USER: Final = "<token>"  # noqa: S105 -- what helpers call the user of an identity token
_HUB_KEY: Final = "https://index.docker.io/v1/"
"""What Docker's files and helpers call Docker Hub."""


class Credentials(msgspec.Struct, frozen=True):
    """A user and a password; or, where the user is None, an identity token."""

    user: str | None
    secret: str

    def __repr__(self) -> str:
        return "Credentials(...)"

    @property
    def basic(self) -> str:
        """The value of a header that has user and password."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.secret}".encode()).decode()


def find(host: str, repository: str) -> Credentials | None:
    """Return what this user has for a registry; None if nothing.

    Raises Unavailable for a file or a helper that cannot be used.
    """
    for path in _files():
        with suppress(FileNotFoundError):
            found = _in_file(path, host, repository)
            if found is not None:
                return found
    return None


def _files() -> Iterator[Path]:
    home = Path(os.environ.get("HOME") or "/")
    given = os.environ.get("REGISTRY_AUTH_FILE")
    if given:
        yield Path(given)
    yield Path(os.environ.get("DOCKER_CONFIG") or home / ".docker") / "config.json"
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        yield Path(runtime) / "containers" / "auth.json"
    config = os.environ.get("XDG_CONFIG_HOME")
    yield Path(config or home / ".config") / "containers" / "auth.json"


def _in_file(path: Path, host: str, repository: str) -> Credentials | None:
    if not path.is_file():
        return None
    try:
        told = msgspec.json.decode(read_part(path, 0, _MOST_BYTES))
    except (MstoreError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Unavailable(
            f"the file with the registries' passwords cannot be read: {error}",
            where=str(path),
            hint=f"docker login {host}",
        ) from None
    if not isinstance(told, dict):
        return None
    helper = _of(told, "credHelpers").get(host) or told.get("credsStore")
    if isinstance(helper, str) and helper:
        found = _from_helper(helper, _HUB_KEY if host == DOCKER_HUB else host, path)
        if found is not None:
            return found
    auths = {_key(name): entry for name, entry in _of(told, "auths").items()}
    # From the whole name to the host alone.
    name = f"{host}/{repository}"
    while name:
        entry = auths.get(name)
        if isinstance(entry, dict) and (found := _of_entry(entry)) is not None:
            return found
        name = name.rpartition("/")[0]
    return None


def _of(told: dict[str, Any], name: str) -> dict[str, Any]:
    found = told.get(name)
    return found if isinstance(found, dict) else {}


def _key(name: str) -> str:
    """Return the host, and the repository if any, that a key of `auths` is for."""
    bare = name.partition("://")[2] or name
    bare = re.sub(r"/v[12]/?$", "", bare).strip("/")
    return re.sub(r"^(index|registry-1)\.docker\.io", DOCKER_HUB, bare)


def _of_entry(entry: dict[str, Any]) -> Credentials | None:
    token = entry.get("identitytoken")
    if isinstance(token, str) and token:
        return Credentials(None, token)
    try:
        user, colon, secret = base64.b64decode(str(entry.get("auth") or "")).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return None
    if colon:
        # Docker pads with zeros what it wrote long ago.
        return Credentials(user, secret.strip("\0"))
    user, secret = entry.get("username", ""), entry.get("password", "")
    if isinstance(user, str) and isinstance(secret, str) and user:
        return Credentials(user, secret)
    return None


def _from_helper(helper: str, server: str, path: Path) -> Credentials | None:
    """Ask a helper; None if it has nothing for the server."""
    if not _HELPER.fullmatch(helper):
        raise Unavailable(f"{helper[:80]!r} is no name of a helper", where=str(path))
    program = f"docker-credential-{helper}"
    try:
        done = subprocess.run(
            [program, "get"],
            input=server.encode(),
            capture_output=True,
            check=False,
            timeout=_PATIENCE,
        )
        told = msgspec.json.decode(done.stdout) if done.returncode == 0 else {}
    except FileNotFoundError:
        raise Unavailable(
            f"the program {program}, which keeps the passwords, is not on the PATH",
            where=str(path),
            hint=f"install it, or take {helper!r} out of the file and: docker login {server}",
        ) from None
    except (OSError, subprocess.TimeoutExpired, msgspec.MsgspecError, ValueError):
        # Not the error itself: it may quote what the helper said.
        raise Unavailable(
            f"the program {program} does not answer as it should",
            where=str(path),
            hint=f"echo {server} | {program} get",
        ) from None
    if not isinstance(told, dict):
        return None
    user, secret = told.get("Username"), told.get("Secret")
    if not isinstance(user, str) or not isinstance(secret, str) or not secret:
        return None
    return Credentials(None if user == _TOKEN_USER else user, secret)
