"""A snapshot as a directory, for programs that take nothing else; no mount, no weights on a disk.

    with as_directory("mstore://loras/math?store=/srv/models/.mstore") as directory:
        model = PeftModel.from_pretrained(base, directory)

Weights are files in memory, which links in the directory name; all other files are copied, to the
system's temporary directory.  What a program has mapped, as safetensors does, stays valid when the
directory is gone, and its memory is free when the program lets go of it.  If the process is killed,
the small files stay behind; the weights do not.

Only this process can open the links, and its threads.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from mstore import fs
from mstore.api import Snapshot
from mstore.api.integrations.urls import snapshot_at
from mstore.api.open_store import thread_count
from mstore.checkpoint.models import Model, is_weights, place_of
from mstore.checkpoint.paths import is_safetensors
from mstore.store.ahead import in_order
from mstore.store.objects.shapes import literal_pattern
from mstore.store.view import SnapshotView

_PIECE_BYTES: Final = 4 << 20
"""What one thread reads at a time."""


@contextmanager
def as_directory(
    source: Snapshot | str, *, variant: str | None = None, weights: bool = True
) -> Iterator[Path]:
    """Show a snapshot as a directory for the time of the block.

    source: a snapshot, or its URL, mstore://REF?store=DIRECTORY.
    variant: of models that have it, such as `fp16`, only its weights are in the directory; of
    others, and without a variant, those of no variant.
    weights: whether there are weights at all.

    All weights of the directory are read and checked first, and are in memory until the block ends
    or whoever mapped them lets go of them.  To read less, or from other processes, mount it.

    Raises BadRequest (no snapshot), NotFound, Corrupt, StorageFailed (of the temporary directory,
    or no memory), and as `Store.open`.
    """
    with ExitStack() as stack:
        snapshot = stack.enter_context(snapshot_at(source))
        stack.enter_context(snapshot._store.hold(snapshot))
        view = snapshot._view()
        is_left_out = _of_other_variants(view.models.named, variant) if weights else is_weights
        shown = [path for path in view.files if not is_left_out(path)]
        place = stack.enter_context(fs.scratch()) / "model"
        copied = [path for path in shown if not is_safetensors(path)]
        if copied:
            only = [literal_pattern(path) for path in copied]
            snapshot._store.checkout(snapshot.id, place, only=only)
        for path in shown:
            if is_safetensors(path):
                descriptor = _in_memory(view, path)
                stack.callback(os.close, descriptor)
                fs.name_in_memory(place / path, descriptor)
        yield place


def _of_other_variants(models: Mapping[str, Model], variant: str | None) -> Callable[[str], bool]:
    """Return whether a path is that of weights whose model is there in the variant asked for."""
    others: set[str] = set()
    for name, model in models.items():
        place = place_of(name)
        named = f"{place}@{variant}" if variant else place
        chosen = named if named in models else place
        if chosen in models and chosen != name:
            others.update((*model.files, *filter(None, [model.index])))
    return others.__contains__


def _in_memory(view: SnapshotView, path: str) -> int:
    """Return a descriptor of a file in memory with the bytes of a file of the snapshot."""
    size = view.files[path]
    descriptor = fs.zeros_in_memory(size)
    try:
        # Not closed here: an error that is on its way still names parts of it.
        _fill(view, path, memoryview(mmap.mmap(descriptor, size)))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _fill(view: SnapshotView, path: str, whole: memoryview) -> None:
    def read(offset: int) -> int:
        return view.read_into(path, offset, whole[offset : offset + _PIECE_BYTES])

    threads = thread_count(None)
    with ThreadPoolExecutor(threads, "directory") as pool:
        pieces = range(0, len(whole), _PIECE_BYTES)
        for _ in in_order(lambda at: pool.submit(read, at), pieces, ahead=2 * threads):
            pass
