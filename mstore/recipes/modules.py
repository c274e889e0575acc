"""Modules: the parts of a model that a recipe may name, and which tensors each has.

Names as in mergekit 0.1.5, in two ways that a recipe chooses by using them:

    by role     `default` of a model with one stack of layers; `text_decoder`, `vision_tower`,
                `vision_model`, `audio_tower`, `multi_modal_projector` of one that sees or hears;
                `encoder`, `decoder`, `shared` of one that has these two
    by stack    the stack's name (`model.visual.blocks`), and `default` for the other tensors:
                mergekit's names of modules in architectures for which it has no template
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Final

import msgspec

from mstore.recipes.layout import AHEAD, BEHIND, Layout

DEFAULT: Final = "default"
TEXT: Final = "text_decoder"
_SHARED: Final = "shared"
_SIDES: Final = ("encoder", "decoder")
_VISION: Final = "vision_tower"
_PROJECTOR: Final = "multi_modal_projector"
_HEARING = re.compile(r"audio|speech|apm")
_PROJECTORS: Final = frozenset(
    (
        *(_PROJECTOR, "mm_projector", "connector", "aligner", "resampler", "perceiver_resampler"),
        *("qformer", "projector", "mlp1", "language_projection", "audio_projection"),
        *("merger", "deepstack_merger_list"),
    )
)
_NUMBERED = re.compile(r"(.+?)\.[0-9]{1,6}\..")


class Modules(msgspec.Struct, frozen=True):
    """The modules of one model. by_stack: see above."""

    layout: Layout
    by_stack: bool

    @classmethod
    def of(cls, layout: Layout, asked: Collection[str]) -> Modules | None:
        """Return the modules of a model, by the names that a recipe uses.

        None if neither way of naming fits the model.
        """
        stacks = layout.stacks
        if len(stacks) > 1 and any(name in stacks for name in asked):
            return cls(layout, by_stack=True)
        found = cls(layout, by_stack=False)
        return found if len(stacks) < 2 or found._has_sides() or found._has_text() else None

    def module(self, name: str) -> str:
        """Return the module of a tensor."""
        if self.by_stack:
            stack = _NUMBERED.match(name)
            return stack[1] if stack is not None and stack[1] in self.layout.stacks else DEFAULT
        if len(self.layout.stacks) < 2:
            return DEFAULT
        path = name.split(".")
        if self._has_sides():
            return next((word for word in path[:-1] if word in _SIDES), _SHARED)
        ahead = [word for word in path if word in AHEAD]
        if not ahead:
            return TEXT
        if _PROJECTORS.intersection(path):
            return _PROJECTOR
        if _HEARING.search(name):
            return "audio_tower"
        return "vision_model" if ahead[0] == "vision_model" else _VISION

    def known(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the modules of the tensors of these names."""
        return tuple(sorted({self.module(name) for name in names}))

    def of_main(self) -> str | None:
        """Return the module of the main stack, None if there is none."""
        main = self.layout.main
        return None if main is None else self.module(f"{main}.0.weight")

    def _has_sides(self) -> bool:
        """Return whether the model is an encoder and a decoder."""
        found = [[word for word in one.split(".") if word in _SIDES] for one in self.layout.stacks]
        return sorted(found) == sorted([word] for word in _SIDES)

    def _has_text(self) -> bool:
        """Return whether one stack is in no part that makes input for a text model."""
        known = AHEAD | BEHIND
        return sum(not known.intersection(one.split(".")) for one in self.layout.stacks) == 1
