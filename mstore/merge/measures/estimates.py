"""Estimates: the likely error of merges that are no sums, where blocks are left out.

Owns the model of an election between experts of which only norms and shares of moved elements are
known, and of a mean of those that move an element (`averaged`).  Does not own the certified bound,
nor how units are ranked (`planning.ranking`).

**The model.** Which elements experts move, and in which direction, are independent: two experts
that both move an element agree half of the time.  Magnitudes are exponentially distributed, as in
`tail_squares`.  Let m = w d be a weighted delta and r what it alone would move the merge by: d if
the operator divides by the weights that agree (`normalize`), else m.  Then for two groups of
experts A and B that both move an element, with x = |m_A| and y = |m_B|,

- half of the time they agree.  r is (W_A r_A + W_B r_B) / (W_A + W_B), W the weights that agree,
  or r_A + r_B without division;
- else the larger of x and y elects, A with probability a = E[x] / (E[x] + E[y]), and r is the
  winner's own.  With b = 1 - a, mean squares are then

      E[r_A^2 | A wins] = (1 + b + b^2) E[r_A^2]       E[r_B^2 | A wins] = a^2 E[r_B^2]
      E[r_A r_B | A wins] = (a b + a / 2) sqrt(E[r_A^2] E[r_B^2])

  as min(x, y) is exponential of mean a E[y] = b E[x], and what the larger has beyond it is
  exponential as before (no memory).

So two groups combine into one, expert by expert, the heaviest first.  Last of all, the group O that
is left out meets the group S that is kept.  The full merge minus the one without O is then

    r_O                             where no one of S moves the element
    W_O (r_O - r_S) / (W_O + W_S)   where they agree: O dilutes S.  r_O without division
    r_O - r_S                       where they do not, and O wins: unlike signs, so sizes add
    0                               where S wins

`torn` covers members of S that nearly cancel: even a small O can flip their election, and the merge
then goes from one's size to another's.

A mean is that without elections: unlike signs dilute each other, too, and the sum of r_A and r_B
squared is the sum of their squares.  What one expert alone moves has a factor of its own.

Pure functions on float64[C], one value per chunk.  They use only operations that IEEE 754 rounds
correctly, in a fixed order: an estimate is part of a plan, and every machine must make the same
plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mstore.merge.measures.grid import Bools, Floats


class _ExpertGroup(NamedTuple):
    """Several experts as one, float64[C] each, averaged over the elements of a chunk.

    moved: the probability that any of them moves an element. weight: sum of the weights that agree,
    0 if nobody moves it. squares: r^2, in the unit of the input of `elected`. sums: m^2. torn:
    square of the change in r if an election within the group that is near a tie flips.
    """

    moved: Floats
    weight: Floats
    squares: Floats
    sums: Floats
    torn: Floats


def elected(
    squares: Floats,
    kept: Floats,
    weights: Sequence[float],
    left_out: Bools,
    *,
    normalize: bool,
    votes: Sequence[float] | None = None,
) -> Floats:
    """Return the expected square of the full merge minus the one without `left_out`: float64[C].

    squares, kept: float64[K, C], the squared norm of each sparsified delta, finite, and the share
    of elements that it keeps; 0 for an expert that takes no part. weights: only their magnitudes
    count. left_out: bool[K, C]. votes: what deltas are multiplied by to elect, if not the weights.
    Excludes `lambda`.
    """
    nothing = np.zeros(squares.shape[1])
    out = rest = _ExpertGroup(nothing, nothing, nothing, nothing, nothing)
    sizes = [abs(weight) for weight in weights]
    loud = sizes if votes is None else [abs(vote) for vote in votes]
    for k in sorted(range(len(sizes)), key=lambda k: -sizes[k]):
        if not sizes[k]:
            continue
        weighted = squares[k] * sizes[k] * sizes[k]
        own = squares[k] if normalize else weighted
        sums = squares[k] * loud[k] * loud[k]
        one = _ExpertGroup(kept[k], kept[k] * sizes[k], own, sums, nothing)
        joined = _joined(_chosen(left_out[k], out, rest), one, normalize=normalize)
        out, rest = _chosen(left_out[k], joined, out), _chosen(left_out[k], rest, joined)
    return _apart(out, rest, normalize=normalize)


def averaged(squares: Floats, kept: Floats, factors: Sequence[float], left_out: Bools) -> Floats:
    """Return the expected square of the full mean minus the one without `left_out`: float64[C].

    Arrays as for `elected`. factors: of each expert's elements that no other one moves.
    """
    nothing = np.zeros(squares.shape[1])
    out = rest = _ExpertGroup(nothing, nothing, nothing, nothing, nothing)
    for own, moved, left in zip(squares, kept, left_out, strict=True):
        joined = _mean(_chosen(left, out, rest), _ExpertGroup(moved, moved, own, own, nothing))
        out, rest = _chosen(left, joined, out), _chosen(left, rest, joined)
    ours, theirs, _ = _where_both_move(out, rest)
    share, _ = _shares(out.weight * rest.moved, rest.weight * out.moved)
    found = out.squares * (1.0 - rest.moved) + share * share * (ours + theirs)
    for k, (own, factor) in enumerate(zip(squares, factors, strict=True)):
        # One of O that is alone; one of S that is alone only because O is left out.
        grown = factor - 1.0 + share
        lone = own * (factor * factor - 1.0) * (1.0 - rest.moved)
        turned = own * (grown * grown - share * share) * out.moved
        for other in range(len(squares)):
            if other != k:
                missing = 1.0 - kept[other]
                lone = lone * np.where(left_out[other], missing, 1.0)
                turned = turned * np.where(left_out[other], 1.0, missing)
        found = found + np.where(left_out[k], lone, turned)
    return found


def _mean(a: _ExpertGroup, b: _ExpertGroup) -> _ExpertGroup:
    ours, theirs, _ = _where_both_move(a, b)
    alone = a.squares * (1.0 - b.moved) + b.squares * (1.0 - a.moved)
    share, other = _shares(a.weight * b.moved, b.weight * a.moved)
    return _ExpertGroup(
        a.moved + b.moved - a.moved * b.moved,
        a.weight + b.weight,
        alone + share * share * ours + other * other * theirs,
        a.sums + b.sums,
        a.torn,
    )


def _joined(a: _ExpertGroup, b: _ExpertGroup, *, normalize: bool) -> _ExpertGroup:
    wins, loses = _odds(a, b)
    ours, theirs, mixed = _where_both_move(a, b)
    alone = a.squares * (1.0 - b.moved) + b.squares * (1.0 - a.moved)
    if normalize:
        share, other = _shares(a.weight * b.moved, b.weight * a.moved)
        agreed = share * share * ours + other * other * theirs + share * other * mixed
    else:
        agreed = ours + theirs + mixed
    fought = wins * (1.0 + loses + loses * loses) * ours
    fought = fought + loses * (1.0 + wins + wins * wins) * theirs
    weight = a.weight * (1.0 - b.moved) + b.weight * (1.0 - a.moved)
    weight = weight + (1.0 + wins) / 2.0 * a.weight * b.moved
    weight = weight + (1.0 + loses) / 2.0 * b.weight * a.moved
    tie = loses * np.sqrt(ours) + wins * np.sqrt(theirs)
    return _ExpertGroup(
        a.moved + b.moved - a.moved * b.moved,
        weight,
        alone + (agreed + fought) / 2.0,
        a.sums + b.sums,
        a.torn + b.torn + tie * tie / 2.0,
    )


def _apart(out: _ExpertGroup, rest: _ExpertGroup, *, normalize: bool) -> Floats:
    wins, loses = _odds(out, rest)
    ours, theirs, mixed = _where_both_move(out, rest)
    if normalize:
        share, _ = _shares(out.weight * rest.moved, rest.weight * out.moved)
        # Never negative: the geometric mean of two is at most half of their sum.
        agreed = share * share * (ours + theirs - mixed)
    else:
        agreed = ours
    turned = (1.0 + loses + loses * loses) * ours + wins * wins * theirs
    turned = wins * (turned + (2.0 * loses + 1.0) * wins * mixed + rest.torn * out.moved)
    return out.squares * (1.0 - rest.moved) + (agreed + turned) / 2.0


def _where_both_move(a: _ExpertGroup, b: _ExpertGroup) -> tuple[Floats, Floats, Floats]:
    """Return mean r_A^2, r_B^2 and 2 |r_A| |r_B| of elements that both move, else 0."""
    ours, theirs = a.squares * b.moved, b.squares * a.moved
    return ours, theirs, np.sqrt(ours) * np.sqrt(theirs)


def _odds(a: _ExpertGroup, b: _ExpertGroup) -> tuple[Floats, Floats]:
    """Return the probabilities that A, and that B, elects where they disagree."""
    return _shares(np.sqrt(a.sums * b.moved), np.sqrt(b.sums * a.moved))


def _shares(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """Return a and b as shares of their sum; halves where the sum is 0."""
    total = a + b
    some = total > 0.0
    share = np.where(some, a, 0.5) / np.where(some, total, 1.0)
    return share, 1.0 - share


def _chosen(mask: Bools, there: _ExpertGroup, elsewhere: _ExpertGroup) -> _ExpertGroup:
    """Return one group where the mask is set, the other one elsewhere."""
    return _ExpertGroup(*(np.where(mask, a, b) for a, b in zip(there, elsewhere, strict=True)))
