"""Programs that keep a store open: one in Python, a server, a mount; and single commands."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest


def mstore(store: Path, words: str, models: Path) -> subprocess.CompletedProcess[str]:
    """Run one command of the command line as a process."""
    places = {"OUT": str(models / "out"), "MODEL": str(models / "b")}
    shutil.rmtree(models / "out", ignore_errors=True)
    line = [places.get(word, word) for word in words.split()]
    return subprocess.run(
        [sys.executable, "-m", "mstore_cli", "--store", str(store), *line],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


LONG = """
import sys
from mstore import Store
from mstore.terms.ids import TensorId
store = Store.open(sys.argv[1])
for line in sys.stdin:
    word, _, name = line.strip().partition(" ")
    try:
        if word == "refs":
            print(*sorted(ref.name for ref in store.refs()), flush=True)
        elif word == "cat":
            print(len(store[name].read("model.safetensors")), flush=True)
        elif word == "stats":
            store._statistics.squares(TensorId(bytes(32)))
            print("done", flush=True)
        elif word == "generation":
            print(store.generation(), flush=True)
        elif word == "tag":
            store.tag(name, "a")
            print("done", flush=True)
        else:
            print("open", flush=True)
            break
    except Exception as error:
        print(type(error).__name__, getattr(error, "what", error), flush=True)
"""


@contextmanager
def program(store: Path) -> Iterator[Any]:
    """A program that keeps a store open, and a function that asks it."""
    with subprocess.Popen(
        [sys.executable, "-c", LONG, store],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asked, told = process.stdin, process.stdout

        def ask(line: str) -> str:
            asked.write(f"{line}\n")
            asked.flush()
            return told.readline().strip()

        try:
            yield ask
            # It ends with the store open: what Python then frees must not write, either.
            assert ask("end") == "open"
            assert process.wait(60) == 0
        finally:
            process.kill()


def announced(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What a server with --json says when it answers: an object of several lines."""
    assert process.stdout is not None
    said = ""
    while not said.endswith("}\n"):
        piece = process.stdout.readline()
        assert piece, process.communicate()[1]
        said += piece
    found: dict[str, Any] = json.loads(said)
    return found


@contextmanager
def server(store: Path) -> Iterator[Any]:
    """A server, and a function that returns the names of the refs that it shows."""
    line = [sys.executable, "-m", "mstore_cli", "--store", str(store), "serve", "--port", "0"]
    with subprocess.Popen(
        [*line, "--json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            url = announced(process)["url"]

            def served() -> list[str]:
                with urlopen(f"{url.rstrip('/')}/refs", timeout=60) as answer:
                    return sorted(ref["name"] for ref in json.load(answer)["refs"])

            yield served
            assert process.poll() is None
        finally:
            process.terminate()
            process.wait(60)


@contextmanager
def whole_mount(store: Path, place: Path, *what: str) -> Iterator[Any]:
    """A mount of the whole store, or of `what`; a function that returns the names below refs/."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("this machine has no FUSE")
    place.mkdir()
    line = [sys.executable, "-m", "mstore_cli", "--store", str(store)]
    subprocess.run(
        [*line, "mount", *(what or ["--all"]), str(place)], check=True, capture_output=True
    )
    try:
        yield lambda: sorted(os.listdir(place / "refs"))
    finally:
        subprocess.run([*line, "unmount", "--lazy", str(place)], check=False, capture_output=True)
