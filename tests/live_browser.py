"""A browser that a test drives: Debian's chromium-headless-shell, over its debugging pipe.

    open      load a page; `console` and `asked` tell what happened since the browser started
    tell      the value of an expression of JavaScript in the page
    type      what a person types into the field that has the focus, key by key
    shot      a screenshot as PNG

Names resolve to nothing, so no test asks another machine.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from browser import OPTIONS, PROGRAM

_PATIENCE = 120.0


class Browser:
    """One page.  console: errors and messages; asked: every address that was asked for."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = commands
        self._answers = answers
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._loaded = False
        self.console: list[str] = []
        self.asked: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Load a page and wait until it and its script have ended."""
        self._loaded = False
        answer = self._call("Page.navigate", url=url)
        assert "errorText" not in answer, answer
        self._wait()

    def _wait(self) -> None:
        while not self._loaded:
            self._note(self._message())

    def look(self, width: int, *, dark: bool = False) -> None:
        """Give the next page this width, and a dark or a light scheme."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def headers(self, headers: Mapping[str, str]) -> None:
        """Send these with each request from now on."""
        self._call("Network.setExtraHTTPHeaders", headers=dict(headers))

    def stop_scripts(self) -> None:
        """Run no script of a page from now on."""
        self._call("Emulation.setScriptExecutionDisabled", value=True)

    def tell(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        got = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in got, got
        return got["result"].get("value")

    def type(self, text: str) -> None:
        """Type into the field that has the focus."""
        for one in text:
            self._call("Input.dispatchKeyEvent", type="char", text=one)

    def press_enter(self) -> None:
        """Press Enter, which leads to another page, and wait for that."""
        self._loaded = False
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
        self._call("Input.dispatchKeyEvent", type="keyDown", text="\r", **key)
        self._call("Input.dispatchKeyEvent", type="keyUp", **key)
        self._wait()

    def shot(self) -> bytes:
        """Return a screenshot of the whole page."""
        got = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(got["data"])

    def close(self) -> None:
        """End the browser."""
        self._session = None
        self._call("Browser.close")

    def _call(self, method: str, **parameters: object) -> dict[str, Any]:
        self._number += 1
        message: dict[str, object] = {
            "id": self._number,
            "method": method,
            "params": parameters,
        }
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._message()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._answers], [], [], _PATIENCE)[0], "the browser is silent"
            piece = os.read(self._answers, 1 << 16)
            assert piece, "the browser has ended"
            self._buffer += piece
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        given = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Network.requestWillBeSent":
                self.asked.append(given["request"]["url"])
            case "Log.entryAdded":
                self.console.append(given["entry"]["text"])
            case "Runtime.consoleAPICalled" | "Runtime.exceptionThrown":
                self.console.append(json.dumps(given))


def _high(descriptor: int) -> int:
    """Move a descriptor away from those that the browser gets."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved


@contextmanager
def browser(directory: Path) -> Iterator[Browser]:
    """Start a browser that keeps its files in a directory."""
    assert PROGRAM is not None
    to_read, commands = map(_high, os.pipe())
    answers, to_write = map(_high, os.pipe())
    # The browser reads its descriptor 3 and writes 4.
    program = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
    options = [*OPTIONS, "--remote-debugging-pipe", f"--user-data-dir={directory}"]
    process = subprocess.Popen(
        ["/bin/bash", "-c", program, PROGRAM, *options],
        pass_fds=(to_read, to_write),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(to_write)
    try:
        opened = Browser(commands, answers)
        yield opened
        opened.close()
        process.wait(120)
    finally:
        process.kill()
        process.wait()
        os.close(commands)
        os.close(answers)
