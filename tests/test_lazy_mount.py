"""Mounts and servers of a lazy store: right bytes, and a remote that goes and comes back."""

from __future__ import annotations

import errno
import http.client
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import http_server
import lazy_scenes
import pytest
import servers
from cli_runs import run_once
from exchanges import files
from fault_proxy import Asked, Fault
from lazy_scenes import Family, Laid
from mount_drivers import Driver, Served, drop_pages, end, on_disk, served, within
from mount_drivers import why_not as no_mount
from proof_models import MODEL, model_files
from remote_scenes import URL, reached
from sick_disk import sick_disk
from test_remote_faults import soon

from mstore import Store
from mstore_fuse.mounts import mounts

__all__ = ["soon"]
tmp_path_factory = on_disk
PATIENCE = 120.0
"""Seconds after which a read counts as stuck, on cores that are much too busy."""
FUSE = Driver("fuse", "dense")
needs_fuse = pytest.mark.skipif(no_mount() is not None, reason=str(no_mount()))


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    """A server with a family, and lazy stores of it."""
    scratch = tmp_path_factory.mktemp("lazy-mount")
    with servers.moto(scratch, least_part=1024) as moto:
        yield lazy_scenes.family(moto.endpoint, scratch)


@pytest.fixture
def laid(family: Family) -> Iterator[Laid]:
    """A lazy store, whose remote this process and those that it starts can reach."""
    made = family.laid_out("read")
    with reached(made.proxy):
        yield made
    made.close()


@pytest.fixture
def shown(laid: Laid, tmp_path: Path) -> Iterator[Served]:
    """A mount of the whole store."""
    with served(FUSE, laid.path, None, tmp_path / "mnt") as made:
        yield made


def at(shown: Served, ref: str) -> Path:
    """The model of a ref in a mount of the whole store."""
    return shown.point / "refs" / ref / MODEL


def held_back(laid: Laid) -> tuple[threading.Event, threading.Event]:
    """Let each request wait; return what tells that one came, and what lets them fail."""
    came, goes = threading.Event(), threading.Event()

    def before(asked: Asked) -> Fault:
        came.set()
        goes.wait(PATIENCE)
        return Fault.RESET

    laid.proxy.begin(before)
    return came, goes


def refused(read: Callable[[], bytes]) -> int | None:
    """Return the errno with which a read ends in bounded time; None if it succeeds."""
    try:
        within(PATIENCE, read)
    except OSError as error:
        return error.errno
    return None


@needs_fuse
def test_a_mount_has_the_right_bytes(laid: Laid, shown: Served) -> None:
    """Files of a mount are those that were pushed, also when they are read again."""
    for _ in range(2):
        for number, name in enumerate(("base", *lazy_scenes.EXPERTS)):
            assert at(shown, name).read_bytes() == model_files(1, number)[MODEL]
            drop_pages(at(shown, name))
    assert laid.proxy.log
    assert not shown.log


@pytest.mark.rest
@needs_fuse
def test_a_mount_whose_remote_goes_and_comes_back(laid: Laid, shown: Served) -> None:
    """What only the remote has is EIO in bounded time, with a line in the log that names it; what
    is in the cache is read meanwhile; when the remote is back, all is read."""
    assert at(shown, "e1").read_bytes() == model_files(1, 1)[MODEL]
    came, goes = held_back(laid)
    ended: list[int | None] = []
    reader = threading.Thread(
        target=lambda: ended.append(refused(at(shown, "e2").read_bytes)), daemon=True
    )
    reader.start()
    try:
        assert came.wait(PATIENCE)
        drop_pages(at(shown, "e1"))
        assert within(30, at(shown, "e1").read_bytes) == model_files(1, 1)[MODEL]
        assert os.listdir(shown.point / "refs" / "base")
        assert not ended
    finally:
        goes.set()
        reader.join(PATIENCE)
    assert ended == [errno.EIO]
    assert "origin" in shown.log
    assert URL in shown.log
    laid.proxy.begin()
    drop_pages(at(shown, "e2"))
    assert within(PATIENCE, at(shown, "e2").read_bytes) == model_files(1, 2)[MODEL]


@pytest.mark.rest
@needs_fuse
def test_a_collected_pack_is_eio(laid: Laid, shown: Served) -> None:
    """A pack that the remote has no more is EIO, and the log says which remote removed it."""
    objects = {name for name in laid.proxy.objects() if "/packs/" in name}
    for name in objects:
        laid.proxy.ask("DELETE", f"/{laid.proxy.bucket}/{name}")
    assert refused(at(shown, "e1").read_bytes) == errno.EIO
    assert "origin has removed this pack" in shown.log
    assert within(PATIENCE, (at(shown, "e1").parent / "config.json").read_bytes)


@pytest.mark.rest
@needs_fuse
def test_a_bad_disk_under_the_cache(laid: Laid, tmp_path: Path) -> None:
    """Parts of the cache that the disk cannot read are asked for at the remote."""
    with Store.open(laid.path) as store:
        assert files(store, "e1") == model_files(1, 1)
    laid.proxy.begin()
    (tmp_path / "disk").mkdir()
    with (
        sick_disk(laid.path / "cache", tmp_path / "disk") as disk,
        Store.open(laid.path) as store,
    ):
        disk.tell({one.name: "EIO" for one in (laid.path / "cache").rglob("*-*")})
        assert files(store, "e1") == model_files(1, 1)
        assert laid.proxy.log


@pytest.mark.rest
@needs_fuse
def test_what_a_mount_is_told(laid: Laid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`mstore mount` gives its process the servers that may get credentials, and the size of the
    cache; without the server's name, nothing is sent there."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("MSTORE_STORE", "")
    store, point = tmp_path / "store", tmp_path / "mnt"

    def run(*words: str | Path) -> str:
        done = run_once([str(one) for one in words])
        assert done.status == 0, done.err
        return done.out

    run("clone", "--lazy", "--endpoint", endpoint, URL, store)
    run("config", "--user", "cache_size", "200KB")
    point.mkdir()
    log = tmp_path / "log"

    def mounted() -> int | None:
        run("--store", store, "mount", "--log", log, "e1", point)
        try:
            [info] = [one for one in mounts() if one.mountpoint == point]
            words = Path(f"/proc/{info.pid}/cmdline").read_text().split("\0")
            assert "--cache-size=200000" in words
            is_trusted = f"--endpoint={endpoint}" in words
            assert is_trusted == (endpoint in run("config", "--user"))
            return refused(lambda: _right((point / MODEL).read_bytes()))
        finally:
            end(point)

    assert mounted() is None
    assert sum(one.stat().st_size for one in (store / "cache").rglob("*-*")) <= 200_000
    run("config", "--user", "--unset", "endpoints", endpoint)
    for one in (store / "cache").rglob("*-*"):
        one.unlink()
    laid.proxy.begin()
    assert mounted() == errno.EIO
    assert not laid.proxy.log
    assert "origin" in log.read_text()


def _right(data: bytes) -> bytes:
    assert data == model_files(1, 1)[MODEL]
    return data


@pytest.mark.rest
@pytest.mark.usefixtures("soon")
def test_a_server_of_a_lazy_store(laid: Laid, caplog: pytest.LogCaptureFixture) -> None:
    """`mstore serve` shows right bytes; without the remote, what is in the cache is right and the
    rest is 503, with a line in the log that names it; then the remote is back."""
    with http_server.served(laid.path) as server:

        def ask(name: str) -> http_server.Answer | None:
            try:
                return server.ask(f"/refs/{name}/-/files/{MODEL}")
            except (http.client.HTTPException, OSError):
                # The answer had begun.
                return None

        first = ask("e1")
        assert first is not None
        assert first.body == model_files(1, 1)[MODEL]
        laid.proxy.begin(lambda asked: Fault.RESET)
        lost = ask("e2")
        assert lost is None or lost.status == 503
        assert any("origin" in one.getMessage() for one in caplog.records)
        again = ask("e1")
        assert again is not None
        assert again.body == model_files(1, 1)[MODEL]
        laid.proxy.begin()
        back = ask("e2")
        assert back is not None
        assert back.body == model_files(1, 2)[MODEL]
