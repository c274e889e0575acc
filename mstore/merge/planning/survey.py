"""The survey: everything that the planner needs to know, gathered from the catalog.

Compares block lists, looks up what blocks cost to read, and fetches the statistics of each expert's
delta.  Missing statistics are computed now, with their reads metered separately, unless the request
forbids it.  After this, planning reads nothing from disk.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mstore.adapters import low_rank
from mstore.adapters.inputs import Inputs, Names
from mstore.blocks.meter import Meter
from mstore.checkpoint.models import split_name
from mstore.errors import BadRequest, Incompatible
from mstore.ids import ID_BYTES, TensorId
from mstore.merge.measures.companions import Beside, Companion, grouped, split
from mstore.merge.measures.grid import Bools
from mstore.merge.measures.unknown import NEEDS_ANALYSIS
from mstore.merge.methods.method import Operation
from mstore.merge.methods.selections.selection import Measured
from mstore.merge.planning.compared import (
    ID_WORDS,
    Words,
    batched,
    chunk_ids,
    equal_chunks,
    joined_ids,
    twins,
)
from mstore.merge.planning.known_pairs import KnownPairs, has_digest
from mstore.merge.planning.request import Request
from mstore.merge.planning.stored_texts import NOT_AMONG_ONLY, skipped
from mstore.merge.planning.surveyed import (
    KEEPS_NONE,
    NOTHING_KEPT,
    Counts,
    ExpertTensor,
    Survey,
    SurveyedTensor,
)
from mstore.merge.planning.tied import first_names
from mstore.numeric.codes import ITEMSIZES
from mstore.objects.applied import AppliedTensor
from mstore.objects.shapes import (
    Globs,
    chosen,
    differ_in_vocabulary,
    matching,
    require_matches,
    require_same_shapes,
    told_difference,
)
from mstore.objects.tensor import Tensor
from mstore.phrases import Option, Text, call, few, joined, phrase
from mstore.progress import Progress, ProgressCallback
from mstore.recipes.layout import Layout, layers_of
from mstore.stats.chunk import CHUNK, Rows, finite
from mstore.stats.chunks import chunk_elements, tensor_chunk
from mstore.stats.histogram import NAN_BIN, Histogram, Threshold, kept_squares, select
from mstore.stats.known import keep_products
from mstore.stats.products import product_rows
from mstore.stats.store import StatsStore
from mstore.stats.table import DeltaTable
from mstore.store.catalog import Catalog
from mstore.store.configs import config_of
from mstore.store.models import models_in
from mstore.store.tied import ties_embeddings

# Late: most methods need no facts, and most surveys find statistics.
if TYPE_CHECKING:
    from mstore.merge.measures.facts import Facts


class Candidate(NamedTuple):
    """A tensor to survey: its record in the base and in each expert."""

    name: str
    base_id: TensorId
    base: Tensor
    pairs: list[tuple[TensorId, Tensor]]
    copies: int


class _Numbers(NamedTuple):
    """What statistics show of one expert's delta.

    rows: at the plan's chunks, None if there are none. thresholds, band: as in `ExpertTensor`.
    is_finite: whether all rows are known to be.
    """

    rows: np.ndarray[Any, Any] | None
    thresholds: tuple[Threshold, ...]
    band: float = math.nan
    is_finite: bool = False


class Surveyor:
    """Gathers one survey.

    analyzed: counts the expert bytes read for missing statistics.  factors: those read for the
    norms of adapters' products.
    """

    def __init__(
        self,
        catalog: Catalog,
        statistics: StatsStore,
        request: Request,
        *,
        threads: int,
        progress: ProgressCallback | None = None,
    ) -> None:
        self._catalog = catalog
        self._statistics = statistics
        self._request = request
        self._threads = threads
        self._progress = progress
        self.analyzed = Meter("analyzed")
        self.factors = Meter("factors")
        self._missing: list[tuple[str, str]] = []
        self._unreliable: list[tuple[int, str]] = []
        self._base_not_finite: list[str] = []
        self._squares_of: dict[str, float] = {}
        self._copied: list[tuple[str, str]] = []
        self._known = KnownPairs(statistics, request)
        self._compared: dict[str, tuple[int, Bools, Counts, Counts]] = {}

    @cached_property
    def _facts(self) -> Facts:
        from mstore.merge.measures.facts import Facts

        return Facts(
            self._catalog,
            self._statistics,
            analyze=self._request.analyze,
            meter=self.analyzed,
            models=self._models,
            layer=self._layer,
        )

    def _layer(self, name: str) -> tuple[int, int] | None:
        model, own = split_name(name)
        return self._layouts[model].layer(own)

    @cached_property
    def _layouts(self) -> dict[str, Layout]:
        """The layers of each model of the base."""
        catalog, found = self._catalog, {}
        base = catalog.manifest_of(self._request.base.snapshot)
        models = models_in(catalog, base)
        for model in models.named:
            config = config_of(catalog, base, models.config(model))
            found[model] = Layout.of(models.in_model(model), layers_of(config))
        return found

    def _models(self, name: str) -> dict[TensorId, str]:
        """Return the name of a model that has each content of a tensor, the base last."""
        request, inputs = self._request, self._inputs
        members = (*zip(request.experts, inputs.experts, strict=True), (request.base, inputs.base))
        return {ids[name]: one.name for one, ids in reversed(members) if name in ids}

    def survey(self) -> Survey:
        """Run the survey.  Raises Incompatible if an expert's tensors do not match the base's."""
        catalog, request = self._catalog, self._request
        base_id = catalog.snapshot(request.base.snapshot).manifest_id()
        expert_ids = [catalog.snapshot(e.snapshot).manifest_id() for e in request.experts]
        base = catalog.manifest(base_id)
        names = [one.name for one in (request.base, *request.experts)]
        inputs = Inputs(
            *(catalog, base_id, expert_ids, names),
            choice=request.choice,
            fill=request.allow_missing,
            companions=[role for role, _ in request.companions],
            only=request.only,
            skip=request.skip,
        )
        self._inputs = inputs
        records = _tensors(inputs, inputs.base)
        experts: list[dict[str, tuple[TensorId, Tensor]]] = []
        has_missing = False
        for expert, ids, lacking in zip(
            request.models, inputs.models, inputs.lacking, strict=False
        ):
            found = _tensors(inputs, ids)
            ours = chosen(_shapes(records), request.only, request.skip)
            theirs = chosen(_shapes(found), request.only, request.skip)
            if request.allow_missing:
                lacks = ours.keys() & lacking
                if lacks == ours.keys() and ours:
                    raise Incompatible(
                        f"has none of the tensors of {request.base.name} that are merged: it is "
                        "another model",
                        where=expert.name,
                    )
                has_missing |= bool(lacks) or not theirs.keys() <= ours.keys()
                theirs = {name: shape for name, shape in theirs.items() if name in ours}
            if ours != theirs:
                require_same_shapes(
                    ours,
                    theirs,
                    what=f"cannot be merged into {request.base.name}",
                    where=expert.name,
                    hint=_hint_for(request.base.name, expert.name, ours, theirs, records, found),
                )
            experts.append(found)
        for one, numbers in self._split(range(len(inputs.experts))):
            for number in numbers:
                found = _tensors(inputs, inputs.experts[number])
                has_missing |= self._check_companion(one, number, records, found, experts)
                experts.append(found)
        tensors: list[SurveyedTensor] = []
        self._require_rules(records)
        tied = ties_embeddings(catalog, base)
        first = first_names(inputs.base, inputs.models, tied=tied)
        others = {name for found in experts for name in found}
        others |= models_in(catalog, base).tensors.keys()
        left_out = left_out_names(first, request.only, request.skip, others=others)
        merged = [name for name in records if first[name] == name and name not in left_out]
        for expert, found in zip(request.experts, experts[: len(inputs.models)], strict=False):
            _require_types(records, found, merged, base=request.base.name, where=expert.name)
        copies = Counter(first.values())
        candidates = {
            name: Candidate(name, *records[name], [found[name] for found in experts], copies[name])
            for name in merged
        }
        self._known.fetch(asked for one in candidates.values() for asked in self._measured(one))
        self._look_up_lengths(candidates.values())
        self._compare(candidates.values())
        total = sum(record.nbytes for _, record in records.values()) or 1
        done = 0
        with ThreadPoolExecutor(self._threads, "survey") as pool:
            squares = self._base_squares(records, pool)
            for name, (base_tensor, record) in records.items():
                if first[name] == name and name in left_out:
                    there = [found.get(name) for found in experts]
                    if any(one is None or one[0] != base_tensor for one in there):
                        self._copied.append((name, left_out[name]))
                elif first[name] == name:
                    # In the order of the base, which is also the order of the plan and of its
                    # remarks.
                    surveyed = self._tensor(*candidates[name], pool)
                    if surveyed is not None:
                        tensors.append(surveyed)
                done += record.nbytes
                if self._progress is not None:
                    self._progress(Progress("plan", done, total))
            for name, sources in request.outputs:
                tensors.append(self._output(name, sources, [records, *experts], pool))
        return Survey(
            base=base_id,
            experts=tuple(expert_ids),
            block_size=catalog.block_size,
            tensors=tuple(tensors),
            base_squares=squares,
            copied=tuple(self._copied),
            missing=tuple(self._missing),
            unreliable=tuple(self._unreliable),
            base_not_finite=tuple(self._base_not_finite),
            idle_rules=self._idle_rules({*first.values()} - left_out.keys()),
            squares=self._squares_of,
            has_missing=has_missing,
            listed=len(request.companions),
            read=tuple([one for one in request.operation.method.companions if one.is_read]),
            without=inputs.without,
        )

    def _split(self, inputs: Sequence[Any]) -> list[tuple[Companion, Sequence[Any]]]:
        """Return what the method asks for with its part of what there is of each expert."""
        request = self._request
        return split(request.operation.method.companions, len(request.models), inputs)

    def _check_companion(
        self,
        one: Companion,
        number: int,
        base: Mapping[str, tuple[TensorId, Tensor]],
        found: Mapping[str, tuple[TensorId, Tensor]],
        models: Sequence[Mapping[str, tuple[TensorId, Tensor]]],
    ) -> bool:
        """Check a companion's tensors, and return whether it lacks some that an expert moves.

        Only these are needed.  Raises Incompatible for tensors that are missing and must not be, or
        that the base does not have, for other shapes, and for elements that are no numbers.
        """
        request, where = self._request, self._request.experts[number].name
        wanted = chosen(_shapes(base), request.only, request.skip)
        sources = {source for _, own in request.outputs for source in own}
        shapes = {
            name: shape
            for name, (_, record) in base.items()
            if (name in wanted or name in sources) and record.dtype in ITEMSIZES
            if (shape := one.shape(record.shape)) is not None
        }
        moved = {
            name
            for name in shapes
            if any(
                own[name][0] != base[name][0]
                for own in models[: len(request.models)]
                if name in own
            )
        }
        lacks = [name for name in moved if not self._inputs.has(number, name)]
        others = [
            name
            for name in chosen(_shapes(found), request.only, request.skip)
            if name not in base and name not in sources
        ]
        told = {"lacks": sorted(lacks), "has, and the base does not,": sorted(others)}
        for verb, names in told.items():
            if names and not request.allow_missing:
                allowed = Option("allow_missing", True)
                raise Incompatible(
                    f"{verb} {few(names)}: a {one} has the tensors of the model",
                    where=where,
                    hint=phrase(
                        f"{{allowed}} leaves an expert out of the tensors that its {one} lacks",
                        allowed=allowed,
                    ),
                )
        if moved and len(lacks) == len(moved):
            raise Incompatible(
                f"has none of the tensors of {request.base.name} that are merged: it is the {one} "
                "of another model",
                where=where,
            )
        for name, shape in shapes.items():
            record = found[name][1]
            is_own = one.is_read or self._inputs.has(number, name)
            if is_own and (record.shape != shape or record.dtype not in ITEMSIZES):
                whose = "the model's shape" if one.is_read else "the shape"
                raise Incompatible(
                    f"{name} is {record.dtype} {list(record.shape)}: a {one} has {whose}, "
                    f"{list(shape)}, and is {', '.join(sorted(ITEMSIZES))}",
                    where=where,
                )
        return bool(lacks or others)

    def _look_up_lengths(self, candidates: Iterable[Candidate]) -> None:
        """Look up what the blocks of all tensors cost at once: it is remembered for each."""
        self._catalog.lengths.of(
            [
                record.blocks
                for one in candidates
                for id, record in one.pairs
                if id != one.base_id and not isinstance(record, AppliedTensor)
            ]
        )

    def _measured(
        self, one: Candidate
    ) -> Iterator[tuple[tuple[TensorId, TensorId], int, int, Operation, int]]:
        """Yield the pairs of a tensor whose statistics are probably needed (`KnownPairs.fetch`)."""
        operation = self._request.operation_of(one.name)
        if one.base.dtype not in ITEMSIZES or not has_digest(operation):
            return
        elements, weightless = math.prod(one.base.shape), operation.weightless
        size, base = self._catalog.block_size, one.base.dtype
        models = one.pairs[: len(self._request.models)]
        for number, (id, record) in enumerate(models):
            if id != one.base_id and record.dtype in ITEMSIZES and not weightless[number]:
                chunk = chunk_elements(size, base, record.dtype)
                yield (one.base_id, id), elements, chunk, operation, number

    def _require_rules(self, records: Collection[str]) -> None:
        """Raise BadRequest for a rule or an output that cannot be what the caller meant."""
        names = {*records, *(name for name, _ in self._request.outputs)}
        pattern = self._request.rules.unmatched(names)
        if pattern is not None:
            raise BadRequest(
                f"no tensor's name matches {pattern!r}",
                where="rules",
                hint=call("tensors", "REF"),
            )
        for name, _ in self._request.outputs:
            if name in records:
                raise BadRequest(
                    "the base has a tensor of this name; a rule says how it is merged", where=name
                )

    def _idle_rules(self, merged: set[str]) -> tuple[str, ...]:
        """Return the patterns of rules that no tensor follows, because of other rules or `skip`."""
        request = self._request
        names = [*merged, *(name for name, _ in request.outputs)]
        # Whoever names tensors one by one, as recipes do, may name what --skip leaves out.
        names += request.rules.named()
        used = {id(request.rule_of(name)) for name in names} if request.rules else set()
        return tuple(str(one) for one in request.rules if id(one) not in used)

    def _output(
        self,
        name: str,
        sources: tuple[str, ...],
        members: Sequence[Mapping[str, tuple[TensorId, Tensor]]],
        pool: ThreadPoolExecutor,
    ) -> SurveyedTensor:
        """Survey a tensor that the base does not have.  Raises BadRequest, Incompatible."""
        inputs = (self._request.base, *self._request.experts)
        found = []
        for own, source, side in zip(inputs, sources, members, strict=True):
            if source not in side:
                raise BadRequest(
                    f"{own.name} has no tensor {source}, which {name} is made of",
                    hint=call("tensors", own.name),
                )
            found.append(side[source])
        (base_id, base), *pairs = found
        split = self._split(range(1, len(inputs)))
        facts = {n for one, numbers in split if not one.is_read for n in numbers}
        for number, (own, source, (_, record)) in enumerate(
            zip(inputs, sources, found, strict=True)
        ):
            if record.shape != base.shape and number not in facts:
                raise Incompatible(
                    f"{source} of {own.name} has shape {list(record.shape)}, that of the base "
                    f"{list(base.shape)}",
                    where=name,
                )
            if isinstance(record, AppliedTensor) and record.base != base:
                raise Incompatible(
                    f"{own.name} is an adapter: it changes {source} of the base, not "
                    f"{sources[0]}, which {name} is made of",
                    where=name,
                )
        surveyed = self._tensor(name, base_id, base, pairs, 1, pool, sources=sources)
        if surveyed is None:
            raise BadRequest(
                f"an output is made of floating-point tensors with elements, not of {base.dtype} "
                f"{list(base.shape)}",
                where=name,
            )
        return surveyed

    # -- one tensor --------------------------------------------------------------------------

    def _tensor(
        self,
        name: str,
        base_id: TensorId,
        base: Tensor,
        pairs: list[tuple[TensorId, Tensor]],
        copies: int,
        pool: ThreadPoolExecutor,
        *,
        sources: tuple[str, ...] = (),
    ) -> SurveyedTensor | None:
        """Survey one tensor; None for one that is the base's own.

        sources: its names in base and experts, for a tensor that the base does not have.
        """
        rule = self._request.rule_of(name)
        operation = self._request.operation_of(name)
        dtype = None if rule is None else rule.dtype
        every, pairs = pairs, pairs[: len(self._request.models)]
        named = sources[1:] or (name,) * len(every)
        changed = [id != base_id for id, _ in pairs]
        dtypes = [record.dtype for _, record in pairs]
        if not {base.dtype, *dtypes} <= ITEMSIZES.keys():
            return None
        elements = math.prod(base.shape)
        if elements == 0:
            return None
        output = self._request.dtype_of(name, base.dtype)
        if not (any(changed) or sources or output != base.dtype or operation.scales_equal):
            return None
        known = Measured()
        if operation.measures:
            source = sources[0] if sources else name
            beside = self._beside(every, named)
            facts = self._facts.of(
                *(name, (base_id, base), pairs, pool), source=source, companions=beside
            )
            operation, known = operation.measured(facts)
        compared = None if sources else self._compared.get(name)
        if compared is not None:
            chunk, equal, twin, cost = compared
        else:
            records, size = [record for _, record in pairs], self._catalog.block_size
            read = [own for one, own in self._split(every) if one.is_read]
            others = [*records, *(record for own in read for _, record in own)]
            chunk = tensor_chunk(size, base, others, output, whole=operation.needs_rows)
            ids = chunk_ids(base, chunk, size)
            sides = [chunk_ids(record, chunk, size) for record in records]
            equal = equal_chunks(ids, base.dtype, sides, dtypes)
            twin = twins(sides, dtypes)
            cost = self._costs(sides, equal, twin, records)
        together = self._together(every, named, operation, chunk, equal, twin, pool)
        weightless = operation.weightless
        moving = {
            k: (base_id, id)
            for k, (id, _) in enumerate(pairs)
            if id != base_id and not weightless[k]
        }
        numbers = self._digested(operation, elements, chunk, moving)
        numbers |= self._product_rows(operation, (base_id, base), pairs, moving, chunk, pool)
        # One lookup for all of them; several experts may share a tensor.
        missing = list(dict.fromkeys(pair for k, pair in moving.items() if k not in numbers))
        tables = dict(zip(missing, self._statistics.pairs(missing), strict=True)) if missing else {}
        none = (NOTHING_KEPT,) * len(operation.selection.ranks(elements))
        still = _Numbers(np.zeros(equal.shape[1], dtype=CHUNK), none, is_finite=True)
        is_told = (sources[0] if sources else name) in self._base_not_finite
        experts: list[ExpertTensor] = []
        for number, (id, record) in enumerate(pairs):
            pair = base_id, id
            if number in moving and number not in numbers:
                found = tables[pair]
                table = self._checked(name, number, base_id, base, id, record, chunk, pool, found)
                if table is not None:
                    tables[pair] = table
                numbers[number] = self._numbers(
                    name, pair, number, operation, elements, chunk, table
                )
            own = numbers.get(number, still)
            rows, cuts = own.rows, own.thresholds
            is_sure = is_told or own.is_finite
            if rows is not None and not (is_sure or (finite(rows) | equal[number]).all()):
                self._unreliable.append((number, name))
            experts.append(
                ExpertTensor(
                    pair,
                    record,
                    equal[number],
                    twin[number] if together is None else together[0][number],
                    cost[number],
                    rows,
                    cuts,
                    self._surplus(pair, number, operation, cuts, elements, chunk),
                    # What is measured of the tensor goes before what its table shows.
                    own.band if math.isnan(known.band) else known.band,
                    () if together is None else together[1][number],
                    None if together is None else together[2][number],
                )
            )
        return SurveyedTensor(
            *(name, base, elements, chunk, tuple(experts)),
            *(copies, operation, sources, dtype, known.planned(len(experts))),
        )

    def _compare(self, candidates: Iterable[Candidate]) -> None:
        """Compare the blocks of stored tensors, and what they cost, many at a time."""
        if self._request.companions:
            return
        size, count = self._catalog.block_size, len(self._request.experts)
        groups: dict[tuple[str, tuple[str, ...], int], list[Candidate]] = {}
        for one in candidates:
            operation = self._request.operation_of(one.name)
            output = self._request.dtype_of(one.name, one.base.dtype)
            records = [record for _, record in one.pairs]
            dtypes = tuple(record.dtype for record in records)
            if (
                {one.base.dtype, *dtypes} <= ITEMSIZES.keys()
                and 0 not in one.base.shape
                and any(id != one.base_id for id, _ in one.pairs)
                and not any(isinstance(record, AppliedTensor) for record in records)
            ):
                chunk = tensor_chunk(size, one.base, records, output, whole=operation.needs_rows)
                groups.setdefault((one.base.dtype, dtypes, chunk), []).append(one)
        for (base_dtype, dtypes, chunk), members in groups.items():
            chunks = [-(-math.prod(one.base.shape) // chunk) for one in members]
            for some in batched(members, chunks):
                ids = joined_ids([one.base for one in some], chunk, size)
                sides = [
                    joined_ids([one.pairs[k][1] for one in some], chunk, size) for k in range(count)
                ]
                equal = equal_chunks(ids, base_dtype, sides, dtypes)
                twin = twins(sides, dtypes)
                cost = self._stored(some, [side.shape[1] // ID_WORDS for side in sides], equal)
                cost = np.where(equal, 0, np.take_along_axis(cost, twin, axis=0))
                end = 0
                for one in some:
                    start, end = end, end - (-math.prod(one.base.shape) // chunk)
                    at = slice(start, end)
                    self._compared[one.name] = chunk, equal[:, at], twin[:, at], cost[:, at]

    def _stored(self, some: Sequence[Candidate], per_chunk: Sequence[int], equal: Bools) -> Counts:
        """Return the stored bytes of chunks, int64[K, chunks]; per_chunk: blocks of each expert's.

        0 for a tensor that is the base's.
        """
        members = [
            (k, one.pairs[k][1].blocks, one.pairs[k][0] != one.base_id)
            for k in range(len(per_chunk))
            for one in some
        ]
        found = iter(
            self._catalog.lengths.of([blocks for _, blocks, differs in members if differs])
        )
        cost: list[list[Counts]] = [[] for _ in per_chunk]
        for k, blocks, differs in members:
            cost[k].append(
                _by_chunk(next(found), per_chunk[k])
                if differs
                else np.zeros(-(-len(blocks) // (ID_BYTES * per_chunk[k])), dtype=np.int64)
            )
        return np.array([np.concatenate(side) for side in cost]).reshape(equal.shape)

    def _costs(
        self, sides: Sequence[Words], equal: Bools, twin: Counts, records: Sequence[Tensor]
    ) -> Counts:
        """Return stored bytes of each expert's chunks, int64[K, chunks]: 0 if equal to the base.

        An applied tensor is read whole or not at all: its bytes are those of its first chunk.
        """
        cost = np.zeros(equal.shape, dtype=np.int64)
        wanted = ~equal & (twin == np.arange(len(sides))[:, None])
        for k, record in enumerate(records):
            if isinstance(record, AppliedTensor):
                wanted[k] = False
                cost[k, 0] = low_rank.stored_bytes(self._catalog, record)
        read = np.flatnonzero(wanted.any(axis=1)).tolist()
        found = self._catalog.lengths.of([records[k].blocks for k in read])
        for k, lengths in zip(read, found, strict=True):
            whole = _by_chunk(lengths, sides[k].shape[1] // ID_WORDS)
            cost[k] = np.where(wanted[k], whole, cost[k])
        return np.where(equal, 0, np.take_along_axis(cost, twin, axis=0))

    def _beside(
        self, inputs: Sequence[tuple[TensorId, Tensor]], names: Sequence[str]
    ) -> dict[str, list[tuple[TensorId, Tensor] | None]]:
        """Return the tensors of companions that are facts; None where one has none.

        names: of the tensor in each expert and companion.
        """
        return {
            one.role: [
                inputs[number] if self._inputs.has(number, names[number]) else None
                for number in numbers
            ]
            for one, numbers in self._split(range(len(inputs)))
            if not one.is_read
        }

    def _together(
        self,
        inputs: Sequence[tuple[TensorId, Tensor]],
        names: Sequence[str],
        operation: Operation,
        chunk: int,
        equal: Bools,
        twin: Counts,
        pool: ThreadPoolExecutor,
    ) -> tuple[Counts, list[tuple[Beside, ...]], Counts] | None:
        """Return what is known of experts and of the companions that are read with them.

        That is the first expert that shares blocks of any of these, the companions of each expert,
        and the first with the same blocks of its own. None if nothing is read with experts.
        names: as for `_beside`. equal, twin: of the experts.
        """
        found: list[list[Beside]] = []
        for one, numbers in self._split(range(len(inputs))):
            if one.is_read:
                found.append(
                    self._of_role(one, inputs, numbers, names, operation, chunk, equal, pool)
                )
        if not found:
            return None
        # What is not read is not shared.
        own = np.where(equal, np.arange(len(twin))[:, None], twin)
        mates = [np.array([beside.twin for beside in role]) for role in found]
        return grouped([own, *mates]), list(zip(*found, strict=True)), own

    def _of_role(
        self,
        one: Companion,
        inputs: Sequence[tuple[TensorId, Tensor]],
        numbers: Sequence[int],
        names: Sequence[str],
        operation: Operation,
        chunk: int,
        equal: Bools,
        pool: ThreadPoolExecutor,
    ) -> list[Beside]:
        """Return the companions of one role of a tensor's experts; arguments as for `_together`."""
        records = [inputs[number][1] for number in numbers]
        sides = [chunk_ids(record, chunk, self._catalog.block_size) for record in records]
        mates = twins(sides, [record.dtype for record in records])
        cost = self._costs(sides, np.zeros_like(equal), mates, records)
        found = []
        for k, (number, record) in enumerate(zip(numbers, records, strict=True)):
            is_there = self._inputs.has(number, names[number])
            totals = None
            # Where no expert moves, no companion counts.
            if is_there and not equal.all() and not operation.weightless[k]:
                where = f"{self._request.experts[number].name}: {names[number]}"
                totals = self._facts.totals(one, where, inputs[number], chunk, pool)
            found.append(Beside(mates[k], cost[k], totals, ITEMSIZES[record.dtype], is_there))
        return found

    def _product_rows(
        self,
        operation: Operation,
        base: tuple[TensorId, Tensor],
        experts: Sequence[tuple[TensorId, Tensor]],
        moving: Mapping[int, tuple[TensorId, TensorId]],
        chunk: int,
        pool: ThreadPoolExecutor,
    ) -> dict[int, _Numbers]:
        """Return upper bounds on the rows of products, where planning needs no more of them."""
        products = {
            pair: record
            for k, pair in moving.items()
            for record in (experts[k][1],)
            if isinstance(record, AppliedTensor) and record.magnitude is None
        }
        if not (products and self._request.analyze and operation.needs_only_norms):
            return {}
        squares = self._facts.squares(base, pool)
        elements = math.prod(base[1].shape)

        def rows_of(record: AppliedTensor) -> Rows:
            factors = low_rank.load_factors(self._catalog, record, self.factors)
            return product_rows(factors, squares, elements, chunk)

        found = dict(zip(products, pool.map(rows_of, products.values()), strict=True))
        keep_products(self._statistics, found)
        return {k: _Numbers(found[pair], ()) for k, pair in moving.items() if pair in found}

    def _checked(
        self,
        name: str,
        number: int,
        base_id: TensorId,
        base: Tensor,
        id: TensorId,
        record: Tensor,
        chunk: int,
        pool: ThreadPoolExecutor,
        table: DeltaTable | None,
    ) -> DeltaTable | None:
        """Return existing or newly computed statistics; None, with the cause noted, if neither."""
        if table is not None and _fits(table, base, chunk):
            return table
        if not self._request.analyze:
            cause = "no statistics" if table is None else "statistics of another tensor"
            self._missing.append((f"{self._request.experts[number].name}: {name}", cause))
            return None
        return self._facts.measured((base_id, base), (id, record), pool)

    def _digested(
        self,
        operation: Operation,
        elements: int,
        chunk: int,
        moving: Mapping[int, tuple[TensorId, TensorId]],
    ) -> dict[int, _Numbers]:
        """Return what is known of experts without their tables."""
        found: dict[int, _Numbers] = {}
        if not has_digest(operation):
            return found
        ranks_of = operation.selection.ranks
        for number, pair in moving.items():
            known = self._known.find(pair, elements, chunk, ranks_of(elements, number))
            if known is not None:
                row, cuts = known
                rows = coarsen(row.rows, chunk // row.chunk_elements)
                # Sums of what is finite are.
                found[number] = _Numbers(rows, cuts, is_finite=row.is_finite)
        return found

    def _numbers(
        self,
        name: str,
        pair: tuple[TensorId, TensorId],
        number: int,
        operation: Operation,
        elements: int,
        chunk: int,
        table: DeltaTable | None,
    ) -> _Numbers:
        """Return what a table shows of an expert that moves the tensor."""
        ranks = operation.selection.ranks(elements, number)
        if table is None:
            if ranks:
                raise BadRequest(
                    "trimming needs the statistics of this expert against the base",
                    where=f"{self._request.experts[number].name}: {name}",
                    hint=phrase(
                        "{analyze}, or add the expert with {base}",
                        analyze=NEEDS_ANALYSIS,
                        base=Option("base"),
                    ),
                )
            return _Numbers(None, ())
        rows = coarsen(table.rows, chunk // table.chunk_elements)
        histogram = _without_nan(table.histogram) if ranks else table.histogram
        thresholds = tuple(
            select(histogram, rank, table.elements) if rank else KEEPS_NONE for rank in ranks
        )
        if has_digest(operation):
            self._known.learn(pair, table, ranks, thresholds)
            return _Numbers(rows, thresholds)
        squares = [kept_squares(histogram, threshold) for threshold in thresholds]
        return _Numbers(rows, thresholds, squares[0] - squares[1])

    def _surplus(
        self,
        pair: tuple[TensorId, TensorId],
        number: int,
        operation: Operation,
        cuts: tuple[Threshold, ...],
        elements: int,
        chunk: int,
    ) -> tuple[int, int]:
        """Return `ExpertTensor.surplus`; zeros if the data may be read, or was read before."""
        # Of two thresholds both must be exact (`thresholds`), so they keep no element too many.
        if len(cuts) != 1 or self._request.analyze or cuts[0].needed in (0, cuts[0].in_bin):
            return 0, 0
        (cut,) = cuts
        (keep,) = operation.selection.ranks(elements, number)
        beyond = cut.in_bin - cut.needed
        if not cut.exact and self._statistics.threshold(*pair, keep) is None:
            return beyond, beyond
        return 0, 0 if self._statistics.ties(*pair, keep, chunk) is not None else beyond

    # -- the base ----------------------------------------------------------------------------

    def _base_squares(
        self, records: dict[str, tuple[TensorId, Tensor]], pool: ThreadPoolExecutor
    ) -> float | None:
        """Return the sum of squares of the base's tensors whose dtype can be merged."""
        sums = []
        measured = {name: one for name, one in records.items() if one[1].dtype in ITEMSIZES}
        known = self._statistics.squares_of([id for id, _ in measured.values()])
        for (name, (id, record)), found in zip(measured.items(), known, strict=True):
            squares = self._facts.squares((id, record), pool) if found is None else found
            if not math.isfinite(squares):
                # A sum of squares of finite float32 is finite in float64.
                self._base_not_finite.append(name)
            sums.append(squares)
            self._squares_of[name] = squares
        total = math.fsum(sums) if all(map(math.isfinite, sums)) else math.inf
        return total if math.isfinite(total) else None


def _tensors(inputs: Inputs, ids: Names) -> dict[str, tuple[TensorId, Tensor]]:
    records = inputs.records(list(ids.values()))
    return dict(zip(ids, zip(ids.values(), records, strict=True), strict=True))


def _hint_for(
    base: str,
    expert: str,
    ours: Mapping[str, tuple[int, ...]],
    theirs: Mapping[str, tuple[int, ...]],
    records: Mapping[str, tuple[TensorId, Tensor]],
    found: Mapping[str, tuple[TensorId, Tensor]],
) -> Text:
    """Return what to do about an expert whose tensors have not the names and shapes of the base's.

    base, expert: their names. ours, theirs: shapes of what is merged. records, found: all tensors.
    """
    from mstore.merge.planning.castable import hint_for_scales

    hint = told_difference(base, expert)
    if ours.keys() != theirs.keys():
        allowed = Option("allow_missing", True)
        hint = phrase("{told}, {allowed} merges the others", told=hint, allowed=allowed)
    if differ_in_vocabulary(ours, theirs):
        models = {"base": base, "experts": (expert,)}
        hint = phrase("{align} gives them one vocabulary", align=call("align", **models))
    return hint_for_scales(base, _types(records), expert, _types(found)) or hint


def _shapes(tensors: Mapping[str, tuple[TensorId, Tensor]]) -> dict[str, tuple[int, ...]]:
    return {name: record.shape for name, (_, record) in tensors.items()}


def _types(tensors: Mapping[str, tuple[TensorId, Tensor]]) -> dict[str, str]:
    return {name: record.dtype for name, (_, record) in tensors.items()}


def odd_types(base: Tensor, other: Tensor) -> set[str]:
    """Return element types without arithmetic here of tensors that differ; none if they may."""
    types = {base.dtype, other.dtype} - ITEMSIZES.keys()
    return types if types and other != base and 0 not in base.shape else set()


def _require_types(
    base_records: Mapping[str, tuple[TensorId, Tensor]],
    records: Mapping[str, tuple[TensorId, Tensor]],
    names: Sequence[str],
    *,
    base: str,
    where: str,
) -> None:
    """Raise Incompatible if elements differ from the base's that have no arithmetic here."""
    odd = {
        name: types
        for name in names
        if (types := odd_types(base_records[name][1], records[name][1]))
    }
    if odd:
        from mstore.merge.planning.castable import hint_for_types

        kinds = sorted(set().union(*odd.values()))
        pairs = [(base_records[name][1].dtype, records[name][1].dtype) for name in odd]
        skip = phrase(
            "{skip} leaves them as they are in the base",
            skip=Option("skip", next(iter(odd)) if len(odd) == 1 else ("PATTERN",)),
        )
        raise Incompatible(
            f"elements of {', '.join(kinds)} cannot be merged, and have other values than "
            f"in {base}: {few(list(odd))}",
            where=where,
            hint=joined(hint_for_types(base, where, pairs), skip, between="; "),
        )


def _without_nan(histogram: Histogram) -> Histogram:
    """Drop NaNs: a NaN exceeds no threshold, so it is never kept and uses up no quota."""
    if not len(histogram.bins) or histogram.bins[-1] < NAN_BIN:
        return histogram
    counted = histogram.bins < NAN_BIN
    return Histogram(histogram.bins[counted], histogram.counts[counted], histogram.inexact[counted])


def coarsen(rows: np.ndarray[Any, Any], factor: int) -> np.ndarray[Any, Any]:
    """Merge the rows of `factor` chunks each into one; drops the sketch."""
    if factor == 1:
        return rows
    starts = np.arange(0, len(rows), factor)
    coarse = np.zeros(len(starts), dtype=CHUNK)
    for name in ("nonzeros", "sum_abs", "sum_squares", "base_squares"):
        coarse[name] = np.add.reduceat(rows[name], starts)
    coarse["max_abs"] = np.maximum.reduceat(rows["max_abs"], starts)
    return coarse


def left_out_names(
    first: Mapping[str, str],
    only: Sequence[str],
    skip: Sequence[str],
    *,
    others: Collection[str] = (),
) -> dict[str, str]:
    """Return the tensors that patterns leave to the base, and why; by the first of their names.

    A tensor of several names is skipped if one of them is to be skipped, and merged if at least one
    is to be merged.  Raises BadRequest for a pattern that matches neither a tensor nor one of
    `others`, which experts have.
    """
    require_matches({*first, *others}, only, skip)
    left_out = {}
    if only:
        wanted = {first[name] for name in matching(first, only)}
        left_out = dict.fromkeys(set(first.values()) - wanted, NOT_AMONG_ONLY)
    skipping = Globs(skip)
    for name, tensor in first.items():
        number = skipping.first(name)
        if number is not None:
            left_out[tensor] = skipped(skip[number])
    return left_out


def _by_chunk(lengths: Counts, blocks: int) -> Counts:
    """Return the sums of the lengths of blocks, `blocks` to a chunk; fewer in the last."""
    if blocks == 1:
        return lengths
    return np.add.reduceat(lengths, np.arange(0, len(lengths), blocks))


def _fits(table: DeltaTable, base: Tensor, chunk: int) -> bool:
    return table.elements == math.prod(base.shape) and chunk % table.chunk_elements == 0
