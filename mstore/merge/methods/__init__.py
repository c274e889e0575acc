"""The merge methods: what each selects and combines, and its parameters."""

from __future__ import annotations

from typing import Final

MODULES: Final = {
    "arcee_fusion": "arcee_fusion",
    "breadcrumbs": "sums",
    "breadcrumbs_ties": "elections",
    "consensus": "consensus",
    "dare_linear": "sums",
    "dare_ties": "elections",
    "della": "elections",
    "della_linear": "sums",
    "fisher": "fisher",
    "guarded": "guarded",
    "karcher": "karcher",
    "linear": "sums",
    "lines": "lines",
    "model_stock": "model_stock",
    "multislerp": "multislerp",
    "nearswap": "nearswap",
    "nuslerp": "slerp",
    "passthrough": "sums",
    "pcb": "pcb",
    "ram": "ram",
    "ramplus_tl": "ram",
    "sce": "sce",
    "slerp": "slerp",
    "task_arithmetic": "sums",
    "ties": "elections",
}
"""The module of this folder that declares each method, in a constant: its name in capitals."""
