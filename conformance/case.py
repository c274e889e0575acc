"""A case: one merge, as mergekit's recipe says it and as mstore's command line does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_PARAMETERS = {
    "linear": ("normalize",),
    "task_arithmetic": ("normalize", "lambda"),
    "ties": ("density", "normalize", "lambda"),
    "dare_linear": ("density", "normalize", "lambda", "rescale"),
    "dare_ties": ("density", "normalize", "lambda", "rescale"),
    "breadcrumbs": ("density", "gamma", "normalize", "lambda"),
    "della": ("density", "epsilon", "normalize", "lambda", "rescale"),
    "della_linear": ("density", "epsilon", "normalize", "lambda", "rescale"),
    "breadcrumbs_ties": ("density", "gamma", "normalize", "lambda"),
    "arcee_fusion": (),
    "karcher": ("max_iter", "tol"),
    "model_stock": ("filter_wise",),
    "multislerp": ("around_base", "normalize_weights"),
    "nuslerp": ("around_base", "nuslerp_flatten"),
    "passthrough": ("scale",),
    "nearswap": ("t",),
    "ram": ("least",),
    "sce": ("select_topk",),
    "ramplus_tl": ("r", "alpha", "least"),
    "slerp": ("t",),
}
_UNWEIGHTED = {
    *(
        "arcee_fusion",
        "karcher",
        "model_stock",
        "nearswap",
        "passthrough",
        "ram",
        "ramplus_tl",
        "sce",
    ),
    "slerp",
}
_RENAMED = {"least": "epsilon"}
"""Parameters that have the name of another one."""


@dataclass(frozen=True)
class Case:
    """Everything is given, nothing left to a default that one side may not share."""

    method: str
    weights: tuple[float, ...]
    density: float | tuple[float, ...] = 1.0
    scale: float = 1.0
    normalize: bool = False
    rescale: bool = True
    seed: int = 0
    gamma: float | tuple[float, ...] = 0.01
    epsilon: float | tuple[float, ...] = 0.15
    t: float = 0.5
    least: float = 1e-5
    r: float = 0.1
    alpha: float = 0.2
    select_topk: float = 1.0
    max_iter: int = 10
    tol: float = 1e-5
    around_base: bool = True
    normalize_weights: bool = True
    filter_wise: bool = False
    nuslerp_flatten: bool = True
    members: Sequence[str] = ()
    """Which members are merged; e0, e1, ... if none is named."""

    def __str__(self) -> str:
        own = _PARAMETERS[self.method]
        parts = [self.method]
        parts += ["w=" + ",".join(f"{w:g}" for w in self.weights)] if self.is_weighted else []
        parts += [f"d={_told(self.density)}"] if "density" in own else []
        parts += [f"g={_told(self.gamma)}"] if "gamma" in own else []
        parts += [f"e={_told(self.epsilon)}"] if "epsilon" in own else []
        parts += [f"t={self.t:g}"] if "t" in own else []
        parts += [f"e={self.least:g}"] if "least" in own else []
        parts += [f"r={self.r:g} a={self.alpha:g}"] if "r" in own else []
        parts += [f"k={self.select_topk:g}"] if "select_topk" in own else []
        parts += [f"l={self.scale:g}"] if self.scale != 1 else []
        parts += [f"i={self.max_iter}", f"tol={self.tol:g}"] if "tol" in own else []
        parts += ["n"] if self.normalize else []
        parts += ["whole"] if not self.around_base else []
        parts += ["sum"] if not self.normalize_weights else []
        parts += ["rows"] if self.by_rows else []
        parts += ["raw"] if not self.rescale else []
        parts += [f"s={self.seed}"] if self.seed else []
        return " ".join(parts + list(self.members))

    @property
    def by_rows(self) -> bool:
        """Whether each row has factors of its own."""
        return self.filter_wise or not self.nuslerp_flatten

    @property
    def experts(self) -> list[str]:
        """The members that are merged, in order."""
        return list(self.members) or [f"e{k}" for k in range(len(self.weights))]

    def of(self, name: str, expert: int) -> float:
        """A parameter of one expert, by position."""
        value = self.parameters()[name]
        return float(value[expert] if isinstance(value, tuple) else value)

    @property
    def is_weighted(self) -> bool:
        """Whether its experts have weights."""
        return self.method not in _UNWEIGHTED

    @property
    def has_base(self) -> bool:
        """Whether mergekit's recipe names a base."""
        return self.method not in ("linear", "karcher", "passthrough") and self.around_base

    def parameters(self) -> dict[str, Any]:
        """As mstore takes them (the seed apart)."""
        values = {
            "density": self.density,
            "gamma": self.gamma,
            "epsilon": self.epsilon,
            "t": self.t,
            "least": self.least,
            "r": self.r,
            "alpha": self.alpha,
            "select_topk": self.select_topk,
            "max_iter": self.max_iter,
            "tol": self.tol,
            "around_base": self.around_base,
            "normalize_weights": self.normalize_weights,
            "filter_wise": self.filter_wise,
            "nuslerp_flatten": self.nuslerp_flatten,
            "normalize": self.normalize,
            "lambda": self.scale,
            "scale": self.scale,
            "rescale": self.rescale,
        }
        return {_RENAMED.get(name, name): values[name] for name in _PARAMETERS[self.method]}


def _told(value: float | tuple[float, ...]) -> str:
    return ",".join(f"{one:g}" for one in (value if isinstance(value, tuple) else (value,)))
