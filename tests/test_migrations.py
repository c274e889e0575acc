"""Migrations: steps are done in order, can be killed anywhere, and say what is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mstore import fs
from mstore.api import Store
from mstore.store.layout import FORMAT_VERSION
from mstore.store.migrations import Step, migrate
from mstore.terms.errors import Conflict, Corrupt, Incompatible, NotFound, StorageFailed
from mstore_cli.spelling import Typed


def _rename_packs(root: Path) -> None:
    """The old format of these tests has its packs in `blobs`."""
    if (root / "blobs").exists():
        fs.rename(root / "blobs", root / "packs")
    fs.sync_directory(root)


def _nothing(root: Path) -> None:
    fs.sync_directory(root)


OLD = FORMAT_VERSION - 1
ONE = (Step(OLD, "packs move from blobs/ to packs/", _rename_packs),)


def set_version(root: Path, version: int) -> None:
    """Write another version into the format file."""
    name, _, rest = (root / "format").read_text().split(" ", 2)
    (root / "format").write_text(f"{name} {version} {rest}")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A store of a made-up format before this one."""
    root = tmp_path / "store"
    Store.init(root).close()
    (root / "packs").rename(root / "blobs")
    set_version(root, OLD)
    return root


def test_an_older_format_says_how_to_go_on(old: Path) -> None:
    """Opening a store of an older format names the operation that migrates it."""
    with pytest.raises(Incompatible, match="older") as caught:
        Store.open(old)
    assert caught.value.hint == "mstore.Store.migrate(PATH)"


def test_the_page_says_what_programs_say(old: Path, tmp_path: Path) -> None:
    """docs/releases.md quotes what an older program says of a newer store, and the other way round;
    neither changes anything."""
    page = (Path(__file__).parent.parent / "docs" / "releases.md").read_text()
    section = page.partition("### Upgrading a store")[2].partition("\n## ")[0]
    new = tmp_path / "new"
    Store.init(new).close()
    set_version(new, FORMAT_VERSION + 1)
    for root in (old, new):
        before = sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*"))
        with pytest.raises(Incompatible) as caught:
            Store.open(root)
        told = caught.value.what
        if root == old:
            # The page speaks of the next step, from this format on.
            for version in (FORMAT_VERSION, OLD):
                told = told.replace(f"format {version}", f"format {version + 1}")
        assert f"`{told}`" in section
        assert f"`{caught.value.told(Typed()).hint}`" in section
        assert sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*")) == before


def test_a_newer_format_says_how_to_go_on(tmp_path: Path) -> None:
    """A store of a newer format needs a newer program, for opening and for migrating."""
    root = tmp_path / "store"
    Store.init(root).close()
    set_version(root, FORMAT_VERSION + 1)
    for use in (Store.open, Store.migrate):
        with pytest.raises(Incompatible, match=str(FORMAT_VERSION + 1)) as caught:
            use(root)
        assert caught.value.hint == "pip install -U mstore"


def test_this_version_has_nothing_to_do(tmp_path: Path) -> None:
    """A store of this format is left alone."""
    root = tmp_path / "store"
    Store.init(root).close()
    report = Store.migrate(root)
    assert (report.found, report.target, report.steps) == (FORMAT_VERSION, FORMAT_VERSION, ())


def test_a_step_is_done_and_the_store_opens(old: Path) -> None:
    """After its step a store of the older format is one of this format, with the same uuid."""
    rest = (old / "format").read_text().split(" ", 2)[2]
    report = migrate(old, steps=ONE)
    assert (report.found, report.steps, report.done) == (OLD, (ONE[0].what,), True)
    assert (old / "format").read_text() == f"mstore {FORMAT_VERSION} {rest}"
    with Store.open(old) as store:
        assert store.fsck().problems == ()


def test_a_dry_run_changes_nothing(old: Path) -> None:
    """`dry_run` says the steps and does none."""
    report = migrate(old, steps=ONE, dry_run=True)
    assert (report.steps, report.done) == ((ONE[0].what,), False)
    assert (old / "blobs").exists()
    assert (old / "format").read_text().startswith(f"mstore {OLD} ")


def test_steps_follow_each_other(old: Path) -> None:
    """Two versions behind, both steps are done, and a gap between them is refused before any."""
    done = []

    def note(version: int) -> Step:
        def apply(root: Path) -> None:
            done.append((version, (root / "format").read_text().split()[1]))

        return Step(version, f"step {version}", apply)

    with pytest.raises(Incompatible, match=f"no step leads from format {OLD + 1}"):
        migrate(old, steps=[note(OLD)], target=OLD + 2)
    assert done == []
    migrate(old, steps=[note(OLD + 1), note(OLD)], target=OLD + 2)
    assert done == [(OLD, str(OLD)), (OLD + 1, str(OLD + 1))]


def test_killed_anywhere_it_can_be_run_again(old: Path) -> None:
    """At every operation that fails, the store is still migratable, and ends up whole."""
    for at in range(40):
        seen = 0

        def fail(operation: fs.Operation, at: int = at) -> None:
            nonlocal seen
            seen += 1
            if seen > at:
                raise OSError(5, "Input/output error")

        try:
            with fs.observed(fail):
                migrate(old, steps=ONE)
        except StorageFailed:
            version = (old / "format").read_text().split()[1]
            # The version is raised when the step is done, and never before.
            assert version == str(OLD) or (old / "packs").exists()
            continue
        break
    else:
        pytest.fail("it never ends")
    assert at > 3
    with Store.open(old) as store:
        assert store.fsck().problems == ()


def test_nobody_may_be_at_work(old: Path) -> None:
    """A held lease, or the writer lock, stops a migration before it begins."""
    program = (
        "import sys; from mstore import fs; from pathlib import Path;"
        "lock = fs.LockFile(Path(sys.argv[1])); lock.acquire();"
        "print('ready', flush=True); sys.stdin.read()"
    )
    for name in ("lock", "tmp/0123456789abcdef.lock"):
        command = [sys.executable, "-c", program, str(old / name)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            with pytest.raises(Conflict):
                migrate(old, steps=ONE)
            child.communicate()
        assert (old / "blobs").exists()


def test_there_must_be_a_store(tmp_path: Path) -> None:
    """Without a format file, or with one that is none, there is nothing to migrate."""
    with pytest.raises(NotFound):
        Store.migrate(tmp_path)
    (tmp_path / "format").write_text("something else\n")
    with pytest.raises(Corrupt):
        Store.migrate(tmp_path)
