"""Which units of a whole are to blame: leaving out one by one, halving, and delta debugging.

A unit is an expert, a layer, or a layer of an expert. A probe tries some units without the others,
and is good, bad, or cannot be judged. This module only chooses probes. Equal answers lead to equal
probes: a search that was interrupted is its answers, given again.

Sources: Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input (2002), for
`_minimal`; git-bisect(1) for a probe that cannot be judged.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Final, Generic, TypeVar

import msgspec

Unit = TypeVar("Unit", bound=Hashable)
FEW: Final = 8
"""Of up to this many units, each is left out once."""
_MANY: Final = 4096
"""How many possible culprits are looked at to tell how many probes are left."""
_SOME: Final = 8
"""For how many of them these probes are counted."""


class Answer(enum.Enum):
    """What a probe was."""

    GOOD = "good"
    BAD = "bad"
    SKIPPED = "skip"


_JUDGED: Final = (Answer.GOOD, Answer.BAD)


class Blamed(msgspec.Struct, Generic[Unit], frozen=True):
    """Which units are to blame.

    culprits: sets of units, each bad without all others, in the order in which they were found. In
    a set of several, none is bad without the others: they interact. alone: what the probe of each
    set said: bad, or it was skipped, and the set is what other probes leave. rest: what all other
    units together are; None if there are no others. If no set was found, rest is what all units
    together are: good if nothing is bad, skipped if too much could not be judged.
    """

    culprits: tuple[tuple[Unit, ...], ...]
    alone: tuple[Answer, ...]
    rest: Answer | None


def find(units: Sequence[Unit], ask: Callable[[frozenset[Unit]], Answer]) -> Blamed[Unit]:
    """Return which units are to blame, if all together are bad and none at all are good.

    ask: tries these units without the others.  It is asked once for each set.  All together are
    tried only if no smaller set was bad; and none at all if one set is bad and all else is, too:
    if none at all is bad, the search ends, for then everything is.
    """
    search = _Search(units, ask)
    culprits: list[tuple[Unit, ...]] = []
    left, rest = list(units), None
    while left and rest in (None, Answer.BAD):
        found = search.culprit(left)
        if found is None:
            break
        culprits.append(tuple(found))
        left = [one for one in left if one not in found]
        rest = search.answer(left) if left else None
        if rest in (None, Answer.BAD) and search.is_none_bad():
            break
    if not culprits:
        good = search.whole is Answer.GOOD
        return Blamed((), (), Answer.GOOD if good else Answer.SKIPPED)
    return Blamed(tuple(culprits), tuple(map(search.answer, culprits)), rest)


def probes_left(units: Sequence[Unit], answers: Mapping[frozenset[Unit], Answer]) -> int:
    """Return about how many more probes `find` takes: the mean over culprits that may be it.

    answers: what is known of sets of units.  A culprit is one unit; if none agrees with the
    answers, two that are bad only together; if none of these does, the result is 0: unknown.
    """
    judged = [(key, told is Answer.BAD) for key, told in answers.items() if told in _JUDGED]
    for size in (1, 2):
        # Each culprit is in all bad sets.
        inside = frozenset(units).intersection(*(key for key, is_bad in judged if is_bad))
        number = math.comb(len(inside), size)
        guesses = map(frozenset, itertools.combinations([u for u in units if u in inside], size))
        agreeing = [
            guess
            for guess in itertools.islice(guesses, None, None, -(-number // _MANY) or 1)
            if all(is_bad == (guess <= key) for key, is_bad in judged)
        ]
        some = agreeing[:: -(-len(agreeing) // _SOME) or 1]
        if some:
            return max(1, round(sum(_probes(units, answers, one) for one in some) / len(some)))
    return 0


def _probes(
    units: Sequence[Unit], answers: Mapping[frozenset[Unit], Answer], culprit: frozenset[Unit]
) -> int:
    """Return how many sets that have no answer are tried if this is the culprit."""
    asked = 0

    def ask(tried: frozenset[Unit]) -> Answer:
        nonlocal asked
        if tried in answers:
            return answers[tried]
        asked += 1
        return Answer.BAD if culprit <= tried else Answer.GOOD

    find(units, ask)
    return asked


class _Search(Generic[Unit]):
    def __init__(self, units: Sequence[Unit], ask: Callable[[frozenset[Unit]], Answer]) -> None:
        self._units = units
        self._ask = ask
        self._answers: dict[frozenset[Unit], Answer] = {
            frozenset(): Answer.GOOD,
            frozenset(units): Answer.BAD,
        }
        self.whole: Answer | None = None
        """What all units together are, once they were tried."""
        self._none: Answer | None = None

    def answer(self, units: Collection[Unit]) -> Answer:
        """Return what these units are without the others."""
        key = frozenset(units)
        if key not in self._answers:
            self._answers[key] = self._ask(key)
        return self._answers[key]

    def _is_bad(self, units: Collection[Unit]) -> bool:
        return self.answer(units) is Answer.BAD

    def _is_whole_bad(self) -> bool:
        """Return whether all units together are bad, as was only said so far."""
        if self.whole is None:
            self.whole = self._ask(frozenset(self._units))
        return self.whole is Answer.BAD

    def is_none_bad(self) -> bool:
        """Return whether it is bad without any unit, which nobody said so far."""
        if self._none is None:
            self._none = self._ask(frozenset())
        return self._none is Answer.BAD

    def culprit(self, units: Sequence[Unit]) -> list[Unit] | None:
        """Return a smallest set that is bad, of units that are; None if no probe tells."""
        guess = self._needed(units) if len(units) <= FEW else self._halved(units)
        told = self.answer(guess) if guess else Answer.GOOD
        if told is Answer.SKIPPED:
            return guess
        bad = frozenset(guess or ())
        if told is Answer.GOOD:
            inside = frozenset(units)
            # What is bad is known of some sets already; the first of the smallest.
            known = (key for key, one in self._answers.items() if one is Answer.BAD)
            bad = min((key for key in known if key <= inside), key=len, default=bad)
        if not self._is_bad(bad) or (len(bad) == len(self._units) and not self._is_whole_bad()):
            return None
        return self._minimal([one for one in units if one in bad])

    def _needed(self, units: Sequence[Unit]) -> list[Unit]:
        """Return the units without which the others are good; if none, those that may be it."""
        left_out = {one: self.answer([other for other in units if other != one]) for one in units}
        return [one for one in units if left_out[one] is Answer.GOOD] or [
            one for one in units if left_out[one] is Answer.SKIPPED
        ]

    def _halved(self, units: Sequence[Unit]) -> list[Unit] | None:
        """Return the culprit if there is one; each step believes that one half is bad."""
        while len(units) > 1:
            middle = len(units) // 2
            first, second = units[:middle], units[middle:]
            told = self.answer(first)
            if told is Answer.SKIPPED:
                told = {Answer.BAD: Answer.GOOD, Answer.GOOD: Answer.BAD}.get(
                    self.answer(second), Answer.SKIPPED
                )
            if told is Answer.SKIPPED:
                return None
            units = first if told is Answer.BAD else second
        return list(units)

    def _minimal(self, units: Sequence[Unit]) -> list[Unit]:
        """Return a part of bad units that is bad, and is not without any one of them (ddmin)."""
        left, count = list(units), 2
        while len(left) > 1:
            size = -(-len(left) // count)
            parts = [left[at : at + size] for at in range(0, len(left), size)]
            bad = next((part for part in parts if self._is_bad(part)), None)
            if bad is not None:
                left, count = bad, 2
                continue
            others = [[one for one in left if one not in part] for part in parts]
            bad = next((other for other in others if self._is_bad(other)), None)
            if bad is not None:
                left, count = bad, max(count - 1, 2)
            elif count >= len(left):
                break
            else:
                count = min(len(left), 2 * count)
        return left
