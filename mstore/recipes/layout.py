"""Layers: where in a model the tensors of a recipe are, by their names.

A layer has a number in its tensors' names: `model.layers.3.mlp.up_proj.weight` is in layer 3 of the
stack `model.layers`.  The first number counts, so experts of a mixture are inside their layer.  All
other tensors are loose: before the first layer, or after the last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

_NUMBERED = re.compile(r"(?P<stack>[^.]+(?:\.[^.]+)*?)\.(?P<layer>[0-9]{1,6})\.")
_WORDS: Final = frozenset(("layers", "layer", "h", "blocks", "block"))
"""How architectures call their layers.  If a model has such a name, other numbers are no layers."""

COUNTS: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")

# After the last layer, in the architectures whose names we know.
_LAST = re.compile(
    r"(^|\.)(lm_head|embed_out|output_layer|score|classifier|ln_f|norm_f|norm|final_norm|"
    r"final_layer_norm|final_layernorm|decoder\.norm|pooler|cls)\."
)


@dataclass(frozen=True, slots=True)
class Layout:
    """The stacks of a model, and how many layers each has."""

    stacks: Mapping[str, int]

    @classmethod
    def of(cls, names: Iterable[str], layers: int | None = None) -> Layout:
        """Return the layout of a model with these tensors.

        layers: how many there are by the model's config; names may have more (parts that predict
        further tokens), which are loose then.
        """
        counts: dict[str, int] = {}
        for name in names:
            found = _NUMBERED.match(name)
            if found is not None:
                stack, layer = found["stack"], int(found["layer"])
                counts[stack] = max(counts.get(stack, 0), layer + 1)
        known = {stack: n for stack, n in counts.items() if stack.rpartition(".")[2] in _WORDS}
        stacks = known or counts
        if layers is not None and len(stacks) == 1:
            ((stack, count),) = stacks.items()
            stacks = {stack: min(count, layers) if layers > 0 else count}
        return cls(stacks)

    def layer(self, name: str) -> tuple[int, int] | None:
        """Return a tensor's layer and how many its stack has; None for a loose tensor."""
        found = _NUMBERED.match(name)
        count = None if found is None else self.stacks.get(found["stack"])
        if found is None or count is None or int(found["layer"]) >= count:
            return None
        return int(found["layer"]), count


def is_last(name: str) -> bool:
    """Return whether a loose tensor comes after the last layer."""
    return bool(_LAST.search(name))


def layers_of(config: Mapping[str, object]) -> int | None:
    """Return how many layers a model's config says that it has."""
    parts: list[object] = [config, config.get("text_config"), config.get("llm_config")]
    for part in parts:
        if not isinstance(part, Mapping):
            continue
        for key in COUNTS:
            count = part.get(key)
            if isinstance(count, int) and not isinstance(count, bool) and count > 0:
                return count
    return None
