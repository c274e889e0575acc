"""The request in the form that planning takes: checked and resolved for one store."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import overload

import msgspec

from mstore.checkpoint.strict_json import METADATA_KEY
from mstore.merge.methods import registry
from mstore.merge.methods.method import Operation
from mstore.merge.planning.ranking import score_of
from mstore.models.adapters.inputs import ModelChoice
from mstore.numeric.codes import output_dtype
from mstore.store.models import Input
from mstore.store.objects.canonical import DEFAULT_LIMITS
from mstore.store.objects.plan import BASE, EXPERT, PlanInput, Score
from mstore.store.objects.shapes import Globs, require_patterns, unmatched
from mstore.terms.errors import BadRequest, did_you_mean
from mstore.terms.ids import ManifestId
from mstore.terms.phrases import Option, few, phrase
from mstore.terms.requests import MergeRequest, TensorRule
from mstore.terms.sizes import Budget

BudgetGiven = Budget | str | int | float | None
_SHOWN = 60
_TOP_P = Option("top_p")
_NAMED = 8


class Rule(msgspec.Struct, frozen=True):
    """What holds for the tensors that `patterns` name; dtype None: the request's."""

    patterns: tuple[str, ...]
    operation: Operation
    dtype: str | None

    def __str__(self) -> str:
        return patterns_text(self.patterns)


def patterns_text(patterns: Sequence[str]) -> str:
    """Return patterns as messages name them: a rule of a recipe may have thousands."""
    return few(patterns, _NAMED)


class Rules(Sequence[Rule]):
    """The rules of one request, in order."""

    def __init__(self, rules: Sequence[Rule] = ()) -> None:
        self._rules = tuple(rules)
        every = [(number, one) for number, rule in enumerate(rules) for one in rule.patterns]
        self._numbers = [number for number, _ in every]
        self._globs = Globs(pattern for _, pattern in every)

    @overload
    def __getitem__(self, at: int) -> Rule: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[Rule, ...]: ...

    def __getitem__(self, at: int | slice) -> Rule | tuple[Rule, ...]:
        return self._rules[at]

    def __len__(self) -> int:
        return len(self._rules)

    def of(self, tensor: str) -> Rule | None:
        """Return the first rule that names a tensor."""
        found = self._globs.first(tensor) if self._rules else None
        return None if found is None else self._rules[self._numbers[found]]

    def named(self) -> Collection[str]:
        """Return the names that rules give without patterns."""
        return self._globs.names.keys()

    def unmatched(self, names: Collection[str]) -> str | None:
        """Return the first pattern that none of the names matches."""
        return unmatched(names, (one for rule in self._rules for one in rule.patterns))


class Request(msgspec.Struct, frozen=True):
    """One merge to plan, made from a `mstore.terms.requests.MergeRequest`.

    operation: the method with its parameters and the experts' weights. budget: bytes (int), share
    of the full cost in (0, 1] (float), or None. max_error: bound on the relative error, or None.
    dtype: output dtype, None for the base's. analyze: whether missing statistics may be computed
    now. score: what units are ranked by. only, skip: patterns of tensor names (fnmatch,
    case-sensitive), sorted. expert_budget: as budget, for any one expert. top_p: share of the
    output's blocks that may differ from the base's, in (0, 1], or None. rules: as asked, in order.
    outputs: the sources of tensors that the base does not have, by name. layers: runs of layers to
    stack, as (member, first, last + 1), members counted from the base, 0. allow_missing: experts
    may lack tensors of the base, or have others. companions: the last of `experts` are
    companions: the role of each, and the number of what it belongs to (`PlanInput.of`).
    """

    base: Input
    experts: tuple[Input, ...]
    operation: Operation
    budget: int | float | None
    max_error: float | None
    dtype: str | None
    analyze: bool
    score: Score
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    expert_budget: int | float | None = None
    top_p: float | None = None
    rules: Rules = msgspec.field(default_factory=Rules)
    outputs: tuple[tuple[str, tuple[str, ...]], ...] = ()
    layers: tuple[tuple[int, int, int], ...] = ()
    allow_missing: bool = False
    companions: tuple[tuple[str, int | None], ...] = ()

    @property
    def models(self) -> tuple[Input, ...]:
        """Each expert, without the companions."""
        return self.experts[: len(self.experts) - len(self.companions)]

    @property
    def choice(self) -> ModelChoice:
        """The models to take of the inputs."""
        return ModelChoice(self.base.model, tuple(one.model for one in self.experts))

    def named_companions(self) -> tuple[tuple[str, str], ...]:
        """Return the companions as reports tell them: role and what it belongs to, and name."""
        names = (BASE, *(one.name for one in self.experts))
        own = self.experts[len(self.models) :]
        return tuple(
            (role if of is None else f"{role}:{names[of]}", one.name)
            for (role, of), one in zip(self.companions, own, strict=True)
        )

    def inputs(self, base: ManifestId, others: Sequence[ManifestId]) -> tuple[PlanInput, ...]:
        """Return the inputs of a plan: these contents, in the order of `experts`."""
        roles = [(EXPERT, None)] * len(self.models) + [*self.companions]
        return (
            PlanInput(BASE, None, base, self.base.model),
            *(
                PlanInput(role, of, manifest, one.model)
                for (role, of), manifest, one in zip(roles, others, self.experts, strict=True)
            ),
        )

    def rule_of(self, tensor: str) -> Rule | None:
        """Return the first rule that names a tensor of the output."""
        return self.rules.of(tensor)

    def operation_of(self, tensor: str) -> Operation:
        """Return what makes a tensor of the output, not settled."""
        rule = self.rule_of(tensor)
        return self.operation if rule is None else rule.operation

    def dtype_of(self, tensor: str, base: str) -> str:
        """Return the element type of a tensor of the output; base: that of the base's."""
        rule = self.rule_of(tensor)
        return (rule and rule.dtype) or self.dtype or base

    @property
    def operations(self) -> tuple[Operation, ...]:
        """All operations, not settled: the request's own first."""
        return (self.operation, *(rule.operation for rule in self.rules))


def resolve(
    asked: MergeRequest,
    *,
    base: Input,
    experts: Sequence[Input],
    companions: Mapping[str, Input] | None = None,
) -> Request:
    """Check everything that can be checked without looking at a tensor.

    base, experts, companions: the snapshots of the revisions in `asked`, in its order.  Raises
    BadRequest.
    """
    weights = [weight for _, weight in asked.weighted()]
    found = _companions(asked, companions or {})
    # A stack has no arithmetic, so its method does not count experts.
    counted = weights[:1] if asked.layers else weights
    operation = registry.operation(asked.method, asked.parameters, counted)
    rules = Rules([_rule(asked, rule, weights) for rule in asked.rules])
    _check_companions(operation, rules, [name for name, _ in asked.weighted()], [*found])
    error, share = asked.max_error, asked.top_p
    if share is not None:
        for one in (operation, *(rule.operation for rule in rules)):
            _check_top_p(share, one)
    if error is not None and not (math.isfinite(error) and error >= 0):
        raise BadRequest(f"the error limit must be a number of 0 or more, not {error!r}")
    return Request(
        base=base,
        experts=(*experts, *found.values()),
        operation=operation,
        budget=_limit(asked.budget, "budget"),
        max_error=None if error is None else float(error),
        dtype=None if asked.dtype is None else output_dtype(asked.dtype),
        analyze=asked.analyze,
        score=score_of(operation, asked.score),
        only=_patterns(asked.only, "only"),
        skip=_patterns(asked.skip, "skip"),
        expert_budget=_limit(asked.expert_budget, "expert_budget"),
        top_p=None if share is None else float(share),
        rules=rules,
        outputs=tuple(
            _output(name, asked.outputs[name], len(weights), companions=[of for _, of in found])
            for name in asked.outputs
        ),
        layers=_layers(asked, operation),
        allow_missing=asked.allow_missing,
        companions=tuple(found),
    )


def _companions(
    asked: MergeRequest, given: Mapping[str, Input]
) -> dict[tuple[str, int | None], Input]:
    """Return the companions by role and number of what they belong to, in order.

    Raises BadRequest for an unknown role, or one of nothing in the merge.
    """
    numbers: dict[str, list[int]] = {}
    for number, (revision, _) in enumerate(asked.weighted(), start=1):
        numbers.setdefault(str(revision), []).append(number)
    found: dict[tuple[str, int | None], Input] = {}
    roles = registry.roles(asked.method) if given else []
    own = registry.find(asked.method).companions if given else ()
    of_base = {one.role for one in own if one.of == BASE}
    for key, one in given.items():
        role, colon, of = key.partition(":")
        if role not in roles:
            raise BadRequest(
                f"no companion has the role {role[:_SHOWN]!r}; the roles: {', '.join(roles)}",
                where=Option("companions"),
                hint=did_you_mean(role, roles),
            )
        belongs: list[int | None] = [*numbers.get(of, [])] if colon else [None]
        if of == BASE and (role in of_base or not belongs):
            # Else, of an expert that was named so it is of the expert.
            belongs = [0]
        if not belongs:
            raise BadRequest(
                f"{of[:_SHOWN]!r} is neither {BASE} nor one of the experts as they were named: "
                f"{few([*numbers])}",
                where=Option("companions"),
                hint=did_you_mean(of, numbers),
            )
        for each in belongs:
            found[role, each] = one

    def place(key: tuple[str, int | None]) -> tuple[str, int]:
        role, of = key
        # As in a plan, what belongs to the whole merge comes first.
        return role, -1 if of is None else of

    return {key: found[key] for key in sorted(found, key=place)}


def _check_companions(
    operation: Operation,
    rules: Rules,
    experts: Sequence[object],
    given: Sequence[tuple[str, int | None]],
) -> None:
    """Raise BadRequest unless there is what the method asks for, and nothing else."""
    method = operation.method
    for rule in rules:
        other = rule.operation.method
        if other.companions != method.companions:
            own = method if method.companions else other
            raise BadRequest(
                f"{own.name} takes {' and '.join(one.words for one in own.companions)}, so it is "
                "the method of all tensors or of none",
                where=f"the rule for {rule}",
            )
    others = {role for role, _ in given} - {one.role for one in method.companions}
    if others:
        which = f" in the role {min(others)}" if method.companions else ""
        raise BadRequest(f"{method.name} takes no companions{which}", where=Option("companions"))
    names = ("the base", *map(str, experts))
    for asked in method.companions:
        places = asked.places(len(experts))
        found = [of for role, of in given if role == asked.role]
        if found == [*places]:
            continue
        lacking = [names[of] for of in places if of is not None and of not in found]
        has = "has" if len(lacking) == 1 else "have"
        told = f"{few(lacking)} {has} none" if lacking else "and nothing else has one"
        told = told if found else "none is given" if asked.of is None else told
        whose = {EXPERT: f":{next(iter(lacking), 'EXPERT')}", BASE: f":{BASE}", None: ""}
        raise BadRequest(
            f"{method.name} takes {asked.words}: {told}",
            where=Option("companions"),
            hint=Option("companions", {asked.role + whose[asked.of]: "REF"}),
        )


def _layers(asked: MergeRequest, operation: Operation) -> tuple[tuple[int, int, int], ...]:
    if not asked.layers:
        return ()
    if not operation.method.combine.stacks:
        raise BadRequest(
            f"layers are stacked as they are, and {operation.method.name} merges",
            where="layers",
            hint="a method that takes one expert, as it is",
        )
    others: dict[str, object] = {
        **{name: getattr(asked, name) for name in ("budget", "expert_budget", "max_error")},
        **{name: getattr(asked, name) for name in ("dtype", "top_p", "score")},
        **{name: getattr(asked, name) or None for name in ("only", "skip", "rules", "outputs")},
        "allow_missing": asked.allow_missing or None,
    }
    for name, value in others.items():
        if value is not None:
            raise BadRequest(
                phrase("layers are stacked as they are, without {name}", name=Option(name)),
                where="layers",
            )
    if any(weight != 1 for weight in (*operation.weights, *(w for _, w in asked.weighted()))):
        raise BadRequest("layers are stacked as they are, without scale", where="layers")
    members: dict[object, int] = {}
    for number, revision in enumerate((asked.base, *(one for one, _ in asked.weighted()))):
        members.setdefault(revision, number)
    return tuple(_run(one, members) for one in asked.layers)


def _run(given: object, members: Mapping[object, int]) -> tuple[int, int, int]:
    if not isinstance(given, tuple | list) or len(given) != 3:
        raise BadRequest("a run of layers is (model, first layer, last layer + 1)", where="layers")
    model, first, end = given
    if model not in members:
        raise BadRequest(f"{model} is neither the base nor one of the experts", where="layers")
    if not all(type(one) is int for one in (first, end)) or not 0 <= first < end:
        raise BadRequest(
            f"layers {first!r} to {end!r} of {model}: the first is 0, the end above it",
            where="layers",
        )
    return members[model], first, end


def _rule(asked: MergeRequest, rule: TensorRule, weights: Sequence[float]) -> Rule:
    patterns = rule.patterns()
    if not patterns:
        raise BadRequest("a rule names at least one pattern", where="rules")
    require_patterns(patterns, Option("tensors"))
    if rule.weights is not None and len(rule.weights) != len(weights):
        raise BadRequest(
            f"a rule has one weight per expert, {len(weights)}, not {len(rule.weights)}",
            where=patterns_text(patterns),
        )
    parameters = dict(rule.parameters)
    if rule.method is None:
        parameters = {**asked.parameters, **parameters}
    own = weights if rule.weights is None else list(rule.weights)
    try:
        operation = registry.operation(rule.method or asked.method, parameters, own)
        dtype = None if rule.dtype is None else output_dtype(rule.dtype)
    except BadRequest as error:
        error.locate(f"the rule for {patterns_text(patterns)}")
        raise
    return Rule(patterns, operation, dtype)


def _output(
    name: str, sources: str | Sequence[str], experts: int, *, companions: Sequence[int | None]
) -> tuple[str, tuple[str, ...]]:
    """Return an output's name, and the names of its sources, the base's first.

    companions: the numbers of what they belong to, whose tensors have the same names.
    """
    # A lone surrogate is not printable, either.
    sound = name.isprintable() and 0 < len(name.encode()) <= DEFAULT_LIMITS.name_bytes
    if not sound or name == METADATA_KEY:
        raise BadRequest(
            f"a tensor's name has 1 to {DEFAULT_LIMITS.name_bytes} bytes of printable text and is "
            f"not {METADATA_KEY}",
            where=f"outputs: {name[:_SHOWN]!r}",
        )
    named = (sources,) * (1 + experts) if isinstance(sources, str) else tuple(sources)
    if len(named) != 1 + experts:
        raise BadRequest(
            f"an output has one source in the base and one in each of {experts} experts, not "
            f"{len(named)}",
            where=name,
        )
    return name, named + tuple(named[of or 0] for of in companions)


def _patterns(patterns: Sequence[str], name: str) -> tuple[str, ...]:
    require_patterns(patterns, Option(name))
    # Sorted, so that equal requests are equal plans.
    return tuple(sorted(set(patterns)))


def _check_top_p(share: float, operation: Operation) -> None:
    if not 0 < share <= 1:
        raise BadRequest(
            f"a share of the output's blocks is above 0 and at most 1, not {share!r}",
            where=_TOP_P,
            hint=Option("top_p", 0.2),
        )
    if not operation.keeps_base:
        raise BadRequest(
            operation.method.combine.unkept(operation),
            where=_TOP_P,
            hint=Option("parameters", {"normalize": True})
            if "normalize" in operation.parameters
            else phrase("{budget} limits what is read", budget=Option("budget")),
        )


def _limit(given: BudgetGiven, name: str) -> int | float | None:
    """Return a budget as bytes (int) or a share (float), None for no limit.  Raises BadRequest."""
    if given is None:
        return None
    hint = phrase("{size} or {share}", size=Option(name, "2GiB"), share=Option(name, "30%"))
    budget = Budget.of(given, option=Option(name)).amount
    if isinstance(budget, int):
        if budget <= 0:
            raise BadRequest(
                "a budget of 0 reads no expert: that merge is the base itself", hint=hint
            )
    elif not 0 < budget <= 1:
        raise BadRequest(
            f"a budget as a share must be above 0 % and at most 100 %, not {budget:.6g}", hint=hint
        )
    return budget
