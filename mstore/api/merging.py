"""Calls about merging: plan, merge, and report on both.

Part of `mstore.api.Store`, which combines all parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from msgspec.structs import replace

from mstore.api.exchanging import Exchanging
from mstore.api.open_store import thread_count
from mstore.checkpoint.models import split_name
from mstore.store import contents, refs
from mstore.store import layout as layouts
from mstore.store.contents import placing_damage
from mstore.store.models import tensors_of, with_model
from mstore.store.objects.plan import Plan
from mstore.store.objects.snapshot import PREPARE
from mstore.terms.errors import BadRequest, GateFailed
from mstore.terms.ids import ManifestId, PlanId, Revision, SnapshotId
from mstore.terms.phrases import Option, call, phrase

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from mstore.blocks.schema import PlanInputs
    from mstore.merge.analysis.blame import BlameReport
    from mstore.merge.analysis.compatibility import CompatibilityReport
    from mstore.merge.analysis.explain import Explanation
    from mstore.merge.analysis.sweep import SweepReport
    from mstore.merge.methods.registry import MethodReport
    from mstore.merge.planning.costs import Costs
    from mstore.merge.planning.recipes import Preparation, PreparedModel
    from mstore.merge.planning.report import PlanReport
    from mstore.merge.planning.request import Request
    from mstore.merge.planning.warnings import MergeWarning
    from mstore.merge.running.commit import Merged, MergeReport, ReplayReport
    from mstore.merge.running.delivery import Delivery
    from mstore.merge.running.outstanding import Outstanding
    from mstore.merge.running.runners import Workers
    from mstore.merge.virtual.deferred import MaterializeReport
    from mstore.models.neurons.permute import PermuteReport
    from mstore.models.vocabulary.align import AlignReport
    from mstore.models.vocabulary.transplant import TransplantReport
    from mstore.store.models import Input
    from mstore.terms.report import ProgressCallback
    from mstore.terms.requests import (
        Experts,
        MergeRequest,
        RecipeRequest,
        TensorRule,
        Transplant,
        Vocabulary,
    )

T = TypeVar("T")


class Merging(Exchanging):
    """Calls about merging: plan, merge, and report on both."""

    def plan(
        self,
        request: MergeRequest,
        *,
        allow_noop: bool = False,
        keep: bool = False,
        threads: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> PlanReport:
        """Plan a merge and store the plan.  The same request gives the same plan.

        allow_noop: also store a plan that reads nothing of what experts changed, or whose result is
        the base.
        keep: for a merge that follows: the plan must be stored, so if this user may only read the
        store, raise before anything is read; and what the memo table saves is not looked up, as
        the merge tells it.  Without it, such a user's plan and newly computed statistics are not
        stored (`PlanReport.kept`).

        Raises BadRequest, NotFound, Incompatible, StorageFailed; then no plan is stored.
        """
        from mstore.merge.planning.report import plan_report
        from mstore.merge.planning.session import plan_of_request

        began = time.monotonic()
        if keep:
            layouts.require_writable(self._catalog.layout)
        resolved = self._resolved(request)
        with placing_damage(self._catalog, _inputs(resolved)):
            made = plan_of_request(
                self._catalog,
                self._statistics,
                self._memo,
                resolved,
                allow_noop=allow_noop,
                threads=thread_count(threads),
                progress=progress,
            )
        id = made.plan.id()
        left = None if keep else self._outstanding(made.plan, made.costs)
        if not made.is_stored:
            self._unkept[id] = made.plan, made.sources
        return plan_report(
            made.plan,
            id,
            made.sources,
            made.costs,
            analyzed=made.analyzed,
            factors=made.factors,
            memo=left.saved if left else 0,
            not_here=left.not_here if left else 0,
            warnings=self._warnings(id, made.plan, made.sources),
            kept=made.is_stored,
            seconds=time.monotonic() - began,
        )

    def read_recipe(
        self,
        text: str,
        *,
        where: str = "the recipe",
        models: Mapping[str, str] | None = None,
        document: int | None = None,
        strict: bool = False,
    ) -> RecipeRequest:
        """Return the merge that a recipe asks for, of mergekit (YAML) or sd-mecha (.mecha).

        where: the name of its file, for errors, which name the line too.
        models: revisions by the recipe's names of models; other names are revisions themselves,
        and files (DIRECTORY/NAME.safetensors) the branches of their names.
        document: which one, from 0, where there are several in the text.  One may name the merge
        of another: give its revision in `models`.
        strict: whether to refuse keys and parameters that mergekit ignores, such as misspelt ones,
        and what mstore makes otherwise than sd-mecha; else a warning names each with its line.

        The request may be changed before it is planned: `dataclasses.replace(found.request,
        budget="30%")`.

        Raises BadRequest for what is no recipe or not supported, NotFound for an unknown model, or
        one that `prepare_recipe` must make first.
        """
        from mstore.merge.planning.recipes import request_of

        return request_of(
            self._catalog, text, where=where, models=models or {}, document=document, strict=strict
        )

    def shuffle(self, experts: Experts, *, seed: int = 0, full_random: bool = False) -> str:
        """Return the recipe of a stack whose layers are drawn from models, for `read_recipe`.

        experts: the models, as for `MergeRequest`. The layer at each place is that of one of them,
        drawn by weight; embeddings are from the model of the first layer, norm and head from that
        of the last, and all other files from the first expert.
        seed: equal arguments give equal recipes.
        full_random: int(layers * weight) layers of each model instead, each drawn from all of its
        layers, in an order that is drawn.

        Raises BadRequest, NotFound.
        """
        from mstore.merge.recipes.shuffle import Shuffled, shuffled
        from mstore.terms.requests import weighted

        models = []
        for revision, weight in weighted(experts):
            name = revision if isinstance(revision, str) else self._whole(revision).name
            # A model with an adapter (MODEL+ADAPTER) has the layers of the model.
            layers = self._layers_of(name.partition("+")[0])
            if layers is None:
                raise BadRequest("it has not one stack of layers", where=name)
            models.append(Shuffled(name, weight, layers))
        return shuffled(models, seed, full_random=full_random)

    def block_rules(
        self,
        base: Revision,
        experts: Experts,
        blocks: Sequence[str | Sequence[float] | Mapping[str, float]],
    ) -> tuple[TensorRule, ...]:
        """Return the rules of a merge whose weights differ by network block of an image model.

        base, experts: as for `MergeRequest`; give it the rules, too.
        blocks: once for all experts, or for each, the weights of the blocks: numbers in the order
        of the layout (`network_blocks`), or by name or pattern, or either as text. The weight of an
        expert in a block is its own, times that of the block.

        Raises BadRequest, Incompatible (no image model that is known), NotFound.
        """
        from mstore.models.network_blocks import layout_of
        from mstore.terms.requests import weighted

        asked = self._whole(base)
        tensors = tensors_of(self._catalog, self._catalog.manifest_of(asked.snapshot))
        if asked.model is not None:
            tensors = {one: id for one, id in tensors.items() if split_name(one)[0] == asked.model}
        layout = layout_of(tensors, asked.name)
        weights = [weight for _, weight in weighted(experts)]
        told = [layout.weights(one) for one in blocks]
        if len(told) not in (1, len(weights)):
            raise BadRequest(
                f"weights of blocks are given once or once for each expert, not {len(told)} times",
                where=Option("blocks"),
            )
        return layout.rules(weights, told * len(weights) if len(told) == 1 else told)

    def _layers_of(self, revision: Revision) -> int | None:
        """Return how many layers the main stack of a model has; None if it has none, or several."""
        from mstore.merge.planning.recipes import layers_in

        snapshot = self._whole(revision).snapshot
        return layers_in(self._catalog, self._catalog.snapshot(snapshot).manifest_id())

    def prepare_recipe(
        self,
        text: str,
        *,
        where: str = "the recipe",
        models: Mapping[str, str] | None = None,
        document: int | None = None,
        strict: bool = False,
        allow_nonfinite: bool = False,
        threads: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> tuple[PreparedModel, ...]:
        """Make the models that must exist before a recipe can be read.  Most need none.

        Arguments as for `read_recipe`, which then finds them.  Two kinds are made, each by a merge
        of its own, on a branch below `prepared/`: stacks of layers, where slices with other layers
        are merged or scaled (headers are all that is stored), and models with an adapter
        applied, where that adapter is not one of the base.  What is there already stays.
        allow_nonfinite: as for `merge`.

        Raises what `read_recipe`, `plan` and `merge` raise.
        """
        from mstore.merge.planning.recipes import preparations

        found = preparations(
            self._catalog, text, where=where, models=models or {}, document=document, strict=strict
        )
        return self._prepared(
            found, allow_nonfinite=allow_nonfinite, threads=threads, progress=progress
        )

    def _prepared(
        self,
        needed: Sequence[Preparation],
        *,
        allow_nonfinite: bool,
        threads: int | None,
        progress: ProgressCallback | None,
    ) -> tuple[PreparedModel, ...]:
        """Make models that something else is made of, in order.  Raises as `plan` and `merge`."""
        from mstore.merge.running.commit import run_merge
        from mstore.store.plans import sources_of

        made = []
        for one in needed:
            plan = self.plan(one.request, allow_noop=True, threads=threads, progress=progress)
            layouts.require_writable(self._catalog.layout)
            record = self._catalog.record(Plan, plan.plan)
            merged = run_merge(
                self._catalog,
                record,
                sources_of(self._catalog, plan.plan, record),
                name=one.ref,
                message=one.name,
                made=PREPARE,
                allow_nonfinite=allow_nonfinite,
                threads=thread_count(threads),
                progress=progress,
                memo=self._memo,
            )
            made.append(
                one.made(merged.snapshot, is_new=merged.is_new, written=merged.bytes_written)
            )
        return tuple(made)

    def align(
        self,
        request: MergeRequest,
        vocabulary: Vocabulary,
        *,
        progress: ProgressCallback | None = None,
    ) -> AlignReport:
        """Store base and experts of a merge again, so that a token has one row in all of them.

        request: names the models; its other fields are only checked, as far as possible.  With
        REF:MODEL of a pipeline, the tokenizer of `text_encoder_2` is that in `tokenizer_2`, all
        forms of the model are rewritten (`@fp16`), and what else the snapshot has stays.

        Reads the models' tokenizer.json.  A model with another vocabulary is stored on a branch
        below `aligned/`: its embeddings are rewritten, its other tensors are shared, and tokenizer
        and config become those of the vocabulary.  Where a model lacks a token, the row is that of
        the only other model that has it, else the base's, else the mean of those that have it, else
        zeros.  Models that fit stay as they are.  `AlignReport.applied` returns the request with
        the aligned models.

        Raises BadRequest, NotFound, Incompatible (a model without embeddings or tokenizer),
        Conflict, Corrupt, StorageFailed; then nothing is published.
        """
        from mstore.models.vocabulary.align import align

        # Nothing is stored for a merge that cannot be planned.
        resolved = self._resolved(request)
        if resolved.companions:
            raise BadRequest(
                "companions are those of models with the tokens that they have now",
                where=Option("vocabulary"),
                hint=phrase(
                    "{align} first, then companions of the aligned models", align=call("align")
                ),
            )
        models = [resolved.base, *resolved.experts]
        with contents.held(self._catalog, _inputs(resolved)):
            return align(self._catalog, vocabulary, models, self._input, progress=progress)

    def transplant(
        self,
        model: Revision,
        asked: Transplant,
        *,
        name: str,
        message: str = "",
        threads: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> TransplantReport:
        """Store a model with the tokens of another, the donor, on the branch `name`.

        Its tokenizer is the donor's, with the ids in configs that go with it.  Rows of tokens that
        both have are the model's own; the others are made as `Transplant.approximation` says.  All
        other tensors are shared with the model, which needs no training to be tried: as a draft
        model for speculative decoding of the donor, for example.  Tokens are the same if they write
        the same bytes, or are what the other has to begin, end or pad a text.

        What new rows are made of is stored on a branch below `prepared/`, and taken from there the
        next time.  threads: the most to use; None means one per processor.  Memory: the embeddings
        of both, mapped; `omp` has the donor's rows in float32, and 200 MB for each thread.

        Raises BadRequest, NotFound, Incompatible (no tokenizer.json, no embeddings, no token in
        both), BadName, Conflict, Corrupt, StorageFailed; then nothing is on the branch.
        """
        from mstore.models.vocabulary.transplant import transplant

        layouts.require_writable(self._catalog.layout)
        own, donor = self._input(model), self._input(asked.donor)
        with contents.held(self._catalog, [own.snapshot, donor.snapshot]):
            return transplant(
                self._catalog,
                asked,
                own,
                donor,
                name,
                message=message,
                threads=thread_count(threads),
                progress=progress,
            )

    def permute(
        self,
        model: Revision,
        *,
        name: str,
        to: Revision | None = None,
        permutation: Revision | None = None,
        message: str = "",
        progress: ProgressCallback | None = None,
    ) -> PermuteReport:
        """Store a model on the branch `name`, its neurons in the order of another model's.

        For models of different pretraining, which have the same channels, neurons and heads at
        other places: merge the result with the other model.  Fine-tunes of one base are aligned.
        The residual stream, the neurons of each MLP, the groups of heads and the heads in them get
        another order, and channels another sign, as far as the model computes the same then:
        elements are moved and signs flipped.  Architectures: llama, mistral, qwen2, qwen3, gpt2,
        vit; types: BF16, F16, F32.

        to: the model whose order it gets, by weight matching; that needs scipy.  What is found is
        stored on a branch below `prepared/`, and taken from there the next time.
        permutation: in its place, such a branch: for the fine-tunes of a model that was permuted.
        message: the reason, in words.

        Memory: two tensors as they are stored, and of the largest MLP a matrix of neurons x neurons
        in float64, which for 14,336 neurons is 1.6 GB.

        Raises BadRequest, NotFound, Incompatible (other architectures, sizes or types, an adapter,
        models that are aligned already), Unavailable (scipy is missing), BadName, Conflict,
        Corrupt, StorageFailed; then nothing is on the branch.
        """
        from mstore.models.neurons.permute import permute

        layouts.require_writable(self._catalog.layout)
        given, *others = (
            None if one is None else self._input(one) for one in (model, to, permutation)
        )
        assert given is not None
        used = [one.snapshot for one in (given, *others) if one is not None]
        with contents.held(self._catalog, used):
            return permute(
                self._catalog,
                given,
                name,
                to=others[0],
                permutation=others[1],
                message=message,
                progress=progress,
            )

    def check_merge(self, request: MergeRequest) -> CompatibilityReport:
        """Report whether base and experts of a request can be merged, and what is risky about it.

        Compares names, shapes, element types, architectures and settings in configs, vocabularies,
        tokenizers, chat templates, and the licences that model cards state.  Tells from statistics
        and lineage how far experts moved, whether one seems to be no fine-tune of the base, and
        where elements are infinite or NaN.  Reads no weights.

        Raises BadRequest, NotFound, Incompatible (a tokenizer.json that is none), Corrupt.
        """
        from mstore.merge.analysis.compatibility import check_merge

        resolved = self._resolved(request)
        with placing_damage(self._catalog, _inputs(resolved)):
            return check_merge(self._catalog, self._statistics, resolved)

    def recipe(self, revision: Revision) -> str:
        """Return the recipe of a merged snapshot, in mergekit's YAML, from its plan.

        Models are named by refs of this store, with the ids of their contents as comments; by
        these where they have no ref.  `read_recipe` takes both.  With the same budget and limits,
        the request of the recipe gives the same plan.  The file mergekit_config.yml of the snapshot
        is the same with ids alone.  That of a mixture of experts is the one that it was made from,
        as it was written, for `plan_moe`, after comments with the ids of its models.  If the method
        is of a package that is not installed, the recipe is that of the snapshot's file.

        Raises NotFound, BadName, BadRequest (no merge made it, or no recipe can state it), and
        Unavailable (there is neither package nor file).
        """
        from mstore.merge.planning.recipe_text import printed_recipe
        from mstore.store.plans import plan_of

        id = self._catalog.resolve(revision)
        snapshot = self._catalog.snapshot(id)
        plan = plan_of(id, snapshot, so="there is no recipe")
        try:
            record = self._catalog.record(Plan, plan)
            return printed_recipe(self._catalog, record, snapshot.manifest_id())
        except BadRequest as error:
            if error.where is None:
                error.locate(str(revision))
            raise

    def sweep(
        self,
        request: MergeRequest,
        *,
        shares: Sequence[float] | None = None,
        measure: bool = False,
        threads: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> SweepReport:
        """Compute the cost and error of merges at many budgets; stores nothing but statistics.

        request: without a budget and without max_error; the sweep varies these itself.
        shares: budgets as shares of the full cost, above 0 and at most 1; None uses 5 % to 100 %.
        measure: also run the merges in memory and compare them with the full one; this reads all
        experts once.

        Each point is the plan that `plan` makes with that budget.

        Raises BadRequest, NotFound, Incompatible.
        """
        from mstore.merge.analysis.sweep import SHARES, check_shares, sweep
        from mstore.merge.planning.session import Planning

        wanted = check_shares(SHARES if shares is None else shares)
        resolved = self._resolved(request)
        if request.budget is not None or request.max_error is not None:
            raise BadRequest("a sweep goes over budgets itself: leave out budget and max_error")
        if request.layers:
            raise BadRequest("layers are stacked as they are: there are no budgets to go over")
        number = thread_count(threads)
        with placing_damage(self._catalog, _inputs(resolved)):
            return sweep(
                Planning(
                    self._catalog, self._statistics, resolved, threads=number, progress=progress
                ),
                wanted,
                outstanding=lambda one: self._outstanding(one.plan, one.costs),
                measure=measure,
                threads=number,
                progress=progress,
            )

    @staticmethod
    def methods(name: str | None = None) -> tuple[MethodReport, ...]:
        """Describe the merge methods, also those of other packages.

        name: describe only this one.  In the list, one that cannot be loaded has a remark.

        Raises BadRequest for an unknown name, Unavailable for a named one that cannot be loaded.
        """
        from mstore.merge.methods import registry

        return registry.methods() if name is None else (registry.method(name),)

    def plans(self) -> list[PlanReport]:
        """Return every stored plan, sorted by base, method and cost."""
        from mstore.merge.planning.report import plan_reports

        return plan_reports(self._catalog)

    def _resolved(self, request: MergeRequest) -> Request:
        from mstore.merge.planning.flatten import flattened
        from mstore.merge.planning.request import resolve
        from mstore.terms.requests import require_types

        require_types(request)
        inputs = self._inputs_of(request)
        stored = flattened(self._catalog, request, inputs)
        if stored is not request:
            request, inputs = stored, self._inputs_of(stored)
        base, *experts = map(self._mergeable, inputs)
        return resolve(
            request,
            base=with_model(self._catalog, base, experts),
            experts=experts,
            companions={key: self._input(one) for key, one in request.companions.items()},
        )

    def _inputs_of(self, request: MergeRequest) -> list[Input]:
        """Return the base and the experts, which may be virtual."""
        return [self._whole(one) for one in (request.base, *(r for r, _ in request.weighted()))]

    def _warnings(self, id: PlanId, plan: Plan, sources: PlanInputs) -> tuple[MergeWarning, ...]:
        """Return the warnings that need more than the plan."""
        from mstore.merge.planning import warnings
        from mstore.merge.running.model_card import licence_warnings

        key = (id, *(source.name for source in (sources.base, *sources.experts)))
        if key not in self._plan_warnings:
            about = self._catalog, plan, sources
            self._plan_warnings[key] = (
                *warnings.senseless(self._catalog, self._statistics, plan, sources),
                *warnings.adapters_of_other_bases(*about),
                *warnings.text_encoders_left_out(*about),
                *warnings.tokens_in_other_rows(*about),
                *warnings.other_tensors(*about),
                *warnings.other_models(*about),
                *warnings.equal_companions(*about),
                *warnings.unmixed(self._catalog, self._statistics, plan, sources),
                *warnings.heads_of_their_own(*about),
                *warnings.stack_warnings(self._catalog, plan),
                *licence_warnings(*about),
            )
        return self._plan_warnings[key]

    def _outstanding(self, plan: Plan, costs: Costs) -> Outstanding:
        """Return what a merge of a plan would read right now."""
        from mstore.merge.running.outstanding import outstanding

        return outstanding(self._catalog, self._memo, plan, costs.planned)

    def export_plan(self, plan: PlanReport | PlanId | str) -> str:
        """Return a plan as JSON text, also a plan of this object that was not stored.

        plan: what `plan` returned, or the id (or id prefix) of a plan.

        Raises NotFound, BadName.
        """
        from mstore.merge.analysis.exchange import export_plan, plan_text

        wanted = str(getattr(plan, "plan", plan))
        for id, (unkept, sources) in self._unkept.items():
            if wanted == id.hex():
                return plan_text(unkept, id, sources)
        return export_plan(self._catalog, wanted)

    def import_plan(self, text: str) -> PlanReport:
        """Store a plan that `export_plan` wrote.

        Raises BadRequest (not a plan), NotFound (an input is not in this store).
        """
        from mstore.merge.analysis.exchange import import_plan

        return import_plan(self._catalog, text)

    def merge(
        self,
        plan: PlanReport | PlanId | str,
        *,
        name: str,
        candidate: str | None = None,
        message: str = "",
        virtual: bool = False,
        allow_noop: bool = False,
        allow_nonfinite: bool = False,
        threads: int | None = None,
        memo: bool = True,
        memory: int | None = None,
        codec: str | None = None,
        cluster: str | Executor | None = None,
        remote: str | None = None,
        push: bool = False,
        progress: ProgressCallback | None = None,
    ) -> MergeReport:
        """Run a stored plan and publish the result under the ref `name`, or publish nothing.

        plan: what `plan` returned, or the id (or id prefix) of a stored plan.
        candidate: a word for this run.  Then the result is published as the run's candidate for the
        branch, `candidates/RUN/NAME`, and the branch stays: test the result, then `move` the branch
        to it, or `remove` the candidate.  Until this store is closed, and for `reflog_days` after
        the merge, gc keeps it.
        message: the reason, in words.
        virtual: publish the plan itself; blocks are computed when they are read, and `materialize`
        computes all of them.
        allow_noop: also run a plan, named by its id, that reads nothing or whose result is the
        base; a plan that `plan` returned was already allowed there.
        allow_nonfinite: also publish a result with elements that are infinite or NaN, and are
        finite in all inputs.  Of a virtual merge nobody knows yet: `materialize` asks.
        threads: the most threads to use; None means one per processor, or one per slice on a
        cluster.  The result is the same for any number.
        memo: reuse outputs of earlier merges from the memo table, and add to it.
        memory: the most anonymous memory in bytes; None means 512 MiB.
        codec: how new blocks are stored: auto, raw or dense; None uses the store's setting.  The
        result is the same.  A virtual merge stores none.
        cluster: where slices are computed: an address (`local:4`, `tcp://HOST:8786`, `dask:FILE`,
        `ray:auto`, `ray://HOST:10001`, `slurm:PARTITION`), or a `concurrent.futures.Executor`.
        `threads` and `memory` then hold for each slice: a worker that computes several at a time
        may take as much for each.
        remote: with a cluster, the remote where workers read packs and put new ones; then the packs
        come here.  None: they read and write the store's directory, which they must see.
        push: leave the packs at the remote and move its branch `name`; then nothing is published
        here, but where the remote is lazy the branch moves here, too.

        Raises NotFound, BadRequest, BadName, Incompatible (new elements that are not finite),
        Conflict (the ref moved meanwhile), Corrupt, BudgetExceeded (a read outside the plan),
        Interrupted (the workers lost a slice), Unavailable (a cluster or a remote), StorageFailed.
        """
        from mstore.merge.planning.costs import Costs, costs_to_report
        from mstore.merge.planning.report import PlanReport, plan_report
        from mstore.merge.planning.validate import require_effect
        from mstore.merge.planning.warnings import moved_inputs
        from mstore.merge.running.commit import merge_report, run_merge
        from mstore.store.plans import find, sources_of

        began = time.monotonic()
        layouts.require_writable(self._catalog.layout)
        policy = self._policy(codec)
        called = name if candidate is None else refs.below(refs.CANDIDATE, candidate, name)
        if virtual and codec is not None:
            raise BadRequest(
                "a virtual merge stores no blocks, so none has a codec",
                where=Option("codec"),
                hint=phrase("leave out {codec}", codec=Option("codec")),
            )
        planned = plan if isinstance(plan, PlanReport) else None
        id = find(self._catalog, str(plan)) if planned is None else planned.plan
        record = self._catalog.record(Plan, id)
        if not allow_noop and planned is None:
            require_effect(self._catalog, record)
        sources = sources_of(self._catalog, id, record)
        told = self._warnings(id, record, sources)
        analyzed = 0 if planned is None else planned.analyze_bytes_read
        if virtual:
            from mstore.merge.virtual.deferred import commit_virtual

            deferred = commit_virtual(
                *(self._catalog, record, sources),
                name=name,
                message=message,
                candidate=candidate,
            )
            told += moved_inputs(sources, called) if deferred.is_new else ()
            costs = (
                costs_to_report(self._catalog, record)
                if planned is None
                else Costs(planned.full_expert_bytes, planned.planned_expert_bytes)
            )
            report = plan_report(record, id, sources, costs, warnings=told)
            seconds = time.monotonic() - began
            return merge_report(report, deferred, name=called, analyzed=analyzed, seconds=seconds)
        requests, received = self._traffic()

        def run(workers: Workers | None, delivery: Delivery | None, most: int) -> Merged:
            return run_merge(
                self._catalog,
                record,
                sources,
                name=name,
                candidate=candidate,
                message=message,
                allow_nonfinite=allow_nonfinite,
                threads=most,
                progress=progress,
                memo=self._memo if memo else None,
                memory=memory,
                workers=workers,
                delivery=delivery,
                policy=policy,
            )

        if push and candidate is not None:
            raise BadRequest(
                "a candidate is of this store, and is not pushed", where=Option("candidate")
            )
        where = _Where(cluster, remote, push, threads, memory)
        merged = self._run(run, where, record.manifest_ids, progress)
        if push:
            self._take_pushed(remote or "", name)
        told += moved_inputs(sources, called) if merged.is_new else ()
        outcome = merged.outcome
        base, made = self._catalog.manifest(record.base_id()), outcome.manifest
        planned = plan_report(
            *(record, id, sources, outcome.costs),
            not_finite=merged.not_finite,
            warnings=told,
        )
        if tensors_of(self._catalog, made) == tensors_of(self._catalog, base):
            equal = "every tensor of the result equals the base's"
            planned = replace(planned, remarks=(*planned.remarks, equal))
        if codec == "raw":
            coded = self._still_coded(made.files, outcome.blocks_total, called)
            planned = replace(planned, remarks=planned.remarks + coded)
        after = self._traffic()
        return merge_report(
            *(planned, merged),
            name=called,
            analyzed=analyzed,
            seconds=time.monotonic() - began,
            remote=(after[0] - requests, after[1] - received),
            pushed_to=remote if push else None,
        )

    def _run(
        self,
        run: Callable[[Workers | None, Delivery | None, int], T],
        where: _Where,
        inputs: Callable[[], Iterable[ManifestId]],
        progress: ProgressCallback | None,
    ) -> T:
        """Run a plan here, or on a cluster.  inputs: of the plan."""
        from mstore.merge.running.engine import MEMORY
        from mstore.merge.running.slices import SLICE_BYTES
        from mstore.store.leaning import leaning_of, require_here

        if where.cluster is None:
            if where.remote is not None or where.push:
                raise BadRequest(
                    "a merge on this machine reads and writes this store",
                    where=Option("remote" if where.remote is not None else "push"),
                    hint=Option("cluster", "local:2"),
                )
            return run(None, None, thread_count(where.threads))
        from mstore.clusters.merging import on_cluster

        if where.remote is None:
            read = map(self._catalog.manifest, inputs())
            for leaning in (leaning_of(self._catalog, one) for one in read):
                require_here(
                    leaning,
                    "let workers read what is not here",
                    hint=Option("remote", leaning[0].remote) if leaning else None,
                )
        return on_cluster(
            self._catalog,
            where.cluster,
            lambda engine, delivery: run(
                engine,
                delivery,
                engine.threads if where.threads is None else thread_count(where.threads),
            ),
            remote=where.remote,
            push=where.push,
            opens=self._remote,
            memory=MEMORY if where.memory is None else where.memory,
            slice_bytes=SLICE_BYTES,
            progress=progress,
        )

    def materialize(
        self,
        name: str,
        *,
        message: str = "",
        allow_nonfinite: bool = False,
        threads: int | None = None,
        cluster: str | Executor | None = None,
        remote: str | None = None,
        push: bool = False,
        progress: ProgressCallback | None = None,
    ) -> MaterializeReport:
        """Compute the virtual merge at a branch in full and move the branch to the result.

        The content equals that of an ordinary merge of the same plan.  The message stays unless a
        new one is given.

        allow_nonfinite, cluster, remote, push: as for `merge`.

        Raises NotFound, BadRequest (not a branch), Incompatible (new elements that are not finite),
        Conflict (a tag, or it moved), GateFailed (a gate guards the branch, and the result is new),
        and what `merge` raises on a cluster.
        """
        from mstore.merge.virtual.deferred import materialize
        from mstore.store.gates import required

        if required(self._catalog.config, name):
            raise GateFailed(
                "a gate guards this branch, and what materialize makes is new: nothing has judged "
                "it",
                where=name,
                hint=call("merge", plan=name, name=name),
            )

        def run(workers: Workers | None, delivery: Delivery | None, most: int) -> MaterializeReport:
            return materialize(
                self._catalog,
                self._memo,
                name,
                message=message,
                allow_nonfinite=allow_nonfinite,
                threads=most,
                workers=workers,
                delivery=delivery,
                progress=progress,
            )

        def inputs() -> Iterable[ManifestId]:
            plan = self._catalog.snapshot(self._catalog.resolve(name)).plan_id()
            return () if plan is None else self._catalog.record(Plan, plan).manifest_ids()

        where = _Where(cluster, remote, push, threads, None)
        report = self._run(run, where, inputs, progress)
        if not push or not report.new_snapshot:
            return report
        self._take_pushed(remote or "", name)
        return replace(report, pushed_to=remote)

    def explain(self, revision: Revision, tensor: str | None = None) -> Explanation:
        """Report which experts made a merge, block by block, and what was left out and why.

        Reads no block.

        tensor: report only this one, with the fate of each of its chunks.

        Raises BadRequest if it is not a merge, NotFound, BadName.
        """
        from mstore.merge.analysis.explain import explain

        return explain(self._catalog, self._statistics, self._catalog.resolve(revision), tensor)

    def blame(
        self,
        revision: Revision,
        tensor: str | None = None,
        *,
        threads: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> BlameReport:
        """Measure each expert's share of what a merge changed, by running its plan again.

        tensor: measure only this one.

        Raises BadRequest (not a merge), NotFound (an unknown revision or tensor), Corrupt.
        """
        from mstore.merge.analysis.blame import blame
        from mstore.snapshots.notes import culprit_on

        snapshot = self._catalog.resolve(revision)
        report = blame(
            self._catalog, snapshot, tensor, threads=thread_count(threads), progress=progress
        )
        return replace(report, culprit=culprit_on(self._catalog, snapshot))

    def replay(
        self,
        revision: Revision,
        *,
        threads: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> ReplayReport:
        """Run a merge's recorded plan again and compare the results.

        Raises BadRequest (not a merge, or a virtual one, which has no bytes to compare with),
        NotFound, Corrupt.
        """
        from mstore.merge.running.commit import replay

        id = self._real(revision)
        return replay(self._catalog, id, threads=thread_count(threads), progress=progress)


class _Where(NamedTuple):
    """Where a merge is computed, and by what means; as `Merging.merge` takes it."""

    cluster: str | Executor | None
    remote: str | None
    push: bool
    threads: int | None
    memory: int | None


def _inputs(asked: Request) -> list[SnapshotId]:
    """Return the snapshots of a request's base and experts."""
    return [asked.base.snapshot, *(expert.snapshot for expert in asked.experts)]
