"""The program `mstore`: parses one command line, runs the command, exits with its status.

Starting it imports neither the library nor numpy, numba or torch, nor the modules of other
commands: each command imports what it needs when it runs.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Final

from mstore_cli import completion, errors, output, tree
from mstore_cli.command import Line

_STOPS: Final = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
"""What asks a program to end, and how Python handles it."""
_UNTIL_TOLD: Final = 2.0
"""Seconds after Ctrl-C until people learn what the program waits for."""
_UNTIL_ENDED: Final = 8.0
"""Seconds from then on until it waits no longer: a silent server would hold it for minutes."""


def run(words: Sequence[str]) -> int:
    """Run one command line; return its exit status.  All errors are handled here.

    Once a command has published its result, Ctrl-C is ignored (`Session.settled`).
    """
    line: Line | None = None
    status = errors.SUCCESS
    try:
        try:
            # Help and the version are printed here.
            with output.printing():
                line = tree.parse(words)
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
        store = line.choices.store if line else None
        return errors.report(error, store=store, document=document)
    finally:
        _discard_rest()


def _discard_rest() -> None:
    """Discard what is left in the buffers of streams that cannot be written.

    The interpreter flushes them on exit, and would fail again on a closed pipe or a full disk.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _hear_stops() -> None:
    """Let the first Ctrl-C or SIGTERM stop the work, which may wait for a server, but not for long.

    Work that is stopped cleans up behind it: a merge cancels the jobs that it has in a queue.
    """

    def end(*_: object) -> None:
        # What is published is whole, wherever a process ends.
        os._exit(errors.INTERRUPTED)

    def wait(number: int) -> None:
        time.sleep(_UNTIL_TOLD)
        errors.note("waiting for what is under way; Ctrl-C again does not wait")
        time.sleep(_UNTIL_ENDED)
        # Whatever has another handler by now decides for itself, or has published its result.
        if signal.getsignal(number) is end:
            os._exit(errors.INTERRUPTED)

    def stop(number: int, frame: FrameType | None) -> None:
        for one in usual:
            signal.signal(one, end)
        threading.Thread(target=wait, args=(number,), daemon=True).start()
        raise KeyboardInterrupt

    # A shell has what runs in the background ignore Ctrl-C.
    usual = [one for one, handler in _STOPS.items() if signal.getsignal(one) == handler]
    for one in usual:
        signal.signal(one, stop)


def main() -> None:
    """The entry point of the installed program."""
    _hear_stops()
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            # A name that the locale cannot encode must not turn a success into a failure.
            reconfigure(errors="backslashreplace")
    if completion.VARIABLE in os.environ:
        # Exits the process.
        tree.build()(prog_name=tree.PROGRAM)
    status = run(sys.argv[1:])
    if status == errors.INTERRUPTED:
        # Python would wait for threads, and they for servers.
        os._exit(status)
    # The process gives its memory back anyway: no garbage need be looked for.
    gc.freeze()
    sys.exit(status)
