"""Reads one model in one way, in a process of its own; prints seconds.

    python bench/reading.py WAY FOLDER              files of a directory or a mount
    python bench/reading.py WAY STORE REF           from Python, without files

Seconds are those of reading: imports, opening the store, and touching memory come before.

    read             each safetensors file from front to back, 1 MiB a call
    mmap             each file mapped, one byte of every page, from front to back
    random           pieces of 128 KiB at random places, 4 threads, a third of all bytes
    load             arrays of all tensors (`safetensors.numpy.load_file`, `Snapshot.load`)
    safe_open        every tensor, one after the other, for torch
    from_pretrained  a model of transformers in bfloat16
    first byte       the first byte of the first file, from open(2)

Ways that give tensors add up one byte of every page of each.
"""

from __future__ import annotations

import mmap
import os
import random
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from measure import warm_memory

WARM_GIGABYTES = 2
PAGE = 4096
PIECE = 128 << 10
THREADS = 4


def touch(arrays: Iterable[Any]) -> int:
    """Add up one byte of every page of numpy arrays."""
    import numpy as np

    return sum(int(one.reshape(-1).view(np.uint8)[::PAGE].sum()) for one in arrays)


def touch_torch(tensors: Iterable[Any]) -> int:
    """Add up one byte of every page of tensors of torch."""
    import torch

    return sum(int(one.reshape(-1).view(torch.uint8)[::PAGE].sum()) for one in tensors)


def shards(folder: Path) -> list[Path]:
    """The safetensors files of a directory."""
    return sorted(folder.glob("*.safetensors"))


def read(folder: Path) -> None:
    buffer = bytearray(1 << 20)
    for path in shards(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def map_pages(folder: Path) -> None:
    for path in shards(folder):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert len(mapped[::PAGE]) > 0


def read_randomly(folder: Path) -> None:
    files = [os.open(path, os.O_RDONLY) for path in shards(folder)]
    sizes = [os.fstat(file).st_size for file in files]
    count = sum(sizes) // PIECE // 3 // THREADS

    def work(seed: int) -> None:
        draw = random.Random(seed)
        buffer = bytearray(PIECE)
        for _ in range(count):
            (chosen,) = draw.choices(range(len(files)), sizes)
            os.preadv(files[chosen], [buffer], draw.randrange(sizes[chosen] - PIECE))

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))


def load(folder: Path) -> None:
    from safetensors.numpy import load_file

    for path in shards(folder):
        touch(load_file(path).values())


def open_safely(folder: Path) -> None:
    from safetensors import safe_open

    for path in shards(folder):
        with safe_open(path, "pt") as file:
            touch_torch(file.get_tensor(name) for name in file.keys())  # noqa: SIM118


def pretrained(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    touch_torch(model.state_dict().values())


def first_byte(folder: Path) -> None:
    file = os.open(shards(folder)[0], os.O_RDONLY)
    assert os.pread(file, 1, 0)


def snapshot_load(snapshot: Any) -> None:
    touch(snapshot.load().values())


def snapshot_open_safely(snapshot: Any) -> None:
    with snapshot.safe_open("pt") as file:
        touch_torch(file.get_tensor(name) for name in file.keys())  # noqa: SIM118


def snapshot_pretrained(snapshot: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from mstore.api.integrations.pretrained import from_pretrained

    store, id = snapshot
    model = from_pretrained(AutoModelForCausalLM, store[id], dtype=torch.bfloat16)
    touch_torch(model.state_dict().values())


FILES: dict[str, Callable[[Path], None]] = {
    "read": read,
    "mmap": map_pages,
    "random": read_randomly,
    "load": load,
    "safe_open": open_safely,
    "from_pretrained": pretrained,
    "first byte": first_byte,
}
PYTHON: dict[str, Callable[[Any], None]] = {
    "load": snapshot_load,
    "safe_open": snapshot_open_safely,
    "from_pretrained": snapshot_pretrained,
}


def prepare(way: str) -> None:
    """Import what the way needs."""
    if way in {"safe_open", "from_pretrained"}:
        import torch

        torch.zeros(PAGE).to(torch.bfloat16)
    if way == "from_pretrained":
        from transformers import LlamaForCausalLM  # noqa: F401 -- imported late by transformers
    if way == "load":
        import ml_dtypes  # noqa: F401
        import safetensors.numpy  # noqa: F401


def main() -> None:
    way, place, *ref = sys.argv[1:]
    prepare(way)
    # Only now: the host takes free memory back within seconds, and importing torch takes longer.
    warm_memory(WARM_GIGABYTES)
    if not ref:
        began = time.perf_counter()
        FILES[way](Path(place))
        print(time.perf_counter() - began)
        return
    import mstore.api.load  # noqa: F401 -- imported late by what is measured
    from mstore import Store

    with Store.open(Path(place)) as store:
        given: Any = (store, ref[0]) if way == "from_pretrained" else store[ref[0]]
        began = time.perf_counter()
        PYTHON[way](given)
        print(time.perf_counter() - began)


if __name__ == "__main__":
    main()
