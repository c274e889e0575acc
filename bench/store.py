"""The store of a benchmark: the command line run on it as whole processes, and copies of it.

A merge whose output is stored already writes nothing, so every round works on a copy of the store
as it was before any merge.  Packs never change: a copy links them, and takes the index along.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from generate import Model, write_model
from measure import Run, run


@dataclass(frozen=True, slots=True)
class Store:
    """A store at `path`, which need not be there yet.

    checkout: of another version, with its kernels, whose command line is run instead.
    """

    path: Path
    checkout: Path | None = None

    def command(self) -> list[str]:
        """The program, on this store."""
        # -P: not what lies in the working directory.
        program = [sys.executable, "-P", "-m", "mstore_cli", "--no-progress"]
        return [*program, "--store", str(self.path)]

    def environment(self) -> dict[str, str] | None:
        """Where the program finds the other version."""
        if self.checkout is None:
            return None
        parts = [self.checkout, *(self.checkout / part for part in ("cli", "fuse", "serve"))]
        env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        return env | {"PYTHONPATH": os.pathsep.join(map(str, parts))}

    def mstore(self, *words: str) -> Run:
        """Run the command line on this store."""
        return run([*self.command(), *words], env=self.environment())

    def make(self, block_size: int | None = None, codec: str = "raw") -> None:
        """An empty store, in place of any that is there."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        size = [] if block_size is None else ["--block-size", str(block_size)]
        self.mstore("init", str(self.path), "--codec", codec, *size)

    def add(self, directory: Path, name: str) -> Run:
        """Add a checkpoint; all but `base` with their statistics against it."""
        base = [] if name == "base" else ["--base", "base"]
        return self.mstore("add", str(directory), "--name", name, *base)

    def add_generated(self, family: Path, millions: float, models: Sequence[Model]) -> None:
        """Generate models one at a time, add each, and remove its plain files."""
        for model in models:
            write_model(family / model.name, millions, model)
            self.add(family / model.name, model.name)
            shutil.rmtree(family / model.name)

    def duplicate(self, path: Path, *, memo: bool = False) -> Store:
        """A copy at another path, with or without the memo table."""
        shutil.rmtree(path, ignore_errors=True)

        def left_out(directory: str, names: list[str]) -> list[str]:
            top = Path(directory) == self.path
            return [name for name in names if top and name == "memo" and not memo]

        def link_packs(source: str, target: str) -> None:
            if source.endswith(".pack"):
                os.link(source, target)
            else:
                shutil.copy2(source, target)

        shutil.copytree(self.path, path, ignore=left_out, copy_function=link_packs)
        return Store(path, self.checkout)

    @contextmanager
    def copy(self, path: Path, *, memo: bool = False) -> Iterator[Store]:
        """A copy for one round, removed at its end."""
        try:
            yield self.duplicate(path, memo=memo)
        finally:
            shutil.rmtree(path)
