"""Trials: a store with a past is damaged, worked with in any order, and must give back everything.

    python tests/adversary/trials.py SECONDS [--seed N] [--trials N]

A trial copies one of a few stores, damages what is not a pack (`damage`), and then collects,
rebuilds the index, tags, repairs, adds, merges and checks in a random order, in a process of its
own.  Any of these may refuse with an error of mstore's; none may end by a signal, hang, or raise
anything else.  At the end the index is rebuilt once more, garbage is collected as hard as it goes,
and every snapshot that was ever acknowledged and not removed must be there, byte for byte.

Exits with 1 and tells the seed of the trial where that is not so: `--only SEED` runs it again.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import damage  # noqa: E402
from lives import Life, Promises  # noqa: E402
from small_models import small_model  # noqa: E402

from mstore import MergeRequest  # noqa: E402
from mstore.api import Store  # noqa: E402
from mstore.blocks.pack_store import Packs  # noqa: E402
from mstore.store import generation, mirror, unnamed_packs  # noqa: E402
from mstore.store.layout import Layout  # noqa: E402
from mstore.terms.errors import MstoreError  # noqa: E402
from mstore.terms.ids import PackId  # noqa: E402

LONGEST = 240.0
"""Seconds after which a trial counts as hung: a loaded machine takes a tenth of that."""
STEPS = ("gc", "gc", "reindex", "tag", "repair", "add", "merge", "fsck", "read")


@dataclass(frozen=True)
class Past:
    """A store as it is now, copies of what it was, and what must never be lost."""

    root: Path
    older: list[Path]
    promises: Promises


KINDS = [(codec, kind) for codec in ("raw", "dense") for kind in ("adds", "merges", "collected")]


def pasts(directory: Path, needed: Sequence[int]) -> dict[int, Past]:
    """A few stores with different pasts, by number."""
    return {
        number: _past(directory / codec / kind, codec, kind)
        for number, (codec, kind) in enumerate(KINDS)
        if number in needed
    }


def _past(directory: Path, codec: str, kind: str) -> Past:
    life = Life.begin(directory, codec=codec)
    older: list[Path] = []

    def remember() -> None:
        older.append(directory / f"older{len(older)}")
        for name in ("index", "stats", "memo", "refs"):
            if (life.root / name).exists():
                shutil.copytree(life.root / name, older[-1] / name)

    life.add("base", "base")
    remember()
    for number in (1, 2, 3):
        life.add(f"team/{number}", "base", changed=str(number))
    remember()
    if kind == "merges":
        for number in (1, 2):
            life.merge("merged", "base", [f"team/{number}", "team/3"], 0.3 * number)
            remember()
    if kind == "collected":
        life.add("gone", "alone")
        life.add("team/1", "alone", changed="kin")
        life.remove("gone")
        life.remove("team/2")
        with Store.open(life.root) as store:
            store.gc(reflog_days=0, dead_share=0.0)
        remember()
    life.tag("v1", "team/3")
    life.add("last", "last")
    remember()
    life.add("team/3", "base", changed="3 again")
    return Past(life.root, older, life.promises)


def trial(past: Past, seed: int, scratch: Path) -> Iterator[str]:
    """Tell what is done; raises AssertionError for what is wrong."""
    draw = random.Random(seed)
    root = scratch / "store"
    shutil.copytree(past.root, root)
    for _ in range(draw.choice([1, 1, 2, 3])):
        yield draw.choice(damage.ALL)(root, past.older, draw)
    extra = small_model(scratch / "extra", "extra")
    for step in draw.sample(STEPS, k=draw.randrange(2, len(STEPS))):
        yield step
        try:
            _do(root, step, extra, draw)
        except MstoreError as error:
            yield f"  {error}"
        if draw.random() < 0.1:
            yield draw.choice(damage.ALL)(root, past.older, draw)
    yield "reindex"
    for remark in Store.reindex(root).remarks:
        yield f"  {remark}"
    with Store.open(root) as store:
        # An older mirror may name what was removed and collected since: its hint is `mstore rm`.
        for ref in store.refs():
            if ref.missing:
                assert ref.snapshot not in past.promises.contents, f"{ref.name} is lost"
                store.remove(ref.name)
        problems = store.fsck(read_data=True).problems
        if problems:
            yield "repair"
            problems = store.repair(read_data=True).after.problems
        assert problems == (), f"fsck: {problems}"
        store.gc(reflog_days=0, dead_share=0.0)
    missing = list(past.promises.lost(root))
    assert not missing, "; ".join(missing)


def _do(root: Path, step: str, extra: Path, draw: random.Random) -> None:
    if step == "reindex":
        Store.reindex(root, use_old_index=draw.random() < 0.8)
        return
    with Store.open(root) as store:
        names = [ref.name for ref in store.refs()]
        match step:
            case "gc":
                store.gc(reflog_days=0, dead_share=draw.choice([0.0, 0.3]))
            case "tag":
                store.tag(f"t{draw.randrange(1000)}", draw.choice(names or ["base"]))
            case "repair":
                store.repair(read_data=draw.random() < 0.5)
            case "add":
                store.add(extra, name=f"extra/{draw.randrange(1000)}", threads=1)
            case "merge":
                plan = store.plan(
                    MergeRequest(base="base", experts=["team/3", "team/1"], method="linear"),
                    threads=1,
                )
                store.merge(plan, name=f"m/{draw.randrange(1000)}", threads=1)
            case "fsck":
                store.fsck(read_data=True)
            case "read":
                for name in names:
                    view = store.view(name)
                    for path in view.files:
                        for _ in view.stream(path):
                            pass


# -- one process a trial -----------------------------------------------------------------------


def in_a_child(work: Callable[[], None], output: Path) -> str | None:
    """Run this in a child that says all in a file; what was wrong with it, or None."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with output.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                work()
            status = 0
        except BaseException:  # noqa: BLE001 -- the child must not go on as if it were the parent
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)
    ends = time.monotonic() + LONGEST
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > ends:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"no end after {LONGEST:g} s"
        time.sleep(0.01)
    if os.WIFSIGNALED(status):
        return f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return None if status == 0 else "failed"


def run(past: Past, seed: int) -> str | None:
    """One trial; what was wrong, with all that was done, or None."""
    with tempfile.TemporaryDirectory(prefix="mstore-adversary-") as directory:
        scratch = Path(directory)

        def work() -> None:
            for told in trial(past, seed, scratch):
                print(told, flush=True)

        wrong = in_a_child(work, scratch / "told")
        return wrong and f"seed {seed}: {wrong}\n{(scratch / 'told').read_text()}"


def _ignore_generations() -> None:
    """Generations do not count, and gc deletes what the index does not know.  Generations notice
    the latter alone before anything is lost."""

    def deleted(layout: Layout, packs: Packs, unknown: Sequence[PackId]) -> Sequence[PackId]:
        for pack in unknown:
            packs.remove(pack)
        return unknown

    unnamed_packs.put_aside = deleted
    generation.doubt = lambda *given, **more: None
    mirror.differences = lambda *given, **more: []


MUTANTS = {"generations ignored": _ignore_generations}


def main() -> int:
    """Run trials until the time is over, or so many were done."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("seconds", type=float)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--trials", type=int, default=1 << 60)
    parser.add_argument("--only", type=int, metavar="SEED")
    parser.add_argument("--mutant", choices=MUTANTS, help="break a promise first, to see it told")
    asked = parser.parse_args()
    if asked.mutant is not None:
        MUTANTS[asked.mutant]()
    with tempfile.TemporaryDirectory(prefix="mstore-adversary-") as directory:
        # In a child: a process that has had an environment open must not fork.
        needed = range(len(KINDS)) if asked.only is None else [asked.only % len(KINDS)]
        made = Path(directory) / "pasts"
        wrong = in_a_child(lambda: _save(pasts(made, needed), made), Path(directory) / "told")
        if wrong:
            print((Path(directory) / "told").read_text())
            return 1
        found = _load(made)
        seeds = [asked.only] if asked.only is not None else None
        draw = random.Random(asked.seed)
        print(f"seed {asked.seed}", flush=True)
        tried: Counter[str] = Counter()
        ends = time.monotonic() + asked.seconds
        while sum(tried.values()) < asked.trials and time.monotonic() < ends:
            seed = seeds.pop() if seeds else draw.randrange(1 << 32)
            past = found[seed % len(KINDS)]
            told = run(past, seed)
            if told:
                print(told)
                return 1
            tried["/".join(past.root.parts[-3:-1])] += 1
            if seeds is not None:
                break
        print(f"{sum(tried.values())} trials: " + ", ".join(f"{k} {n}" for k, n in tried.items()))
    return 0


def _save(found: dict[int, Past], directory: Path) -> None:
    import pickle

    (directory / "pasts").write_bytes(pickle.dumps(found))


def _load(directory: Path) -> dict[int, Past]:
    import pickle

    found: dict[int, Past] = pickle.loads((directory / "pasts").read_bytes())
    return found


if __name__ == "__main__":
    sys.exit(main())
