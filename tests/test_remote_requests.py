"""Requests: how many a push takes, as a dry run says, the push, and the server; reads at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Barrier

import pytest
import servers
from small_models import BLOCK, small_model

from mstore import Store
from mstore.remotes import bucket, outgoing
from mstore.remotes.objects import PIECE_BYTES, read_several, requests_to_put


def puts(server: servers.Server) -> Callable[[], int]:
    """Return a call that counts the requests that put something from now on."""
    before = len(server.asked())

    def count() -> int:
        asked = [one for one in server.asked()[before:] if one.startswith(("PUT ", "POST "))]
        # obstore removes objects by a POST.
        return sum(not one.endswith("?delete") for one in asked)

    return count


def test_a_push(moto: servers.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run puts nothing, and names the number of requests of the push, and its snapshots,
    packs and bytes: of the first one, which makes the remote, of one with several packs, of one
    that only moves a ref, of a removal, and of one with nothing to do."""
    moto.use(monkeypatch)

    def check(**what: object) -> int:
        count = puts(moto)
        dry = store.push("origin", dry_run=True, **what)
        assert count() == 0
        assert not list((store.path / "remotes" / "origin" / "sent").iterdir())
        done = store.push("origin", **what)
        assert dry.requests == done.requests == count()
        told = ("moved", "snapshots", "blocks", "packs", "bytes_sent")
        assert [getattr(dry, one) for one in told] == [getattr(done, one) for one in told]
        return done.requests

    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        store.add_remote("origin", moto.below())
        store.add(small_model(tmp_path / "a", "a"), name="a")
        # Four to try the server and one root; then pack, table, three lists and root.
        assert check(refs=["a"]) == 5 + 6
        assert check(refs=["a"]) == 0
        store.add(small_model(tmp_path / "b", "b"), name="b")
        monkeypatch.setattr(outgoing, "PACK_BYTES", 8 << 10)
        # Table, three lists, root, and two packs.
        assert check(refs=["b"]) == 5 + 2
        store.tag("v1", "b")
        # Asking for the time, the list of refs, and the root.
        assert check(refs=["v1"]) == 3
        assert check(delete=["v1"]) == 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [0, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES])
def test_parts(size: int, moto: servers.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large object takes a request for each part, and two more."""
    moto.use(monkeypatch)
    objects = bucket.connect(moto.below(), {})
    count = puts(moto)
    objects.put_bytes("one", bytes(size))
    assert count() == requests_to_put(size) == (1 if size <= PIECE_BYTES else 4)


def test_reads_wait_for_their_answers_together() -> None:
    """Of several reads, all are under way before one has its answer; answers come in order."""
    under_way = Barrier(4)

    def read(number: int) -> int:
        under_way.wait(30)
        return -number

    assert list(read_several(range(4), read)) == [(number, -number) for number in range(4)]
