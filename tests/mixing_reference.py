"""Methods that mix whole vectors, from their definitions, in float64: the vectors themselves.

The library sees inner products of whole tensors only, or rows; nothing here imports it.  Of each
model or delta there is one float64[R, N]: a tensor whose rows are mixed apart, or one row of all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Double = npt.NDArray[np.float64]
Definition = Callable[[Sequence[Double], Sequence[float], Mapping[str, Any]], Sequence[Double]]
"""(vectors, weights, parameters) -> the factor of each, float64[R, 1]."""


def norms(vectors: Sequence[Double]) -> list[Double]:
    return [np.linalg.norm(one, axis=1, keepdims=True) for one in vectors]


def dot(one: Double, other: Double) -> Double:
    found: Double = (one * other).sum(axis=1, keepdims=True)
    return found


def slerp(t: float, vectors: Sequence[Double], straight: float = 2.0**-25) -> Sequence[Double]:
    """Factors of the spherical interpolation of two vectors, each with its own length."""
    units = [one / np.maximum(n, 1e-7) for one, n in zip(vectors, norms(vectors), strict=True)]
    cosine = np.clip(dot(*units), -1, 1)
    linear = 1 - np.abs(cosine) <= straight
    angle = np.arccos(np.where(linear, 0, cosine))
    turned = (np.sin((1 - t) * angle), np.sin(t * angle))
    return [
        np.where(linear, share, one / np.where(linear, 1, np.sin(angle)))
        for share, one in zip((1 - t, t), turned, strict=True)
    ]


def nuslerp(
    vectors: Sequence[Double], weights: Sequence[float], _: Mapping[str, Any]
) -> Sequence[Double]:
    if not all(weights):
        return [np.full((len(vectors[0]), 1), float(weight != 0)) for weight in weights]
    total = math.fsum(weights)
    return slerp(0.5 if abs(total) < 1e-6 else weights[1] / total, vectors)


def multislerp(
    vectors: Sequence[Double], weights: Sequence[float], given: Mapping[str, Any]
) -> Sequence[Double]:
    """Goddard's barycentric interpolation, tangent space and all, of one row."""
    if given.get("normalize_weights", True):
        weights = [weight / math.fsum(weights) for weight in weights]
    lengths = norms(vectors)
    units = [one / (n + 1e-8) for one, n in zip(vectors, lengths, strict=True)]
    total = np.sum([w * one for w, one in zip(weights, units, strict=True)], axis=0)
    mean = total / np.linalg.norm(total)
    tangents = [one - dot(one, mean) * mean for one in units]
    tangent = np.sum([w * one for w, one in zip(weights, tangents, strict=True)], axis=0)
    # Sums of tangents around their own mean are nothing: the point is the mean.
    assert np.linalg.norm(tangent) < 1e-9
    size = math.fsum(w * n.item() for w, n in zip(weights, lengths, strict=True))
    scale = size / np.linalg.norm(total)
    return [w * scale / (n + 1e-8) for w, n in zip(weights, lengths, strict=True)]


def karcher(
    vectors: Sequence[Double], _: Sequence[float], __: Mapping[str, Any]
) -> Sequence[Double]:
    """Of the point of the sphere whose logarithms add up to zero, by many small steps, of a row."""
    lengths = [n.item() for n in norms(vectors)]
    gram = np.array([[dot(one, other).item() for other in vectors] for one in vectors])
    gram /= np.outer(lengths, lengths)
    own = np.ones(len(vectors))
    for _step in range(200):
        own = own / math.sqrt(own @ gram @ own)
        step = np.zeros(len(vectors))
        for k, cosine in enumerate(gram @ own):
            angle = math.acos(min(1.0, cosine))
            if angle > 1e-7:
                step[k] += angle / math.sin(angle) / len(vectors)
                step -= angle / math.sin(angle) / len(vectors) * cosine * own
        own = own + step / 2
    own = own / math.sqrt(own @ gram @ own) * math.fsum(lengths) / len(lengths)
    return [np.array([[factor / n]]) for factor, n in zip(own, lengths, strict=True)]


def model_stock(
    vectors: Sequence[Double], _: Sequence[float], __: Mapping[str, Any]
) -> Sequence[Double]:
    cosines = [
        np.clip(dot(a, b) / np.maximum(m * n, 1e-6), -1, 1)
        for (a, m), (b, n) in itertools.combinations(zip(vectors, norms(vectors), strict=True), 2)
    ]
    cosine, count = np.mean(cosines, axis=0), len(vectors)
    divisor = 1 + (count - 1) * cosine
    singular = np.abs(divisor) < 1e-6
    return [np.where(singular, 0.0, cosine / np.where(singular, 1, divisor))] * count


def guarded(
    deltas: Sequence[Double], _: Sequence[float], given: Mapping[str, Any]
) -> Sequence[Double]:
    """Of one row of the deltas; the factors are those of whole models."""
    one, other = norms(deltas)
    if not other.item():
        stays = True
    else:
        cosine = dot(*deltas) / (one * other) if one.item() else np.zeros((1, 1))
        stays = cosine.item() >= given["threshold"]
    share = np.array([[1.0 if stays else given.get("alpha", 0.0)]])
    return [share, 1 - share]


def safe_merge(
    sides: Sequence[Double], _: Sequence[float], given: Mapping[str, Any]
) -> Sequence[Double]:
    """Of the deltas of a matrix, the third that of alignment; of none for what is no matrix.

    With the projection that the authors' code makes, V V^T over the norm of V.
    """
    stays = len(sides) < 3 or not sides[0].any()
    if not stays:
        change, aligned = (sides[k].astype(np.float64) for k in (0, 2))
        norm = np.linalg.norm(aligned)
        projected = aligned @ aligned.T / norm @ change if norm else 0 * change
        size = np.linalg.norm(projected) * np.linalg.norm(change)
        stays = (
            (projected * change).sum() / size >= given.get("threshold", 0.35)
            if size
            else (given.get("threshold", 0.35) <= 0)
        )
    share = np.array([[1.0 if stays else given.get("alpha", 0.8)]])
    return [share, 1 - share]


def geometric_median(
    vectors: Sequence[Double], _: Sequence[float], given: Mapping[str, Any]
) -> Sequence[Double]:
    """Weiszfeld's steps from the mean on, with the vectors themselves."""
    shares = np.full(len(vectors), 1 / len(vectors))
    for _step in range(given.get("max_iter", 100)):
        point = np.sum([s * one for s, one in zip(shares, vectors, strict=True)], axis=0)
        far = np.array([np.linalg.norm(one - point) for one in vectors])
        pulls = 1 / np.maximum(far, given.get("eps", 1e-6))
        shares = pulls / pulls.sum()
    return [np.array([[share]]) for share in shares]


def add_perpendicular(
    deltas: Sequence[Double], _: Sequence[float], given: Mapping[str, Any]
) -> Sequence[Double]:
    """Of A + alpha times what is left of B - C without its part along A - C; A is zero."""
    own, along = deltas[0] - deltas[1], -deltas[1]
    part = dot(own, along) / dot(along, along)
    # own - part * along, by what it takes of B and of C.
    return [np.full((1, 1), given["alpha"]), given["alpha"] * (part - 1)]
