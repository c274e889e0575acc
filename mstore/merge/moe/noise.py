"""Normal noise on the MLPs of an expert: copies of one model then differ, and training can tell
them apart.

Twelve halves of 32-bit draws are added up, which has the mean 0 and the deviation 1 and nearly the
form of a normal number.  A draw is a function of the seed, the expert's number, the tensor's name
and the element's place (`arithmetic.draws`), and sums of whole numbers are exact: no bit depends on
the machine or on threads.  Memory is a few groups of blocks for each thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mstore.merge.arithmetic.masks import draws
from mstore.merge.moe.architectures import PARTS
from mstore.merge.moe.assemble import layers_of, mlp_name
from mstore.merge.planning.recipes import PreparedModel
from mstore.models.casting import Caster, CastJob
from mstore.models.made import Publication, assembled, texts_of
from mstore.numeric.casts import Values
from mstore.numeric.codes import CODES
from mstore.store.catalog import Catalog
from mstore.store.models import Input, tensors_of
from mstore.store.objects.manifest import File, Part
from mstore.store.objects.snapshot import ADD, BASE, Parent
from mstore.store.objects.tensor import Tensor
from mstore.store.transaction import Transaction, branch_to_move
from mstore.terms.errors import Incompatible
from mstore.terms.report import ProgressCallback, ProgressCounter

_CONTEXT: Final = "mstore 1 noise"
"""BLAKE3 derive_key context of the draws' keys."""

_WORDS: Final = 6
_HALF: Final = 16
_MEAN: Final = 2 * _WORDS * (2**_HALF - 1) // 2


class Noise(msgspec.Struct, frozen=True):
    """Of one expert.  deviation: of its numbers. expert: its number, from 0."""

    deviation: float
    seed: int
    expert: int

    def key(self) -> bytes:
        """Return what tells it from any other noise."""
        return np.float64(self.deviation).tobytes() + self._source()

    def _source(self) -> bytes:
        return self.seed.to_bytes(8, "little") + self.expert.to_bytes(4, "little")

    def added(self, tensor: str, values: Values, first: int) -> Values:
        """Return elements of a tensor, from the flat index `first` on, with noise."""
        digest = blake3(self._source() + tensor.encode(), derive_key_context=_CONTEXT)
        keys = np.frombuffer(digest.digest(length=8 * _WORDS), "<u4").reshape(_WORDS, 2)
        numbers = normal(keys.astype(np.uint32), first, values.size) * self.deviation
        with np.errstate(over="ignore"):
            found: Values = values + numbers.astype(values.dtype)
        return found


def normal(keys: npt.NDArray[np.uint32], first: int, n: int) -> npt.NDArray[np.float64]:
    """Return numbers of mean 0 and deviation 1 of elements [first, first + n)."""
    total = np.zeros(n, np.uint32)
    for key in keys:
        words = draws(key, first, n)
        total += words >> np.uint32(_HALF)
        total += words & np.uint32(2**_HALF - 1)
    return (total.astype(np.float64) - _MEAN) / 2.0**_HALF


def store_noisy(
    catalog: Catalog,
    model: Input,
    noise: Noise,
    branch: str,
    name: str,
    *,
    threads: int,
    progress: ProgressCallback | None,
) -> PreparedModel:
    """Store a model again with noise on its MLPs, on a branch.  name: what errors call the result.

    Raises Incompatible for elements that cannot have noise, Conflict, Corrupt, StorageFailed; then
    nothing is published.
    """
    manifest = catalog.manifest_of(model.snapshot)
    tensors = tensors_of(catalog, manifest)
    noisy = {mlp_name(layer, part) for layer in layers_of(list(tensors)) for part in PARTS}
    noisy &= tensors.keys()
    records = dict(zip(noisy, catalog.tensors([tensors[one] for one in noisy]), strict=True))
    for one, record in records.items():
        if record.dtype not in CODES:
            raise Incompatible(f"elements of {record.dtype} get no noise: {one}", where=model.name)
    files = {
        file.path: file
        for file in manifest.files
        if any(str(part.name) in noisy for part in file.tensors())
    }
    tick = ProgressCounter("noise", sum(one.nbytes for one in records.values()) or 1, progress)
    with Transaction(catalog, f"noise {branch}") as transaction:
        current = branch_to_move(catalog, branch)
        texts = texts_of(catalog, manifest, dict.fromkeys(files))
        with ThreadPoolExecutor(threads, "noise") as pool:
            caster = Caster(catalog, transaction, pool)

            def with_noise(path: str) -> list[Part]:
                jobs = dict(_jobs(files[path], records, noise))
                found = caster.cast(list(jobs.values()), path, ahead=2 * threads, tick=tick)
                for one, new in zip(jobs, found, strict=True):
                    if new.overflowed:
                        raise Incompatible(f"noise makes elements of {one} infinite", where=name)
                ids = transaction.put_records([new.record for new in found])
                known = dict(zip(jobs, map(bytes, ids), strict=True))
                return [
                    msgspec.structs.replace(part, tensor=known.get(str(part.name), part.tensor))
                    for part in files[path].tensors()
                ]

            put = transaction.put_bytes
            content = assembled(manifest.files, texts, files.keys(), with_noise, put)
        publication = Publication(catalog, transaction)
        snapshot, is_new = publication.put(
            branch,
            current,
            content,
            ADD,
            (Parent(BASE, model.snapshot),),
            message=name,
            action=f"moe: {name}",
        )
        publication.commit()
        written = transaction.bytes_written
    return PreparedModel(name, branch, snapshot.id(), is_new, written)


def _jobs(file: File, records: Mapping[str, Tensor], noise: Noise) -> Iterator[tuple[str, CastJob]]:
    begin = file.parts[0].nbytes
    for part in file.tensors():
        name = str(part.name)
        if name in records:
            record = records[name]
            target = msgspec.structs.replace(record, blocks=b"")
            yield name, CastJob(record, None, target, begin, partial(noise.added, name))
        begin += part.nbytes
