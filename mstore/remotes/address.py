"""Addresses of remotes: which are allowed, and what opens them.

    s3://BUCKET/PREFIX    S3 and what speaks it; gs:// Google Cloud Storage; az:// Azure
    file:///DIRECTORY     a directory that several machines may share

A store's settings may be a stranger's: an endpoint that they name gets credentials only if the
user named it too. So may an address be: one with a password or a signature in it is refused, for it
would end in files and logs.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from mstore.remotes.bucket import Bucket
from mstore.remotes.objects import Objects
from mstore.remotes.shared_directory import SharedDirectory
from mstore.store import refs
from mstore.store.config import RemoteConfig
from mstore.terms.errors import BadRequest, Conflict
from mstore.terms.phrases import call

SCHEMES: Final = ("s3", "gs", "az", "file")
_MOST_BYTES: Final = 1024


def is_address(text: str) -> bool:
    """Return whether a text is meant as the address of a remote, and not as a path."""
    return "://" in text


def checked(config: RemoteConfig) -> RemoteConfig:
    """Return the settings of a remote, its address normalized. Raises BadRequest, BadName."""
    refs.directory_of(refs.REMOTE, config.name)
    url = _checked_url(config.url, SCHEMES)
    endpoint = checked_endpoint(config.endpoint) if config.endpoint else ""
    if not config.region.replace("-", "").isalnum() and config.region:
        raise BadRequest(f"{config.region!r} is no region")
    return RemoteConfig(config.name, url, endpoint, config.region)


def checked_endpoint(url: str) -> str:
    """Return the address of a server, normalized. Raises BadRequest."""
    return _checked_url(url, ("http", "https"))


def _checked_url(url: str, schemes: Collection[str]) -> str:
    try:
        parts = urlsplit(url)
        secret = parts.username is not None or parts.password is not None
    except ValueError as error:
        raise BadRequest("this is no address") from error
    if secret or parts.query or parts.fragment:
        # Not shown: it may have a secret.
        raise BadRequest(
            "an address has no user, password, query or signature",
            hint="credentials come from the environment or the provider's profile",
        )
    if parts.scheme not in schemes or not url.isprintable() or len(url) > _MOST_BYTES:
        raise BadRequest(
            f"{url[:100]!r} is no address of this kind",
            hint=f"it begins with {', '.join(f'{one}://' for one in schemes)}",
        )
    if parts.scheme == "file":
        if parts.netloc or not parts.path.startswith("/"):
            raise BadRequest(f"{url!r}: a directory's address is file:///ABSOLUTE/PATH")
    elif not parts.netloc:
        raise BadRequest(f"{url!r} names no {'bucket' if 'http' not in schemes else 'host'}")
    return url.rstrip("/")


def opened(config: RemoteConfig, endpoints: Collection[str]) -> Objects:
    """Open a remote's objects.  Raises BadRequest, Conflict, Unavailable.

    endpoints: servers that the user trusts with credentials.
    """
    config = checked(config)
    if config.url.startswith("file:"):
        return SharedDirectory(Path(unquote(urlsplit(config.url).path)))
    if config.endpoint and config.endpoint not in endpoints:
        raise Conflict(
            f"the store's settings send your credentials to {config.endpoint}, which your own "
            "settings do not name",
            where=f"remote {config.name}",
            hint=call("trust", config.endpoint),
        )
    options: dict[str, Any] = {}
    if config.endpoint:
        options["endpoint"] = config.endpoint
    if config.region:
        options["region"] = config.region
    return Bucket(config.url, options)
