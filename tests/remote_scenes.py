"""A remote with some history, and stores around it: each scene is one command that is to be run.

    first     a push that makes the remote
    second    a push of one commit more, by a store that has not seen the last push of another
    fetch, pull    by a store that has not seen the last two pushes
    clone     of all
    gc, fsck, du    by a store that pushes, of a remote with garbage: a condemned pack, one that
              nothing needs any more, and one that no root names

A scene can be laid out any number of times. Packs and the pieces of requests are small here
(`shrink`), so that a command makes several packs, of several pieces.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import BUCKET, FaultProxy
from proof_models import BLOCK, Files, model_files, write_files

from mstore import Store
from mstore.remotes import arrival, bucket, outgoing
from mstore.remotes.collect import RemoteGcReport

URL = f"s3://{BUCKET}/models"
SECRET = "never-shown-7d1e"
COMMANDS = ("first", "second", "fetch", "pull", "clone")
KEEPING = ("gc", "fsck", "du")
BASE, TUNED, TUNED_AGAIN, OTHER = (1, 0), (1, 1), (1, 2), (2, 0)
Refs = dict[str, tuple[int, int]]
"""Names of branches, and which model each has."""
GARBAGE = {"gone": (3, 0), "going": (4, 0)}
STRAY = f"packs/5a/{'5a' * 32}.pack"
EMPTY: Refs = {}
FIRST: Refs = {"base": BASE, "tuned": TUNED}
SECOND: Refs = FIRST | {"other": OTHER}
THIRD: Refs = SECOND | {"tuned": TUNED_AGAIN}


@dataclass(frozen=True)
class Scene:
    """One command, and what it changes.

    states: objects of the remote, one after the other. before, after: the remote's refs.
    """

    store: Path | None
    states: tuple[dict[str, bytes], ...]
    before: Refs
    after: Refs


def settings(proxy: FaultProxy) -> dict[str, str]:
    """Environment by which clients reach a proxy."""
    return {
        "AWS_ENDPOINT_URL": proxy.url,
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }


def shrink(set_: Callable[[Any, str, object], None] = setattr) -> None:
    """Make packs and pieces small."""
    set_(outgoing, "PACK_BYTES", 1 << 17)
    set_(bucket, "PIECE_BYTES", 1 << 16)
    set_(arrival, "PIECE_BYTES", 1 << 16)


@contextmanager
def reached(proxy: FaultProxy) -> Iterator[None]:
    """This process's clients reach that proxy, with small pieces."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings(proxy).items():
            patch.setenv(name, value)
        # Of programs that are started here, too.
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        shrink(patch.setattr)
        yield


def scenes(server: str, directory: Path) -> dict[str, Scene]:
    """Make all scenes."""
    proxy = FaultProxy(server, "scenes")
    proxy.fill()

    def add(store: Store, name: str, model: tuple[int, int], base: str | None = None) -> None:
        source = write_files(directory / "source", model_files(*model))
        store.add(source, name=name, base=base, threads=1)

    def kept(store: Store, name: str) -> Path:
        return Path(shutil.copytree(store.path, directory / name))

    try:
        with reached(proxy), Store.init(directory / "author", block_size=BLOCK) as author:
            add(author, "base", BASE)
            add(author, "tuned", TUNED, "base")
            author.add_remote("origin", URL)
            first = kept(author, "first")
            author.push("origin", every=True)
            states = [proxy.objects()]
            reader = Path(Store.clone(URL, directory / "reader").path)
            Store.clone(URL, directory / "rival")
            with Store.open(directory / "rival") as rival:
                add(rival, "other", OTHER)
                rival.push("origin", ["other"])
            states.append(proxy.objects())
            add(author, "tuned", TUNED_AGAIN, "base")
            second = kept(author, "second")
            author.push("origin", ["tuned"])
            states.append(proxy.objects())
            author.fetch("origin")
            for name in ("gone", "going"):
                add(author, name, GARBAGE[name])
                author.push("origin", [name])
                author.push("origin", delete=[name])
                if name == "gone":
                    collect(author)
            proxy.ask("PUT", f"/{proxy.bucket}/models/{STRAY}", body=b"a push that did not end")
            littered = (proxy.objects(),)
            keeper = kept(author, "keeper")
    finally:
        proxy.close()
    keeping = Scene(keeper, littered, THIRD, THIRD)
    return dict.fromkeys(KEEPING, keeping) | {
        "first": Scene(first, (), EMPTY, FIRST),
        "second": Scene(second, tuple(states[:2]), SECOND, THIRD),
        "fetch": Scene(reader, tuple(states), THIRD, THIRD),
        "pull": Scene(reader, tuple(states), THIRD, THIRD),
        "clone": Scene(None, tuple(states), THIRD, THIRD),
    }


def run(command: str, path: Path) -> set[str]:
    """Run a scene's command for the store at a path; return what moved, as it reports."""
    if command == "clone":
        Store.clone(URL, path)
        return set()
    with Store.open(path) as store:
        if command == "first":
            return {one.name for one in store.push("origin", every=True).moved}
        if command == "second":
            return {one.name for one in store.push("origin", ["tuned"]).moved}
        if command == "gc":
            collect(store)
        if command == "fsck":
            assert store.remote_fsck("origin", read_data=True).problems == ()
        if command == "du":
            assert {ref.name for ref in store.remote_usage("origin").refs} == set(THIRD)
        if command in KEEPING:
            return set()
        report = store.fetch("origin") if command == "fetch" else store.pull("origin")
        return {one.name for one in report.fetched}


def collect(store: Store) -> RemoteGcReport:
    """Collect the garbage of a remote, without time of grace and older moves."""
    return store.remote_gc("origin", reflog_days=0, grace_hours=0)


def run_here(command: str, path: str) -> None:
    """Run it as a program: `python -c`, with the settings in the environment."""
    shrink()
    run(command, Path(path))


def program(command: str, path: Path) -> list[str]:
    """Return how to start that."""
    code = "import sys, remote_scenes; remote_scenes.run_here(*sys.argv[1:])"
    return [sys.executable, "-c", code, command, str(path)]


def refs_of(path: Path, below: str = "") -> Refs:
    """Return the refs of a store, and prove that it has all bytes of what they name."""
    found: Refs = {}
    with Store.open(path) as store:
        problems = store.fsck(read_data=True).problems
        assert problems == (), problems
        for ref in map(store.ref, store.ref_ids()):
            if not ref.name.startswith(below) or (not below and ref.name.startswith("remotes/")):
                continue
            files: Files = {
                file: b"".join(store.read_file(ref.name, file))
                for file in store.view(ref.snapshot).files
            }
            models = [
                one for one in (BASE, TUNED, TUNED_AGAIN, OTHER) if files == model_files(*one)
            ]
            assert models, f"{ref.name} has other files than were added"
            found[ref.name.removeprefix(below)] = models[0]
    return found
