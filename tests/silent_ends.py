"""Calls that end a process at once, refused in the process of the tests.

A run of the tests that ends in the middle tells nobody which test did it: pytest holds back what
was said until a test is over.  So whatever ends its process without an exception (a watchdog, a
signal, a limit, a fork whose child runs on into pytest) belongs in a program that a test starts;
here such a call is an AssertionError, and its test fails with the others.

The same holds in each worker of pytest-xdist, and for the process above it, which gathers what all
of them found.  Only xdist itself may end a worker, when nobody listens to it any more.

A run that somebody ends by SIGTERM says which tests it was at, and what had failed until then.

Knows the calls of Python; what ends the process from within C (a wild pointer) pytest's own
faulthandler tells, and xdist names the test at which a worker was lost.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

HARMLESS = {0, signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH}
"""What the kernel ignores where nobody listens."""

TIMERS = {
    signal.ITIMER_REAL: signal.SIGALRM,
    signal.ITIMER_VIRTUAL: signal.SIGVTALRM,
    signal.ITIMER_PROF: signal.SIGPROF,
}
"""The signal of each timer."""


class Running:
    """A plugin of pytest for the process above the workers: knows which tests they run."""

    def __init__(self) -> None:
        self._tests: dict[str, None] = {}
        signal.signal(signal.SIGTERM, self._tell)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._tests[nodeid] = None

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._tests.pop(nodeid, None)

    def _tell(self, number: int, frame: object) -> None:
        said = "".join(f"\nended during {one}" for one in self._tests)
        os.write(2, f"{said}\n".encode())
        # pytest then ends as after Ctrl-C, with its summary.
        raise KeyboardInterrupt


def refuse() -> None:
    """From now on, in this process and not in its children."""
    here = os.getpid()
    above = os.getppid()

    def guard(module: Any, name: str, ends: Callable[..., bool]) -> None:
        real = getattr(module, name)

        def guarded(*given: Any, **named: Any) -> Any:
            if os.getpid() == here and ends(*given, **named):
                raise AssertionError(f"{name} ends the tests: it belongs in a child process")
            return real(*given, **named)

        setattr(module, name, guarded)

    def deadly(number: int) -> bool:
        """Whether the signal ends this process: it does so where nobody listens."""
        return number not in HARMLESS and signal.getsignal(number) in (signal.SIG_DFL, None)

    def reaches_others(process: int) -> bool:
        """Whether it hits the process above or all of the group; who knows what those hear."""
        return process in (above, 0, -1, -os.getpgid(0))

    def kills(process: int, number: int) -> bool:
        if reaches_others(process):
            return number not in HARMLESS
        return process == here and deadly(number)

    def always(*given: Any, **named: Any) -> bool:
        return True

    def asked_by_a_test(status: int) -> bool:
        # The call, `ends`, `guarded`, and who called that.
        return sys._getframe(2).f_globals.get("__name__") != "execnet.gateway_base"

    guard(os, "_exit", asked_by_a_test)
    guard(os, "abort", always)
    guard(os, "fork", always)
    guard(os, "forkpty", always)
    guard(os, "kill", kills)
    guard(os, "killpg", lambda group, number: kills(-group, number))
    guard(signal, "raise_signal", deadly)
    guard(signal, "pthread_kill", lambda thread, number: deadly(number))
    guard(signal, "alarm", lambda seconds: seconds > 0 and deadly(signal.SIGALRM))
    guard(
        signal,
        "setitimer",
        lambda which, seconds, interval=0.0: seconds > 0 and deadly(TIMERS[which]),
    )
    guard(resource, "setrlimit", always)
    guard(
        faulthandler,
        "dump_traceback_later",
        lambda timeout, repeat=False, file=None, exit=False: bool(exit),
    )
