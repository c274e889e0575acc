"""The nearest base: which stored snapshot a checkpoint was most likely fine-tuned from.

A candidate has most of the checkpoint's tensors, by bytes: the same names, dtypes and shapes.  What
only one of them has (a copy of averaged weights, a buffer, a layer with more channels) is stored
without a base.  Candidates that the checkpoint itself declares (`checkpoint.declared`) come first;
if none of them fits, every snapshot that a ref reaches is a candidate.  Among candidates the values
decide: a few blocks of the checkpoint, selected by hash, are compared with the candidate's blocks
at the same positions, and the nearest wins.  A model trained from scratch agrees in nothing but its
shapes, and is no base.

Deltas have depth 1, so a base that has a base itself serves no better than that base does.  The
search therefore takes the root of a family, unless a later member is clearly nearer or the
checkpoint declares it as its base.

Reads a few dozen blocks of the checkpoint and a few of each candidate, whatever the model's size.
Virtual snapshots have no bytes and pruned ones may have lost theirs: neither is a candidate.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3

from mstore.blocks.schema import PRUNED
from mstore.checkpoint.declared import Declared, declared_bases
from mstore.checkpoint.directory import Checkpoint, SourceFile
from mstore.checkpoint.dtypes import DTYPES
from mstore.checkpoint.header import TensorSlot
from mstore.checkpoint.models import renamed
from mstore.checkpoint.paths import quoted
from mstore.checkpoint.reading import read_part
from mstore.checkpoint.tree import given_name, hub_snapshot
from mstore.models.adapters.config import CONFIG as ADAPTER_CONFIG
from mstore.models.adapters.config import MAX_CONFIG, named_base
from mstore.models.adapters.targets import check_adapter, has_keys, is_adapter
from mstore.models.made import start_of
from mstore.store import listing
from mstore.store.catalog import Catalog
from mstore.store.models import Models, models_in, paired
from mstore.store.objects.snapshot import BASE, SnapshotRecord
from mstore.store.objects.tensor import block_count
from mstore.store.refs import CANDIDATE
from mstore.store.tied import Tied, sizes_of
from mstore.terms.errors import Corrupt, Incompatible, MstoreError, NotFound
from mstore.terms.ids import BlockId, Buffer, SnapshotId, TensorId

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Unrelated weights score 0.03, those moved by 1 % of their size 0.7, by 30 % 0.17.
NEAR_ENOUGH = 0.12
# A later member of a family is the base only if the root's nearness is below this share of its own.
ROOT_SHARE = 0.5
# Differences are measured in this many leading bits of a float's fraction.
_BITS_COMPARED = 7
_FRACTION_BITS = {
    "F64": 52,
    "F32": 23,
    "F16": 10,
    "BF16": 7,
    "F8_E4M3": 3,
    "F8_E4M3FNUZ": 3,
    "F8_E5M2": 2,
    "F8_E5M2FNUZ": 2,
}
_ELEMENTS_COMPARED = 1 << 16
_MIN_ID_DIGITS = 12
# Blocks of a single value to skip before a run of blocks goes without a sample.
_TRIES = 4
_NOTHING_CALLED: Mapping[SnapshotId, Declared] = MappingProxyType({})


class SearchLimits(msgspec.Struct, frozen=True):
    """How far the search goes; it does not find what lies beyond.

    blocks, block_bytes: limits on the checkpoint's samples; the smaller applies. unequal: blocks
    read of a candidate. candidates: snapshots compared. manifests: snapshots examined, the newest
    that refs name, with their bases.
    """

    blocks: int = 32
    block_bytes: int = 64 << 20
    unequal: int = 8
    candidates: int = 16
    manifests: int = 1024


DEFAULT_LIMITS = SearchLimits()


class Nearest(msgspec.Struct, frozen=True):
    """The base that was found, or None, and the reason in words."""

    snapshot: SnapshotId | None
    reason: str


class _Candidate(msgspec.Struct, frozen=True):
    """A snapshot that has bytes; `root` is the first of its family, itself if it has no base."""

    id: SnapshotId
    record: SnapshotRecord
    name: str
    names: tuple[str, ...]
    root: SnapshotId


class _Sampled(msgspec.Struct, frozen=True):
    """One block of the checkpoint."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    number: int
    data: bytes
    id: BlockId


class _Score(msgspec.Struct, frozen=True):
    """A candidate's nearness, from 0 to 1, and the count of sampled blocks that are equal.

    share: of the sampled bytes, those in tensors that the candidate has; the nearness is theirs.
    """

    candidate: _Candidate
    nearness: float
    share: float
    equal: int
    blocks: int

    @property
    def worth(self) -> float:
        """What ranks candidates: the nearness, where it has nothing to compare 0."""
        return self.nearness * self.share

    @property
    def words(self) -> str:
        if self.equal == self.blocks:
            return f"all {self.blocks} sampled blocks are equal"
        return (
            f"{self.equal} of {self.blocks} sampled blocks are equal, nearness {self.nearness:.2f}"
        )


def nearest(
    catalog: Catalog, checkpoint: Checkpoint, *, limits: SearchLimits = DEFAULT_LIMITS
) -> Nearest:
    """Return the stored snapshot that is most likely the checkpoint's base.

    Skips a candidate that cannot be read: no add fails for a base that nobody requested.
    """
    return _Search(catalog, checkpoint, limits).run()


def bases_first(checkpoints: Sequence[tuple[Path, str]]) -> list[tuple[Path, str]]:
    """Order paths and their future names, each after those that it declares as its base."""
    called = [{_last(given_name(path)), _last(name)} for path, name in checkpoints]
    wanted = [{_last(each.name) for each in _declared_at(path)} for path, _ in checkpoints]
    ordered: list[int] = []
    waiting = set(range(len(checkpoints)))
    while waiting:
        # If checkpoints declare each other in a cycle, the first one goes first.
        ready = (
            at
            for at in sorted(waiting)
            if not any(wanted[at] & called[other] for other in waiting - {at})
        )
        taken = next(ready, min(waiting))
        waiting.remove(taken)
        ordered.append(taken)
    return [checkpoints[at] for at in ordered]


def _declared_at(path: Path) -> tuple[Declared, ...]:
    with suppress(MstoreError):
        directory = hub_snapshot(path)

        def read(name: str, length: int) -> bytes | None:
            with suppress(MstoreError):
                return read_part(directory / name, 0, length)
            return None

        return _declared(read)
    return ()


def _declared(read: Callable[[str, int], bytes | None]) -> tuple[Declared, ...]:
    """Return the names of `declared_bases`, and the one in the config of an adapter."""
    name = named_base(read(ADAPTER_CONFIG, MAX_CONFIG))
    own = () if name is None else (Declared(name, ADAPTER_CONFIG, is_base=True),)
    return (*declared_bases(read), *own)


class _Search:
    """One search: the checkpoint's tensors, its sampled blocks, and the candidates."""

    def __init__(self, catalog: Catalog, checkpoint: Checkpoint, limits: SearchLimits) -> None:
        self._catalog = catalog
        self._limits = limits
        self._files = {file.path: file for file in checkpoint.files}
        self._named_models = checkpoint.named
        self._slots = _slots(checkpoint)
        self._sizes = {name: slot.nbytes for name, (_, _, slot) in self._slots.items()}
        self._declared = _declared(self._read_own)
        found = _candidates(catalog, self._declared, limits.manifests)
        self._candidates = {each.id: each for each in found}
        self._sample: list[_Sampled] | None = None

    def run(self) -> Nearest:
        if is_adapter(self._slots):
            # Another adapter may have the same tensors, and is not what it was trained on.
            return self._of_adapter()
        if not self._candidates:
            return Nearest(None, "the store holds no other model")
        named = self._named()
        fitting = self._fitting(self._candidates[id] for id in named)
        found = self._choose(fitting, called=named)
        if found is not None:
            score, chosen = found
            word = named[score.candidate.id]
            return self._nearest(score, chosen, f"{word.source} names {quoted(word.name)}")
        fitting = self._fitting(self._candidates.values())
        if not fitting:
            return Nearest(None, "no other model in the store has these tensors")
        found = self._choose(fitting)
        if found is not None:
            return self._nearest(*found, self._told_tensors(found[0].candidate))
        return Nearest(
            None, "models with these tensors are in the store, but none with values near these"
        )

    def _of_adapter(self) -> Nearest:
        """Return the model that an adapter's config names, if there is one that it fits."""
        named = next((one.name for one in self._declared if one.source == ADAPTER_CONFIG), None)
        if named is None:
            if has_keys(self._slots):
                return Nearest(None, "it is an adapter, and has no config that names a model")
            return Nearest(None, "it is an adapter, and its config names no model")
        called = [one for one in self._candidates.values() if _is_called(one, named)]
        fitting = [one for one in called if self._fits(one)]
        exact = [one for one in fitting if named in one.names or _is_from(one, named)]
        match exact or fitting:
            case [one]:
                return Nearest(one.id, f"{ADAPTER_CONFIG} names {quoted(named)}")
            case []:
                why = "it does not fit" if called else "is not in the store"
            case several:
                why = "may be " + " or ".join(sorted(one.name for one in several))
        return Nearest(None, f"it is an adapter of {quoted(named)}, which {why}")

    def _fits(self, candidate: _Candidate) -> bool:
        """Return whether the adapter can be applied to a candidate."""
        with suppress(NotFound, Corrupt, Incompatible):
            base = self._catalog.manifest(candidate.record.manifest_id())
            slots = {name: slot for name, (_, _, slot) in self._slots.items()}
            models = models_in(self._catalog, base)
            main = models.meant(candidate.name)
            ids = models.in_model(main)
            if is_adapter(ids):
                return False
            records = dict(zip(ids, self._catalog.tensors(list(ids.values())), strict=True))
            config = self._read_own(ADAPTER_CONFIG, MAX_CONFIG + 1)
            tied = Tied.of(self._catalog, base, main, slots)
            check_adapter(config, slots, tied.both(records), candidate.name)
            return True
        return False

    def _told_tensors(self, candidate: _Candidate) -> str:
        alike, count = self._alike_records(candidate), len(self._slots)
        if len(alike) == count == len(self._tensors(candidate)):
            return "it has the same tensors"
        return f"it has {len(alike)} of the {count} tensors"

    def _nearest(self, best: _Score, chosen: _Score, why: str) -> Nearest:
        if chosen.candidate is best.candidate:
            return Nearest(chosen.candidate.id, f"{why}; {chosen.words}")
        near = best.candidate.name
        return Nearest(
            chosen.candidate.id,
            f"{near} is nearest ({why}; {best.words}), "
            f"and {chosen.candidate.name} is the root of its family ({chosen.words})",
        )

    # -- who may be it -----------------------------------------------------------------------

    def _named(self) -> dict[SnapshotId, Declared]:
        """Return the candidates that declared names stand for, each with its name."""
        found: dict[SnapshotId, Declared] = {}
        for number, candidate in enumerate(self._candidates.values()):
            says = () if number >= self._limits.manifests else self._says(candidate)
            for each in self._declared:
                if _is_called(candidate, each.name) or each.name in says:
                    found.setdefault(candidate.id, each)
        return found

    def _says(self, candidate: _Candidate) -> set[str]:
        """Return the names that a candidate declares itself."""
        if not self._declared:
            return set()
        with suppress(NotFound, Corrupt):
            content = candidate.record.manifest_id()
            declared = declared_bases(
                lambda path, length: start_of(self._catalog, content, path, length)
            )
            return {each.name for each in declared}
        return set()

    def _fitting(self, candidates: Iterable[_Candidate]) -> list[_Candidate]:
        """Return those with most of the checkpoint's tensors by name and size, up to the limit.

        Those with the same tensors first, then by the bytes that both have.
        """
        same: list[_Candidate] = []
        others: list[tuple[int, _Candidate]] = []
        for number, candidate in enumerate(candidates):
            if number == self._limits.manifests or len(same) == self._limits.candidates:
                break
            with suppress(NotFound, Corrupt):
                shared, is_same = self._shared(candidate)
                # At least half of the checkpoint's bytes are in tensors that both have.
                if 0 < sum(self._sizes.values()) <= 2 * shared:
                    if is_same:
                        same.append(candidate)
                    else:
                        others.append((shared, candidate))
        # A stable sort: of equal ones, the order of the candidates counts.
        others.sort(key=lambda one: -one[0])
        return [*same, *(one for _, one in others)][: self._limits.candidates]

    def _shared(self, candidate: _Candidate) -> tuple[int, bool]:
        """Return the bytes of tensors that are equal in name and size.

        And whether these are all that the models have which are in both.
        """
        models = self._models(candidate)
        pairs = paired(models.named, self._named_models)
        theirs = renamed(sizes_of(self._catalog, models.manifest), pairs)
        own = renamed(self._sizes, {one: one for one in pairs.values()})
        shared = sum(size for name, size in own.items() if theirs.get(name) == size)
        return shared, own == theirs

    # -- which is nearest --------------------------------------------------------------------

    def _choose(
        self, candidates: list[_Candidate], called: Mapping[SnapshotId, Declared] = _NOTHING_CALLED
    ) -> tuple[_Score, _Score] | None:
        """Return the nearest that is near enough, and the member of its family to use."""
        scores = [score for each in candidates if (score := self._score(each)) is not None]
        # A stable sort: the order of the candidates decides between equally near ones.
        for best in sorted(scores, key=lambda score: -score.worth):
            if best.nearness >= NEAR_ENOUGH and self._has_most_tensors(best.candidate):
                word = called.get(best.candidate.id)
                is_meant = word is not None and word.is_base and best.equal < best.blocks
                return best, best if is_meant else self._root_or(best)
        return None

    def _root_or(self, best: _Score) -> _Score:
        root = self._candidates.get(best.candidate.root)
        if root is None or root is best.candidate or not self._fitting([root]):
            return best
        score = self._score(root)
        if score is None or score.nearness < NEAR_ENOUGH or not self._has_most_tensors(root):
            return best
        # The base of a copy is the base of the original.
        is_copy = best.equal == best.blocks
        return score if is_copy or score.worth >= ROOT_SHARE * best.worth else best

    def _score(self, candidate: _Candidate) -> _Score | None:
        """Score a candidate; None if it has none of the sampled tensors or cannot be read."""
        sample = self._blocks()
        compared = same = equal = 0
        unequal: list[tuple[_Sampled, BlockId]] = []
        try:
            tensors = self._tensors(candidate)
            for each in sample:
                id = tensors.get(each.tensor)
                tensor = None if id is None else self._catalog.tensor(id)
                if tensor is None or (tensor.dtype, tensor.shape) != (each.dtype, each.shape):
                    continue
                compared += len(each.data)
                other = tensor.block(each.number)
                if other == each.id:
                    same += len(each.data)
                    equal += 1
                else:
                    unequal.append((each, other))
            near = self._mean_closeness(unequal)
        except (NotFound, Corrupt):
            return None
        if not compared:
            return None
        nearness = (same + near * (compared - same)) / compared
        share = compared / sum(len(each.data) for each in sample)
        return _Score(candidate, nearness, share, equal, len(sample))

    def _mean_closeness(self, pairs: list[tuple[_Sampled, BlockId]]) -> float:
        """Return the mean over the first few differing blocks, weighted by length."""
        read = pairs[: self._limits.unequal]
        if not read:
            return 0.0
        summed = sum(
            closeness(each.data, self._catalog.read_block(other), each.dtype) * len(each.data)
            for each, other in read
        )
        return summed / sum(len(each.data) for each, _ in read)

    def _has_most_tensors(self, candidate: _Candidate) -> bool:
        """Return whether most of the checkpoint's bytes are of tensors that are alike in both."""
        alike = self._alike_records(candidate)
        return 2 * sum(self._sizes[name] for name in alike) >= sum(self._sizes.values())

    def _alike_records(self, candidate: _Candidate) -> list[str]:
        """Return the tensors that have the dtype and shape they have in the checkpoint."""
        try:
            tensors = self._tensors(candidate)
            names = [name for name in tensors if name in self._slots]
            records = self._catalog.tensors([tensors[name] for name in names])
        except (NotFound, Corrupt):
            return []
        slots = [self._slots[name][2] for name in names]
        return [
            name
            for name, record, slot in zip(names, records, slots, strict=True)
            if (record.dtype, record.shape) == (slot.dtype, slot.shape)
        ]

    def _tensors(self, candidate: _Candidate) -> Mapping[str, TensorId]:
        """Return a candidate's tensors by what the checkpoint calls those to compare with."""
        models = self._models(candidate)
        return renamed(models.tensors, paired(models.named, self._named_models))

    def _models(self, candidate: _Candidate) -> Models:
        catalog = self._catalog
        return models_in(catalog, catalog.manifest(candidate.record.manifest_id()))

    # -- the checkpoint's side ---------------------------------------------------------------

    def _read_own(self, path: str, length: int) -> bytes | None:
        file = self._files.get(path)
        return None if file is None else file.read(0, length)

    def _blocks(self) -> list[_Sampled]:
        if self._sample is None:
            self._sample = list(self._sampled())
        return self._sample

    def _sampled(self) -> Iterator[_Sampled]:
        """Yield one block from each of equal runs of all blocks, skipping those of a single value.

        Samples only floating-point tensors if there are any: models that share nothing else have
        the same masks and position ids.
        """
        block_size = self._catalog.block_size
        floating = [
            name for name, (_, _, slot) in self._slots.items() if DTYPES[slot.dtype].floating
        ]
        names = sorted(floating or self._slots)
        ends = list(accumulate(block_count(self._sizes[name], block_size) for name in names))
        total = ends[-1] if ends else 0
        runs = min(total, self._limits.blocks, max(4, self._limits.block_bytes // block_size))
        for run in range(runs):
            first, end = run * total // runs, (run + 1) * total // runs
            start = _drawn(run, total) % (end - first)
            for step in range(min(_TRIES, end - first)):
                place = first + (start + step) % (end - first)
                sampled = self._block(names, ends, place)
                if sampled is not None:
                    yield sampled
                    break

    def _block(self, names: list[str], ends: list[int], place: int) -> _Sampled | None:
        """Return block number `place` of all; None if all its elements are equal."""
        at = bisect_right(ends, place)
        number = place - (ends[at - 1] if at else 0)
        file, start, slot = self._slots[names[at]]
        block_size = self._catalog.block_size
        offset = number * block_size
        length = min(block_size, slot.nbytes - offset)
        data = file.read(start + slot.begin + offset, length)
        if len(data) != length or _is_constant(data, slot.dtype):
            # The add itself detects a file that was truncated meanwhile.
            return None
        return _Sampled(names[at], slot.dtype, slot.shape, number, data, BlockId.of(data))


def closeness(data: Buffer, other: Buffer, dtype: str) -> float:
    """Return how close the elements of two blocks of one dtype are, from 0 to 1.

    For floats: the share of the leading seven bits of the fraction (or of all there are) in which
    the two agree as ordered numbers; 0 across signs, and from a factor of two on.  For other
    dtypes: the share of equal elements.
    """
    import numpy as np

    if len(data) != len(other):
        return 0.0
    kind = DTYPES[dtype]
    width = kind.bits // 8 if kind.bits in (8, 16, 32, 64) else 1
    words = np.dtype(f"<u{width}")
    step = max(1, len(data) // width // _ELEMENTS_COMPARED)
    a, b = (np.frombuffer(each, words)[::step] for each in (data, other))
    fraction = _FRACTION_BITS.get(dtype)
    if fraction is None:
        return float(np.mean(a == b))
    _, length = np.frexp(np.abs(_ordered(a) - _ordered(b)))
    compared = min(fraction, _BITS_COMPARED)
    return float(np.mean(np.clip((fraction - length) / compared, 0, 1)))


def _ordered(words: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.float64]:
    """Map float bits to numbers in the same order; adjacent floats differ by one."""
    import numpy as np

    sign = words.dtype.type(1 << (8 * words.dtype.itemsize - 1))
    size = (words & ~sign).astype(np.float64)
    return np.where(words & sign, -size, size)


# -- of a checkpoint and of stored snapshots ----------------------------------------------------


def _slots(checkpoint: Checkpoint) -> dict[str, tuple[SourceFile, int, TensorSlot]]:
    """Return each tensor by what it is called: file, offset of its data, slot."""
    return {
        name: (file, file.data_start, slot) for name, (file, slot) in checkpoint.tensors().items()
    }


def _is_constant(data: bytes, dtype: str) -> bool:
    width = max(1, DTYPES[dtype].bits // 8)
    return data[width:] == data[:-width]


def _drawn(run: int, total: int) -> int:
    return int.from_bytes(blake3(b"%d of %d" % (run, total)).digest(8))


def _candidates(catalog: Catalog, declared: Sequence[Declared], most: int) -> list[_Candidate]:
    """Return the newest snapshots that refs name, the declared ones, and the bases of all these.

    Roots of families first, then those without a base, then the others; newest first, ties by id.
    """
    names: dict[SnapshotId, list[str]] = {}
    for name, ref in catalog.refs().items():
        # A candidate may be dropped at any moment.
        if ref.kind != CANDIDATE:
            names.setdefault(ref.snapshot_id(), []).append(name)
    records: dict[SnapshotId, SnapshotRecord] = {}
    bases: dict[SnapshotId, SnapshotId] = {}
    called = {_last(each.name) for each in declared}
    pending = [id for id, refs in names.items() if called & {_last(ref) for ref in refs}]
    pending += _newest(catalog, names, most)
    while pending:
        id = pending.pop()
        if id in records:
            continue
        with suppress(NotFound, Corrupt):
            record = records[id] = catalog.snapshot(id)
            base = next(iter(record.of_role(BASE)), None)
            if base is not None:
                bases[id] = base
                pending.append(base)
    lost = catalog.index.marked(PRUNED) - names.keys()
    is_base = set(bases.values())
    found = [
        _Candidate(
            id,
            record,
            names[id][0] if id in names else id.short,
            tuple(names.get(id, ())),
            _root(id, bases),
        )
        for id, record in records.items()
        if not record.is_virtual and id not in lost
    ]
    return sorted(
        found,
        key=lambda each: (each.id in bases, each.id not in is_base, -each.record.time_ns, each.id),
    )


def _newest(catalog: Catalog, ids: Iterable[SnapshotId], most: int) -> list[SnapshotId]:
    """Return at most this many of these snapshots, newest first, from their index rows alone."""
    index = catalog.index
    with index.env.read() as transaction:
        times = listing.times(index, transaction, ids)
    return sorted(times, key=lambda id: (times[id], id), reverse=True)[:most]


def _last(name: str) -> str:
    """Return the last part of a model's or a ref's name, normalised for comparison."""
    return name.strip("/").casefold().rpartition("/")[2]


def _root(id: SnapshotId, bases: dict[SnapshotId, SnapshotId]) -> SnapshotId:
    while id in bases:
        id = bases[id]
    return id


def _is_from(candidate: _Candidate, name: str) -> bool:
    """Return whether a candidate is from the repository of the Hub that has this name."""
    origin = candidate.record.origin
    return origin is not None and origin.model.casefold() == name.casefold()


def _is_called(candidate: _Candidate, name: str) -> bool:
    """Return whether a name is the candidate's id, its origin, its ref, or the ref's last part."""
    if _is_from(candidate, name):
        return True
    if len(name) >= _MIN_ID_DIGITS and str(candidate.id).startswith(name.casefold()):
        return True
    return any(_last(ref) == _last(name) for ref in candidate.names)
