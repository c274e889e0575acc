"""The manifest of an artifact, or an index of manifests, as a registry sends it."""

from __future__ import annotations

from collections.abc import Iterable

from mutation import Form

from mstore.oci import artifacts
from mstore.oci.address import is_digest
from mstore.oci.artifacts import Descriptor
from mstore.oci.client import MANIFEST, FoundManifest, digest_of

FORM = Form.JSON


def target(data: bytes) -> None:
    found = FoundManifest(data, digest_of(data), "")
    if artifacts.is_index(found):
        assert all(is_digest(one.digest) for one in artifacts.indexed(found, "input"))
    else:
        read = artifacts.artifact(found, "input", most=1000)
        assert all(one.compression in artifacts.COMPRESSIONS for one in read.layers)
        assert all(0 <= one.blob.size <= 1 << 40 for one in read.layers)


def seeds() -> Iterable[bytes]:
    blob = digest_of(b"")
    kinds = ("cncf.model.weight.v1.raw", "kitops.modelkit.model.v1.tar+gzip", "docker.ai.license")
    layers = [
        Descriptor(f"application/vnd.{kind}", blob, number, {artifacts.FILEPATH: f"{number}.json"})
        for number, kind in enumerate(kinds)
    ]
    config = Descriptor(artifacts.CONFIG_TYPE, blob, 0)
    whole = artifacts.manifest(artifact_type=artifacts.MODEL_TYPE, config=config, layers=layers)
    yield whole
    yield artifacts.index([Descriptor(MANIFEST, digest_of(whole), len(whole))])
