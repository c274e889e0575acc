"""Transcripts in pages: commands with the output that they had.

Owns: finding them, running them, and what of the output differs from run to run.  A page of this
machine is made anew by

    python tests/transcripts.py PAGE DIRECTORY

which runs the page's commands in DIRECTORY, one after the other, and writes what they print.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What differs from run to run: ids, durations, times.
VOLATILE = (
    (re.compile(r"\b[0-9a-f]{12}(?:[0-9a-f]{28}|[0-9a-f]{52})?\b"), "<id>"),
    (re.compile(r"\b\d+\.\d\d? s\b"), "<time>"),
    (re.compile(r"\b\d{4}-\d\d-\d\d \d\d:\d\d(?::\d\d)?"), "<date>"),
)
_UNITS = {"B": 1 / 1024, "KiB": 1.0, "MiB": 1024.0, "GiB": 1024.0**2}
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]\d+)?")
# Numbers below this are near each other whatever they are: counts of blocks, errors, shares.
SMALL = 32.0


def pairs(page: str) -> list[tuple[str, str]]:
    """(command, output) of all console blocks of a page, in order."""
    found: list[tuple[str, str]] = []
    for block in BLOCK.findall(page):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], ""))
            else:
                command, output = found[-1]
                found[-1] = command, output + line + "\n"
    return found


def shell_lines(page: str) -> list[str]:
    """The commands of all sh blocks of a page, in order; a command is one line."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [line for line in "".join(blocks).replace("\\\n", " ").splitlines() if line]


def steady(text: str) -> str:
    """The text without what differs from run to run."""
    for pattern, word in VOLATILE:
        text = pattern.sub(word, text)
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def run(command: str, directory: Path) -> str:
    """What a command prints, errors too, as on a terminal without colours; paths as in a page."""
    bin_directory = Path(sys.executable).parent
    environment = os.environ | {
        "PATH": f"{bin_directory}:{os.environ['PATH']}",
        "NO_COLOR": "1",
        "COLUMNS": "100",
        "MSTORE_AUTHOR": "ada@example.org",
    }
    environment.pop("MSTORE_STORE", None)
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=directory,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=600,
        check=False,
    )
    return done.stdout.replace(f"{directory}/", "")


def unlike(told: str, printed: str) -> str | None:
    """Where the two say different things; None where they differ in numbers alone, and not by far.

    For trained models, whose weights differ from machine to machine: lines and words are the same,
    and each number is within a factor of two, or small on both sides.
    """
    told_lines, printed_lines = steady(told).splitlines(), steady(printed).splitlines()
    if len(told_lines) != len(printed_lines):
        return f"{len(printed_lines)} lines, not {len(told_lines)}:\n{printed}"
    for line, other in zip(told_lines, printed_lines, strict=True):
        words, others = _words(line), _words(other)
        if len(words) != len(others) or not all(map(_near, words, others)):
            return f"{other!r}, not {line!r}"
    return None


def _words(line: str) -> list[str | float]:
    """Words and numbers of a line; sizes are numbers of KiB."""
    found: list[str | float] = []
    for word in re.findall(r"[^\s(),:;]+", line):
        if _NUMBER.fullmatch(word):
            found.append(float(word))
        elif word in _UNITS and found and isinstance(found[-1], float):
            found[-1] *= _UNITS[word]
        else:
            found.append(word)
    return found


def _near(a: str | float, b: str | float) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    low, high = sorted((abs(a), abs(b)))
    return high < SMALL or high <= 2 * low


def renewed(page: str, directory: Path) -> str:
    """The page with what its commands print now."""

    def renew(block: re.Match[str]) -> str:
        commands = [line for line in block[1].splitlines() if line.startswith("$ ")]
        return f"```console\n{''.join(_told(line, directory) for line in commands)}```"

    return BLOCK.sub(renew, page)


def _told(line: str, directory: Path) -> str:
    printed = [one.rstrip() for one in run(line[2:], directory).splitlines()]
    return "".join(f"{one}\n" for one in (line, *printed))


def main() -> None:
    page, directory = Path(sys.argv[1]), Path(sys.argv[2]).resolve()
    page.write_text(renewed(page.read_text(), directory))


if __name__ == "__main__":
    main()
