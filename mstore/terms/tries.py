"""Trying again: which answers of a server are worth another try, and when."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")
BUSY: Final = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses of HTTP after which the same request may succeed."""
TRIES: Final = 6
_LONGEST_WAIT: Final = 300.0
"""Seconds.  A server that asks for more is told to the user."""


def pause(number: int) -> float:
    """Return the seconds to wait after try `number`, from 0, if nobody says how long."""
    return float(2**number) / 4


def asked_pause(status: int, retry_after: str, number: int) -> float | None:
    """Return the seconds to wait after an answer; None if no try would help.

    retry_after: the header of that name.
    """
    if status not in BUSY:
        return None
    wait = float(retry_after) if retry_after.isdigit() else pause(number)
    return wait if wait <= _LONGEST_WAIT else None


def tried(ask: Callable[[], T], wait_for: Callable[[Exception, int], float | None]) -> T:
    """Ask, up to `TRIES` times, and raise the last error.

    wait_for: the seconds to wait after an error of a try; None if no other would help.
    """
    for number in range(TRIES):
        try:
            return ask()
        except Exception as error:
            wait = wait_for(error, number)
            if wait is None or number == TRIES - 1:
                raise
        time.sleep(wait)
    raise AssertionError("the last try returns or raises")
