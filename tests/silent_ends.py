"""Calls that end a process at once, refused in the process of the tests.

A run of the tests that ends in the middle tells nobody which test did it: pytest holds back what
was said until a test is over.  So whatever ends its process without an exception (a watchdog, a
signal, a limit, a fork whose child runs on into pytest) belongs in a program that a test starts;
here such a call is an AssertionError, and its test fails with the others.

Knows the calls of Python; what ends the process from within C (a wild pointer) pytest's own
faulthandler tells.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
from collections.abc import Callable
from typing import Any

HARMLESS = {0, signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH}
"""What the kernel ignores where nobody listens."""


def refuse() -> None:
    """From now on, in this process and not in its children."""
    here = os.getpid()

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

    def reaches_us(process: int) -> bool:
        return process in (here, 0, -1, -os.getpgid(0))

    def always(*given: Any, **named: Any) -> bool:
        return True

    guard(os, "_exit", always)
    guard(os, "abort", always)
    guard(os, "fork", always)
    guard(os, "forkpty", always)
    guard(os, "kill", lambda process, number: reaches_us(process) and deadly(number))
    guard(os, "killpg", lambda group, number: group in (0, os.getpgid(0)) and deadly(number))
    guard(signal, "raise_signal", deadly)
    guard(signal, "pthread_kill", lambda thread, number: deadly(number))
    guard(signal, "alarm", lambda seconds: seconds > 0 and deadly(signal.SIGALRM))
    guard(signal, "setitimer", always)
    guard(resource, "setrlimit", always)
    guard(
        faulthandler,
        "dump_traceback_later",
        lambda timeout, repeat=False, file=None, exit=False: bool(exit),
    )
