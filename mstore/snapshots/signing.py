"""Signatures: ed25519 signatures of snapshots and notes, checked against trusted keys.

A signature is a note (`store.objects.note`).  The signed text is `signed_message`: one line that
holds the id, wrapped as OpenSSH wraps the input of `ssh-keygen -Y sign`.  Through the hashes in its
record a SnapshotId names every byte, the lineage and the plan, so all of them are signed; a NoteId
names what the note says, of which snapshot, by whom and when.  Author and time of the signature
itself are not signed: the verifier decides whom a key belongs to.

Owns reading keys and trusted signers, making and checking signatures.  The caller says whom to
trust: nothing in a store makes a key trusted.  Signatures need the library `cryptography` (extra
`sign`), which is imported when the first one is made or checked; a store without signatures never
needs it.
"""

from __future__ import annotations

import base64
import binascii
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256, sha512
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from mstore.checkpoint.paths import CONTROL, quoted
from mstore.checkpoint.reading import open_regular, read_range
from mstore.snapshots import notes
from mstore.snapshots.notes import GOOD_SIGNATURE, NoteReport, SignatureReport, signature_report
from mstore.store import contents
from mstore.store.catalog import Catalog, now_ns
from mstore.store.objects.note import ED25519, SIGNATURE, Note, packed
from mstore.store.objects.plan import Coverage, Plan
from mstore.store.objects.tensor import Tensor
from mstore.terms.errors import BadRequest, Corrupt, Unavailable
from mstore.terms.ids import BlockId, ManifestId, NoteId, SnapshotId
from mstore.terms.phrases import Call, Option, call, is_text
from mstore.terms.report import Progress, ProgressCallback, Report

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MAX_KEY_BYTES = 1 << 16
MAX_SIGNERS_BYTES = 1 << 20
KEY_BYTES = 32
NAMESPACE = "mstore"
KEY_TYPE = "ssh-ed25519"
Trusted = Mapping[bytes, str]
"""Maps a public key to the name under which it is trusted."""


class VerifyReport(Report, frozen=True):
    """Whether a trusted key signed a snapshot, and what was read of its blocks."""

    snapshot: SnapshotId
    """the snapshot's id"""
    verified: bool
    """whether a trusted key made a good signature"""
    signatures: tuple[SignatureReport, ...]
    """every signature of the snapshot"""
    notes: tuple[NoteReport, ...]
    """its signed notes, also replaced and removed ones, with their signatures"""
    bytes_read: int
    """bytes of blocks read and checked; 0 unless requested"""
    seconds: float
    """how long it took"""


def require_library() -> None:
    """Raise Unavailable unless signatures can be checked on this machine."""
    try:
        import cryptography.exceptions  # noqa: F401 -- tests that it is installed
    except ImportError as error:
        raise _library_is_missing(error) from error


def _library_is_missing(error: ImportError) -> Unavailable:
    return Unavailable(
        f"signatures need the library cryptography ({error})", hint="pip install 'mstore[sign]'"
    )


# -- keys ----------------------------------------------------------------------------------------


class SigningKey(msgspec.Struct, frozen=True):
    """An ed25519 private key. Its repr never shows the secret."""

    _key: Ed25519PrivateKey

    def __repr__(self) -> str:
        return f"SigningKey({fingerprint(self.public_key)})"

    @property
    def public_key(self) -> bytes:
        """The public key: 32 bytes (RFC 8032)."""
        return self._key.public_key().public_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        """Return the signature: 64 bytes, deterministic."""
        return self._key.sign(message)


def load_key(path: Path, passphrase: Callable[[], str] | None = None) -> SigningKey:
    """Load the private key in a file that `ssh-keygen -t ed25519` or `openssl genpkey` wrote.

    Calls `passphrase` once, and only if the key is encrypted. Raises BadRequest for anything that
    is not such a key and for a wrong or missing passphrase; NotFound, StorageFailed, Unavailable.
    """
    with open_regular(path) as (descriptor, status):
        if status.st_size > MAX_KEY_BYTES:
            raise BadRequest("too long for a private key", where=str(path))
        data = read_range(descriptor, 0, status.st_size)
    return _parse_key(data, str(path), passphrase)


def _parse_key(data: bytes, where: str, passphrase: Callable[[], str] | None) -> SigningKey:
    try:
        from cryptography.exceptions import InternalError, UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        raise _library_is_missing(error) from error
    if data.startswith(b"ssh-") or b"BEGIN PUBLIC KEY" in data:
        private = where.removesuffix(".pub")
        raise BadRequest(
            "that is the public half of a key, and the private half signs",
            where=where,
            hint=Option("key", private) if private != where else None,
        )
    is_ssh = b"BEGIN OPENSSH PRIVATE KEY" in data
    load: Callable[[bytes, bytes | None], object] = (
        serialization.load_ssh_private_key if is_ssh else serialization.load_pem_private_key
    )
    try:
        try:
            key = load(data, None)
        except TypeError:
            # Both loaders raise TypeError for an encrypted key.
            if passphrase is None:
                raise BadRequest(
                    "the key is encrypted and there is no passphrase",
                    where=where,
                    hint="give load_key a function that returns the passphrase",
                ) from None
            key = load(data, passphrase().encode())
    except UnsupportedAlgorithm as error:
        raise BadRequest(f"this key cannot be read here: {error}", where=where) from error
    except (ValueError, InternalError) as error:
        raise BadRequest(
            "not a private key, or the passphrase is wrong",
            where=where,
            hint="ssh-keygen -t ed25519 -f FILE makes one",
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise BadRequest(
            "not an ed25519 key", where=where, hint="ssh-keygen -t ed25519 -f FILE makes one"
        )
    return SigningKey(key)


def fingerprint(public_key: bytes) -> str:
    """Return the key's fingerprint as `ssh-keygen -l` prints it."""
    digest = sha256(_key_blob(public_key)).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def _key_blob(public_key: bytes) -> bytes:
    return _ssh_string(KEY_TYPE.encode()) + _ssh_string(public_key)


# -- trusted keys --------------------------------------------------------------------------------

_OPTION = re.compile(r'([a-z-]+)(?:="([^"]*)")?(?:,|$)')
_LINE = re.compile(r'(?P<who>"[^"]*"|[^\s"]+)\s+(?P<rest>\S.*)')
_KEY = re.compile(
    r'(?:(?P<options>(?:[^\s"]|"[^"]*")+)\s+)??'
    r"(?P<type>(?:ssh|sk-ssh|ecdsa|sk-ecdsa)-[a-z0-9@.-]+)\s+(?P<key>[A-Za-z0-9+/]+=*)(?:\s.*)?"
)


def read_signers(path: Path) -> Trusted:
    """Read trusted keys from a file in OpenSSH's allowed_signers format (ssh-keygen(1)).

    Raises BadRequest, NotFound, StorageFailed.
    """
    with open_regular(path) as (descriptor, status):
        if status.st_size > MAX_SIGNERS_BYTES:
            raise BadRequest("too long for a list of signers", where=str(path))
        data = read_range(descriptor, 0, status.st_size)
    return parse_signers(data, str(path))


def parse_signers(data: bytes, where: str) -> Trusted:
    """Parse lines `principals [options] ssh-ed25519 BASE64 [comment]`; `#` starts a comment line.

    Skips a key whose `namespaces` are neither `mstore` nor `*`, a certificate authority, and a key
    of another type: none of these is trusted. Refuses options that limit a key in time, because no
    time in a signature can be trusted. A key that occurs twice keeps the name of its first line.
    Raises BadRequest naming the line.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise BadRequest("a list of signers is UTF-8 text", where=where) from None
    trusted: dict[bytes, str] = {}
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        try:
            found = _signer(stripped)
        except ValueError as error:
            raise BadRequest(
                f"line {number}: {error}",
                where=where,
                hint='a line reads: alice@example.org namespaces="mstore" ssh-ed25519 AAAA...',
            ) from None
        if found is not None:
            trusted.setdefault(*found)
    return trusted


def _signer(line: str) -> tuple[bytes, str] | None:
    """Parse a line to (public key, name); None if it trusts no ed25519 key. Raises ValueError."""
    head = _LINE.fullmatch(line)
    found = head and _KEY.fullmatch(head["rest"])
    if head is None or found is None or CONTROL.search(line.replace("\t", " ")):
        raise ValueError("not a name, a key type and a key")
    if not _may_sign(found["options"] or "") or found["type"] != KEY_TYPE:
        return None
    try:
        blob = base64.b64decode(found["key"], validate=True)
    except binascii.Error:
        raise ValueError("the key is not base64") from None
    public_key = blob[-KEY_BYTES:]
    if blob != _key_blob(public_key):
        raise ValueError("the key is not an ed25519 key")
    return public_key, head["who"].strip('"')


def _may_sign(options: str) -> bool:
    trusted = True
    at = 0
    while at < len(options):
        found = _OPTION.match(options, at)
        if found is None:
            raise ValueError(f"not an option: {quoted(options[at:])}")
        at = found.end()
        name, value = found[1], found[2] or ""
        if name == "namespaces":
            trusted &= not {NAMESPACE, "*"}.isdisjoint(value.split(","))
        elif name == "cert-authority":
            trusted = False
        else:
            raise ValueError(f"mstore does not know the option {quoted(name)}")
    return trusted


# -- signatures ----------------------------------------------------------------------------------


def signed_text(id: SnapshotId | NoteId) -> bytes:
    """Return the signed line, as the content of a file for `ssh-keygen -Y`."""
    kind = "snapshot" if isinstance(id, SnapshotId) else "note"
    return f"mstore 1 {kind} {id}\n".encode()


def signed_message(id: SnapshotId | NoteId) -> bytes:
    """Return the bytes that the key itself signs: the SSHSIG blob of `signed_text`.

    Magic and namespace separate domains: a signature made for anything else (a login, a commit)
    means nothing here, and the reverse.  Source: PROTOCOL.sshsig of OpenSSH, section 2.
    """
    fields = (NAMESPACE.encode(), b"", b"sha512", sha512(signed_text(id)).digest())
    return b"SSHSIG" + b"".join(_ssh_string(field) for field in fields)


def _ssh_string(data: bytes) -> bytes:
    """Encode a string of the SSH protocol (RFC 4251): a big-endian u32 length, and the bytes."""
    return len(data).to_bytes(4, "big") + data


def _subject(record: Note) -> SnapshotId | NoteId:
    """Return what a signature signs."""
    return record.note_ids()[0] if record.notes else record.snapshot_id()


def signature(
    subject: SnapshotId | NoteId,
    snapshot: SnapshotId,
    key: SigningKey,
    author: str = "",
    time_ns: int = 0,
) -> Note:
    """Return the signature of a snapshot, or of a note of that snapshot."""
    value = {"key": key.public_key.hex(), "signature": key.sign(signed_message(subject)).hex()}
    about = () if isinstance(subject, SnapshotId) else (subject,)
    return Note(snapshot, about, SIGNATURE, ED25519, packed(value), author, time_ns)


def sign(
    catalog: Catalog,
    snapshot: SnapshotId,
    key: SigningKey,
    *,
    note: str | None = None,
    signer: str | None = None,
) -> SignatureReport:
    """Sign a snapshot, or a note of it, and publish the signature; an equal one is reused.

    `signer` is a name for people, and proves nothing. Raises BadName, NotFound (no such note),
    BadRequest, Conflict, StorageFailed.
    """
    if not isinstance(key, SigningKey):
        raise BadRequest("a key is what `load_key` gives", where="key")
    if signer is not None and (not signer or not is_text(signer) or CONTROL.search(signer)):
        raise BadRequest(f"cannot sign as {quoted(str(signer))}: not a name")
    known = notes.found(catalog, snapshot)

    def again(id: str) -> Call:
        return call("sign", snapshot.short, "...", note=id)

    subject = snapshot if note is None else notes.named(known, note, snapshot, again)
    author = catalog.author() if signer is None else signer
    record = signature(subject, snapshot, key, author, now_ns())
    for id, one in known.items():
        # Compare the signature too: a bad one with this key must not replace the good one.
        if (one.form, one.notes, one.data) == (SIGNATURE, record.notes, record.data):
            return _report(id, one, {})
    notes.publish(catalog, [record])
    return _report(record.id(), record, {})


def by_subject(
    records: notes.Found, trusted: Trusted
) -> dict[NoteId | None, tuple[SignatureReport, ...]]:
    """Report the signatures among the notes of a snapshot, by the note that they sign.

    Those of the snapshot itself have the key None. They are checked if `cryptography` is installed.
    """
    found: dict[NoteId | None, tuple[SignatureReport, ...]] = {}
    for id, one in records.items():
        if one.form == SIGNATURE:
            subject = next(iter(one.note_ids()), None)
            found[subject] = (*found.get(subject, ()), _report(id, one, trusted))
    return found


def verify(
    catalog: Catalog,
    snapshot: SnapshotId,
    trusted: Trusted,
    *,
    read_data: bool,
    progress: ProgressCallback | None = None,
) -> VerifyReport:
    """Check the signatures of a snapshot and its notes; read_data: also read and check every byte.

    Raises Corrupt, NotFound, Unavailable (no library to check with), StorageFailed.
    """
    began = time.monotonic()
    if not isinstance(trusted, Mapping):
        raise BadRequest("signers are what `read_signers` gives", where="signers")
    require_library()
    known = notes.found(catalog, snapshot)
    signed = by_subject(known, trusted)
    found = signed.get(None, ())
    with contents.held(catalog, [snapshot]):
        read = read_everything(catalog, snapshot, progress) if read_data else 0
    return VerifyReport(
        snapshot=snapshot,
        verified=any(one.state == GOOD_SIGNATURE for one in found),
        signatures=found,
        notes=tuple(one for one in notes.reports(known, signed, every=True) if one.signatures),
        bytes_read=read,
        seconds=time.monotonic() - began,
    )


def _report(id: NoteId, record: Note, trusted: Trusted) -> SignatureReport:
    public_key = bytes.fromhex(record.value["key"])
    made_by_key = None
    with suppress(Unavailable):
        made_by_key = is_good(record)
    return signature_report(
        id,
        record,
        made_by_key=made_by_key,
        key=fingerprint(public_key),
        signer=trusted.get(public_key),
    )


def is_good(record: Note) -> bool:
    """Return whether the key in a signature made it. Raises Unavailable."""
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError as error:
        raise _library_is_missing(error) from error
    value = record.value
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(value["key"]))
        key.verify(bytes.fromhex(value["signature"]), signed_message(_subject(record)))
    except (InvalidSignature, ValueError):
        return False
    return True


# -- what a signature stands for -----------------------------------------------------------------


def read_everything(
    catalog: Catalog, snapshot: SnapshotId, progress: ProgressCallback | None = None
) -> int:
    """Read and check every byte that a SnapshotId names; return how many bytes of blocks.

    Checks records and blocks against their ids, so that the stored content is what was signed. For
    a virtual snapshot that is what its bytes are computed from. Ancestors are named, not read.
    Raises Corrupt, NotFound, StorageFailed.
    """
    record = catalog.snapshot(snapshot)
    plan, coverage = record.plan_id(), record.coverage_id()
    manifests = [record.manifest_id()]
    if plan is not None:
        made = catalog.record(Plan, plan)
        if coverage is None:
            manifests += [*(expert.manifest_id() for expert in made.inputs)]
    if coverage is not None:
        catalog.record(Coverage, coverage)
    blocks = _blocks(catalog, manifests)
    total = sum(blocks.values())
    done = 0
    for block in _in_pack_order(catalog, blocks):
        done += len(catalog.read_block(block))
        if progress is not None:
            progress(Progress("verify", done, total))
    return done


def _blocks(catalog: Catalog, manifests: Iterable[ManifestId]) -> dict[BlockId, int]:
    found: dict[BlockId, int] = {}
    for id in manifests:
        for file in catalog.manifest(id).files:
            for part in file.parts:
                content = catalog.content(part.tensor_id())
                if content.nbytes != part.nbytes:
                    raise Corrupt("not as long as its tensor", where=file.path)
                if isinstance(content, Tensor):
                    for number, block in enumerate(content.block_ids()):
                        found[block] = content.block_length(number, catalog.block_size)
    return found


def _in_pack_order(catalog: Catalog, blocks: Iterable[BlockId]) -> Sequence[BlockId]:
    wanted = list(blocks)
    places = catalog.locate(wanted)
    order = sorted(range(len(wanted)), key=lambda n: (places[n].pack, places[n].offset))
    return [wanted[n] for n in order]
