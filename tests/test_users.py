"""The README's transcript where several users are at work, and where nothing can be written."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import readme_family
from other_users import User, World, why_not, world
from test_readme import README
from transcripts import steady

REASON = why_not()
TRANSCRIPT = readme_family.without_hub(README.read_text())
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
TEAM = 61000
ALICE, BOB, CAROL, DAVE = 61001, 61002, 61003, 61004
# Of a pair that nobody has compared: its statistics are taken for this.
PLAN = "mstore plan --base code --expert math --method linear"
# What needs no place to write.
READING = (
    "mstore refs",
    "mstore show merged",
    "mstore ls merged --tensors",
    "mstore cat merged:config.json",
    "mstore diff code math",
    "mstore explain merged",
    "mstore blame merged",
    "mstore reflog",
    "mstore stats",
    "mstore du",
    "mstore plans",
    "mstore config",
    "mstore fsck",
    "mstore fsck --read-data",
    "mstore gc --dry-run",
)
# Commands of the transcript that write to the store; the others only read it.
WRITING = ("mstore init", "mstore add", "mstore merge")


@pytest.fixture(scope="module")
def place() -> Iterator[World]:
    with world() as made:
        (made.path / "models").mkdir()
        readme_family.write(made.path / "models")
        for path in (made.path / "models").rglob("*.safetensors"):
            path.chmod(0o644)
        yield made


@pytest.fixture
def alice(place: World) -> User:
    return _user(place, ALICE, TEAM, umask=0o077)


@pytest.fixture
def bob(place: World) -> User:
    return _user(place, BOB, TEAM, umask=0o027)


@pytest.fixture
def carol(place: World) -> User:
    return _user(place, CAROL)


def _user(place: World, number: int, *groups: int, umask: int = 0o022) -> User:
    at = place.path / f"home{number}"
    if at.exists():
        return User(number, (number, *groups), at, umask)
    return place.user(number, *groups, umask=umask)


def done(place: World, user: User, command: str, at: Path, store: Path | None = None) -> str:
    """What a command of a user prints; it has to succeed."""
    result = place.run(user, command, at, store)
    assert result.returncode == 0, (user.number, command, result.stdout)
    return result.stdout


def together(
    place: World, user: User, commands: tuple[str, ...], at: Path, store: Path | None = None
) -> Iterator[tuple[int, str, str]]:
    """Status, command and all that it prints, of many commands in one process."""
    lines = [command.split()[1:] for command in commands]
    program = (
        "import json, sys; from cli_runs import run_once\n"
        "ran = [run_once(line) for line in json.loads(sys.argv[1])]\n"
        "print(json.dumps([[one.status, one.out + one.err] for one in ran]))"
    )
    line = shlex.join(["python", "-c", program, json.dumps(lines)])
    ran = json.loads(done(place, user, line, at, store).splitlines()[-1])
    for command, (status, printed) in zip(commands, ran, strict=True):
        yield status, command, printed


def shop(place: World, name: str, user: User, group: int, mode: int) -> Path:
    """A directory of a user's, with the three checkpoints in sight."""
    at = place.path / name
    at.mkdir()
    for model in ("llama", "code", "math"):
        (at / model).symlink_to(place.path / "models" / model)
    os.chown(at, user.number, group)
    at.chmod(mode)
    return at


def everything(root: Path) -> dict[str, tuple[object, ...]]:
    """What is in a store, and every mark that a change would leave."""
    found: dict[str, tuple[object, ...]] = {}
    for path in (root, *sorted(root.rglob("*"))):
        status = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path)] = (status.st_ino, status.st_mode, status.st_mtime_ns, content)
    return found


def unshared(root: Path) -> list[str]:
    """What in a group's store one of the group could not use."""
    found = []
    for path in (root, *sorted(root.rglob("*"))):
        status = path.lstat()
        mode = stat.S_IMODE(status.st_mode)
        if path.is_dir():
            wanted = 0o2770
        else:
            wanted = 0o440 if path.suffix == ".pack" and "packs" in path.parts else 0o660
        if status.st_gid != TEAM or mode & wanted != wanted:
            found.append(f"{path.relative_to(root)} {mode:o} {status.st_gid}")
    return found


def fill(place: World, user: User, at: Path, store: Path | None = None) -> None:
    """The writing part of the transcript, by one user."""
    writing = tuple(one for one, _ in TRANSCRIPT if one.startswith(WRITING))
    for status, command, printed in together(place, user, writing, at, store):
        assert status == 0, (command, printed)


@pytest.fixture(scope="module")
def filled(place: World) -> Path:
    """A store of alice's that nobody works in: tests copy it."""
    owner = _user(place, ALICE, umask=0o022)
    at = shop(place, "filled", owner, owner.number, 0o755)
    fill(place, owner, at, at / "store")
    return at / "store"


def copied(place: World, filled: Path, name: str) -> tuple[User, Path]:
    """The owner of a directory with a copy of the store."""
    owner = _user(place, ALICE, umask=0o022)
    at = shop(place, name, owner, owner.number, 0o755)
    place.root(f"cp -a {filled} {at}/store")
    return owner, at / "store"


def reads(place: World, reader: User, store: Path) -> None:
    """Every command that only reads does so, prints what the README has, and changes nothing."""
    at = reader.home
    before = everything(store)
    try:
        for command, told in TRANSCRIPT:
            if not command.startswith(WRITING):
                printed = done(place, reader, command, at, store)
                assert steady(printed.replace(f"{at}/", "")) == steady(told), command
        commands = (
            *READING,
            f"{PLAN} -o plan.json",
            "mstore plan --base llama --expert math --method ties --param density=0.3 --sweep",
            "mstore checkout merged out",
            "mstore diff merged ./out",
            # The second brings the first up to date.
            "mstore backup kept",
            "mstore backup kept",
            f"mstore clone {store} cloned",
            "mstore --store kept fsck --read-data",
            "mstore --store cloned fsck --read-data",
        )
        for status, command, printed in together(place, reader, commands, at, store):
            assert status == 0, (command, printed)
        assert (at / "out" / "model.safetensors").stat().st_uid == reader.number
        made = json.loads((at / "plan.json").read_text())
        planned = done(place, reader, f"{PLAN} --json", at, store)
        assert json.loads(planned)["plan"] == made["plan"]
        assert json.loads(planned)["kept"] is False
        said = done(place, reader, PLAN, at, store)
        assert "this store can be read and not written: the plan is not kept in it" in said
        assert "what they told is not kept" in said
        assert "mstore merge --plan" not in said
        program = (
            "from mstore import Store; import os\n"
            "with Store.open(os.environ['MSTORE_STORE']) as store:\n"
            "    assert store['merged'].tensor('model.norm.weight').shape == (512,)"
        )
        done(place, reader, f'python -c "{program}"', at, store)
    finally:
        place.run(reader, "mstore unmount mnt; rm -rf mnt out plan.json kept cloned", at, store)
    assert everything(store) == before


def is_refused(place: World, reader: User, store: Path, *words: str) -> None:
    """Every command that writes says that this user cannot, and what to do, and changes nothing."""
    before = everything(store)
    commands = (
        f"mstore add {place.path}/models/llama --name other",
        "mstore merge --base llama --expert code --method linear --name other",
        "mstore tag v1 merged",
        "mstore reset code math",
        "mstore analyze math --base code",
        "mstore rm math",
        "mstore config codec raw",
        "mstore prune --keep-last 1",
        "mstore gc",
        "mstore fsck --repair",
        "mstore reindex",
    )
    for status, command, printed in together(place, reader, commands, reader.home, store):
        assert status == 1, command
        for word in ("this store can be read and not written", *words, "hint: "):
            assert word in printed, (command, printed)
        assert "Traceback" not in printed
        # It is the store that is to be shared, not a directory in it.
        assert "/index" not in printed.partition("hint: ")[2]
    assert everything(store) == before


@pytest.mark.rest
def test_another_users_store(place: World, carol: User, filled: Path) -> None:
    """Whoever may read the files of a store reads it, and mounts it, and leaves no trace; whoever
    may not write them is told so, whose it is, and how to go on."""
    reads(place, carol, filled)
    is_refused(place, carol, filled, f"user u{CAROL}", f"user u{ALICE}'s", "sudo -u u61001")


@pytest.mark.slow
def test_a_store_without_the_right_to_write(place: World, filled: Path) -> None:
    """After `chmod -R a-w` its owner reads it as before, and is told how to restore it."""
    owner, store = copied(place, filled, "kept")
    place.root(f"chmod -R a-w {store}")
    reads(place, owner, store)
    is_refused(place, owner, store, f"chmod -R u+w {store}")
    done(place, owner, f"chmod -R u+w {store} && mstore tag v1 merged", store.parent, store)


@pytest.mark.rest
def test_a_read_only_filesystem(place: World, filled: Path) -> None:
    """On a filesystem that is mounted read-only everybody reads, its owner and root too."""
    owner, store = copied(place, filled, "frozen")
    place.root(f"mount --bind {store} {store}; mount -o remount,bind,ro {store}")
    reads(place, owner, store)
    is_refused(place, owner, store, "mounted read-only")
    root = User(0, (0,), place.path / "root")
    root.home.mkdir()
    before = everything(store)
    for status, command, printed in together(place, root, READING, root.home, store):
        assert status == 0, (command, printed)
    assert everything(store) == before
    is_refused(place, root, store, "mounted read-only")


COMPLETION = (
    "_MSTORE_COMPLETE=bash_complete COMP_WORDS='mstore show ' COMP_CWORD=2 mstore 2>&1; true"
)


@pytest.mark.rest
def test_a_store_that_was_only_found(place: World, carol: User) -> None:
    """A store of another user that was found by looking upward is not used, by root neither, and
    completes nothing: the error names it, its owner and three ways to use it, and each works."""
    alice = _user(place, ALICE, umask=0o022)
    at = shop(place, "everybodys", alice, alice.number, 0o1777)
    store = at / ".mstore"
    done(place, alice, "mstore init -q && mstore add llama --name alices -q", at)
    work = at / "work"
    work.mkdir()
    os.chown(work, carol.number, carol.number)
    root = User(0, (0,), place.path / "root of found")
    root.home.mkdir()
    commands = ("refs", "gc", "config codec raw", "reindex", "migrate", "serve", "mount x y")
    for user in (carol, root):
        lines = tuple(f"mstore {command}" for command in commands)
        for status, command, printed in together(place, user, lines, work):
            assert status == 1, (command, printed)
            why = f"this store belongs to user u{ALICE}, and was only found, not named"
            assert printed.splitlines() == [
                f"error: {store}: {why}",
                f"hint: if you trust it: mstore --store {store} ...    (for one command)",
                f"  export MSTORE_STORE={store}    (for this shell)",
                f"  mstore config --user safe_stores {store}    (for all your commands)",
            ]
        assert done(place, user, COMPLETION, work).strip() == ""
    assert "alices" in done(place, alice, COMPLETION, work)
    assert "alices" in done(place, carol, f"export MSTORE_STORE={store}; mstore refs", work)
    trusting = f"mstore config --user safe_stores {store}"
    commands = (f"mstore --store {store} refs", trusting, "mstore refs")
    ran = list(together(place, carol, commands, work))
    assert [status for status, _, _ in ran] == [0, 0, 0]
    assert "alices" in ran[0][2]
    assert "alices" in ran[2][2]
    assert "alices" in done(place, carol, COMPLETION, work)
    commands = (f"mstore config --user --unset safe_stores {store}", "mstore refs")
    assert [status for status, _, _ in together(place, carol, commands, work)] == [0, 1]
    # What sudo's caller owns is as good as one's own.
    assert "alices" in done(place, root, f"SUDO_UID={ALICE} mstore refs", work)
    assert place.run(root, f"SUDO_UID={BOB} mstore refs", work).returncode == 1
    assert place.run(carol, f"SUDO_UID={ALICE} mstore refs", work).returncode == 1
    # A store of root is not a user's, and one of one's own below another's is used.
    done(place, carol, "mstore init", work)
    assert place.run(carol, "mstore refs", work).returncode == 0
    place.root(f"chown -R 0:0 {work}/.mstore")
    assert "belongs to user root" in place.run(carol, "mstore refs", work).stdout


@pytest.mark.rest
def test_links_to_a_store_that_was_only_found(place: World, carol: User) -> None:
    """A .mstore that is a link is judged by who made the link, and by whose store it leads to; its
    format file likewise."""
    alice = _user(place, ALICE, umask=0o022)
    hers = shop(place, "hers", alice, alice.number, 0o755)
    done(place, alice, "mstore init store", hers)
    work = carol.home / "linked"
    work.mkdir()
    os.chown(work, carol.number, carol.number)
    for user, store in ((carol, hers / "store"), (alice, carol.home / "own")):
        if not store.exists():
            done(place, carol, f"mstore init {store}", carol.home)
        (work / ".mstore").symlink_to(store)
        os.lchown(work / ".mstore", user.number, user.number)
        assert f"belongs to user u{ALICE}" in place.run(carol, "mstore refs", work).stdout
        (work / ".mstore").unlink()
    (work / ".mstore").symlink_to(carol.home / "own")
    os.lchown(work / ".mstore", carol.number, carol.number)
    done(place, carol, "mstore refs", work)
    os.chown(carol.home / "own" / "format", alice.number, alice.number)
    assert f"belongs to user u{ALICE}" in place.run(carol, "mstore refs", work).stdout


def test_settings_of_another_user(place: World, carol: User) -> None:
    """Settings in a file of another user are refused, not ignored; those of root are used."""
    alice = _user(place, ALICE, umask=0o022)
    at = shop(place, "settings", alice, alice.number, 0o755)
    done(place, alice, "mstore init", at)
    line = f"XDG_CONFIG_HOME={at}/settings mstore"
    settings = at / "settings" / "mstore" / "config.toml"
    done(place, alice, f"{line} config --user safe_stores {at / '.mstore'}", at)
    printed = place.run(carol, f"{line} refs", at)
    assert printed.returncode == 1
    assert f"error: {settings}: your settings are in a file" in printed.stdout
    os.chown(settings, 0, 0)
    done(place, carol, f"{line} refs", at)


@pytest.mark.rest
def test_mounts_are_those_of_who_asks(place: World, carol: User) -> None:
    """`mounts` lists what the caller mounted; with --all, and for root, also what others did, and
    whose it is."""
    if not Path("/dev/fuse").exists():
        pytest.skip("this machine cannot mount")
    owner = _user(place, ALICE, umask=0o022)
    at = shop(place, "mounting", owner, owner.number, 0o755)
    store = at / "store"
    done(place, owner, "mstore init store && mkdir mnt", at)
    done(place, owner, "mstore mount --all mnt", at, store)
    try:
        assert str(at / "mnt") in done(place, owner, "mstore mounts", at)
        assert done(place, carol, "mstore mounts", carol.home).strip() == "nothing is mounted"
        assert done(place, carol, "mstore mounts -q", carol.home) == ""
        for seen in (
            done(place, carol, "mstore mounts --all", carol.home),
            done(place, User(0, (0,), place.path), "mstore mounts", place.path),
        ):
            [line] = [line for line in seen.splitlines() if line.startswith(str(at / "mnt"))]
            assert line.split()[-2:] == ["serving", f"u{ALICE}"]
    finally:
        done(place, owner, "mstore unmount mnt", at)


@pytest.mark.rest
def test_a_team(place: World, alice: User, bob: User, carol: User) -> None:
    """In a store that was made with --shared two users of one group, each with a umask that lets
    nobody else write, take turns in the README's transcript, and collect, repair and reindex what
    the other made; who is in no such group sees nothing."""
    at = shop(place, "team", alice, TEAM, 0o2770)
    store = at / ".mstore"
    turns = {"mstore init": alice, "mstore add llama": alice, "mstore add code": bob}
    turns |= {"mstore add math": alice, "mstore merge": bob, "mstore log": alice}
    for command, told in TRANSCRIPT:
        user = next((who for words, who in turns.items() if command.startswith(words)), bob)
        line = command.replace("mstore init", "mstore init --shared group")
        printed = done(place, user, line, at, store)
        # The directory is setgid: there is no other group to speak of.
        more = f"\nshared with the group {TEAM}" if command == "mstore init" else ""
        assert steady(printed.replace(f"{at}/", "")) == steady(told) + more, command
        assert unshared(store) == [], command
    for first, second in ((alice, bob), (bob, alice)):
        done(place, first, "mstore add code --name extra", at, store)
        merging = "mstore merge --base llama --expert extra --method linear --name m"
        done(place, second, merging, at, store)
        for user, commands in (
            (first, ("mstore rm m extra", "mstore gc --reflog-days 0 --all")),
            (second, ("mstore fsck --read-data --repair", "mstore config codec dense")),
            (first, ("mstore reindex",)),
            (second, ("mstore add math --name again", "mstore rm again")),
        ):
            for status, command, printed in together(place, user, commands, at, store):
                assert status == 0, (command, printed)
            assert unshared(store) == [], commands
    assert list((store / "tmp").iterdir()) == []
    assert "permission denied" in place.run(carol, "mstore refs", carol.home, store).stdout
    root = User(0, (0,), place.path)
    done(place, root, "mstore add code --name roots", at, store)
    assert unshared(store) == []
    done(place, bob, "mstore rm roots && mstore gc --reflog-days 0", at, store)


@pytest.mark.rest
def test_what_a_killed_command_left_the_other_removes(place: World, alice: User, bob: User) -> None:
    """A command of one user that was killed keeps nothing from the other, who cleans up after it;
    what one who lives is at work on, the other leaves alone."""
    at = shop(place, "killed", alice, TEAM, 0o2770)
    store = at / ".mstore"
    done(place, alice, "mstore init --shared=group && mstore add llama --name llama", at)
    program = (
        "from mstore import Store; import os\n"
        "Store.open('.mstore').add('math', name='a', progress=lambda tick: os._exit(9))"
    )
    assert place.run(alice, f'python -c "{program}"', at).returncode == 9
    assert list((store / "tmp").iterdir()) != []
    code = done(place, bob, "mstore add code --name code -q", at, store).strip()
    assert list((store / "tmp").iterdir()) == []
    pinning = (
        "from mstore import Store; from mstore.terms.ids import SnapshotId; import time\n"
        f"pin = Store.open('.mstore').hold(SnapshotId.parse('{code}'))\n"
        "open('pinned', 'w').close()\n"
        "time.sleep(1000)"
    )
    line = f'python -c "{pinning}" >/dev/null 2>&1 & while [ ! -e pinned ]; do sleep 0.1; done'
    pid = int(done(place, alice, f"{line}; echo $!", at))
    collecting = f"mstore rm code; mstore gc --reflog-days 0 --all && mstore cat {code}:config.json"
    try:
        done(place, bob, collecting, at, store)
        # One that bob may not even look at is for alice to give up.
        done(place, alice, "chmod 600 .mstore/tmp/*.pin", at)
        done(place, bob, collecting, at, store)
    finally:
        place.root(f"kill -9 {pid}")
    done(place, alice, "mstore add math --name math", at)
    assert place.run(bob, collecting, at, store).returncode == 1
    assert list((store / "tmp").iterdir()) == []


@pytest.mark.slow
def test_a_store_is_shared_later(place: World, bob: User) -> None:
    """`mstore config shared group` opens a store that is there for the group of its directory, and
    whoever may not do that is told who has to."""
    owner = _user(place, ALICE, TEAM, umask=0o022)
    at = shop(place, "later", owner, TEAM, 0o2750)
    store = at / ".mstore"
    fill(place, owner, at, store)
    is_refused(place, bob, store, f"chgrp -R GROUP {store} && ", "config shared group")
    done(place, owner, f"chgrp -R {TEAM} {store} && mstore config shared group", at)
    assert unshared(store) == []
    done(place, bob, "mstore tag v1 merged && mstore gc && mstore reindex", at, store)
    assert unshared(store) == []
    assert not any(stat.S_IMODE(path.stat().st_mode) & 0o007 for path in (store / "tmp").iterdir())


@pytest.mark.slow
def test_the_umask_and_a_setgid_directory_are_enough(place: World) -> None:
    """Without --shared a umask of 002 in a setgid directory makes a store for its group, whose
    locks are nobody's who may not write it."""
    first = User(ALICE, (ALICE, TEAM), _user(place, ALICE).home, 0o002)
    second = User(BOB, (BOB, TEAM), _user(place, BOB).home, 0o002)
    at = shop(place, "umask", first, TEAM, 0o2775)
    store = at / ".mstore"
    done(place, first, "mstore init && mstore add llama --name llama", at)
    adding = "mstore add code --name code && mstore config codec dense"
    done(place, second, adding, at, store)
    merging = "mstore merge --base llama --expert code --method linear --name m"
    done(place, first, merging, at)
    collecting = "mstore rm m && mstore gc --reflog-days 0 --all && mstore reindex"
    done(place, second, collecting, at, store)
    done(place, first, merging, at)
    assert unshared(store) == []
    for name in ("tmp", "lock"):
        assert not stat.S_IMODE((store / name).stat().st_mode) & 0o007
    for path in (store / "packs").rglob("*.pack"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o444


@pytest.mark.rest
def test_a_home_that_cannot_be_written(place: World) -> None:
    """The whole transcript goes through where neither the home nor the program's directory can be
    written."""
    dave = place.user(DAVE, home=False)
    at = shop(place, "homeless", dave, dave.number, 0o755)
    fill(place, dave, at)
    for command, told in TRANSCRIPT:
        if not command.startswith(WRITING):
            printed = done(place, dave, command, at)
            assert steady(printed.replace(f"{at}/", "")) == steady(told), command
    assert list(dave.home.iterdir()) == []
