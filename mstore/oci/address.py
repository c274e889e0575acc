"""Addresses of artifacts in registries: oci://HOST/REPOSITORY[:TAG|@DIGEST]."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Final

import msgspec

from mstore.terms.errors import BadRequest

_ADDRESS: Final = re.compile(r"oci:/{0,2}(?P<rest>[^/].*)")
"""An address; as a path it has one slash for several."""
_HOST: Final = re.compile(
    r"(?P<name>localhost|[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+|[A-Za-z0-9-]+(?=:)|\[[0-9A-Fa-f:.]+\])"
    r"(?::[0-9]{1,5})?"
)
_PART: Final = re.compile(r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*")
_TAG: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_MOST_BYTES: Final = 512
_EXAMPLES: Final = "oci://HOST/REPOSITORY:TAG or oci://HOST/REPOSITORY@sha256:DIGEST"
_DOCKER_HUB: Final = frozenset({"docker.io", "index.docker.io", "registry-1.docker.io"})
DOCKER_HUB: Final = "docker.io"
DEFAULT_TAG: Final = "latest"


def is_digest(text: object) -> bool:
    """Return whether this is a digest as manifests have it: `sha256:` and 64 digits."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def is_address(text: str) -> bool:
    """Return whether a text is an address in a registry, sound or not."""
    return _ADDRESS.fullmatch(text) is not None


class ArtifactAddress(msgspec.Struct, frozen=True):
    """An artifact: host (and port) of its registry, repository, and a tag or a digest."""

    host: str
    repository: str
    tag: str = DEFAULT_TAG
    digest: str | None = None

    @classmethod
    def parse(cls, text: str) -> ArtifactAddress:
        """Return the address that `oci://HOST/REPOSITORY[:TAG|@DIGEST]` names.

        Without tag and digest, the tag is `latest`.  `docker.io/NAME` is `docker.io/library/NAME`.
        Raises BadRequest.
        """
        found = _ADDRESS.fullmatch(text) if len(text) <= _MOST_BYTES else None
        host, slash, rest = ("" if found is None else found["rest"]).partition("/")
        if "@" in host or "@" in rest.partition("@")[2]:
            # Not shown: it may have a password.
            raise BadRequest(
                "an address in a registry has no user and no password",
                hint=f"docker login {host.rpartition('@')[2] or 'HOST'}",
            )
        if not slash or not _HOST.fullmatch(host):
            refused = _bad(text, f"{host!r} is no host of a registry" if host else "it has no host")
            if slash and _PART.fullmatch(host):
                refused.advise(f"{_EXAMPLES}; of Docker Hub: oci://docker.io/{host}/{rest}")
            raise refused
        rest, at, digest = rest.partition("@")
        repository, colon, tag = rest.partition(":")
        if host in _DOCKER_HUB:
            host = DOCKER_HUB
            repository = repository if "/" in repository else f"library/{repository}"
        if not all(map(_PART.fullmatch, repository.split("/"))):
            raise _bad(text, f"{repository!r} is no repository: small letters, digits and . _ - /")
        if colon and not _TAG.fullmatch(tag):
            raise _bad(text, f"{tag!r} is no tag")
        if at and not is_digest(digest):
            raise _bad(text, f"{digest!r} is no digest")
        return cls(host, repository, tag or DEFAULT_TAG, digest or None)

    def __str__(self) -> str:
        return f"oci://{self.bare}"

    @property
    def bare(self) -> str:
        """As other programs write it."""
        return f"{self.host}/{self.repository}{self._chosen}"

    @property
    def url(self) -> str:
        """The repository, as origins record it."""
        return f"oci://{self.host}/{self.repository}"

    @property
    def _chosen(self) -> str:
        return f":{self.tag}" if self.digest is None else f"@{self.digest}"

    @property
    def reference(self) -> str:
        """What a request for the manifest names: the digest, else the tag."""
        return self.digest or self.tag

    @property
    def name(self) -> str:
        """The last part of the repository."""
        return self.repository.rpartition("/")[2]

    @property
    def server(self) -> str:
        """The host and port that answer requests."""
        return "registry-1.docker.io" if self.host == DOCKER_HUB else self.host

    @property
    def is_on_this_machine(self) -> bool:
        """Whether requests stay on this machine; only then may they go without TLS."""
        return is_loopback(self.host)


def is_loopback(server: str) -> bool:
    """Return whether a host, with a port or without, is this machine by its name or number."""
    name = server.rpartition(":")[0] if re.search(r":[0-9]+$", server) else server
    if name.lower() == "localhost":
        return True
    try:
        return ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _bad(text: str, why: str) -> BadRequest:
    return BadRequest(
        f"is no address in a registry: {why}", where=text[:_MOST_BYTES], hint=_EXAMPLES
    )
