"""`mstore serve` as a process: how it begins, what ends it, what it logs."""

from __future__ import annotations

import importlib.util
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from checkpoints import write_safetensors
from cli_runs import Program, unheard
from http_server import taken
from long_programs import announced

from mstore_cli import reference
from mstore_cli.commands import serve as command
from mstore_cli.keys import DOCUMENTS
from mstore_serve import serving

BIG = 12 << 20
"""More than the buffers of two sockets hold."""
PAGE = Path(__file__).resolve().parent.parent / "docs" / "serving.md"


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that this machine's user has set up."""
    for name in ("MSTORE_S3_KEY", "MSTORE_S3_SECRET"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """A store with one snapshot, `tiny`, whose file is large."""
    root = tmp_path_factory.mktemp("serving")
    content = random.Random(3).randbytes(BIG)
    write_safetensors(root / "m" / "model.safetensors", [("t", "U8", (BIG,), content)])
    mstore = Program(root / "store")
    mstore.succeed("init")
    mstore.succeed("add", root / "m", "--name", "tiny")
    return mstore


def running(
    store: Program, *options: str
) -> AbstractContextManager[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A server at any free port, and what it says when it answers."""
    return started(store, "--port", "0", *options)


@contextmanager
def started(
    store: Program, *options: str
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A server, and what it says when it answers."""
    line = ["--store", str(store.store), "serve", "--json", *options]
    process = subprocess.Popen(
        [sys.executable, "-m", "mstore_cli", *line],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, announced(process)
    finally:
        process.kill()
        process.communicate()


def get(info: dict[str, Any], path: str) -> bytes:
    with urlopen(f"{info['url']}{path}", timeout=120) as answer:
        content = answer.read()
        assert isinstance(content, bytes)
        return content


def test_what_it_says(store: Program, tmp_path: Path) -> None:
    """It says where it answers, and does; each request and each failure is a line of the log."""
    log = tmp_path / "log"
    with running(store, "--log", str(log)) as (process, info):
        assert list(info) == [key.name for key in DOCUMENTS["serve"]]
        assert info["port"] != 0
        assert info["url"] == f"http://127.0.0.1:{info['port']}/"
        assert (info["loopback"], info["pid"]) == (True, process.pid)
        whole = get(info, "refs/tiny/-/files/model.safetensors")
        assert whole == store.succeed("cat", "tiny:model.safetensors").raw
        with pytest.raises(OSError, match="404"):
            get(info, "refs/no%0Abody?x=%1b")
        process.send_signal(signal.SIGTERM)
        _out, err = process.communicate(timeout=120)
        assert (process.returncode, err) == (0, "")
    first, second = log.read_text().splitlines()
    size = len(whole)
    assert re.search(rf' 127.0.0.1 "GET /refs/tiny/\S+" 200 {size} [0-9.]+$', first)
    assert '"GET /refs/no%0Abody?x=%1b" 404 ' in second


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_answers_finish(store: Program, number: signal.Signals) -> None:
    """A signal ends the server with status 0, after the answers under way are whole."""
    whole = store.succeed("cat", "tiny:model.safetensors").raw
    with running(store) as (process, info), socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        client.settimeout(120)
        client.connect((info["host"], info["port"]))
        client.sendall(
            b"GET /refs/tiny/-/files/model.safetensors HTTP/1.1\r\nHost: localhost\r\n\r\n"
        )
        begun = client.recv(1000)
        process.send_signal(number)
        while True:
            # From now on there are no new connections.
            try:
                socket.create_connection((info["host"], info["port"]), timeout=120).close()
            except OSError:
                break
        head, _, body = (begun + taken(client)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert body == whole
        _out, err = process.communicate(timeout=120)
        assert process.returncode == 0
        assert "Traceback" not in err


@pytest.mark.rest
def test_a_second_signal_ends_it_at_once(store: Program) -> None:
    """A client that takes nothing delays the end, until a second signal."""
    with running(store) as (process, info), socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        client.connect((info["host"], info["port"]))
        client.sendall(
            b"GET /refs/tiny/-/files/model.safetensors HTTP/1.1\r\nHost: localhost\r\n\r\n"
        )
        client.recv(1000)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGTERM)
        # Long before the minute that answers have.
        _out, err = process.communicate(timeout=40)
        assert process.returncode == 0
        assert "Traceback" not in err


@pytest.mark.rest
def test_a_quiet_server_that_ignores_a_signal(store: Program) -> None:
    """A server that was started with SIGHUP ignored, as by nohup, goes on after it; with -q only
    the address is printed, and no request."""
    line = f"trap '' HUP; exec '{sys.executable}' -m mstore_cli --store '{store.store}'"
    process = subprocess.Popen(
        ["sh", "-c", f"{line} serve --port 0 -q"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    process.send_signal(signal.SIGHUP)
    with urlopen(f"{url}refs", timeout=120) as answer:
        assert answer.status == 200
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=120) == ("", "")
    assert process.returncode == 0


@pytest.mark.rest
def test_a_log_that_nobody_reads(store: Program) -> None:
    """A pipe that is full loses lines and stops no request."""
    with running(store) as (process, info):
        # Linux holds 64 KiB in a pipe.
        for _ in range(16):
            with pytest.raises(OSError, match="404"):
                get(info, "x" * 8000)
        process.send_signal(signal.SIGTERM)
        # Nobody reads standard error yet.
        assert process.wait(120) == 0


def test_a_port_in_use(store: Program) -> None:
    """A port that is taken is an error that says how to choose another, in one line each."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = store("serve", "--port", str(port))
    assert (done.status, done.out) == (1, "")
    assert f"127.0.0.1:{port}: the port is in use" in done.err
    assert "hint: --port chooses another, --port 0 any free one" in done.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--host", "no.such.host.invalid"), "no such address"),
        (("--host", "192.0.2.1"), "not an address of this machine"),
        (("--port", "70000"), "--port 70000: a port is a number from 0 to 65535"),
        (("--connections", "0"), "--connections 0: at least one request must be allowed"),
        (("--timeout", "0"), "--timeout 0.0: a timeout is from 1 to 86400 seconds"),
        (("--log", "/nowhere/at/all"), "the log cannot be written"),
        (("--s3", "70000", "--no-auth"), "--s3 70000: a port is a number from 0 to 65535"),
        (
            ("--s3", "0", "--no-auth", "--host", "0.0.0.0"),
            "--host 0.0.0.0: requests that nobody signed are answered at a loopback address only",
        ),
        (("--s3", "8420", "--port", "8420", "--no-auth"), "--s3 8420: HTTP has this port"),
        (("--no-auth",), "--no-auth is for S3, which is not served"),
        (("--s3", "0", "--no-auth", "--token"), "--token is for HTTP, which is not served"),
    ],
)
def test_what_cannot_be(store: Program, options: tuple[str, ...], message: str) -> None:
    """An address, a number or a file that cannot be is an error, and nothing is served."""
    done = store("serve", *options)
    assert (done.status, done.out) == (1 if options[0] == "--log" else 2, "")
    assert message in done.err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "--s3: MSTORE_S3_KEY and MSTORE_S3_SECRET are not set"),
        ({"MSTORE_S3_KEY": "models"}, "--s3: MSTORE_S3_SECRET is not set"),
        (
            {"MSTORE_S3_KEY": "models", "MSTORE_S3_SECRET": "hunter2"},
            "a secret access key has 16 letters, digits and signs or more",
        ),
    ],
)
def test_s3_without_keys(
    store: Program, given: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without keys that nobody guesses, S3 is not served, and the error says how to make some."""
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    done = store("serve", "--s3", "0")
    assert (done.status, done.out) == (2, "")
    assert message in done.err
    assert "import secrets" in done.err
    assert "hunter2" not in done.err
    assert ("--no-auth" in done.err) == ("hunter2" not in given.values())


def test_s3_alone_and_beside_http(store: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --s3 only clients of S3 are served, who sign; with --port HTTP is served as well."""
    monkeypatch.setenv("MSTORE_S3_KEY", "models")
    monkeypatch.setenv("MSTORE_S3_SECRET", "x" * 20)
    with started(store, "--s3", "0") as (_, info):
        assert (info["url"], info["port"]) == (None, None)
        with pytest.raises(OSError, match="403"):
            urlopen(f"{info['s3_url']}mstore", timeout=120)
    with running(store, "--s3", "0", "--no-auth") as (_, info):
        whole = get(info, "refs/tiny/-/files/model.safetensors")
        key = "mstore/refs/tiny/model.safetensors"
        with urlopen(f"{info['s3_url']}{key}", timeout=120) as answer:
            assert answer.read() == whole


@pytest.mark.rest
def test_s3_that_the_network_reaches(store: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """At an address that other machines reach, it warns that there is no TLS."""
    monkeypatch.setenv("MSTORE_S3_KEY", "models")
    monkeypatch.setenv("MSTORE_S3_SECRET", "x" * 20)
    with started(store, "--s3", "0", "--host", "0.0.0.0") as (process, info):
        assert info["loopback"] is False
        process.send_signal(signal.SIGTERM)
        _out, err = process.communicate(timeout=120)
        assert "without TLS, the network can read every model that is sent" in err


def test_a_port_of_s3_in_use(store: Program) -> None:
    """A port of S3 that is taken is an error that says how to choose another."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        done = store("serve", "--s3", str(other.getsockname()[1]), "--no-auth")
    assert done.status == 1
    assert "hint: --s3 chooses another, --s3 0 any free one" in done.err


def test_without_the_extra(store: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the packages, the error names them and the command that installs them."""
    found = importlib.util.find_spec

    def lacking(name: str, package: str | None = None) -> object:
        return None if name in ("starlette", "uvicorn") else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", lacking)
    done = store("serve")
    assert done.status == 1
    assert "starlette and uvicorn are missing" in done.err
    assert 'hint: pip install "mstore[serve]"' in done.err


def test_everybody_may_read(store: Program) -> None:
    """At an address that other machines reach, it warns that there is no authentication."""
    with running(store, "--host", "0.0.0.0") as (process, info):
        assert info["loopback"] is False
        # It answers to any name there.
        with socket.create_connection(("127.0.0.1", info["port"]), timeout=120) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: models.example\r\nConnection: close\r\n\r\n")
            assert taken(client).startswith(b"HTTP/1.1 200 ")
        process.send_signal(signal.SIGTERM)
        _out, err = process.communicate(timeout=120)
        assert "there is no authentication" in err


@pytest.mark.rest
def test_a_server_that_cannot_be_announced_ends(store: Program) -> None:
    """If its address cannot be written, the command fails and serves nothing."""
    done = unheard("--store", str(store.store), "serve", "--port", "0")
    assert done.returncode == 1
    assert b"no space left" in done.stderr


def test_one_set_of_defaults() -> None:
    """The command's defaults are those of `serving.serve`."""
    for name in ("HOST", "PORT", "CONNECTIONS", "TIMEOUT"):
        assert getattr(command, name) == getattr(serving, name)


def test_the_page_is_current() -> None:
    """The tables are made: python -m mstore_cli.reference docs/serving.md"""
    text = PAGE.read_text(encoding="utf-8")
    assert text == reference.renewed("serving.md", text)
