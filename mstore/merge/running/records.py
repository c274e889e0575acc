"""The output's records: its manifest and its coverage, once every tensor is complete.

Writes headers, small files and records into the sink.  Does not compute elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mstore.blocks import codecs
from mstore.blocks.codecs import Policy
from mstore.checkpoint.partition import partition
from mstore.ids import ID_BYTES, BlockId, Id
from mstore.made.files import blocks_of
from mstore.merge.running.jobs import Job
from mstore.merge.running.output import Layout
from mstore.merge.running.papers import Papers
from mstore.merge.running.sink import Sink
from mstore.objects.canonical import Record
from mstore.objects.coverage import Coverage, TensorCoverage, bitmap
from mstore.objects.manifest import Manifest, Part
from mstore.objects.plan import Plan
from mstore.objects.tensor import BYTES, Tensor
from mstore.store.catalog import Catalog


class Records:
    """Makes the records of one output.

    sink: None to make them without storing. policy: how new files are coded. papers: the output's
    own card and licences.  blocks_total: number of blocks of the output.
    """

    def __init__(
        self,
        catalog: Catalog,
        layout: Layout,
        sink: Sink | None,
        *,
        policy: Policy,
        papers: Papers,
    ) -> None:
        self._block_size = catalog.block_size
        self._layout = layout
        self._sink = sink
        self._policy = policy
        self._papers = papers
        self.blocks_total = 0

    def manifest(self, tensors: Mapping[str, Tensor], not_finite: int) -> Manifest:
        """Return the manifest. tensors: by planned name. not_finite: for the card."""
        made = self._layout.manifest(
            self._papers,
            not_finite,
            record_of=lambda name, *_: tensors[name],
            put_records=self._put_records,
            put_bytes=self._put_bytes,
        )
        self.blocks_total = blocks_of(made, self._block_size)
        return made

    def _put_bytes(self, data: bytes, path: str) -> Part:
        ids = []
        for start, length in partition(len(data), self._block_size):
            block = data[start : start + length]
            ids.append(BlockId.of(block))
            if self._sink is not None and not self._sink.has_blocks(ids[-1:])[0]:
                encoded = codecs.encode(block, codecs.PLAIN_BYTES, self._policy)
                self._sink.put_block(ids[-1], encoded, path, start)
        tensor = Tensor(BYTES, (len(data),), len(data), b"".join(ids))
        return Part(None, self._put_records([tensor])[0], len(data))

    def _put_records(self, records: Sequence[Record]) -> Sequence[Id]:
        if self._sink is None:
            return [record.id() for record in records]
        return self._sink.put_records(records)


def coverage(plan: Plan, jobs: Sequence[Job]) -> Coverage:
    """Return what became of each tensor. jobs: in the order of the plan's tensors."""
    odd = tuple((job.tensor.name, job.not_finite.new) for job in jobs if job.not_finite.new)
    return Coverage(plan.id(), tuple(_covered(job) for job in jobs), odd)


def _covered(job: Job) -> TensorCoverage:
    count = len(job.ids) // ID_BYTES
    if count == 1:
        like_base = job.tensor.out_dtype == job.tensor.base_dtype
        is_base = like_base and job.ids == job.members.base.blocks
        there = job.members.present[:, 0].tolist()
        return TensorCoverage(
            job.tensor.name, 1, bitmap([is_base]), tuple(bitmap([flag]) for flag in there)
        )
    ids = np.frombuffer(bytes(job.ids), dtype=np.uint8).reshape(count, ID_BYTES)
    reused = np.zeros(count, dtype=np.bool_)
    if job.tensor.out_dtype == job.tensor.base_dtype:
        base = np.frombuffer(job.members.base.blocks, dtype=np.uint8)
        reused = (ids == base.reshape(count, ID_BYTES)).all(axis=1)
    contributed = np.repeat(job.members.present, job.shape.per_chunk, axis=1)[:, :count]
    return TensorCoverage(
        job.tensor.name,
        count,
        bitmap(reused.tolist()),
        tuple(bitmap(row) for row in contributed.tolist()),
    )
