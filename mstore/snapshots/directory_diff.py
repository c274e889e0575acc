"""Compare a directory with what a snapshot holds.

Reads the directory as `add` does, by the same rules for links, special files and excluded files,
and hashes it.  Reads stored blocks only if they have no ids yet (virtual tensors).  Writes nothing,
neither to the store nor to the directory.  A file whose safetensors header cannot be read is not an
error here: it counts as different, and a remark says why.

Patterns never exclude a file that the snapshot holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

from msgspec.structs import replace

from mstore.checkpoint.directory import DEFAULT_LIMITS, CheckpointLimits, read_weight_map
from mstore.checkpoint.exclusion import Exclusion
from mstore.checkpoint.header import Header, TensorSlot, read_header
from mstore.checkpoint.models import files_of, full_name, models_of, name_in_model
from mstore.checkpoint.paths import is_safetensors
from mstore.checkpoint.reading import StampedFile
from mstore.checkpoint.tree import Tree, TreeFile, walk
from mstore.snapshots.diff import FileDiff, TensorDiff, compared_files
from mstore.store.block_cache import BlockCache, Computing
from mstore.store.catalog import Catalog
from mstore.store.models import Input, models_in, paired
from mstore.store.objects.manifest import File, Manifest
from mstore.store.objects.tensor import BYTES, Tensor, VirtualTensor, partition
from mstore.store.view import tensor_blocks
from mstore.terms.errors import BadCheckpoint
from mstore.terms.ids import BlockId, SnapshotId, TensorId
from mstore.terms.report import ProgressCallback, ProgressCounter, Report

_Place = tuple[str, int, int]
"""File, first byte, number of bytes."""


class DirectoryDiffReport(Report, frozen=True):
    """How a directory differs from a snapshot; the lists are empty if it matches."""

    snapshot: SnapshotId
    """the snapshot's id"""
    directory: str
    """the directory, as it was named"""
    files: tuple[FileDiff, ...]
    """files that differ; removed: the directory lacks it, added: only it has it"""
    tensors: tuple[TensorDiff, ...]
    """tensors that differ; relative_l2 is None"""
    files_equal: int
    """number of equal files"""
    tensors_equal: int
    """number of equal tensors"""
    blocks_total: int
    """blocks in all"""
    blocks_changed: int
    """blocks that differ"""
    excluded: tuple[str, ...]
    """files and directories (ending with a slash) that are not part of a model"""
    remarks: tuple[str, ...]
    """files whose headers cannot be read, and why"""


def diff_directory(
    catalog: Catalog,
    asked: Input,
    directory: Path,
    *,
    exclusion: Exclusion,
    blocks: bool,
    threads: int,
    limits: CheckpointLimits = DEFAULT_LIMITS,
    computing: Callable[[], Computing] | None = None,
    progress: ProgressCallback | None = None,
) -> DirectoryDiffReport:
    """Report differences from a snapshot, or a model, to a directory.

    blocks: also list the numbers of changed blocks.

    Raises NotFound, BadCheckpoint if the directory cannot be a checkpoint at all or changes while
    it is read, Corrupt, StorageFailed.
    """
    manifest = catalog.manifest_of(asked.snapshot)
    if asked.model is not None:
        manifest = models_in(catalog, manifest).alone(asked.model)
    tree = walk(
        directory,
        max_files=limits.max_files,
        max_sparse_bytes=limits.max_sparse_bytes,
        exclusion=exclusion.keeping(file.path for file in manifest.files),
    )
    with ThreadPoolExecutor(threads, "compare") as pool:
        side = _Directory(tree, catalog.block_size, limits, pool, progress)
        return _Comparison(catalog, manifest, side, computing).report(asked, blocks=blocks)


class _Directory:
    """The files of a directory, their headers, and the block ids computed so far."""

    def __init__(
        self,
        tree: Tree,
        block_size: int,
        limits: CheckpointLimits,
        pool: ThreadPoolExecutor,
        progress: ProgressCallback | None,
    ) -> None:
        self.tree = tree
        self.files = {found.path: found for found in tree.files}
        self.headers: dict[str, Header] = {}
        self.slots: dict[str, dict[str, TensorSlot]] = {}
        self.remarks: list[str] = []
        self._block_size = block_size
        self._limits = limits
        self._pool = pool
        self._tick = ProgressCounter(
            "compare", sum(one.status.st_size for one in tree.files), progress
        )
        self._ids: dict[_Place, list[BlockId]] = {}
        for found in tree.files:
            if is_safetensors(found.path):
                where = str(tree.shown / found.path)
                try:
                    header = read_header(
                        found.absolute, limits=limits, where=where, stamp=found.stamp
                    )
                    self.headers[found.path] = header
                    self.slots[found.path] = {slot.name: slot for slot in header.tensors}
                except BadCheckpoint as error:
                    self.remarks.append(str(error))

    def ids(self, path: str, begin: int, nbytes: int) -> list[BlockId]:
        """Return a part's block ids, hashed once.  Raises BadCheckpoint if the file changes."""
        place = (path, begin, nbytes)
        if place not in self._ids:
            self._ids[place] = self._hashed(self.files[path], begin, nbytes)
        return self._ids[place]

    def _hashed(self, found: TreeFile, begin: int, nbytes: int) -> list[BlockId]:
        with StampedFile(found.absolute, found.stamp) as file:

            def one(span: tuple[int, int]) -> BlockId:
                start, length = span
                return BlockId.of(file.read(begin + start, length))

            ids = list(self._pool.map(one, partition(nbytes, self._block_size)))
            file.require_unchanged()
        self._tick(nbytes)
        return ids

    def weight_map(self, path: str) -> Mapping[str, str]:
        """Return what a shard index says; nothing if it cannot be read."""
        found = self.files[path]
        with suppress(BadCheckpoint):
            where = str(self.tree.shown / path)
            return read_weight_map(
                found.absolute, where=where, limits=self._limits, stamp=found.stamp
            )
        return {}

    def data(self, path: str, begin: int, length: int) -> bytes:
        """Return bytes of a file, for comparisons that need the data itself."""
        found = self.files[path]
        with StampedFile(found.absolute, found.stamp) as file:
            return file.read(begin, length)


class _Comparison:
    """One comparison of a snapshot with a directory."""

    def __init__(
        self,
        catalog: Catalog,
        manifest: Manifest,
        side: _Directory,
        computing: Callable[[], Computing] | None,
    ) -> None:
        self._catalog = catalog
        self._manifest = manifest
        self._side = side
        self._cache = BlockCache(catalog, computing=computing)
        self._block_size = catalog.block_size
        self._found: dict[tuple[TensorId, str, str], TensorDiff] = {}
        self._models = models_in(catalog, manifest)
        self._theirs = {one.name: one for one in models_of(side.files, side.weight_map)}
        self._pairs = paired(self._models.named, self._theirs)

    def report(self, asked: Input, *, blocks: bool) -> DirectoryDiffReport:
        files, files_equal = self._files(asked.model)
        tensors, tensors_equal, total, changed_blocks = self._tensors(asked.model)
        side = self._side
        return DirectoryDiffReport(
            snapshot=asked.snapshot,
            directory=str(side.tree.shown),
            files=files,
            tensors=tuple(one if blocks else _unlisted(one) for one in tensors),
            files_equal=files_equal,
            tensors_equal=tensors_equal,
            blocks_total=total,
            blocks_changed=changed_blocks,
            excluded=tuple(one.path for one in side.tree.excluded),
            remarks=tuple(side.remarks),
        )

    def _files(self, asked: str | None) -> tuple[tuple[FileDiff, ...], int]:
        """Return the differing files, and the number of equal ones; asked: as for `_tensors`."""
        ours = {file.path: file for file in self._manifest.files}
        theirs = self._side.files
        if asked is not None:
            compared = [self._theirs[own] for own in self._pairs.values()]
            directory = compared[0].directory if compared else ""
            own = files_of(compared, directory, self._theirs.values(), theirs)
            theirs = {path: theirs[path] for path in theirs if path in own or path in ours}
        return compared_files(
            {path: file.size for path, file in ours.items()},
            {path: found.status.st_size for path, found in theirs.items()},
            lambda path: self._is_same(ours[path], theirs[path]),
        )

    def _is_same(self, stored: File, there: TreeFile) -> bool:
        """Return whether a file has exactly the stored bytes."""
        if stored.size != there.status.st_size:
            return False
        # The length is equal, so the parts are at the same offsets.
        first, *rest = stored.parts
        ids = self._side.ids(stored.path, 0, first.nbytes)
        head = Tensor(BYTES, (first.nbytes,), first.nbytes, b"".join(ids))
        if head.id() != first.tensor_id():
            return False
        header = self._side.headers.get(stored.path)
        if header is None:
            return not rest
        # The header is the same: the same names, dtypes, shapes and offsets.
        return all(
            self._tensor(full_name("", part.name), part.tensor_id(), stored.path).status == "equal"
            for part in rest
            if part.name is not None
        )

    def _tensor(self, name: str, id: TensorId, path: str) -> TensorDiff:
        """Compare a stored tensor with the one of this name in a file."""
        key = (id, path, name)
        if key not in self._found:
            self._found[key] = self._compared(name, id, path)
        return self._found[key]

    def _compared(self, name: str, id: TensorId, path: str) -> TensorDiff:
        slot = self._side.slots[path][name_in_model(name)]
        begin = self._side.headers[path].data_start + slot.begin
        record = self._catalog.content(id)
        same_form = (record.dtype, record.shape) == (slot.dtype, slot.shape)
        if isinstance(record, VirtualTensor):
            numbers = self._computed(id, path, begin, slot.nbytes)
        else:
            theirs = self._side.ids(path, begin, slot.nbytes)
            pairs = zip_longest(record.block_ids(), theirs)
            numbers = [number for number, (one, other) in enumerate(pairs) if one != other]
        count = max(self._count(record.nbytes), self._count(slot.nbytes))
        status = "equal" if same_form and not numbers else "changed"
        return TensorDiff(
            name=name,
            status=status,
            dtype=slot.dtype,
            shape=slot.shape,
            dtype_a=record.dtype,
            shape_a=record.shape,
            blocks_total=count,
            blocks_changed=len(numbers),
            relative_l2=None,
            changed_blocks=tuple(numbers),
        )

    def _computed(self, id: TensorId, path: str, begin: int, nbytes: int) -> list[int]:
        """Return the numbers of the blocks that differ from those of a virtual tensor."""
        numbers = []
        count = 0
        for number, block in enumerate(tensor_blocks(self._catalog, self._cache, id)):
            start = number * self._block_size
            length = max(0, min(self._block_size, nbytes - start))
            if self._side.data(path, begin + start, length) != bytes(block):
                numbers.append(number)
            count = number + 1
        return numbers + list(range(count, self._count(nbytes)))

    def _count(self, nbytes: int) -> int:
        return -(-nbytes // self._block_size)

    def _tensors(self, asked: str | None) -> tuple[Sequence[TensorDiff], int, int, int]:
        """Return the differing tensors, and counts: equal tensors, all blocks, differing blocks.

        asked: the model that they are of; then other models of the directory do not count.
        """
        models, theirs = self._models, self._theirs
        ours = models.tensors
        names = {} if asked is not None else {one: one for one in theirs}
        names |= {own: model for model, own in self._pairs.items()}
        homes: dict[str, str] = {}
        for model in names:
            for path in theirs[model].files:
                for own in self._side.slots.get(path, ()):
                    name = full_name(names[model], own)
                    # Of two, take the one in the file where it is stored.
                    if name not in ours or homes.get(name) != models.home(name):
                        homes[name] = path
        found: list[TensorDiff] = []
        equal = total = differing = 0
        for name in [*ours, *(name for name in homes if name not in ours)]:
            if name not in homes:
                one = self._alone(name, "removed", self._catalog.content(ours[name]))
            elif name not in ours:
                one = self._alone(name, "added", self._side.slots[homes[name]][name_in_model(name)])
            else:
                one = self._tensor(name, ours[name], homes[name])
            total += one.blocks_total
            differing += one.blocks_changed
            if one.status == "equal":
                equal += 1
            elif asked is None:
                found.append(one)
            else:
                found.append(replace(one, name=full_name(asked, name_in_model(one.name))))
        return found, equal, total, differing

    def _alone(
        self, name: str, status: str, what: Tensor | VirtualTensor | TensorSlot
    ) -> TensorDiff:
        count = self._count(what.nbytes)
        is_new = status == "added"
        return TensorDiff(
            name=name,
            status=status,
            dtype=what.dtype,
            shape=what.shape,
            dtype_a=None if is_new else what.dtype,
            shape_a=None if is_new else what.shape,
            blocks_total=count,
            blocks_changed=count,
            relative_l2=None,
            changed_blocks=tuple(range(count)),
        )


def _unlisted(one: TensorDiff) -> TensorDiff:
    return replace(one, changed_blocks=None)
