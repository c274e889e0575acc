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
}


@dataclass(frozen=True)
class Case:
    """Everything is given, nothing left to a default that one side may not share."""

    method: str
    weights: tuple[float, ...]
    density: float = 1.0
    scale: float = 1.0
    normalize: bool = False
    rescale: bool = True
    seed: int = 0
    members: Sequence[str] = ()
    """Which members are merged; e0, e1, ... if none is named."""

    def __str__(self) -> str:
        parts = [self.method, "w=" + ",".join(f"{weight:g}" for weight in self.weights)]
        own = _PARAMETERS[self.method]
        parts += [f"d={self.density:g}"] if "density" in own else []
        parts += [f"l={self.scale:g}"] if "lambda" in own and self.scale != 1 else []
        parts += ["n"] if self.normalize else []
        parts += ["raw"] if not self.rescale else []
        parts += [f"s={self.seed}"] if self.seed else []
        return " ".join(parts + list(self.members))

    @property
    def experts(self) -> list[str]:
        """The members that are merged, in order."""
        return list(self.members) or [f"e{k}" for k in range(len(self.weights))]

    def parameters(self) -> dict[str, Any]:
        """As mstore takes them (the seed apart)."""
        values = {
            "density": self.density,
            "normalize": self.normalize,
            "lambda": self.scale,
            "rescale": self.rescale,
        }
        return {name: values[name] for name in _PARAMETERS[self.method]}
