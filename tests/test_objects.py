"""Objects at the places that there are: each keeps the contract of `Objects`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import obstore
import pytest
import servers
from objects_suite import (
    BucketSuite,
    Hold,
    Lose,
    ObjectsSuite,
    ReadOnlySuite,
    lose_link,
    root_of,
)
from obstore.exceptions import GenericError, NotSupportedError
from obstore.store import MemoryStore

from mstore.remotes import bucket
from mstore.remotes.bucket import Bucket
from mstore.remotes.bundle import Bundle, NewBundle
from mstore.remotes.objects import PROBE, ROOT, Absent, Objects
from mstore.remotes.shared_directory import SharedDirectory
from mstore.remotes.web import Web
from mstore.terms.errors import Corrupt, Incompatible, Unavailable


@pytest.fixture
def gcs() -> Iterator[servers.Server]:
    """A server of Google Cloud Storage."""
    with servers.gcs() as server:
        yield server


def at(server: servers.Server, patch: pytest.MonkeyPatch) -> Bucket:
    """What is below an empty prefix there."""
    server.use(patch)
    return bucket.connect(server.below(), {})


class TestSharedDirectory(ObjectsSuite):
    """A directory."""

    @pytest.fixture
    def objects(self, tmp_path: Path) -> Objects:
        return SharedDirectory(tmp_path / "shared" / "models")

    @pytest.fixture
    def lose(self, monkeypatch: pytest.MonkeyPatch) -> Lose:
        return lambda: lose_link(monkeypatch)

    def test_old_roots_are_cut_and_never_removed(self, objects: Objects, tmp_path: Path) -> None:
        """Each root has a number, and none is ever free again, so no stale stamp fits."""
        stamps = [objects.swap_root(b"0", None)]
        for number in range(1, 40):
            stamps.append(objects.swap_root(b"%d" % number, stamps[-1]))
        roots = sorted((tmp_path / "shared" / "models" / "roots").iterdir())
        assert [path.name for path in roots] == [f"{number:016x}" for number in range(40)]
        sizes = [path.stat().st_size for path in roots]
        assert sizes[:24] == [0] * 24
        assert all(sizes[24:])
        with pytest.raises(Exception, match="the remote changed meanwhile"):
            objects.swap_root(b"stale", stamps[3])
        assert root_of(objects) == b"39"

    def test_half_written_files_are_no_objects(self, objects: Objects, tmp_path: Path) -> None:
        """What a killed put leaves has no name of an object."""
        objects.put_bytes("lists/1", b"1")
        (tmp_path / "shared" / "models" / "lists" / ".new-0123").write_bytes(b"half")
        assert [one.name for one in objects.names("lists/")] == ["lists/1"]


class TestMoto(BucketSuite):
    """S3."""

    @pytest.fixture
    def objects(self, moto: servers.Server, monkeypatch: pytest.MonkeyPatch) -> Objects:
        return at(moto, monkeypatch)


class TestAzurite(BucketSuite):
    """Azure."""

    @pytest.fixture
    def objects(self, azurite: servers.Server, monkeypatch: pytest.MonkeyPatch) -> Objects:
        return at(azurite, monkeypatch)


class TestGoogle(BucketSuite):
    """Google Cloud Storage, whose objects have generations."""

    @pytest.fixture
    def objects(self, gcs: servers.Server, monkeypatch: pytest.MonkeyPatch) -> Objects:
        return at(gcs, monkeypatch)


class TestMemory(BucketSuite):
    """obstore's own store, in memory."""

    @pytest.fixture
    def objects(self) -> Objects:
        return Bucket(MemoryStore(), "memory:")


class TestBundle(ReadOnlySuite):
    """One file."""

    @pytest.fixture
    def hold(self, tmp_path: Path) -> Iterator[Hold]:
        made: list[Bundle] = []

        def hold(contents: Mapping[str, bytes]) -> Objects:
            new = NewBundle(tmp_path / "model.mbundle")
            for name, data in contents.items():
                if name == ROOT:
                    new.swap_root(data, None)
                else:
                    new.put_bytes(name, data)
            new.finish()
            made.append(Bundle(tmp_path / "model.mbundle"))
            return made[0]

        yield hold
        for one in made:
            one.close()


class TestWeb(ReadOnlySuite):
    """A web server that gives what its addresses name to who has its token."""

    @pytest.fixture
    def hold(self) -> Iterator[Hold]:
        stub = servers.google()

        def hold(contents: Mapping[str, bytes]) -> Objects:
            with pytest.MonkeyPatch.context() as patch:
                server.use(patch)
                url = server.below()
                filled = bucket.connect(url, {})
                for name, data in contents.items():
                    filled.put_bytes(name, data)
            path = url.removeprefix("gs://")
            return Web(f"{stub.endpoint}/{path}", stub.token, "ask who runs it")

        with servers.gcs(stub) as server:
            yield hold


# -- servers that do less ------------------------------------------------------------------------


def test_a_server_that_ignores_conditions_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """s3rver takes every write: the probe says what that means and what to do, and cleans up."""
    with servers.s3rver(tmp_path) as server:
        objects = at(server, monkeypatch)
        with pytest.raises(Incompatible, match=r"(?s)ignores conditions.*two pushes") as caught:
            objects.probe("one")
        assert "use a server with conditional writes" in (caught.value.hint or "")
        assert list(objects.names(PROBE)) == []
        with pytest.raises(Absent):
            objects.read_root()


Put = Callable[..., object]


def _ignoring(put: Put) -> Put:
    """A put that knows creation, and takes every replacement."""

    def replaced(store: object, name: str, data: bytes, **options: object) -> object:
        mode = options.pop("mode", "overwrite")
        return put(store, name, data, mode="create" if mode == "create" else "overwrite")

    return replaced


def _refusing(error: Exception) -> Callable[[Put], Put]:
    """A put that knows creation, and answers replacements by an error."""

    def made(put: Put) -> Put:
        def replaced(store: object, name: str, data: bytes, **options: object) -> object:
            if isinstance(options.get("mode"), dict):
                raise error
            return put(store, name, data, **options)

        return replaced

    return made


@pytest.mark.parametrize(
    "changed",
    [
        _ignoring,
        _refusing(NotSupportedError("not here")),
        _refusing(GenericError("Server returned non-2xx status code: 501 Not Implemented: ")),
    ],
    ids=["ignored", "unsupported", "501"],
)
def test_creation_alone_is_not_enough(
    changed: Callable[[Put], Put], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that knows conditional creation and no conditional replacement is refused."""
    monkeypatch.setattr(obstore, "put", changed(obstore.put))
    objects = Bucket(MemoryStore(), "memory:")
    with pytest.raises(Incompatible, match="ignores conditions"):
        objects.probe("one")
    assert list(objects.names(PROBE)) == []


def test_a_server_that_forgets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was put must be read at once: a probe that reads something older is an error."""
    objects = Bucket(MemoryStore(), "memory:")
    monkeypatch.setattr(objects, "read_each", lambda *_: [b"1"])
    with pytest.raises(Incompatible, match="does not keep"):
        objects.probe("one")


def test_a_missing_bucket_is_not_an_empty_one(
    moto: servers.Server, azurite: servers.Server, gcs: servers.Server
) -> None:
    """A bucket that does not exist is Unavailable, for reads and for writes: nothing can be made
    there."""
    for server in (moto, azurite, gcs):
        with pytest.MonkeyPatch.context() as patch:
            server.use(patch)
            scheme = server.url.partition("://")[0]
            objects = bucket.connect(f"{scheme}://no-such-bucket/models", {})
            with pytest.raises(Unavailable, match="no such bucket"):
                objects.read_root()
            with pytest.raises(Unavailable, match="no such bucket"):
                objects.put_bytes("lists/1", b"1")


# -- processes -----------------------------------------------------------------------------------

_FORKED = """
import os, sys
from mstore.remotes.bucket import connect
from mstore.terms.errors import Unavailable
objects = connect(sys.argv[1], {})
objects.swap_root(b"first", None)
child = os.fork()
if child == 0:
    for opened in (lambda: objects, lambda: connect(sys.argv[1], {})):
        try:
            opened().read_root()
        except Unavailable as error:
            if "forked" not in str(error):
                os._exit(8)
        else:
            os._exit(9)
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print(objects.read_root()[0])
"""


def test_a_forked_child_is_told(gcs: servers.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a call of obstore would wait for ever, in the child of a fork, there is an error, also
    for a remote that the child opened; the parent goes on."""
    gcs.use(monkeypatch)
    command: Sequence[str] = [sys.executable, "-c", _FORKED, gcs.below()]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=dict(os.environ)
    )
    assert (done.stdout, done.returncode) == ("b'first'\n", 0), done.stderr


def test_a_panic_of_obstore_is_an_error(moto: servers.Server) -> None:
    """A token with a line break, as `$(cat file)` never has it and a copied one may, makes obstore
    panic: that is Unavailable, and the process lives."""
    with pytest.MonkeyPatch.context() as patch:
        moto.use(patch)
        patch.setenv("AWS_SESSION_TOKEN", "a\nb")
        objects = bucket.connect(moto.below(), {})
        with pytest.raises(Unavailable):
            objects.put_bytes("lists/1", b"1")


def test_an_error_of_pieces_that_is_none_of_ours_comes_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where obstore tells it in words of its own."""
    put = obstore.put

    def wrapped(*given: object, **options: object) -> object:
        try:
            return put(*given, **options)  # type: ignore[arg-type]
        except ZeroDivisionError as error:
            raise GenericError(str(error)) from error

    monkeypatch.setattr(obstore, "put", wrapped)

    def pieces() -> Iterator[bytes]:
        yield bytes(9 << 20)
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        Bucket(MemoryStore(), "memory:").put("a", 20 << 20, pieces())


def test_a_root_beyond_its_limit_is_not_downloaded(gcs: servers.Server) -> None:
    """The length is looked at before the bytes are."""
    with pytest.MonkeyPatch.context() as patch:
        objects = at(gcs, patch)
        objects.put_bytes("mstore-remote", bytes(30 << 20))
        with pytest.raises(Corrupt, match="too long"):
            objects.read_root()
