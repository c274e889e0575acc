"""Which kinds of places checkpoints come from, by the scheme of an address."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from mstore.checkpoint.origin import Origin
from mstore.oci import address as oci
from mstore.origins import hub, registry
from mstore.origins.repository import Repository
from mstore.terms.errors import BadRequest, Unavailable


class PlaceAddress(Protocol):
    """A checkpoint at a place.  Its text is an address, too, and stays one as a path."""

    @property
    def name(self) -> str:
        """The usual name of a checkpoint from there."""


class _Kind(NamedTuple):
    """A kind of place.

    opened: asks the place for what an address names; takes an address and a directory for scratch.
    by_hand: of an address, the command of the place's own tool that downloads it, and what `add`
    is to add then. recorded: the address that a snapshot of an origin was added from; None if that
    is of another kind. now: the commit that such an address is now.
    """

    is_address: Callable[[str], bool]
    parse: Callable[[str], Any]
    opened: Callable[[Any, Path], Repository]
    by_hand: Callable[[Any], tuple[str, str]]
    recorded: Callable[[Origin], Any]
    now: Callable[[Origin, Any], str]


_KINDS: Final = (
    _Kind(
        hub.is_address,
        hub.Address.parse,
        lambda address, _: hub.HubRepository(address),
        lambda address: (f"hf download {address.model}", address.model),
        hub.recorded,
        hub.now,
    ),
    _Kind(
        oci.is_address,
        oci.ArtifactAddress.parse,
        registry.RegistryRepository,
        lambda address: (f"oras pull -o DIR {address.bare}", "DIR"),
        registry.recorded,
        registry.now,
    ),
)


def _kind(text: str) -> _Kind:
    found = next((one for one in _KINDS if one.is_address(text)), None)
    if found is None:
        raise BadRequest("is no address of a checkpoint", where=text)
    return found


def is_address(text: str) -> bool:
    """Return whether a text is the address of a checkpoint at a place, sound or not."""
    return any(one.is_address(text) for one in _KINDS)


def parse(text: str) -> PlaceAddress:
    """Return the address that a text is.  Raises BadRequest, Unavailable (no library for it)."""
    address: PlaceAddress = _kind(text).parse(text)
    return address


def opened(text: str, scratch: Path) -> Repository:
    """Ask the place for what an address names; return it.

    scratch: an empty directory, which must stay as long as the repository is read.  Raises
    BadRequest, and as `Repository`.
    """
    kind = _kind(text)
    return kind.opened(kind.parse(text), scratch)


def recorded(origin: Origin) -> PlaceAddress | None:
    """Return the address that a snapshot of an origin was added from; None if no kind knows it."""
    found = (kind.recorded(origin) for kind in _KINDS)
    return next((one for one in found if one is not None), None)


def now(origin: Origin) -> str:
    """Return the commit that the address of an origin is now.

    Raises NotFound, Unavailable (also for an origin of no kind that is known).
    """
    for kind in _KINDS:
        address = kind.recorded(origin)
        if address is not None:
            return kind.now(origin, address)
    raise Unavailable("mstore does not know this kind of place", where=origin.url)


def by_hand(text: str) -> tuple[str, str]:
    """Return the command that downloads all of it, and what to add then.  Raises as `parse`."""
    kind = _kind(text)
    return kind.by_hand(kind.parse(text))
