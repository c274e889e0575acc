"""A repository at a registry: its manifests and blobs, by the OCI distribution specification.

Blobs go up in chunks: after a break, the registry says how much it has, and the upload goes on
there.  Safe for any number of threads.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Final, NamedTuple, Self, TypeVar

from mstore.oci.address import ArtifactAddress, is_digest
from mstore.oci.connection import (
    RegistryConnection,
    RequestRefused,
    is_of_request,
    limited,
    wait_for,
)
from mstore.terms.errors import BadCheckpoint, MstoreError, Unavailable
from mstore.terms.tries import BUSY, TRIES

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")
CHUNK_BYTES: Final = 16 << 20
"""Bytes of a request that sends a part of a blob; smaller blobs take one."""
MOST_MANIFEST_BYTES: Final = 4 << 20
"""The specification's limit."""
_TO_FINISH: Final = 900.0
"""Seconds.  At the end of an upload, a registry may read all of the blob again."""
_PIECE: Final = 1 << 20
_MOST_SKIPPED: Final = 64 << 20
"""Bytes of an answer that are not kept, where a registry sends whole blobs for ranges."""
INDEXES: Final = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
MANIFESTS: Final = (MANIFEST, "application/vnd.docker.distribution.manifest.v2+json")


class FoundManifest(NamedTuple):
    """A manifest as a registry has it: its bytes, their digest, what the registry calls it."""

    data: bytes
    digest: str
    media_type: str


class Upload(NamedTuple):
    """A blob to send: its digest, its size, what gives its bytes (offset, length)."""

    digest: str
    size: int
    read: Callable[[int, int], bytes]


class Registry:
    """The repository of an address, at its registry.

    Every call raises NotFound, Unavailable (the registry does not answer, or lets nobody in), and
    BadCheckpoint for bytes that have not the digest that they are asked for by.
    """

    def __init__(self, address: ArtifactAddress, *, patience: float = 60.0) -> None:
        self.address = address
        self._connection = RegistryConnection(address, patience)
        self._answer = self._connection.answer
        self._asked = self._connection.asked
        self._require = self._connection.require
        self._told = self._connection.told

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._connection.close()

    @property
    def shown(self) -> str:
        """The address, as errors name it."""
        return str(self.address)

    def _bad(self, what: str) -> BadCheckpoint:
        return BadCheckpoint(what, where=self.shown)

    # -- manifests ---------------------------------------------------------------------------------

    def manifest(self, reference: str) -> FoundManifest | None:
        """Return the manifest of a tag or a digest; None if there is none."""
        headers = {"Accept": ", ".join((*MANIFESTS, *INDEXES))}

        def ask() -> FoundManifest | None:
            with self._answer("GET", f"manifests/{reference}", headers=headers) as answer:
                if answer.status_code == 404:
                    return None
                self._require(answer, 200)
                data = limited(answer, MOST_MANIFEST_BYTES)
            if data is None:
                raise self._bad(f"the manifest {reference} has more than 4 MiB")
            kind = str(answer.headers.get("Content-Type", "")).partition(";")[0].strip()
            return FoundManifest(data, digest_of(data), kind)

        found = self._asked(ask)
        if found is not None and is_digest(reference) and found.digest != reference:
            raise self._bad(f"the registry sent another manifest than {reference}")
        return found

    def manifest_digest(self, reference: str) -> str | None:
        """Return the digest of a manifest, as the registry tells it; None if there is none."""
        headers = {"Accept": ", ".join((*MANIFESTS, *INDEXES))}

        def ask() -> str | None:
            with self._answer("HEAD", f"manifests/{reference}", headers=headers) as answer:
                if answer.status_code == 404:
                    return None
                self._require(answer, 200)
            told = str(answer.headers.get("Docker-Content-Digest", ""))
            return told if is_digest(told) else ""

        found = self._asked(ask)
        if found == "":
            # The specification lets a registry leave it out.
            whole = self.manifest(reference)
            return None if whole is None else whole.digest
        return found

    def put_manifest(self, reference: str, data: bytes, media_type: str) -> bool:
        """Make a tag, or a digest, name this manifest; return whether it was linked to its subject.

        A registry that does not know subjects leaves that to the client.
        """

        def ask() -> bool:
            headers = {"Content-Type": media_type}
            with self._answer(
                "PUT", f"manifests/{reference}", headers=headers, content=data, push=True
            ) as answer:
                self._require(answer, 201)
            return "OCI-Subject" in answer.headers

        return self._asked(ask)

    def has_referrers(self, digest: str) -> bool:
        """Return whether the registry itself lists the manifests whose subject a digest is."""

        def ask() -> bool:
            with self._answer("GET", f"referrers/{digest}") as answer:
                return answer.status_code == 200

        return self._asked(ask)

    # -- blobs -------------------------------------------------------------------------------------

    def has_blob(self, digest: str) -> bool:
        """Return whether the repository has a blob."""

        def ask() -> bool:
            with self._answer("HEAD", f"blobs/{digest}") as answer:
                if answer.status_code != 404:
                    self._require(answer, 200)
            return answer.status_code == 200

        return self._asked(ask)

    def read(
        self,
        digest: str,
        offset: int,
        length: int,
        tick: Callable[[int], None] | None = None,
    ) -> bytes:
        """Return these bytes of a blob, unchecked; fewer at its end.

        tick: called with the bytes that arrived, now and then; what it raises ends the request.  If
        the registry is asked again, it is told less than nothing.
        """

        def ask() -> bytes:
            pieces: list[bytes] = []
            got, skip = 0, offset
            headers = {"Range": f"bytes={offset}-{offset + length - 1}"}
            try:
                with self._answer("GET", f"blobs/{digest}", headers=headers) as answer:
                    if answer.status_code == 416:
                        return b""
                    self._require(answer, 200, 206)
                    # Some proxies send the whole blob.
                    skip = 0 if answer.status_code == 206 else offset
                    if skip > _MOST_SKIPPED:
                        raise Unavailable(
                            "the registry sends no ranges of blobs",
                            where=self.shown,
                            hint=f"oras pull -o DIR {self.address.bare}, and add the directory",
                        )
                    for piece in answer.iter_bytes(_PIECE):
                        kept = piece[skip:]
                        skip -= len(piece) - len(kept)
                        pieces.append(kept)
                        got += len(kept)
                        if tick is not None and kept:
                            tick(len(kept))
                        if got >= length:
                            break
            except BaseException:
                if tick is not None and got:
                    tick(-got)
                raise
            return b"".join(pieces)[:length]

        return self._asked(ask) if length > 0 else b""

    def stream(self, digest: str, size: int) -> Iterator[bytes]:
        """Yield the pieces of a blob; after a break, it goes on where it was.

        Raises BadCheckpoint at the end if they have not the digest.
        """
        found, at = sha256(), 0
        while at < size:
            piece = self.read(digest, at, min(CHUNK_BYTES, size - at))
            if not piece:
                raise self._bad(f"the blob {digest} is shorter than the {size} bytes it should be")
            found.update(piece)
            at += len(piece)
            yield piece
        if f"sha256:{found.hexdigest()}" != digest:
            raise self._bad(f"the registry sent other bytes than those of {digest}")

    def mount(self, digest: str, source: str) -> bool:
        """Let the repository have a blob of another one of the registry; return whether it could.

        source: the other repository.
        """
        query = {"mount": digest, "from": source}

        def ask() -> str | None:
            with self._answer(
                "POST", "blobs/uploads/", query=query, push=True, also=(source,)
            ) as answer:
                if answer.status_code == 201:
                    return None
                if answer.status_code in BUSY:
                    self._require(answer, 201)
                # 202: the registry began an upload.  Anything else: it cannot.
                return str(answer.headers.get("Location", ""))

        begun = self._asked(ask)
        if begun:
            with suppress(MstoreError):
                self._asked(lambda: self._cancel(begun))
        return begun is None

    def _cancel(self, place: str) -> None:
        with self._answer("DELETE", place, push=True):
            pass

    def upload(self, blob: Upload, tick: Callable[[int], None]) -> None:
        """Send a blob.  tick: called with the bytes that the registry has more than ever before."""
        most = 0

        def reached(at: int) -> None:
            nonlocal most
            if at > most:
                tick(at - most)
                most = at

        for left in reversed(range(3)):
            try:
                self._upload(blob, reached)
            except RequestRefused as error:
                # After a break, some registries have a part twice.
                if error.status not in (400, 404, 416) or not left:
                    raise self._told(error) from error
                continue
            return

    def _upload(self, blob: Upload, reached: Callable[[int], None]) -> None:
        place = self._begin()
        at = failures = 0
        while blob.size > CHUNK_BYTES and at < blob.size:
            data = blob.read(at, min(CHUNK_BYTES, blob.size - at))
            try:
                place, at = self._send_chunk(place, at, data)
                failures = 0
            except Exception as error:
                if not is_of_request(error):
                    raise
                wait = wait_for(error, failures)
                failures += 1
                is_over = isinstance(error, RequestRefused) and error.status in (404, 416)
                if failures == TRIES or (wait is None and not is_over):
                    raise self._told(error) from error
                time.sleep(wait or 0.0)
                place, at = self._where(place) or (self._begin(), 0)
            reached(at)
        rest = b"" if blob.size > CHUNK_BYTES else blob.read(0, blob.size)
        self._finish(place, blob, rest)
        reached(blob.size)

    def _begin(self) -> str:
        """Begin an upload; return its address."""

        def ask() -> str:
            with self._answer("POST", "blobs/uploads/", push=True) as answer:
                self._require(answer, 202)
            place = str(answer.headers.get("Location", ""))
            if not place:
                raise Unavailable("the registry does not say where to upload", where=self.shown)
            return place

        return self._asked(ask)

    def _send_chunk(self, place: str, at: int, data: bytes) -> tuple[str, int]:
        """Send the next bytes; return the upload's new address, and how many bytes it has."""
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Range": f"{at}-{at + len(data) - 1}",
        }
        with self._answer("PATCH", place, headers=headers, content=data, push=True) as answer:
            self._require(answer, 202)
        told = _end(answer)
        return str(answer.headers.get("Location", place)), at + len(data) if told is None else told

    def _where(self, place: str) -> tuple[str, int] | None:
        """Return the address of an upload and how many bytes it has; None if it is gone."""

        def ask() -> tuple[str, int] | None:
            with self._answer("GET", place, push=True) as answer:
                if answer.status_code != 204:
                    return None
            return str(answer.headers.get("Location", place)), _end(answer) or 0

        return self._asked(ask)

    def _finish(self, place: str, blob: Upload, rest: bytes) -> None:
        """Close an upload with its last bytes; also where an answer was lost.

        Raises RequestRefused.
        """
        headers = {"Content-Type": "application/octet-stream"}
        query = {"digest": blob.digest}
        for number in range(TRIES):
            try:
                with self._answer(
                    "PUT",
                    place,
                    query=query,
                    headers=headers,
                    content=rest,
                    push=True,
                    patience=_TO_FINISH,
                ) as answer:
                    self._require(answer, 201)
                return
            except Exception as error:
                if not is_of_request(error):
                    raise
                # The answer may have been lost, and not the blob.
                if self.has_blob(blob.digest):
                    return
                wait = wait_for(error, number)
                if wait is None or number == TRIES - 1:
                    if isinstance(error, RequestRefused):
                        raise
                    raise self._told(error) from error
                time.sleep(wait)
                if rest:
                    place = self._begin()


def digest_of(data: bytes) -> str:
    """Return the digest of bytes, as manifests have it."""
    return f"sha256:{sha256(data).hexdigest()}"


def _end(answer: httpx2.Response) -> int | None:
    """Return how many bytes of an upload a registry has; None if it does not say."""
    found = re.fullmatch(r"(?:bytes=)?0-(\d+)", str(answer.headers.get("Range", "")))
    # `0-0` is what registries say of none, and of one byte.
    return None if found is None else int(found[1]) + 1 if int(found[1]) else 0
