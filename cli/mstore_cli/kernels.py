"""Compiled kernels on the command line: where they are cached, and a message while compiling.

The only module that reads `MSTORE_CACHE_DIR`.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from mstore_cli.errors import notes

VARIABLE = "MSTORE_CACHE_DIR"


class _OnStandardError(logging.Handler):
    """Reports the delay on standard error, a terminal or not, unless the user wants no progress."""

    is_quiet = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self.is_quiet:
            notes([record.getMessage()])


_HANDLER = _OnStandardError()


def prepare(*, quiet: bool = False) -> None:
    """Cache kernels where the user says, and report when some are compiled, unless `quiet`.

    Raises Unavailable that names the variable.
    """
    directory = os.environ.get(VARIABLE)
    logger = logging.getLogger("mstore.numeric")
    logger.addHandler(_HANDLER)
    logger.setLevel(logging.INFO)
    _HANDLER.is_quiet = quiet
    if directory:
        from mstore.errors import MstoreError, Unavailable
        from mstore.phrases import joined

        try:
            _use(Path(directory))
        except MstoreError as error:
            refused = "compiled kernels cannot be kept here"
            own = f"name a directory of your own: export {VARIABLE}=DIR, or unset it"
            hint = error.texts[2]
            raise Unavailable(
                error.what if refused in error.what else f"{refused}: {error.what}",
                where=f"{VARIABLE}={directory}",
                hint=joined(hint, own, between=", or "),
            ) from error


def _use(path: Path) -> None:
    from mstore import fs
    from mstore.numeric import code_cache

    fs.make_directories(path.parent)
    fs.make_directory(path, own=True, exist_ok=True)
    code_cache.use_cache(path)
