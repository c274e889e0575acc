"""The log of a server: one line a request, and one a failure.

A thread writes the lines. Where nobody takes them (a full pipe, a disk that hangs), lines are lost;
requests go on, and so does the end of the process.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from mstore.terms.errors import StorageFailed

_LINES_KEPT: Final = 10_000
_ENDS_WITHIN: Final = 2.0
_UNTOLD: Final = ("ASGI callable returned without completing", "Exception in ASGI application")
_FORMAT: Final = logging.Formatter(
    "%(asctime)s %(levelname)s %(message)s", datefmt="%Y-%m-%dT%H:%M:%S%z"
)

_Queue = queue.Queue[logging.LogRecord | None]


class _Sender(logging.Handler):
    """Passes lines to the thread that writes them; drops those for which there is no room."""

    def __init__(self, lines: _Queue) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(queue.Full):
            self._lines.put_nowait(record)


@contextmanager
def written(path: Path | None, *, requests: bool) -> Iterator[None]:
    """Write the log to a file (opened anew if it was moved away) or to standard error.

    requests: whether each request has a line.  Raises StorageFailed.
    """
    write = _to_standard_error if path is None else _to_file(path)
    lines: _Queue = queue.Queue(_LINES_KEPT)
    # The end of the process must not wait for it: it may wait for ever.
    writer = threading.Thread(target=_write, args=(lines, write), name="log", daemon=True)
    writer.start()
    sender = _Sender(lines)
    sender.addFilter(_is_told)
    loggers = [logging.getLogger(name) for name in ("mstore_serve", "uvicorn.error")]
    before = [(one.propagate, one.level) for one in loggers]
    for one in loggers:
        one.addHandler(sender)
        one.propagate = False
    loggers[0].setLevel(logging.INFO if requests else logging.WARNING)
    loggers[1].setLevel(logging.WARNING)
    try:
        yield
    finally:
        for one, (propagate, level) in zip(loggers, before, strict=True):
            one.removeHandler(sender)
            one.propagate = propagate
            one.setLevel(level)
        with suppress(queue.Full):
            lines.put_nowait(None)
        writer.join(_ENDS_WITHIN)


def _write(lines: _Queue, write: Callable[[logging.LogRecord], None]) -> None:
    while (record := lines.get()) is not None:
        # A disk that is full has room again later.
        with suppress(OSError):
            write(record)


def _to_standard_error(record: logging.LogRecord) -> None:
    # Not through sys.stderr: its lock would stop the interpreter's end.
    text = f"{_FORMAT.format(record)}\n".encode(errors="backslashreplace")
    while text:
        text = text[os.write(_STANDARD_ERROR, text) :]


_STANDARD_ERROR: Final = 2


def _to_file(path: Path) -> Callable[[logging.LogRecord], None]:
    try:
        handler = _SilentLogFile(path, errors="backslashreplace")
    except OSError as error:
        what = f"the log cannot be written: {error.strerror}"
        raise StorageFailed(what, where=str(path), errno=error.errno) from error
    handler.setFormatter(_FORMAT)
    return handler.emit


class _SilentLogFile(logging.handlers.WatchedFileHandler):
    """A file that says nothing of its own failures: standard error may hang, too."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name of logging
        error = sys.exception()
        if isinstance(error, OSError):
            raise error


def _is_told(record: logging.LogRecord) -> bool:
    """Return False for what this server has logged itself when it ended an answer early."""
    return not str(record.msg).startswith(_UNTOLD)
