"""Methods and operations: a merge method, and a method with its parameters and weights.

Owns the description of a method (`Method`), and every scalar that follows from a method, its
parameters and the experts' weights before any element is read (`Operation`): divisor, rescale
factor, mask limit, how many elements trimming keeps. Does not own the arithmetic on elements
(`merge.arithmetic`), the proofs about its errors (`bounds`), nor the list of methods (`registry`).

For a base element b, expert elements e_k and d_k = e_k - b, in float32, a method selects from each
expert, combines what it selected, and finishes:

    select    WHOLE     e_k itself
              NEAR      v e_k + (1 - v) b, v = t / max(|d_k|, 1e-6), at most 1
              DELTA     d_k
              TRIMMED   d_k if it is among the max(1, int(density * n)) largest |d_k| of a tensor
              BAND      d_k if int(gamma * n) of the |d_k| of a tensor are larger, and it is among
                        the int(density * n) largest of the rest (`Operation.keep_counts`)
              DRAWN     d_k with probability density, times 1 / density if `rescale`; else 0.
                        If `rescale` is "l1", times the ratio of the L1 norms of d_k and of what
                        is left of it, over the whole tensor
              ABOVE     d_k if |d_k| > epsilon
              VARIED    d_k if the variance of all d_k of the element, at least one of which is not
                        0, is among the int(select_topk * n) largest of n (`arithmetic.spread`)
              AGREED    d_k if |m_j| > tall_mask_lambda |sum of all m_i - m_j|, m_j = w_j d_j, for k
                        experts j or more (`arithmetic.agreement`)
              IMPORTANT d_k if it matters as much as a threshold of the tensor
                        (`arithmetic.importance`)
      RANKED    d_k with a probability that rises with the rank of |d_k| in its row from
                        density - epsilon to density + epsilon (`arithmetic.masks`), times that
                        ratio if `rescale`; else 0
    combine   SUM       sum of m_k = w_k * selected_k, over the sum of all w_k if `normalize`
              ALONE     m_0, of the only expert
              AVERAGED  sum of the selected d_k, each over how many there are; w_k d_k if there is
                        only one
              ELECTED   sum of the m_k that have the sign of the sum of all, over the sum of their
                        w_k if `normalize`
              FUSED     sum of the w_k selected_k of those that have the sign of the sum of all
                        selected_k, over the sum of their w_k, which is at least 1e-6
              INFORMED  sum of the w_k F_k d_k, over the sum of the w_k F_k, in float64; F_k is the
                        element of expert k's Fisher, at least `floor`.  0 if that sum is 0
    finish    WHOLE, NEAR: the sum itself.  Others: b + lambda * sum
    scale     b + scale * (what the method makes - b): the parameter of every method but those that
              have one of their own of this name

No element is scaled after it was rounded: results are linear in their last factors, so those are
scaled.  Where b + lambda * sum is made, the factor is lambda * scale; where whole experts are
summed, their factors are, and the base is one more summand, with the factor 1 - scale.  Each factor
is rounded to float32 once.

A method may compute the factor of each expert from facts about whole tensors: their inner products
(`Method.mix`).  If the method adds deltas, the base is the origin: inner products are those of
deltas, and so are the factors.  With `Operation.rows` they are factors of each row instead, which
follow from the row itself while a chunk of whole rows is computed (`arithmetic.turns`).

Ratios of L1 norms, counts of elements (`Method.lone`) and squares of what is selected
(`Method.weigh`) are facts, too.  Such an operation is not settled until it has them, tensor by
tensor (`Operation.settle`, `counted`, `weighed`, `settled`).

Order of operations as in mergekit 0.1.5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cached_property
from types import MappingProxyType
from typing import Final

import msgspec

from mstore.errors import BadRequest, did_you_mean
from mstore.merge.methods.parameters import (
    AROUND_BASE,
    NORM,
    SCALE,
    Parameter,
    Scalar,
    Value,
    finite_single,
    next_single,
    single,
)
from mstore.objects.plan import Mixture
from mstore.phrases import Option, call, phrase

SMALLEST_DIVISOR: Final = 1e-8
"""A divisor nearer to zero than this (a float32 sum of weights) is replaced by 1."""


class Select(Enum):
    """What to select from an expert; see the top of this module."""

    WHOLE = "whole"
    NEAR = "near"
    DELTA = "delta"
    TRIMMED = "trimmed"
    BAND = "band"
    DRAWN = "drawn"
    RANKED = "ranked"
    ABOVE = "above"
    VARIED = "varied"
    AGREED = "agreed"
    IMPORTANT = "important"


class Rows(Enum):
    """How the factors of a row follow from the inner products of its parts, one an expert."""

    SLERP = "slerp"
    STOCK = "stock"


class Combine(Enum):
    """How to combine selected values to one number per element; see the top of the module."""

    SUM = "sum"
    ALONE = "alone"
    ELECTED = "elected"
    AVERAGED = "averaged"
    FUSED = "fused"
    INFORMED = "informed"


Gram = Sequence[Sequence[float]]
"""Inner products, float64, of the base and each expert, whole tensors: rows and columns in this
order.  For a method that adds deltas, or asks for them (`Method.of_deltas`), those of the deltas;
the base is then the zero vector.  NaN
where they are not known: of an expert of weight 0, and of experts with each other if the method
does not need those."""


class Method(msgspec.Struct, frozen=True):
    """One merge method.

    summary: a line for lists. formula: the result of an element, as the docs write it. source:
    where it was published. mix: computes the factors of whole tensors from their inner products;
    only with Select.WHOLE or DELTA, and Combine.SUM. of_deltas: whether the inner products are
    those of deltas although whole experts are mixed. pairs: whether it needs the inner products of
    experts with each other, not only with the base. rows: says for parameters whether factors are
    those of each row by itself, and how they follow; such an operation has no facts. lone: computes
    the factor of an element that one expert alone has, from how many of the expert's elements
    others have, too, and how many none has; only with Combine.AVERAGED. weigh: computes the weights
    of experts from the sums of squares of what is selected, and the number of elements; only with
    Combine.FUSED. experts: how many it takes, None for any number from `least` on. weighted:
    whether experts have weights. weight: the parameter that is the weight of each, if they have
    none. fishers: whether each expert comes with a diagonal Fisher: a plan then lists all experts,
    and after them their Fishers in the same order (`registry.fishers_of`); only with
    Combine.INFORMED. refuses: parameters of mergekit's method that this one has not, the value that
    changes nothing, and why. mind: what to say where a merge leaves something out.
    """

    name: str
    summary: str
    formula: str
    source: str
    parameters: tuple[Parameter, ...]
    select: Select
    combine: Combine
    mix: Callable[[Gram, Mapping[str, Scalar], Sequence[float]], Mixture] | None = None
    of_deltas: bool = False
    pairs: bool = False
    rows: Callable[[Mapping[str, Value]], Rows | None] | None = None
    lone: Callable[[int, int, Mapping[str, Scalar]], float] | None = None
    weigh: Callable[[Sequence[float], int], tuple[float, ...]] | None = None
    experts: int | None = None
    weighted: bool = True
    weight: str | None = None
    fishers: bool = False
    least: int = 1
    refuses: tuple[tuple[str, bool, str], ...] = ()
    mind: str | None = None

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
        by_rows = self.rows is not None and self.rows(parameters) is not None
        for parameter in self.parameters:
            # Without them, plans are as they were before there were such parameters.
            if parameter.of_rows and not (
                by_rows and parameters[parameter.name] != parameter.default
            ):
                del parameters[parameter.name]
        if self.is_scaled:
            self._settle_scale(parameters)
        rounded, frozen = _rounded(weights), MappingProxyType(parameters)
        if self.fishers and min(rounded) < 0:
            raise BadRequest(
                f"a weight of {self.name} must not be negative: it divides by sums of weights",
                where=Option("experts"),
            )
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
    def is_additive(self) -> bool:
        """Whether experts add up with fixed coefficients, so that an omission has a bound."""
        is_sum = self.combine in (Combine.SUM, Combine.ALONE)
        # What one expert moves decides whether another one counts.
        return is_sum and self.select is not Select.AGREED


# Not slotted: cached properties need a dict.
class Operation(msgspec.Struct, frozen=True, dict=True):
    """A method with complete parameters and one weight per expert, float32, in plan order.

    mixture: of one tensor, once its facts are known; `weights` are then those of the mixture, and
    `given` those that were asked for.  So they are if a parameter is the weight.  If whole experts
    are mixed, `weights` are times the scale.

    Raises BadRequest if a method that mixes whole experts would divide by weights that add up to
    zero, or if the sum of the weights that a method divides by is not a finite float32.
    """

    method: Method
    parameters: Mapping[str, Value]
    weights: tuple[float, ...]
    mixture: Mixture | None = None
    given: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.given:
            msgspec.structs.force_setattr(self, "given", self.weights)
        if self.is_whole and self.normalizes and _sum(self.given) == 0.0:
            raise BadRequest(
                f"the weights of {self.method.name} add up to zero, and normalize divides by their "
                "sum",
                hint=phrase(
                    "change a weight, or {plain}",
                    plain=Option("parameters", {"normalize": False}),
                ),
            )
        if self.normalizes:
            # Elements divide by the weights that agree there, which may be all of one sign.
            _sum([abs(weight) for weight in self.given])
        if self.is_agreed:
            self._require_agreement()
        if self.rows is Rows.SLERP and self.is_whole and not any(self.given):
            raise BadRequest(
                f"{self.method.name} of two experts of weight 0 is nothing",
                hint="give one of them a weight",
            )
        for density, epsilon in zip(self.densities, self.epsilons, strict=True):
            if self.is_ranked and density < 1 and not epsilon < density < 1 - epsilon:
                raise BadRequest(
                    f"density - epsilon and density + epsilon are between 0 and 1; density is "
                    f"{density:g}, epsilon {epsilon:g}",
                    where=self.method.name,
                )

    def _require_agreement(self) -> None:
        """Raise BadRequest if no element can be needed by as many experts as must need it."""
        needs = [r for w, r in zip(self.weights, self.need_ratios, strict=True) if w]
        if self.least_needed > len(needs):
            raise BadRequest(
                f"k is {self.least_needed}: no element can be needed by so many of "
                f"{len(needs)} experts that have a weight",
                where=self.method.name,
                hint=Option("parameters", {"k": max(1, len(needs))}),
            )
        # Each of two would have to move an element further than the other does.
        if self.least_needed == len(needs) == 2 and math.prod(needs) >= 1:
            raise BadRequest(
                "of two experts both need an element only where tall_mask_lambda is below 1",
                where=self.method.name,
                hint=phrase(
                    "{smaller} or {one}",
                    smaller=Option("parameters", {"tall_mask_lambda": 0.4}),
                    one=Option("parameters", {"k": 1}),
                ),
            )

    @property
    def listed(self) -> tuple[float, ...]:
        """The weights as a plan lists them: those that were asked for."""
        return self.given

    @cached_property
    def select(self) -> Select:
        """What to select from an expert: WHOLE if a parameter says not to add deltas."""
        return self.method.select if self.parameters.get("around_base", True) else Select.WHOLE

    @property
    def is_whole(self) -> bool:
        """Whether whole experts are mixed, not their deltas."""
        return self.select in (Select.WHOLE, Select.NEAR)

    @property
    def compares_deltas(self) -> bool:
        """Whether its factors follow from inner products of deltas, not of whole tensors."""
        return self.method.of_deltas or not self.is_whole

    @property
    def is_near(self) -> bool:
        """Whether an element moves towards the expert's by `reach` at most."""
        return self.select is Select.NEAR

    @property
    def reach(self) -> float:
        """The parameter t of a method that moves elements so, as a float32."""
        return single(float(self._one("t", 0.0)))

    @property
    def is_alone(self) -> bool:
        """Whether the result is the only expert's, times its weight."""
        return self.method.combine is Combine.ALONE

    @property
    def is_above(self) -> bool:
        """Whether it selects the deltas of a magnitude of `least` or more."""
        return self.select is Select.ABOVE

    @property
    def least(self) -> float:
        """The least float32 above the parameter epsilon."""
        return next_single(single(float(self._one("epsilon", 0.0))))

    @property
    def is_varied(self) -> bool:
        """Whether an element is selected, or not, of all experts, by the variance of its deltas."""
        return self.select is Select.VARIED and self.select_share < 1

    @property
    def is_agreed(self) -> bool:
        """Whether an element is selected, or not, of all experts, by how many of them need it."""
        return self.select is Select.AGREED

    @property
    def need_ratios(self) -> tuple[float, ...]:
        """For each expert, how many times the others' sum its delta must be, as a float32."""
        return tuple(single(one) for one in self._each("tall_mask_lambda", 1.0))

    @property
    def least_needed(self) -> int:
        """How many experts must need an element."""
        return int(self._one("k", 1))

    @property
    def is_important(self) -> bool:
        """Whether elements are selected by their importance, which follows from whole rows."""
        return self.select is Select.IMPORTANT

    @property
    def rows(self) -> Rows | None:
        """How the factors of each row follow from the row; None if they are those of the tensor."""
        return None if self.method.rows is None else self.method.rows(self.parameters)

    @property
    def needs_rows(self) -> bool:
        """Whether a chunk must be whole rows."""
        return self.is_ranked or self.is_important or self.rows is not None

    @property
    def select_share(self) -> float:
        """The parameter select_topk: the share of the elements to select so."""
        return float(self._one("select_topk", 1.0))

    @property
    def is_fused(self) -> bool:
        """Whether what elects is not weighed; weights count after the election."""
        return self.method.combine is Combine.FUSED

    @property
    def is_informed(self) -> bool:
        """Whether Fishers say how much each element of an expert counts."""
        return self.method.combine is Combine.INFORMED

    @property
    def floor(self) -> float:
        """The least that an element of a Fisher counts as, a float32."""
        return single(float(self._one("floor", 0.0)))

    @property
    def is_averaged(self) -> bool:
        """Whether an element is divided by how many experts have it."""
        return self.method.combine is Combine.AVERAGED

    @property
    def is_drawn(self) -> bool:
        """Whether a random mask selects the elements of a delta."""
        return self.select in (Select.DRAWN, Select.RANKED)

    @property
    def is_ranked(self) -> bool:
        """Whether the mask follows from ranks within rows, which a chunk must have whole."""
        return self.select is Select.RANKED

    @property
    def needs_norms(self) -> bool:
        """Whether it rescales by L1 norms of the whole tensor that are not known yet."""
        rescale = self.parameters.get("rescale")
        by_norm = bool(rescale) if self.is_ranked else rescale == NORM
        return by_norm and self.mixture is None and min(self.densities) < 1

    @property
    def needs_counts(self) -> bool:
        """Whether its factors follow from counts of the whole tensor that are not known yet."""
        return self.method.lone is not None and self.mixture is None

    @property
    def needs_squares(self) -> bool:
        """Whether its weights follow from sums of squares that are not known yet."""
        return self.method.weigh is not None and self.mixture is None

    @cached_property
    def is_trimmed(self) -> bool:
        """Whether each expert and tensor needs magnitude thresholds first."""
        return self.select in (Select.TRIMMED, Select.BAND) and min(self.densities) < 1

    @cached_property
    def is_band(self) -> bool:
        """Whether there are two thresholds: the largest elements are dropped, too."""
        return self.select is Select.BAND and min(self.densities) < 1

    @property
    def needs_facts(self) -> bool:
        """Whether its factors depend on the whole tensor and are not known yet."""
        needs_gram = self.method.mix is not None and self.mixture is None and self.rows is None
        return needs_gram or self.needs_norms or self.needs_counts or self.needs_squares

    @property
    def needs_only_norms(self) -> bool:
        """Whether planning needs nothing of deltas but numbers that their norms do not exceed."""
        whole = (Select.WHOLE, Select.DELTA, Select.DRAWN, Select.RANKED)
        return self.select in whole and self.is_additive and self.method.mix is None

    def settle(self, gram: Gram) -> Operation:
        """Return the operation of a tensor whose inner products are `gram`: (K + 1) squared.

        Raises BadRequest for vectors that the method cannot mix.
        """
        assert self.method.mix is not None
        return self.settled(self.method.mix(gram, self._scalars, self.given))

    def counted(self, counts: Sequence[tuple[int, int]]) -> Operation:
        """Return the operation of a tensor with these counts of each expert's selected elements.

        Of those that other experts have, too, and of those that none has.  Raises BadRequest for a
        factor that is not a finite float32.
        """
        assert self.method.lone is not None
        factors = tuple(self.method.lone(*own, self._scalars) for own in counts)
        return self.settled(Mixture(1.0, factors, keeps_base=True))

    def weighed(self, squares: Sequence[float], elements: int) -> Operation:
        """Return the operation of a tensor of so many elements, with these sums of squares.

        Of what is selected of each expert.
        """
        assert self.method.weigh is not None
        return self.settled(Mixture(1.0, self.method.weigh(squares, elements), keeps_base=True))

    @property
    def _scalars(self) -> dict[str, Scalar]:
        return {k: v for k, v in self.parameters.items() if not isinstance(v, tuple | str)}

    def settled(self, mixture: Mixture) -> Operation:
        """Return the operation with this mixture, rounded to float32.

        For a method that draws, the factors are those of each expert's kept delta.  To deltas the
        base is added as it is.  Raises BadRequest for a factor that is not a finite float32.
        """
        base, *experts = (
            finite_single(f"a factor of {self.method.name}", one)
            for one in (mixture.base, *mixture.experts)
        )
        if self.is_drawn:
            return msgspec.structs.replace(
                self, mixture=Mixture(base, tuple(experts), mixture.keeps_base)
            )
        own = (base, mixture.keeps_base) if self.is_whole else (1.0, True)
        rounded = Mixture(own[0], tuple(experts), own[1])
        return msgspec.structs.replace(self, weights=rounded.experts, mixture=rounded).scaled()

    def scaled(self) -> Operation:
        """Return it with weights of whole experts times the scale.  Raises BadRequest."""
        if not self.is_whole or self.outer == 1:
            return self
        return msgspec.structs.replace(
            self,
            weights=tuple(
                finite_single("a weight times scale", weight * self.outer)
                for weight in self.weights
            ),
        )

    @property
    def is_elected(self) -> bool:
        """Whether only deltas with the sign of the sum count."""
        return self.method.combine in (Combine.ELECTED, Combine.FUSED)

    @property
    def is_additive(self) -> bool:
        """Whether experts add up with fixed coefficients, so that an omission has a bound.

        Those of rows are not fixed: they follow from what is read.
        """
        return self.method.is_additive and self.rows is None

    @property
    def normalizes(self) -> bool:
        """Whether the sum is divided by weights."""
        return self.is_fused or bool(self.parameters.get("normalize", False))

    def _each(self, name: str, default: float) -> tuple[float, ...]:
        """Return a parameter's value for each expert."""
        value = self.parameters.get(name, default)
        if isinstance(value, tuple):
            return value
        assert not isinstance(value, str)
        return (float(value),) * len(self.weights)

    def _one(self, name: str, default: float) -> Scalar:
        """Return a parameter's value, where it is the same for all experts."""
        value = self.parameters.get(name, default)
        assert not isinstance(value, tuple | str)
        return value

    @cached_property
    def densities(self) -> tuple[float, ...]:
        """For each expert, the share of its delta's elements to select.

        1 for a method without such a parameter.
        """
        return self._each("density", 1.0)

    @cached_property
    def epsilons(self) -> tuple[float, ...]:
        """For each expert, by how much probabilities differ from its density at most."""
        return self._each("epsilon", 0.0)

    @property
    def is_even(self) -> bool:
        """Whether every expert has the same parameters."""
        return not any(isinstance(value, tuple) for value in self.parameters.values())

    @property
    def outer_given(self) -> float:
        """The parameter SCALE: what the change of the base is multiplied by."""
        return float(self._one(SCALE.name, 1.0)) if self.method.is_scaled else 1.0

    @cached_property
    def outer(self) -> float:
        """The parameter SCALE as a float32."""
        return single(self.outer_given)

    @property
    def factor_given(self) -> float:
        """The factor of the combined delta: lambda times SCALE.  Whole experts' weights have it."""
        return 1.0 if self.is_whole else float(self._one("lambda", 1.0)) * self.outer_given

    @cached_property
    def factor(self) -> float:
        """The product of lambda and SCALE, both float32, as a float32.

        1 for whole experts.  Raises BadRequest if it is not finite.
        """
        if self.is_whole:
            return 1.0
        lam = single(float(self._one("lambda", 1.0)))
        return finite_single("lambda times scale", lam * self.outer)

    @property
    def seed(self) -> int:
        """The seed of the random mask."""
        return int(self._one("seed", 0))

    @property
    def keeps_base(self) -> bool:
        """Whether a chunk keeps the base's bytes if every expert is absent or equal there.

        False while that is not known.
        """
        if not self.is_whole or self.outer == 0:
            return True
        if self.method.mix is not None:
            return self.mixture is not None and self.mixture.keeps_base
        return self.normalizes or self.is_near or (self.is_alone and self.weights == (1.0,))

    @property
    def scales_equal(self) -> bool:
        """Whether a tensor changes that is equal in the base and in all experts."""
        if self.method.mix is not None:
            # It keeps its direction, and its norm if that is a mean.
            return self.is_whole and not self.parameters.get("normalize_weights", True)
        return not self.keeps_base

    @property
    def has_base(self) -> bool:
        """Whether the base is a summand of whole experts, besides what it gets in their place."""
        return self.is_whole and (self.mixture is not None or self.outer != 1)

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
        nothing = self.parameters.get("lambda") == 0 or self.outer == 0
        nothing = nothing or (self.is_near and self.reach == 0)
        # Whoever counts in a variance is read, whatever its weight.
        return tuple(nothing or (weight == 0 and not self.is_varied) for weight in self.weights)

    @cached_property
    def divisor(self) -> float:
        """The divisor of the sum, if it is the same for all elements, as a float32.

        The sequential float32 sum of all weights, including those of absent experts. 1 if there is
        no division, for methods that elect (they divide by the weights that agree at each element),
        and, except for methods that mix whole experts, if the sum is nearly zero.
        """
        if self.is_elected or not self.normalizes:
            return 1.0
        total = _sum(self.given)
        if not self.is_whole and abs(total) < single(SMALLEST_DIVISOR):
            return 1.0
        return total

    @cached_property
    def rescales(self) -> tuple[float, ...]:
        """For each expert, the factor of a delta that passed the random mask, as a float32.

        Where it is a fact that is not known yet: 1 / density, which it is near.
        """
        if self.is_drawn and self.mixture is not None:
            return self.mixture.experts
        if not self.is_drawn or not self.parameters["rescale"]:
            return (1.0,) * len(self.weights)
        return tuple(single(1.0 / density) for density in self.densities)

    @cached_property
    def mask_limits(self) -> tuple[int, ...]:
        """For each expert, a draw below this is kept: round(density * 2^32), so 2^32 keeps all.

        2^32 too where each element has a probability of its own.
        """
        if not self.is_drawn or self.is_ranked:
            return (2**32,) * len(self.weights)
        return tuple(round(density * 2**32) for density in self.densities)

    @cached_property
    def _ranks(self) -> dict[tuple[int, float], tuple[int, ...]]:
        """What `keep_counts` returned: a model has tensors of few sizes, and asks for each expert.

        Not of BAND.
        """
        return {}

    def keep_counts(self, elements: int, expert: int = 0) -> tuple[int, ...]:
        """Return up to which rank of |d_k|, from the largest, trimming keeps n elements.

        TRIMMED: one rank, max(1, int(density * n)), at most n.  BAND: two; elements up to the
        second are dropped.  If fewer than int(gamma * n) can be dropped, as many as can.
        """
        density = self.densities[expert]
        known = self._ranks.get((elements, density))
        if known is not None:
            return known
        if self.select is not Select.BAND:
            found = self._ranks[elements, density] = (
                min(elements, max(1, int(density * elements))),
            )
            return found
        kept = int(density * elements)
        last = min(elements, kept + int(self._each("gamma", 0.0)[expert] * elements))
        return last, last - kept


def _rounded(weights: Sequence[float]) -> tuple[float, ...]:
    if not weights:
        raise BadRequest("a merge needs at least one expert")
    return tuple(finite_single("weight", weight) for weight in weights)


def _sum(values: Sequence[float]) -> float:
    """Return the sequential float32 sum.

    A float64 sum of two float32, rounded to float32, is their float32 sum.
    """
    total = values[0]
    for value in values[1:]:
        total = finite_single("the sum of the weights", total + value)
    return total
