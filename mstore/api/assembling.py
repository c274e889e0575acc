"""Calls about mixtures of experts, and about many models that share one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from mstore.api.merging import Merging
from mstore.api.open_store import thread_count
from mstore.store import contents
from mstore.store import layout as layouts
from mstore.terms.errors import BadRequest
from mstore.terms.phrases import Option

if TYPE_CHECKING:
    from mstore.blocks.schema import PlanInputs
    from mstore.merge.moe.mixture import ModelCopy
    from mstore.merge.planning.recipes import PreparedModel
    from mstore.merge.planning.report import PlanReport
    from mstore.merge.running.expert_masks import EmrReport
    from mstore.store.models import Input
    from mstore.store.objects.plan import Plan
    from mstore.terms.ids import Revision
    from mstore.terms.report import ProgressCallback
    from mstore.terms.requests import MergeRequest


class Assembling(Merging):
    """Calls about mixtures of experts, and about many models that share one."""

    def prepare_moe(
        self,
        text: str,
        *,
        where: str = "the recipe",
        models: Mapping[str, str] | None = None,
        seed: int = 0,
        threads: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> tuple[PreparedModel, ...]:
        """Make the models that must exist before a mixture can be planned.  Most need none.

        Arguments as for `plan_moe`, which then finds them on branches below `prepared/`: models
        with an adapter (MODEL+ADAPTER), experts with a `noise_scale` or a `residual_scale`, and
        models that are cast, because their elements have another type than the recipe's `dtype`.
        Of a model with several of these, each is made of the one before, in this order, which is
        mergekit's.  What is there already stays.

        Raises what `plan_moe`, `plan`, `merge` and `cast` raise.
        """
        from mstore.merge.moe.mixture import ModelCopy, members
        from mstore.merge.moe.recipe import parse_moe

        layouts.require_writable(self._catalog.layout)
        found = members(self._catalog, parse_moe(text, where), self._finds(models or {}), seed)
        made: list[PreparedModel] = []
        for one in {step.ref: step for member in found for step in member.steps}.values():
            if isinstance(one, ModelCopy):
                made.append(self._copied(one, threads, progress))
            else:
                made += self._prepared(
                    [one], allow_nonfinite=False, threads=threads, progress=progress
                )
        return tuple(made)

    def _copied(
        self, one: ModelCopy, threads: int | None, progress: ProgressCallback | None
    ) -> PreparedModel:
        from mstore.merge.moe.noise import store_noisy
        from mstore.merge.planning.recipes import PreparedModel
        from mstore.models.cast import cast

        if self._catalog.ref(one.ref) is not None:
            # The name follows from the content: nothing is computed again.
            return PreparedModel(one.name, one.ref, self._catalog.resolve(one.ref), False, 0)
        model, number = self._input(one.model), thread_count(threads)
        with contents.held(self._catalog, [model.snapshot]):
            if not isinstance(one.change, str):
                return store_noisy(
                    *(self._catalog, model, one.change, one.ref, one.name),
                    threads=number,
                    progress=progress,
                )
            made = cast(
                self._catalog,
                (model.name, model.snapshot),
                dtype=one.change,
                name=one.ref,
                only=(),
                skip=(),
                message=one.name,
                allow_nonfinite=False,
                threads=number,
                progress=progress,
            )
        return PreparedModel(one.name, one.ref, made.snapshot, True, made.bytes_written)

    def plan_moe(
        self,
        text: str,
        *,
        where: str = "the recipe",
        models: Mapping[str, str] | None = None,
        routers: Revision | None = None,
        seed: int = 0,
    ) -> PlanReport:
        """Plan a mixture of experts (MoE) of dense models; `merge` makes it.

        text: a recipe of mergekit-moe (YAML). Experts' MLPs are taken as they are, so the new bytes
        are those of the routers; attention, norms and embeddings are the base's. The result has a
        tensor for each expert, as published models have.
        where: the name of its file, for errors. models: revisions by the recipe's names of models;
        other names are revisions themselves.
        routers: a checkpoint with `layers.N.router` (experts x hidden) for each layer, which
        `examples/routers.py` computes from the recipe's prompts; None for gate_mode `random` and
        `uniform_random`, which are drawn from `seed`, as noise on experts is.

        Raises BadRequest for what is no recipe, NotFound for an unknown model, or one that
        `prepare_moe` must make first, Incompatible for models that do not fit, StorageFailed.
        """
        from mstore.merge.moe.mixture import planned
        from mstore.merge.moe.recipe import parse_moe

        began = time.monotonic()
        layouts.require_writable(self._catalog.layout)
        recipe = parse_moe(text, where)
        find = self._finds(models or {})
        given = None if routers is None else self._input(routers)
        with contents.held(self._catalog, [find(one.text).snapshot for one in recipe.named()]):
            plan, sources = planned(self._catalog, recipe, text, find, given, seed)
            return self._told(plan, sources, began)

    def emr(
        self,
        request: MergeRequest,
        *,
        name: str,
        message: str = "",
        threads: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> EmrReport:
        """Store one model of all experts, and a mask for each that makes its model of that again.

        request: of the method `emr`. name: the model of all is the branch NAME/shared, the virtual
        model of an expert NAME/EXPERT, its mask NAME/masks/EXPERT.  The virtual models read the
        base, the model of all and their masks; the experts themselves are not needed any more.

        Raises BadRequest (another method, experts whose branches would have one name), Conflict (a
        mask of an expert that is not given is there, which belongs to another model of all) and as
        `plan` and `merge`; what is published then stays.
        """
        from mstore.merge.methods.registry import find
        from mstore.merge.running.expert_masks import (
            ELECTS,
            MASKED,
            EmrReport,
            adapters_told,
            branches_of,
            store_mask,
        )
        from mstore.terms.requests import MergeRequest

        began = time.monotonic()
        if request.method != ELECTS:
            raise BadRequest(f"models share one of the method {ELECTS}", where=Option("method"))
        experts = [str(expert) for expert, _ in request.weighted()]
        shared, own, masks = branches_of(self._catalog, name, experts)
        merged = self.merge(
            self.plan(request, keep=True, threads=threads, progress=progress),
            name=shared,
            message=message,
            threads=threads,
            progress=progress,
        )
        [role] = [one.role for one in find(MASKED).companions]
        models = []
        for expert in experts:
            base, of_all, found = map(self._input, (request.base, shared, expert))
            with contents.held(self._catalog, [one.snapshot for one in (base, of_all, found)]):
                mask = store_mask(
                    self._catalog,
                    base,
                    of_all,
                    found,
                    masks[expert],
                    threads=thread_count(threads),
                    progress=progress,
                )
            asked = MergeRequest(
                base=request.base,
                experts=[(shared, mask.rescale)],
                method=MASKED,
                companions={f"{role}:{shared}": masks[expert]},
                dtype=request.dtype,
                analyze=False,
            )
            made = self.merge(
                self.plan(asked, allow_noop=True, keep=True, threads=threads),
                name=own[expert],
                message=message or f"{expert} of {shared}",
                virtual=True,
            )
            models.append(mask.model(expert, own[expert], made.snapshot))
        more = [*adapters_told(self._catalog, map(self._input, experts))]
        return EmrReport.of(merged, models, more, seconds=time.monotonic() - began)

    def experts_of(self, mixture: Revision) -> int:
        """Return how many experts a mixture has.  Raises NotFound, Incompatible for no mixture."""
        from mstore.merge.moe.assemble import NamedModel, experts_in

        return experts_in(self._catalog, NamedModel.of(self._catalog, self._input(mixture)))[1]

    def plan_dense(self, mixture: Revision, expert: int) -> PlanReport:
        """Plan a dense model of one expert of a mixture; `merge` makes it, of the same blocks.

        Where the mixture was made here, the model has the config of its base, and so its type.

        Raises NotFound, Incompatible for what is no mixture with a tensor for each expert,
        BadRequest for an expert that it does not have, StorageFailed.
        """
        from mstore.blocks.schema import NamedSnapshot, PlanInputs
        from mstore.merge.moe.assemble import NamedModel, dense_plan
        from mstore.merge.moe.mixture import made_of

        began = time.monotonic()
        layouts.require_writable(self._catalog.layout)
        found = self._input(mixture)
        with contents.held(self._catalog, [found.snapshot]):
            models = made_of(self._catalog, found)
            plan = dense_plan(self._catalog, NamedModel.of(self._catalog, found), expert, models)
            sources = PlanInputs(NamedSnapshot(found.snapshot, found.name), ())
            return self._told(plan, sources, began)

    def _finds(self, models: Mapping[str, str]) -> Callable[[str], Input]:
        return lambda name: self._input(models.get(name, name))

    def _told(self, plan: Plan, sources: PlanInputs, began: float) -> PlanReport:
        from mstore.merge.planning.costs import Costs
        from mstore.merge.planning.report import plan_report
        from mstore.store.plans import store_plan

        id = store_plan(self._catalog, plan, sources)
        seconds = time.monotonic() - began
        return plan_report(plan, id, sources, Costs(0, 0), seconds=seconds)
