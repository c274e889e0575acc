"""Which kinds of places checkpoints come from, by the scheme of an address."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from mstore.oci import address as oci
from mstore.origins import hub
from mstore.origins.registry import RegistryRepository
from mstore.origins.repository import Repository
from mstore.terms.errors import BadRequest


class Address(Protocol):
    """A checkpoint at a place.  Its text is an address, too, and stays one as a path."""

    @property
    def name(self) -> str:
        """The usual name of a checkpoint from there."""


class _Kind(NamedTuple):
    """A kind of place.

    opened: asks the place for what an address names; takes an address and a directory for scratch.
    by_hand: of an address, the command of the place's own tool that downloads it, and what `add`
    is to add then.
    """

    is_address: Callable[[str], bool]
    parse: Callable[[str], Any]
    opened: Callable[[Any, Path], Repository]
    by_hand: Callable[[Any], tuple[str, str]]


_KINDS: Final = (
    _Kind(
        hub.is_address,
        hub.Address.parse,
        lambda address, _: hub.HubRepository(address),
        lambda address: (f"hf download {address.model}", address.model),
    ),
    _Kind(
        oci.is_address,
        oci.Address.parse,
        RegistryRepository,
        lambda address: (f"oras pull -o DIR {str(address).partition(':')[2]}", "DIR"),
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


def parse(text: str) -> Address:
    """Return the address that a text is.  Raises BadRequest, Unavailable (no library for it)."""
    address: Address = _kind(text).parse(text)
    return address


def opened(text: str, scratch: Path) -> Repository:
    """Ask the place for what an address names; return it.

    scratch: an empty directory, which must stay as long as the repository is read.  Raises
    BadRequest, and as `Repository`.
    """
    kind = _kind(text)
    return kind.opened(kind.parse(text), scratch)


def by_hand(text: str) -> tuple[str, str]:
    """Return the command that downloads all of it, and what to add then.  Raises as `parse`."""
    kind = _kind(text)
    return kind.by_hand(kind.parse(text))
