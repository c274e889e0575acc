"""What is reported of one signature.

Apart from `mstore.signing`, which reads keys and checks signatures: `log` and `refs` need neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mstore.frozen import frozen
from mstore.ids import NoteId, SnapshotId

if TYPE_CHECKING:
    from mstore.objects.note import Note

GOOD_SIGNATURE = "good"
UNKNOWN_KEY = "unknown key"
BAD_SIGNATURE = "bad"
UNCHECKED = "unchecked"


@frozen
class SignatureReport:
    """One signature of a snapshot, or of a note.

    `state` is GOOD_SIGNATURE, UNKNOWN_KEY, BAD_SIGNATURE, or UNCHECKED if the library for checking
    is missing.
    """

    signature: NoteId
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


def signature_report(
    id: NoteId, record: Note, *, made_by_key: bool | None, key: str, signer: str | None
) -> SignatureReport:
    """Report a signature.

    made_by_key: whether the key in the record made it; None: unchecked. key: its fingerprint.
    signer: the name under which the key is trusted.
    """
    if made_by_key is None:
        state = UNCHECKED
    elif not made_by_key:
        state = BAD_SIGNATURE
    else:
        state = UNKNOWN_KEY if signer is None else GOOD_SIGNATURE
    return SignatureReport(
        signature=id,
        snapshot=record.snapshot_id(),
        state=state,
        key=key,
        signer=signer,
        claimed_signer=record.author or None,
        time_ns=record.time_ns,
    )
