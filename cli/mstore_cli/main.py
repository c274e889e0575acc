"""The program `mstore`: parses one command line, runs the command, exits with its status.

Starting it imports neither the library nor numpy, numba or torch, nor the modules of other
commands: each command imports what it needs when it runs.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from mstore_cli import errors, lines, output

_COMPLETES = "_MSTORE_COMPLETE"
"""Set by the shell's script when it requests completions."""


def run(words: Sequence[str]) -> int:
    """Run one command line; return its exit status.  All errors are handled here.

    Once a command has published its result, Ctrl-C is ignored (`Session.settled`).
    """
    words = lines.without_help_word(words)
    line: lines.Line | None = None
    status = errors.SUCCESS
    try:
        try:
            line = lines.parse(words) or _from_tree(words)
            if line is not None:
                line.run()
        except errors.Ended as end:
            status = end.status
        with output.printing():
            sys.stdout.flush()
        return status
    except BaseException as error:  # noqa: BLE001 -- this is the boundary: report() knows them all
        # Errors in the command line itself occur before its options are parsed.
        document = sys.stdout if "--json" in words else None
        store = line.choices.store if line else lines.store_before_verb(words)
        return errors.report(error, store=store, document=document)
    finally:
        _discard_rest()


def _from_tree(words: Sequence[str]) -> lines.Line | None:
    from mstore_cli import tree

    # Help is printed here.
    with output.printing():
        return tree.parse(words)


def _discard_rest() -> None:
    """Discard what is left in the buffers of streams that cannot be written.

    The interpreter flushes them on exit, and would fail again on a closed pipe or a full disk.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def main() -> None:
    """The entry point of the installed program."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            # A name that the locale cannot encode must not turn a success into a failure.
            reconfigure(errors="backslashreplace")
    # Importing numpy starts threads for large matrices, which do not occur here; they busy-wait,
    # which costs 0.04 s of CPU time.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if _COMPLETES in os.environ:
        from mstore_cli import tree

        # Exits the process.
        tree.build()(prog_name=tree.PROGRAM)
    status = run(sys.argv[1:])
    _end(status)


def _end(status: int) -> NoReturn:
    """End the process.  Everything is closed, and standard output is flushed.

    Taking the interpreter apart module by module takes 8 ms after a merge, and frees memory that
    the process gives back anyway.
    """
    if threading.active_count() > 1:
        # Python waits for threads, as it should.
        gc.freeze()
        sys.exit(status)
    # What modules registered for the end still runs, as in a child of `multiprocessing`.
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
