"""Writing recipes: a plan as mergekit's YAML, such that reading it gives the same plan again.

A pure function of the plan, of what its method is, and of the names of the base's tensors: equal
plans give equal bytes anywhere.  Models are named by their content.  Budgets are not written: the
bytes of a block at rest depend on the store.  Values that differ between tensors become conditions
with filters: a filter is any part of a name, so parts are chosen that name no other tensor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec
import numpy as np

from mstore.merge.recipes.recipe import Condition, Given, RecipeMethod, Setting
from mstore.merge.recipes.resolve import DTYPES, WEIGHT
from mstore.store.objects.plan import Plan, PlanInput, PlanOperation
from mstore.terms.errors import BadRequest
from mstore.terms.requests import BASE, UNION

HEAD: Final = (
    "# The recipe of this merge. Models are named by mstore's ids of their contents.",
    "# The recipe of this merge. Comments behind names are ids of their contents.",
)
"""The first line: as it is stored, and with names of one store."""

_ARITHMETIC: Final = "float32"
_ID = r"[0-9a-f]{64}(?::(?:[^\"\\+]|\\.)*)?"
_MODEL = re.compile(rf'^([^"]*?(\w+): )"({_ID}(?:\+{_ID})?)"$', re.MULTILINE)
"""A line that names a model."""
_COMPANION = re.compile(rf'^(  "\w+:?)({_ID}|)": "({_ID})"$', re.MULTILINE)
"""A line that names a companion."""

# By tensor; what is not in it has the value of the merge itself.
_Differing = Mapping[str, Given]
_Value = Callable[[PlanOperation], Given]


def recipe_of(
    plan: Plan,
    method: RecipeMethod,
    tensors: Sequence[str],
    adapters: frozenset[bytes] = frozenset(),
) -> str:
    """Return the recipe of a plan.

    tensors: names of the base's tensors. adapters: the experts that are adapters of it. Raises
    BadRequest for a plan that no recipe can state.
    """
    why = _why_not(plan, method)
    if why is not None:
        raise BadRequest(f"no recipe can state this merge: {why}")
    return "\n".join(_Writer(plan, method, tensors, adapters).lines()) + "\n"


def named(text: str, refs: Mapping[str, str]) -> str:
    """Return a recipe as it is written, with refs for models that have one.

    refs: by the ids of contents. Ids stay as comments: a ref may move.
    """

    def told(id: str) -> str:
        content, colon, model = id.partition(":")
        # The model's name is as it is written there.
        return json.dumps(refs.get(content, content))[1:-1] + colon + model

    def line(found: re.Match[str]) -> str:
        start, key, ids = found.groups()
        name = "+".join(map(told, ids.split("+")))
        # Such a name is a word there.
        if name == ids or (key == "tokenizer_source" and name in (BASE, UNION)):
            return found[0]
        return f'{start}"{name}"  # {ids}'

    def companion(found: re.Match[str]) -> str:
        start, of, id = found.groups()
        lines = f'{start}{told(of)}": "{told(id)}"'
        return lines if lines == found[0] else f"{lines}  # {id}"

    changed = _COMPANION.sub(companion, _MODEL.sub(line, text))
    return changed if changed == text else changed.replace(*HEAD, 1)


def stacked(layers: Sequence[tuple[str, int]]) -> Iterator[str]:
    """Yield the slices of a stack of layers, each given as model and number: runs in one piece."""
    yield "slices:"
    start = 0
    for end in range(1, len(layers) + 1):
        model, first = layers[start]
        if end < len(layers) and layers[end] == (model, first + end - start):
            continue
        yield "- sources:"
        yield f"  - model: {json.dumps(model)}"
        yield f"    layer_range: [{first}, {first + end - start}]"
        start = end


def _named(one: PlanInput) -> str:
    """Return an input as a recipe names it: by the id of its content, and its model."""
    return one.manifest_id().hex() + ("" if one.model is None else f":{one.model}")


def _why_not(plan: Plan, method: RecipeMethod) -> str | None:
    if any(tensor.sources for tensor in plan.tensors):
        return "it has tensors that the base does not have"
    if any(tensor.dtype for tensor in plan.tensors):
        return "some of its tensors have a type of their own"
    if any(operation.method != plan.method for operation in plan.operations):
        return "some of its tensors have a method of their own"
    if any("+" in (one.model or "") for one in plan.inputs):
        return "a model with a + in its name would be one with an adapter"
    base, *experts = (one.key for one in (plan.inputs[0], *plan.experts))
    if plan.layers:
        return None
    if len(set(experts)) != len(experts):
        return "two experts are one model"
    if base in experts and not method.takes_base:
        return "an expert is the base"
    named = [name for name, one in method.parameters.items() if one.of_base]
    operations = plan.operations
    if method.takes_base and base not in experts:
        for name in named:
            if any(name in dict(one.parameters) for one in operations):
                return f"{name} needs a base model, which a recipe of {plan.method} averages, too"
    if plan.dtype is not None and plan.dtype not in DTYPES:
        return f"no recipe has the type {plan.dtype}"
    return None


class _Writer:
    def __init__(
        self,
        plan: Plan,
        method: RecipeMethod,
        tensors: Sequence[str],
        adapters: frozenset[bytes],
    ) -> None:
        self._plan = plan
        self._adapters = adapters
        self._method = method
        self._tensors = tensors
        self._all = "\n".join(tensors)
        self._own = {tensor.name: plan.operation_of(tensor) for tensor in plan.tensors}
        self._operations = plan.operations

    def lines(self) -> Iterator[str]:
        plan = self._plan
        yield HEAD[0]
        left_out = (
            ("Only tensors that match were merged", plan.criteria.only),
            ("Tensors that match are the base's", plan.criteria.skip),
        )
        for what, patterns in left_out:
            if patterns:
                yield f"# {what}: {' '.join(map(json.dumps, patterns))}"
        if plan.allow_missing:
            yield "# Tensors may be missing, as was allowed: the base's count for what a model"
            yield "# lacks, and what the base lacks is left out."
        yield f"merge_method: {plan.method}"
        if plan.layers:
            yield from self._slices()
            return
        base = _named(plan.inputs[0])
        is_listed = plan.inputs[0].key in [expert.key for expert in plan.experts]
        if not self._method.takes_base or (is_listed and not self._method.is_baseless):
            yield f"base_model: {json.dumps(base)}"
        else:
            # mergekit would average a base_model like the others; this is where files are from.
            yield f"tokenizer_source: {json.dumps(base)}"
        yield "models:"
        for number, expert in enumerate(plan.experts):
            own = _named(expert)
            model = f"{base}+{own}" if expert.manifest in self._adapters else own
            yield f"- model: {json.dumps(model)}"
            yield from (f"  {line}" for line in self._parameters(self._of_model(number)))
        yield from self._parameters(self._shared())
        if plan.companions:
            yield "companions:"
        for one in plan.companions:
            of = "" if one.of is None else f":{_named(plan.inputs[one.of])}"
            yield f"  {json.dumps(one.role + of)}: {json.dumps(_named(one))}"
        if plan.dtype is not None:
            yield f"dtype: {_ARITHMETIC}"
            yield f"out_dtype: {DTYPES[plan.dtype]}"

    def _slices(self) -> Iterator[str]:
        """Yield the runs of layers, and the model that the other files are from."""
        plan = self._plan
        members = [expert.manifest_id().hex() for expert in plan.inputs]
        yield f"base_model: {json.dumps(plan.base_id().hex())}"
        yield from stacked([(members[member], layer) for member, layer in plan.layers])

    def _of_model(self, number: int) -> Iterator[tuple[str, Given, _Differing]]:
        if self._method.weighted:
            yield self._values(WEIGHT, lambda one: _single(one.weights[number]))
        for name in self._split():
            yield self._values(name, partial(_of_expert, name, number))

    def _shared(self) -> Iterator[tuple[str, Given, _Differing]]:
        split = self._split()
        # Some parameters are in a plan only where they have an effect, for some of its tensors.
        for name in sorted({name for one in self._operations for name, _ in one.parameters}):
            # That no base model is named says the same.
            if name not in split and name != self._method.baseless:
                yield self._values(name, partial(_of_all, self._method, name))

    def _split(self) -> list[str]:
        """Return the parameters that have a value for each expert, in one operation at least."""
        return [
            name
            for name, _ in self._plan.operation.parameters
            if self._method.parameters[name].each
            and any(len(set(_each(one, name))) > 1 for one in self._operations)
        ]

    def _values(self, name: str, value: _Value) -> tuple[str, Given, _Differing]:
        own = value(self._plan.operation)
        found = {tensor: value(one) for tensor, one in self._own.items()}
        return name, own, {tensor: one for tensor, one in found.items() if one != own}

    def _parameters(self, told: Iterable[tuple[str, Given, _Differing]]) -> Iterator[str]:
        head = ["parameters:"]
        for name, own, differing in told:
            yield from head
            head = []
            if not differing:
                yield f"  {name}: {_text(own)}"
                continue
            yield f"  {name}:"
            for part, value in self._conditions(own, differing):
                yield f"  - filter: {json.dumps(part)}"
                yield f"    value: {_text(value)}"
            yield f"  - value: {_text(own)}"

    def _conditions(self, own: Given, differing: _Differing) -> list[tuple[str, Given]]:
        """Return filters and values that give each tensor its value."""
        short = list(self._short(own, differing))
        return short if self._is_right(short, own, differing) else self._long(own, differing)

    def _short(self, own: Given, differing: _Differing) -> Iterator[tuple[str, Given]]:
        """Yield the longest common beginnings of names of equal values, and whole names."""
        root = _Branch()
        for name in self._tensors:
            root.add(name, differing.get(name, own))
        yield from root.uniform("", own)

    def _long(self, own: Given, differing: _Differing) -> list[tuple[str, Given]]:
        """Return whole names, the longest first, and those that have such a name as a part."""
        listed = set(differing)
        for name in differing:
            if self._all.count(name) > 1:
                listed |= {other for other in self._tensors if name in other}
        return [
            (name, differing.get(name, own)) for name in sorted(listed, key=lambda n: (-len(n), n))
        ]

    def _is_right(
        self, conditions: Sequence[tuple[str, Given]], own: Given, differing: _Differing
    ) -> bool:
        setting = Setting(
            (*(Condition(value, part, 0) for part, value in conditions), Condition(own, None, 0)), 0
        )
        return all(setting.given(name) == differing.get(name, own) for name in self._tensors)


class _Branch(msgspec.Struct):
    """The names with one beginning. values: all of their values."""

    values: set[Given] = msgspec.field(default_factory=set)
    branches: dict[str, _Branch] = msgspec.field(default_factory=dict)
    leaves: dict[str, Given] = msgspec.field(default_factory=dict)

    def add(self, name: str, value: Given) -> None:
        self.values.add(value)
        head, dot, rest = name.partition(".")
        if dot:
            self.branches.setdefault(f"{head}.", _Branch()).add(rest, value)
        else:
            self.leaves[name] = value

    def uniform(self, path: str, own: Given) -> Iterator[tuple[str, Given]]:
        for head, branch in self.branches.items():
            if branch.values == {own}:
                continue
            if len(branch.values) == 1:
                yield path + head, next(iter(branch.values))
            else:
                yield from branch.uniform(path + head, own)
        for name, value in self.leaves.items():
            if value != own:
                yield path + name, value


def _of_expert(name: str, number: int, operation: PlanOperation) -> Given:
    return _each(operation, name)[number]


def _of_all(method: RecipeMethod, name: str, operation: PlanOperation) -> Given:
    known = method.parameters[name]
    value = known.write(dict(operation.parameters).get(name, known.default))
    # Of several values for experts that are one, `_split` says.
    told = value[0] if isinstance(value, tuple) else value
    assert isinstance(told, bool | int | float | str)
    return told


def _each(operation: PlanOperation, name: str) -> tuple[Given, ...]:
    value: object = dict(operation.parameters)[name]
    experts = len(operation.weights)
    if isinstance(value, tuple):
        return value
    assert isinstance(value, bool | int | float | str)
    return (value,) * experts


def _single(weight: float) -> float:
    """Return the number with the fewest digits that is this float32."""
    return float(str(np.float32(weight)))


def _text(value: Given) -> str:
    """Format a value such that YAML 1.1 reads it as what it is: 1e-05 would be text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value
    text = repr(value)
    digits, exponent, power = text.partition("e")
    return f"{digits}.0e{power}" if exponent and "." not in digits else text
