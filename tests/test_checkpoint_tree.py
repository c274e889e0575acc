"""The Hugging Face cache: a model's snapshot is a checkpoint, its links lead to its own blobs."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import pytest
from checkpoints import safetensors_bytes
from huggingface_hub.file_download import repo_folder_name

from mstore.checkpoint.directory import CheckpointLimits, scan
from mstore.checkpoint.tree import given_name
from mstore.terms.errors import BadCheckpoint
from mstore.terms.sizes import format_size
from mstore_cli.spelling import Typed

REVISION = "a" * 40
WEIGHTS = safetensors_bytes([("a", "U8", (2,), b"aa")])


def cached_model(cache: Path, repo_id: str = "org/tiny-model") -> Path:
    """A model as the Hub's client leaves it in its cache; returns models--ORG--NAME."""
    model = cache / repo_folder_name(repo_id=repo_id, repo_type="model")
    assert model.name == "models" + huggingface_hub.constants.REPO_ID_SEPARATOR + repo_id.replace(
        "/", huggingface_hub.constants.REPO_ID_SEPARATOR
    )
    files = {"model.safetensors": WEIGHTS, "config.json": b"{}", "sub/vocab.txt": b"v"}
    for directory in ("blobs", "refs", f"snapshots/{REVISION}/sub"):
        (model / directory).mkdir(parents=True)
    (model / "refs" / "main").write_text(REVISION)
    for name, content in files.items():
        blob = model / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        pointer = model / "snapshots" / REVISION / name
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    return model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return cached_model(tmp_path / "hub")


def found(path: Path) -> list[str]:
    return [file.path for file in scan(path).files]


def test_the_hub_s_client_knows_this_cache(model: Path) -> None:
    """The cache that these tests make is one: the Hub's own client reads it without a warning."""
    cache = huggingface_hub.scan_cache_dir(model.parent)
    assert not cache.warnings
    (repository,) = cache.repos
    (revision,) = repository.revisions
    assert (repository.repo_id, revision.commit_hash) == ("org/tiny-model", REVISION)
    assert {file.file_name for file in revision.files} == {
        "config.json",
        "model.safetensors",
        "vocab.txt",
    }


def test_a_cached_snapshot_is_a_checkpoint(model: Path) -> None:
    """The snapshot's links into its own blobs count as files, at every depth."""
    files = scan(model / "snapshots" / REVISION).files
    assert [file.path for file in files] == ["config.json", "model.safetensors", "sub/vocab.txt"]
    assert files[1].absolute.parent == model.resolve() / "blobs"
    assert files[1].size == len(WEIGHTS)


def test_a_cached_model_is_the_snapshot_of_main(model: Path, tmp_path: Path) -> None:
    """models--ORG--NAME stands for the snapshot that refs/main names, also by way of a link."""
    other = model / "snapshots" / ("b" * 40)
    other.mkdir()
    (other / "other.safetensors").write_bytes(WEIGHTS)
    assert found(model) == found(model / "snapshots" / REVISION)
    (tmp_path / "link").symlink_to(model)
    assert found(tmp_path / "link") == found(model)


@pytest.mark.parametrize("main", [None, "", "c" * 40, "..", f"../snapshots/{REVISION}", "x\0y"])
def test_a_cached_model_without_main_is_refused(model: Path, main: str | None) -> None:
    """refs/main that is missing, empty, a path or the name of nothing is an error that names it."""
    (model / "refs" / "main").unlink()
    if main is not None:
        (model / "refs" / "main").write_text(main)
    with pytest.raises(BadCheckpoint, match="does not name a snapshot") as refused:
        scan(model)
    assert refused.value.where == str(model / "refs" / "main")
    assert f"which has '{REVISION}'" in refused.value.what
    assert (
        refused.value.told(Typed()).hint
        == f"mstore add {model}/snapshots/{REVISION} --name tiny-model"
    )


@pytest.mark.parametrize("above", [0, 1])
def test_a_whole_cache_is_no_model(model: Path, above: int) -> None:
    """The Hub's cache, or what holds it, is refused with the line that adds its models."""
    cached_model(model.parent, "org/other")
    root = model.parents[above]
    with pytest.raises(BadCheckpoint, match="is a cache of the Hugging Face Hub") as refused:
        scan(root)
    paths = f"{model.parent}/models--org--other {model}"
    assert refused.value.told(Typed()).hint == f"mstore add {paths} --name-prefix {root.name}/"


def test_links_elsewhere_are_refused(model: Path, tmp_path: Path) -> None:
    """Links to another model's blobs, below blobs, beside it or anywhere else are refused."""
    other = cached_model(tmp_path / "hub", "org/other")
    (model / "blobs" / "deep").mkdir()
    (model / "blobs" / "deep" / "x").write_bytes(b"")
    (tmp_path / "secret").write_bytes(b"")
    targets = [
        next((other / "blobs").iterdir()),
        model / "blobs" / "deep" / "x",
        model / "refs" / "main",
        tmp_path / "secret",
    ]
    pointer = model / "snapshots" / REVISION / "x"
    for target in targets:
        pointer.symlink_to(os.path.relpath(target, pointer.parent))
        with pytest.raises(BadCheckpoint, match="symlink out of the checkpoint") as refused:
            scan(model)
        assert refused.value.where == str(pointer)
        pointer.unlink()


def test_a_blob_that_leads_away_is_refused(model: Path, tmp_path: Path) -> None:
    """What counts is where a link ends: a blob that is a link itself does not hide that."""
    (tmp_path / "secret").write_bytes(b"")
    (model / "blobs" / "x").symlink_to(tmp_path / "secret")
    (model / "snapshots" / REVISION / "x").symlink_to("../../blobs/x")
    with pytest.raises(BadCheckpoint, match="symlink out of the checkpoint"):
        scan(model)


def test_blobs_that_are_a_link_are_not_its_own(model: Path, tmp_path: Path) -> None:
    """A link in the place of blobs does not make another directory's files the model's own."""
    (model / "blobs").rename(tmp_path / "blobs")
    (model / "blobs").symlink_to(tmp_path / "blobs")
    with pytest.raises(BadCheckpoint, match="symlink out of the checkpoint"):
        scan(model)


def test_only_the_cache_s_own_layout_counts(tmp_path: Path) -> None:
    """In a directory of any other name, links to ../../blobs lead out of the checkpoint."""
    model = cached_model(tmp_path / "hub")
    plain = model.rename(tmp_path / "plain")
    with pytest.raises(BadCheckpoint, match="symlink out of the checkpoint"):
        scan(plain / "snapshots" / REVISION)


def test_what_a_checkpoint_is_called(model: Path, tmp_path: Path) -> None:
    """A directory by its name, a file without its suffix, a cached model by the Hub's name."""
    assert given_name(model) == "tiny-model"
    assert given_name(model / "snapshots" / REVISION) == "tiny-model"
    (tmp_path / "math-v2.1").mkdir()
    (tmp_path / "one.safetensors").write_bytes(WEIGHTS)
    assert given_name(tmp_path / "math-v2.1") == "math-v2.1"
    assert given_name(tmp_path / "math-v2.1" / ".." / "math-v2.1") == "math-v2.1"
    assert given_name(tmp_path / "one.safetensors") == "one"


def test_the_number_of_files_has_a_limit(tmp_path: Path) -> None:
    """More files or directories than the limit are refused, naming the checkpoint; as many pass."""
    root = tmp_path / "model"
    (root / "sub").mkdir(parents=True)
    (root / "m.safetensors").write_bytes(WEIGHTS)
    (root / "a").touch()
    for limit in (2, 1):
        with pytest.raises(BadCheckpoint, match=f"limit of {limit}") as refused:
            scan(root, limits=CheckpointLimits(max_files=limit))
        assert refused.value.where == str(root)
    assert len(scan(root, limits=CheckpointLimits(max_files=3)).files) == 2


def test_all_headers_together_have_limits(tmp_path: Path) -> None:
    """Files that are within their limits each may not go beyond those of all together."""
    for number in range(3):
        (tmp_path / f"{number}.safetensors").write_bytes(WEIGHTS)
    with pytest.raises(BadCheckpoint, match="more tensors than the limit of 2"):
        scan(tmp_path, limits=CheckpointLimits(max_all_tensors=2))
    assert len(scan(tmp_path, limits=CheckpointLimits(max_all_tensors=3)).files) == 3
    length = 3 * (len(WEIGHTS) - 2)
    with pytest.raises(BadCheckpoint, match=f"more than the limit of {format_size(length - 1)}"):
        scan(tmp_path, limits=CheckpointLimits(max_all_header_bytes=length - 1))
    assert len(scan(tmp_path, limits=CheckpointLimits(max_all_header_bytes=length)).files) == 3
