"""The merge methods: what each selects and combines, and its parameters."""

from __future__ import annotations

from typing import Final

MODULES: Final = {
    "add_cosine_a": "cosine",
    "add_cosine_b": "cosine",
    "add_perpendicular": "differences",
    "aim": "aim",
    "arcee_fusion": "arcee_fusion",
    "breadcrumbs": "sums",
    "breadcrumbs_ties": "sums",
    "clamp": "clamp",
    "consensus": "consensus",
    "dare_linear": "sums",
    "dare_ties": "sums",
    "della": "sums",
    "della_linear": "sums",
    "emr": "emr",
    "fisher": "fisher",
    "geometric_median": "geometric_median",
    "guarded": "guarded",
    "karcher": "spherical",
    "linear": "sums",
    "lines": "lines",
    "masked": "emr",
    "model_stock": "model_stock",
    "multislerp": "spherical",
    "nearswap": "nearswap",
    "nuslerp": "spherical",
    "passthrough": "sums",
    "pcb": "pcb",
    "ram": "ram",
    "ramplus_tl": "ram",
    "regmean": "regmean",
    "safe_merge": "safe_merge",
    "sce": "sce",
    "slerp": "spherical",
    "task_arithmetic": "sums",
    "tensor_sum": "tensor_sum",
    "ties": "sums",
    "train_difference": "differences",
}
"""The module of this folder that declares each method, in a constant: its name in capitals."""
