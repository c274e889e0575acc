"""Whether two models differ on the same questions, or chance explains the difference of scores.

Where each answer is right or wrong, by McNemar's test: only questions that one of the two answers
count, and chance gives each of these to either with probability 1/2. Else by a paired bootstrap:
the mean difference over questions drawn again, with a fixed seed, so that the same samples give the
same answer.
"""

from __future__ import annotations

import math
from typing import Final

from mstore.judging.scores import Samples

ALPHA: Final = 0.05
"""A difference whose probability by chance is at least this is not distinguishable from none."""
_EXACT: Final = 1000
_DRAWS: Final = 10_000
_SEED: Final = 20


def p_value(one: Samples, other: Samples) -> float | None:
    """Return the probability of so large a difference by chance alone; None if not comparable."""
    if one.questions != other.questions or len(one.values) != len(other.values):
        return None
    if {*one.values, *other.values} <= {0.0, 1.0}:
        pairs = list(zip(one.values, other.values, strict=True))
        return _mcnemar(pairs.count((1.0, 0.0)), pairs.count((0.0, 1.0)))
    return _bootstrap([a - b for a, b in zip(one.values, other.values, strict=True)])


def _mcnemar(first: int, second: int) -> float:
    """Return the two-sided probability; first, second: questions that only one answers."""
    total, fewer = first + second, min(first, second)
    if total <= _EXACT:
        ways = sum(math.comb(total, count) for count in range(fewer + 1))
        return min(1.0, 2 * ways / (1 << total))
    # With Edwards' correction; within 1 % of the exact probability here.
    distance = max(0.0, abs(first - second) - 1) / math.sqrt(total)
    return math.erfc(distance / math.sqrt(2))


def _bootstrap(differences: list[float]) -> float:
    import numpy as np  # late: few scores need it

    values = np.asarray(differences)
    if not values.any():
        return 1.0
    draw = np.random.Generator(np.random.Philox(_SEED))
    below = above = 0
    for _ in range(_DRAWS):
        mean = values[draw.integers(len(values), size=len(values))].mean()
        below += mean <= 0
        above += mean >= 0
    # One more draw on each side: no number of draws shows that the probability is 0.
    return min(1.0, 2 * (min(below, above) + 1) / (_DRAWS + 1))
