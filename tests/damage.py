"""Damage to stores at rest that tests of several faces do."""

from __future__ import annotations

from pathlib import Path


def flip_bit(store: Path, inside: bytes) -> None:
    """Flip a bit of the one place in the packs that holds these bytes, which lie raw there."""
    for pack in store.rglob("*.pack"):
        at = pack.read_bytes().find(inside)
        if at >= 0:
            pack.chmod(0o644)
            with pack.open("r+b") as file:
                file.seek(at)
                file.write(bytes([inside[0] ^ 1]))
            return
    raise AssertionError("no pack holds these bytes")
