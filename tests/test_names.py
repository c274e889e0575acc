"""Names in daily use: renamed, chosen by pattern, listed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_runs import Program
from small_models import BLOCK, small_model

from mstore.api import Store
from mstore.terms.errors import BadName, Conflict, NotFound


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Three branches below `team`, one beside them, and a tag."""
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        for name in ("team/one", "team/two", "team/three", "base"):
            store.add(small_model(tmp_path / "m" / name, name), name=name, threads=1)
        store.tag("v1", "base")
        yield store


def names(store: Store) -> list[str]:
    return [ref.name for ref in store.refs()]


def test_a_ref_gets_another_name(store: Store) -> None:
    """Kind and snapshot stay; the old name is gone, its reflog says where to, and can be undone."""
    before = {ref.name: (ref.kind, ref.snapshot) for ref in store.refs()}
    for old, new in (("team/one", "solo"), ("v1", "v2")):
        report = store.rename(old, new)
        assert (report.kind, report.snapshot) == before[old]
        assert report.name == new
        assert store.reflog(old)[0].action == f"rename to {new}"
        assert store.reflog(new)[0].action == f"rename from {old}"
    assert names(store) == ["base", "solo", "team/three", "team/two", "v2"]
    assert store.show("team/one@{1}").snapshot == before["team/one"][1]


def test_a_name_may_become_a_directory(store: Store) -> None:
    """`base` can become `base/v1`, and back, in one step each."""
    store.rename("base", "base/v1")
    store.rename("base/v1", "base")
    assert "base" in names(store)


def test_a_rename_that_cannot_be(store: Store) -> None:
    """Taken, nested, bad and missing names are refused, and nothing has moved."""
    before = store.refs()
    for old, new, error in (
        ("base", "team/one", Conflict),
        ("base", "base", Conflict),
        ("base", "team", Conflict),
        ("base", "team/one/x", Conflict),
        ("base", "a b", BadName),
        ("bse", "new", NotFound),
    ):
        with pytest.raises(error):
            store.rename(old, new)
    assert store.refs() == before
    assert store.fsck().problems == ()


def test_a_name_below_a_ref_has_a_free_one_beside_it(store: Store) -> None:
    """The hint of a name that is below or above a ref is one that can be had; none if it is
    taken."""
    for name, free in (("base/one/x", "base-one-x"), ("team", "team-1")):
        with pytest.raises(Conflict) as refused:
            store.require_branch(name)
        assert str(refused.value.hint).endswith(f"as in {free}")
        store.reset(free, "base")
        with pytest.raises(Conflict) as refused:
            store.require_branch(name)
        assert refused.value.hint is None


def test_patterns(store: Store) -> None:
    """A pattern stands for the names that match it, for refs, du and rm; one for none is wrong."""
    assert [ref.name for ref in store.refs("team/t*", "v?")] == ["team/three", "team/two", "v1"]
    assert [one.name for one in store.usage(["team/*"]).refs] == [
        "team/one",
        "team/three",
        "team/two",
    ]
    for call in (store.refs, store.remove, lambda one: store.usage([one])):
        with pytest.raises(NotFound, match="no ref matches"):
            call("nobody/*")
        with pytest.raises(NotFound):
            call("tem/one")
    removed = store.remove("team/t*", "team/two")
    assert removed.removed == ("team/three", "team/two")
    assert removed.unnamed_snapshots == 2
    assert names(store) == ["base", "team/one", "v1"]


def test_the_command_line(store: Store) -> None:
    """rename, patterns and the list of tags, as they are typed."""
    mstore = Program(store.path)
    store.close()
    assert "solo" in mstore.succeed("rename", "team/one", "solo").out
    assert mstore.succeed("refs", "-q", "team/*").out.split() == ["team/three", "team/two"]
    assert mstore.succeed("tag", "-q").out.split() == ["v1"]
    assert mstore.succeed("tag", "-q", "v*").out.split() == ["v1"]
    assert mstore.succeed("--json", "tag").document["refs"][0]["name"] == "v1"
    asked = mstore("tag", "v2")
    assert (asked.status, "which snapshot" in asked.err) == (2, True)
    assert mstore.succeed("rm", "-q", "team/*").out.split() == ["team/three", "team/two"]
    assert mstore("rm", "team/*").status == 1
