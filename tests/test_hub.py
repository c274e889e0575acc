"""`add hf://ORG/NAME`: a checkpoint on the Hub, stored as its files arrive.

The Hub is `tests/hub.py`; huggingface_hub is the real one.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import safetensors_bytes
from cli_runs import Program
from hub import Hub, directory_files, environment
from huggingface_hub import constants, snapshot_download
from small_models import BLOCK, files_of, small_model

from mstore import Store
from mstore.origins import arriving
from mstore.origins.arriving import ArrivingFile
from mstore.terms.errors import (
    BadCheckpoint,
    BadRequest,
    MstoreError,
    NotFound,
    StorageFailed,
    Unavailable,
)

MIB = 1 << 20


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub without models, that huggingface_hub asks; no cache and no token."""
    made = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", made.url)
    template = f"{made.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with made.running():
        yield made


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.init(tmp_path / "store", block_size=BLOCK) as made:
        yield made


def shard(seed: str, elements: int = 40_000) -> bytes:
    """A file of one tensor."""
    raw = bytearray(random.Random(seed).randbytes(2 * elements))
    for high in range(1, len(raw), 2):
        raw[high] = 0x3E | raw[high] & 0x80
    return safetensors_bytes([(f"t.{seed}", "BF16", (elements,), bytes(raw))])


def sharded(count: int, seed: str = "s", elements: int = 40_000) -> dict[str, bytes]:
    """A model in shards, with index, config and card."""
    names = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    weight_map = {f"t.{seed}{n}": name for n, name in enumerate(names)}
    files = {name: shard(f"{seed}{n}", elements) for n, name in enumerate(names)}
    files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    files["config.json"] = b'{"model_type": "tiny"}'
    files["README.md"] = b"---\nlicense: mit\n---\n# A model\n"
    return files


def stored(store: Store, name: str, directory: Path) -> dict[str, bytes]:
    """The files of a snapshot, through a checkout."""
    store.checkout(name, directory)
    return files_of(directory)


PIPELINE = {
    "model_index.json": b'{"_class_name": "P", "unet": ["diffusers", "U"]}',
    "unet/config.json": b"{}",
    "unet/diffusion_pytorch_model.safetensors": shard("u"),
    "unet/diffusion_pytorch_model.fp16.safetensors": shard("u16", 20_000),
    "vae/config.json": b"{}",
    "vae/diffusion_pytorch_model.safetensors": shard("v"),
    "images/sample.png": bytes(3 * MIB),
}
ADAPTER = {
    "adapter_config.json": b'{"peft_type": "LORA", "base_model_name_or_path": "org/base"}',
    "adapter_model.safetensors": safetensors_bytes(
        [("base_model.model.q.lora_A.weight", "F32", (2, 4), bytes(32))]
    ),
}
SORTS = {"sharded": sharded(3), "adapter": ADAPTER, "pipeline": PIPELINE}


@pytest.mark.parametrize("sort", SORTS)
def test_files_are_those_of_a_download(sort: str, hub: Hub, store: Store, tmp_path: Path) -> None:
    """A model from the Hub has byte for byte the files that snapshot_download brings."""
    hub.model("org/tiny", SORTS[sort])
    downloaded = snapshot_download("org/tiny", local_dir=tmp_path / "own", endpoint=hub.url)
    shutil.rmtree(Path(downloaded) / ".cache")
    report = store.add("hf://org/tiny", name="x")
    assert stored(store, "x", tmp_path / "out") == directory_files(Path(downloaded))
    assert report.new_snapshot
    assert report.files == len(SORTS[sort])
    # What is left of it in the store is the branch.
    assert store.ref_ids().keys() == {"x"}
    assert not [path for path in (tmp_path / "store" / "tmp").rglob("*") if path.is_file()]


def test_origin_is_the_revision_and_its_commit(hub: Hub, store: Store) -> None:
    """The snapshot's origin has the address, the revision that was asked for, and its commit."""
    tiny = hub.model("org/tiny", sharded(1))
    first = tiny.refs["main"]
    tiny.commit(sharded(1, "other"), "refs/pr/7")
    store.add("hf:org/tiny", name="x")
    origin = store["x"].origin
    assert origin is not None
    assert (origin.url, origin.revision, origin.commit) == (f"{hub.url}/org/tiny", "main", first)
    store.add("hf://org/tiny@refs/pr/7", name="pr")
    origin = store["pr"].origin
    assert origin is not None
    assert (origin.revision, origin.commit) == ("refs/pr/7", tiny.refs["refs/pr/7"])
    assert store["pr"].manifest != store["x"].manifest
    store.add(f"hf://org/tiny@{first}", name="commit")
    assert store["commit"].manifest == store["x"].manifest


def test_a_directory_of_a_repository(hub: Hub, store: Store, tmp_path: Path) -> None:
    """hf://ORG/NAME/DIRECTORY is what lies there, and the origin says so."""
    hub.model(
        "org/several",
        {f"{one}/{path}": data for one in "ab" for path, data in sharded(2, one).items()},
    )
    store.add("hf://org/several/b", name="b")
    assert stored(store, "b", tmp_path / "out") == sharded(2, "b")
    origin = store["b"].origin
    assert origin is not None
    assert origin.url == f"{hub.url}/org/several/tree/main/b"
    with pytest.raises(NotFound, match="no directory 'c'"):
        store.add("hf://org/several/c", name="c")


def test_patterns_choose_files(hub: Hub, store: Store) -> None:
    """What patterns leave out is not downloaded, and the report names it."""
    hub.model("org/pipe", PIPELINE)
    report = store.add(
        "hf://org/pipe", name="x", include=["*.json", "*.fp16.safetensors"], exclude=["vae/"]
    )
    assert _paths(store) == {
        "model_index.json",
        "unet/config.json",
        "unet/diffusion_pytorch_model.fp16.safetensors",
    }
    assert set(hub.downloads()) == {"unet/diffusion_pytorch_model.fp16.safetensors"}
    assert "images/sample.png" in report.excluded
    assert "vae/" in report.excluded


def test_patterns_that_leave_out_the_config_are_refused(hub: Hub, store: Store) -> None:
    """Weights without their config cannot be loaded: the error says which pattern to add."""
    hub.model("org/tiny", sharded(1))
    with pytest.raises(BadCheckpoint, match="cannot be loaded") as refused:
        store.add("hf://org/tiny", name="x", include=["*.safetensors"])
    assert refused.value.hint == "also include=['/config.json']"
    assert hub.downloads() == []


def test_patterns_choose_files_of_a_directory(store: Store, tmp_path: Path) -> None:
    """`include` takes of a directory on disk what it takes of one on the Hub."""
    for path, data in PIPELINE.items():
        (tmp_path / "pipe" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pipe" / path).write_bytes(data)
    store.add(tmp_path / "pipe", name="x", include=["*.json", "unet/"])
    assert _paths(store) == {path for path in PIPELINE if path.endswith(".json")} | {
        path for path in PIPELINE if path.startswith("unet/")
    }
    with pytest.raises(BadCheckpoint, match="all its weights are left out"):
        store.add(tmp_path / "pipe", name="y", include=["*.json"])


def test_an_ignore_file_of_the_repository_counts(hub: Hub, store: Store) -> None:
    """A file .mstoreignore on the Hub leaves out what it leaves out of a directory."""
    hub.model("org/tiny", {**sharded(1), ".mstoreignore": b"*.onnx\n", "m.onnx": bytes(2 * MIB)})
    store.add("hf://org/tiny", name="x")
    assert "m.onnx" not in _paths(store)
    assert "m.onnx" not in hub.downloads()


# Nothing twice


def test_an_interrupted_add_goes_on_with_the_next_shard(hub: Hub, store: Store) -> None:
    """Shards that arrived before an error are read from the store by the next add."""
    files = sharded(4)
    hub.model("org/tiny", files)
    third = "model-00003-of-00004.safetensors"
    hub.fail(third, 404, 99, whole=True, X_Error_Code="EntryNotFound")
    with pytest.raises(MstoreError):
        store.add("hf://org/tiny", name="x")
    assert set(store.ref_ids()) == {"candidates/download/x"}
    hub.faults.clear()
    hub.requests.clear()
    store.gc()
    store.add("hf://org/tiny", name="x")
    assert hub.downloads() == [third, "model-00004-of-00004.safetensors"]
    assert set(store.ref_ids()) == {"x"}
    assert {path: store["x"].read(path) for path in files} == files


def test_another_revision_costs_what_changed(hub: Hub, store: Store) -> None:
    """Of a new commit, only files are downloaded whose digest no stored file of the path has."""
    tiny = hub.model("org/tiny", sharded(3))
    store.add("hf://org/tiny", name="x")
    second = "model-00002-of-00003.safetensors"
    changed = shard("other")
    tiny.commit({**sharded(3), "README.md": b"# Better\n", second: changed[:-2] + b"ab"})
    hub.requests.clear()
    store.add("hf://org/tiny", name="x")
    assert hub.downloads() == [second]
    assert store["x"].read("README.md") == b"# Better\n"


def test_a_stored_file_counts_by_its_bytes(
    hub: Hub, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot of this origin, with other bytes of the same size, is not believed."""
    files = sharded(1)
    hub.model("org/tiny", files)
    path = "model-00001-of-00001.safetensors"
    hub.served[path] = files[path][:-2] + b"ab"
    with monkeypatch.context() as patch:
        # As if another program had written the store.
        patch.setattr(ArrivingFile, "require_unchanged", lambda _: None)
        store.add("hf://org/tiny", name="other")
    hub.served.clear()
    hub.requests.clear()
    store.add("hf://org/tiny", name="x")
    assert hub.downloads() == [path]
    assert store["other"].origin == store["x"].origin
    assert store["x"].read(path) == files[path]


def test_the_cache_is_read_in_place(hub: Hub, store: Store, tmp_path: Path) -> None:
    """Files of this commit that the user's cache has are not downloaded again."""
    hub.model("org/tiny", sharded(2))
    snapshot_download("org/tiny", endpoint=hub.url, cache_dir=constants.HF_HUB_CACHE)
    hub.requests.clear()
    store.add("hf://org/tiny", name="x")
    assert hub.downloads() == []
    assert not [path for _, path in hub.requests if "resolve" in path]
    assert stored(store, "x", tmp_path / "out") == sharded(2)


@pytest.mark.rest
def test_nothing_of_a_shard_lies_beside_the_store(
    hub: Hub, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While shards arrive, beside the store's packs lie headers and small files only."""
    monkeypatch.setattr(arriving, "_PIECE", 1 << 18)
    files = sharded(3, elements=2_000_000)
    hub.model("org/tiny", files)
    most = ticks = 0

    def measure() -> None:
        nonlocal most, ticks
        ticks += 1
        beside = [*(tmp_path / "store" / "tmp").rglob("*"), *(tmp_path / "cache").rglob("*")]
        held = 0
        for path in beside:
            try:
                if path.is_file() and path.suffix != ".pack":
                    held += path.stat().st_blocks * 512
            except OSError:
                continue
        most = max(most, held)

    store.add("hf://org/tiny", name="x", codec="raw", progress=lambda tick: measure())
    assert ticks > 10
    assert 0 < most < 200_000


@pytest.mark.rest
def test_the_hub_is_asked_once_where_a_file_is(
    hub: Hub, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of a large file come from the address that the Hub told for the first of them.

    When that address has expired, the Hub is asked again.
    """
    monkeypatch.setattr(arriving, "_PIECE", 1 << 18)
    hub.model("org/tiny", sharded(1, elements=2_000_000))
    path = "model-00001-of-00001.safetensors"
    store.add("hf://org/tiny", name="x")
    assert len([one for one in hub.requests if "/resolve/" in one[1] and path in one[1]]) == 1
    assert len([one for one in hub.requests if "/lfs/" in one[1]]) > 10
    assert not hub.leaked
    hub.model("org/other", sharded(1, "t", elements=2_000_000))
    served = 0

    def expire(_: str) -> None:
        nonlocal served
        served += 1
        if served == 5:
            hub.signature += 1

    hub.before_part = expire
    store.add("hf://org/other", name="y")
    assert hub.expired
    assert store["y"].read(path) == sharded(1, "t", elements=2_000_000)[path]


def test_a_mirror_without_parts_is_told(
    hub: Hub, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that answers every request with the whole file is not asked for each piece."""
    monkeypatch.setattr(arriving, "_PIECE", 1 << 18)
    hub.model("org/tiny", sharded(1, elements=2_000_000))
    hub.ranges = False
    with pytest.raises(Unavailable, match="sends no parts of files") as refused:
        store.add("hf://org/tiny", name="x")
    assert refused.value.hint == "hf download org/tiny, and add what that prints"


# A kill


@pytest.mark.rest
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_and_resumed(seed: int, hub: Hub, tmp_path: Path) -> None:
    """A process that is killed while shards arrive leaves a sound store, and the next goes on."""
    files = sharded(6)
    hub.model("org/tiny", files)
    stop_at = random.Random(seed).randrange(1, 6)
    killed = threading.Event()

    def hang(_: str) -> None:
        if len(hub.downloads()) > stop_at:
            killed.wait(60)

    hub.before_send = hang
    with Store.init(tmp_path / "s", block_size=BLOCK):
        pass
    process = subprocess.Popen(
        _command(tmp_path, "add", "hf://org/tiny", "--name", "x"), env=_env(hub, tmp_path)
    )
    try:
        while len(hub.downloads()) <= stop_at and process.poll() is None:
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        killed.set()
    before = len(hub.downloads())
    with Store.open(tmp_path / "s") as store:
        assert "x" not in store.ref_ids()
        store.add("hf://org/tiny", name="x")
        assert len(hub.downloads()) - before == 6 - stop_at
        assert {path: store["x"].read(path) for path in files} == files
        assert not store.fsck(read_data=True).problems


def _command(tmp_path: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "mstore_cli", "--store", str(tmp_path / "s"), *words]


def _env(hub: Hub, tmp_path: Path) -> dict[str, str]:
    return environment(hub.url, tmp_path / "hf")


# Who may, and a busy server


def test_a_gated_model_says_where_to_accept(
    hub: Hub, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without leave, the error names the page; with the usual token, the model is added."""
    hub.model("org/gated", sharded(1), gated=True)
    with pytest.raises(Unavailable, match="is gated") as refused:
        store.add("hf://org/gated", name="x")
    assert refused.value.hint == (
        f"open {hub.url}/org/gated in a browser and accept its terms, then: hf auth login"
    )
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    store.add("hf://org/gated", name="x")
    assert hub.downloads()
    assert not hub.leaked


def test_a_private_model_needs_the_token(hub: Hub, store: Store) -> None:
    """The Hub does not tell a private model from none; the token file opens it."""
    hub.model("org/private", sharded(1), private=True)
    with pytest.raises(NotFound, match="or it is private and no token is set") as refused:
        store.add("hf://org/private", name="x")
    assert "hf auth login" in str(refused.value.hint)
    Path(constants.HF_TOKEN_PATH).write_text("hf_good")
    store.add("hf://org/private", name="x")


@pytest.mark.sampled(9)
@pytest.mark.parametrize("status", [429, 503, 504])
@pytest.mark.parametrize("place", ["api/models/org/tiny$", "/tree/", "/lfs/"])
def test_a_busy_hub_is_asked_again(status: int, place: str, hub: Hub, store: Store) -> None:
    """After 429, 503 and 504, the same request is made again, when the server said."""
    hub.model("org/tiny", sharded(1))
    hub.fail(place, status, 2, Retry_After="0")
    store.add("hf://org/tiny", name="x")
    assert [fault.times for fault in hub.faults] == [0]


def test_a_wait_that_is_too_long_is_told(hub: Hub, store: Store) -> None:
    """A server that asks for an hour is not waited for: the error says what it asked for."""
    hub.model("org/tiny", sharded(1))
    hub.fail("api/models/org/tiny$", 429, 99, Retry_After="3600")
    with pytest.raises(Unavailable, match="answers 429, and asks to wait 3600 s"):
        store.add("hf://org/tiny", name="x")


def test_unknown_revisions_and_models(hub: Hub, store: Store) -> None:
    """What is not there is an error that says so, and no attempt to store."""
    hub.model("org/tiny", sharded(1))
    with pytest.raises(NotFound, match="no revision v9"):
        store.add("hf://org/tiny@v9", name="x")
    with pytest.raises(NotFound, match="no such model"):
        store.add("hf://org/none", name="x")
    with pytest.raises(BadRequest, match="no address of a model"):
        store.add("hf://org", name="x")
    with pytest.raises(BadRequest, match="is a dataset"):
        store.add("hf://datasets/org/tiny", name="x")
    assert not store.ref_ids()


def test_a_hub_that_is_away_leaves_the_cache(
    hub: Hub, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the Hub may not be asked, the error says how to add the model from the cache."""
    hub.model("org/tiny", sharded(1))
    snapshot_download("org/tiny", endpoint=hub.url, cache_dir=constants.HF_HUB_CACHE)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Unavailable, match="HF_HUB_OFFLINE is set") as refused:
        store.add("hf://org/tiny", name="x")
    assert refused.value.hint == (
        "unset HF_HUB_OFFLINE\nfrom the cache: store.add('org/tiny', name=REF)"
    )


def test_without_the_library(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without huggingface_hub, the error says what to install."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(Unavailable) as refused:
        store.add("hf://org/tiny", name="x")
    assert refused.value.hint == "pip install 'mstore[hub]'"


# A Hub that lies


HOSTILE = {
    "up": "../x.json",
    "absolute": "/etc/x.json",
    "middle": "a/../../x.json",
    "backslash": "a\\..\\x.json",
    "long": "n" * 10_240,
    "control": "a\x1b[31m.json",
    "case": "CONFIG.json",
    "directory": "config.json/x",
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("sort", HOSTILE)
def test_hostile_names_are_refused(sort: str, hub: Hub, store: Store, tmp_path: Path) -> None:
    """A name that is no portable path stops the add before anything is downloaded."""
    before = set(tmp_path.iterdir())
    hub.model("org/bad", {**sharded(1), HOSTILE[sort]: b"x"})
    with pytest.raises(BadCheckpoint):
        store.add("hf://org/bad", name="x")
    assert not store.ref_ids()
    assert hub.downloads() == []
    assert set(tmp_path.iterdir()) == before


def test_a_file_that_is_too_short_is_refused(hub: Hub, store: Store) -> None:
    """A file that is shorter than the Hub's list says is not stored."""
    files = sharded(2)
    hub.model("org/tiny", files)
    path = "model-00002-of-00002.safetensors"
    hub.served[path] = files[path][:-100]
    with pytest.raises((BadCheckpoint, Unavailable, StorageFailed)):
        store.add("hf://org/tiny", name="x")
    assert "x" not in store.ref_ids()


@pytest.mark.parametrize("path", ["model-00002-of-00002.safetensors", "config.json"])
def test_bytes_that_the_hub_does_not_list_are_refused(path: str, hub: Hub, store: Store) -> None:
    """A file of the right length whose digest is another is not stored."""
    files = sharded(2)
    hub.model("org/tiny", files)
    hub.served[path] = files[path][:-1] + bytes([files[path][-1] ^ 1])
    with pytest.raises(BadCheckpoint, match="other bytes"):
        store.add("hf://org/tiny", name="x")
    assert "x" not in store.ref_ids()


# Bases


def test_the_card_names_the_base(hub: Hub, store: Store, tmp_path: Path) -> None:
    """A stored snapshot from the repository that the card calls the base is the base."""
    base = directory_files(small_model(_made(tmp_path / "base"), "one"))
    tuned = directory_files(small_model(_made(tmp_path / "tuned"), "one", changed="x"))
    hub.model("org/base", base)
    hub.model("org/tuned", {**tuned, "README.md": b"---\nbase_model: org/base\n---\n"})
    store.add("hf://org/base", name="kept/under-another-name")
    report = store.add("hf://org/tuned", name="tuned", detect_base=True)
    assert report.base is not None
    assert report.base.refs == ("kept/under-another-name",)
    assert report.base_reason is not None
    assert "README.md names 'org/base'" in report.base_reason


def test_a_base_that_is_missing(hub: Hub, store: Store) -> None:
    """`missing_base` is the one base of a card, unless the store has a model from there."""
    hub.model("org/plain", sharded(1))
    hub.model("org/base", sharded(1))
    hub.model("org/tuned", sharded(1), card={"base_model": ["org/base"]})
    hub.model("org/merged", sharded(1), card={"base_model": ["org/a", "org/b"]})
    assert store.missing_base("hf://org/plain") is None
    assert store.missing_base("hf://org/tuned") == "hf://org/base"
    with pytest.raises(BadRequest, match="several bases: org/a, org/b"):
        store.missing_base("hf://org/merged")
    store.add("hf://org/base", name="b")
    assert store.missing_base("hf://org/tuned") is None


def test_with_base_moves_no_branch_that_is_there(hub: Hub, store: Store, tmp_path: Path) -> None:
    """If a branch has the name that the base would get, nothing is added."""
    hub.model("org/base", sharded(1))
    hub.model("org/tuned", sharded(1), card={"base_model": "org/base"})
    hub.model("org/other", sharded(2, "o"))
    store.add("hf://org/other", name="base")
    mstore = Program(tmp_path / "store")
    done = mstore("add", "hf://org/tuned", "--name", "tuned", "--with-base")
    assert done.status == 2
    assert "its base hf://org/base would be called base, and that name is taken" in done.err
    assert "add hf://org/base --name OTHER\n" in done.err
    mstore.succeed("add", "hf://org/tuned", "--name-prefix", "p/", "--with-base")
    assert set(store.ref_ids()) == {"base", "p/base", "p/tuned"}


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def _paths(store: Store) -> set[str]:
    return {file.path for file in store["x"].files()}
