"""A browser for tests of pages: Debian's chromium-headless-shell, one run for each question.

    dump      the page after its script ran, and what the console said
    shot      a screenshot as PNG
    asked     the addresses that the browser asked for, by its own network log

A run opens one page and ends.  Names resolve to nothing, so no test asks another machine.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAM = shutil.which("chromium-headless-shell")
# As root there is no other way; the pages are our own.
OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
needed = pytest.mark.skipif(PROGRAM is None, reason="needs chromium-headless-shell")


@dataclass(frozen=True)
class Dump:
    """A page after its script ran."""

    dom: str
    console: tuple[str, ...]


def _run(page: Path | str, *options: str, dark: bool = False, width: int = 1280) -> tuple[str, str]:
    assert PROGRAM is not None
    address = page.as_uri() if isinstance(page, Path) else page
    done = subprocess.run(
        [
            PROGRAM,
            *OPTIONS,
            "--hide-scrollbars",
            "--enable-logging=stderr",
            # The script may take its time on a busy machine: this is not the time of the wall.
            "--virtual-time-budget=5000",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            f"--window-size={width},900",
            *options,
            address,
        ],
        capture_output=True,
        check=True,
        timeout=300,
    )
    return done.stdout.decode(), done.stderr.decode()


def dump(page: Path | str, *, dark: bool = False, width: int = 1280) -> Dump:
    """Open a page and return it as its script left it."""
    dom, said = _run(page, "--dump-dom", dark=dark, width=width)
    return Dump(dom, tuple(re.findall(r"CONSOLE[^\]]*\] (.*)", said)))


def shot(page: Path | str, file: Path, *, dark: bool = False, width: int = 1280) -> bytes:
    """Take a screenshot and return its bytes."""
    _run(page, f"--screenshot={file}", dark=dark, width=width)
    return file.read_bytes()


def asked(page: Path | str, log: Path) -> list[str]:
    """Open a page and return every address that was asked for, the page's own among them."""
    _run(page, f"--log-net-log={log}", "--dump-dom")
    events = json.loads(log.read_text())["events"]
    return [
        event["params"]["url"]
        for event in events
        if isinstance(event.get("params"), dict) and "url" in event["params"]
    ]
