"""Artifacts of models as registries have them: manifests, and what their layers are.

A manifest lists layers: blobs with a media type, a size, a digest and annotations.  A layer is one
file as it is, or a tar of files, compressed or not.  Those that are read:

    CNCF ModelPack v0.0.7   modctl and others (docs/design/051-registries.md)
    KitOps                  its own media types, and ModelPack's
    Docker Model Runner     its own (config v0.1 and v0.2), and ModelPack's

What a manifest says is a stranger's: sizes and counts are limited, names are checked by who uses
them (`origins.files`), and a layer of an unknown type is an error.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from mstore.checkpoint.paths import quoted
from mstore.checkpoint.strict_json import parse_object
from mstore.oci.address import is_digest
from mstore.oci.client import INDEXES, MANIFEST, FoundManifest
from mstore.terms.errors import BadCheckpoint
from mstore.terms.phrases import few

MODEL_TYPE: Final = "application/vnd.cncf.model.manifest.v1+json"
CONFIG_TYPE: Final = "application/vnd.cncf.model.config.v1+json"
EMPTY_TYPE: Final = "application/vnd.oci.empty.v1+json"
EMPTY: Final = b"{}"
FILEPATH: Final = "org.cncf.model.filepath"
TITLE: Final = "org.opencontainers.image.title"
_PATHS: Final = (FILEPATH, "org.cnai.model.filepath", TITLE)
"""Annotations that name a layer's file, the first that there is."""
_PLAIN: Final = re.compile(
    r"application/vnd\.cncf\.model\.(?P<part>[a-z]+(?:\.config)?)\.v1\.(?:raw|safetensors|gguf)"
    r"|application/vnd\.docker\.ai\.(?:safetensors|gguf\.v3|dduf|mmproj|license|model\.file"
    r"|chat\.template\.jinja)"
)
_TAR: Final = re.compile(
    r"application/vnd\.cncf\.model\.(?P<part>[a-z]+(?:\.config)?)\.v1\.tar(?:\+(?P<packed>\w+))?"
    r"|application/vnd\.kitops\.modelkit\.(?P<kit>[a-z]+)\.v1\.tar(?:\+(?P<kit_packed>\w+))?"
    r"|application/vnd\.docker\.ai\.(?:vllm\.config|dir)\.tar"
)
_DOCKER: Final = "application/vnd.docker.ai."
_DOCKER_NAMES: Final = {
    "license": "LICENSE",
    "chat.template.jinja": "chat_template.jinja",
    "mmproj": "model.mmproj",
    "dduf": "model.dduf",
}
_WEIGHTS: Final = {"safetensors": ".safetensors", "gguf.v3": ".gguf"}
COMPRESSIONS: Final = ("", "gzip", "zstd")
_DATA: Final = "dataset"
_MOST_CONTAINERS: Final = 300_000
_MOST_BYTES: Final = 1 << 40
"""Of a blob.  A registry takes a hundredth of that, and what reads a file lists its blocks."""


class Descriptor(msgspec.Struct, frozen=True):
    """A blob or manifest that a manifest names."""

    media_type: str
    digest: str
    size: int
    annotations: Mapping[str, str] = {}
    artifact_type: str = ""

    def to_json(self) -> dict[str, object]:
        """Return what a manifest has of it."""
        told: dict[str, object] = {
            "mediaType": self.media_type,
            "digest": self.digest,
            "size": self.size,
        }
        if self.artifact_type:
            told["artifactType"] = self.artifact_type
        return {**told, "annotations": dict(self.annotations)} if self.annotations else told


class ArtifactLayer(msgspec.Struct, frozen=True):
    """A layer of an artifact.

    path: of its one file, as the manifest names it, unchecked; None: it is a tar, whose members
    have paths. compression: of the tar, one of `COMPRESSIONS`.
    """

    blob: Descriptor
    path: str | None
    compression: str = ""


class Artifact(msgspec.Struct, frozen=True):
    """A model's manifest: its digest and its layers, without those of data sets."""

    digest: str
    layers: tuple[ArtifactLayer, ...]


def is_index(found: FoundManifest) -> bool:
    """Return whether a manifest is an index of others."""
    return _kind(_parsed(found.data, ""), found) in INDEXES


def indexed(found: FoundManifest, where: str) -> list[Descriptor]:
    """Return the manifests that an index names.  Raises BadCheckpoint."""
    listed = _parsed(found.data, where).get("manifests")
    if not isinstance(listed, list):
        raise BadCheckpoint("the index has no list of manifests", where=where)
    return [_descriptor(one, where) for one in listed]


def artifact(found: FoundManifest, where: str, *, most: int) -> Artifact:
    """Return the artifact that a manifest describes.  Raises BadCheckpoint.

    most: layers that it may have.
    """
    told = _parsed(found.data, where)
    if _kind(told, found) in INDEXES:
        raise BadCheckpoint("is an index, where a manifest should be", where=where)
    listed = told.get("layers")
    if not isinstance(listed, list):
        raise BadCheckpoint("the manifest has no list of layers", where=where)
    if len(listed) > most:
        raise BadCheckpoint(
            f"the manifest has {len(listed)} layers; the limit is {most}", where=where
        )
    blobs = [_descriptor(one, where) for one in listed]
    return Artifact(found.digest, tuple(_layers(blobs, where)))


def _parsed(data: bytes, where: str) -> dict[str, object]:
    return parse_object(data, what="the manifest", where=where, max_containers=_MOST_CONTAINERS)


def _kind(told: Mapping[str, object], found: FoundManifest) -> object:
    """Return the media type of a manifest: what it says itself, else what the registry says."""
    return told.get("mediaType") or found.media_type or MANIFEST


def _descriptor(told: object, where: str) -> Descriptor:
    match told:
        case {"mediaType": str(kind), "digest": str(digest), "size": int(size), **more}:
            if is_digest(digest) and 0 <= size <= _MOST_BYTES:
                marks = more.get("annotations")
                named = marks if isinstance(marks, dict) else {}
                texts = {key: one for key, one in named.items() if isinstance(one, str)}
                artifact_type = more.get("artifactType")
                own = artifact_type if isinstance(artifact_type, str) else ""
                return Descriptor(kind, digest, size, texts, own)
    raise BadCheckpoint(
        "the manifest names a blob without media type, SHA-256 digest or a size up to 1 TiB",
        where=where,
    )


def _layers(blobs: Sequence[Descriptor], where: str) -> Iterator[ArtifactLayer]:
    counts = Counter(blob.media_type.removeprefix(_DOCKER) for blob in blobs)
    numbers: Counter[str] = Counter()
    for blob in blobs:
        tar = _TAR.fullmatch(blob.media_type)
        plain = _PLAIN.fullmatch(blob.media_type)
        if tar is not None:
            packed = tar["packed"] or tar["kit_packed"] or ""
            if packed not in COMPRESSIONS:
                raise BadCheckpoint(f"a layer is compressed by {quoted(packed)}", where=where)
            if _DATA not in (tar["part"], tar["kit"]):
                yield ArtifactLayer(blob, None, packed)
        elif plain is None:
            raise BadCheckpoint(
                f"a layer has the media type {quoted(blob.media_type)}, which is none of a model",
                where=where,
            )
        elif plain["part"] != _DATA:
            kind = blob.media_type.removeprefix(_DOCKER)
            numbers[kind] += 1
            path = _path(blob.annotations) or _docker_name(kind, numbers[kind], counts[kind])
            if path is None:
                raise BadCheckpoint(f"the layer {blob.digest} names no file", where=where)
            yield ArtifactLayer(blob, path)


def _path(annotations: Mapping[str, str]) -> str | None:
    found = next((annotations[key] for key in _PATHS if annotations.get(key)), None)
    return None if found is None else found.removeprefix("./")


def _docker_name(kind: str, number: int, count: int) -> str | None:
    """Return the name that Docker Model Runner gives the file of a layer that has none.

    number: which of the layers of its kind it is, from 1.
    """
    if kind in _WEIGHTS:
        end = _WEIGHTS[kind]
        return f"model{end}" if count == 1 else f"model-{number:05}-of-{count:05}{end}"
    name = _DOCKER_NAMES.get(kind)
    return name if name is None or number == 1 else f"{name}-{number}"


def several(where: str, digests: Collection[str], repository: str) -> BadCheckpoint:
    """Return the error for an index of several models, with their addresses."""
    found = [f"{repository}@{digest}" for digest in digests]
    return BadCheckpoint(
        f"is an index of {len(found)} artifacts; add one of them by its digest",
        where=where,
        hint=few(found),
    )


# -- what mstore writes --------------------------------------------------------------------------

_DOCUMENTS: Final = re.compile(r"(?i)(?:.*\.(?:md|rst|pdf|html?|png|jpe?g|svg)|license.*|notice.*)")
_CODE: Final = re.compile(r"(?i).*\.(?:py|sh|cu|cpp|c|h|ipynb)")
_CONFIGS: Final = re.compile(
    r"(?i).*\.(?:json|jsonl|txt|model|jinja|ya?ml|toml|vocab|tiktoken|cfg)"
)


def media_type(path: str) -> str:
    """Return the media type of a file as a raw layer of a ModelPack."""
    name = path.rpartition("/")[2]
    part = "weight"
    if _CONFIGS.fullmatch(name):
        part = "weight.config"
    if _DOCUMENTS.fullmatch(name):
        part = "doc"
    if _CODE.fullmatch(name):
        part = "code"
    return f"application/vnd.cncf.model.{part}.v1.raw"


def manifest(
    *,
    artifact_type: str,
    config: Descriptor,
    layers: Sequence[Descriptor],
    subject: Descriptor | None = None,
    annotations: Mapping[str, str] | None = None,
) -> bytes:
    """Return the bytes of a manifest; the same parts give the same bytes."""
    told: dict[str, object] = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": artifact_type,
        "config": config.to_json(),
        "layers": [one.to_json() for one in layers],
    }
    if subject is not None:
        told["subject"] = subject.to_json()
    if annotations:
        told["annotations"] = dict(annotations)
    return msgspec.json.encode(told)


def index(manifests: Sequence[Descriptor]) -> bytes:
    """Return the bytes of an index."""
    return msgspec.json.encode(
        {
            "schemaVersion": 2,
            "mediaType": INDEXES[0],
            "manifests": [one.to_json() for one in manifests],
        }
    )
