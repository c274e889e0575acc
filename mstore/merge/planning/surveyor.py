"""The survey: everything that the planner needs to know, gathered from the catalog.

Compares block lists, looks up what blocks cost to read, and fetches the statistics of each expert's
delta.  Missing statistics are computed now, with their reads metered separately, unless the request
forbids it.  After this, planning reads nothing from disk.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mstore.blocks.reader import Meter
from mstore.checkpoint.models import split_name
from mstore.merge.measures.grid import Beside, Bools, Companion, Ints, grouped, split
from mstore.merge.methods.method import Operation
from mstore.merge.methods.selection import Measured
from mstore.merge.planning.costs import Comparer
from mstore.merge.planning.request import Request
from mstore.merge.planning.statistics import DeltaStatistics, DeltaSummary
from mstore.merge.planning.survey import (
    NOTHING_KEPT,
    Candidate,
    ExpertTensor,
    Survey,
    SurveyedTensor,
)
from mstore.merge.planning.tensors import (
    RecordsByName,
    first_names,
    hint_for,
    left_out_names,
    require_types,
)
from mstore.merge.recipes.layers import ModelLayers, layers_of
from mstore.models.adapters.inputs import Inputs, Names
from mstore.models.optional import is_optional
from mstore.models.stats.chunk import CHUNK, finite
from mstore.models.stats.chunks import tensor_chunk
from mstore.models.stats.store import StatsStore
from mstore.numeric.codes import ITEMSIZES
from mstore.store.catalog import Catalog
from mstore.store.models import config_of, models_in
from mstore.store.objects.shapes import chosen, require_same_shapes
from mstore.store.objects.tensor import AppliedTensor, Tensor
from mstore.store.tied import ties_embeddings
from mstore.terms.errors import BadRequest, Incompatible
from mstore.terms.ids import ManifestId, TensorId
from mstore.terms.phrases import Option, Text, call, few, phrase
from mstore.terms.report import Progress, ProgressCallback

# Late: most methods need no facts, and most surveys find statistics.
if TYPE_CHECKING:
    from mstore.merge.measures.facts import Facts


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
        self._unreliable: list[tuple[int, str]] = []
        self._base_not_finite: list[str] = []
        self._squares_of: dict[str, float] = {}
        self._copied: list[tuple[str, str]] = []
        self._comparer = Comparer(catalog, request)
        self._deltas = DeltaStatistics(
            catalog, statistics, request, lambda: self._facts, self.factors
        )

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
    def _layouts(self) -> dict[str, ModelLayers]:
        """The layers of each model of the base."""
        catalog, found = self._catalog, {}
        base = catalog.manifest_of(self._request.base.snapshot)
        models = models_in(catalog, base)
        for model in models.named:
            config = config_of(catalog, base, models.config(model))
            found[model] = ModelLayers.of(models.in_model(model), layers_of(config))
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
        inputs = self._inputs_of(base_id, expert_ids, names, fill=request.allow_missing)
        if not request.allow_missing and self._has_optional(inputs):
            inputs = self._inputs_of(base_id, expert_ids, names, fill=True)
        self._inputs = inputs
        records = _tensors(inputs, inputs.base)
        experts, has_missing = self._experts(records)
        tensors: list[SurveyedTensor] = []
        self._require_rules(records)
        tied = ties_embeddings(catalog, base)
        first = first_names(inputs.base, inputs.models, tied=tied)
        others = {name for found in experts for name in found}
        others |= models_in(catalog, base).tensors.keys()
        left_out = left_out_names(
            first, request.only, request.skip, base=request.base.name, others=others
        )
        merged = [name for name in records if first[name] == name and name not in left_out]
        for expert, found in zip(request.experts, experts[: len(inputs.models)], strict=False):
            require_types(records, found, merged, base=request.base.name, where=expert.name)
        copies = Counter(first.values())
        candidates = {
            name: Candidate(name, *records[name], [found[name] for found in experts], copies[name])
            for name in merged
        }
        self._deltas.fetch(candidates.values())
        self._comparer.compare(candidates.values())
        unmeasured = self._unmeasured(candidates.values())
        total = sum(record.nbytes for _, record in records.values()) or 1
        done = 0
        with ThreadPoolExecutor(self._threads, "survey") as pool:
            squares = self._base_squares(records, pool)
            self._deltas.measure_products(candidates.values(), self._comparer.chunk_of, pool)
            for name, (base_tensor, record) in records.items():
                if first[name] == name and name in left_out:
                    there = [found.get(name) for found in experts]
                    if any(one is None or one[0] != base_tensor for one in there):
                        self._copied.append((name, left_out[name]))
                elif first[name] == name:
                    # In the order of the base, which is also the order of the plan and of its
                    # remarks.
                    surveyed = self._tensor(candidates[name], pool)
                    if surveyed is not None:
                        tensors.append(surveyed)
                done += record.nbytes
                if self._progress is not None:
                    self._progress(Progress("plan", done, total))
                    if unmeasured and self.analyzed.total:
                        read = min(self.analyzed.total, unmeasured)
                        self._progress(Progress("statistics", read, unmeasured))
            for name, sources in request.outputs:
                tensors.append(self._output(name, sources, [records, *experts], pool))
        return Survey(
            base=base_id,
            experts=tuple(expert_ids),
            block_size=catalog.block_size,
            tensors=tuple(tensors),
            base_squares=squares,
            copied=tuple(self._copied),
            missing=tuple(self._deltas.missing),
            unreliable=tuple(self._unreliable),
            base_not_finite=tuple(self._base_not_finite),
            idle_rules=self._idle_rules({*first.values()} - left_out.keys()),
            squares=self._squares_of,
            has_missing=has_missing,
            listed=len(request.companions),
            read=tuple([one for one in request.operation.method.companions if one.is_read]),
            without=inputs.without,
        )

    def _inputs_of(
        self, base: ManifestId, experts: Sequence[ManifestId], names: Sequence[str], *, fill: bool
    ) -> Inputs:
        request = self._request
        return Inputs(
            *(self._catalog, base, experts, names),
            choice=request.choice,
            fill=fill,
            companions=request.companions,
            only=request.only,
            skip=request.skip,
        )

    def _has_optional(self, inputs: Inputs) -> bool:
        """Return whether an expert lacks, or has beside the base's, tensors that it may."""
        request = self._request
        for own in inputs.models:
            ids = {**inputs.base, **own}
            odd = dict.fromkeys(inputs.base.keys() ^ own.keys(), ())
            names = list(chosen(odd, request.only, request.skip))
            records = inputs.records([ids[name] for name in names])
            if any(is_optional(name, one.dtype) for name, one in zip(names, records, strict=True)):
                return True
        return False

    def _experts(self, base: RecordsByName) -> tuple[list[RecordsByName], bool]:
        """Return the tensors of experts and companions, and whether one lacks some or has others.

        Raises Incompatible.
        """
        request, inputs = self._request, self._inputs
        experts: list[RecordsByName] = []
        has_missing = False
        ours = chosen(_shapes(base), request.only, request.skip)
        for expert, ids, lacking in zip(
            request.models, inputs.models, inputs.lacking, strict=False
        ):
            found = _tensors(inputs, ids)
            theirs = chosen(_shapes(found), request.only, request.skip)
            lacks = ours.keys() & lacking
            if lacks == ours.keys() and ours:
                raise Incompatible(
                    f"has none of the tensors of {request.base.name} that are merged: it is "
                    "another model",
                    where=expert.name,
                )
            others = theirs.keys() - ours.keys()
            if inputs.fills:
                has_missing |= bool(lacks or others)
                refused = set()
                if not request.allow_missing:
                    odd = lacks | others
                    refused = {one for one in odd if not is_optional(one, found[one][1].dtype)}
                left = (others - refused) | (lacks & refused)
                theirs = {name: shape for name, shape in theirs.items() if name not in left}
            if ours != theirs:
                require_same_shapes(
                    ours,
                    theirs,
                    what=f"cannot be merged into {request.base.name}",
                    where=expert.name,
                    hint=hint_for(request.base.name, expert.name, ours, theirs, base, found),
                )
            experts.append(found)
        for one, numbers in self._split(range(len(inputs.experts))):
            for number in numbers:
                found = _tensors(inputs, inputs.experts[number])
                has_missing |= self._check_companion(one, number, base, found, experts)
                experts.append(found)
        self._require_unlike(base, experts)
        return experts, has_missing

    def _require_unlike(self, base: RecordsByName, members: Sequence[RecordsByName]) -> None:
        """Raise Incompatible for companions that are to be compared, and are equal everywhere."""
        asked = dict(self._split(range(len(members))))
        roles = {one.role: number for one, [number, *_] in asked.items()}
        for one, [number, *_] in asked.items():
            if one.unlike is None:
                continue
            other = roles[one.unlike]
            pairs = [
                (members[number][name][0], members[other][name][0])
                for name, (_, record) in base.items()
                if one.shape(name, record.shape) is not None
                if self._inputs.has(number, name) and self._inputs.has(other, name)
            ]
            if pairs and all(mine == theirs for mine, theirs in pairs):
                names = [self._request.experts[n].name for n in (number, other)]
                raise Incompatible(
                    f"as the {one} equals {names[1]}, the {one.unlike} one, in every tensor that "
                    "they are compared in",
                    where=names[0],
                    hint=Option("companions", {one.role: "REF"}),
                )

    def _unmeasured(self, candidates: Collection[Candidate]) -> int:
        """Tell how many bytes of experts are read because they have no statistics, and return it.

        Only of a lazy store, where they are downloaded; 0 for others: it takes a look at each.
        """
        is_lazy = self._catalog.index.elsewhere is not None
        if self._progress is None or not (is_lazy and self._request.analyze):
            return 0
        total = 0
        for name, expert in self._deltas.unmeasured(candidates):
            compared = self._comparer.found(name)
            if compared is not None:
                _, _, cost = compared[1]
                total += int(cost[expert].sum())
        if total:
            self._progress(Progress("statistics", 0, total))
        return total

    def _split(self, inputs: Sequence[Any]) -> list[tuple[Companion, Sequence[Any]]]:
        """Return what the method asks for with its part of what there is of each expert."""
        request = self._request
        return split(request.operation.method.companions, len(request.models), inputs)

    def _check_companion(
        self,
        one: Companion,
        number: int,
        base: RecordsByName,
        found: RecordsByName,
        models: Sequence[RecordsByName],
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
            if (shape := one.shape(name, record.shape)) is not None
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
        if moved and len(lacks) == len(moved):
            raise Incompatible(
                f"has none of the tensors of {request.base.name} that are merged: it is the {one} "
                "of another model",
                where=where,
            )
        if one.is_optional:
            lacks = []
        others = [
            name
            for name in chosen(_shapes(found), request.only, request.skip)
            if name not in base and name not in sources
        ]
        told = {"lacks": sorted(lacks), "has, and the base does not,": sorted(others)}
        for verb, names in told.items():
            if names and not request.allow_missing:
                allowed = Option("allow_missing", True)
                hint: Text = phrase(
                    "{allowed} leaves an expert out of the tensors that its {role} lacks",
                    allowed=allowed,
                    role=str(one),
                )
                if one.of is None:
                    # Tensors of other names or numbers are mostly those of another model.
                    hint = f"give one of the architecture of {request.base.name}"
                raise Incompatible(
                    f"{verb} {few(names)}: {one.any} has the tensors of the model",
                    where=where,
                    hint=hint,
                )
        for name, shape in shapes.items():
            record = found[name][1]
            is_own = one.is_read or self._inputs.has(number, name)
            if is_own and not one.fits(shape, record):
                whose = "the model's shape" if one.is_read else "the shape"
                lengths = ", ".join("any" if length is None else str(length) for length in shape)
                raise Incompatible(
                    f"{name} is {record.dtype} {list(record.shape)}: {one.any} has {whose} "
                    f"[{lengths}], and is {' or '.join(sorted(one.dtypes))}",
                    where=where,
                    hint=one.made and f"{one.made} makes one",
                )
        return bool(lacks or others)

    def _require_rules(self, records: Collection[str]) -> None:
        """Raise BadRequest for a rule or an output that cannot be what the caller meant."""
        names = {*records, *(name for name, _ in self._request.outputs)}
        pattern = self._request.rules.unmatched(names)
        if pattern is not None:
            raise BadRequest(
                f"no tensor's name matches {pattern!r}",
                where="rules",
                hint=call("tensors", self._request.base.name),
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
        members: Sequence[RecordsByName],
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
        for own, source, (_, record) in zip(inputs, sources, found, strict=True):
            if record.shape != base.shape:
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
        one = Candidate(name, base_id, base, pairs, copies=1)
        surveyed = self._tensor(one, pool, sources=sources)
        if surveyed is None:
            raise BadRequest(
                f"an output is made of floating-point tensors with elements, not of {base.dtype} "
                f"{list(base.shape)}",
                where=name,
            )
        return surveyed

    # -- one tensor --------------------------------------------------------------------------

    def _tensor(
        self, one: Candidate, pool: ThreadPoolExecutor, *, sources: tuple[str, ...] = ()
    ) -> SurveyedTensor | None:
        """Survey one tensor; None for one that is the base's own.

        sources: its names in base and experts, for a tensor that the base does not have.
        """
        name, base_id, base, every, copies = one
        rule = self._request.rule_of(name)
        operation = self._request.operation_of(name)
        dtype = None if rule is None else rule.dtype
        pairs = every[: len(self._request.models)]
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
            facts = self._facts.of(
                *(name, (base_id, base), pairs, pool),
                source=source,
                companions=self._beside(every, named),
            )
            operation, known = operation.measured(facts)
        compared = None if sources else self._comparer.found(name)
        if compared is None:
            records = [record for _, record in pairs]
            read = [own for companion, own in self._split(every) if companion.is_read]
            others = [*records, *(record for own in read for _, record in own)]
            row = operation.row(base.shape)
            chunk = tensor_chunk(self._catalog.block_size, base, others, output, row=row)
            compared = chunk, self._comparer.of(base, records, chunk)
        chunk, (equal, twin, cost) = compared
        if self._request.companions:
            # What is not read is not shared.
            twin = np.where(equal, np.arange(len(pairs))[:, None], twin)
        parts = chunk, equal, twin
        shared, beside = self._together(every, named, operation, parts, pool)
        weightless = operation.weightless
        moving = {
            k: (base_id, id)
            for k, (id, _) in enumerate(pairs)
            if id != base_id and not weightless[k]
        }
        shown = self._deltas.summaries(name, operation, (base_id, base), pairs, moving, chunk, pool)
        none = (NOTHING_KEPT,) * len(operation.selection.ranks(elements))
        still = DeltaSummary(np.zeros(equal.shape[1], dtype=CHUNK), none, is_finite=True)
        is_told = (sources[0] if sources else name) in self._base_not_finite
        experts: list[ExpertTensor] = []
        for number, (id, record) in enumerate(pairs):
            pair = base_id, id
            own = shown.get(number, still)
            rows, cuts = own.rows, own.thresholds
            is_sure = is_told or own.is_finite
            if rows is not None and not (is_sure or (finite(rows) | equal[number]).all()):
                self._unreliable.append((number, name))
            experts.append(
                ExpertTensor(
                    pair,
                    record,
                    equal[number],
                    shared[number],
                    cost[number],
                    rows,
                    cuts,
                    self._deltas.surplus(pair, number, operation, cuts, elements, chunk),
                    # What is measured of the tensor goes before what its table shows.
                    own.band if math.isnan(known.band) else known.band,
                    beside[number],
                    twin[number],
                )
            )
        return SurveyedTensor(
            *(name, base, elements, chunk, tuple(experts)),
            *(copies, operation, sources, dtype, known.planned(len(experts))),
        )

    def _beside(
        self, inputs: Sequence[tuple[TensorId, Tensor]], names: Sequence[str]
    ) -> dict[str, list[tuple[TensorId, Tensor] | None]]:
        """Return the tensors of companions that are facts; None where one has none.

        names: of the tensor in each expert and companion.
        """
        return {
            one.role: [inputs[n] if self._inputs.has(n, names[n]) else None for n in numbers]
            for one, numbers in self._split(range(len(inputs)))
            if not one.is_read
        }

    def _together(
        self,
        inputs: Sequence[tuple[TensorId, Tensor]],
        names: Sequence[str],
        operation: Operation,
        compared: tuple[int, Bools, Ints],
        pool: ThreadPoolExecutor,
    ) -> tuple[Ints, list[tuple[Beside, ...]]]:
        """Return the first expert that shares blocks, and the companions read with each.

        names: as for `_beside`. compared: elements of a chunk, equal and twin of the experts.
        """
        chunk, equal, own = compared
        found, twin = [], [own]
        for one, numbers in self._split(range(len(inputs))):
            if not one.is_read:
                continue
            mates, cost = self._comparer.shared([inputs[n][1] for n in numbers], chunk)
            twin.append(mates)
            role = []
            for k, number in enumerate(numbers):
                is_there, length = self._inputs.has(number, names[number]), equal.shape[1]
                totals = np.full((one.totals, length), np.nan)
                # Where no expert moves, no companion counts.
                if is_there and not equal.all() and not operation.weightless[k]:
                    where = f"{self._request.experts[number].name}: {names[number]}"
                    known = self._facts.totals(one, where, inputs[number], chunk, pool)
                    totals = totals if known is None else known
                size = np.full(length, ITEMSIZES[inputs[number][1].dtype])
                there = np.full(length, is_there)
                role.append(Beside(mates[k], cost[k], totals, size, there))
            found.append(role)
        none: list[tuple[Beside, ...]] = [()] * len(own)
        return grouped(twin) if found else own, [*zip(*found, strict=True)] if found else none

    # -- the base ----------------------------------------------------------------------------

    def _base_squares(self, records: RecordsByName, pool: ThreadPoolExecutor) -> float | None:
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


def _shapes(tensors: RecordsByName) -> dict[str, tuple[int, ...]]:
    return {name: record.shape for name, (_, record) in tensors.items()}
