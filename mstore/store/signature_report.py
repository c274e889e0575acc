"""What is reported of one signature of a snapshot.

Apart from `mstore.signing`, which makes it, so that `log` and `refs` need not import what reads
keys and checks signatures.
"""

from __future__ import annotations

from dataclasses import dataclass

from mstore.ids import SignatureId, SnapshotId

GOOD_SIGNATURE = "good"
UNKNOWN_KEY = "unknown key"
BAD_SIGNATURE = "bad"
UNCHECKED = "unchecked"


@dataclass(frozen=True, slots=True)
class SignatureReport:
    """One signature of a snapshot.

    `state` is GOOD_SIGNATURE, UNKNOWN_KEY, BAD_SIGNATURE, or UNCHECKED if the library for checking
    is missing.
    """

    signature: SignatureId
    """the signature's id"""
    snapshot: SnapshotId
    """the snapshot's id"""
    state: str
    """good (by a trusted key), unknown key, bad (not made by its key), or unchecked"""
    key: str
    """fingerprint of the key, as ssh-keygen -l prints it"""
    signer: str | None
    """the name under which the key is trusted; None: it is not trusted"""
    claimed_signer: str | None
    """the signer that the signature claims, which proves nothing"""
    time_ns: int
    """when, as the signature claims"""
