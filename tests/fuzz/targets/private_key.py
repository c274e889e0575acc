"""A private key in OpenSSH or PEM form."""

from __future__ import annotations

from collections.abc import Iterable

from mutation import Form

from mstore.snapshots.signing import _parse_key

FORM = Form.TEXT


def target(data: bytes) -> None:
    key = _parse_key(data, "input", lambda: "passphrase")
    assert len(key.sign(b"message")) == 64


def seeds() -> Iterable[bytes]:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    form = serialization.PrivateFormat
    for one in (form.PKCS8, form.OpenSSH):
        yield key.private_bytes(serialization.Encoding.PEM, one, serialization.NoEncryption())
