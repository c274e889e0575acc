"""The program as a process: how it starts, what ends it, what a terminal sees."""

from __future__ import annotations

import os
import pty
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoints import write_safetensors
from cli_runs import Program, unheard

HEAVY = ("numba", "numpy", "torch", "safetensors", "rich")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """A store with one snapshot."""
    root = tmp_path_factory.mktemp("process")
    write_safetensors(root / "m" / "model.safetensors", [("t", "U8", (1000,), bytes(1000))])
    mstore = Program(root / "store")
    mstore.succeed("init")
    mstore.succeed("add", root / "m", "--name", "tiny")
    return mstore


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "mstore_cli", *(str(one) for one in arguments)]


UNPRINTED = "error: standard output cannot be written: no space left on device\n"


def in_shell(redirected: str, *arguments: str | Path) -> subprocess.CompletedProcess[bytes]:
    """A command whose standard streams a shell redirects or closes."""
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirected}', "sh", *command(*arguments)],
        check=False,
        capture_output=True,
        timeout=300,
    )


def imported(*arguments: str | Path) -> set[str]:
    """The top-level modules that are loaded when the command ends."""
    script = (
        "import sys; from mstore_cli.main import run; run(sys.argv[1:]); "
        "sys.stderr.write(' '.join({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *(str(one) for one in arguments)],
        check=True,
        capture_output=True,
        text=True,
    )
    return set(done.stderr.split())


def test_help_imports_nothing_heavy() -> None:
    """`mstore --help` loads neither the library nor anything numerical."""
    assert imported("log", "--help") & {"mstore", *HEAVY} == set()


def test_the_library_starts_without_reports() -> None:
    """`mstore.Store` loads no report but those of names and lineage: each call loads its own."""
    script = (
        "import dataclasses, sys; from mstore import Store\n"
        "print(*{one.__name__ for module in list(sys.modules.values())\n"
        "    if getattr(module, '__name__', '').startswith('mstore')\n"
        "    for one in vars(module).values()\n"
        "    if isinstance(one, type) and one.__name__.endswith('Report')})"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert {*done.stdout.split()} == {
        *("FileReport", "ParentReport", "RefReport", "ReflogReport", "SnapshotReport"),
        *("NoteReport", "OriginReport", "RemoveReport", "Report", "SignatureReport"),
        "TensorReport",
    }


def test_mounting_starts_without_the_library() -> None:
    """Who starts a mount waits for its daemon, and does not load what only that needs; each public
    name is there when it is used, and listed before."""
    script = (
        "import sys, mstore, mstore_fuse.mounts\n"
        "loaded = {name for name in sys.modules if name.startswith('mstore')}\n"
        "print('mstore.api' in loaded, 'numpy' in sys.modules)\n"
        "print(set(mstore.__all__) <= set(dir(mstore)), hasattr(mstore, 'nothing'))\n"
        "print(all(hasattr(mstore, name) for name in mstore.__all__), 'mstore.api' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == ["False", "False", "True", "False", "True", "True"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("line", [["log", "-q"], ["refs", "--json"], ["show", "tiny", "--json"]])
def test_looking_imports_no_compiler(line: list[str], store: Program) -> None:
    """Commands that only look load neither numba nor torch, nor what typer checks values with."""
    assert imported("--store", store.store, *line) & {"numba", "torch", "pydantic"} == set()


def test_a_command_imports_no_other(store: Program) -> None:
    """A command loads the module of no other command."""
    script = (
        "import sys; from mstore_cli.main import run; run(sys.argv[1:]); "
        "print(*(name for name in sys.modules if name.startswith('mstore_cli.commands.')))"
    )
    line = [sys.executable, "-c", script, "--store", str(store.store), "refs", "-q"]
    done = subprocess.run(line, check=True, capture_output=True, text=True)
    assert done.stdout == "tiny\nmstore_cli.commands.refs\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """--version, -V and `version` print the version of the library; --version also among options
    and before a command."""
    from mstore.terms import __version__
    from mstore_cli.main import run

    told = f"mstore {__version__}\n"
    done = subprocess.run(command("--version"), check=True, capture_output=True, text=True)
    assert done.stdout == told
    for words in (["-V"], ["version"], ["--store", "s", "--version"], ["--version", "refs"]):
        assert run(words) == 0
        assert capsys.readouterr().out == told
    assert "typer" not in imported("--store", "s", "--version")


@pytest.mark.parametrize("words", [("show", "nosuch", "--json"), ("log", "-n", "x", "--json")])
def test_nobody_reads_the_error(store: Program, words: tuple[str, ...]) -> None:
    """A reader of --json that is gone is no error to report, whatever the command came to."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb", 0) as pipe:
        line = command("--store", store.store, *words)
        done = subprocess.run(line, check=False, stdout=pipe, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_failure_that_cannot_be_written(store: Program) -> None:
    """A command whose answer is no, and whose output cannot be written, says the latter."""
    assert store("verify", "tiny").status == 1
    done = unheard("--store", str(store.store), "verify", "tiny")
    assert done.returncode == 1
    assert done.stderr.decode() == UNPRINTED


def test_reader_that_leaves(store: Program) -> None:
    """A closed pipe ends the program quietly."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        command("--store", store.store, "log"), check=False, stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    assert done.returncode == 141
    assert done.stderr == b""


@pytest.mark.sampled(4)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    "line",
    [
        ["log"],
        ["log", "--json"],
        ["cat", "tiny:model.safetensors"],
        ["--help"],
        ["--version"],
        ["log", "--help"],
        ["methods"],
    ],
    ids=" ".join,
)
def test_full_disk_behind_stdout(line: list[str], store: Program) -> None:
    """Output that cannot be written is an error with a readable line, not a silent success."""
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            command("--store", store.store, *line), check=False, stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 1
    assert done.stderr.decode() == UNPRINTED


@pytest.mark.sampled(2)
@pytest.mark.parametrize("line", [["show", "nosuch", "--json"], ["rm", "--wrong", "--json"]])
def test_an_error_that_cannot_be_written_to_a_full_disk(store: Program, line: list[str]) -> None:
    """An error whose document cannot be written keeps its status and its words."""
    heard = store(*line)
    done = unheard("--store", str(store.store), *line)
    assert (done.returncode, done.stderr.decode()) == (heard.status, heard.err)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("line", "status"),
    [(["refs"], 0), (["show", "nosuch"], 1), (["--wrong"], 2), (["log", "-n", "x"], 2)],
    ids=str,
)
@pytest.mark.parametrize("closed", ["2>/dev/full", "2>&-"])
def test_errors_that_nobody_hears(
    store: Program, line: list[str], status: int, closed: str
) -> None:
    """Standard error that is closed or cannot be written does not change the exit status."""
    assert in_shell(closed, "--store", store.store, *line).returncode == status


@pytest.mark.sampled(5)
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams(tmp_path: Path, closed: str) -> None:
    """A command whose standard streams are closed does its work, succeeds, and writes what is to be
    printed into no other file."""
    write_safetensors(tmp_path / "m" / "model.safetensors", [("t", "U8", (1000,), bytes(1000))])
    mstore = Program(tmp_path / "store")
    mstore.succeed("init")
    where = ("--store", mstore.store)
    for line in (["add", tmp_path / "m", "--name", "x"], ["refs"], ["refs", "--json"], ["--help"]):
        done = in_shell(closed, *where, *line)
        assert (done.returncode, done.stderr) == (0, b""), line
        assert bool(done.stdout) == (">&-" not in closed.split())
    assert mstore.succeed("refs", "-q").lines == ["x"]
    mstore.succeed("fsck", "--read-data")


def test_locale_without_letters(tmp_path: Path) -> None:
    """A locale that cannot spell a file name does not turn success into failure."""
    write_safetensors(tmp_path / "m" / "modèle 🦙.safetensors", [("t", "U8", (1,), b"x")])
    mstore = Program(tmp_path / "store")
    mstore.succeed("init")
    mstore.succeed("add", tmp_path / "m", "--name", "tiny")
    done = subprocess.run(
        command("--store", mstore.store, "ls", "tiny"),
        check=True,
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert rb"mod\xe8le \U0001f999.safetensors" in done.stdout


def written(directory: Path) -> int:
    """Bytes of the packs that are being written there."""
    try:
        return sum(path.stat().st_size for path in directory.rglob("*.pack"))
    except FileNotFoundError:
        return 0


def test_interrupt_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C in the middle of `add`: exit 130, one word, no ref, nothing in tmp/."""
    draw = random.Random(1)
    size = 1 << 27
    shard = tmp_path / "m" / "model.safetensors"
    write_safetensors(shard, [("t", "U8", (size,), draw.randbytes(size))])
    mstore = Program(tmp_path / "store")
    mstore.succeed("init")
    line = command("--store", mstore.store, "add", shard.parent, "--name", "x", "--threads", "1")
    adding = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 300
    while written(mstore.store / "tmp") < 1 << 20 and time.monotonic() < deadline:
        time.sleep(0.002)
    adding.send_signal(signal.SIGINT)
    out, err = adding.communicate(timeout=300)
    assert adding.returncode == 130
    assert out == b""
    assert err == b"interrupted\n"
    assert mstore.succeed("refs", "-q").out == ""
    assert not any((mstore.store / "tmp").iterdir())
    mstore.succeed("fsck", "--read-data")


def on_terminal(line: list[str], environment: dict[str, str]) -> tuple[str, str]:
    """Standard output (a pipe) and standard error (a terminal) of a command."""
    master, slave = pty.openpty()
    running = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=slave, env=os.environ | environment
    )
    os.close(slave)
    seen = bytearray()
    while running.poll() is None or select.select([master], [], [], 0)[0]:
        if select.select([master], [], [], 0.05)[0]:
            try:
                chunk = os.read(master, 65536)
            except OSError:
                break
            seen += chunk
    assert running.stdout is not None
    out = running.stdout.read().decode()
    running.stdout.close()
    os.close(master)
    assert running.wait() == 0, seen
    return out, seen.decode()


@pytest.mark.rest
def test_progress_on_a_terminal_only(tmp_path: Path) -> None:
    """The bar is drawn on a terminal's standard error, never with --no-progress or -q."""
    size = 1 << 24
    shard = tmp_path / "m" / "model.safetensors"
    write_safetensors(shard, [("t", "U8", (size,), random.Random(2).randbytes(size))])
    mstore = Program(tmp_path / "store")
    mstore.succeed("init")
    line = command("--store", mstore.store, "add", shard.parent, "--name", "x")
    environment = {"TERM": "xterm", "COLUMNS": "100"}
    assert on_terminal([*line, "--no-progress"], environment)[1] == ""
    assert on_terminal([*line, "-q"], environment)[1] == ""
    # The bar comes last, so that the silence before it is not that of work done already.
    out, seen = on_terminal([*line, "--json"], environment)
    assert out.startswith("{")
    assert "MiB" in seen


def test_an_interrupt_while_the_program_loads() -> None:
    """Ctrl-C before the commands are there ends with a word and 130, and no traceback."""
    code = (
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'mstore_cli.main': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from mstore_cli.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


ENDING = """\
import atexit, sys, threading, time
atexit.register(lambda: sys.stderr.write("registered "))
if sys.argv[1:] == ["thread"]:
    def late():
        time.sleep(0.3)
        sys.stderr.write("thread ")
    threading.Thread(target=late).start()
sys.argv[1:] = ["--version"] if sys.argv[1:] != ["wrong"] else ["--wrong"]
from mstore_cli.main import main
main()
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("how", "status", "end"),
    [
        ("", 0, "registered "),
        ("wrong", 2, "registered "),
        ("thread", 0, "thread registered "),
    ],
)
def test_the_end_leaves_nothing_out(how: str, status: int, end: str) -> None:
    """The process ends with its status, its output, after threads and what was registered."""
    line = [sys.executable, "-c", ENDING, *([how] if how else [])]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert done.stderr.endswith(end)
    assert bool(done.stdout) == (status == 0)
