"""What a command that waits for a lock says: who holds it, on standard error."""

from __future__ import annotations

import logging

from mstore.fs.locks import LOGGER
from mstore_cli.errors import remarks


class _OnStandardError(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.name == LOGGER:
            remarks([record.getMessage()])


_HANDLER = _OnStandardError()


def report(*, quiet: bool) -> None:
    """Say who holds a lock that this process waits for, unless `quiet`."""
    logger = logging.getLogger(LOGGER)
    if quiet:
        logger.removeHandler(_HANDLER)
    else:
        logger.addHandler(_HANDLER)
        logger.setLevel(logging.INFO)
