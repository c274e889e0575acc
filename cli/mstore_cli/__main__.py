"""The installed program, and `python -m mstore_cli`.

Imports the rest late, so that Ctrl-C during Python's imports ends the program like any other
Ctrl-C.
"""

import gc
import os
import sys


def _open_closed_streams() -> None:
    """Open the null device as each standard stream that the caller closed (`>&-`).

    Otherwise Python has None for it, and the next file that is opened gets its number: what a child
    prints would go into that file.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is this one: those below it are open.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def main() -> None:
    """Load the program and run it."""
    _open_closed_streams()
    # Imported objects are permanent; scanning them every 700 allocations costs a tenth of a run.
    gc.set_threshold(100_000, 10, 10)
    # The threads that OpenBLAS starts when numpy is imported take a third of that import.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        from mstore_cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
