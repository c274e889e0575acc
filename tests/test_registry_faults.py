"""Exports and adds while a registry is busy, connections break and processes are killed."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from registries import Proxy, Registry
from small_models import BLOCK
from test_hub import shard, sharded
from test_registry import kept, name, proxy, server, store

from mstore import Store
from mstore.oci import client
from mstore.terms.errors import Unavailable

__all__ = ["name", "proxy", "server", "store"]
LARGE = {"model.safetensors": shard("big", 200_000), "config.json": b"{}"}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Chunks of 64 KiB; waits are noted, and not waited for."""
    waited: list[float] = []
    monkeypatch.setattr(client, "CHUNK_BYTES", 1 << 16)
    monkeypatch.setattr(client.time, "sleep", waited.append)
    return waited


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", ["cut", "lost"])
@pytest.mark.parametrize("method", ["HEAD", "POST", "PATCH", "PUT"])
def test_a_broken_connection_is_no_end(
    kind: str,
    method: str,
    quick: list[float],
    proxy: Proxy,
    server: Registry,
    store: Store,
    name: str,
) -> None:
    """If each kind of request breaks once, before or after the registry did it, all arrives."""
    kept(store, LARGE)
    broken: list[str] = []

    def fault(asked: str, path: str, number: int) -> str | None:
        if asked == method and "manifests" not in path and not broken:
            broken.append(path)
            return kind
        return None

    proxy.fault = fault
    store.export("x", f"oci://{proxy.host}/{name}:v1", card=False)
    assert broken
    assert server.files(f"{name}:v1") == LARGE


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(6))
def test_many_faults_are_no_end(
    seed: int, quick: list[float], proxy: Proxy, server: Registry, store: Store, name: str
) -> None:
    """One request in five breaks or is refused, there and back, and every byte arrives."""
    kept(store, {**sharded(3), **LARGE, "model.safetensors.index.json": b'{"weight_map": {}}'})
    draw = random.Random(seed)
    proxy.fault = lambda *_: (
        draw.choice(["cut", "lost", "half", 429, 500, 503]) if draw.random() < 0.2 else None
    )
    address = f"oci://{proxy.host}/{name}:v1"
    store.export("x", address, card=False)
    with Store.init(store.path.parent / "other", block_size=BLOCK) as other:
        other.add(address, name="y")
        assert other["y"].manifest == store["x"].manifest
    proxy.fault = lambda *_: None
    assert server.files(f"{name}:v1") == {
        file.path: store["x"].read(file.path) for file in store["x"].files()
    }


@pytest.mark.rest
def test_a_broken_chunk_does_not_send_the_blob_again(
    quick: list[float], proxy: Proxy, server: Registry, store: Store, name: str
) -> None:
    """After an answer that was lost, the registry says what it has, and the next chunk goes."""
    kept(store, LARGE)
    chunks = 0

    def fault(method: str, path: str, number: int) -> int | None:
        nonlocal chunks
        chunks += method == "PATCH"
        return 503 if method == "PATCH" and chunks == 4 else None

    proxy.fault = fault
    store.export("x", f"oci://{proxy.host}/{name}:v1", card=False)
    sent = sum(one.sent for one in proxy.log if one.method == "PATCH" and one.status == 202)
    assert sent == len(LARGE["model.safetensors"])
    assert server.files(f"{name}:v1") == LARGE


@pytest.mark.sampled(6)
@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_busy_registry_is_asked_again(
    status: int, quick: list[float], proxy: Proxy, store: Store, name: str
) -> None:
    """A request is made again after as many seconds as the registry says."""
    kept(store, sharded(1))
    proxy.retry_after = "7"
    proxy.fault = lambda method, path, number: status if number in (0, 1, 5) else None
    store.export("x", f"oci://{proxy.host}/{name}:v1", card=False)
    assert quick == [7.0] * 3


def test_a_wait_that_is_too_long_is_told(
    quick: list[float], proxy: Proxy, store: Store, name: str
) -> None:
    """A registry that asks for an hour is not waited for: the error says what it asked for."""
    kept(store, sharded(1))
    proxy.retry_after = "3600"
    proxy.fault = lambda *_: 429
    with pytest.raises(Unavailable, match="429, and asks to wait 3600 s") as refused:
        store.export("x", f"oci://{proxy.host}/{name}:v1", card=False)
    assert "again" in str(refused.value.hint)
    assert quick == []


def test_a_registry_that_stays_broken_ends_the_export(
    quick: list[float], proxy: Proxy, server: Registry, store: Store, name: str
) -> None:
    """If chunks never arrive, the export ends with an error, and there is no tag."""
    kept(store, LARGE)
    proxy.fault = lambda method, path, number: 503 if method == "PATCH" else None
    with pytest.raises(Unavailable, match="503"):
        store.export("x", f"oci://{proxy.host}/{name}:v1", card=False)
    assert server.ask("GET", f"/v2/{name}/manifests/v1")[0] == 404


@pytest.mark.rest
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_and_resumed(
    seed: int, proxy: Proxy, server: Registry, store: Store, name: str
) -> None:
    """A killed export leaves no tag and whole blobs, which the next one does not send again."""
    files = sharded(8)
    kept(store, files)
    stop_at = random.Random(seed).randrange(1, 8)
    killed = threading.Event()
    ended = 0

    def fault(method: str, path: str, number: int) -> None:
        nonlocal ended
        ended += method == "PUT" and "/blobs/" in path
        if ended > stop_at:
            killed.wait(60)

    proxy.fault = fault
    address = f"oci://{proxy.host}/{name}:v1"
    words = ["--store", str(store.path), "export", "x", address, "--no-card"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mstore_cli", *words],
        env=os.environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while ended <= stop_at and process.poll() is None:
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        proxy.fault = lambda *_: None
        killed.set()
    assert server.ask("GET", f"/v2/{name}/manifests/v1")[0] == 404
    time.sleep(0.2)
    arrived = {one.path for one in proxy.log if one.method == "PUT" and one.status == 201}
    assert len(arrived) >= stop_at - 4
    proxy.log.clear()
    store.export("x", address, card=False)
    sent = [one for one in proxy.log if one.method == "PUT" and "/blobs/" in one.path]
    # One blob is the config.
    assert len(sent) - 1 == len(files) - len(arrived)
    assert server.files(f"{name}:v1") == files


@pytest.mark.rest
@pytest.mark.parametrize("seed", range(3))
def test_an_add_that_is_killed_goes_on(
    seed: int, proxy: Proxy, server: Registry, store: Store, name: str, tmp_path: Path
) -> None:
    """A killed add leaves a sound store, and the next one does not bring again what arrived."""
    files = sharded(8)
    kept(store, files)
    store.export("x", f"oci://{proxy.host}/{name}:v1", card=False)
    whole = {f"sha256:{hashlib.sha256(files[path]).hexdigest()}": path for path in files}
    large = [one for one, path in whole.items() if path.endswith(".safetensors")]
    stop_at = random.Random(seed).randrange(1, 8)
    killed = threading.Event()
    begun: list[str] = []

    def fault(method: str, path: str, number: int) -> None:
        digest = path.rpartition("/")[2]
        if method == "GET" and digest in large:
            # Each is asked for its header, and then for its data.
            begun.append(digest)
            if len([one for one in large if begun.count(one) > 1]) > stop_at:
                killed.wait(60)

    proxy.fault = fault
    root = tmp_path / "other"
    Store.init(root, block_size=BLOCK).close()
    words = ["--store", str(root), "add", f"oci://{proxy.host}/{name}:v1", "--name", "y"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mstore_cli", *words],
        env=os.environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while process.poll() is None and (
            len([one for one in large if begun.count(one) > 1]) <= stop_at
        ):
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        proxy.fault = lambda *_: None
        killed.set()
    proxy.log.clear()
    with Store.open(root) as other:
        assert "y" not in other.ref_ids()
        other.add(f"oci://{proxy.host}/{name}:v1", name="y")
        assert {path: other["y"].read(path) for path in files} == files
        assert not other.fsck(read_data=True).problems
    asked = [one.path.rpartition("/")[2] for one in proxy.log if one.method == "GET"]
    again = [one for one in large if asked.count(one) > 1]
    assert len(again) <= 8 - stop_at


def test_an_error_in_a_file_ends_the_others(
    quick: list[float], proxy: Proxy, store: Store, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one file cannot be sent, no further chunk of another one goes."""
    kept(store, {**sharded(4), **LARGE, "model.safetensors.index.json": b'{"weight_map": {}}'})
    proxy.fault = lambda method, path, number: 403 if method == "PUT" else None
    with pytest.raises(Unavailable, match="does not let this user") as refused:
        store.export("x", f"oci://{proxy.host}/{name}:v1", card=False)
    assert refused.value.hint == f"docker login {proxy.host}"


def test_a_path_of_the_store_is_all_that_is_needed(
    proxy: Proxy, server: Registry, store: Store, name: str
) -> None:
    """An export writes no second copy: nothing but the memo table changes in the store."""
    kept(store, LARGE)
    before = _sizes(store.path)
    store.export("x", f"oci://{proxy.host}/{name}:v1", card=False)
    changed = {path for path, size in _sizes(store.path).items() if before.get(path) != size}
    assert {path.parts[0] for path in changed} <= {"memo"}


def _sizes(root: Path) -> dict[Path, int]:
    return {
        path.relative_to(root): path.stat().st_size for path in root.rglob("*") if path.is_file()
    }
