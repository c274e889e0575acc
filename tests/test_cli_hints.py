"""What the program says besides its results: hints that can be typed, and words that are true."""

from __future__ import annotations

import ast
import grp
import os
import pwd
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import write_safetensors
from cli_runs import Program

import mstore as mstore_package
import mstore_cli
import mstore_fuse
import mstore_pages
import mstore_serve
from mstore import fs
from mstore.fs.rights import Sharing
from mstore.terms.errors import StorageFailed
from mstore_cli.errors import with_store
from mstore_cli.output import Output
from mstore_cli.sizes import counted
from mstore_cli.spelling import Typed
from mstore_cli.verbs import OF_NO_STORE, VERBS

STORED = "mstore --store 'a b'"


@pytest.fixture
def mstore(tmp_path: Path) -> Program:
    """A store with one model, `tiny`."""
    write_safetensors(tmp_path / "m" / "model.safetensors", [("t", "U8", (1000,), bytes(1000))])
    mstore = Program(tmp_path / "a store")
    mstore.succeed("init")
    mstore.succeed("add", tmp_path / "m", "--name", "tiny")
    return mstore


@pytest.mark.parametrize(
    "line",
    [
        ["add", "MODEL", "--name", "other"],
        [
            "merge",
            "--base",
            "tiny",
            "--expert",
            "tiny",
            "--method",
            "linear",
            "--name",
            "merged",
            "--allow-noop",
        ],
        ["gc"],
        ["tag", "v1", "tiny"],
        ["rm", "tiny"],
    ],
    ids=lambda line: str(line[0]),
)
def test_interrupt_after_publishing(
    line: list[str], mstore: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the result is told changes nothing: it is told in full, exit status 0."""
    emit = Output.emit

    def interrupted(self: Output, *arguments: object, **more: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        emit(self, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Output, "emit", interrupted)
    done = mstore(*(str(tmp_path / "m") if word == "MODEL" else word for word in line))
    assert (done.status, done.err) == (0, "")
    assert done.out


def test_interrupt_while_only_looking(mstore: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends a command that only prints, as ever."""
    monkeypatch.setattr(Output, "emit", lambda *_, **__: os.kill(os.getpid(), signal.SIGINT))
    assert mstore("log").status == 130


def test_hints_name_the_store(mstore: Program) -> None:
    """A hint names the store that --store named, so that typing it acts on the same one."""
    done = mstore("show", "nothing")
    assert f"hint: mstore --store {shlex.quote(str(mstore.store))} refs" in done.err


@pytest.mark.parametrize(
    ("hint", "told"),
    [
        ("mstore refs", "mstore --store 'a b' refs"),
        ("stop it, then: mstore reindex", "stop it, then: mstore --store 'a b' reindex"),
        ("cp X Y && mstore add Y", "cp X Y && mstore --store 'a b' add Y"),
        ("a\nmstore gc", "a\nmstore --store 'a b' gc"),
        ("mstore log --help", "mstore log --help"),
        ("mstore --store x init", "mstore --store x init"),
        ("mstore refs --store x", "mstore refs --store x"),
        ("damaged; next: mstore fsck", "damaged; next: mstore --store 'a b' fsck"),
        ("moves (mstore gc --all)", "moves (mstore --store 'a b' gc --all)"),
        ("x; mstore rm y, or mstore tag z", f"x; {STORED} rm y, or {STORED} tag z"),
        ("mstore unmount DIR", "mstore unmount DIR"),
        ("this mstore reads format 3", "this mstore reads format 3"),
        ("/a/mstore log", "/a/mstore log"),
        ("pip install 'mstore[serve]'", "pip install 'mstore[serve]'"),
        ("this is a bug in mstore: please", "this is a bug in mstore: please"),
    ],
)
def test_commands_in_hints(hint: str, told: str) -> None:
    """Commands in a hint get --store once; help and prose stay as they are."""
    assert with_store(hint, Path("a b")) == told
    assert with_store(hint, None) == hint


def strings(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Every text of a program that is no docstring, with the calls around it, outermost first."""

    def walk(node: ast.AST, calls: list[str]) -> Iterator[tuple[str, list[str]]]:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, calls
            return
        if isinstance(node, ast.JoinedStr):
            parts = (p.value if isinstance(p, ast.Constant) else "X" for p in node.values)
            yield "".join(map(str, parts)), calls
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            calls = [*calls, node.func.id if isinstance(node.func, ast.Name) else called]
        for child in ast.iter_child_nodes(node):
            yield from walk(child, calls)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), [])


SOURCES = sorted(
    source
    for package in (mstore_package, mstore_cli, mstore_fuse, mstore_pages, mstore_serve)
    for source in Path(package.__path__[0]).rglob("*.py")
)
COMMAND = re.compile(rf"\bmstore (?:{'|'.join(VERBS)})\b")


def test_every_command_of_every_message_can_name_the_store() -> None:
    """In each text of the command line that says what to type, each command gets --store, wherever
    it stands; what the command line prints by itself goes through that."""
    seen = 0
    for source in SOURCES:
        if not re.search(r"mstore[ \"']", source.read_text(encoding="utf-8")):
            # Parsing takes long, and a command has these letters, or ends a literal with them.
            continue
        for text, calls in strings(source):
            found = [one for one in COMMAND.findall(text) if one.split()[1] not in OF_NO_STORE]
            if not found or "--help" in text or " --store " in text:
                continue
            seen += 1
            left = COMMAND.findall(with_store(text, Path("S")))
            assert [one for one in left if one.split()[1] not in OF_NO_STORE] == [], (source, text)
            printed = {"line", "fields", "table", "remarks", "warn"} & set(calls)
            through = {"typed", "advice", "command"} & set(calls)
            assert through or not printed, (source, text)
    assert seen > 100


def test_words_about_commands_name_the_store(mstore: Program, tmp_path: Path) -> None:
    """Remarks in the middle of which a command stands name the store, as hints do."""
    named = f"mstore --store {shlex.quote(str(mstore.store))}"
    for name, data in (("base", bytes(4000)), ("tuned", b"1" * 4000)):
        write_safetensors(tmp_path / name / "m.safetensors", [("t", "F32", (1000,), data)])
        mstore.succeed("add", tmp_path / name, "--name", name, "--base", "none")
    merge = ["merge", "--base", "base", "--expert", "tuned", "--method", "linear", "--virtual"]
    out = mstore.succeed(*merge, "--name", "merged").out
    assert f", virtual: {named} materialize merged stores it" in out
    assert f"{named} gc drops them after 30 days" in mstore.succeed("rm", "tuned", "merged").out
    told = mstore.succeed("du").out
    assert f"days ({named} gc --reflog-days 0)" in told
    assert not COMMAND.findall(told)


@pytest.mark.parametrize(
    "line",
    [
        ["add", "nowhere", "--name", "x"],
        ["sign", "tiny", "--key", "nowhere"],
        ["verify", "--signers", "nowhere"],
        ["fsck", "--repair", "--from", "nowhere"],
    ],
    ids=lambda line: str(line[0]),
)
def test_missing_files_are_not_refs(line: list[str], mstore: Program) -> None:
    """What is missing on the disk is no name of the store: the hint is to check the path."""
    done = mstore(*line)
    assert done.status == 1
    assert done.err == "error: nowhere: no such file or directory\nhint: check the path\n"


def test_init_where_no_store_can_be(tmp_path: Path) -> None:
    """`init` on a file, or where no directory can be made, says to name another directory."""
    taken = tmp_path / "file"
    taken.touch()
    for place in (taken, taken / "store"):
        done = Program(place)("init")
        assert done.status == 1
        assert "hint: name a new directory" in done.err


@pytest.mark.parametrize("is_setgid", [False, True])
def test_init_says_with_which_group_it_shares(is_setgid: bool, tmp_path: Path) -> None:
    """`init --shared` names the group; where nothing but whose process it was chose that, also how
    to choose another, and doing so makes all of the store that group's."""
    team = 54321 if os.geteuid() == 0 else os.getegid()
    above = tmp_path / "a team"
    above.mkdir()
    if is_setgid:
        os.chown(above, -1, team)
        above.chmod(0o2775)
    store = Program(above / "store")
    done = store.succeed("init", "--shared", "group")
    group = name_of(team if is_setgid else os.getegid())
    told = done.lines[1:]
    assert told[0] == f"shared with the group {group}"
    if is_setgid:
        assert told[1:] == []
    else:
        lead, _, command = told[1].partition(": ")
        assert lead == "to share it with another group"
        subprocess.run(["sh", "-c", command.replace("GROUP", str(team))], check=True)
    made = [store.store, *store.store.rglob("*")]
    assert {path.stat().st_gid for path in made} == {team}
    assert all(path.stat().st_mode & 0o2000 for path in made if path.is_dir())
    other = Program(tmp_path / "other")
    assert len(other.succeed("init").lines) == 1
    third = Program(tmp_path / "third").succeed("init", "--shared", "group", "--json").document
    assert third["group"] == name_of(os.getegid())


def name_of(group: int) -> str:
    try:
        return grp.getgrgid(group).gr_name
    except KeyError:
        return str(group)


def test_verify_says_how_to_trust(
    mstore: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`verify` of a key that nobody trusts names the file and the line; doing so makes it good."""
    pytest.importorskip("cryptography")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    key = tmp_path / "key"
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "a comment", "-f", str(key)],
        check=True,
    )
    mstore.succeed("sign", "tiny", "--key", key)
    done = mstore("verify", "tiny")
    signers = tmp_path / "settings" / "mstore" / "allowed_signers"
    assert done.status == 1
    assert (
        f"to trust a key, add a line to {signers}: NAME and the text of its .pub file" in done.out
    )
    command = next(line.strip() for line in done.lines if "echo" in line)
    subprocess.run(
        ["sh", "-c", command.replace("KEY.pub", f"{key}.pub").replace("NAME", "alice")], check=True
    )
    assert "signed by alice" in mstore.succeed("verify", "tiny").out
    given = tmp_path / "mine"
    given.touch()
    assert f"add a line to {given}:" in mstore("verify", "tiny", "--signers", given).out


@pytest.mark.parametrize("line", [["fsck"], ["fsck", "--repair"]], ids=" ".join)
def test_fsck_says_what_it_did_not_read(line: list[str], mstore: Program) -> None:
    """A check that read no bytes says so, and which command does; one that did does not."""
    more = f"mstore --store {shlex.quote(str(mstore.store))} {' '.join(line)} --read-data"
    assert f"bytes of blocks were not read; to read them: {more}" in mstore.succeed(*line).out
    assert "were not read" not in mstore.succeed(*line, "--read-data").out


def test_du_says_where_it_drew(mstore: Program, tmp_path: Path) -> None:
    """`du --html` says where the page is."""
    page = tmp_path / "du.html"
    assert f"drawn in {page}" in mstore.succeed("du", "--html", page).out


@pytest.mark.parametrize(
    "line",
    [
        ["du", "--html"],
        ["plan", "--base", "tiny", "--expert", "tiny", "--method", "linear", "--allow-noop", "-o"],
    ],
    ids=lambda line: str(line[0]),
)
def test_writing_into_a_missing_directory(line: list[str], mstore: Program, tmp_path: Path) -> None:
    """A file for a directory that is not there: the error names the file, the hint makes it."""
    file = tmp_path / "no such" / "out"
    done = mstore(*line, file)
    assert done.status == 1
    made = f"mkdir -p {shlex.quote(str(file.parent))}"
    assert done.err == f"error: {file}: no such file or directory\nhint: {made}\n"


def test_option_without_a_value(mstore: Program) -> None:
    """An option without its value: the hint is the help of that command."""
    done = mstore("du", "--html")
    assert done.status == 2
    assert "hint: mstore du --help" in done.err


def test_garbage_needs_nothing_done(mstore: Program) -> None:
    """`fsck` says of garbage who removes it."""
    left = mstore.store / "tmp" / "left"
    left.mkdir()
    (left / "x.pack").write_bytes(b"x")
    done = mstore.succeed("fsck")
    assert "garbage is harmless: the next command that writes removes what is in tmp" in done.out


def test_reindex_without_an_index(mstore: Program) -> None:
    """`reindex` where no index was says that there was none, not that a file is missing."""
    for file in (mstore.store / "index").iterdir():
        file.unlink()
    done = mstore.succeed("reindex")
    assert "warning: old index: there was none" in done.err
    assert "no such file" not in done.out


def test_reset_of_a_new_branch(mstore: Program) -> None:
    """A branch that `reset` makes was nowhere before."""
    assert "where it was" not in mstore.succeed("reset", "newer", "tiny").out
    mstore.succeed("add", mstore.store.parent / "m", "--name", "tiny", "-m", "x")


def test_one_is_not_many() -> None:
    """Counts read as people write them."""
    assert counted(1, "snapshot") == "1 snapshot"
    assert counted(0, "snapshot") == "0 snapshots"
    assert counted(1234, "file") == "1234 files"


def test_one_file(mstore: Program) -> None:
    """A model of one file has 1 file."""
    assert "1 file, 1 tensor" in mstore.succeed("show", "tiny").out


@pytest.mark.parametrize(
    ("a", "b", "line"),
    [
        ("./m", "tiny", "mstore diff tiny ./m"),
        ("m", "tiny", "mstore diff tiny ./m"),
        ("m/", "tiny", "mstore diff tiny m/"),
        ("./m", "./m", "mstore diff REF ./m"),
    ],
)
def test_a_directory_comes_second(
    a: str, b: str, line: str, mstore: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`diff` of a directory with a snapshot gives the line in the right order."""
    monkeypatch.chdir(tmp_path)
    done = mstore("diff", a, b)
    assert done.status == 2
    assert f"{a} is a path, and the snapshot comes first" in done.err
    assert line in done.err.replace(f"--store {shlex.quote(str(tmp_path / 'a store'))} ", "")
    assert mstore.succeed("diff", "tiny", "./m")


@pytest.mark.parametrize(
    ("line", "remark"),
    [
        (["tag"], "tag v1 REF"),
        (["rm", "tiny"], "reset tiny 'tiny@{1}'"),
        (["gc"], "du"),
    ],
    ids=["tag", "rm", "gc"],
)
def test_remarks_name_the_store(line: list[str], remark: str, mstore: Program) -> None:
    """A remark that ends in a command names the store that --store named, as hints do."""
    told = mstore.succeed(*line).out
    assert f": mstore --store {shlex.quote(str(mstore.store))} {remark}\n" in told


def test_a_store_without_its_format(mstore: Program, tmp_path: Path) -> None:
    """A lost or broken `format` is copied from a backup: no hint says to make a new store there."""
    path = mstore.store / "format"
    kept = path.read_bytes()
    for damage in (path.unlink, lambda: path.write_text("nothing")):
        damage()
        done = mstore("refs")
        assert done.status == 1
        assert f"cp BACKUP/format {shlex.quote(str(path))}" in done.err
        assert "init" not in done.err
        path.write_bytes(kept)
    assert mstore.succeed("refs", "-q").lines == ["tiny"]


def test_a_first_backup_that_did_not_finish(mstore: Program, tmp_path: Path) -> None:
    """It is no store yet, and the next command is the same backup."""
    target = tmp_path / "backup"
    mstore.succeed("backup", target)
    (target / "format").unlink()
    done = Program(target)("refs")
    assert done.status == 1
    assert "a first backup that did not finish" in done.err
    assert f"mstore --store STORE backup {target}" in done.err
    mstore.succeed("backup", target)
    assert Program(target).succeed("refs", "-q").lines == ["tiny"]


def test_a_broken_config_can_be_removed(mstore: Program) -> None:
    """The hint at a config that cannot be read works."""
    path = mstore.store / "config"
    path.write_text("codec")
    done = mstore("refs")
    assert done.status == 1
    assert f"hint: rm {shlex.quote(str(path))} " in done.err
    path.unlink()
    assert mstore.succeed("refs", "-q").lines == ["tiny"]


def test_sharing_what_is_another_users(mstore: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where files are another's, the hint is the same command as root, and it names the owner."""
    owner = pwd.getpwuid(mstore.store.stat().st_uid).pw_name
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 54321)
        with pytest.raises(StorageFailed, match=f"user {owner}'s") as caught:
            fs.share_tree(mstore.store, Sharing.ALL)
    store = shlex.quote(str(mstore.store))
    assert caught.value.told(Typed()).hint == f"sudo mstore --store {store} config shared all"
