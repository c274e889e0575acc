"""Settings that every test shares: hypothesis profiles, signals, and no silent end.

No deadline: a busy machine makes calls slow.  `ci` draws the same examples each time, so that a
failure there is a failure here.

A shell starts what runs in the background with SIGINT ignored, `nohup` does so with SIGHUP, and
programs inherit that: mstore would rightly not hear the signals that some tests send it.  A
signal with a handler of ours is at its default again in every program that a test starts.

Nothing ends the run in the middle without a word: `silent_ends`.

Stores of tests lie in memory: thousands of syncs on a disk take more time than all else.  TMPDIR
says another place.

One thread for linear algebra: workers already share the cores, and threads that wait for each other
on a busy machine take many times as long.

Of tests with many slow cases, some are marked as `rest`: `lanes/samples`.  `lanes/parts` leaves a
part of all that is chosen.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import parts
import pytest
import samples
import servers
import silent_ends
from hypothesis import settings

from mstore.blocks.index import Index

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

EXAMPLES = 50
"""Of each property; a test that needs more, or fewer, says so."""

settings.register_profile("dev", deadline=None, max_examples=EXAMPLES)
settings.register_profile(
    "ci", deadline=None, max_examples=EXAMPLES, derandomize=True, print_blob=True
)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)

silent_ends.refuse()


def pytest_configure(config: pytest.Config) -> None:
    """In the process above the workers."""
    if config.getoption("numprocesses", None):
        config.pluginmanager.register(silent_ends.Running())


@pytest.fixture(autouse=True)
def _sigterm_is_heard() -> Iterator[None]:
    """A command that has published its result hears no SIGTERM; the next test does."""
    yield
    if signal.getsignal(signal.SIGTERM) == signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


MEMORY = "/dev/shm"
ENOUGH = 4 << 30
"""Bytes that must be free there: a run of all tests takes a tenth of them."""


def has_memory() -> bool:
    """Whether stores, and programs that tests compile, can lie in memory."""
    if not os.access(MEMORY, os.W_OK):
        return False
    there = os.statvfs(MEMORY)
    return there.f_bavail * there.f_frsize >= ENOUGH and not there.f_flag & os.ST_NOEXEC


if "TMPDIR" not in os.environ and has_memory():
    os.environ["TMPDIR"] = MEMORY
    # pytest has asked for the place already.
    tempfile.tempdir = None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before `-m` chooses."""
    samples.mark_rest(items)
    parts.leave_part(config, items)


@pytest.fixture(scope="module")
def template(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `build(root)` of the test's module puts into a directory, once: copied, never opened."""
    root = tmp_path_factory.mktemp("template")
    request.module.build(root)
    return root


@pytest.fixture
def copied(template: Path, tmp_path: Path) -> Path:
    """A test's own copy of it."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """A server of S3, one for all tests of a worker: ask below `below()` only."""
    with servers.moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """A server of Azure's blobs, likewise."""
    with servers.azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    """A new index."""
    (tmp_path / "index").mkdir()
    index = Index(tmp_path / "index", create=True)
    yield index
    index.close()
