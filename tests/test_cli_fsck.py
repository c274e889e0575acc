"""fsck, reindex and migrate at the command line: exit status, words, JSON."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import test_repair
from cli_runs import Program
from test_repair import break_payloads, break_table, packs

from mstore_cli.keys import DOCUMENTS

build = test_repair.build


@pytest.fixture
def mstore(template: Path, tmp_path: Path) -> Program:
    """The program on a copy of the store; `other` beside it is another copy."""
    shutil.copytree(template / "store", tmp_path / "store")
    shutil.copytree(template / "store", tmp_path / "other")
    return Program(tmp_path / "store")


def test_a_sample_prints_its_seed_and_can_be_repeated(mstore: Program) -> None:
    """The seed of a sample is printed; given back, it reads the same bytes."""
    first = mstore.succeed("fsck", "--sample", "30%", "--json").document
    assert first["sample"] == 0.3
    again = mstore.succeed("fsck", "--sample", "30%", "--seed", str(first["seed"]), "--json")
    assert again.document["bytes_read"] == first["bytes_read"]
    assert "seed" in mstore.succeed("fsck", "--sample", "0.5").out


def test_damage_is_told_with_the_next_command(mstore: Program) -> None:
    """Problems give status 1, name everyone who is affected, and end with what to type next."""
    break_payloads(mstore.store)
    done = mstore("fsck", "--read-data")
    assert done.status == 1
    assert f"next: mstore --store {mstore.store} fsck --read-data --repair --from" in done.out
    assert "expert, v1" in done.out
    told = mstore("fsck", "--read-data", "--json").document
    repair = f"mstore --store {mstore.store} fsck --read-data --repair --from PLACE"
    assert told["hint"].startswith(repair)


def test_repair_heals_and_ends_well(mstore: Program) -> None:
    """With a good copy at hand the status is 0, and the keys are those that are documented."""
    break_payloads(mstore.store)
    break_table(packs(mstore.store)[0])
    other = mstore.store.parent / "other"
    done = mstore.succeed("fsck", "--read-data", "--repair", "--from", other, "--json")
    assert tuple(done.document) == tuple(key.name for key in DOCUMENTS["fsck --repair"])
    assert done.document["healed"]
    assert done.document["condemned"] == [packs(other)[0].stem]
    assert "no problems found" in mstore.succeed("fsck", "--read-data").out
    assert "no problems found" in mstore.succeed("fsck", "--repair").out


def test_repair_that_leaves_problems_says_so(mstore: Program) -> None:
    """Without a copy the status is 1, and what is left is listed."""
    break_payloads(mstore.store)
    break_table(packs(mstore.store)[0])
    done = mstore("fsck", "--read-data", "--repair")
    assert done.status == 1
    assert "left" in done.out
    assert "condemned" in done.out


@pytest.mark.parametrize(
    "options",
    [
        ["--from", "x"],
        ["--seed", "1"],
        ["--sample", "5%", "--read-data"],
        ["--sample", "5%", "--repair"],
    ],
)
def test_options_that_do_not_go_together(mstore: Program, options: list[str]) -> None:
    """Wrong usage has status 2 and a command that works."""
    done = mstore("fsck", *options)
    assert done.status == 2
    assert f"hint: mstore --store {mstore.store} fsck" in done.err


def test_a_damaged_index_is_told_and_made_anew(mstore: Program) -> None:
    """fsck looks at the index before LMDB does; reindex is the hint, and it helps."""
    data = mstore.store / "index" / "data.mdb"
    whole = bytearray(data.read_bytes())
    # A root page far outside of the file: LMDB would end the process.
    whole[16 + 24 + 48 + 40 : 16 + 24 + 48 + 48] = (1 << 40).to_bytes(8, "little")
    whole[4096 + 128 : 4096 + 136] = (1 << 40).to_bytes(8, "little")
    data.write_bytes(whole)
    done = mstore("fsck")
    assert done.status == 1
    assert "the index is damaged" in done.err
    assert f"hint: mstore --store {mstore.store} reindex" in done.err
    report = mstore.succeed("reindex", "--json").document
    assert tuple(report) == tuple(key.name for key in DOCUMENTS["reindex"])
    assert "no problems found" in mstore.succeed("fsck", "--read-data").out


def test_a_missing_index_is_told_by_every_command(mstore: Program) -> None:
    """Whatever is asked of a store without an index, the hint is reindex."""
    shutil.rmtree(mstore.store / "index")
    for verb in ("log", "refs", "stats", "fsck"):
        done = mstore(verb)
        assert done.status == 1
        assert f"hint: mstore --store {mstore.store} reindex" in done.err
    assert "was rebuilt" in mstore.succeed("reindex").out
    assert "expert" in mstore.succeed("refs").out


def test_reindex_without_the_old_index_says_that_reflogs_begin_anew(mstore: Program) -> None:
    """What was lost is said."""
    assert "starts empty" in mstore.succeed("reindex", "--no-old-index").out


def test_there_is_nothing_to_migrate(mstore: Program) -> None:
    """A store of this format is left alone, with or without --dry-run."""
    assert "format 3 already" in mstore.succeed("migrate").out
    report = mstore.succeed("migrate", "--dry-run", "--json").document
    assert tuple(report) == tuple(key.name for key in DOCUMENTS["migrate"])
    assert report["steps"] == []


def test_an_older_store_names_migrate(mstore: Program) -> None:
    """Every command on a store of an older format names the command that helps."""
    path = mstore.store / "format"
    path.write_text(path.read_text().replace("mstore 3", "mstore 2"))
    done = mstore("log")
    assert done.status == 1
    assert f"hint: mstore --store {mstore.store} migrate" in done.err


def test_the_line_that_reads_more_keeps_the_places(mstore: Program, tmp_path: Path) -> None:
    """A repair that read no blocks names the one that does, with the same sources."""
    place = tmp_path / "a place"
    shutil.copytree(mstore.store, place)
    done = mstore("fsck", "--repair", "--from", place)
    assert f"fsck --repair --read-data --from '{place}'" in done.out
