"""Addresses of remotes: which are allowed, and what opens them.

    s3://BUCKET/PREFIX    S3 and what speaks it
    gs://BUCKET/PREFIX    Google Cloud Storage
    az://CONTAINER/PREFIX  Azure; AZURE_STORAGE_ACCOUNT_NAME in the environment names the account
    file:///DIRECTORY     a directory that several machines may share
    bundle:FILE           one file; read-only
    http://HOST/PATH      what a web server shows, also https://; read-only

At S3, requests name the bucket in their path, or with addressing_style "virtual" in the host:
https://BUCKET.ENDPOINT/PREFIX.

A store's settings may be a stranger's: an endpoint or a web server that they name gets credentials
only if the user named it too. So may an address be: one with a password or a signature in it is
refused, for it would end in files and logs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec

from mstore.remotes import bucket, bundle, web
from mstore.remotes.bundle import Bundle
from mstore.remotes.objects import Objects
from mstore.remotes.shared_directory import SharedDirectory
from mstore.remotes.web import Web, server_of
from mstore.store import refs
from mstore.store.config import RemoteConfig
from mstore.terms.errors import BadRequest, Conflict
from mstore.terms.phrases import Option, call

SCHEMES: Final = ("s3", "gs", "az", "file", *web.SCHEMES)
_MOST_BYTES: Final = 1024
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")
STYLES: Final = ("path", "virtual")
_REGION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
_NEARLY: Final = re.compile(r"(s3|gs|az|file(?=:/)|https?):/?(?!/)", re.IGNORECASE)
"""How an address begins that lacks a slash."""


def is_address(text: str) -> bool:
    """Return whether a text is meant as the address of a remote, and not as a path."""
    return "://" in text or text.startswith(bundle.SCHEME) or bool(_NEARLY.match(text))


def is_web(url: str) -> bool:
    """Return whether an address is a web server's."""
    return url.partition("://")[0] in web.SCHEMES


def checked(config: RemoteConfig) -> RemoteConfig:
    """Return the settings of a remote, its address normalized. Raises BadRequest, BadName."""
    refs.directory_of(refs.REMOTE, config.name)
    is_bundle = config.url.startswith(bundle.SCHEME)
    url = _bundle(config.url) if is_bundle else _checked_url(config.url, SCHEMES)
    if config.endpoint and not url.startswith(("s3:", "gs:", "az:")):
        raise BadRequest("only addresses in object storage have an endpoint", where=url)
    endpoint = checked_endpoint(config.endpoint) if config.endpoint else ""
    if (config.region or config.addressing_style) and not url.startswith("s3:"):
        raise BadRequest("only s3:// addresses have a region or an addressing style", where=url)
    if config.region and not _REGION.fullmatch(config.region):
        raise BadRequest(f"{config.region[:100]!r} is no region")
    if config.addressing_style not in ("", *STYLES):
        raise BadRequest(
            f"{config.addressing_style[:100]!r} is no addressing style; there are "
            f"{' and '.join(STYLES)}"
        )
    found = msgspec.structs.replace(config, url=url, endpoint=endpoint)
    if endpoint and config.addressing_style == "virtual":
        _with_bucket(found)
    return found


def _with_bucket(config: RemoteConfig) -> str:
    """Return the endpoint with the bucket in its host. Raises BadRequest for a host by number."""
    parts = urlsplit(config.endpoint)
    with suppress(ValueError):
        ip_address(parts.hostname or "")
        raise BadRequest(
            "a server that is named by its number has no names for buckets below it",
            where=config.endpoint,
            hint=Option("addressing_style", "path"),
        )
    return parts._replace(netloc=f"{urlsplit(config.url).netloc}.{parts.netloc}").geturl()


def checked_endpoint(url: str) -> str:
    """Return the address of a server, normalized. Raises BadRequest."""
    return _checked_url(url, ("http", "https"))


def _bundle(url: str) -> str:
    """Return the address of a bundle, by its whole path."""
    path = url.removeprefix(bundle.SCHEME)
    if not path or not path.isprintable() or len(path) > _MOST_BYTES:
        raise BadRequest(f"{url[:100]!r}: a bundle's address is bundle:FILE")
    return f"{bundle.SCHEME}{os.path.abspath(path)}"


def _checked_url(url: str, schemes: Collection[str]) -> str:
    """Return an address, its scheme in small letters and no slash at its end. Raises BadRequest."""
    read = _read(url)
    if read is None:
        raise BadRequest("this is no address")
    parts, path = read
    if "@" in parts.netloc or "?" in url or "#" in url:
        # Not shown: it may have a secret.
        raise BadRequest(
            "an address has no user, password, query or signature",
            hint="credentials come from the environment",
        )
    # A password before a sign that is not where it should be.
    shown = "this" if "@" in url else repr(url[:100])
    begin = f"{parts.scheme}://"
    is_strange = {".", ".."} & set(path.split("/")) or "//" in path
    if (
        parts.scheme not in schemes
        or not url.lower().startswith(begin)
        or not (url.isprintable() and path.isprintable())
        or len(url) > _MOST_BYTES
        or is_strange
    ):
        hint = f"it begins with {', '.join(f'{one}://' for one in schemes)}, and has no '..'"
        if (near := _NEARLY.match(url)) and shown != "this":
            slashes = ":///" if near[1].lower() == "file" else "://"
            hint = f"did you mean {near[1].lower()}{slashes}{url[near.end() :]}?"
        if ":" not in url and "file" in schemes and url.isprintable() and shown != "this":
            hint = f"the address of a directory is {Path(os.path.abspath(url)).as_uri()}"
        raise BadRequest(f"{shown} is no address of this kind", hint=hint)
    if parts.scheme == "file":
        if parts.netloc or not path.startswith("/"):
            raise BadRequest(f"{shown}: a directory's address is file:///ABSOLUTE/PATH")
    elif parts.scheme in web.SCHEMES:
        if not parts.hostname:
            raise BadRequest(f"{shown} names no host")
    elif not _BUCKET.fullmatch(parts.netloc):
        raise BadRequest(f"{shown} names no bucket")
    return begin + url[len(begin) :].rstrip("/")


def _read(url: str) -> tuple[SplitResult, str] | None:
    """Return the parts of an address and its path in plain letters; None if it has none.

    What was wrong is not told: it may quote a password that stands in the place of a port.
    """
    with suppress(ValueError):
        parts = urlsplit(url)
        path = unquote(parts.path, errors="strict").rstrip("/")
        return None if parts.port == 0 else (parts, path)
    return None


def web_server(url: str) -> str:
    """Return the server of an address, to which a token may go; empty: it is no web server's."""
    return server_of(url) if is_web(url) else ""


def shared_path(url: str) -> Path | None:
    """Return the directory that an address names; None if it is no directory's."""
    return Path(unquote(urlsplit(url).path)) if url.startswith("file:") else None


def is_read_only(url: str) -> bool:
    """Return whether nothing can be pushed to an address."""
    return is_web(url) or url.startswith(bundle.SCHEME)


def opened(
    config: RemoteConfig,
    endpoints: Collection[str],
    token: str = "",
    s3_credentials: Callable[[], Any] | None = None,
) -> Objects:
    """Open a remote's objects.  Raises BadRequest, Conflict, Unavailable.

    endpoints: servers that the user trusts with credentials. token: for web servers.
    s3_credentials: a credential provider of obstore for S3, asked first here, so that what it
    raises is raised; None: obstore looks for them.
    """
    config = checked(config)
    if config.url.startswith(bundle.SCHEME):
        return Bundle(Path(config.url.removeprefix(bundle.SCHEME)))
    if is_web(config.url):
        return _web(config.url, endpoints, token)
    shared = shared_path(config.url)
    if shared is not None:
        return SharedDirectory(shared)
    if config.endpoint and config.endpoint not in {one.rstrip("/") for one in endpoints}:
        raise Conflict(
            f"the store's settings send your credentials to {config.endpoint}, which your own "
            "settings do not name",
            where=f"remote {config.name}",
            hint=call("trust", config.endpoint),
        )
    options: dict[str, Any] = {}
    if config.endpoint:
        options["base_url" if config.url.startswith("gs:") else "endpoint"] = config.endpoint
    if config.region:
        options["region"] = config.region
    if config.addressing_style:
        options["virtual_hosted_style_request"] = config.addressing_style == "virtual"
        if config.endpoint and config.addressing_style == "virtual":
            options["endpoint"] = _with_bucket(config)
    if s3_credentials is not None and config.url.startswith("s3:"):
        # obstore would make an error of its own of what this raises.
        s3_credentials()
        options["credential_provider"] = s3_credentials
    return bucket.connect(config.url, options)


def _web(url: str, endpoints: Collection[str], token: str) -> Web:
    """Open what a web server shows; it gets the token only if the user named it."""
    if token and server_of(url) not in endpoints:
        return Web(url, "", call("trust", server_of(url)))
    given = web.checked_token(token) if token else ""
    return Web(url, given, "the server wants a token: ask who runs it")
