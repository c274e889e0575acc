"""Methods and operations: a merge method, and one with its parameters and weights.

Owns the description of a method (`Method`), and every scalar that follows from a method, its
parameters and the experts' weights before any element is read (`Operation`).  A method is composed
of a selection (`selections`: what it takes of each expert) and a combination (`combinations`: how
it makes one number of that), which own all that is particular to them.  Does not own the arithmetic
on elements (`merge.arithmetic`), the proofs about its errors (`model`), nor the list of methods
(`registry`).

For a base element b, expert elements e_k and d_k = e_k - b, in float32, a method selects from each
expert, combines what it selected, and finishes:

    finish    whole experts: the sum itself.  Others: b + lambda * sum
    scale     b + scale * (what the method makes - b): the parameter of every method but those that
              have one of their own of this name

No element is scaled after it was rounded: results are linear in their last factors, so those are
scaled.  Where b + lambda * sum is made, the factor is lambda * scale; where whole experts are
summed, their factors are, and the base is one more summand, with the factor 1 - scale.  Each factor
is rounded to float32 once.

An operation whose factors follow from facts of whole tensors is not settled until it has them,
tensor by tensor (`Operation.measured`, `settled`).

Order of operations as in mergekit 0.1.5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from mstore.merge.arithmetic.arguments import Mix
from mstore.merge.arithmetic.row_factors import ChunkFactors
from mstore.merge.measures.grid import Companion
from mstore.merge.methods.combination import Combination, sum_of
from mstore.merge.methods.parameters import (
    AROUND_BASE,
    LAMBDA,
    SCALE,
    Parameter,
    Scalar,
    Value,
    finite_single,
    single,
)
from mstore.merge.methods.selection import EVERY, Measured, Selection, common
from mstore.models.stats.chunks import row_length
from mstore.store.objects.plan import Mixture
from mstore.terms.errors import BadRequest, did_you_mean
from mstore.terms.phrases import Option, call, phrase

if TYPE_CHECKING:
    from mstore.merge.measures.facts import TensorFacts


class Method(msgspec.Struct, frozen=True):
    """One merge method.

    summary: a line for lists. formula: the result of an element, as the docs write it. source:
    where it was published. select: the class of its selection. combine: its combination. experts:
    how many it takes, None for any number from `least` on. weighted: whether experts have weights.
    weight: the parameter that is the weight of each, if they have none. refuses: parameters of
    mergekit's method that this one has not, the value that changes nothing, and why. mind: what to
    say where a merge leaves something out. is_ours: whether mergekit has no such method.
    """

    name: str
    summary: str
    formula: str
    source: str
    parameters: tuple[Parameter, ...]
    select: type[Selection]
    combine: Combination
    experts: int | None = None
    weighted: bool = True
    weight: str | None = None
    least: int = 1
    refuses: tuple[tuple[str, bool, str], ...] = ()
    mind: str | None = None
    is_ours: bool = False

    @property
    def is_scaled(self) -> bool:
        """Whether it has the parameter SCALE: it has none of its own of this name."""
        return all(one.name != SCALE.name for one in self.parameters)

    @property
    def accepted(self) -> tuple[Parameter, ...]:
        """Its parameters, and SCALE."""
        return (*self.parameters, SCALE) if self.is_scaled else self.parameters

    def parse(self, given: Mapping[str, object]) -> dict[str, Value]:
        """Return the complete parameters, with defaults, in the order of `accepted`.

        Values of `given` are text as typed, or Python values. Equal meanings give equal results
        ("1", 1 and 1.0 for a float). Raises BadRequest for an unknown parameter or an invalid
        value.
        """
        known = {parameter.name: parameter for parameter in self.accepted}
        for name in given:
            if name == "weight":
                raise BadRequest(
                    "weight is given with each expert, not as a parameter",
                    hint=Option("experts", {"REF": "WEIGHT"}),
                )
            why = next((why for refused, _, why in self.refuses if refused == name), None)
            if why is not None:
                raise BadRequest(
                    f"{self.name} has no parameter {name}: {why}",
                    hint=f"leave out {name}",
                )
            if name not in known:
                raise BadRequest(
                    f"{self.name} has no parameter {name!r}; its parameters: "
                    f"{', '.join(known) or 'none'}",
                    hint=did_you_mean(name, known),
                )
        for name, parameter in known.items():
            if parameter.default is None and name not in given:
                raise BadRequest(
                    f"{self.name} needs a value for {name}, in {parameter.range}",
                    hint=Option("parameters", {name: "VALUE"}),
                )
        try:
            return {
                name: parameter.parse(given.get(name, parameter.default))
                for name, parameter in known.items()
            }
        except BadRequest as error:
            what, where, hint = error.texts
            raise BadRequest(what, where=where, hint=hint or call("methods", self.name)) from error

    def apply(self, given: Mapping[str, object], weights: Sequence[float]) -> Operation:
        """Return this method with parameters as for `parse` and one weight per expert.

        Raises BadRequest for invalid parameters or weights.
        """
        parameters = self.parse(given)
        if self.experts is not None and len(weights) != self.experts:
            count = "one expert" if self.experts == 1 else f"{self.experts} experts"
            raise BadRequest(
                f"{self.name} takes the base and {count}, not {len(weights)}",
                hint=Option("experts", ("REF",) * self.experts),
            )
        if 0 < len(weights) < self.least:
            raise BadRequest(
                f"{self.name} takes at least {self.least} experts, not {len(weights)}",
                hint=Option("experts", "REF"),
            )
        if not self.weighted and any(weight != 1 for weight in weights):
            named = ", ".join(parameter.name for parameter in self.accepted)
            has = f"; its parameters: {named}" if named else ""
            raise BadRequest(f"an expert of {self.name} has no weight{has}")
        for name, value in parameters.items():
            if isinstance(value, tuple) and len(value) != len(weights):
                raise BadRequest(
                    f"parameter {name} has {len(value)} values; there are {len(weights)} experts"
                )
            if isinstance(value, tuple) and len(set(value)) == 1:
                # One meaning, one plan.
                parameters[name] = value[0]
        by_rows = self.combine.chunk_factors(parameters) is not None
        for parameter in self.parameters:
            # Without them, plans are as they were before there were such parameters.
            is_default = parameters[parameter.name] == parameter.default
            if (parameter.of_rows and not by_rows) or (parameter.is_late and is_default):
                del parameters[parameter.name]
        if self.is_scaled:
            self._settle_scale(parameters)
        rounded, frozen = _rounded(weights), MappingProxyType(parameters)
        if self.weight is None:
            return Operation(self, frozen, rounded).scaled()
        own = parameters[self.weight]
        assert isinstance(own, float)
        return Operation(
            self, frozen, (finite_single(self.weight, own),) * len(rounded), given=rounded
        )

    def _settle_scale(self, parameters: dict[str, Value]) -> None:
        """Drop a scale of 1: plans are as they were without one.  Raises BadRequest."""
        if parameters[SCALE.name] == SCALE.default:
            del parameters[SCALE.name]
        elif parameters.get(AROUND_BASE.name, True) is False:
            raise BadRequest(
                f"scale says how far to go from the base, and {AROUND_BASE.name}=false merges "
                "without one",
                where=self.name,
                hint="leave out scale",
            )

    @property
    def facts(self) -> str | None:
        """What must be measured of whole tensors first, for lists; None for nothing."""
        return self.combine.facts(self.select) or self.select.facts

    @property
    def companions(self) -> tuple[Companion, ...]:
        """What it asks for beside base and experts."""
        return self.combine.companions

    @property
    def has_bound(self) -> bool:
        """Whether experts add up with fixed coefficients, so that an omission has a bound."""
        return self.combine.unbounded is None and self.select.unbounded is None

    @property
    def lists_base(self) -> bool:
        """Whether a base that a recipe lists is an input like the experts.

        A mean on the sphere is an average, too; slerp goes from the base to its one expert.
        """
        return self.select.lists_base and (self.combine.by_norms or self.experts is None)


# Not slotted: cached properties need a dict.
class Operation(msgspec.Struct, frozen=True, dict=True):
    """A method with complete parameters and one weight per expert, float32, in plan order.

    mixture: of one tensor, once its facts are known; `weights` are then those of the mixture, and
    `given` those that were asked for.  So they are if a parameter is the weight.  If whole experts
    are mixed, `weights` are times the scale.

    Raises BadRequest if a method that mixes whole experts would divide by weights that add up to
    zero, if the sum of the weights that a method divides by is not a finite float32, or for what
    selection or combination refuse.
    """

    method: Method
    parameters: Mapping[str, Value]
    weights: tuple[float, ...]
    mixture: Mixture | None = None
    given: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.given:
            msgspec.structs.force_setattr(self, "given", self.weights)
        if self.normalizes:
            if self.selection.is_whole and sum_of(self.given) == 0.0:
                raise BadRequest(
                    f"the weights of {self.method.name} add up to zero, and normalize divides by "
                    "their sum",
                    hint=phrase(
                        "change a weight, or {plain}",
                        plain=Option("parameters", {"normalize": False}),
                    ),
                )
            # Elements divide by the weights that agree there, which may be all of one sign.
            sum_of([abs(weight) for weight in self.given])
        self.selection.check(self.weights, self.method.name)
        self.method.combine.check(self)

    @cached_property
    def selection(self) -> Selection:
        """What it takes of each expert."""
        return self.method.select.of(self.parameters, len(self.weights))

    @cached_property
    def chunk_factors(self) -> ChunkFactors | None:
        """How factors follow from what is read; None for those of the tensor."""
        return self.method.combine.chunk_factors(self.parameters)

    # -- what is told ------------------------------------------------------------------------

    @property
    def unbounded(self) -> str | None:
        """What it does, where the error of leaving something out has no bound; None if it has."""
        declared = self.method.combine.unbounded or self.method.select.unbounded
        if declared is None and self.chunk_factors is not None:
            return self.chunk_factors.unbounded
        return declared

    @property
    def has_bound(self) -> bool:
        """Whether experts add up with fixed coefficients, so that an omission has a bound.

        Those of rows and of elements are not fixed: they follow from what is read.
        """
        return self.unbounded is None

    def unscored(self, score: str) -> str | None:
        """Return why units cannot be ranked by a score; None if they can."""
        if score == "trimmed":
            return self.selection.untrimmed
        return self.method.combine.unconflicting if score == "conflict" else None

    @property
    def cancels(self) -> bool:
        """Whether two equal experts of opposite weights are nothing together."""
        return self.has_bound and self.selection.cancels

    @property
    def has_origin(self) -> bool:
        """Whether the base cannot be swapped for an expert: whole models that are mixed can."""
        return not self.selection.is_whole

    @property
    def adds_whole(self) -> bool:
        """Whether whole experts are added up, with nothing that divides by their weights."""
        return self.selection.is_whole and self.method.combine.by_norms and not self.normalizes

    @property
    def stated_weights(self) -> tuple[float, ...]:
        """What each expert is multiplied by: its weight, or the parameter in its place."""
        return self.given if self.method.weight is None else self.weights

    @property
    def most(self) -> tuple[float, ...]:
        """What each expert's change is multiplied by, at most."""
        return self.method.combine.most(self)

    @property
    def counts_base(self) -> bool:
        """Whether the base is a model like the others: whole ones are mixed or added up."""
        return self.method.combine.counts_base(self.selection)

    @property
    def farthest(self) -> float:
        """How far the result goes from the base for one expert of weight 1, at most."""
        return abs(self.outer_given if self.selection.is_whole else self.factor_given)

    # -- facts -------------------------------------------------------------------------------

    @property
    def needs_rows(self) -> bool:
        """Whether a chunk must be whole rows."""
        own = self.chunk_factors
        return self.selection.needs_rows or (own is not None and own.needs_rows)

    def row(self, shape: Sequence[int]) -> int:
        """Return of how many elements each the rows are that a chunk of a tensor is whole."""
        own = 1 if self.chunk_factors is None else self.chunk_factors.row(shape)
        return max(own, row_length(shape) if self.selection.needs_rows else 1)

    @property
    def needs_facts(self) -> bool:
        """Whether its factors depend on the whole tensor and are not known yet."""
        needs = self.selection.needs_facts or self.method.combine.needs_facts(self)
        return needs and self.mixture is None

    @property
    def measures(self) -> bool:
        """Whether anything must be measured of a whole tensor first; trim thresholds apart."""
        return self.needs_facts or (self.selection.planned > 0 and not self.selection.trims)

    @property
    def needs_only_norms(self) -> bool:
        """Whether planning needs nothing of deltas but numbers that their norms do not exceed."""
        return self.selection.by_norms and self.method.combine.by_norms and self.has_bound

    def measured(self, facts: TensorFacts) -> tuple[Operation, Measured]:
        """Return the operation of one tensor, settled, and what its selection knows of it.

        Raises BadRequest as `TensorFacts` does, and for what the method cannot mix.
        """
        found = self.selection.measure(facts, self.weightless)
        if found.factors is not None:
            return self.settled(Mixture(0.0, found.factors, keeps_base=True)), found
        return self.method.combine.settle(self, facts, found), found

    @property
    def scalars(self) -> dict[str, Scalar]:
        """The parameters that are numbers."""
        return {k: v for k, v in self.parameters.items() if not isinstance(v, tuple | str)}

    def settled(self, mixture: Mixture) -> Operation:
        """Return the operation with this mixture, rounded to float32.

        Raises BadRequest for a factor that is not a finite float32.
        """
        base, *experts = (
            finite_single(f"a factor of {self.method.name}", one)
            for one in (mixture.base, *mixture.experts)
        )
        own = Mixture(base, tuple(experts), mixture.keeps_base)
        if not self.selection.weighs:
            return msgspec.structs.replace(self, mixture=own)
        if not self.selection.is_whole:
            # To deltas the base is added as it is.
            own = Mixture(1.0, own.experts, keeps_base=True)
        return msgspec.structs.replace(self, weights=own.experts, mixture=own).scaled()

    def scaled(self) -> Operation:
        """Return it with weights of whole experts times the scale.  Raises BadRequest."""
        if not self.selection.is_whole or self.outer == 1:
            return self
        return msgspec.structs.replace(
            self,
            weights=tuple(
                finite_single("a weight times scale", weight * self.outer)
                for weight in self.weights
            ),
        )

    # -- scalars -----------------------------------------------------------------------------

    @property
    def normalizes(self) -> bool:
        """Whether the sum is divided by weights."""
        return self.method.combine.normalizes(self)

    @property
    def is_even(self) -> bool:
        """Whether every expert has the same parameters."""
        return not any(isinstance(value, tuple) for value in self.parameters.values())

    @property
    def outer_given(self) -> float:
        """The parameter SCALE: what the change of the base is multiplied by."""
        return common(self.parameters, SCALE) if self.method.is_scaled else 1.0

    @cached_property
    def outer(self) -> float:
        """The parameter SCALE as a float32."""
        return single(self.outer_given)

    @property
    def factor_given(self) -> float:
        """The factor of the combined delta: lambda times SCALE.  Whole experts' weights have it."""
        if self.selection.is_whole:
            return 1.0
        return common(self.parameters, LAMBDA) * self.outer_given

    @cached_property
    def factor(self) -> float:
        """The product of lambda and SCALE, both float32, as a float32.

        1 for whole experts.  Raises BadRequest if it is not finite.
        """
        if self.selection.is_whole:
            return 1.0
        lam = single(common(self.parameters, LAMBDA))
        return finite_single("lambda times scale", lam * self.outer)

    @property
    def keeps_base(self) -> bool:
        """Whether a chunk keeps the base's bytes if every expert is absent or equal there.

        False while that is not known.
        """
        return self.selection.leaves_base or self.outer == 0 or self.method.combine.keeps_base(self)

    @property
    def scales_equal(self) -> bool:
        """Whether a tensor changes that is equal in the base and in all experts."""
        return self.method.combine.scales_equal(self)

    @property
    def counts_all(self) -> bool:
        """Whether every expert is a summand of a chunk, present or not."""
        return self.selection.is_whole or self.chunk_factors is not None

    @property
    def has_base(self) -> bool:
        """Whether the base is a summand of whole experts, besides what it gets in their place."""
        return self.selection.is_whole and (self.mixture is not None or self.outer != 1)

    @property
    def base_weight(self) -> float:
        """The factor of the base where it is such a summand, a float32; else 0."""
        if not self.has_base:
            return 0.0
        own = 0.0 if self.mixture is None else self.mixture.base
        if self.outer == 1:
            return own
        rest = (1.0 - self.outer) * self.divisor
        return finite_single("the base's factor", rest + self.outer * own)

    @cached_property
    def weightless(self) -> tuple[bool, ...]:
        """For each expert, whether its deltas are multiplied by 0; such an expert is not read."""
        if self.parameters.get(LAMBDA.name) == 0 or self.outer == 0:
            return (True,) * len(self.weights)
        return self.selection.weightless(self.weights)

    @cached_property
    def divisor(self) -> float:
        """The divisor of the sum, if it is the same for all elements, as a float32; else 1."""
        return self.method.combine.divisor(self)

    @cached_property
    def rescales(self) -> tuple[float, ...]:
        """For each expert, the factor of a delta that passed the random mask, as a float32."""
        return self.selection.rescales(self.mixture)

    def mix(self) -> Mix:
        """Return it in the form of the kernel, once it is settled."""
        assert not self.needs_facts
        selection, combine = self.selection, self.method.combine
        keeps = self.keeps_base if selection.is_whole else self.normalizes
        masked = selection.masked if self.chunk_factors is None else self.chunk_factors.code
        code = combine.code(self) if selection.code is None else selection.code
        flags = (code, keeps, selection.cuts, masked)
        own = (self.base_weight,) if self.has_base else ()
        # As the kernel has them: experts, then the companions of each role.
        times = 1 + sum(one.is_read for one in combine.companions)
        return Mix(
            weights=np.array(own + self.weights * times, dtype=np.float32),
            factors=np.array(combine.factors(self), dtype=np.float32),
            flags=np.array(flags, dtype=np.int64),
            rescales=np.array((1.0,) * len(own) + self.rescales * times, dtype=np.float32),
            mask_limits=(EVERY,) * len(own) + selection.limits * times,
            has_base=self.has_base,
            chances=selection.chances() * times,
        )


def _rounded(weights: Sequence[float]) -> tuple[float, ...]:
    if not weights:
        raise BadRequest("a merge needs at least one expert")
    return tuple(finite_single("weight", weight) for weight in weights)
