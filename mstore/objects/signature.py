"""The signature record: somebody's word for one snapshot.

What is signed is `signed_message`: one line of text that holds the SnapshotId, wrapped as OpenSSH
wraps what `ssh-keygen -Y sign` signs.  Through the hashes in its record the SnapshotId names
every byte, the lineage and the plan, so all of them are signed.  What the record says besides
(`signer`, `time_ns`) is not: who a key belongs to is for whoever trusts it to say.
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
    """The line that is signed, as a file that `ssh-keygen -Y` could be given."""
    return f"mstore 1 snapshot {snapshot}\n".encode()


def signed_message(snapshot: SnapshotId) -> bytes:
    """The bytes that the key itself signs: the SSHSIG blob of `signed_text`.

    Magic and namespace keep a signature that was made for anything else (a login, a commit) from
    meaning something here, and one made here from meaning something there.
    Source: PROTOCOL.sshsig of OpenSSH, section 2.
    """
    fields = (NAMESPACE.encode(), b"", b"sha512", sha512(signed_text(snapshot)).digest())
    return b"SSHSIG" + b"".join(ssh_string(field) for field in fields)


def ssh_string(data: bytes) -> bytes:
    """A string of the SSH protocol (RFC 4251): a u32 length in big-endian, and the bytes."""
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
        """What is signed."""
        return SnapshotId(self.snapshot)

    def problem(self, limits: RecordLimits) -> str | None:
        if self.algorithm != ED25519:
            return "an unknown algorithm"
        if len(self.public_key) != KEY_BYTES or len(self.signature) != SIGNATURE_BYTES:
            return "a key or signature of another length"
        return too_long("a signer", self.signer or "", limits.name_bytes)
