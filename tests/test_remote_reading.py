"""Who only reads a remote writes nothing there, and needs no right to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import servers
from small_models import BLOCK, files_of, small_model

from mstore import Store
from mstore.remotes import bucket
from mstore.remotes.objects import Absent
from mstore.terms.errors import Incompatible, Unavailable


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store with two models."""
    store = Store.init(tmp_path / "store", block_size=BLOCK)
    for name in ("llama", "tuned"):
        store.add(small_model(tmp_path / name, "llama", changed=name), name=name)
    yield store
    store.close()


def _read_all(url: str, directory: Path) -> None:
    """Everything that a reader does: in a store of its own, and in a clone."""
    with Store.init(directory / "reader", block_size=BLOCK) as reader:
        reader.add_remote("origin", url)
        assert len(reader.fetch("origin").fetched) == 2
        assert {one.name for one in reader.pull("origin").moved} == {"llama", "tuned"}
        assert reader.fetch("origin").fetched == ()
        assert len(reader.remote_contents("origin").refs) == 2
        # What is there already is a push that sends nothing.
        assert reader.push("origin", every=True, dry_run=True).bytes_sent == 0
    Store.clone(url, directory / "clone")
    with Store.open(directory / "clone") as clone:
        clone.checkout("tuned", directory / "out")
    assert files_of(directory / "out") == files_of(directory / "tuned")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["moto", "gcs"])
def test_a_reader_writes_nothing(
    kind: str,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """fetch, pull, clone, a look at what is there and a dry push ask by GET and HEAD alone; a fetch
    of a remote that did not change asks once."""
    running = nullcontext(request.getfixturevalue("moto")) if kind == "moto" else servers.gcs()
    with running as server:
        server.use(monkeypatch)
        url = server.below()
        store.add_remote("origin", url)
        store.push("origin", every=True, dry_run=True)
        assert not [one for one in server.asked() if url.rpartition("/")[2] in one and _writes(one)]
        store.push("origin", every=True)
        before = len(server.asked())
        assert any(_writes(one) for one in server.asked())
        _read_all(url, tmp_path)
        asked = server.asked()[before:]
        assert len(asked) > 5
        assert [one for one in asked if _writes(one)] == []
        before = len(server.asked())
        store.fetch("origin")
        assert len(server.asked()) == before + 1


def _writes(request: str) -> bool:
    return request.partition(" ")[0] not in ("GET", "HEAD")


def test_keys_that_may_only_read_are_enough(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every write is denied, a remote is added, fetched and cloned; a push says that it was
    denied, and what to check."""
    stub = servers.google()
    with servers.gcs(stub) as server:
        server.use(monkeypatch)
        url = server.below()
        store.add_remote("origin", url)
        store.push("origin", ["llama", "tuned"])
        kept = dict(stub.objects)
        stub.read_only = True
        _read_all(url, tmp_path)
        store.add(small_model(tmp_path / "third", "llama", changed="third"), name="third")
        with pytest.raises(Unavailable, match="access is denied: it answers 403") as caught:
            store.push("origin", ["third"])
        assert "credentials" in (caught.value.hint or "")
        store.add_remote("new", server.below())
        with pytest.raises(Unavailable, match="access is denied"):
            store.push("new", ["third"])
        assert stub.objects == kept


def test_a_push_to_a_server_that_lies_is_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first push probes the server before it writes anything that stays."""
    with servers.s3rver(tmp_path) as server:
        server.use(monkeypatch)
        url = server.below()
        store.add_remote("origin", url)
        with pytest.raises(Incompatible, match="ignores conditions") as caught:
            store.push("origin", every=True)
        assert caught.value.where == url
        assert "conditional writes" in (caught.value.hint or "")
        objects = bucket.connect(url, {})
        assert list(objects.names("")) == []
        with pytest.raises(Absent):
            objects.read_root()
