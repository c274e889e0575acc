"""The signature record: a key's signature of one snapshot.

The signed text is `signed_message`: one line that holds the SnapshotId, wrapped as OpenSSH wraps
the input of `ssh-keygen -Y sign`.  Through the hashes in its record the SnapshotId names every
byte, the lineage and the plan, so all of them are signed.  The other fields (`signer`, `time_ns`)
are not: the verifier decides whom a key belongs to.
"""

from __future__ import annotations

from hashlib import sha512
from typing import ClassVar

from mstore.blocks.packs import Kind
from mstore.ids import SignatureId, SnapshotId
from mstore.objects.canonical import Count, IdBytes, Record
from mstore.objects.limits import RecordLimits, too_long

ED25519 = "ed25519"
KEY_BYTES = 32
SIGNATURE_BYTES = 64
NAMESPACE = "mstore"


def signed_text(snapshot: SnapshotId) -> bytes:
    """Return the signed line, as the content of a file for `ssh-keygen -Y`."""
    return f"mstore 1 snapshot {snapshot}\n".encode()


def signed_message(snapshot: SnapshotId) -> bytes:
    """Return the bytes that the key itself signs: the SSHSIG blob of `signed_text`.

    Magic and namespace separate domains: a signature made for anything else (a login, a commit)
    means nothing here, and the reverse.  Source: PROTOCOL.sshsig of OpenSSH, section 2.
    """
    fields = (NAMESPACE.encode(), b"", b"sha512", sha512(signed_text(snapshot)).digest())
    return b"SSHSIG" + b"".join(ssh_string(field) for field in fields)


def ssh_string(data: bytes) -> bytes:
    """Encode a string of the SSH protocol (RFC 4251): a big-endian u32 length, and the bytes."""
    return len(data).to_bytes(4, "big") + data


class Signature(Record, frozen=True, array_like=True, tag="signature/1"):
    """`public_key` and `signature` are as in RFC 8032; signer is a name for people, or None."""

    kind: ClassVar[Kind] = Kind.SIGNATURE
    id_type: ClassVar[type[SignatureId]] = SignatureId

    snapshot: IdBytes
    algorithm: str
    public_key: bytes
    signature: bytes
    signer: str | None
    time_ns: Count

    def id(self) -> SignatureId:
        return SignatureId.of(self.encode())

    def snapshot_id(self) -> SnapshotId:
        """The signed snapshot."""
        return SnapshotId(self.snapshot)

    def problem(self, limits: RecordLimits) -> str | None:
        if self.algorithm != ED25519:
            return "an unknown algorithm"
        if len(self.public_key) != KEY_BYTES or len(self.signature) != SIGNATURE_BYTES:
            return "a key or signature of another length"
        return too_long("a signer", self.signer or "", limits.name_bytes)
