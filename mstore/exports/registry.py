"""Exports to registries: a snapshot becomes a CNCF ModelPack, whose tag moves last.

Each file is a raw layer, so that ranges of the blob are ranges of the file.  What the repository
has is not sent.  What another repository of the registry has is mounted from there: the store
remembers where it exported blobs to, and knows where snapshots came from.  A guess that is wrong
costs a request.

A signature of the snapshot becomes an artifact that refers to the manifest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

import msgspec

from mstore.exports.destination import (
    ChangesThere,
    Export,
    OutgoingFile,
    Sent,
    Wishes,
    sent_together,
)
from mstore.oci.address import ArtifactAddress
from mstore.oci.artifacts import (
    CONFIG_TYPE,
    EMPTY,
    EMPTY_TYPE,
    FILEPATH,
    MODEL_TYPE,
    TITLE,
    Descriptor,
    artifact,
    index,
    indexed,
    manifest,
    media_type,
)
from mstore.oci.client import INDEXES, MANIFEST, Registry, Upload, digest_of
from mstore.snapshots import notes
from mstore.store.catalog import Catalog
from mstore.store.objects.note import SIGNATURE, Note
from mstore.store.view import SnapshotView
from mstore.terms.errors import BadCheckpoint, BadRequest, MstoreError
from mstore.terms.ids import SnapshotId
from mstore.terms.phrases import Option, phrase

_AT_ONCE: Final = 4
"""Files that are hashed at once, and blobs that the registry is asked for."""
_MOST_LAYERS: Final = 100_000
SIGNATURE_TYPE: Final = "application/vnd.mstore.signature.v1+json"
_SNAPSHOT: Final = "org.mstore.snapshot"
"""The annotation that has the SnapshotId."""
_CREATED: Final = "org.opencontainers.image.created"
_DESCRIPTION: Final = "org.opencontainers.image.description"


class RegistryDestination:
    """A tag of a repository, for one export."""

    def __init__(self, address: str, wishes: Wishes) -> None:
        self.address = ArtifactAddress.parse(address)
        if self.address.digest is not None:
            raise BadRequest(
                "an export moves a tag, and this names a digest",
                where=address,
                hint=f"{self.address.url}:TAG",
            )
        asked = (
            ("private", wishes.private),
            ("branch", wishes.branch is not None),
            ("pull_request", wishes.pull_request),
        )
        for option, is_asked in asked:
            if is_asked:
                raise BadRequest(
                    phrase(
                        "a registry has nothing like {option}",
                        option=Option(option),
                    ),
                    where=address,
                )
        self._registry = Registry(self.address)
        self._tagged: str | None = None
        """The manifest that the tag named before."""

    @property
    def shown(self) -> str:
        """Its address, as errors and reports name it."""
        return f"{self.address.url}:{self.address.tag}"

    def compare(self, outgoing: Export) -> ChangesThere:
        """Return what would change there; changes nothing."""
        with ThreadPoolExecutor(_AT_ONCE, "digest") as pool:
            digests = dict(zip(outgoing.files, pool.map(_digest, outgoing.files), strict=True))
            told = self._tagged = self._registry.manifest_digest(self.address.tag)
            if told == digest_of(self._manifest(outgoing)[0]):
                return ChangesThere(False, (), (), outgoing.files, ())
            theirs = {} if told is None else self._theirs()
            known = set(theirs.values())
            asked = [one for one in dict.fromkeys(digests.values()) if one not in known]
            has = pool.map(self._registry.has_blob, asked)
            known |= {digest for digest, is_there in zip(asked, has, strict=True) if is_there}
        there = tuple(file for file in outgoing.files if digests[file] in known)
        to_send = [file for file in outgoing.files if digests[file] not in known]
        return ChangesThere(
            told is None,
            tuple(file for file in to_send if file.path not in theirs),
            tuple(file for file in to_send if file.path in theirs),
            there,
            tuple(sorted(theirs.keys() - {file.path for file in outgoing.files})),
        )

    def _theirs(self) -> Mapping[str, str]:
        """Return the digests of the tag's files now, by path; none of what is no model."""
        found = self._registry.manifest(self.address.tag)
        if found is not None:
            with suppress(BadCheckpoint):
                layers = artifact(found, self.shown, most=_MOST_LAYERS).layers
                return {one.path: one.blob.digest for one in layers if one.path is not None}
        return {}

    def send(self, outgoing: Export, changes: ChangesThere, tick: Callable[[int], None]) -> Sent:
        """Send the blobs that are missing, then the manifest under its tag, then signatures."""
        own, config = self._manifest(outgoing)
        sources = _sources(outgoing.catalog, self.address.host) if changes.to_send else {}
        by_digest = {_digest(file): file for file in changes.to_send}

        def put(file: OutgoingFile, tick: Callable[[int], None]) -> int:
            return self._put_file(file, outgoing, sources, tick)

        bytes_sent = sum(sent_together(by_digest.values(), put, tick))
        digest = digest_of(own)
        if self._tagged != digest:
            self._put_bytes(config)
            self._registry.put_manifest(self.address.tag, own, MANIFEST)
        for file in outgoing.files:
            outgoing.memo.put_repository(self.address.host, _digest(file), self.address.repository)
        self._refer(outgoing, Descriptor(MANIFEST, digest, len(own), artifact_type=MODEL_TYPE))
        return Sent(digest, f"{self.address.url}@{digest}", bytes_sent)

    def _put_file(
        self,
        file: OutgoingFile,
        outgoing: Export,
        sources: Mapping[bytes, str],
        tick: Callable[[int], None],
    ) -> int:
        """Let the repository have the blob of a file; return how many bytes were sent for that."""
        digest, sent = _digest(file), 0
        remembered = outgoing.memo.repository(self.address.host, digest)
        guessed = None if file.content_id is None else sources.get(file.content_id)
        for source in dict.fromkeys((remembered, guessed)):
            if source and source != self.address.repository:
                is_there = False
                with suppress(MstoreError):
                    is_there = self._registry.mount(digest, source)
                if is_there:
                    tick(file.size)
                    return 0

        def count(more: int) -> None:
            nonlocal sent
            sent += more
            tick(more)

        self._registry.upload(Upload(digest, file.size, file.read), count)
        return sent

    def _put_bytes(self, data: bytes) -> str:
        """Let the repository have a small blob; return its digest."""
        digest = digest_of(data)
        if not self._registry.has_blob(digest):
            read = lambda offset, length: data[offset : offset + length]  # noqa: E731
            self._registry.upload(Upload(digest, len(data), read), lambda _: None)
        return digest

    def _manifest(self, outgoing: Export) -> tuple[bytes, bytes]:
        """Return the manifest and the config; the same snapshot gives the same bytes."""
        record = outgoing.catalog.snapshot(outgoing.snapshot)
        layers = [
            Descriptor(
                media_type(file.path),
                _digest(file),
                file.size,
                {FILEPATH: file.path, TITLE: file.path},
            )
            for file in outgoing.files
        ]
        seconds, rest = divmod(record.time_ns, 10**9)
        created = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{rest:09}Z"
        about: dict[str, object] = {
            "createdAt": created,
            "name": self.address.name,
            "revision": str(outgoing.snapshot),
        }
        if record.author:
            about["authors"] = [record.author]
        config = msgspec.json.encode(
            {
                "descriptor": about,
                "config": {"format": "safetensors"},
                "modelfs": {"type": "layers", "diffIds": [one.digest for one in layers]},
            }
        )
        own = manifest(
            artifact_type=MODEL_TYPE,
            config=Descriptor(CONFIG_TYPE, digest_of(config), len(config)),
            layers=layers,
            annotations={
                _CREATED: created,
                _DESCRIPTION: outgoing.message,
                _SNAPSHOT: str(outgoing.snapshot),
            },
        )
        return own, config

    # -- signatures --------------------------------------------------------------------------------

    def _refer(self, outgoing: Export, subject: Descriptor) -> None:
        """Put the signatures of the snapshot as artifacts that refer to the manifest."""
        records = notes.notes_on(outgoing.catalog, outgoing.snapshot)
        missing: list[Descriptor] = []
        for note in records.values():
            if note.form != SIGNATURE or note.notes:
                continue
            data = _signature(outgoing.catalog, note)
            layer = Descriptor(SIGNATURE_TYPE, digest_of(data), len(data))
            own = manifest(
                artifact_type=SIGNATURE_TYPE,
                config=Descriptor(EMPTY_TYPE, digest_of(EMPTY), len(EMPTY)),
                layers=[layer],
                subject=Descriptor(MANIFEST, subject.digest, subject.size),
                annotations={_SNAPSHOT: str(outgoing.snapshot)},
            )
            digest = digest_of(own)
            is_linked = False
            if self._registry.manifest_digest(digest) is None:
                self._put_bytes(EMPTY)
                self._put_bytes(data)
                is_linked = self._registry.put_manifest(digest, own, MANIFEST)
            if not is_linked:
                missing.append(Descriptor(MANIFEST, digest, len(own), artifact_type=SIGNATURE_TYPE))
        if missing and not self._registry.has_referrers(subject.digest):
            self._list_referrers(subject.digest, missing)

    def _list_referrers(self, subject: str, more: list[Descriptor]) -> None:
        """Add to the list that stands for the registry's own, under a tag made of the digest."""
        tag = subject.replace(":", "-")
        found = self._registry.manifest(tag)
        listed = [] if found is None else indexed(found, self.shown)
        known = {one.digest for one in listed}
        missing = [one for one in more if one.digest not in known]
        if missing:
            self._registry.put_manifest(tag, index([*listed, *missing]), INDEXES[0])


def _digest(file: OutgoingFile) -> str:
    return f"sha256:{file.sha256()}"


def _sources(catalog: Catalog, host: str) -> Mapping[bytes, str]:
    """Return repositories of a registry from which snapshots here came, by what files contain."""
    found: dict[bytes, str] = {}
    start = f"oci://{host}/"
    for id in {ref.snapshot_id() for ref in catalog.refs().values()}:
        with suppress(MstoreError):
            origin = catalog.snapshot(id).origin
            if origin is not None and origin.url.startswith(start):
                view = SnapshotView(catalog, id)
                repository = origin.url.removeprefix(start)
                found.update((view.content_id(path), repository) for path in view.files)
    return found


def _signature(catalog: Catalog, note: Note) -> bytes:
    """Return a signature as JSON, with the record whose hash the signed id is."""
    return msgspec.json.encode(
        {
            "snapshot": str(SnapshotId(note.snapshot)),
            "record": catalog.snapshot(SnapshotId(note.snapshot)).encode(),
            "algorithm": note.key,
            **note.value,
            "signer": note.author,
        }
    )
