"""Methods that add up what they select: of experts themselves, of their deltas, or of deltas where
they agree on a sign.
"""

from __future__ import annotations

from typing import Final

from mstore.merge.methods.combinations import BY_COUNT, Alone, Elected, Sum
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
from mstore.merge.methods.selections import Band, Drawn, Ranked, Trimmed

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


TIES: Final = Method(
    name="ties",
    summary="base plus the trimmed deltas that agree on a sign",
    formula="base + lambda * consensus of the trimmed w_k d_k",
    source="Yadav et al. 2023, arXiv 2306.01708",
    parameters=(TRIM_DENSITY, LAMBDA, normalize(True), BY_COUNT),
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
