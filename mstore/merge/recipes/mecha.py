"""Recipes of sd-mecha (`.mecha`, format 0.1.0), as one merge of the models that they name.

The nodes of a recipe are computed for weights, not for tensors: a sum of sums of models is one sum,
and a difference is one whose weights add up to 0.  What a method makes that does not add models up
is a term of a sum like a model, `_Made`.  Weights may differ by network block, so all this is done
once for each `TensorKind` of tensors: those in which every number is the same.

Which of sd-mecha's methods are which of mstore's is said by `_SUMS` and `_METHODS`, a row for each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import PureWindowsPath
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

import msgspec

from mstore.checkpoint.paths import is_safetensors, name_for
from mstore.merge.recipes.mecha_lines import SHOWN, MechaLine, NodeRef, Word, Written, mecha_lines
from mstore.merge.recipes.recipe import Text, at
from mstore.merge.recipes.sums import weighed
from mstore.models.network_blocks import BASE, VAE
from mstore.terms.errors import BadRequest, did_you_mean
from mstore.terms.phrases import few

MAX_STEPS: Final = 20_000_000
"""The most products of weights that a recipe may need: values of nodes x models x kinds."""

_ADDED: Final = "task_arithmetic"
_MASK: Final = "train_difference_mask"
_EXACT: Final = 1e-6
_APART: Final = "merge that part by a recipe of its own, and name the result as a model in this one"
_KEY: Final = "key"
"""The one name in the numbers of a scalar."""
_BLOCK: Final = re.compile(r"[A-Z][A-Z0-9]*")
_ADAPTER: Final = "_lora"
"""What the configs of adapters end with."""


class TensorKind(NamedTuple):
    """Tensors for which a recipe says the same.

    block: their network block, None where nothing depends on it. lacking: models that have none of
    them, by the recipe's names.
    """

    block: str | None = None
    lacking: frozenset[str] = frozenset()


class _Leaf(msgspec.Struct, frozen=True):
    """A model of the recipe.  adapter: a LoRA, which is a difference."""

    name: str
    adapter: bool


class _Made(msgspec.Struct, frozen=True):
    """What a method makes of models, as a term of a sum.

    base: None if its models are adapters, which have any. delta: whether it is the difference to
    the base. name: the method in sd-mecha.
    """

    method: str
    parameters: tuple[tuple[str, Any], ...]
    base: str | None
    experts: tuple[str, ...]
    delta: bool
    name: str
    line: int


class _Numbers(msgspec.Struct, frozen=True):
    """What a dict has, by name."""

    of: Mapping[str, Word]


_Sum = dict[_Leaf | _Made, float]
_Value = Word | _Numbers | _Sum


class MechaMerge(msgspec.Struct, frozen=True):
    """The merge that a recipe asks for, for one kind of tensors.

    weights: of each model but the base. line: of the node that names the method.
    """

    base: str
    method: str
    parameters: Mapping[str, Any]
    weights: Mapping[str, float]
    line: int

    @property
    def is_sum(self) -> bool:
        """Whether it adds models up, so that one of weight 0 is as none."""
        return self.method == _ADDED


class _Nothing(Exception):
    """No model of a sum has such tensors."""


class MechaRecipe(msgspec.Struct, frozen=True, dict=True):
    """A recipe of sd-mecha.  where: the name of its file. strict: refuse what is only nearly so."""

    where: str
    lines: tuple[MechaLine, ...]
    strict: bool
    name: None = None
    """recipes of one file alone need names"""

    @cached_property
    def used(self) -> Mapping[int, MechaLine]:
        """The nodes that the result is made of by number, in order."""
        found, left = set(), [len(self.lines) - 1]
        while left:
            number = left.pop()
            if number not in found:
                found.add(number)
                left += self.lines[number].nodes()
        return {number: self.lines[number] for number in sorted(found)}

    @cached_property
    def whole(self) -> MechaMerge:
        """What it asks for, whatever its weights are: for tensors that every model has."""
        return self.asked(TensorKind())

    @property
    def is_by_block(self) -> bool:
        """Whether some numbers differ by network block."""
        every = self.used.values()
        return any(one.command == "dict" and _is_blocks(one.options) for one in every)

    @property
    def fills(self) -> bool:
        """Whether tensors that models lack are from others."""
        every = self.used.values()
        return any(one.command == "merge" and one.title == "fallback" for one in every)

    def require_few(self, kinds: int) -> None:
        """Raise BadRequest if it takes too long to compute for so many kinds of tensors."""
        every = self.used.values()
        values = sum(1 + len(one.given) + len(one.options) for one in every)
        models = sum(one.command == "model" for one in every)
        if values * models * kinds > MAX_STEPS:
            raise BadRequest(
                f"a recipe of {len(every)} nodes, {models} models and {kinds} kinds of tensors is "
                "too large",
                where=self.where,
            )

    @property
    def adapters(self) -> frozenset[str]:
        """The models that are LoRAs, by what it says."""
        models = (one for one in self.used.values() if one.command == "model")
        return frozenset(one.title for one in models if _is_lora(one))

    def every_source(self) -> tuple[()]:
        """Return the sources of slices: there are none."""
        return ()

    def named(self) -> tuple[Text, ...]:
        """Return every model that it names, once, the base first."""
        found: dict[str, Text] = {}
        for one in self.used.values():
            if one.command == "model":
                found.setdefault(one.title, Text(one.title, one.line))
        return tuple(sorted(found.values(), key=lambda one: one.text != self.whole.base))

    def asked(self, kind: TensorKind) -> MechaMerge:
        """Return what it asks for, for tensors of a kind.  Raises BadRequest."""
        return _Evaluation(self, kind).asked()

    def warnings(self) -> tuple[str, ...]:
        """Return what mstore makes in another way than sd-mecha, as sentences with their lines."""
        told = _Evaluation(self, TensorKind())
        told.asked()
        return tuple(told.warnings)


def ref_of(model: str) -> str:
    """Return the branch that FILE.safetensors is, wherever its author had it; else the name."""
    if not is_safetensors(model):
        return model
    return name_for(PureWindowsPath(PureWindowsPath(model).name))


# -- reading ---------------------------------------------------------------------------------------


def parse_mecha(text: str, where: str, *, strict: bool = False) -> MechaRecipe:
    """Return the recipe of a file.

    where: the file's name, for errors. strict: whether what mstore makes otherwise is refused.
    Raises BadRequest that names the line, for what it asks for, too.
    """
    recipe = MechaRecipe(where, mecha_lines(text, where), strict)
    recipe.require_few(1)
    known: dict[str, str] = {}
    for one in recipe.named():
        other = known.setdefault(ref_of(one.text), one.text)
        if other != one.text:
            raise BadRequest(
                f"{other} and {one.text} would be one branch, {ref_of(one.text)}",
                where=at(where, one.line),
                hint="give one of the two files another name",
            )
    return recipe


def _is_lora(one: MechaLine) -> bool:
    return str(one.options.get("model_config")).endswith(_ADAPTER)


def _is_blocks(names: Collection[str]) -> bool:
    return bool(names) and all(map(_BLOCK.fullmatch, names))


# -- what methods are ------------------------------------------------------------------------------


class _Weights(NamedTuple):
    """A method that adds models up.

    models: their names, None for any number of them. alpha: the default of its number, None if it
    has none. of: the weights of so many models, by it.
    """

    models: tuple[str, ...] | None
    alpha: float | None
    of: Callable[[int, float], Sequence[float]]


_PAIR: Final = ("a", "b")
_SUMS: Final[Mapping[str, _Weights]] = MappingProxyType(
    {
        "weighted_sum": _Weights(_PAIR, 0.5, lambda _, alpha: (1.0 - alpha, alpha)),
        "add_difference": _Weights(_PAIR, 1.0, lambda _, alpha: (1.0, alpha)),
        "subtract": _Weights(_PAIR, None, lambda *_: (1.0, -1.0)),
        "scale": _Weights(_PAIR[:1], 1.0, lambda _, alpha: (alpha,)),
        "n_average": _Weights(None, None, lambda count, _: (1.0 / count,) * count),
    }
)


_Inputs = Literal["models", "every", "deltas", "corner"]
"""How a method's models are base and experts: the base first; all experts, the first the base, too;
differences of experts to one base; differences of the base and of an expert to another expert.
"""


class _Parameter(NamedTuple):
    """A parameter of sd-mecha's: its default, and what it is here.

    name: mstore's, None for one that may have one value only, `value`. value: mstore's value of it.
    nearly: why the result is only nearly sd-mecha's, if it is: of a value that is not the default.
    """

    default: Word
    name: str | None
    value: Any = lambda given: given
    nearly: str | None = None


class _Method(NamedTuple):
    """A method of mstore's that sd-mecha has.

    models: their names, None for any number of them. inputs: how they are base and experts. most:
    of how many experts it is the same, None for any number. own: parameters that make it the same.
    nearly: what differs, None for nothing.
    """

    name: str
    models: tuple[str, ...] | None
    inputs: _Inputs
    most: int | None
    parameters: Mapping[str, _Parameter]
    own: Mapping[str, Any] = MappingProxyType({})
    nearly: str | None = None

    @property
    def is_delta(self) -> bool:
        """Whether it is of differences, and makes one."""
        return self.inputs in ("deltas", "corner")


_METHODS: Final[Mapping[str, _Method]] = MappingProxyType(
    {
        "slerp": _Method(
            *("slerp", _PAIR, "models", 1, {"alpha": _Parameter(0.5, "t")}),
            nearly="turns the models themselves; sd-mecha turns their directions, and interpolates "
            "their norms",
        ),
        "ties_sum": _Method(
            *("ties", None, "deltas", None),
            {
                "k": _Parameter(1.0, "density", nearly="sd-mecha keeps one element more of each"),
                "vote_sgn": _Parameter(False, "by_count", lambda given: not given),
            },
        ),
        "tensor_sum": _Method(
            *("tensor_sum", _PAIR, "models", 1),
            {"width": _Parameter(0.5, "width"), "offset": _Parameter(0.0, "offset")},
        ),
        "clamp": _Method(
            *("clamp", None, "models", None, {"stiffness": _Parameter(0.0, "stiffness")})
        ),
        "add_cosine_a": _Method(
            *("add_cosine_a", _PAIR, "models", 1, {"alpha": _Parameter(1.0, "alpha")})
        ),
        "add_cosine_b": _Method(
            *("add_cosine_b", _PAIR, "models", 1, {"alpha": _Parameter(1.0, "alpha")})
        ),
        "geometric_median": _Method(
            *("geometric_median", None, "every", None),
            {
                "eps": _Parameter(1e-6, "eps"),
                "maxiter": _Parameter(100, "max_iter"),
                "ftol": _Parameter(1e-20, None, 1e-20),
            },
            nearly="goes on to the last step; sd-mecha stops where float32 sees no gain",
        ),
        "perpendicular_component": _Method("add_perpendicular", _PAIR, "corner", 2, {}),
        "train_difference_mask": _Method(
            *("train_difference", (*_PAIR, "c"), "models", 2, {"alpha": _Parameter(1.0, "alpha")})
        ),
        "dropout": _Method(
            *("dare_linear", None, "deltas", 1),
            {
                "probability": _Parameter(0.9, "density", lambda given: 1.0 - given),
                "rescale": _Parameter(1.0, "rescale", {0: False, 1: True}.__getitem__),
                "overlap": _Parameter(1.0, None, 1),
                "overlap_emphasis": _Parameter(0.0, None, 0),
                "seed": _Parameter(None, "seed"),
            },
        ),
        "model_stock": _Method(
            *("model_stock", None, "deltas", 2, {"cos_eps": _Parameter(1e-6, None, 1e-6)}),
            {"filter_wise": True},
        ),
    }
)


# -- what a recipe asks for ------------------------------------------------------------------------


class _Evaluation:
    """Computes the nodes of a recipe for one kind of tensors."""

    def __init__(self, recipe: MechaRecipe, kind: TensorKind) -> None:
        self._recipe = recipe
        self._kind = kind
        self._values: dict[int, _Value | _Nothing] = {}
        self.warnings: dict[str, None] = {}

    def asked(self) -> MechaMerge:
        for number, one in self._recipe.used.items():
            try:
                self._values[number] = self._value(one)
            except _Nothing as nothing:
                self._values[number] = nothing
            except BadRequest as error:
                error.locate(at(self._recipe.where, one.line))
                raise
        last = self._recipe.lines[-1]
        found = self._values[len(self._recipe.lines) - 1]
        if isinstance(found, _Nothing):
            # No model has such tensors but the base: they stay as they are.
            return MechaMerge(self._recipe.whole.base, _ADDED, {}, {}, last.line)
        try:
            return self._merge(self._sum(found), last.line)
        except BadRequest as error:
            error.locate(at(self._recipe.where, last.line))
            raise

    def _value(self, one: MechaLine) -> _Value:
        if one.command == "model":
            return self._model(one)
        if one.command == "dict":
            return _Numbers({name: self._scalar(own) for name, own in one.options.items()})
        if one.command == "literal":
            return self._known(one.given[0])
        name = one.title
        if name == "fallback":
            return self._fallback(one)
        if name == "cast":
            return self._cast(one)
        if name.startswith("convert_"):
            return self._converted(one)
        if name in _SUMS:
            return self._added(one)
        if name in _METHODS:
            return self._made(one)
        known = (*_SUMS, *_METHODS, "fallback")
        raise BadRequest(
            f"mstore has no method like {name[:SHOWN]!r} of sd-mecha",
            hint=did_you_mean(name, known) or f"it has {', '.join(known)}",
        )

    def _model(self, one: MechaLine) -> _Sum:
        name, space = one.title, one.options.get("merge_space")
        if space not in (None, "weight"):
            raise BadRequest(f"{name} is in the space {space}; mstore merges models and LoRAs")
        if name in self._kind.lacking:
            raise _Nothing
        return {_Leaf(name, _is_lora(one)): 1.0}

    # -- what is given ---------------------------------------------------------------------------

    def _known(self, written: Written) -> _Value:
        """Return what is written, or the node that it names."""
        if not isinstance(written, NodeRef):
            return written
        found = self._values[written.number]
        if isinstance(found, _Nothing):
            raise found
        return found

    def _scalar(self, written: Written) -> Word:
        """Return a number or word: that of the tensors' block, where it differs by block."""
        found = self._known(written)
        if isinstance(found, dict):
            raise BadRequest("what is made of models stands in place of a number")
        if not isinstance(found, _Numbers):
            return found
        if set(found.of) == {_KEY}:
            return found.of[_KEY]
        if not _is_blocks(found.of):
            raise BadRequest("numbers by tensor: mstore takes one for all, or one for each block")
        if self._kind.block is None:
            return next(iter(found.of.values()))
        name = BASE if self._kind.block == VAE and VAE not in found.of else self._kind.block
        if name not in found.of:
            raise BadRequest(f"no number for the block {name}, but for {few([*found.of])}")
        return found.of[name]

    def _number(self, written: Written) -> float:
        found = self._scalar(written)
        if isinstance(found, bool | str | None):
            raise BadRequest(f"{found!r} stands in place of a number")
        return float(found)

    def _sum(self, found: _Value) -> _Sum:
        if not isinstance(found, dict):
            raise BadRequest("a number or word stands in place of a model")
        return found

    def _sums(self, written: Sequence[Written]) -> list[_Sum]:
        return [self._sum(self._known(one)) for one in written]

    # -- methods ---------------------------------------------------------------------------------

    def _fallback(self, one: MechaLine) -> _Value:
        (first, other), _ = one.bound(("a", "default"))
        try:
            return self._known(first)
        except _Nothing:
            return self._known(other)

    def _cast(self, one: MechaLine) -> _Value:
        (model,), told = one.bound(("a",), ("device", "dtype"))
        if self._scalar(told.get("dtype")) is not None:
            raise BadRequest(
                "a type in a recipe: leave the cast out, and give the type of the result"
            )
        return self._known(model)

    def _converted(self, one: MechaLine) -> _Value:
        (given,), _ = one.bound(_PAIR[:1])
        found = self._known(given)
        # An adapter is of each layout: what it changes is found by the plan.
        if isinstance(found, dict) and not all(map(_is_adapter, found)):
            raise BadRequest(f"{one.title[:SHOWN]} gives a model's tensors other names")
        return found

    def _added(self, one: MechaLine) -> _Sum:
        row = _SUMS[one.title]
        models, told = one.bound(row.models, () if row.alpha is None else ("alpha",))
        mask = self._mask(told.get("alpha"))
        if mask is not None:
            return self._masked(mask, self._sums(models))
        alpha = self._number(told.get("alpha", row.alpha or 0.0))
        weights = row.of(len(models), alpha)
        found = weighed(zip(self._sums(models), weights, strict=True))
        if not all(map(math.isfinite, found.values())):
            raise BadRequest("a weight is too large")
        return found

    def _mask(self, written: Written) -> _Made | None:
        """Return the number of an element that a method makes, where one stands for alpha."""
        found = self._known(written)
        made = next(iter(found), None) if isinstance(found, dict) and len(found) == 1 else None
        return made if isinstance(made, _Made) and made.name == _MASK else None

    def _masked(self, mask: _Made, models: Sequence[_Sum]) -> _Sum:
        """Return the base and what a mask makes of the difference of the mask's own experts."""
        *rest, delta = models
        if _pair(delta, mask.name, is_delta=True) != mask.experts[::-1] or len(rest) != 1:
            raise BadRequest(f"{mask.name} is of other models than what it weighs", hint=_APART)
        return weighed([(rest[0], 1.0), ({msgspec.structs.replace(mask, delta=True): 1.0}, 1.0)])

    def _made(self, one: MechaLine) -> _Sum:
        row = _METHODS[one.title]
        given, told = one.bound(row.models, [*row.parameters])
        parameters = dict(row.own)
        for key, own in row.parameters.items():
            value = self._scalar(told.get(key, own.default))
            if own.name is None:
                if value != own.value:
                    raise BadRequest(f"{row.name} is like {one.title} if {key} is {own.value}")
            elif value is not None:
                try:
                    parameters[own.name] = own.value(value)
                except (KeyError, TypeError):
                    raise BadRequest(f"{row.name} has nothing like {key} = {value!r}") from None
            if own.nearly is not None and value != own.default:
                self._nearly(f"{key} = {value}: {own.nearly}", one.line)
        if row.nearly is not None:
            self._nearly(f"{row.name} {row.nearly}", one.line)
        base, experts = self._inputs(row, one.title, self._sums(given))
        made = _Made(
            *(row.name, tuple(parameters.items()), base, experts, row.is_delta),
            *(one.title, one.line),
        )
        return {made: 1.0}

    def _nearly(self, what: str, line: int) -> None:
        if self._recipe.strict:
            raise BadRequest(what)
        self.warnings[f"{at(self._recipe.where, line)}: {what}"] = None

    def _inputs(
        self, row: _Method, name: str, models: Sequence[_Sum]
    ) -> tuple[str | None, tuple[str, ...]]:
        """Return base and experts of a method.  Raises BadRequest."""
        pairs = [_pair(one, name, is_delta=row.is_delta) for one in models]
        experts = [expert for _, expert in pairs]
        bases = {base for base, _ in pairs if base is not None}
        if row.inputs == "models":
            bases = {experts.pop(0)}
        elif row.inputs == "every":
            return experts[0], tuple(experts)
        if len(bases) > 1:
            raise BadRequest(f"{name} of differences to several models: {few(sorted(bases))}")
        if row.inputs == "corner":
            # (base - second) and (first - second): what is made is a difference to that base.
            bases, experts = {experts[0]}, [experts[1], *bases]
        if row.most is not None and len(experts) != row.most:
            raise BadRequest(
                f"{row.name} is like {name} of {row.most}, and these are {len(experts)}"
            )
        if len({*bases, *experts}) != len(bases) + len(experts):
            raise BadRequest(f"{name} has a model twice")
        return next(iter(bases), None), tuple(experts)

    # -- the result ------------------------------------------------------------------------------

    def _merge(self, own: _Sum, line: int) -> MechaMerge:
        """Return the merge that a sum is."""
        total = math.fsum(weight for one, weight in own.items() if not _is_delta(one))
        if abs(total - 1.0) > _EXACT:
            raise BadRequest(
                "the result is a difference of models, and no model"
                if abs(total) <= _EXACT
                else f"the weights of the models add up to {total:g}, not to 1"
            )
        leaves = {one: weight for one, weight in own.items() if isinstance(one, _Leaf)}
        inner = [one for one in own if isinstance(one, _Made)]
        if not inner:
            models = [one.name for one in leaves if not one.adapter]
            if self._kind != TensorKind():
                models.insert(0, self._recipe.whole.base)
            experts = {one.name: weight for one, weight in leaves.items() if one.name != models[0]}
            return MechaMerge(models[0], _ADDED, {}, experts, line)
        made, *others = inner
        rest = [one.name for one, weight in leaves.items() if abs(weight) > _EXACT]
        base = rest[0] if made.base is None and rest else made.base
        if others or base is None or rest not in ([], [base]):
            raise BadRequest(
                f"what {made.name} makes (line {made.line}) is added to others", hint=_APART
            )
        parameters = {**dict(made.parameters), "scale": own[made]}
        return MechaMerge(
            *(base, made.method, parameters, dict.fromkeys(made.experts, 1.0), made.line)
        )


def _pair(own: _Sum, name: str, *, is_delta: bool) -> tuple[str | None, str]:
    """Return (base, expert) of expert - base; of a model alone, and of an adapter, no base."""
    inner = next((one for one in own if isinstance(one, _Made)), None)
    if inner is not None:
        raise BadRequest(f"{name} takes what {inner.name} makes (line {inner.line})", hint=_APART)
    found = {weight: one for one, weight in own.items() if isinstance(one, _Leaf) and weight}
    expert, base = found.get(1.0), found.get(-1.0)
    count = sum(1 for weight in own.values() if weight)
    is_alone = expert is not None and base is None and expert.adapter == is_delta
    is_pair = expert is not None and base is not None and is_delta
    if expert is None or count != len(found) or count != is_alone + 2 * is_pair:
        wanted = "differences of two models" if is_delta else "models"
        raise BadRequest(f"{name} takes {wanted}, and no weighted sums of others", hint=_APART)
    return (base.name if base else None), expert.name


def _is_adapter(one: _Leaf | _Made) -> bool:
    return isinstance(one, _Leaf) and one.adapter


def _is_delta(one: _Leaf | _Made) -> bool:
    return one.delta if isinstance(one, _Made) else one.adapter
