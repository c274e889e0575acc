"""An artifact in a registry, at one digest, as a repository of files.

A raw layer is a file, and ranges of its blob are ranges of the file.  A tar says what it has only
when it was read to its end: it is unpacked once before the scan, to learn the names, sizes and
digests of its files, and lies in scratch while they are read.  Of large layers one at a time lies
there: a second one takes its place, and who comes back to the first unpacks it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Final

import msgspec

from mstore import fs
from mstore.checkpoint.origin import Origin
from mstore.checkpoint.paths import quoted
from mstore.checkpoint.reading import read_part
from mstore.oci.address import ArtifactAddress, is_address
from mstore.oci.artifacts import (
    Artifact,
    ArtifactLayer,
    Descriptor,
    artifact,
    indexed,
    is_index,
    several,
)
from mstore.oci.client import INDEXES, MANIFESTS, FoundManifest, Registry
from mstore.oci.tars import members
from mstore.origins.repository import RemoteFile
from mstore.terms.errors import BadCheckpoint, NotFound

_MOST_FILES: Final = 100_000
_DEEPEST: Final = 4
"""Indexes, one in the other."""
_STAYING: Final = 64 << 20
"""Bytes of small layers that stay unpacked, all together."""
_ATTESTATION: Final = "vnd.docker.reference.type"
"""Marks what is in an index beside the models: how they were made."""


class _Member(msgspec.Struct, frozen=True):
    """A file of an unpacked tar: where its bytes lie while the tar is there."""

    layer: ArtifactLayer
    path: Path


class _Unpacked:
    """Tar layers in scratch.  Calls come from any thread."""

    def __init__(self, registry: Registry, scratch: Path) -> None:
        self._registry = registry
        self._scratch = scratch
        self._lock = Lock()
        self._there: dict[str, int] = {}
        """Layers that are unpacked, by their digests, with their bytes."""

    def files(self, layer: ArtifactLayer) -> list[tuple[RemoteFile, _Member]]:
        """Return the files of a layer, which is there then."""
        with self._lock:
            return self._unpack(layer)

    def read(self, member: _Member, offset: int, length: int) -> bytes:
        """Return these bytes of a file, fewer at its end."""
        with self._lock:
            if member.layer.blob.digest not in self._there:
                self._unpack(member.layer)
            return read_part(member.path, offset, length)

    def _unpack(self, layer: ArtifactLayer) -> list[tuple[RemoteFile, _Member]]:
        digest = layer.blob.digest
        for other, size in list(self._there.items()):
            if size > _STAYING or other == digest:
                fs.remove_tree(self._directory(other))
                del self._there[other]
        directory = self._directory(digest)
        # An attempt that broke may have left a part.
        fs.remove_tree(directory)
        fs.make_directories(directory)
        found: list[tuple[RemoteFile, _Member]] = []
        pieces = self._registry.stream(digest, layer.blob.size)
        for member in members(
            pieces,
            compression=layer.compression,
            size=layer.blob.size,
            most_files=_MOST_FILES,
            where=self._registry.shown,
        ):
            # By its number: no name of a stranger becomes a path here.
            file = fs.NewFile(directory / str(len(found)))
            try:
                content = sha256()
                for piece in member.pieces():
                    content.update(piece)
                    file.append(piece)
            finally:
                file.close()
            told = RemoteFile(member.path, member.size, content.hexdigest(), is_git=False)
            found.append((told, _Member(layer, file.path)))
        size = sum(told.size for told, _ in found)
        staying = sum(one for one in self._there.values() if one <= _STAYING)
        # What has no room among the small ones goes with the next large one.
        self._there[digest] = size if staying + size <= _STAYING else max(size, _STAYING + 1)
        return found

    def _directory(self, digest: str) -> Path:
        return self._scratch / "layers" / digest.removeprefix("sha256:")


def recorded(origin: Origin) -> ArtifactAddress | None:
    """Return the address that a snapshot of this origin was added from; None: from no registry."""
    if not is_address(origin.url):
        return None
    chosen = f":{origin.revision}" if origin.revision else f"@{origin.commit}"
    return ArtifactAddress.parse(f"{origin.url}{chosen}")


def now(origin: Origin, address: ArtifactAddress) -> str:
    """Return the digest that an address names now.  Raises NotFound, Unavailable."""
    del origin
    with Registry(address) as registry:
        digest = registry.manifest_digest(address.reference)
    if digest is None:
        raise NotFound("the registry has no such artifact any more", where=str(address))
    return digest


class RegistryRepository:
    """The artifact that an address names now.  scratch: a directory for tars that are unpacked.

    Every call raises NotFound, Unavailable (the registry does not answer, or lets nobody in), and
    BadCheckpoint for a manifest that cannot be used, and bytes that have not their digest.
    """

    def __init__(self, address: ArtifactAddress, scratch: Path) -> None:
        self.address = address
        self._registry = Registry(address)
        found = self._registry.manifest(address.reference)
        if found is None:
            raise NotFound(
                f"the registry has no artifact {quoted(address.reference)} in this repository, or "
                "shows it to nobody without a login",
                where=self.shown,
                hint=f"check the name; if it is private: docker login {address.host}",
            )
        self._digest = found.digest
        self._artifact = self._chosen(found)
        self._unpacked = _Unpacked(self._registry, scratch)
        self._blobs: dict[str, str | _Member] = {}
        """Of each file, the blob that it is, or where it lies in a tar."""

    @property
    def shown(self) -> str:
        """Its address, as errors name it."""
        return str(self.address)

    @property
    def bases(self) -> tuple[str, ...]:
        """None: a manifest names no models of the Hub."""
        return ()

    @property
    def origin(self) -> Origin:
        """What a snapshot of it records: the tag, and the digest that it names now."""
        tag = self.address.tag if self.address.digest is None else ""
        return Origin(self.address.url, tag, self._digest)

    def files(self) -> Iterator[RemoteFile]:
        """Yield the files, as the manifest and its tars name them: unchecked, in any order."""
        seen: set[RemoteFile] = set()
        for layer in self._artifact.layers:
            for file, place in self._files_of(layer):
                # Tools put a licence or a chat template into two layers.
                if file not in seen:
                    seen.add(file)
                    self._blobs[file.path] = place
                    yield file

    def _files_of(self, layer: ArtifactLayer) -> Iterator[tuple[RemoteFile, str | _Member]]:
        if layer.path is None:
            yield from self._unpacked.files(layer)
            return
        digest = layer.blob.digest.removeprefix("sha256:")
        yield RemoteFile(layer.path, layer.blob.size, digest, is_git=False), layer.blob.digest

    def cached(self, file: RemoteFile) -> Path | None:
        """Return None: no user's cache has files of registries."""
        del file
        return None

    def read(
        self,
        file: RemoteFile,
        offset: int,
        length: int,
        tick: Callable[[int], None] | None = None,
    ) -> bytes:
        """Return these bytes of a file, fewer at its end; in any thread."""
        wanted = min(length, file.size - offset)
        if wanted <= 0:
            return b""
        place = self._blobs[file.path]
        if isinstance(place, str):
            data = self._registry.read(place, offset, wanted, tick)
        else:
            data = self._unpacked.read(place, offset, wanted)
            if tick is not None:
                tick(len(data))
        if len(data) != wanted:
            raise BadCheckpoint(
                f"the registry sent another length of {quoted(file.path)} than the {file.size} "
                "bytes that the manifest lists",
                where=self.shown,
            )
        return data

    def other_bytes(self, file: RemoteFile) -> BadCheckpoint:
        """Return the error for a file that has not the digest that the manifest lists."""
        return BadCheckpoint(
            f"the registry sent other bytes of {quoted(file.path)} than the manifest lists",
            where=self.shown,
            hint="run the command again; if it stays, what answers is no faithful registry",
        )

    def _chosen(self, found: FoundManifest) -> Artifact:
        """Return the artifact of a manifest, or the only one of an index."""
        for _ in range(_DEEPEST):
            if not is_index(found):
                return artifact(found, self.shown, most=_MOST_FILES)
            models = [one for one in indexed(found, self.shown) if _may_be_model(one)]
            digests = list(dict.fromkeys(one.digest for one in models))
            if len(digests) != 1:
                at = f"oci://{self.address.host}/{self.address.repository}"
                raise several(self.shown, digests, at)
            below = self._registry.manifest(digests[0])
            if below is None:
                raise BadCheckpoint(
                    f"is an index that names {digests[0]}, which the registry has not",
                    where=self.shown,
                )
            found = below
        raise BadCheckpoint("is an index of indexes of indexes", where=self.shown)


def _may_be_model(one: Descriptor) -> bool:
    return one.media_type in (*MANIFESTS, *INDEXES) and _ATTESTATION not in one.annotations
