"""An adversary with an account: what may he make somebody else's mstore do?

    python tests/adversary/hostile.py [--part K/N] [--seconds S] [--seed N] [--only WORDS]

Somebody who may write a store replaces an entry of it: by a link to a directory or a file of the
victim's, by a link to a name that is not there yet, by a fifo, a socket, something of another kind,
something of a third user's. Then the victim runs a command there. Each command meets each entry in
each disguise (`disguises`). Then each command that writes is run once more for each operation that
it makes on the disk: right before it, the directory that it happens in becomes a link (`races`).

Whatever a command answers, nothing outside of the store has changed, it ended by itself, in time,
without a traceback, and by no signal.

As root: the store is another user's and root is the victim, then a group shares the store and the
victim is another member. Otherwise there is one user. Each command runs in a child process.
Exits with 1 and tells what failed; --only with the words of a trial repeats it. With --seconds the
trials come in a random order until the time is over.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import itertools
import os
import pkgutil
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import other_users  # noqa: E402
from small_models import small_model  # noqa: E402

import mstore  # noqa: E402
import mstore_cli  # noqa: E402
from mstore import fs  # noqa: E402
from mstore_cli import main as program  # noqa: E402
from mstore_cli.verbs import VERBS  # noqa: E402

LONGEST = 60.0
"""Seconds after which a command counts as hung."""
MOMENTS = 45
"""So many operations of a command are raced against; few commands make more here."""
Trial = tuple[str, Callable[[], str]]
"""Its words, and what runs it and returns what was wrong."""
SERVED = 0.5
"""Seconds for which `serve` runs before it is asked to end."""
EVE, BOB, THIRD, TEAM = 70001, 70002, 70003, 70004
DIRECTORIES = (
    *("tmp", "packs", "packs/??", "index", "stats", "memo", "refs", "lost+found"),
    *("remotes", "remotes/origin", "remotes/origin/*s", "remotes/origin/sent", "searches"),
)
FILES = (
    *("format", "config", "lock", "refs/mirror", "packs/??/*.pack", "tmp/*.lock", "tmp/*/0.pack"),
    *("lost+found/*/*.pack", "refs/mirror.*", "refs/packs.*", "searches/*"),
    *(f"{table}/{name}.mdb" for table in ("index", "stats", "memo") for name in ("data", "lock")),
    *("index/checked", "remotes/origin/lists/*", "remotes/origin/places/*", "remotes/origin/root"),
    "remotes/origin/lock",
)
KINDS = ("link", "dangling", "fifo", "socket", "wrong", "owner")

_MERGE = ("merge", "--base", "base", "--expert", "tuned", "--method", "linear")
COMMANDS: dict[str, tuple[str, ...]] = {
    "init": ("init",),
    "config": ("config", "codec", "raw"),
    "add": ("add", "models/fourth", "--name", "fourth", "--base", "base"),
    "analyze": ("analyze", "tuned", "--base", "base"),
    "check-merge": ("check-merge", "--base", "base", "--expert", "tuned"),
    "align": ("align", "tuned", "--to", "base", "--name", "aligned"),
    "permute": ("permute", "tuned", "--to", "base", "--name", "permuted"),
    "cast": ("cast", "base", "--dtype", "float32", "--name", "wide"),
    "methods": ("methods",),
    "plan": ("plan", *_MERGE[1:]),
    "plans": ("plans",),
    "merge": (*_MERGE, "--param", "normalize=false", "--name", "again", "--candidate", "run"),
    "materialize": ("materialize", "virtual"),
    "shuffle": ("shuffle", "--expert", "base", "--expert", "tuned"),
    "moe": ("moe", "--unpack", "base", "--name", "parts"),
    "emr": ("emr", "--base", "base", "--expert", "tuned", "--name", "family"),
    "extract-lora": ("extract-lora", "tuned", "--base", "base", "--rank", "2", "--name", "lora"),
    "convert-adapter": ("convert-adapter", "third", "--base", "base", "--format", "peft"),
    "combine-adapters": ("combine-adapters", "--adapter", "base", "--adapter", "third"),
    "log": ("log", "merged"),
    "show": ("show", "merged"),
    "find": ("find", "0123456789"),
    "ls": ("ls", "merged"),
    "cat": ("cat", "merged:config.json"),
    "diff": ("diff", "base", "merged"),
    "compare": ("compare", "tuned", "--base", "base"),
    "explain": ("explain", "merged"),
    "blame": ("blame", "merged"),
    "recipe": ("recipe", "merged"),
    "report": ("report", "merged", "--quick", "-o", "out/report.html"),
    "eval": ("eval", "merged", "--checkout", "--", "true", "{}"),
    "metrics": ("metrics",),
    "search": (
        *("search", "--recipe", "recipe.yaml", "--eval", "true {}", "--score", "r.json:acc"),
        *("--same-set", "--sampler", "grid", "--trials", "2", "--checkout", "--name", "best"),
    ),
    "bisect": ("bisect",),
    "bisect start": ("bisect", "start", "merged", "--layers"),
    "bisect good": ("bisect", "good"),
    "bisect bad": ("bisect", "bad"),
    "bisect skip": ("bisect", "skip"),
    "bisect run": ("bisect", "run", "merged", "--experts", "--checkout", "--", "true", "{}"),
    "bisect log": ("bisect", "log"),
    "bisect replay": ("bisect", "replay", "marks"),
    "bisect reset": ("bisect", "reset"),
    "gate": ("gate",),
    "gate run": ("gate", "run", "merged", "--check", "true {}"),
    "gate drop": ("gate", "drop", "candidates/run/merged"),
    "gate require": ("gate", "require", "prod/*", "quality"),
    "replay": ("replay", "merged"),
    "checkout": ("checkout", "merged", "out/files"),
    "mount": ("mount", "merged", "out/mount"),
    "mounts": ("mounts",),
    "unmount": ("unmount", "out/mount"),
    "serve": ("serve", "--port", "0", "--s3", "0", "--no-auth"),
    "refs": ("refs",),
    "tag": ("tag", "v2", "merged"),
    "reset": ("reset", "base", "tuned", "--expect", "base"),
    "rename": ("rename", "base", "first"),
    "reflog": ("reflog", "base"),
    "rm": ("rm", "tuned"),
    "note": ("note", "base", "mmlu=0.62"),
    "sign": ("sign", "base", "--key", "key"),
    "verify": ("verify", "base"),
    "prune": ("prune", "--keep-last", "1"),
    "gc": ("gc", "--reflog-days", "0"),
    "pin": ("pin", "merged", "--raw"),
    "unpin": ("unpin", "merged"),
    "backup": ("backup", "out/backup"),
    "clone": ("clone", "s", "out/clone"),
    "copy": ("copy", "base", "out/other"),
    "bundle create": ("bundle", "create", "out/base.mbundle", "base"),
    "remote": ("remote",),
    "remote add": ("remote", "add", "other", "file:///nowhere"),
    "remote show": ("remote", "show", "origin"),
    "remote rename": ("remote", "rename", "origin", "team"),
    "remote rm": ("remote", "rm", "origin"),
    "remote du": ("remote", "du", "origin"),
    "remote gc": ("remote", "gc", "origin", "--grace-hours", "0"),
    "remote fsck": ("remote", "fsck", "origin", "--read-data"),
    "push": ("push", "origin", "third"),
    "fetch": ("fetch", "origin"),
    "pull": ("pull", "origin"),
    "export": ("export", "base", "hf://org/base"),
    "outdated": ("outdated",),
    "prefetch": ("prefetch", "base"),
    "drop": ("drop", "base"),
    "fsck": ("fsck", "--read-data", "--repair"),
    "doctor": ("doctor",),
    "version": ("version",),
    "reindex": ("reindex",),
    "migrate": ("migrate",),
    "stats": ("stats",),
    "du": ("du",),
}
WRITING = (
    *(
        "config",
        "add",
        "analyze",
        "cast",
        "plan",
        "merge",
        "materialize",
        "extract-lora",
        "tag",
        "note",
    ),
    *("reset", "rename", "rm", "prune", "gc", "pin", "fsck", "reindex", "backup", "clone"),
    *("remote add", "remote rename", "remote rm", "remote gc", "push", "fetch", "pull"),
    *("copy", "bundle create", "prefetch", "drop", "eval", "gate run", "gate require"),
)


@dataclass(frozen=True)
class Side:
    """Who made the store, and who runs the command: (user, groups); None: this user."""

    name: str
    maker: tuple[int, list[int]] | None
    victim: tuple[int, list[int]] | None
    shared: bool = False


def sides() -> list[Side]:
    """Everybody against everybody, as far as this user can be several."""
    if os.geteuid() != 0:
        return [Side("alone", None, None)]
    eve, bob = (EVE, [TEAM]), (BOB, [TEAM])
    return [Side("root", eve, (0, [0])), Side("bob", eve, bob, shared=True)]


class Stage:
    """A directory with a store of the maker's, and things of the victim's around it."""

    def __init__(self, path: Path, side: Side) -> None:
        self.path, self.side = path, side
        self.template = path / "template"
        self.store = path / "s"
        self.victim = path / "victim"
        path.mkdir(parents=True)
        path.chmod(0o755)
        for name in ("base", "tuned", "third", "fourth"):
            small_model(path / "models" / name, name)
        self._as(side.maker, self._fill)
        self._as(side.victim, self._make_other)
        self._interrupted()

    def _fill(self) -> None:
        store = ("--quiet", "--store", str(self.store))
        lines = [
            ("init", "--block-size", "64KiB", *(["--shared", "group"] if self.side.shared else [])),
            *(("add", f"models/{name}", "--name", name) for name in ("base", "tuned", "third")),
            (*_MERGE, "--name", "merged"),
            (*_MERGE[:4], "third", *_MERGE[5:], "--virtual", "--name", "virtual"),
            ("tag", "v1", "base"),
            ("remote", "add", "origin", (self.path / "remote").as_uri()),
            ("push", "origin", "base"),
            ("fetch", "origin", "--lazy"),
            ("bisect", "start", "merged", "--experts"),
        ]
        for line in lines:
            assert program.run([*store, *line]) == 0, line

    def _make_other(self) -> None:
        """Make an empty store of the victim's, for `copy`."""
        line = ("--quiet", "--store", str(self.path / "empty"), "init", "--block-size", "64KiB")
        assert program.run([*line]) == 0

    def _interrupted(self) -> None:
        """Leave what a killed command and an earlier gc left, and keep all that as the template."""
        pack = next(self.store.glob("packs/*/*.pack"))
        for name in (f"tmp/{'ab' * 8}/0.pack", f"lost+found/20260101T000000Z/{pack.name}"):
            target = self.store / name
            target.parent.mkdir(parents=True)
            shutil.copy(pack, target)
        (self.store / "tmp" / f"{'ab' * 8}.lock").touch()
        if self.side.maker is not None:
            number = self.side.maker[0]
            group = os.stat(self.store).st_gid
            for path in (self.store / "tmp", self.store / "lost+found"):
                for one in (path, *path.rglob("*")):
                    os.chown(one, number, group)
        self.store.rename(self.template)
        (self.path / "remote").rename(self.path / "pushed")

    def _as(self, who: tuple[int, list[int]] | None, run: Callable[[], None]) -> None:
        if who is not None:
            os.chown(self.path, who[0], -1)
        status, said, _ = child(who, self.path, run, LONGEST)
        assert status == 0, said
        if who is not None:
            os.chown(self.path, 0, 0)

    def reset(self) -> None:
        """Put everything back: the store, the victim's things, an empty place for results."""
        for name in ("s", "remote", "victim", "outside", "out"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        subprocess.run(["cp", "-a", self.template, self.store], check=True)
        subprocess.run(["cp", "-a", self.path / "pushed", self.path / "remote"], check=True)
        for name in ("victim", "outside", "out"):
            (self.path / name).mkdir(mode=0o700)
            if name == "out":
                (self.path / name / "mount").mkdir()
                empty = self.path / "empty"
                subprocess.run(["cp", "-a", empty, self.path / name / "other"], check=True)
        (self.victim / "thesis").write_text("precious")
        self._give(self.path / "outside", self.path / "out", self.path / "out" / "mount")

    def lure(self, entry: Path) -> Path:
        """Something of the victim's that looks like this entry; if it is a directory, with more."""
        target = self.victim / entry.name
        if entry.is_dir():
            subprocess.run(["cp", "-a", entry, target], check=True)
            for name in ("thesis.txt", "x.lock", "docs/a.txt"):
                (target / name).parent.mkdir(exist_ok=True)
                (target / name).write_text("precious")
        else:
            shutil.copy(entry, target)
        self._give(self.victim, *self.victim.rglob("*"))
        return target

    def _give(self, *paths: Path) -> None:
        if self.side.victim is not None:
            for path in paths:
                os.chown(path, self.side.victim[0], -1, follow_symlinks=False)

    def disguise(self, entry: Path, kind: str) -> None:
        """Replace an entry of the store."""
        if kind == "owner":
            os.chown(entry, THIRD, THIRD)
            entry.chmod(0o700 if entry.is_dir() else 0o600)
            return
        target = self.lure(entry)
        was_directory = entry.is_dir()
        entry.rename(self.path / "aside")
        if kind == "link":
            entry.symlink_to(target)
        elif kind == "dangling":
            entry.symlink_to(self.path / "outside" / "new")
        elif kind == "fifo":
            os.mkfifo(entry, 0o666)
        elif kind == "socket":
            above = os.open(entry.parent, os.O_PATH)
            with socket.socket(socket.AF_UNIX) as made:
                # The path itself may be too long.
                made.bind(f"/proc/self/fd/{above}/{entry.name}")
            os.close(above)
        elif was_directory:
            entry.write_text("a file")
        else:
            entry.mkdir()
        aside = self.path / "aside"
        shutil.rmtree(aside) if was_directory else aside.unlink()

    def outside(self) -> dict[str, tuple[object, ...]]:
        """Everything that is not the store's, as it is now."""
        found: dict[str, tuple[object, ...]] = {}
        for top in ("victim", "outside", "models"):
            for path in (self.path / top, *sorted((self.path / top).rglob("*"))):
                status = path.lstat()
                data = hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b""
                kept = (status.st_mode, status.st_uid, status.st_gid, status.st_ino, data)
                found[str(path.relative_to(self.path))] = kept
        return found

    def attempt(self, verb: str, prepare: Callable[[], object] = lambda: None) -> str:
        """Run a command as the victim; return what is wrong with what it did, '' if nothing."""
        before = self.outside()

        def run() -> int:
            prepare()
            return program.run(["--store", str(self.store), "--no-progress", *COMMANDS[verb]])

        patience = SERVED if verb == "serve" else LONGEST
        status, said, hung = child(self.side.victim, self.path, run, patience)
        if verb in ("mount", "unmount"):
            subprocess.run(
                ["umount", "--lazy", self.path / "out" / "mount"], capture_output=True, check=False
            )
        wrong = []
        if hung and verb != "serve":
            wrong.append(f"no end in {LONGEST:.0f} s")
        elif status < 0 and not hung:
            wrong.append(f"ended by {signal.Signals(-status).name}")
        if "Traceback" in said or "internal error" in said:
            wrong.append(said.strip()[-1500:])
        after = self.outside()
        changed = sorted(
            name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
        )
        if changed:
            wrong.append(
                f"changed outside of the store: {', '.join(changed)} ({said.strip()[:200]})"
            )
        return "; ".join(wrong)


def child(
    who: tuple[int, list[int]] | None, where: Path, run: Callable[[], object], patience: float
) -> tuple[int, str, bool]:
    """Run something in a child process, as somebody; return status, output, and whether it hung.

    After `patience` seconds it is asked to end, and later killed.
    """
    said = where.parent / f"said-{os.getpid()}"
    said.write_bytes(b"")
    pid = os.fork()
    if not pid:
        status = 70
        try:
            output = os.open(said, os.O_WRONLY | os.O_APPEND)
            for stream in (1, 2):
                os.dup2(output, stream)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.setsid()
            os.chdir(where)
            os.environ["HOME"] = str(where / "out")
            if who is not None:
                os.setgroups(who[1])
                os.setregid(who[1][0], who[1][0])
                os.setreuid(who[0], who[0])
            os.umask(0o022)
            status = int(run() or 0)  # type: ignore[call-overload]
            sys.stdout.flush()
        except BaseException:  # noqa: BLE001 -- the parent reads it
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)
    until = time.monotonic() + patience
    hung = False
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > until:
            os.kill(
                pid, signal.SIGKILL if hung and time.monotonic() > until + 10 else signal.SIGTERM
            )
            hung = True
            time.sleep(0.05)
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(status), said.read_text(errors="replace"), hung


def disguises(stage: Stage) -> Iterator[Trial]:
    """Each command with each entry in each disguise."""
    entries = [(pattern, kind) for pattern in (*DIRECTORIES, *FILES) for kind in KINDS]
    for (pattern, kind), verb in itertools.product(entries, VERBS):

        def trial(pattern: str = pattern, kind: str = kind, verb: str = verb) -> str:
            stage.reset()
            found = sorted(stage.store.glob(pattern))
            if not found:
                return ""
            stage.disguise(found[0], kind)
            return stage.attempt(verb)

        if kind != "owner" or os.geteuid() == 0:
            yield f"{stage.side.name} {pattern} {kind} {verb}", trial


def races(stage: Stage) -> Iterator[Trial]:
    """Each writing command with each of its operations, in a directory that is a link by then."""
    for verb, moment in itertools.product(WRITING, range(MOMENTS)):

        def trial(verb: str = verb, moment: int = moment) -> str:
            stage.reset()
            # The victim prepares nothing: what lies there is what the store has there.
            for name in ("tmp", "packs", "index", "stats", "refs", "remotes"):
                stage.lure(stage.store / name)
            return stage.attempt(verb, lambda: _swap_at(stage, moment))

        yield f"{stage.side.name} race {moment} {verb}", trial


def _swap_at(stage: Stage, moment: int) -> None:
    """Let the directory of this process's operation number `moment` become a link right before it.

    The link leads to a directory of the victim's with a file of the same name as the operation's.
    """
    numbers = itertools.count()

    def observe(operation: fs.Operation) -> None:
        if next(numbers) != moment:
            return
        path = Path(operation.path)
        place = path if operation.kind in ("commit", "map", "syncdir") else path.parent
        if stage.store not in place.parents or not place.is_dir() or place.is_symlink():
            return
        lure = stage.victim / place.relative_to(stage.store).parts[0]
        lure = lure if lure.is_dir() else stage.victim
        place.rename(place.with_name(f"{place.name}-aside"))
        place.symlink_to(lure)

    # Kept: what is collected ends its block.
    _observing.append(fs.observed(observe))
    _observing[-1].__enter__()


_observing: list[AbstractContextManager[None]] = []


def main() -> int:
    """Run the trials of one part; return an exit status."""
    # `export` asks nobody else.
    os.environ["HF_HUB_OFFLINE"] = "1"
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--directory", type=Path, help="where the trials happen")
    chosen = parser.parse_args()
    missing = set(VERBS) ^ set(COMMANDS)
    if missing:
        print(f"commands without a line, or lines without a command: {sorted(missing)}")
        return 1
    if chosen.directory is not None:
        return run(chosen.directory, chosen)
    if os.geteuid() != 0 or other_users.why_not() is not None:
        with tempfile.TemporaryDirectory() as directory:
            return run(Path(directory), chosen)
    # Several users: this program once more, where all of them can reach it.
    with other_users.world() as world:
        program = [world.path / "bin" / "python", Path(__file__).resolve()]
        words = [*program, *sys.argv[1:], "--directory", world.path / "trials"]
        line = shlex.join(map(str, words))
        done = world.try_root(line, seconds=3600 + (chosen.seconds or 0))
        print(done.stdout, end="")
        return done.returncode


def _load() -> None:
    """Import what commands need, once and not in each child."""
    for package in (mstore, mstore_cli):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith(("__main__", "reference", "fsspec")):
                with suppress(ImportError):
                    importlib.import_module(module.name)


def run(directory: Path, chosen: argparse.Namespace) -> int:
    """Run the chosen trials; print those that failed; return an exit status."""
    until = None if chosen.seconds is None else time.monotonic() + chosen.seconds
    part, parts = map(int, chosen.part.split("/"))
    _load()
    trials: list[Trial] = []
    for side in sides():
        stage = Stage(directory / side.name, side)
        trials += [*races(stage), *disguises(stage)]
    # A prime step: each part meets every command, entry and disguise.
    trials = [one for number, one in enumerate(trials) if number * 7919 % parts == part - 1]
    trials = [one for one in trials if chosen.only in one[0]]
    if until is not None:
        random.Random(chosen.seed).shuffle(trials)
    failed = count = 0
    for name, trial in trials:
        if until is not None and time.monotonic() > until:
            break
        count += 1
        wrong = trial()
        if wrong:
            failed += 1
            print(f"{name}: {wrong}", flush=True)
    print(f"{count} trials, {failed} failed", flush=True)
    return 1 if failed or not count else 0


if __name__ == "__main__":
    sys.exit(main())
