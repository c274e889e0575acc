"""Running the command line inside the test process, with its two streams kept apart."""

from __future__ import annotations

import io
import json
import signal
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mstore_cli.main import run


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


@dataclass(frozen=True)
class Program:
    """`mstore` on one store."""

    store: Path

    def __call__(self, *arguments: str | Path) -> Done:
        """Run one command line, whatever comes of it."""
        out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        err = io.StringIO()
        heard = signal.getsignal(signal.SIGINT)
        try:
            with redirect_stdout(out), redirect_stderr(err):
                status = run(["--store", str(self.store), *(str(one) for one in arguments)])
        finally:
            # A command that has published hears Ctrl-C no more; the tests do.
            signal.signal(signal.SIGINT, heard)
        out.flush()
        buffer = out.buffer
        assert isinstance(buffer, io.BytesIO)
        return Done(status, buffer.getvalue(), err.getvalue())

    def succeed(self, *arguments: str | Path) -> Done:
        """Run one command line that must go well."""
        done = self(*arguments)
        assert done.status == 0, done.err
        return done
