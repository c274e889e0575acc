"""A remote whose lists say anything: commands end with an error, or with what is right.

Lists are changed as values, and named by a sound root, so that only what they say is wrong. A seed
decides, so a run can be had again.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from exchanges import REMOTE, Place, files, placed, refs
from proof_models import model_files

from mstore.api import Store
from mstore.remotes.layout import LISTS, ListId
from mstore.terms.errors import MstoreError

sys.path.append(str(Path(__file__).parent / "fuzz"))
from mutation import Form, mutate

CASES = 5
PARTS = [0, *(pytest.param(part, marks=pytest.mark.rest) for part in (1, 2))]


class Hostile:
    """A remote of two models, and stores that can be put back."""

    def __init__(self, place: Place) -> None:
        self.place = place
        a = place.store("a")
        place.add(a, "x", 1)
        place.add(a, "x", 1, 1, base="x")
        place.add(a, "z", 1, 3, base="x")
        a.note("x", {"k": 1})
        a.push(REMOTE, every=True)
        place.add(a, "y", 2)
        a.tag("v1", "y")
        a.push(REMOTE, every=True)
        self.wanted = {
            "z": model_files(1, 3),
            "x": model_files(1, 1),
            "y": model_files(2),
            "v1": model_files(2),
        }
        place.add(a, "x", 1, 2, base="x")
        a.close()
        place.store("b").close()
        shutil.move(place.remote, place.path / "sane")
        self.root: dict[str, Any] = {}

    def lists(self) -> list[dict[str, Any]]:
        """What the root says of its lists."""
        roots = sorted((self.place.path / "sane" / "roots").iterdir())
        self.root = json.loads(roots[-1].read_bytes())["mstore-remote"]
        return list(self.root["lists"])

    def put(self, number: int, draw: random.Random) -> None:
        """Let a list say something else, in a copy of the remote."""
        shutil.rmtree(self.place.remote, ignore_errors=True)
        shutil.copytree(self.place.path / "sane", self.place.remote)
        lists = self.lists()
        one = lists[number]
        path = self.place.remote / "lists" / f"{one['made']:016x}-{one['id']}"
        data = mutate(path.read_bytes(), Form.MESSAGEPACK, draw, [path.read_bytes()])
        id = ListId.of(data)
        lists[number] = one | {"id": str(id), "size": max(1, len(data))}
        with suppress(Exception):
            _, rows = msgspec.msgpack.decode(data)
            key = rows[0][0] if isinstance(rows[0][0], bytes) else rows[0][0].encode()
            key += rows[0][1] if one["kind"] == "notes" else b""
            lists[number] |= {"rows": len(rows), "first": key.hex()}
        path.with_name(f"{one['made']:016x}-{id}").write_bytes(data)
        root = self.root | {"lists": lists, "nonce": "f" * 32}
        roots = self.place.remote / "roots"
        newest = sorted(roots.iterdir())[-1]
        newest.chmod(0o600)
        newest.write_bytes(json.dumps({"mstore-remote": root}).encode())

    def attempt(self, name: str, act: Callable[[Store], object]) -> bool:
        """Act in a copy of a store; return whether it went through. It is sound in any case."""
        path = self.place.path / "trial"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self.place.path / name, path)
        # It has seen no root of this remote.
        shutil.rmtree(path / "remotes", ignore_errors=True)
        with Store.open(path) as store:
            before = refs(store)
            try:
                act(store)
                went = True
            except MstoreError:
                assert refs(store) == before
                went = False
            for ref, id in refs(store).items():
                assert files(store, str(id)) in [*self.wanted.values(), model_files(1, 2)], ref
            # A remote may say that history ends where it does not.
            ends = " is missing"
            found = store.fsck(read_data=True, threads=1).problems
            assert [one for one in found if not one.what.endswith(ends)] == []
            assert not any(ends in one.what and one.kind != "snapshot" for one in found)
        return went


@pytest.fixture(scope="module")
def hostile() -> Iterator[Hostile]:
    """A remote of two models, and stores that can be put back."""
    with placed() as place:
        yield Hostile(place)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", LISTS)
def test_lists_that_say_anything(hostile: Hostile, kind: str, part: int) -> None:
    """Fetch, push, gc and fsck of a remote that lies end with an error, or right."""
    draw = random.Random(f"{kind} {part}")
    numbers = [at for at, one in enumerate(hostile.lists()) if one["kind"] == kind]
    went = 0
    for _ in range(CASES):
        hostile.put(draw.choice(numbers), draw)
        went += hostile.attempt("b", lambda store: store.fetch(REMOTE))
        went += hostile.attempt("a", lambda store: store.push(REMOTE, ["x"]))
        hostile.attempt("b", lambda store: store.remote_contents(REMOTE))
        hostile.attempt("b", lambda store: store.remote_fsck(REMOTE))
        hostile.attempt("a", lambda store: store.remote_gc(REMOTE, reflog_days=0, grace_hours=0.0))
    assert went < 2 * CASES
