"""The log of a server: one line a request, and one a failure.

A thread writes the lines. Where nobody takes them (a full pipe, a slow disk), lines are lost and
requests go on.
"""

from __future__ import annotations

import logging
import logging.handlers
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from mstore.errors import StorageFailed

_LINES_KEPT: Final = 10_000
_ENDS_WITHIN: Final = 2.0
_UNTOLD: Final = ("ASGI callable returned without completing", "Exception in ASGI application")


class _Sender(logging.handlers.QueueHandler):
    """Passes lines to the thread that writes them; drops those for which there is no room."""

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            return


class _Writer(logging.handlers.QueueListener):
    """The thread that writes lines."""

    def finish(self) -> None:
        """Write what is left, for a moment."""
        thread = self._thread
        if thread is None:
            return
        try:
            self.enqueue_sentinel()
        except queue.Full:
            return
        thread.join(_ENDS_WITHIN)


@contextmanager
def written(path: Path | None, *, requests: bool) -> Iterator[None]:
    """Write the log to a file (opened anew if it was moved away) or to standard error.

    requests: whether each request has a line.  Raises StorageFailed.
    """
    handler: logging.Handler = logging.StreamHandler()
    if path is not None:
        try:
            handler = logging.handlers.WatchedFileHandler(path, errors="backslashreplace")
        except OSError as error:
            what = f"the log cannot be written: {error.strerror}"
            raise StorageFailed(what, where=str(path), errno=error.errno) from error
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S%z")
    )
    lines: queue.Queue[logging.LogRecord] = queue.Queue(_LINES_KEPT)
    sender = _Sender(lines)
    sender.addFilter(_is_told)
    writer = _Writer(lines, handler)
    loggers = [logging.getLogger(name) for name in ("mstore_serve", "uvicorn.error")]
    writer.start()
    for one in loggers:
        one.addHandler(sender)
        one.propagate = False
    loggers[0].setLevel(logging.INFO if requests else logging.WARNING)
    loggers[1].setLevel(logging.WARNING)
    try:
        yield
    finally:
        for one in loggers:
            one.removeHandler(sender)
        writer.finish()
        handler.close()


def _is_told(record: logging.LogRecord) -> bool:
    """Return False for what this server has logged itself when it ended an answer early."""
    return not str(record.msg).startswith(_UNTOLD)
