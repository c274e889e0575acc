"""Combinations by the spectra of the differences, in the space that their factors span.

With orthonormal bases u of all columns and v of all rows, each difference is u @ core @ v.T.  That
is exact, and a core has as many rows and columns as the adapters have ranks (Core Space, arXiv
2509.17786).  A formula of singular values and vectors is the same for cores as for whole matrices,
so nothing of the size of a layer is in memory but the factors.  All of it is in float64.

Each method takes the space and returns two factors of the core of the result.  "Terms" are the
cores times their weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from mstore.merge.combination.elements import ElementRule, Term
from mstore.merge.combination.products import ModuleProducts, in_one_run, not_finite
from mstore.models.adapters.truncation import Doubles, decomposed_product
from mstore.terms.errors import Incompatible
from mstore.terms.phrases import Option

_NOTHING: Final = 1e-12
"""What is smaller than this share of the largest is rounding, not a direction."""

Core = tuple[Doubles, Doubles]
"""A core, as two factors whose product it is."""


@dataclass(frozen=True, slots=True, eq=False)
class CoreSpace:
    """The space that the factors of one module span.

    u: float64[rows, m]. v: float64[columns, n]; both orthonormal. cores: of each adapter, scaled
    and not weighted, as left [m, rank] and right [rank, n].
    """

    module: ModuleProducts
    u: Doubles
    v: Doubles
    cores: tuple[Core, ...]

    @classmethod
    def of(cls, module: ModuleProducts) -> CoreSpace:
        """Return the space of a module.

        The bases are singular vectors of the factors as they are stored, as in Core Space: methods
        that choose elements depend on the basis, and this one not on the order of the adapters.
        """
        ups, downs = (
            [factor.astype(np.float64) for factor in side]
            for side in ([one.up for one in module.read], [one.down.T for one in module.read])
        )
        u, v = (_basis(np.concatenate(side, axis=1)) for side in (ups, downs))
        cores = (
            (one.scale * (u.T @ up), down.T @ v)
            for one, up, down in zip(module.read, ups, downs, strict=True)
        )
        return cls(module, u, v, tuple(cores))

    def whole(self, core: Core) -> Core:
        """Return the factors of the matrix that a core stands for."""
        left, right = core
        return self.u @ left, right @ self.v.T

    @property
    def weights(self) -> Iterator[float]:
        """The weight of each adapter."""
        return (one.weight for one in self.module.read)

    def terms(self) -> list[Doubles]:
        """Return the terms of the weighted sum."""
        return [
            weight * (left @ right)
            for weight, (left, right) in zip(self.weights, self.cores, strict=True)
        ]


def tsv(space: CoreSpace, rank: int) -> Core:
    """Return the sum of the largest singular triples of each term, their vectors made orthonormal.

    TSV-M (arXiv 2412.00081).  Each term has an equal share of the rank, or all it has.
    """
    parts = [
        _significant(*decomposed_product(weight * left, right))
        for weight, (left, right) in zip(space.weights, space.cores, strict=True)
    ]
    share = _share([values.size for _, values, _ in parts], rank, space.module.name)
    u = _orthonormal(np.concatenate([u[:, :share] for u, _, _ in parts], axis=1))
    v = _orthonormal(np.concatenate([v[:share].T for _, _, v in parts], axis=1))
    return u * np.concatenate([values[:share] for _, values, _ in parts]), v.T


def svc(space: CoreSpace, alpha: float) -> Core:
    """Return the sum, its singular values divided by how much too often its terms count in them.

    Singular value calibration (arXiv 2602.05536).  A term that is not there in a direction counts
    as `alpha`.
    """
    terms = space.terms()
    u, values, v = np.linalg.svd(np.sum(terms, axis=0), full_matrices=False)
    rows = values[:, None] * v
    counted = np.zeros_like(values)
    for term in terms:
        own = u.T @ term
        norms = np.linalg.norm(own, axis=1)
        # Beside a direction of other terms alone only rounding is left, whose share says nothing.
        there = norms > _NOTHING**0.75 * np.linalg.norm(term)
        share = (rows * own).sum(axis=1) / np.where(there, norms, 1.0) ** 2
        counted += np.maximum(alpha, np.where(there, share, 0.0))
    return u * (values * len(terms) / counted), v


def iso_c(space: CoreSpace, rank: int) -> Core:
    """Return the truncated sum, with the mean of its singular values in place of each.

    Iso-C (arXiv 2502.04959).
    """
    total = np.sum(space.terms(), axis=0)
    return _even([_decomposed(total, rank)])


def iso_cts(space: CoreSpace, rank: int, common: float) -> Core:
    """Return as `iso_c`, with the weakest directions of the sum replaced by the terms' own.

    Iso-CTS (arXiv 2502.04959).  common: the share of directions that stay the sum's.
    """
    terms = space.terms()
    total = np.sum(terms, axis=0)
    count = min(rank, *total.shape)
    each = min(round((count - int(count * common)) / len(terms)), count // len(terms))
    shared = _decomposed(total, count - each * len(terms))
    columns = shared[0]
    rest = (term - columns @ (columns.T @ term) for term in terms)
    own = (
        _decomposed(one, each, float(np.linalg.norm(term)))
        for one, term in zip(rest, terms, strict=True)
    )
    return _even([*own, shared])


def wudi_ridge(space: CoreSpace, ridge: float) -> Core:
    """Return the matrix t with the least interference: sum |(t - t_k) t_k^T|^2 / |t_k|^2 over the
    terms t_k, and rho |t - sum t_k|^2, in closed form.

    The objective is that of WUDI (arXiv 2503.08099), whose authors stop a gradient descent early
    instead of adding the last term: their results are others.  rho is `ridge` times the mean
    eigenvalue of sum t_k^T t_k / |t_k|^2, so it depends on neither the size nor the number of the
    differences, nor on their rank.
    """
    terms = [term for term in space.terms() if term.any()]
    total = np.sum(space.terms(), axis=0)
    if not terms:
        return total, np.eye(total.shape[1])
    units = [term / np.linalg.norm(term) for term in terms]
    grams = [unit.T @ unit for unit in units]
    width = total.shape[1]
    # The trace of each is 1.
    rho = ridge * len(grams) / width
    pulled = np.sum([term @ gram for term, gram in zip(terms, grams, strict=True)], axis=0)
    matrix = np.sum(grams, axis=0) + rho * np.eye(width)
    return np.linalg.solve(matrix, (pulled + rho * total).T).T, np.eye(width)


def of_elements(space: CoreSpace, elements: ElementRule) -> Core:
    """Return the cores combined element by element."""
    name = space.module.name
    cores = [(left @ right).astype(np.float32) for left, right in space.cores]
    if not all(np.isfinite(core).all() for core in cores):
        raise not_finite(name)
    terms = [
        Term(in_one_run(core), one.weight, one.position)
        for core, one in zip(cores, space.module.read, strict=True)
    ]
    (found,) = elements.combined(terms, f"{name}.core", cores[0].size)
    if not np.isfinite(found).all():
        raise not_finite(name)
    return found.reshape(cores[0].shape).astype(np.float64), np.eye(cores[0].shape[1])


_Triples = tuple[Doubles, Doubles, Doubles]
"""Left vectors as columns, singular values, right vectors as rows."""


def _basis(columns: Doubles) -> Doubles:
    """Return orthonormal columns that span these, by size, the largest element of each positive."""
    outer, inner = np.linalg.qr(columns)
    u, values, _ = np.linalg.svd(inner)
    # One stays of nothing: a matrix needs a column.
    basis = outer @ u[:, : max(1, _count(values))]
    # A singular vector has any sign, and an election of as many plus as minus goes to plus.
    largest = basis[np.abs(basis).argmax(axis=0), np.arange(basis.shape[1])]
    signed: Doubles = basis * np.where(largest < 0, -1.0, 1.0)
    return signed


def _count(values: Doubles, of: float | None = None) -> int:
    """Return how many singular values are more than rounding.  of: what they are a share of."""
    largest = values[0] if of is None and values.size else of
    return int((values > _NOTHING * (largest or 0.0)).sum())


def _significant(u: Doubles, values: Doubles, v: Doubles) -> _Triples:
    count = _count(values)
    return u[:, :count], values[:count], v[:count]


def _decomposed(matrix: Doubles, most: int, of: float | None = None) -> _Triples:
    """Return at most so many singular triples, the largest, without those that are rounding."""
    u, values, v = np.linalg.svd(matrix, full_matrices=False)
    count = min(most, _count(values, of))
    return u[:, :count], values[:count], v[:count]


def _even(parts: Sequence[_Triples]) -> Core:
    """Return all directions, made orthonormal, times the mean of their values."""
    u = _orthonormal(np.concatenate([u for u, _, _ in parts], axis=1))
    v = _orthonormal(np.concatenate([v.T for _, _, v in parts], axis=1))
    values = np.concatenate([values for _, values, _ in parts])
    return u * (values.mean() if values.size else 0.0), v.T


def _orthonormal(columns: Doubles) -> Doubles:
    """Return the nearest matrix with orthonormal columns: the polar factor.

    Columns that depend on each other share the directions that they have.
    """
    if not columns.size:
        return columns
    u, values, v = np.linalg.svd(columns, full_matrices=False)
    count = _count(values)
    found: Doubles = u[:, :count] @ v[:count]
    return found


def _share(ranks: Sequence[int], rank: int, module: str) -> int:
    """Return the largest rank that each may have, so that all together have at most `rank`."""
    for share in range(max(ranks, default=0), 0, -1):
        if sum(min(share, one) for one in ranks) <= rank:
            return share
    if not any(ranks):
        return 0
    raise Incompatible(
        f"{len(ranks)} adapters cannot share a rank of {rank}: each needs one",
        where=module,
        hint=Option("rank", len(ranks)),
    )
