"""Is a directory what a snapshot holds?  Files, tensors and blocks, and nothing written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import families
import pytest
from checkpoints import write_safetensors
from cli_runs import Program
from families import BLOCK
from msgspec.structs import replace
from small_models import files_of

from mstore import MergeRequest, Store
from mstore.api.reports import DirectoryDiffReport
from mstore.checkpoint.exclusion import Exclusion
from mstore.checkpoint.header import read_header
from mstore.snapshots.directory_diff import diff_directory
from mstore.store import leases
from mstore.store.models import Input
from mstore.terms.errors import BadCheckpoint, NotFound, StorageFailed
from mstore_cli.keys import DOCUMENTS

FAMILY = families.layered(rows=60)
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = FAMILY.write(tmp_path_factory.mktemp("family"))
    shutil.rmtree(root / "base")
    families.write_checkpoint(root / "base", FAMILY.base)
    return root


@pytest.fixture(scope="module")
def store(family: Path) -> Iterator[Store]:
    with Store.init(family / "store", block_size=BLOCK) as store:
        for name in ("base", *FAMILY.names):
            store.add(family / name, name=name)
        yield store


@pytest.fixture
def base(family: Path, tmp_path: Path) -> Path:
    """A copy of the base's directory, free to be changed."""
    return Path(shutil.copytree(family / "base", tmp_path / "base"))


def statuses(report: DirectoryDiffReport) -> tuple[dict[str, str], dict[str, str]]:
    return (
        {one.path: one.status for one in report.files},
        {one.name: one.status for one in report.tensors},
    )


def test_the_same(store: Store, base: Path) -> None:
    """Of what was added, or checked out, nothing is listed and all is counted."""
    for directory in (base, base.parent / "out"):
        if directory.name == "out":
            store.checkout("base", directory)
        report = store.diff_directory("base", directory)
        assert statuses(report) == ({}, {})
        assert report.files_equal == len(files_of(directory))
        assert report.tensors_equal == len(FAMILY.base)
        assert (report.blocks_changed, report.remarks, report.excluded) == (0, (), ())


@pytest.mark.parametrize("threads", [1, 3])
def test_it_says_what_a_diff_of_two_refs_says(store: Store, family: Path, threads: int) -> None:
    """Against the directory that a ref was added from: the same files, tensors and blocks as
    against that ref, but for distances."""
    for name in FAMILY.names:
        of_refs = store.diff("base", name, blocks=True)
        found = store.diff_directory("base", family / name, blocks=True, threads=threads)
        assert found.files == of_refs.files
        assert found.tensors == tuple(replace(one, relative_l2=None) for one in of_refs.tensors)
        assert found.files_equal == of_refs.files_equal
        assert found.tensors_equal == of_refs.tensors_equal
        assert (found.blocks_total, found.blocks_changed) == (
            of_refs.blocks_total,
            of_refs.blocks_changed,
        )


def test_each_way_to_differ(store: Store, base: Path) -> None:
    """A missing file is removed, an extra one added; a flipped byte names its tensor and block;
    a byte of the header or of another file is told as a changed file."""
    header = read_header(base / WEIGHTS)
    slot = max(header.tensors, key=lambda slot: slot.nbytes)
    at = header.data_start + slot.begin + BLOCK + 3
    data = bytearray((base / WEIGHTS).read_bytes())
    data[at] ^= 1
    (base / WEIGHTS).write_bytes(data)
    (base / "extra.txt").write_text("1")
    report = store.diff_directory("base", base, blocks=True)
    assert statuses(report) == (
        {WEIGHTS: "changed", "extra.txt": "added"},
        {slot.name: "changed"},
    )
    assert report.tensors[0].changed_blocks == (1,)
    assert store.diff_directory("base", base).tensors[0].changed_blocks is None
    data[at] ^= 1
    data[8 : len(header.raw)] = header.raw[8:].replace(b'"pt"', b'"tp"')
    (base / WEIGHTS).write_bytes(data)
    config = base / "config.json"
    config.write_bytes(config.read_bytes().replace(b"{", b"[", 1))
    (base / "extra.txt").unlink()
    wanted = {"config.json": "changed"}
    if b'"pt"' in header.raw:
        wanted[WEIGHTS] = "changed"
    assert statuses(store.diff_directory("base", base)) == (wanted, {})
    (base / WEIGHTS).unlink()
    files, tensors = statuses(store.diff_directory("base", base))
    assert files == {"config.json": "changed", WEIGHTS: "removed"}
    assert set(tensors) == set(FAMILY.base)
    assert set(tensors.values()) == {"removed"}


def test_earlier_states_below_are_extra_files(store: Store, base: Path, family: Path) -> None:
    """What a training run left below a model is told as added, and can be left out as in add."""
    shutil.copytree(family / FAMILY.names[0], base / "checkpoint-500")
    files, tensors = statuses(store.diff_directory("base", base))
    assert set(files.values()) == {"added"}
    assert f"checkpoint-500/{WEIGHTS}" in files
    assert set(tensors) == {f"checkpoint-500:{name}" for name in FAMILY.base}
    assert set(tensors.values()) == {"added"}
    without = store.diff_directory("base", base, exclude=["checkpoint-*/"])
    assert statuses(without) == ({}, {})
    assert without.excluded == ("checkpoint-500/",)


def test_other_forms(store: Store, base: Path) -> None:
    """Another dtype or shape, a tensor more or less, are told by name, as in a diff of refs."""
    header = read_header(base / WEIGHTS)
    data = (base / WEIGHTS).read_bytes()[header.data_start :]
    tensors = [(s.name, s.dtype, s.shape, data[s.begin : s.end]) for s in header.tensors]
    (name, _, shape, payload), gone, *others = tensors
    flat = (name, "F16", shape, payload)
    write_safetensors(base / WEIGHTS, [flat, *others, ("more", "U8", (3,), b"abc")])
    _, found = statuses(store.diff_directory("base", base))
    assert found == {name: "changed", gone[0]: "removed", "more": "added"}


def test_a_broken_file_differs(store: Store, base: Path) -> None:
    """A file that was cut off is no error: it differs, and a remark names it and says why."""
    data = (base / WEIGHTS).read_bytes()
    (base / WEIGHTS).write_bytes(data[: len(data) // 2])
    report = store.diff_directory("base", base)
    assert statuses(report)[0] == {WEIGHTS: "changed"}
    [remark] = report.remarks
    assert WEIGHTS in remark


def test_virtual_merges_are_computed(store: Store, tmp_path: Path) -> None:
    """A virtual merge is compared by what it reads as."""
    plan = store.plan(MergeRequest(base="base", experts=["e0", "e1"], method="linear"))
    store.merge(plan, name="later", virtual=True)
    store.checkout("later", tmp_path / "out")
    assert statuses(store.diff_directory("later", tmp_path / "out")) == ({}, {})
    with (tmp_path / "out" / WEIGHTS).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    files, tensors = statuses(store.diff_directory("later", tmp_path / "out"))
    assert files == {WEIGHTS: "changed"}
    assert list(tensors.values()) == ["changed"]


# -- what is no part of a model ----------------------------------------------------------------


def test_the_rules_of_add(store: Store, base: Path) -> None:
    """What add leaves out is not extra; what the snapshot holds is compared whatever the rules."""
    (base / "optimizer.pt").write_text("state")
    (base / ".git").mkdir()
    (base / ".git" / "HEAD").write_text("x")
    os.mkfifo(base / ".git" / "fifo")
    report = store.diff_directory("base", base)
    assert statuses(report) == ({}, {})
    assert report.excluded == (".git/", "optimizer.pt")
    (base / ".git" / "fifo").unlink()
    whole = store.diff_directory("base", base, default_excludes=False)
    assert statuses(whole)[0] == {"optimizer.pt": "added", ".git/HEAD": "added"}
    store.add(base, name="all", default_excludes=False)
    assert statuses(store.diff_directory("all", base)) == ({}, {})
    (base / "optimizer.pt").write_text("other")
    assert statuses(store.diff_directory("all", base))[0] == {"optimizer.pt": "changed"}
    (base / ".mstoreignore").write_text("*.log\n")
    (base / "train.log").write_text("")
    assert "train.log" in store.diff_directory("base", base).excluded
    assert "notes.txt" not in store.diff_directory("base", base, exclude=["*.txt"]).excluded


def test_exclusions_keep_what_is_stored() -> None:
    """A stored path stays, with the directories on its way, under any pattern."""
    exclusion = Exclusion.chosen(["*", "a/"]).keeping(["a/b/c.json"])
    assert exclusion.deciding("a", is_directory=True) is None
    assert exclusion.deciding("a/b", is_directory=True) is None
    assert exclusion.deciding("a/b/c.json", is_directory=False) is None
    assert exclusion.deciding("a/b/d.json", is_directory=False) is not None


# -- reading safely ----------------------------------------------------------------------------


def test_the_directory_is_read_as_add_reads_it(store: Store, base: Path) -> None:
    """Links out of it, special files and files that change meanwhile are refused, not followed."""
    (base / "out").symlink_to("/etc/passwd")
    with pytest.raises(BadCheckpoint, match="symlink out"):
        store.diff_directory("base", base)
    (base / "out").unlink()
    os.mkfifo(base / "fifo")
    with pytest.raises(BadCheckpoint, match="fifo"):
        store.diff_directory("base", base)
    (base / "fifo").unlink()
    with pytest.raises(NotFound):
        store.diff_directory("base", base / "none")

    def swap(progress: object) -> None:
        # After the first hash: the weights are another state by now than was listed.
        (base / WEIGHTS).touch()

    with pytest.raises(BadCheckpoint, match="changed while"):
        diff_directory(
            store._catalog,
            Input(store["base"].id, "base"),
            base,
            exclusion=Exclusion.chosen(),
            blocks=False,
            threads=1,
            progress=swap,
        )


def stamps(folder: Path) -> dict[Path, tuple[int, ...]]:
    """What writing changes of each file; reading may change the time of access."""
    found = {path: path.stat() for path in folder.rglob("*")}
    return {path: (s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for path, s in found.items()}


def test_nothing_is_written(store: Store, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither store nor directory changes; where no pin can be made either, it works all the
    same."""

    def refused(*given: object, **named: object) -> None:
        raise StorageFailed("read-only")

    before = files_of(base)
    packs = stamps(store.path / "packs")
    monkeypatch.setattr(leases.fs, "LockFile", refused)
    assert statuses(store.diff_directory("base", base)) == ({}, {})
    assert files_of(base) == before
    assert stamps(store.path / "packs") == packs


# -- at the terminal ---------------------------------------------------------------------------


def test_which_is_taken(
    store: Store, family: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ref comes before a directory of its name, with a remark; ./NAME is the directory."""
    mstore = Program(store.path)
    monkeypatch.chdir(base.parent)
    done = mstore.succeed("diff", "base", "base", "--json")
    assert set(done.document) >= {"a", "b"}
    assert "taken as the snapshot; the directory is ./base" in done.err
    for name in ("./base", "base/", str(base)):
        done = mstore.succeed("diff", "base", name, "--json")
        assert done.err == ""
        assert done.document["directory"].rstrip("/").endswith("base")
        assert done.document["files"] == []
        assert list(done.document) == [key.name for key in DOCUMENTS["diff REF DIR"]]
    shutil.copytree(base, "elsewhere")
    assert mstore.succeed("diff", "base", "elsewhere", "--json").document["files"] == []
    assert "is what" in mstore.succeed("diff", "base", "elsewhere").out
    missing = mstore("diff", "base", "nowhere")
    assert missing.status == 1
    assert "nowhere" in missing.err
    assert mstore("diff", "base", "e0", "--exclude", "x").status == 2


def test_what_is_printed(store: Store, base: Path) -> None:
    """The tables name files and tensors, -q prints their names, and the status is 0 either way."""
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"more": 1}))
    (base / "extra").write_text("")
    mstore = Program(store.path)
    done = mstore.succeed("diff", "base", base)
    assert [line.split()[:2] for line in done.lines if line.startswith(("config", "extra"))] == [
        ["config.json", "changed"],
        ["extra", "added"],
    ]
    assert mstore.succeed("diff", "base", base, "-q").lines == ["config.json", "extra"]
    broken = mstore.succeed("diff", "base", base / WEIGHTS)
    assert "config.json" in broken.out
    assert "removed" in broken.out
