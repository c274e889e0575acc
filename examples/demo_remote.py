"""A family in a bucket, between two people, in the commands that they would type.

    python examples/demo_remote.py [DIR]

Starts an S3 server of its own (moto, in memory, on this machine only).  Ada pushes a base and two
fine-tunes; Ben clones them, merges, and pushes the merge; Ada pulls it.  Everything is below DIR
(default: demo-remote/), which is made anew.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from ml_dtypes import bfloat16
from safetensors.numpy import save_file

MSTORE = (sys.executable, "-m", "mstore_cli")
BUCKET = "team-models"
URL = f"s3://{BUCKET}/llama"


@contextmanager
def bucket(log: Path) -> Iterator[dict[str, str]]:
    """Start a server with one bucket; yield what a client needs in its environment."""
    command = (sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0")
    with log.open("w") as told:
        server = subprocess.Popen(command, stdout=told, stderr=told)
    try:
        endpoint = None
        while endpoint is None:
            if server.poll() is not None:
                raise SystemExit(f"demo: the server did not start, see {log}")
            endpoint = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
        made = urllib.request.Request(f"{endpoint[0]}/{BUCKET}", method="PUT")
        urllib.request.urlopen(made, timeout=30).close()
        yield {
            "AWS_ENDPOINT_URL": endpoint[0],
            "AWS_ACCESS_KEY_ID": "demo",
            "AWS_SECRET_ACCESS_KEY": "demo",
            "AWS_REGION": "us-east-1",
        }
    finally:
        server.terminate()
        server.wait()


def write_model(directory: Path, seed: int) -> None:
    """Write a base (seed 0) or a fine-tune of it: 24 MiB of bf16."""
    directory.mkdir(parents=True)
    base, own = np.random.default_rng(0), np.random.default_rng(seed)
    tensors = {}
    for number in range(12):
        weight = 0.02 * base.standard_normal((1024, 1024), dtype=np.float32)
        if seed:
            weight *= 1 + 3e-3 * own.standard_normal(weight.shape, dtype=np.float32)
        tensors[f"layers.{number}.weight"] = weight.astype(bfloat16)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text("{}\n")


class Person:
    """Somebody with a directory, whose commands are shown."""

    def __init__(self, name: str, root: Path, environment: dict[str, str]) -> None:
        self.directory = root / name
        self.directory.mkdir()
        own = {"MSTORE_STORE": "", "MSTORE_AUTHOR": f"{name}@example.org", "NO_COLOR": "1"}
        self._environment = {**os.environ, **environment, **own}
        self._name = name

    def run(self, *words: str) -> None:
        """Show and run `mstore WORDS`."""
        print(f"\n{self._name}$ mstore {' '.join(words)}", flush=True)
        line = [*MSTORE, "--no-progress", *words]
        done = subprocess.run(line, cwd=self.directory, env=self._environment, check=False)
        if done.returncode:
            raise SystemExit(f"demo: mstore {words[0]} failed (exit {done.returncode})")


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description="A family in a bucket.")
    parser.add_argument("directory", nargs="?", type=Path, default=Path("demo-remote"))
    root = parser.parse_args().directory.absolute()
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    with bucket(root / "server.log") as environment:
        ada, ben = (Person(name, root, environment) for name in ("ada", "ben"))
        for seed, name in enumerate(("llama", "math", "code")):
            write_model(ada.directory / name, seed)
        ada.run("init")
        ada.run("add", "llama", "--name", "llama")
        ada.run("add", "math", "--name", "math", "--base", "llama")
        ada.run("add", "code", "--name", "code", "--base", "llama")
        ada.run("remote", "add", "origin", URL)
        ada.run("push", "origin", "--all")
        ben.run("clone", URL, ".mstore")
        inputs = ("--base", "llama", "--expert", "math", "--expert", "code")
        ben.run("merge", *inputs, "--method", "ties", "--param", "density=0.2", "--name", "chat")
        ben.run("push", "origin", "chat")
        ada.run("pull", "origin")
        ada.run("log", "chat")
        ada.run("remote", "du", "origin")
        ada.run("remote", "fsck", "origin", "--read-data")


if __name__ == "__main__":
    main()
