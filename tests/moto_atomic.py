"""moto's server, with one write at a time.

moto looks whether a condition holds, and then writes: of two who replace an object at once, both
may succeed, as at no server that is worth the name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto import server


class OneWriter(server.DomainDispatcherApplication):
    """moto's application, whose writes wait for each other."""

    _writing = threading.Lock()

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            return super().__call__(environ, start_response)
        with self._writing:
            return list(super().__call__(environ, start_response))


if __name__ == "__main__":
    server.DomainDispatcherApplication = OneWriter
    server.main()
