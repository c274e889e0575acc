"""Merging written a second time, in numpy on whole tensors, from the definitions alone.

Nothing here imports the code under test.  Arithmetic is float32, one numpy operation at a time,
sums over experts in plan order; trimming is a stable sort of all elements; random masks are
drawn over the whole tensor.  Slow and plain on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gram_reference
import ml_dtypes
import numpy as np
import numpy.typing as npt
from blake3 import blake3

Array = npt.NDArray[Any]
Single = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype("f2"),
    "F32": np.dtype("f4"),
}
WORDS: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype("u2"),
    "F16": np.dtype("u2"),
    "F32": np.dtype("u4"),
}
QUIET_NAN = {"BF16": 0x7FC0, "F16": 0x7E00, "F32": 0x7FC00000}

CONSENSUS = {"ties", "dare_ties", "della", "breadcrumbs_ties"}
BANDS = {"breadcrumbs", "breadcrumbs_ties"}
RANDOM = {"dare_linear", "dare_ties"}
RANKED = {"della", "della_linear"}
_DARE = {"density": 1.0, "lambda": 1.0, "normalize": False, "rescale": True, "seed": 0}
DEFAULTS: dict[str, dict[str, Any]] = {
    "linear": {"normalize": True},
    "task_arithmetic": {"lambda": 1.0, "normalize": False},
    "ties": {"density": 1.0, "lambda": 1.0, "normalize": True, "by_count": False},
    "dare_linear": _DARE,
    "dare_ties": _DARE,
    "della": _DARE | {"epsilon": 0.15, "normalize": True},
    "della_linear": _DARE | {"epsilon": 0.15},
    "breadcrumbs": {"density": 1.0, "gamma": 0.01, "lambda": 1.0, "normalize": False},
    "breadcrumbs_ties": {"density": 1.0, "gamma": 0.01, "lambda": 1.0, "normalize": False},
    "passthrough": {"scale": 1.0},
    "nearswap": {},
    "clamp": {"stiffness": 0.0},
    "train_difference": {"alpha": 1.0},
    "add_cosine_a": {"alpha": 1.0},
    "add_cosine_b": {"alpha": 1.0},
    "tensor_sum": {"width": 0.5, "offset": 0.0},
    "consensus": {"k": 2, "tall_mask_lambda": 1.0, "lambda": 1.0},
    "arcee_fusion": {},
    "fisher": {"floor": 0.0},
    "emr": {},
    "masked": {},
    "ram": {"epsilon": 1e-5},
    "sce": {"select_topk": 1.0},
    "ramplus_tl": {"epsilon": 1e-5, "r": 0.1, "alpha": 0.2},
    "pcb": {"ratio": 0.1},
    "regmean": {"block": 64, "shrink": 0.9},
    "aim": {"omega": 0.4},
}


def merge(
    method: str,
    given: dict[str, Any],
    weights: Sequence[float],
    base: Array,
    experts: Sequence[Array],
    *,
    tensor: str = "t",
    out_dtype: str | None = None,
    absent: Sequence[Mask] | None = None,
    facts: Sequence[Array | None] = (),
) -> Array:
    """The merged tensor: base's shape, in `out_dtype` (base's own if None).

    `base` and `experts` are arrays of one of DTYPES.  `absent[k]` marks the elements of expert k
    that are not read; thresholds and masks are those of the whole expert all the same.  `facts` are
    companions that are read whole, None where they lack the tensor.
    """
    parameters = DEFAULTS[method] | given
    shape, base = base.shape, base.ravel()
    row = row_length(shape)
    experts = [expert.ravel() for expert in experts]
    if absent is None:
        absent = [np.zeros(base.size, dtype=bool)] * len(experts)
    absent = [mask.ravel() for mask in absent]
    with np.errstate(all="ignore"):
        if method == "linear":
            mixed, keep = _linear(parameters, weights, base, experts, absent)
        elif method == "passthrough":
            side = _where_bits(absent[0], single(base), single(experts[0]))
            mixed = side * np.float32(parameters["scale"])
            keep = (_bits(side) == _bits(single(base))) & (parameters["scale"] == 1)
        elif method == "tensor_sum":
            side = _where_bits(absent[0], single(base), single(experts[0]))
            taken = in_rows(parameters["width"], parameters["offset"], shape)
            mixed = _where_bits(taken, side, single(base))
            keep = _bits(mixed) == _bits(single(base))
        elif method == "nearswap":
            side = _where_bits(absent[0], single(base), single(experts[0]))
            mixed = swapped(single(base), side, parameters["t"])
            keep = _bits(side) == _bits(single(base))
        elif method == "sce":
            mixed = fused_by_energy(parameters["select_topk"], base, experts, absent)
            mixed, keep = single(base) + mixed, mixed == 0
        elif method == "consensus":
            mixed = needed_by_several(parameters, weights, base, experts, absent)
            mixed, keep = single(base) + mixed, mixed == 0
        elif method in ("add_cosine_a", "add_cosine_b"):
            found = by_columns(method, parameters["alpha"], base, experts[0], shape)
            mixed, keep = by_element([found], base, experts, absent)
        elif method in ("clamp", "train_difference"):
            factors = element_factors(method, parameters, base, experts, absent)
            mixed, keep = by_element(factors, base, experts, absent)
        elif method == "emr":
            mixed, keep = unified(base, experts, absent)
        elif method == "masked":
            half = len(experts) // 2
            given = [
                np.float32(w) * (single(m) != 0)
                for w, m in zip(weights, experts[half:], strict=True)
            ]
            gone = [one | other for one, other in zip(absent[:half], absent[half:], strict=True)]
            mixed, keep = by_element(given, base, experts[:half], gone)
        elif method == "pcb":
            mixed = competed(parameters["ratio"], weights, base, experts, absent)
            mixed, keep = single(base) + mixed, mixed == 0
        elif method == "fisher":
            mixed, keep = informed(parameters["floor"], weights, base, experts, absent)
        elif method in ("regmean", "aim"):
            wide = single(base).astype(np.float64)
            known = [one for one in facts if one is not None]
            moved = by_inputs(method, parameters, weights, base, experts, absent, known, shape)
            mixed, keep = (wide + moved).astype(np.float32), moved == 0
        elif method == "arcee_fusion":
            d, least = delta(base, experts[0]), least_importance(base, experts[0], row)
            kept = (importance(base, experts[0], row) >= least) & ~absent[0]
            mixed = np.where(kept, d, np.float32(0))
            mixed, keep = single(base) + mixed, mixed == 0
        elif method in ("ram", "ramplus_tl"):
            mixed = averaged(parameters, base, experts, absent)
            mixed, keep = single(base) + mixed, mixed == 0
        else:
            mixed, keep = _additive(method, parameters, weights, base, experts, absent, tensor, row)
        return _result(base, mixed, keep, out_dtype or name_of(base)).reshape(shape)


def by_inputs(
    method: str,
    parameters: dict[str, Any],
    weights: Sequence[float],
    base: Array,
    experts: Sequence[Array],
    absent: Sequence[Mask],
    facts: Sequence[Array],
    shape: Sequence[int],
) -> npt.NDArray[np.float64]:
    """What is added to the base, where columns are mixed, or weighed, by their inputs."""
    given = [float(np.float32(weight)) for weight in weights]
    read = [
        np.where(gone, 0.0, delta(base, one).astype(np.float64))
        for one, gone in zip(experts, absent, strict=False)
    ]
    if facts and method == "regmean":
        width = min(parameters["block"], shape[1])
        matrices = gram_reference.turns(facts, given, parameters["shrink"], width)
        return gram_reference.turned([d.reshape(shape) for d in read], matrices).ravel()
    if method == "regmean":
        total = sum(given)
        given = [float(np.float32(weight / total)) for weight in given]
    moved = np.zeros(base.size)
    for d, weight in zip(read, given, strict=True):
        moved += weight * d
    if facts:
        magnitudes = facts[0].astype(np.float64)
        held = 1.0 - (1.0 - parameters["omega"]) * (magnitudes / magnitudes.max())
        moved = (moved.reshape(shape) * held).ravel()
    return moved


def informed(
    floor: float,
    weights: Sequence[float],
    base: Array,
    experts: Sequence[Array],
    absent: Sequence[Mask],
) -> tuple[Single, Mask]:
    """The average by Fishers, and where it is the base.  Fishers are the second half of `experts`.

    An expert whose Fisher is absent has no part; one that is absent itself is the base there.
    """
    half = len(experts) // 2
    wide = single(base).astype(np.float64)
    moved, divisor = np.zeros(base.size), np.zeros(base.size)
    for k in range(half):
        information = np.maximum(single(experts[half + k]), np.float32(floor)).astype(np.float64)
        factor = information * np.float64(np.float32(weights[k]))
        factor[absent[half + k]] = 0.0
        divisor += factor
        own = single(experts[k])
        still = absent[k] | (_bits(own) == _bits(single(base))) | (factor == 0)
        moved += np.where(still, 0.0, factor * (own.astype(np.float64) - wide))
    mean = np.divide(moved, divisor, out=np.zeros(base.size), where=divisor > 0)
    return (wide + mean).astype(np.float32), mean == 0


def competed(
    ratio: float,
    weights: Sequence[float],
    base: Array,
    experts: Sequence[Array],
    absent: Sequence[Mask],
) -> Single:
    """The sum of the deltas, each times its share of the element.

    Scores are dropped, and scaled, by those of the whole experts.
    """
    whole = [delta(base, expert) for expert in experts]
    largest = [float(np.abs(d).max()) for d in whole]
    every = scores(whole, largest)
    least = [np.sort(one)[int(base.size * (1 - ratio))] for one in every]
    read = [np.where(gone, np.float32(0), d) for d, gone in zip(whole, absent, strict=True)]
    most = [one.max() for one in every]
    mixed = np.zeros(base.size, dtype=np.float32)
    for d, factor in zip(read, won(weights, read, largest, least, most), strict=True):
        mixed = mixed + factor * d
    return mixed


def scores(deltas: Sequence[Single], largest: Sequence[float]) -> list[npt.NDArray[np.float64]]:
    """How well each expert competes for each element."""
    wide = [d.astype(np.float64) for d in deltas]
    total, found = np.sum(wide, axis=0), []
    for d, most in zip(wide, largest, strict=True):
        share = np.abs(d) / most if most else d
        score = np.exp(len(wide) * (share * share - 1)) * np.tanh(d * total)
        found.append(score.astype(np.float32).astype(np.float64))
    return found


def won(
    weights: Sequence[float],
    deltas: Sequence[Single],
    largest: Sequence[float],
    least: Sequence[float],
    most: Sequence[float],
) -> list[Single]:
    """The factor of each expert in each element, from the limits of its scores."""
    scales = []
    for own, d, low, high in zip(scores(deltas, largest), deltas, least, most, strict=True):
        scale = (np.minimum(own, high) - low) / (high - low) if high > low else np.ones_like(own)
        scales.append(np.where((own >= low) & (d != 0), scale, 0.0))
    divisor = np.maximum(np.sum(scales, axis=0), 1e-12)
    return [
        (np.float64(weight) * scale / divisor).astype(np.float32)
        for weight, scale in zip(weights, scales, strict=True)
    ]


def in_rows(width: float, offset: float, shape: Sequence[int]) -> Mask:
    """Which elements are in so many of the rows, from one on, and further from the first on."""
    if not shape:
        return np.array([width > 0.5])
    taken, offset = np.zeros(shape, dtype=bool), offset % 1.0
    taken[round(offset * shape[0]) : round(min(1.0, offset + width) * shape[0])] = True
    taken[: round(max(0.0, offset + width - 1) * shape[0])] = True
    return taken.ravel()


def by_columns(
    method: str, alpha: float, base: Array, expert: Array, shape: Sequence[int]
) -> Single:
    """How far each element goes to the expert: by the angle of its column."""
    rows = shape[0] if shape else 1
    one, other = (single(side).astype(np.float64).reshape(rows, -1) for side in (base, expert))
    floors = [np.maximum(np.linalg.norm(side, axis=0), 1e-8) for side in (one, other)]
    cosine = (one * other).sum(axis=0) / np.prod(floors, axis=0)
    if method == "add_cosine_b":
        size = np.linalg.norm(one) * np.linalg.norm(other)
        cosine = (cosine + (one * other).sum() / size) / 2
    factors = (1 - np.clip(cosine - alpha, 0, 1)).astype(np.float32)
    return np.broadcast_to(factors, one.shape).ravel()


def element_factors(
    method: str,
    parameters: dict[str, Any],
    base: Array,
    experts: Sequence[Array],
    absent: Sequence[Mask],
) -> list[Single]:
    """The factor of each element of each delta."""
    b = single(base)
    sides = [_where_bits(gone, b, single(one)) for one, gone in zip(experts, absent, strict=True)]
    if method == "train_difference":
        moved, apart = np.abs(sides[0] - b), np.abs(sides[0] - sides[1])
        with np.errstate(all="ignore"):
            share = moved / (moved + apart)
        share[np.isnan(share)] = 0
        found = np.float32(parameters["alpha"]) * np.float32(1.8) * share
        return [found, -found]
    stiffness, every = np.float32(parameters["stiffness"]), np.array(sides)
    rest = np.float32(1) - stiffness
    mean = sides[0]
    for side in sides[1:]:
        mean = mean + side
    mean = mean / np.float32(len(sides))
    above = np.where(every >= mean, every, np.float32(np.inf)).min(axis=0)
    below = np.where(every <= mean, every, np.float32(-np.inf)).max(axis=0)
    ends = every.min(axis=0), below, every.max(axis=0), above
    found = np.zeros_like(every)
    for far, close, is_low in ((*ends[:2], True), (*ends[2:], False)):
        near = np.where(np.isfinite(close), close, far) if stiffness else far
        end = rest * far + stiffness * near if stiffness else far
        beyond = (b < end) if is_low else (b > end)
        first, second = (np.argmax(every == value, axis=0) for value in (far, near))
        for k, row in enumerate(found):
            own = np.where(first == k, rest, np.float32(0))
            own = own + np.where(second == k, stiffness, np.float32(0))
            own = np.where((first == k) & (second == k), np.float32(1), own)
            row[beyond] = own[beyond]
    return list(found)


def by_element(
    factors: Sequence[Single], base: Array, experts: Sequence[Array], absent: Sequence[Mask]
) -> tuple[Single, Mask]:
    """The base plus deltas times factors; the expert's own element where only it has one, of 1."""
    b = single(base)
    mixed, takes, takers = np.zeros_like(b), np.zeros_like(b), np.zeros(b.size, dtype=int)
    for factor, expert, gone in zip(factors, experts, absent, strict=True):
        moves = (_bits(single(expert)) != _bits(b)) & (factor != 0) & ~gone
        mixed = np.where(moves, mixed + (single(expert) - b) * factor, mixed)
        takes = _where_bits(moves & (factor == 1), single(expert), takes)
        takers += np.where(moves, np.where(factor == 1, 1, 2), 0)
    return _where_bits(takers == 1, takes, b + mixed), (mixed == 0) & (takers != 1)


def unified(base: Array, experts: Sequence[Array], absent: Sequence[Mask]) -> tuple[Single, Mask]:
    """The element of the expert that goes furthest where the sum of all goes, and where nobody
    does; a sum of 0 goes down."""
    mixed, furthest, total = single(base).copy(), np.zeros(base.size), np.zeros_like(single(base))
    moved = [np.where(gone, 0, delta(base, one)) for one, gone in zip(experts, absent, strict=True)]
    moved = [np.where(np.isnan(own), np.float32(0), own) for own in moved]
    for own in moved:
        total = total + own
    for own, expert in zip(moved, experts, strict=True):
        further = np.where(total > 0, own, -own) > furthest
        furthest = np.where(further, np.abs(own), furthest)
        mixed = _where_bits(further, single(expert), mixed)
    return mixed, furthest == 0


def by_depth(alpha: float, beta: float, name: str, names: Sequence[str]) -> float:
    """The factor of a tensor of a model with these tensors, by the first number in its name.

    A layer counts among those whose numbers follow the same words; the only one is the last.
    """

    def numbered(one: str) -> tuple[str, int] | None:
        words = one.split(".")
        found = [k for k, word in enumerate(words) if word.isdigit() and 0 < k < len(words) - 1]
        return (".".join(words[: found[0]]), int(words[found[0]])) if found else None

    own = numbered(name)
    if own is None:
        return alpha
    last = max(other[1] for one in names if (other := numbered(one)) and other[0] == own[0])
    return alpha + beta * (own[1] / last if last else 1.0)


def row_length(shape: Sequence[int]) -> int:
    """The elements of a row: of the last dimension, or all of a tensor with one."""
    return shape[-1] if len(shape) > 1 else math.prod(shape)


def mixture(
    factors: Sequence[float],
    base: Array,
    experts: Sequence[Array],
    *,
    keeps_base: bool,
    out_dtype: str | None = None,
    absent: Sequence[Mask] | None = None,
) -> Array:
    """factors[0] times the base plus the others times the experts, each product fused with the sum.

    Where an expert is absent, it is the base.  keeps_base: so is the result where all are.
    """
    b = single(base.ravel())
    untouched = np.full(b.size, keeps_base)
    total = np.zeros(b.size, dtype=np.float32)
    gone = [np.zeros(b.size, dtype=bool)] * len(experts) if absent is None else absent
    sides = [
        _where_bits(missing.ravel(), b, single(expert.ravel()))
        for expert, missing in zip(experts, gone, strict=True)
    ]
    with np.errstate(all="ignore"):
        for x, factor in zip((b, *sides), factors, strict=True):
            untouched &= _bits(x) == _bits(b)
            total = fused(x, np.float32(factor), total)
        out = _result(base.ravel(), total, untouched, out_dtype or name_of(base))
    return out.reshape(base.shape)


def swapped(base: Single, expert: Single, t: float) -> Single:
    """The expert where it is nearer than t, else the base moved by t towards it."""
    one = np.float32(1)
    distance = np.abs(expert - base)
    distance = np.where(distance < np.float32(1e-6), np.float32(1e-6), distance)
    share = one / distance * np.float32(t)
    share = np.where(share > one, one, share)
    moved: Single = share * expert + (one - share) * base
    return moved


def lone_factors(
    parameters: dict[str, Any], base: Array, experts: Sequence[Array]
) -> list[np.float32]:
    """What elements that one expert alone has are multiplied by: 1 without r and alpha."""
    one = np.float32(1)
    if "r" not in parameters:
        return [one] * len(experts)
    kept = [np.abs(delta(base, expert)) > np.float32(parameters["epsilon"]) for expert in experts]
    many = np.sum(kept, axis=0)
    factors = []
    for own in kept:
        shared = np.float32(np.count_nonzero(own & (many > 1)))
        alone = np.float32(np.count_nonzero(own & (many == 1)))
        with np.errstate(all="ignore"):
            ratio = shared / max(alone, np.float32(parameters["epsilon"]))
        share = min(ratio, np.float32(parameters["alpha"]))
        factors.append(one + np.float32(parameters["r"]) * share)
    return factors


def spread(deltas: Sequence[Single]) -> Single:
    """The population variance of each element over experts, rounded to float32."""
    found: Single = np.var(np.array(deltas, dtype=np.float64), axis=0).astype(np.float32)
    return found


def spread_cut(share: float, deltas: Sequence[Single]) -> tuple[np.float32, int]:
    """The least spread that is selected, and up to which index; all of it: up to any."""
    spreads = spread(deltas)
    count = int(np.float32(np.count_nonzero(spreads)) * np.float32(share))
    if not count:
        return np.float32(np.inf), -1
    chosen = first(spreads, count)
    value = spreads[chosen].min()
    equal = np.flatnonzero(spreads == value)
    kept = equal[chosen[equal]]
    return value, spreads.size if kept.size == equal.size else int(kept[-1])


def energies(share: float, base: Array, experts: Sequence[Array]) -> list[np.float32]:
    """The weight of each expert: its share of the squares of all selected deltas."""
    deltas = [delta(base, expert) for expert in experts]
    if share < 1:
        value, last = spread_cut(share, deltas)
        spreads = spread(deltas)
        keep = (spreads > value) | ((spreads == value) & (np.arange(base.size) <= last))
        deltas = [np.where(keep, d, np.float32(0)) for d in deltas]
    means = [float(np.square(d.astype(np.float64)).mean()) for d in deltas]
    if sum(means) < 1e-6:
        return [np.float32(1 / len(means))] * len(means)
    return [np.float32(mean / sum(means)) for mean in means]


def fused_by_energy(
    share: float, base: Array, experts: Sequence[Array], absent: Sequence[Mask]
) -> Single:
    """The selected deltas that agree with the sign of their sum, weighed by their energy.

    The selection of what is read is that by the whole experts' threshold.
    """
    whole = [delta(base, expert) for expert in experts]
    deltas = [np.where(gone, np.float32(0), d) for d, gone in zip(whole, absent, strict=True)]
    if share < 1:
        value, last = spread_cut(share, whole)
        spreads = spread(deltas)
        keep = (spreads > value) | ((spreads == value) & (np.arange(base.size) <= last))
        deltas = [np.where(keep, d, np.float32(0)) for d in deltas]
    total = deltas[0]
    for d in deltas[1:]:
        total = total + d
    mixed, divisor = np.zeros_like(total), np.zeros_like(total)
    for d, weight in zip(deltas, energies(share, base, experts), strict=True):
        agrees = np.where(total < 0, d < 0, d > 0)
        np.add(mixed, d * weight, out=mixed, where=agrees)
        np.add(divisor, weight, out=divisor, where=agrees)
    found: Single = mixed / np.maximum(divisor, np.float32(1e-6))
    return found


def needs(parameters: dict[str, Any], weights: Sequence[float], deltas: Sequence[Single]) -> Mask:
    """Which elements at least k experts move further than the others' sum."""
    moved = [d * np.float32(weight) for d, weight in zip(deltas, weights, strict=True)]
    total = moved[0]
    for one in moved[1:]:
        total = total + one
    votes = np.zeros(total.size, dtype=int)
    for k, one in enumerate(moved):
        ratio = np.float32(each(parameters, "tall_mask_lambda", k))
        votes[np.abs(one) > ratio * np.abs(total - one)] += 1
    found: Mask = votes >= parameters["k"]
    return found


def needed_by_several(
    parameters: dict[str, Any],
    weights: Sequence[float],
    base: Array,
    experts: Sequence[Array],
    absent: Sequence[Mask],
) -> Single:
    """lambda times the sum of the weighted deltas, where enough experts need the element."""
    deltas = [
        np.where(gone, np.float32(0), delta(base, expert))
        for expert, gone in zip(experts, absent, strict=True)
    ]
    kept = needs(parameters, weights, deltas)
    total = np.zeros(base.size, dtype=np.float32)
    for d, weight in zip(deltas, weights, strict=True):
        total = total + np.where(kept, d * np.float32(weight), np.float32(0))
    if parameters["lambda"] != 1:
        total = total * np.float32(parameters["lambda"])
    return total


def divergence(base: Array, expert: Array, row: int) -> npt.NDArray[np.longdouble]:
    """The Kullback-Leibler divergence of each row's softmax, 1e-8 added to each share."""

    def shares(side: Array) -> npt.NDArray[np.longdouble]:
        values = single(side).astype(np.longdouble).reshape(-1, row)
        values = np.exp(values - values.max(axis=1, keepdims=True))
        return values / values.sum(axis=1, keepdims=True) + np.longdouble(1e-8)

    p, q = shares(expert), shares(base)
    found: npt.NDArray[np.longdouble] = (p * np.log(p / q)).sum(axis=1)
    return found


def importance(base: Array, expert: Array, row: int) -> Single:
    """|d| times the divergence of its row, in float32."""
    of_rows = np.maximum(divergence(base, expert, row), 0).astype(np.float32)
    found: Single = np.abs(delta(base, expert)) * np.repeat(of_rows, row)
    return found


def least_importance(base: Array, expert: Array, row: int) -> np.float32:
    """The median and one and a half interquartile ranges."""
    found = np.sort(importance(base, expert, row))
    first, median, third = (found[(found.size - 1) * k // 4] for k in (1, 2, 3))
    return np.float32(median + np.float32(1.5) * (third - first))


def averaged(
    parameters: dict[str, Any],
    base: Array,
    experts: Sequence[Array],
    absent: Sequence[Mask],
) -> Single:
    """The mean of the deltas above epsilon, those of one expert alone times its factor."""
    deltas = [delta(base, expert) for expert in experts]
    kept = [
        (np.abs(d) > np.float32(parameters["epsilon"])) & ~missing
        for d, missing in zip(deltas, absent, strict=True)
    ]
    many = np.sum(kept, axis=0)
    total = np.zeros(base.size, dtype=np.float32)
    factors = lone_factors(parameters, base, experts)
    for d, own, factor in zip(deltas, kept, factors, strict=True):
        part = np.where(many == 1, d * factor, d / many.astype(np.float32))
        total = total + np.where(own, part, np.float32(0))
    return total


def by_rank(d: Single, row: int, density: float, epsilon: float) -> npt.NDArray[np.float64]:
    """The probability of each element, by the rank of its magnitude in its row, in float32."""
    found = np.empty(d.size, dtype=np.float32)
    for start in range(0, d.size, row):
        sizes = np.abs(d[start : start + row])
        if row == 1:
            found[start] = density
            continue
        ranks = np.arange(row, dtype=np.float32) / np.float32(row - 1)
        places = np.argsort(sizes, kind="stable")
        chances = ranks * np.float32(2) * np.float32(epsilon) + np.float32(density - epsilon)
        found[start + places] = chances
    return found.astype(np.float64)


def restored(whole: Single, kept: Single) -> np.float32:
    """The factor that gives what was kept the L1 norm of the whole."""
    before, after = (float(np.abs(one).sum(dtype=np.float64)) for one in (whole, kept))
    return np.float32(1.0 if min(before, after) < 1e-7 else before / after)


def each(parameters: dict[str, Any], name: str, expert: int) -> float:
    """A parameter's value for one expert."""
    value = parameters.get(name, 1.0)
    return float(value[expert] if isinstance(value, tuple | list) else value)


def _linear(
    parameters: dict[str, Any],
    weights: Sequence[float],
    base: Array,
    experts: Sequence[Array],
    absent: Sequence[Mask],
) -> tuple[Single, Mask]:
    b = single(base)
    untouched = np.ones(b.size, dtype=bool)
    total = np.zeros(b.size, dtype=np.float32)
    for expert, weight, missing in zip(experts, weights, absent, strict=True):
        x = single(expert)
        x = _where_bits(missing, b, x)
        untouched &= _bits(x) == _bits(b)
        total = fused(x, np.float32(weight), total)
    if parameters["normalize"]:
        return total / sequential_sum(weights), untouched
    return total, np.zeros(b.size, dtype=bool)


def _additive(
    method: str,
    parameters: dict[str, Any],
    weights: Sequence[float],
    base: Array,
    experts: Sequence[Array],
    absent: Sequence[Mask],
    tensor: str,
    row: int,
) -> tuple[Single, Mask]:
    products = []
    for k, (expert, weight, missing) in enumerate(zip(experts, weights, absent, strict=True)):
        d, density = delta(base, expert), each(parameters, "density", k)
        if method in BANDS and density < 1:
            kept = band(d, density, each(parameters, "gamma", k))
            d = np.where(kept, d, np.float32(0))
        if method == "ties" and density < 1:
            kept = largest(d, density)
            d = np.where(kept, d, np.float32(0))
        if method in RANDOM:
            if density < 1:
                limit = round(density * 2**32)
                drawn = draws(parameters["seed"], k, tensor, d.size).astype(np.uint64)
                d = np.where(drawn < limit, d, np.float32(0))
            if parameters["rescale"] == "l1":
                d = d * (restored(delta(base, expert), d) if density < 1 else np.float32(1))
            elif parameters["rescale"]:
                d = d * np.float32(1.0 / density)
        if method in RANKED and density < 1:
            chances = by_rank(d, row, density, each(parameters, "epsilon", k))
            drawn = draws(parameters["seed"], k, tensor, d.size).astype(np.uint64)
            whole, d = d, np.where(drawn < np.rint(chances * 2.0**32), d, np.float32(0))
            if parameters["rescale"]:
                d = d * restored(whole, d)
        product = np.float32(weight) * np.where(missing, np.float32(0), d)
        if method in CONSENSUS:
            # What has no sign takes part in no election.
            product = np.where(np.isnan(product), np.float32(0), product)
        products.append(product)

    total = products[0]
    for product in products[1:]:
        total = total + product
    if method in CONSENSUS:
        # Zero counts as positive, and so does infinity less infinity.
        positive, negative = ~(total < 0), total < 0
        if parameters.get("by_count"):
            votes = np.sum([np.sign(product) for product in products], axis=0)
            positive, negative = votes > 0, votes < 0
        mixed, divisor = np.zeros_like(total), np.zeros_like(total)
        for product, weight in zip(products, weights, strict=True):
            agrees = (positive & (product > 0)) | (negative & (product < 0))
            np.add(mixed, product, out=mixed, where=agrees)
            np.add(divisor, np.float32(weight), out=divisor, where=agrees)
        if parameters["normalize"]:
            divisor[divisor == 0] = 1
            mixed = mixed / divisor
    else:
        mixed = total
        if parameters["normalize"]:
            all_weights = sequential_sum(weights)
            mixed = mixed / (all_weights if abs(all_weights) >= np.float32(1e-8) else np.float32(1))
    if parameters["lambda"] != 1:
        mixed = mixed * np.float32(parameters["lambda"])
    b = single(base)
    return b + mixed, mixed == 0


def _result(base: Array, values: Single, keep: Mask, out_dtype: str) -> Array:
    """`values` rounded to the output type, or the base element itself where `keep`."""
    out = rounded(values, out_dtype)
    own = base if name_of(base) == out_dtype else rounded(single(base), out_dtype)
    words = np.where(keep, own.view(WORDS[out_dtype]), out.view(WORDS[out_dtype]))
    return words.astype(WORDS[out_dtype]).view(DTYPES[out_dtype])


def delta(base: Array, expert: Array) -> Single:
    """Expert minus base in float32; +0 where their float32 bit patterns are equal."""
    b, e = single(base), single(expert)
    with np.errstate(all="ignore"):
        return np.where(_bits(b) == _bits(e), np.float32(0), e - b)


def keep_count(density: float, elements: int) -> int:
    """How many elements trimming keeps."""
    return max(1, int(density * elements))


def first(d: Single, count: int) -> Mask:
    """The `count` elements first in order of (-|d|, index); NaN is the smallest.

    Selecting takes a tenth of the time of sorting.
    """
    if count in (0, d.size):
        return np.full(d.size, count > 0)
    order = -np.abs(d)
    last = np.partition(order, count - 1)[count - 1]
    before, equal = (~np.isnan(d), np.isnan(d)) if np.isnan(last) else (order < last, order == last)
    before[np.flatnonzero(equal)[: count - np.count_nonzero(before)]] = True
    return before


def largest(d: Single, density: float) -> Mask:
    """The keep_count elements first in order of (-|d|, index).  NaN is the smallest, never kept."""
    if density >= 1:
        return np.ones(d.size, dtype=bool)
    return first(d, keep_count(density, d.size)) & ~np.isnan(d)


def band(d: Single, density: float, gamma: float) -> Mask:
    """As `largest`, without the int(gamma * n) first ones, and int(density * n) of the rest."""
    kept = int(density * d.size)
    last = min(d.size, kept + int(gamma * d.size))
    return first(d, last) & ~first(d, last - kept) & ~np.isnan(d)


def threshold(d: Single, density: float) -> tuple[np.float32, int]:
    """(v, quota) of `largest`: all |d| > v are kept and the first `quota` of those equal to v."""
    return _cut(np.abs(d)[largest(d, density)])


def thresholds(d: Single, density: float, gamma: float) -> list[tuple[np.float32, int]]:
    """(v, quota) twice, for `band`: what the second would keep is dropped."""
    kept = int(density * d.size)
    last = min(d.size, kept + int(gamma * d.size))
    magnitudes = (np.abs(d)[first(d, rank)] for rank in (last, last - kept))
    return [_cut(found[~np.isnan(found)]) for found in magnitudes]


def _cut(magnitudes: Single) -> tuple[np.float32, int]:
    """The least of those that are kept, and how many of them equal it."""
    if not magnitudes.size:
        return np.float32(np.inf), 0
    v = magnitudes.min()
    return v, int(np.count_nonzero(magnitudes == v))


def mask_key(seed: int, position: int, tensor: str) -> tuple[int, int]:
    """Key words of the DARE mask of one expert and tensor."""
    hasher = blake3(derive_key_context="mstore 2 mask")
    hasher.update(np.array([seed], "<u8").tobytes())
    hasher.update(np.array([position], "<u4").tobytes())
    hasher.update(tensor.encode("utf-8"))
    low, high = np.frombuffer(hasher.digest()[:8], "<u4")
    return int(low), int(high)


def draws(seed: int, position: int, tensor: str, count: int) -> npt.NDArray[np.uint32]:
    """One 32-bit draw an element, for elements 0..count-1."""
    return draws_at(np.arange(count, dtype=np.uint64), mask_key(seed, position, tensor))


def draws_at(places: Array, key: tuple[int, int]) -> npt.NDArray[np.uint32]:
    """The draws of elements at these flat indices, uint64: triple32, which a key enters twice.

    Numbers are uint64, cut to 32 bits after each step.
    """
    first, second = (np.uint64(word) for word in key)
    x = (places % 2**32) ^ first
    x = (x ^ x // 2**17) * np.uint64(0xED5AD4BB) % 2**32
    x = x ^ x // 2**11
    x = (x + second + places // 2**32 * np.uint64(0x9E3779B9)) % 2**32
    x = x * np.uint64(0xAC4C1B51) % 2**32
    x = (x ^ x // 2**15) * np.uint64(0x31848BAB) % 2**32
    return (x ^ x // 2**14).astype(np.uint32)


def fused(a: Single, b: np.float32, c: Single) -> Single:
    """a * b + c, rounded once.

    In float64 the product is exact; its sum with c, rounded to odd (Boldo and Melquiond 2008),
    keeps what the second rounding, to float32, needs.
    """
    product = a.astype(np.float64) * np.float64(b)
    addend = c.astype(np.float64)
    total = product + addend
    lost = (product - (total - (total - product))) + (addend - (total - product))
    bits = total.view(np.int64)
    even = np.isfinite(total) & (lost != 0) & (bits % 2 == 0)
    away = (lost > 0) == (total > 0)
    odd = np.where(even, bits + np.where(away, 1, -1), bits)
    return odd.view(np.float64).astype(np.float32)


def sequential_sum(values: Sequence[float]) -> np.float32:
    """Sum in order, rounded to float32 after each step."""
    total = np.float32(values[0])
    for value in values[1:]:
        total = np.float32(total + np.float32(value))
    return total


def name_of(array: Array) -> str:
    """ "BF16", "F16" or "F32", or "U8", of what is no number."""
    known = DTYPES | {"U8": np.dtype("u1")}
    return next(name for name, dtype in known.items() if array.dtype == dtype)


def single(array: Array) -> Single:
    """float32 of every element, exactly; a NaN keeps its sign and payload."""
    name = name_of(array)
    if name == "F32":
        return array
    words = array.view(np.uint16).astype(np.uint32)
    if name == "BF16":
        return (words << 16).view(np.float32)
    values = array.astype(np.float32)
    nan = np.isnan(values)
    with_payload = (words & 0x8000) << 16 | 0x7F800000 | (words & 0x3FF) << 13
    return np.where(nan, with_payload, _bits(values)).astype(np.uint32).view(np.float32)


def rounded(values: Single, dtype: str) -> Array:
    """To nearest, ties to even, in this type; every NaN the positive quiet one."""
    with np.errstate(all="ignore"):
        out = values.astype(DTYPES[dtype])
    words = out.view(WORDS[dtype]).copy()
    words[np.isnan(values)] = QUIET_NAN[dtype]
    return words.view(DTYPES[dtype])


def _bits(values: Single) -> npt.NDArray[np.uint32]:
    return values.view(np.uint32)


def _where_bits(mask: Mask, yes: Single, no: Single) -> Single:
    return np.where(mask, _bits(yes), _bits(no)).view(np.float32)
