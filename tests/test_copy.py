"""Copies of refs between two stores on one machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_models import BLOCK, files_of, small_model

from mstore import Store
from mstore.remotes import arrival
from mstore.terms.errors import BadRequest, Corrupt, Incompatible, MstoreError, NotFound


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[tuple[Store, Store]]:
    """A store of a base, and of a branch with two models on it; and an empty one."""
    small_model(tmp_path / "in" / "base", "base")
    small_model(tmp_path / "in" / "old", "base", changed="old")
    small_model(tmp_path / "in" / "new", "base", changed="new")
    with (
        Store.init(tmp_path / "from", block_size=BLOCK, author="me") as source,
        Store.init(tmp_path / "to", block_size=BLOCK, author="me") as target,
    ):
        source.add(tmp_path / "in" / "base", name="base")
        source.add(tmp_path / "in" / "old", name="tuned", base="base")
        source.add(tmp_path / "in" / "new", name="tuned", base="base")
        source.tag("v1", "tuned~1")
        source.note("tuned", {"score": 1})
        yield source, target


def state(store: Store) -> tuple[int, set[str]]:
    """What a change would change: the generation, and which files there are."""
    return store.generation(), set(files_of(store.path))


def has(store: Store, name: str, source: Path) -> None:
    """A store has a model, byte for byte, and is sound."""
    out = store.path.with_name(f"{store.path.name}-{name}-{store.generation()}")
    store.checkout(name, out)
    assert files_of(out) == files_of(source)
    assert store.fsck(read_data=True).problems == ()


def test_a_copy_has_the_model_and_says_what_it_lacks(
    stores: tuple[Store, Store], tmp_path: Path
) -> None:
    """The branch is there under its name, byte for byte, with notes, after one commit; of its
    ancestors the records are, and the report names them."""
    source, target = stores
    before = target.generation()
    report = source.copy_to(target.path, ["tuned"])
    assert target.generation() == before + 1
    assert [(one.name, one.old) for one in report.moved] == [("tuned", None)]
    ancestors = {source.show(name).snapshot for name in ("base", "tuned~1")}
    assert (report.snapshots, set(report.without_contents)) == (3, ancestors)
    has(target, "tuned", tmp_path / "in" / "new")
    assert [one.name for one in target.refs()] == ["tuned"]
    assert [one.value for one in target.notes_of("tuned")] == [1]
    assert [one.action for one in target.reflog("tuned")] == ["copy"]


def test_what_is_there_is_not_copied_again(stores: tuple[Store, Store], tmp_path: Path) -> None:
    """A second copy does nothing; one of a newer model copies what is new; a tag of an ancestor
    brings its contents."""
    source, target = stores
    source.copy_to(target.path, ["tuned"])
    before = target.generation()
    again = source.copy_to(target.path, ["tuned"])
    assert (again.moved, again.blocks, again.bytes_copied) == ((), 0, 0)
    assert target.generation() == before
    small_model(tmp_path / "in" / "newer", "base", changed="newer")
    source.add(tmp_path / "in" / "newer", name="tuned", base="base")
    more = source.copy_to(target.path, ["tuned"])
    assert (more.snapshots, more.blocks, more.without_contents) == (1, 1, ())
    has(target, "tuned", tmp_path / "in" / "newer")
    source.copy_to(target.path, ["v*"])
    has(target, "v1", tmp_path / "in" / "old")


def test_a_branch_with_other_commits_stays(stores: tuple[Store, Store], tmp_path: Path) -> None:
    """A branch of that name with other commits, and a tag that is another, do not move; other refs
    of the same copy do."""
    source, target = stores
    target.add(tmp_path / "in" / "old", name="tuned")
    target.tag("v1", "tuned")
    before = {one.name: one.snapshot for one in target.refs()}
    report = source.copy_to(target.path, ["tuned", "v1", "base"])
    assert report.diverged == ("tuned", "v1")
    assert [one.name for one in report.moved] == ["base"]
    now = {one.name: one.snapshot for one in target.refs()}
    assert now == before | {"base": source.show("base").snapshot}


def test_a_copy_back_is_a_copy(stores: tuple[Store, Store], tmp_path: Path) -> None:
    """What was added on top in the other store comes back the same way."""
    source, target = stores
    source.copy_to(target.path, ["tuned"])
    small_model(tmp_path / "in" / "newer", "base", changed="newer")
    target.add(tmp_path / "in" / "newer", name="tuned")
    target.copy_to(source.path, ["tuned"])
    has(source, "tuned", tmp_path / "in" / "newer")
    assert source.show("tuned~1").snapshot == target.show("tuned~1").snapshot


def test_what_cannot_be_copied(stores: tuple[Store, Store], tmp_path: Path) -> None:
    """No ref, unknown refs, the same store, no store and another block size are refused; nothing
    changes, and no part of anything stays."""
    source, target = stores
    Store.init(tmp_path / "wide", block_size=2 * BLOCK).close()
    (tmp_path / "link").symlink_to(source.path)
    before = state(target)
    with pytest.raises(BadRequest):
        source.copy_to(target.path, [])
    with pytest.raises(NotFound):
        source.copy_to(target.path, ["tuned", "nobody"])
    with pytest.raises(NotFound):
        source.copy_to(target.path, ["x*"])
    for same in ("from", "link"):
        with pytest.raises(BadRequest, match="the same store"):
            source.copy_to(tmp_path / same, ["tuned"])
    with pytest.raises(MstoreError):
        source.copy_to(tmp_path / "nothing", ["tuned"])
    with pytest.raises(Incompatible):
        source.copy_to(tmp_path / "wide", ["tuned"])
    assert state(target) == before
    for store in ("from", "to", "wide"):
        assert list((tmp_path / store / "tmp").iterdir()) == []
        assert not (tmp_path / store / "remotes").exists()


def test_a_damaged_source_changes_nothing(stores: tuple[Store, Store], tmp_path: Path) -> None:
    """Wrong bytes are refused, the other store stays as it was, and the hint is to check this."""
    source, target = stores
    for pack in source.path.rglob("*.pack"):
        pack.chmod(0o644)
        with pack.open("r+b") as file:
            file.seek(4096)
            file.write(bytes(64))
    before = state(target)
    with pytest.raises(Corrupt) as caught:
        source.copy_to(target.path, ["tuned"])
    assert caught.value.hint == "store.fsck(read_data=True)"
    assert state(target) == before


def test_both_ways_a_pack_comes(
    stores: tuple[Store, Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole packs or only parts of them: the model is the same, and tmp/ is empty afterwards."""
    source, target = stores
    shutil.copytree(target.path, tmp_path / "second")
    monkeypatch.setattr(arrival, "_WHOLE", 0.0)
    source.copy_to(target.path, ["tuned"])
    monkeypatch.setattr(arrival, "_WHOLE", 2.0)
    source.copy_to(tmp_path / "second", ["tuned"])
    has(target, "tuned", tmp_path / "in" / "new")
    with Store.open(tmp_path / "second") as second:
        has(second, "tuned", tmp_path / "in" / "new")
    for one in (source.path, target.path, tmp_path / "second"):
        assert list((one / "tmp").iterdir()) == []
