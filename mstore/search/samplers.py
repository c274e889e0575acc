"""Samplers: what to try next, by what was found so far.

A sampler is asked for choices and told their scores, in the order of asking.  It draws from its
seed alone: equal answers lead to equal choices, so a search that was interrupted is its answers,
told again.  Of several choices that are asked before they are told, none depends on another's
score, so they may be tried side by side.

Sources: Bergstra et al., Algorithms for Hyper-Parameter Optimization (2011), for `tpe`; Hansen, The
CMA Evolution Strategy: A Tutorial (2016), for `cmaes`; Wortsman et al., Model soups (2022), Recipe
1, for `greedy-soup`.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from mstore.search.template import Free, Template
from mstore.terms.errors import BadRequest, Unavailable, did_you_mean
from mstore.terms.phrases import Option

POINTS: Final = 5
"""How many values a grid has of a number without a step."""
_SIGMA: Final = 1 / 6
"""Of CMA-ES: how far its first draws are from the start, as a share of the range."""


class Chosen(msgspec.Struct, frozen=True):
    """What to try: the free numbers, and which experts; None: all."""

    values: tuple[float, ...]
    experts: tuple[str, ...] | None = None


class Ingredient(msgspec.Struct, frozen=True):
    """An expert that a greedy soup asked for.

    alone: its own score; None: it failed. tried: the score of the soup with it; None: that failed,
    or was not tried. kept: whether it is in the soup; None: nobody knows, as it was not tried.
    """

    expert: str
    alone: float | None
    tried: float | None = None
    kept: bool | None = None


class Sampler(Protocol):
    """Chooses what to try."""

    def ask(self) -> Chosen | None:
        """Return the next choice; None: it must be told first, or, told all, it has ended."""

    def tell(self, score: float | None) -> None:
        """Tell the score of the first choice that was not told yet.

        Larger is better.  None: it could not be tried.
        """

    def ingredients(self) -> Sequence[Ingredient]:
        """Return what a greedy soup was told so far, in the order of trying; else nothing."""
        return ()


def sampler_of(name: str, template: Template, seed: int) -> Sampler:
    """Return the sampler of a name.

    Raises BadRequest for an unknown name, or a recipe that it has nothing to do with; Unavailable
    if what it needs is not installed.
    """
    if name in _OF_NUMBERS:
        if not template.free:
            raise BadRequest(
                f"the recipe has no free number for {name} to search for",
                where=template.where,
                hint="write a range where a number stands, as weight: {min: 0, max: 1}",
            )
        return _OF_NUMBERS[name](template, seed)
    if name in _OF_EXPERTS:
        if len(template.models) < 2:
            raise BadRequest(
                f"{name} chooses among experts, and the recipe has {len(template.models)}",
                where=template.where,
            )
        return _OF_EXPERTS[name](template)
    raise BadRequest(
        f"no sampler is called {name!r}",
        where=Option("sampler"),
        hint=did_you_mean(name, SAMPLERS, f"there are {', '.join(SAMPLERS)}"),
    )


# -- over numbers ------------------------------------------------------------------------------


class _Tpe(Sampler):
    """A tree-structured Parzen estimator: draws where good trials are dense, and bad ones rare."""

    def __init__(self, template: Template, seed: int) -> None:
        optuna = _required("optuna", "tpe")
        self._optuna = optuna
        self._free = template.free
        verbosity = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            with warnings.catch_warnings():
                # `constant_liar` is called experimental: it keeps choices that are tried side by
                # side apart.
                warnings.simplefilter("ignore")
                sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
            self._study = optuna.create_study(direction="maximize", sampler=sampler)
        finally:
            optuna.logging.set_verbosity(verbosity)
        start = zip(self._free, template.start(), strict=True)
        self._study.enqueue_trial({one.name: value for one, value in start})
        self._asked: deque[Any] = deque()

    def ask(self) -> Chosen | None:
        trial = self._study.ask()
        self._asked.append(trial)
        drawn = (
            trial.suggest_float(one.name, one.low, one.high, log=one.log, step=one.step)
            for one in self._free
        )
        return Chosen(
            tuple(one.rounded(value) for one, value in zip(self._free, drawn, strict=True))
        )

    def tell(self, score: float | None) -> None:
        state = self._optuna.trial.TrialState
        trial = self._asked.popleft()
        if score is None:
            self._study.tell(trial, state=state.FAIL)
        else:
            self._study.tell(trial, score)


class _Cmaes(Sampler):
    """CMA-ES: a normal distribution that moves and stretches towards what is good."""

    def __init__(self, template: Template, seed: int) -> None:
        cmaes = _required("cmaes", "cmaes")
        import numpy as np

        self._free = template.free
        if len(self._free) < 2:
            raise BadRequest(
                "cmaes needs two free numbers or more",
                where=template.where,
                hint=Option("sampler", "tpe"),
            )
        self._start: Chosen | None = Chosen(template.start())
        places = zip(self._free, template.start(), strict=True)
        self._search = cmaes.CMA(
            mean=np.array([one.place(value) for one, value in places]),
            sigma=_SIGMA,
            bounds=np.array([[0.0, 1.0]] * len(self._free)),
            # It takes seeds of 32 bits.
            seed=seed % 2**32,
        )
        self._asked: list[Any] = []
        self._told: list[tuple[Any, float]] = []
        self._start_is_told = False
        """The start is of no generation."""

    def ask(self) -> Chosen | None:
        if self._start is not None:
            start, self._start = self._start, None
            return start
        if len(self._asked) == self._search.population_size:
            return None
        point = self._search.ask()
        self._asked.append(point)
        return Chosen(
            tuple(
                one.rounded(_value(one, float(x))) for one, x in zip(self._free, point, strict=True)
            )
        )

    def tell(self, score: float | None) -> None:
        if not self._start_is_told:
            self._start_is_told = True
            return
        # It minimizes, and only compares.
        loss = math.inf if score is None else -score
        self._told.append((self._asked[len(self._told)], loss))
        if len(self._told) == self._search.population_size:
            self._search.tell(self._told)
            self._asked, self._told = [], []


def _value(one: Free, place: float) -> float:
    if one.log:
        return one.low * math.exp(place * math.log(one.high / one.low))
    return one.low + place * (one.high - one.low)


class _Listed(Sampler):
    """Tries what does not depend on scores."""

    def __init__(self, choices: Iterator[Chosen]) -> None:
        self._choices = choices

    def ask(self) -> Chosen | None:
        return next(self._choices, None)

    def tell(self, score: float | None) -> None:
        pass


def points(one: Free) -> list[float]:
    """Return the values of a number in a grid: by its step, else five."""
    if one.step is not None:
        count = round((one.high - one.low) / one.step) + 1
        return [one.rounded(one.low + number * one.step) for number in range(count)]
    return [one.rounded(_value(one, number / (POINTS - 1))) for number in range(POINTS)]


def _grid(template: Template, seed: int) -> Sampler:
    """The start, then every combination; neighbours differ in the last number."""
    start = template.start()
    every = itertools.product(*map(points, template.free))
    return _Listed(Chosen(one) for one in itertools.chain([start], every))


# -- over experts ------------------------------------------------------------------------------


def _alike(template: Template, experts: Sequence[str]) -> Chosen:
    """Return the choice of some experts, each with an equal weight where weights are free."""
    return Chosen(template.start(experts), tuple(experts))


class _GreedySoup(Sampler):
    """The best expert, and each further one with which the merge is not worse."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._untried = list(template.models)
        self._singles: list[tuple[float, str]] = []
        self._ranked: deque[str] | None = None
        self._ingredients: dict[str, Ingredient] = {}
        """Of the experts, the best first, once each has a score."""
        self._soup: list[str] = []
        self._score = -math.inf
        self._asked: deque[tuple[str, ...]] = deque()

    def ask(self) -> Chosen | None:
        if self._untried:
            return self._ask((self._untried.pop(0),))
        if self._asked or not self._ranked:
            return None
        return self._ask((*self._soup, self._ranked.popleft()))

    def _ask(self, experts: tuple[str, ...]) -> Chosen:
        self._asked.append(experts)
        return _alike(self._template, [one for one in self._template.models if one in experts])

    def tell(self, score: float | None) -> None:
        experts = self._asked.popleft()
        value = -math.inf if score is None else score
        if self._ranked is None:
            self._singles.append((value, experts[0]))
            if not self._untried and not self._asked:
                self._rank()
            return
        is_kept = score is not None and value >= self._score
        if is_kept:
            self._score, self._soup = value, list(experts)
        self._told(experts[-1], score, is_kept=is_kept)

    def _rank(self) -> None:
        """Put the experts in the order of their own scores; the first one is the soup."""
        ranked = sorted(self._singles, key=lambda one: (-one[0], one[1]))
        self._ingredients = {
            name: Ingredient(name, None if math.isinf(own) else own) for own, name in ranked
        }
        self._score, best = ranked[0]
        self._soup = [best]
        self._ranked = deque(name for _, name in ranked[1:])
        self._told(best, self._ingredients[best].alone, is_kept=True)

    def _told(self, expert: str, score: float | None, *, is_kept: bool) -> None:
        known = self._ingredients[expert]
        self._ingredients[expert] = msgspec.structs.replace(known, tried=score, kept=is_kept)

    def ingredients(self) -> Sequence[Ingredient]:
        return tuple(self._ingredients.values())


def _leave_one_out(template: Template) -> Sampler:
    """All experts, then all but one."""
    all_ = template.models
    without = (tuple(other for other in all_ if other != one) for one in all_)
    return _Listed(_alike(template, one) for one in itertools.chain([all_], without))


def _add_one_in(template: Template) -> Sampler:
    """All experts, then each alone."""
    alone = ((one,) for one in template.models)
    return _Listed(_alike(template, one) for one in itertools.chain([template.models], alone))


def _required(module: str, sampler: str) -> Any:
    """Import what a sampler needs.  Raises Unavailable."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Unavailable(
            f"the sampler {sampler} needs the package {module}",
            where=Option("sampler"),
            hint="pip install 'mstore[search]'",
        ) from error


_OF_NUMBERS: Final[Mapping[str, Callable[[Template, int], Sampler]]] = {
    "tpe": _Tpe,
    "cmaes": _Cmaes,
    "grid": _grid,
}
_OF_EXPERTS: Final[Mapping[str, Callable[[Template], Sampler]]] = {
    "greedy-soup": _GreedySoup,
    "leave-one-out": _leave_one_out,
    "add-one-in": _add_one_in,
}
SAMPLERS: Final = (*_OF_NUMBERS, *_OF_EXPERTS)
"""Their names."""
