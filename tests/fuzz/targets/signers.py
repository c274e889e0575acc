"""A list of trusted signers in OpenSSH's form."""

from __future__ import annotations

from collections.abc import Iterable

from mutation import Form

from mstore.snapshots.signing import parse_signers

FORM = Form.TEXT


def target(data: bytes) -> None:
    assert all(len(key) == 32 and name for key, name in parse_signers(data, "input").items())


def seeds() -> Iterable[bytes]:
    key = b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJe1ccR1AYxCrWFmphtcy4+hR/Hiiznnm7SLxY3Z9Ute"
    yield b"# people\nalice@x " + key + b" a comment\n"
    yield b'"bob of x" namespaces="git,mstore",cert-authority ' + key + b"\n"
