"""A store that is closed while other threads are at work in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from apart import program
from small_models import BLOCK, small_model

from mstore import MergeRequest
from mstore.api import Store
from mstore.blocks.lmdb_env import Environment
from mstore.terms.errors import Unavailable

AT_WORK = """
import os, sys, threading, time
from pathlib import Path
from mstore import MergeRequest
from mstore.api import Store
from mstore.terms.errors import MstoreError, Unavailable
path = Path(sys.argv[1])
"""


def build(root: Path) -> None:
    """A store of a base, two fine-tunes and their merge."""
    for name in ("base", "one", "two"):
        small_model(root / name, "family", changed=name)
    with Store.init(root / "store", block_size=BLOCK) as store:
        store.add(root / "base", name="base", threads=1)
        for name in ("one", "two"):
            store.add(root / name, name=name, base="base", threads=1)
        plan = store.plan(
            MergeRequest(
                base="base", experts=["one", "two"], method="ties", parameters={"density": 0.4}
            )
        )
        store.merge(plan, name="merged", threads=1)


@pytest.fixture
def store(copied: Path) -> Path:
    return copied / "store"


@pytest.mark.rest
def test_close_beside_readers_of_every_kind(store: Path) -> None:
    """Threads that read refs, logs, blocks, statistics and the memo table while the store is
    closed end with right answers or Unavailable, and the process lives; time after time."""
    code = (
        AT_WORK
        + """
def refs(store): assert len(store.refs()) == 4
def log(store): assert store.log("merged")
def read(store): assert b"".join(store.read_file("merged", "config.json")) == config
def view(store): assert b"".join(store.view("merged").stream("model.safetensors")) == model
def plan(store):
    asked = {"method": "ties", "parameters": {"density": 0.4}}
    store.plan(MergeRequest(base="base", experts=["one", "two"], **asked))
def scan(store):
    with store._catalog.index.env.read() as rows:
        for _ in range(50):
            list(store._catalog.index.blocks(rows))
def stats(store): store._statistics.squares(bytes(32))

with Store.open(path) as store:
    config = b"".join(store.read_file("merged", "config.json"))
    model = b"".join(store.view("merged").stream("model.safetensors"))

wrong = []
def work(call, store, begun):
    begun.wait()
    try:
        while True:
            call(store)
    except Unavailable as error:
        if error.hint is None or error.where is None:
            wrong.append(repr(error))
    except BaseException as error:
        wrong.append(f"{call.__name__}: {error!r}")

for round_ in range(25):
    store = Store.open(path)
    begun = threading.Barrier(9)
    threads = [threading.Thread(target=work, args=(call, store, begun))
               for call in (refs, log, read, view, plan, scan, scan, stats)]
    for thread in threads: thread.start()
    begun.wait()
    time.sleep(0.002 * (round_ % 10))
    store.close()
    for thread in threads: thread.join()
print(wrong)
with Store.open(path) as store: print(len(store.refs()))
"""
    )
    assert program(code, str(store)).splitlines() == ["[]", "4"]


@pytest.mark.rest
def test_close_waits_for_a_transaction(store: Path) -> None:
    """A read transaction that runs goes on to its end; `close` returns after it."""
    code = (
        AT_WORK
        + """
store = Store.open(path)
env = store._catalog.index.env
inside, told = threading.Event(), []
def read():
    with env.read() as rows:
        inside.set()
        time.sleep(0.2)
        told.append(rows.stat(env.databases["refs"])["entries"])
thread = threading.Thread(target=read)
thread.start()
inside.wait()
store.close()
print(told)
thread.join()
"""
    )
    assert program(code, str(store)) == "[4]\n"


def test_a_closed_store_says_so(store: Path) -> None:
    """Every call after `close` is Unavailable; what the store is called can still be asked."""
    opened = Store.open(store)
    view = opened.view("merged")
    statistics, memo = opened._statistics, opened._memo
    assert opened.remarks == ()
    opened.close()
    opened.close()
    for call in (
        opened.refs,
        opened.log,
        opened.stats,
        opened.gc,
        opened.fsck,
        lambda: opened.view("merged"),
        lambda: list(view.stream("model.safetensors")),
        lambda: opened.merge("x", name="y"),
        lambda: statistics.squares(bytes(32)),  # type: ignore[arg-type]
        lambda: memo.outputs([bytes(32)]),
    ):
        with pytest.raises(Unavailable, match="was closed") as refused:
            call()
        assert refused.value.hint
    assert opened.path == store
    assert opened.block_size == BLOCK


def test_another_store_of_the_process_reads_on(store: Path) -> None:
    """Two opened stores of one path share an environment; closing one, twice, leaves the other."""
    first, second = Store.open(store), Store.open(store)
    first.close()
    first.close()
    with pytest.raises(Unavailable):
        first.refs()
    assert len(second.refs()) == 4
    second.close()
    with Store.open(store) as third:
        assert len(third.refs()) == 4


def test_a_thread_cannot_close_what_it_is_inside(store: Path) -> None:
    """Closing a store inside a transaction of one's own is refused, and the store stays open."""
    opened = Store.open(store)
    env = opened._catalog.index.env
    with env.read(), pytest.raises(Unavailable, match="inside a call") as refused:
        opened.close()
    assert refused.value.hint
    with env.read(), pytest.raises(Unavailable, match="inside a call"):
        env.release()
    assert len(opened.refs()) == 4
    opened.close()


@pytest.mark.rest
def test_one_who_opens_while_another_waits_to_close_takes_it_over(store: Path) -> None:
    """A thread that opens the store inside its read does not wait for the one that closes it."""
    code = (
        AT_WORK
        + """
first = Store.open(path)
env = first._catalog.index.env
inside, told = threading.Event(), []
def read():
    with env.read():
        inside.set()
        time.sleep(0.15)
        second = Store.open(path)
        told.append(len(second.refs()))
    second.close()
thread = threading.Thread(target=read)
thread.start()
inside.wait()
first.close()
thread.join()
print(told)
with Store.open(path) as third: print(len(third.refs()))
"""
    )
    assert program(code, str(store)).splitlines() == ["[4]", "4"]


@pytest.mark.rest
def test_a_forked_child_closes_nothing_of_its_parent(store: Path) -> None:
    """A child of a fork may close the store that it inherited, also beside readers of the parent
    that were at work at the fork; the parent reads on."""
    code = (
        AT_WORK
        + """
store = Store.open(path)
store.refs()
statistics = store._statistics
stop = threading.Event()
def read():
    while not stop.is_set():
        list(store.view("merged").stream("model.safetensors"))
        statistics.squares(bytes(32))
threads = [threading.Thread(target=read) for _ in range(2)]
for thread in threads: thread.start()
codes = []
for _ in range(10):
    time.sleep(0.01)
    child = os.fork()
    if child == 0:
        store.close()
        store.close()
        os._exit(0)
    until = time.monotonic() + 60
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid: break
        if time.monotonic() > until:
            os.kill(child, 9)
        time.sleep(0.005)
    codes.append(os.waitstatus_to_exitcode(status))
stop.set()
for thread in threads: thread.join()
print(codes == [0] * 10, len(store.refs()))
store.close()
"""
    )
    assert program(code, str(store)) == "True 4\n"


@pytest.mark.rest
def test_writers_are_waited_for(tmp_path: Path) -> None:
    """A write transaction that runs when the last user lets go is committed."""
    code = """
import sys, threading, time
from pathlib import Path
from mstore.blocks.lmdb_env import Environment
env = Environment.acquire(Path(sys.argv[1]), ("rows",))
inside = threading.Event()
def write():
    with env.write() as rows:
        inside.set()
        time.sleep(0.15)
        rows.put(b"k", b"v", db=env.databases["rows"])
thread = threading.Thread(target=write)
thread.start()
inside.wait()
env.release()
thread.join()
again = Environment.acquire(Path(sys.argv[1]), ("rows",))
with again.read() as rows: print(rows.get(b"k", db=again.databases["rows"]))
again.release()
"""
    assert program(code, str(tmp_path)) == "b'v'\n"


def test_a_released_environment_is_refused(tmp_path: Path) -> None:
    """Whoever kept an environment after its last user had let go is told so."""
    env = Environment.acquire(tmp_path, ("rows",))
    env.release()
    with pytest.raises(Unavailable, match="was closed"), env.read():
        pass
    with pytest.raises(Unavailable, match="was closed"), env.write():
        pass
