"""Methods that add up what they select: of experts themselves, or of their deltas."""

from __future__ import annotations

from typing import Final

from mstore.merge.methods.combinations.sum import Alone, Sum
from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import (
    EPSILON,
    GAMMA,
    LAMBDA,
    MASK_DENSITY,
    MAX_SINGLE,
    RESCALE,
    RESCALE_NORM,
    SEED,
    TRIM_DENSITY,
    Parameter,
    Range,
    normalize,
)
from mstore.merge.methods.selection import Delta, Whole
from mstore.merge.methods.selections.drawn import Drawn, Ranked
from mstore.merge.methods.selections.trimmed import Band

LINEAR: Final = Method(
    name="linear",
    summary="weighted average of the experts",
    formula="sum w_k expert_k / sum w_k",
    source="Wortsman et al. 2022, arXiv 2203.05482",
    parameters=(normalize(True),),
    select=Whole,
    combine=Sum(),
)


PASSTHROUGH: Final = Method(
    name="passthrough",
    summary="one expert, scaled",
    formula="scale * expert",
    source="mergekit, github.com/arcee-ai/mergekit",
    parameters=(Parameter("scale", "float", 1.0, Range(-MAX_SINGLE, MAX_SINGLE)),),
    select=Whole,
    combine=Alone(),
    experts=1,
    weighted=False,
    weight="scale",
)


TASK_ARITHMETIC: Final = Method(
    name="task_arithmetic",
    summary="base plus the weighted sum of the deltas",
    formula="base + lambda * sum w_k d_k",
    source="Ilharco et al. 2023, arXiv 2212.04089",
    parameters=(LAMBDA, normalize(False)),
    select=Delta,
    combine=Sum(),
)


BREADCRUMBS: Final = Method(
    name="breadcrumbs",
    summary="base plus the deltas without their outliers and small elements",
    formula="base + lambda * sum w_k band(d_k)",
    source="Davari and Belilovsky 2023, arXiv 2312.06795",
    parameters=(TRIM_DENSITY, GAMMA, LAMBDA, normalize(False)),
    select=Band,
    combine=Sum(),
)


DARE_LINEAR: Final = Method(
    name="dare_linear",
    summary="base plus the sum of the deltas, with elements dropped at random",
    formula="base + lambda * sum w_k s_k",
    source="Yu et al. 2024, arXiv 2311.03099",
    parameters=(MASK_DENSITY, LAMBDA, normalize(False), RESCALE, SEED),
    select=Drawn,
    combine=Sum(),
)


DELLA_LINEAR: Final = Method(
    name="della_linear",
    summary="base plus the deltas drawn by rank",
    formula="base + lambda * sum w_k r_k",
    source="Deep et al. 2024, arXiv 2406.11617",
    parameters=(MASK_DENSITY, EPSILON, LAMBDA, normalize(False), RESCALE_NORM, SEED),
    select=Ranked,
    combine=Sum(),
)
