"""Remotes on the command line: what people type, what they read, and which errors they meet."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from cli_runs import Done, Program, run_once
from servers import Server, moto, s3_environment
from small_models import BLOCK, files_of, small_model
from test_cli_commands import write_keys

from mstore.api import exchanging
from mstore_cli import tree, user_config
from mstore_cli.errors import UsageError
from mstore_cli.exchange import resumable
from mstore_cli.options import JOBS
from mstore_cli.session import Choices, Session
from mstore_cli.verbs import second_words


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The settings of a user who has none yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "own"))
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "own" / "mstore" / "config.toml"


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with models, a store of them, and a remote that has them."""
    root = tmp_path_factory.mktemp("first")
    mstore = Program(root / "store")
    mstore.succeed("init", "--block-size", f"{BLOCK >> 10}KiB")
    for name, base in (("base", "none"), ("tuned", "base")):
        small_model(root / name, "x", changed=name)
        mstore.succeed("add", root / name, "--name", name, "--base", base)
    small_model(root / "other", "y")
    mstore.succeed("tag", "v1", "base")
    return root


@pytest.fixture
def here(first: Path, tmp_path: Path) -> Program:
    """A store whose remote `origin` has nothing yet."""
    mstore = Program(Path(shutil.copytree(first / "store", tmp_path / "here")))
    mstore.succeed("remote", "add", "origin", (tmp_path / "there").as_uri())
    return mstore


@pytest.fixture
def there(here: Program, tmp_path: Path) -> Program:
    """Another store, cloned from the same remote after all was pushed."""
    here.succeed("push", "origin", "--all")
    mstore = Program(tmp_path / "clone")
    clone((tmp_path / "there").as_uri(), mstore.store)
    return mstore


def clone(source: str, directory: Path) -> Done:
    """Run a clone that must go well."""
    done = run_once(["clone", source, str(directory)])
    assert done.status == 0, done.err
    return done


def add(mstore: Program, model: Path, name: str) -> str:
    """Add a model to a branch; return the beginning of the snapshot's id."""
    [id] = mstore.succeed("add", model, "--name", name, "--base", "none", "-q").lines
    return id[:12]


def test_push_says_what_moved(here: Program, tmp_path: Path) -> None:
    """A push says which refs moved, from where to where, how much went, and in how many packs;
    with -q it prints names, and the second one says that nothing is to do."""
    dry = here.succeed("push", "origin", "base", "--dry-run")
    assert dry.lines[0] == f"would be pushed to origin, {(tmp_path / 'there').as_uri()}"
    assert not (tmp_path / "there" / "roots").exists()
    done = here.succeed("push", "origin", "base", "v1")
    assert done.lines[0] == f"pushed to origin, {(tmp_path / 'there').as_uri()}"
    [id] = here.succeed("show", "base", "-q").lines
    assert [line.split() for line in done.lines[2:4]] == [
        ["base", id[:12], "(new)"],
        ["v1", id[:12], "(new)"],
    ]
    assert [line.split()[0] for line in done.lines[4:]] == ["snapshots", "blocks", "size", "time"]
    assert "1 pack, " in done.out
    assert [line.split()[0] for line in dry.lines[-3:]] == ["size", "requests", "time"]
    assert dry.lines[-3].split() == done.lines[-2].split()
    assert here.succeed("push", "origin", "base").out == "origin is up to date\n"
    assert here.succeed("push", "origin", "--all", "-q").lines == ["tuned"]
    removed = here.succeed("push", "origin", "--delete", "v1")
    assert f"v1   {id[:12]} (removed)" in removed.out


def test_push_needs_a_ref(here: Program) -> None:
    """A push without a ref is wrong usage; the hint has both ways to name some."""
    done = here("push", "origin")
    assert done.status == 2
    store = f"mstore --store {here.store}"
    assert f"hint: {store} push origin REF, or {store} push origin --all" in done.err


def test_a_family_goes_round(there: Program, here: Program, first: Path, tmp_path: Path) -> None:
    """What one store pushes, another one has after a clone or a pull, byte for byte."""
    there.succeed("checkout", "tuned", tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(first / "tuned")
    assert there.succeed("remote", "-q").lines == ["origin"]
    [old] = here.succeed("show", "tuned", "-q").lines
    new = add(here, first / "other", "tuned")
    here.succeed("push", "origin", "tuned")
    fetched = there.succeed("fetch", "origin", "tuned")
    assert f"origin/tuned  {old[:12]}..{new}" in fetched.out
    assert "moved here" not in fetched.out
    assert there.succeed("show", "tuned", "-q").lines == [old]
    pulled = there.succeed("pull", "origin")
    assert pulled.out.partition("moved here\n")[2].splitlines()[1] == f"tuned  {old[:12]}..{new}"
    assert there.succeed("pull", "origin").out == "nothing new at origin\n"
    assert there.succeed("fetch", "origin", "--json").document["fetched"] == []


def test_a_branch_that_diverged(there: Program, here: Program, first: Path) -> None:
    """A pull leaves a branch that diverged and a tag that differs, moves the others, says what to
    do, and ends with 1; what it says to do works."""
    add(here, first / "other", "tuned")
    here.succeed("rm", "v1")
    here.succeed("tag", "v1", "tuned")
    here.succeed("push", "origin", "--delete", "v1")
    here.succeed("push", "origin", "v1")
    new = add(here, first / "tuned", "base")
    here.succeed("push", "origin", "--all")
    mine = add(there, first / "base", "tuned")
    done = there("pull", "origin")
    assert done.status == 1
    named = f"mstore --store {there.store}"
    assert done.lines[-6:] == [
        "tuned diverged from origin/tuned, and stays",
        f"  to compare them: {named} diff tuned origin/tuned",
        f"  to take theirs: {named} reset tuned origin/tuned",
        f"  to replace theirs: {named} push origin tuned --force-with-lease",
        "v1 is a tag here, and another one there: it stays",
        f"  to take theirs: {named} rm v1 && {named} pull origin v1",
    ]
    assert there.succeed("show", "base", "-q").lines[0].startswith(new)
    assert there.succeed("show", "tuned", "-q").lines[0].startswith(mine)
    quiet = there("pull", "origin", "tuned", "-q")
    assert (quiet.status, quiet.out) == (1, "")
    assert quiet.err == "warning: tuned diverged from origin's, and stays\n"
    refused = there("push", "origin", "tuned")
    assert refused.status == 1
    assert f"{named} push origin tuned --force-with-lease" in refused.err
    there.succeed("push", "origin", "tuned", "--force-with-lease")
    here.succeed("fetch", "origin")
    here.succeed("reset", "tuned", "origin/tuned")
    assert here.succeed("pull", "origin").out == "nothing new at origin\n"
    there.succeed("rm", "v1")
    assert there.succeed("pull", "origin", "v1", "-q").lines == ["v1"]


def test_a_name_that_cannot_be_made(there: Program, here: Program) -> None:
    """A pull makes no branch below a ref of this store, and says how to get it otherwise."""
    here.succeed("rename", "base", "llama/base")
    here.succeed("push", "origin", "llama/base")
    there.succeed("rename", "base", "llama")
    done = there("pull", "origin", "llama/base")
    assert done.status == 1
    assert done.lines[-2:] == [
        "llama/base is not made here: it would be above or below a ref of this store",
        f"  to make a branch of it: mstore --store {there.store} reset NAME origin/llama/base",
    ]
    there.succeed("reset", "theirs", "origin/llama/base")


def test_signatures_are_told(
    there: Program, here: Program, first: Path, settings: Path, tmp_path: Path
) -> None:
    """A pull says by whom the snapshots are signed that came, as the user's list of signers says;
    nothing of signatures where there are none."""
    write_keys(tmp_path)
    add(here, first / "other", "other")
    here.succeed("push", "origin", "other")
    assert "SIGNED" not in there.succeed("fetch", "origin", "other").out
    here.succeed("sign", "tuned", "--key", tmp_path / "key")
    here.succeed("reset", "other", "tuned")
    here.succeed("push", "origin", "other", "--force-with-lease")
    told = there.succeed("fetch", "origin", "other").out
    assert told.count("  signed by an unknown key") == 1
    settings.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(tmp_path / "signers", settings.parent / "allowed_signers")
    pulled = there.succeed("pull", "origin", "other")
    assert "moved here" in pulled.out
    assert pulled.out.partition("moved here")[2].count("  signed by me") == 1


def test_remotes_are_listed_renamed_and_forgotten(there: Program) -> None:
    """`remote` lists names and addresses; show, rename and rm do what they say."""
    [heading, row] = there.succeed("remote").lines
    assert heading.split() == ["NAME", "URL"]
    _, url = row.split()
    shown = there.succeed("remote", "show", "origin")
    assert ["base", "branch", "yes", "same"] in [
        line.split()[:2] + line.split()[3:] for line in shown.lines
    ]
    assert "snapshots   2" in shown.lines
    there.succeed("remote", "rename", "origin", "team")
    assert "remotes/team/base" in there.succeed("refs", "remotes/*", "-q").lines
    done = there.succeed("remote", "rm", "team")
    assert done.lines[1] == (f"to add it again: mstore --store {there.store} remote add team {url}")
    assert there.succeed("refs").out.count("remote ref") == 0
    assert "no remotes; next: " in there.succeed("remote").out
    for line in (["push", "team", "base"], ["remote", "show", "team"]):
        failed = there(*line)
        assert failed.status == 1
        assert failed.err == (
            f"error: team: no such remote\nhint: mstore --store {there.store} remote add team URL\n"
        )


def test_nothing_is_there(here: Program, tmp_path: Path) -> None:
    """Where no remote is, every command but push says so and names the push that makes one."""
    for line in (["fetch", "origin"], ["pull", "origin"], ["remote", "show", "origin"]):
        failed = here(*line)
        assert failed.status == 1
        assert f"{(tmp_path / 'there').as_uri()}: there is no remote\n" in failed.err
        assert f"mstore --store {here.store} push origin --all makes a remote" in failed.err
    failed = run_once(["clone", (tmp_path / "there").as_uri(), str(tmp_path / "new")])
    assert failed.status == 1
    assert "there is no remote\nhint: check the address" in failed.err
    assert not (tmp_path / "new").exists()


def test_a_remote_is_kept_in_order(there: Program, tmp_path: Path) -> None:
    """`remote du` says what refs take, `gc` condemns and deletes what none needs, and `fsck` finds
    what is damaged and ends with 1."""
    usage = there.succeed("remote", "du", "origin", "--json").document
    assert [one["name"] for one in usage["refs"]] == ["base", "tuned", "v1"]
    there.succeed("push", "origin", "--delete", "tuned")
    gone = there.succeed("remote", "gc", "origin", "--reflog-days", "0", "-q").lines
    assert gone == there.succeed("show", "tuned", "-q").lines
    there.succeed("remote", "gc", "origin", "--reflog-days", "0", "--grace-hours", "0")
    clean = there.succeed("remote", "fsck", "origin", "--read-data")
    assert clean.lines[0].startswith("no problems at origin, ")
    assert there.succeed("remote", "fsck", "origin").lines[-1].endswith("origin --read-data")
    for pack in (tmp_path / "there" / "packs").rglob("*.pack"):
        pack.unlink()
    damaged = there("remote", "fsck", "origin")
    assert damaged.status == 1
    assert "problem" in damaged.lines[0]
    assert "packs/" in damaged.out
    assert damaged.lines[-1].startswith("next: ")


def test_wrong_names_are_told(there: Program) -> None:
    """Names that are taken or missing, of remotes and of their refs, are told with what to do."""
    named = f"mstore --store {there.store}"
    show = f"{named} remote show origin"
    for line, what, hint in (
        (
            ["remote", "add", "origin", "file:///x"],
            "there is a remote",
            f"{named} remote rm origin",
        ),
        (
            ["remote", "add", "other", "x/y"],
            "no address",
            f"directory is {Path('x/y').absolute().as_uri()}",
        ),
        (["remote", "rename", "orign", "x"], "no such remote", "did you mean origin?"),
        (["push", "origin", "tuend"], "no such ref", "did you mean tuned?"),
        (["push", "origin", "--delete", "tuend"], "origin has no such ref", "did you mean tuned?"),
        (["push", "origin", "--delete", "xyz"], "origin has no such ref", show),
        (["push", "origin", "remotes/origin/base"], "is a remote ref", f"{named} reset NAME"),
        (["fetch", "origin", "xyz"], "origin has no such ref", show),
        (["pull", "origin", "x*"], "no ref matches", show),
    ):
        failed = there(*line)
        assert failed.status in (1, 2)
        assert what in failed.err.splitlines()[0]
        assert hint in failed.err.partition("hint: ")[2]


def test_addresses_with_secrets_are_not_shown(here: Program) -> None:
    """An address with a password or a signature is wrong usage, and no output has it."""
    for url in ("s3://me:hunter2@bucket/x", "az://box/x?sig=hunter2"):
        failed = here("remote", "add", "other", url)
        assert failed.status == 2
        assert "credentials come from the environment" in failed.err
        assert "hunter2" not in failed.err + failed.out
    assert "it begins with s3://" in here("remote", "add", "other", "ftp://x/y").err


def test_object_storage(
    here: Program, first: Path, tmp_path: Path, moto: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models go round by a server of S3 that the environment names; a wrong bucket is told."""
    moto.use(monkeypatch)
    url = moto.below()
    here.succeed("remote", "add", "s3", url)
    here.succeed("push", "s3", "--all", "--limit-rate", "1GiB")
    shown = here.succeed("remote", "show", "s3", "--json").document
    assert [one["name"] for one in shown["refs"]] == ["base", "tuned", "v1"]
    clone(url, tmp_path / "clone")
    mstore = Program(tmp_path / "clone")
    mstore.succeed("checkout", "tuned", tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(first / "tuned")
    assert mstore.succeed("pull", "origin").out == "nothing new at origin\n"
    here.succeed("remote", "add", "wrong", "s3://no-such-bucket/x")
    failed = here("push", "wrong", "base")
    assert failed.status == 1
    assert "there is no such bucket" in failed.err
    assert not any(secret in failed.err for secret in moto.secrets)


# Habits


def test_the_remote_need_not_be_named(here: Program, first: Path) -> None:
    """push, fetch and pull take the only remote, else origin; of several others they say which
    there are, and where there is none, how to add one."""
    here.succeed("push", "--all")
    assert here.succeed("fetch").out == here.succeed("pull").out == "nothing new at origin\n"
    here.succeed("remote", "add", "other", "file:///nowhere")
    assert here.succeed("pull", "-q").out == ""
    here.succeed("remote", "rename", "origin", "team")
    for verb in ("push", "fetch", "pull"):
        failed = here(verb)
        assert failed.status == 2
        assert failed.err == (
            "error: there are several remotes: other, team\n"
            f"hint: mstore --store {here.store} {verb} other\n"
        )
    here.succeed("remote", "rm", "other")
    add(here, first / "other", "tuned")
    failed = here("push", "tuned")
    assert "tuned: is a ref; the remote stands before it" in failed.err
    assert failed.err.endswith(f"mstore --store {here.store} push team tuned\n")
    here.succeed("remote", "rm", "team")
    failed = here("pull")
    assert "no remote" in failed.err
    assert failed.err.endswith(f"mstore --store {here.store} remote add NAME URL\n")


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("push base:base", "push origin base"),
        ("push +base:base", "push origin base --force-with-lease"),
        ("push refs/heads/base:base", "push origin base"),
        ("push base:other", "reset other base, then STORE push origin other"),
        ("push :base", "push origin --delete base"),
        ("push +base", "push origin base --force-with-lease"),
        ("fetch base:base", "fetch origin base"),
        ("fetch +base", "fetch origin base"),
        ("pull base:mine", "fetch origin base, then STORE reset mine origin/base"),
        ("fetch refs/heads/base:refs/remotes/origin/base", "fetch origin base"),
    ],
)
def test_refspecs(here: Program, line: str, hint: str) -> None:
    """A refspec of git is wrong usage, and the hint has the command that does the same."""
    verb, refspec = line.split()
    failed = here(verb, "origin", refspec)
    assert failed.status == 2
    assert f"'{refspec}' is no name: a ref has the same name here and at a remote" in failed.err
    store = f"mstore --store {here.store}"
    assert failed.err.splitlines()[1] == f"hint: {store} {hint.replace('STORE', store)}"


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("s3:/models/x", "s3://models/x"),
        ("s3:models/x", "s3://models/x"),
        ("gs:/models/x", "gs://models/x"),
        ("AZ:/models/x", "az://models/x"),
        ("file:/srv/models", "file:///srv/models"),
        ("http:/host/remote", "http://host/remote"),
    ],
)
def test_an_address_that_lacks_a_slash(here: Program, url: str, meant: str, tmp_path: Path) -> None:
    """It is no path, and the hint has the address that was meant."""
    for line in (
        ["--store", str(here.store), "remote", "add", "x", url],
        ["clone", url, str(tmp_path / "new")],
    ):
        failed = run_once(line)
        assert failed.status == 2
        assert failed.err.endswith(f"hint: did you mean {meant}?\n")


def test_what_the_remote_removed_stays_here(there: Program, here: Program) -> None:
    """A pull or fetch says which branches and tags the remote removed and this store keeps, and
    the command that removes them."""
    here.succeed("push", "origin", "--delete", "tuned", "--delete", "v1")
    there.succeed("rm", "v1")
    pulled = there.succeed("pull", "origin")
    assert pulled.lines[-2:] == [
        "origin has no tuned any more; here they stay",
        f"  to remove them here, too: mstore --store {there.store} rm tuned",
    ]
    assert there.succeed("pull", "origin").out == "nothing new at origin\n"
    there.succeed("rm", "tuned")
    here.succeed("push", "origin", "tuned")
    there.succeed("pull", "origin", "tuned")
    here.succeed("push", "origin", "--delete", "tuned")
    assert there.succeed("fetch", "origin").lines[-1].endswith("rm tuned")


def test_contents_of_ancestors_are_said_to_be_left_out(
    here: Program, first: Path, tmp_path: Path
) -> None:
    """push, pull and clone say of how many ancestors they left the contents out, and name them in
    JSON; with --ancestors there is nothing to say."""
    add(here, first / "other", "tuned")
    left = "left out   the contents of 2 ancestors"
    assert left in here.succeed("push", "origin", "tuned", "--dry-run").lines
    old = [here.succeed("show", name, "-q").lines[0] for name in ("base", "tuned~1")]
    pushed = here.succeed("push", "origin", "tuned", "--json").document
    assert sorted(pushed["without_contents"]) == sorted(old)
    done = clone((tmp_path / "there").as_uri(), tmp_path / "clone")
    assert left in done.lines
    other = Program(tmp_path / "other")
    other.succeed("init", "--block-size", f"{BLOCK >> 10}KiB")
    other.succeed("remote", "add", "origin", (tmp_path / "there").as_uri())
    assert left in other.succeed("pull").lines
    shown = here.succeed("remote", "show", "origin").lines
    assert "snapshots   3, 2 without contents" in shown
    done = here.succeed("push", "origin", "--all", "--ancestors")
    assert "left out" not in done.out


def test_show_compares_with_the_branches_here(there: Program, here: Program, first: Path) -> None:
    """`remote show` says for each ref how far the one of this store is ahead or behind, as far as
    its snapshots are here, and what to type."""

    def compared() -> dict[str, str]:
        rows = [line.split(maxsplit=4) for line in there.succeed("remote", "show", "origin").lines]
        return {row[0]: row[4] for row in rows if row[1:2] in (["branch"], ["tag"])}

    named = f"mstore --store {there.store}"
    assert compared() == {"base": "same", "tuned": "same", "v1": "same"}
    assert "to get" not in there.succeed("remote", "show", "origin").out
    add(there, first / "other", "tuned")
    add(here, first / "other", "base")
    here.succeed("push", "origin", "base")
    assert compared() == {"base": "other", "tuned": "1 ahead", "v1": "same"}
    lines = there.succeed("remote", "show", "origin").lines
    assert lines[-2:] == [
        f"to get what is new: {named} pull origin",
        f"to send what is new: {named} push origin tuned",
    ]
    there.succeed("fetch", "origin")
    add(there, first / "tuned", "base")
    assert compared()["base"] == "1 ahead, 1 behind"
    there.succeed("rm", "tuned")
    told = there.succeed("remote", "show", "origin", "--json").document["refs"]
    assert [(one["name"], one["ahead"], one["behind"]) for one in told] == [
        ("base", 1, 1),
        ("tuned", None, None),
        ("v1", 0, 0),
    ]
    assert compared()["tuned"] == "-"


@pytest.mark.rest
def test_a_missing_object_names_the_check(
    there: Program, here: Program, first: Path, tmp_path: Path
) -> None:
    """Where an object of the remote is gone or damaged, the hint is the check of that remote, and
    never one of this store; the check itself does not name itself."""
    add(here, first / "other", "other")
    here.succeed("push", "origin", "other")
    check = f"hint: mstore --store {there.store} remote fsck origin\n"
    lists = {path: path.read_bytes() for path in (tmp_path / "there" / "lists").iterdir()}
    for path, data in lists.items():
        path.write_bytes(bytes(len(data)))
    failed = there("pull", "origin")
    assert failed.status == 1
    assert failed.err.endswith(check)
    assert "put this object back" in there("remote", "fsck", "origin").err
    for path, data in lists.items():
        path.write_bytes(data)
    for path in (tmp_path / "there" / "packs").rglob("*.pack"):
        path.unlink()
    failed = there("pull", "origin")
    assert failed.status == 1
    assert "origin lacks an object that it needs" in failed.err
    assert failed.err.endswith(check)
    cloned = run_once(["clone", (tmp_path / "there").as_uri(), str(tmp_path / "new")])
    assert cloned.status == 1
    assert cloned.err.endswith("mstore --store STORE remote fsck NAME\n")
    assert "no such bundle" in (failed := run_once(["clone", "bundle:no", str(tmp_path / "b")])).err
    assert failed.err.endswith("hint: check the path\n")


@pytest.mark.rest
def test_ctrl_c_ends_a_slow_push(here: Program, tmp_path: Path) -> None:
    """A push of one byte a second ends when it is interrupted, and says how to go on."""
    command = [sys.executable, "-m", "mstore_cli", "--store", str(here.store), "push", "origin"]
    # A process of its own, whose Ctrl-C is no other's.
    process = subprocess.Popen(
        [*command, "base", "--limit-rate", "1B"], stderr=subprocess.PIPE, text=True
    )
    try:
        sent = here.store / "remotes" / "origin" / "sent"
        while not (sent.is_dir() and any(sent.iterdir())):
            assert process.poll() is None
            time.sleep(0.05)
        # The pack is being put, and waits for its first second.
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert told == "interrupted\nhint: the same command goes on from what was transferred\n"


@pytest.mark.rest
def test_ctrl_c_does_not_wait_for_a_silent_server(tmp_path: Path) -> None:
    """A command that waits for the answer of a server that never answers ends when it is
    interrupted, long before that request would."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-m", "mstore_cli", "clone", "--lazy", "s3://bucket/family"]
        process = subprocess.Popen(
            [*command, str(tmp_path / "clone")],
            env=os.environ | s3_environment(endpoint),
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            silent.settimeout(60)
            connection, _ = silent.accept()
            with connection:
                assert connection.recv(1)
                began = time.monotonic()
                process.send_signal(signal.SIGINT)
                _, told = process.communicate(timeout=100)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 130
    assert told.splitlines()[-1] == "interrupted"
    # A request ends after 120 s, and is tried again.
    assert time.monotonic() - began < 60


WAITS = """
import signal, sys, time
from mstore_cli import main
# A shell has what runs in the background ignore it, tests too.
signal.signal(signal.SIGINT, signal.default_int_handler)
main._UNTIL_ENDED = float(sys.argv[1])
main._hear_stops()
try:
    print("ready", flush=True)
    time.sleep(600)
finally:
    time.sleep(600)
"""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("again", [True, False])
def test_a_stop_does_not_wait_for_long(again: bool, number: signal.Signals) -> None:
    """Where the first Ctrl-C or SIGTERM has to wait for what is under way, the program says so; a
    second one ends it, or some seconds do."""
    command = [sys.executable, "-c", WAITS, "600" if again else "0.1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(number)
            told = process.stderr.readline()
            if again:
                process.send_signal(number)
            assert process.wait(60) == 130
        finally:
            process.kill()
    assert told == "note: waiting for what is under way; Ctrl-C again does not wait\n"


# Object storage: where requests go, and whose credentials


def test_addressing_styles_are_kept(here: Program, tmp_path: Path) -> None:
    """--addressing-style is in the store's settings, is listed, and is in what `remote rm` says to
    add the remote again; a word that is none is refused."""
    here.succeed("remote", "add", "far", "s3://bucket/x", "--addressing-style", "virtual")
    config = tomllib.loads((here.store / "config").read_text())
    assert config["remote"]["far"] == {"url": "s3://bucket/x", "addressing_style": "virtual"}
    listed = here.succeed("remote").lines
    assert listed[0].split() == ["NAME", "URL", "STYLE"]
    assert [line.split()[2] for line in listed[1:]] == ["virtual", "-"]
    removed = here.succeed("remote", "rm", "far")
    assert removed.lines[-1].endswith("far s3://bucket/x --addressing-style virtual")
    for url, style in (("s3://bucket/x", "auto"), ((tmp_path / "x").as_uri(), "path")):
        failed = here("remote", "add", "far", url, "--addressing-style", style)
        assert failed.status == 2
        assert "addressing style" in failed.err


@pytest.mark.rest
def test_credentials_come_from_a_profile(
    here: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without credentials in the environment those of the profile that AWS_PROFILE names are used,
    with its region; no output and no file of the store has them. A profile that is not there, or
    cannot be used, is told without what its programs print. Variables go before it; without boto3
    obstore is left to look for some."""
    pytest.importorskip("boto3")
    with moto(tmp_path) as server:
        server.use(monkeypatch)
        key, secret = (
            server.environment[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        )
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
            monkeypatch.delenv(name)
        file = tmp_path / "credentials"
        file.write_text(f"[models]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
        (tmp_path / "aws").write_text(
            "[profile models]\nregion = eu-central-1\n[profile empty]\nregion = eu-central-1\n"
            f"[profile broken]\ncredential_process = sh -c 'echo {secret} >&2; exit 1'\n"
            "[profile sso]\nsso_start_url = https://sso.invalid\nsso_region = eu-central-1\n"
            "sso_account_id = 123456789012\nsso_role_name = models\n"
        )
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws"))
        # No role of a machine takes their place.
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        here.succeed("remote", "add", "s3", server.below())
        for profile, what in (
            ("other", "AWS has no such profile"),
            ("empty", "no credentials"),
            ("broken", "cannot be used (CredentialRetrievalError)"),
            ("sso", "cannot be used (SSOTokenLoadError)"),
        ):
            monkeypatch.setenv("AWS_PROFILE", profile)
            failed = here("push", "s3", "base")
            assert failed.status == 1
            assert what in failed.err
            assert f"aws sso login --profile {profile}, or" in failed.err
            assert secret not in failed.err
        monkeypatch.setenv("AWS_PROFILE", "models")
        pushed = here.succeed("push", "s3", "base")
        url = pushed.lines[0].rpartition(" ")[2]
        cloned = clone(url, tmp_path / "clone")
        with Session(Choices(store=here.store)).open_to_exchange() as store:
            assert store.s3_credentials is not None
            assert store.s3_credentials.config == {"region": "eu-central-1"}  # type: ignore[attr-defined]
            assert store.s3_credentials()["access_key_id"] == key
            with pytest.raises(TypeError, match="not pickled"):
                pickle.dumps(store.s3_credentials)
            assert key.encode() not in pickle.dumps(store)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
        with Session(Choices(store=here.store)).open_to_exchange() as store:
            assert store.s3_credentials is None
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
        with Session(Choices(store=here.store)).open_to_exchange() as store:
            assert store.s3_credentials is None
    hidden = (key, secret)
    assert not any(one in pushed.out + cloned.out + failed.err for one in hidden)
    for path in (*here.store.rglob("*"), *(tmp_path / "clone").rglob("*")):
        if path.is_file():
            assert not any(one.encode() in path.read_bytes() for one in hidden)


# Endpoints


def test_a_server_that_no_remote_needs_stays_trusted(here: Program) -> None:
    """`remote rm` says that the server of the remote is still in the user's settings, and how to
    remove it; not while another remote needs it."""
    server = "http://127.0.0.1:9"
    for name in ("far", "farther"):
        here.succeed("remote", "add", name, f"s3://bucket/{name}", "--endpoint", server)
    assert "may still go" not in here.succeed("remote", "rm", "far").out
    told = here.succeed("remote", "rm", "farther").lines[-1]
    begin, _, command = told.partition(": mstore ")
    assert begin == f"your credentials may still go to {server}; to end that"
    here.succeed(*command.split()[2 if command.startswith("--store") else 0 :])
    assert user_config.read()["endpoints"] == []


def test_credentials_go_where_the_user_said(here: Program, settings: Path) -> None:
    """An endpoint of a store's settings gets credentials if the user's settings or environment
    name it: `remote add --endpoint` adds it there, and without it the hint does."""
    server = "http://127.0.0.1:9"
    done = here.succeed("remote", "add", "far", "s3://bucket/x", "--endpoint", f"{server}/")
    assert f"your credentials may go to {server}" in done.lines
    assert user_config.read()["endpoints"] == [server]
    assert here.succeed("remote").lines[0].split() == ["NAME", "URL", "ENDPOINT"]
    here.succeed("config", "--user", "--unset", "endpoints", f"{server}/")
    failed = here("fetch", "far")
    assert failed.status == 1
    assert f"send your credentials to {server}" in failed.err
    hint = f"mstore --store {here.store} config --user endpoints {server}"
    assert failed.err.splitlines()[1] == f"hint: {hint}"
    here.succeed("config", "--user", "endpoints", server)
    with Session(Choices(store=here.store)).open_to_exchange() as store:
        assert set(store.trusted_endpoints) == {server}
    assert "endpoints" in settings.read_text()


def test_the_environment_names_endpoints(here: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoints of the environment are trusted; what is no address there is left to others."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://one:1/")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://user:hunter2@two")
    with Session(Choices(store=here.store)).open_to_exchange() as store:
        assert set(store.trusted_endpoints) == {"http://one:1"}


def test_an_endpoint_is_an_address(here: Program) -> None:
    """What is no address of a server is refused as an endpoint, and kept nowhere."""
    for word in ("minio", "s3://x", "https://a:hunter2@b", ""):
        failed = here("config", "--user", "endpoints", word)
        assert failed.status == 2
        assert "hunter2" not in failed.err
    assert user_config.read()["endpoints"] == []


# Refs of remotes among the others


def test_remote_refs_are_counted(there: Program) -> None:
    """`refs` lists branches and tags, and says how many remote refs there are and what lists them;
    REMOTE/NAME is a snapshot for `show`, `log` and `diff`."""
    lines = there.succeed("refs").lines
    assert [line.split()[0] for line in lines] == ["NAME", "base", "tuned", "v1", "3"]
    assert lines[-1] == f"3 remote refs: mstore --store {there.store} refs 'remotes/*'"
    assert there.succeed("refs", "-q").lines == ["base", "tuned", "v1"]
    assert there.succeed("refs", "remotes/origin/*", "-q").lines == [
        f"remotes/origin/{name}" for name in ("base", "tuned", "v1")
    ]
    assert (
        there.succeed("show", "origin/tuned", "-q").out == there.succeed("show", "tuned", "-q").out
    )
    assert there.succeed("log", "origin/tuned", "-q").lines
    assert "tuned, origin/tuned" in there.succeed("log").out
    assert "refs      base, v1, origin/base, origin/v1" in there.succeed("show", "base").out
    assert there.succeed("diff", "tuned", "origin/tuned", "-q").out == ""


def test_remote_refs_can_be_removed(there: Program) -> None:
    """`rm` removes a remote ref by its name in full, and suggests that; the next fetch makes it
    again."""
    failed = there("rm", "origin/tuned")
    assert failed.status == 1
    assert "did you mean remotes/origin/tuned?" in failed.err
    removed = there.succeed("rm", "remotes/origin/tuned")
    assert "mstore --store" in removed.lines[1]
    assert there.succeed("fetch", "origin", "-q").lines == ["tuned"]


# Words


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("remote ad x file:///x", "did you mean add?"),
        ("remote remove x", "mstore remote rm NAME"),
        ("remote -v", "mstore remote lists addresses, too"),
        ("remote --json add x file:///x", "mstore remote add x file:///x, and options after that"),
        ("remote frobnicate", "mstore remote --help"),
        ("help remote ad", "did you mean add?"),
        ("push --al", "did you mean --all?"),
    ],
)
def test_slips(line: str, hint: str) -> None:
    """A wrong second word, or an option before it, is refused with what was meant."""
    with pytest.raises(UsageError) as caught:
        tree.parse(line.split())
    assert str(caught.value.hint).startswith(hint)


@pytest.mark.parametrize("line", ["help remote add", "remote add --help", "--json help remote add"])
def test_help_of_two_words(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Help of a command of two words stands where other help does."""
    assert tree.parse(line.split()) is None
    assert capsys.readouterr().out.startswith("Usage: mstore remote add [OPTIONS] NAME URL\n")


def test_help_lists_second_words(capsys: pytest.CaptureFixture[str]) -> None:
    """The help of `remote` lists the commands that begin with it."""
    assert tree.parse(["remote", "-h"]) is None
    listed = capsys.readouterr().out.partition("Commands:\n")[2]
    for word in second_words("remote"):
        assert f"\n  {word} " in f"\n{listed}"


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("mstore remo", ["remote"]),
        ("mstore remote r", ["rename", "rm"]),
        ("mstore remote show o", ["origin"]),
        ("mstore push origin t", ["tuned"]),
        ("mstore push origin --delete v", ["v1"]),
        ("mstore pull origin b", ["base"]),
        ("mstore show o", ["origin/base", "origin/tuned", "origin/v1"]),
        ("mstore rm remotes/origin/t", ["remotes/origin/tuned"]),
    ],
)
def test_words_are_completed(words: str, found: list[str], there: Program) -> None:
    """The shell completes second words, remotes, their refs, and remote refs as REMOTE/NAME."""
    done = subprocess.run(
        [sys.executable, "-m", "mstore_cli"],
        env={
            **os.environ,
            "_MSTORE_COMPLETE": "bash_complete",
            "MSTORE_STORE": str(there.store),
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line.partition(",")[2] for line in done.stdout.split("\n") if line] == found


# Rates


def test_rates_are_sizes(here: Program) -> None:
    """--limit-rate takes sizes, and refuses what is none before anything is sent."""
    here.succeed("push", "origin", "base", "--limit-rate", "1GiB", "--jobs", "2")
    for word, what in (("fast", "--limit-rate"), ("0", "1 byte a second or more")):
        failed = here("push", "origin", "tuned", "--limit-rate", word)
        assert failed.status == 2
        assert what in failed.err


def test_a_clone_says_how_to_follow(there: Program, tmp_path: Path) -> None:
    """A clone of a remote says what gets later changes; one of a directory does not."""
    new = tmp_path / "a new one"
    told = clone((tmp_path / "there").as_uri(), new).lines[-1]
    assert told == f"to get what comes later: mstore --store '{new}' pull origin"
    assert "pull" not in clone(str(there.store), tmp_path / "copy").out


def test_jobs_are_those_of_the_library() -> None:
    """Without --jobs, as many parts move at once as in Python."""
    assert JOBS == exchanging.JOBS


def test_an_interrupted_transfer_says_how_to_go_on() -> None:
    """Ctrl-C during a transfer is told with what goes on from there."""
    with pytest.raises(KeyboardInterrupt) as caught, resumable():
        raise KeyboardInterrupt
    assert "goes on" in caught.value.hint  # type: ignore[attr-defined]
