"""zipnn and hf-xet on a directory, for `density.py`: run with a Python that has them.

    PYTHON bench/peers.py zipnn|xet pack|unpack DIRECTORY STORE NAME

zipnn: a file each, as bfloat16, its default method, a thread a core.  xet: the client of the
Hugging Face hub against a directory instead of a server (chunks by content, deduplication, xorbs
of chunks compressed with byte grouping and LZ4); what it made of each file is noted in
STORE/NAME.json.  What is stored is synced.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def sync(directory: Path) -> None:
    """Everything below is on the disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fdatasync(file.fileno())


class Zipnn:
    """Compresses each tensor file for itself."""

    def __init__(self, store: Path) -> None:
        import zipnn

        self.store = store
        threads = len(os.sched_getaffinity(0))
        self.zip = zipnn.ZipNN(bytearray_dtype="bfloat16", input_format="byte", threads=threads)

    def pack(self, directory: Path, name: str) -> None:
        (self.store / name).mkdir(parents=True)
        for path in sorted(directory.iterdir()):
            # It works in the buffer that it is given, so a fresh one each.
            packed = self.zip.compress(bytearray(path.read_bytes()))
            (self.store / name / path.name).write_bytes(packed)
        sync(self.store / name)

    def unpack(self, directory: Path, name: str) -> None:
        directory.mkdir(parents=True)
        for path in sorted((self.store / name).iterdir()):
            (directory / path.name).write_bytes(self.zip.decompress(path.read_bytes()))


class Xet:
    """Chunks by content, each stored once."""

    def __init__(self, store: Path) -> None:
        import hf_xet

        self.xet: Any = hf_xet
        self.store = store
        self.endpoint = f"local://{store.absolute()}"

    def pack(self, directory: Path, name: str) -> None:
        paths = sorted(directory.iterdir())
        files = [str(path.absolute()) for path in paths]
        done = self.xet.upload_files(files, self.endpoint, None, None, None, None)
        told = {path.name: (one.hash, one.filesize) for path, one in zip(paths, done, strict=True)}
        (self.store / f"{name}.json").write_text(json.dumps(told))
        sync(self.store)

    def unpack(self, directory: Path, name: str) -> None:
        directory.mkdir(parents=True)
        told = json.loads((self.store / f"{name}.json").read_text())
        wanted = [
            self.xet.PyXetDownloadInfo(str((directory / file).absolute()), hash, size)
            for file, (hash, size) in told.items()
        ]
        self.xet.download_files(wanted, self.endpoint, None, None, None)


def main() -> None:
    peer, verb, directory, store, name = sys.argv[1:]
    made = {"zipnn": Zipnn, "xet": Xet}[peer](Path(store))
    getattr(made, verb)(Path(directory), name)


if __name__ == "__main__":
    main()
