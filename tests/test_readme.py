"""The README says what the program does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import readme_family

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What differs from run to run: ids, durations, and the name of the temporary directory.
VOLATILE = (
    (re.compile(r"\b[0-9a-f]{12}(?:[0-9a-f]{52})?\b"), "<id>"),
    (re.compile(r"\b\d+\.\d\d s\b"), "<time>"),
    (re.compile(r"\b\d{4}-\d\d-\d\d \d\d:\d\d(?::\d\d)?"), "<date>"),
)


def _transcript() -> list[tuple[str, str]]:
    """(command, output) pairs of all console blocks of the README, in order."""
    pairs: list[tuple[str, str]] = []
    for block in BLOCK.findall(README.read_text()):
        for line in block.splitlines():
            if line.startswith("$ "):
                pairs.append((line[2:], ""))
            else:
                command, output = pairs[-1]
                pairs[-1] = command, output + line + "\n"
    return pairs


def _steady(text: str) -> str:
    for pattern, word in VOLATILE:
        text = pattern.sub(word, text)
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def _run(command: str, directory: Path) -> str:
    bin_directory = Path(sys.executable).parent
    environment = os.environ | {
        "PATH": f"{bin_directory}:{os.environ['PATH']}",
        "NO_COLOR": "1",
        "COLUMNS": "100",
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
    return done.stdout


@pytest.mark.skipif(not os.access("/dev/fuse", os.W_OK), reason="the transcript mounts")
def test_transcript(tmp_path: Path) -> None:
    """Every command of the README's transcript prints what the README says it prints."""
    readme_family.write(tmp_path)
    transcript = _transcript()
    assert len(transcript) >= 8
    try:
        for command, told in transcript:
            printed = _run(command, tmp_path)
            assert _steady(printed.replace(f"{tmp_path}/", "")) == _steady(told), command
    finally:
        if os.path.ismount(tmp_path / "mnt"):
            _run("mstore unmount mnt", tmp_path)


def test_links() -> None:
    """Every file that the README or a page of docs/ links to exists."""
    for page in [README, *sorted((ROOT / "docs").rglob("*.md"))]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_figures_have_a_source() -> None:
    """A speed or ratio in the README stands in a line with a footnote to its benchmark."""
    for line in README.read_text().splitlines():
        if re.search(r"\d\s?(?:GB/s|MB/s|x faster|times faster)", line):
            assert "[^" in line, line
