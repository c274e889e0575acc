"""Running the command line inside the test process, with its two streams kept apart."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from mstore_cli.main import run


def unheard(*words: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command as a process that cannot write its result."""
    with Path("/dev/full").open("wb") as full:
        return subprocess.run(
            [sys.executable, "-m", "mstore_cli", *words],
            check=False,
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=300,
        )


@dataclass(frozen=True)
class Done:
    """What one command line came to."""

    status: int
    raw: bytes
    err: str

    @property
    def out(self) -> str:
        return self.raw.decode()

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON object that was printed."""
        document = json.loads(self.out)
        assert isinstance(document, dict)
        return document

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


class Terminal(io.TextIOWrapper):
    """Memory that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@dataclass(frozen=True)
class Program:
    """`mstore` on one store."""

    store: Path

    def __call__(self, *arguments: str | Path) -> Done:
        """Run one command line, whatever comes of it."""
        return self._run(io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), *arguments)

    def on_terminal(self, width: int, *arguments: str | Path) -> Done:
        """The same, its output a terminal of so many columns without colours."""
        terminal = {"COLUMNS": str(width), "TERM": "xterm-256color", "NO_COLOR": "1"}
        with mock.patch.dict(os.environ, terminal):
            done = self._run(Terminal(io.BytesIO(), encoding="utf-8"), *arguments)
        # NO_COLOR leaves bold and dim.
        return replace(done, raw=re.sub(rb"\x1b\[[0-9;]*m", b"", done.raw))

    def _run(self, out: io.TextIOWrapper, *arguments: str | Path) -> Done:
        return _run(out, ["--store", str(self.store), *(str(one) for one in arguments)])

    def succeed(self, *arguments: str | Path) -> Done:
        """Run one command line that must go well."""
        done = self(*arguments)
        assert done.status == 0, done.err
        return done


def run_once(words: list[str]) -> Done:
    """Run one command line on the store that it finds or names."""
    return _run(io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), words)


def _run(out: io.TextIOWrapper, words: list[str]) -> Done:
    err = io.StringIO()
    heard = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        with redirect_stdout(out), redirect_stderr(err):
            status = run(words)
    finally:
        # A command that has published hears Ctrl-C no more; the tests do.
        for one, handler in heard.items():
            signal.signal(one, handler)
    out.flush()
    buffer = out.buffer
    assert isinstance(buffer, io.BytesIO)
    return Done(status, buffer.getvalue(), err.getvalue())
