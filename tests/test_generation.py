"""An index that is outdated is detected at once, however it came into its place."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_runs import Program
from small_models import BLOCK, small_model

from mstore import MergeRequest, Store
from mstore.terms.errors import Corrupt

COMMITS: dict[str, Callable[[Store, Path], object]] = {
    "add": lambda store, other: store.add(other, name="other", base="base"),
    "add again": lambda store, other: store.add(other, name="tuned"),
    "merge": lambda store, other: store.merge(
        store.plan(MergeRequest(base="base", experts=["tuned"], method="linear")), name="merged"
    ),
    "tag": lambda store, other: store.tag("v1", "tuned"),
    "remove": lambda store, other: store.remove("tuned"),
}


def by_mstore(store: Path, kept: Path) -> None:
    with Store.open(store) as opened:
        opened.backup(kept)


def by_copy(store: Path, kept: Path) -> None:
    subprocess.run(["cp", "-a", store, kept], check=True)


def over(*command: str) -> Callable[[Path, Path], None]:
    """Copy a backup over a store, so that what is newer there stays."""

    def restore(kept: Path, store: Path) -> None:
        if shutil.which(command[0]) is None:
            pytest.skip(f"there is no {command[0]}")
        subprocess.run([*command, f"{kept}/.", f"{store}/"], check=True)

    return restore


@pytest.mark.sampled(15)
@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize(
    ("back_up", "restore"),
    [(by_mstore, over("cp", "-a")), (by_copy, over("cp", "-a")), (by_mstore, over("rsync", "-a"))],
    ids=["backup", "cp", "rsync"],
)
def test_a_backup_one_commit_older(
    back_up: Callable[[Path, Path], None],
    restore: Callable[[Path, Path], None],
    commit: str,
    tmp_path: Path,
) -> None:
    """Where a backup is copied over its store after one more commit, the first command says so:
    readers warn, writers refuse and leave all packs, and reindex keeps the newer ones."""
    base, tuned, other = (small_model(tmp_path / name, name) for name in ("base", "tuned", "other"))
    root, kept = tmp_path / "store", tmp_path / "kept"
    with Store.init(root, block_size=BLOCK) as store:
        store.add(base, name="base")
        store.add(tuned, name="tuned", base="base")
    back_up(root, kept)
    # rsync takes files of one size and second for the same.
    for path in kept.rglob("*"):
        os.utime(path, (1, 1), follow_symlinks=False)
    with Store.open(root) as store:
        COMMITS[commit](store, other)
    packs = {path.name for path in root.glob("packs/*/*")}
    restore(kept, root)
    mstore = Program(root)
    said = mstore.succeed("refs")
    assert said.err.startswith(f"warning: {root}: the index is older than the mirror of the refs")
    assert "hint: mstore --store" in said.err
    assert said.err.endswith(" reindex\n")
    assert [line.split()[0] for line in said.lines[1:]] == ["base", "tuned"]
    with Store.open(root) as store:
        assert store.doubt() is not None
        with pytest.raises(Corrupt, match="older than the mirror") as refused:
            store.tag("v2", "base")
        assert refused.value.hint == "mstore.Store.reindex(PATH)"
        with pytest.raises(Corrupt, match="older than the mirror"):
            store.gc(reflog_days=0)
    assert packs <= {path.name for path in root.glob("packs/*/*")}
    Store.reindex(root)
    with Store.open(root) as store:
        assert store.doubt() is None
        assert store.fsck(read_data=True).problems == ()
        assert packs <= {path.name for path in root.glob("packs/*/*")}
        store.tag("v2", "base")


def test_a_commit_that_kept_a_mirror_is_not_doubted(tmp_path: Path) -> None:
    """A crash between keeping the old mirror and writing the new one leaves an index that is
    trusted: it is later than both."""
    root = tmp_path / "store"
    with Store.init(root, block_size=BLOCK) as store:
        store.add(small_model(tmp_path / "base", "base"), name="base")
    mirror = root / "refs" / "mirror"
    before = mirror.read_bytes()
    with Store.open(root) as store:
        store.tag("v1", "base")
    generation = int(before.split()[4])
    assert (root / "refs" / f"mirror.{generation}").read_bytes() == before
    mirror.write_bytes(before)
    with Store.open(root) as store:
        assert store.doubt() is None
        store.tag("v2", "base")
