"""Methods that add up what they select of deltas where it agrees on a sign."""

from __future__ import annotations

from typing import Final

from mstore.merge.methods.combinations.elected import Elected
from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import (
    EPSILON,
    GAMMA,
    LAMBDA,
    MASK_DENSITY,
    RESCALE,
    RESCALE_NORM,
    SEED,
    TRIM_DENSITY,
    normalize,
)
from mstore.merge.methods.selections.drawn import Drawn, Ranked
from mstore.merge.methods.selections.trimmed import Band, Trimmed

TIES: Final = Method(
    name="ties",
    summary="base plus the trimmed deltas that agree on a sign",
    formula="base + lambda * consensus of the trimmed w_k d_k",
    source="Yadav et al. 2023, arXiv 2306.01708",
    parameters=(TRIM_DENSITY, LAMBDA, normalize(True)),
    select=Trimmed,
    combine=Elected(),
)


BREADCRUMBS_TIES: Final = Method(
    name="breadcrumbs_ties",
    summary="base plus the deltas without outliers and small elements that agree on a sign",
    formula="base + lambda * consensus of the w_k band(d_k)",
    source="Davari and Belilovsky 2023, arXiv 2312.06795, with the consensus of arXiv 2306.01708",
    parameters=(TRIM_DENSITY, GAMMA, LAMBDA, normalize(False)),
    select=Band,
    combine=Elected(),
)


DARE_TIES: Final = Method(
    name="dare_ties",
    summary="base plus the randomly dropped deltas that agree on a sign",
    formula="base + lambda * consensus of the w_k s_k",
    source="Yu et al. 2024, arXiv 2311.03099, with the consensus of arXiv 2306.01708",
    parameters=(MASK_DENSITY, LAMBDA, normalize(False), RESCALE, SEED),
    select=Drawn,
    combine=Elected(),
)


DELLA: Final = Method(
    name="della",
    summary="base plus the deltas drawn by rank that agree on a sign",
    formula="base + lambda * consensus of the w_k r_k",
    source="Deep et al. 2024, arXiv 2406.11617",
    parameters=(MASK_DENSITY, EPSILON, LAMBDA, normalize(True), RESCALE_NORM, SEED),
    select=Ranked,
    combine=Elected(),
)
