"""Layers: where in a model the tensors of a recipe are, by their names.

A layer has a number in its tensors' names: `model.layers.3.mlp.up_proj.weight` is in layer 3 of the
stack `model.layers`.  The first number counts, so experts of a mixture are inside their layer.  All
other tensors are loose: before the first layer, or after the last.

A model may have several stacks: an encoder and a decoder, or a text model and what sees or hears
for it.  Slices are of the main stack: the only one, or the text model's.  The facts about names
below are measured against mergekit's templates and the modules of transformers
(`conformance/test_architectures.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

_NUMBERED = re.compile(r"(?P<stack>[^.]+(?:\.[^.]+)*?)\.(?P<layer>[0-9]{1,6})\.(?P<rest>.+)")
_WORDS: Final = frozenset(
    (*("layers", "layer", "h", "blocks", "block"), "encoders", "deepstack_merger_list")
)
"""How architectures call their layers.  If a model has such a name, other numbers are no layers."""

COUNTS: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
TEXT_CONFIGS: Final = ("text_config", "llm_config", "language_config")
"""Parts of a config that are those of the text model."""

AHEAD: Final = frozenset(
    (
        *("vision_tower", "vision_model", "vision_encoder", "vision_embed_tokens", "visual"),
        *("image_encoder", "embed_tokens_extend", "embed_vision", "embed_audio", "vpm", "apm"),
        *("audio_tower", "audio_model", "audio_encoder", "speech_encoder"),
        *("multi_modal_projector", "mm_projector", "connector", "aligner", "resampler", "qformer"),
        *("perceiver_resampler", "language_projection", "audio_projection", "projector", "mlp1"),
    )
)
"""Parts of a model that make input for its text model."""
BEHIND: Final = frozenset(("mtp",))
"""Parts of a model that follow its last layer: they predict further tokens."""

_HEADS: Final = frozenset(
    (
        *("lm_head", "embed_out", "output_layer", "output", "output_projection", "project_out"),
        *("proj_out", "head", "lm_loss", "score", "classifier", "pre_classifier", "pooler", "cls"),
        *("predictions", "generator_predictions", "generator_lm_head", "discriminator_predictions"),
        *("vocab_transform", "vocab_layer_norm", "vocab_projector", "qa_outputs", "v_head"),
        *("final_logits_bias", "altup_unembed_projections", "vision_adapter"),
    )
)
_NORMS: Final = frozenset(
    (
        *("norm", "norm_f", "ln_f", "ln_out", "ln_post", "layernorm", "layer_norm"),
        *("post_layernorm", "layernorm_post"),
    )
)
"""How architectures call the norm after the last layer.  It stands beside the stack or above."""
_FINAL: Final = "final_"
_DECODER = re.compile(r"decoder\.(weight|bias)")
"""The head of some masked language models."""


class Layout(msgspec.Struct, frozen=True):
    """The stacks of a model.

    stacks: how many layers each has. main: the stack that slices are of; None if it has none, or
    several and it is not certain which. further: layers of the main stack that come after those
    that the config counts; they are loose.
    """

    stacks: Mapping[str, int]
    main: str | None
    further: int

    @classmethod
    def of(cls, names: Iterable[str], layers: int | None = None) -> Layout:
        """Return the layout of a model with these tensors.

        layers: how many its text model has by its config; names may have more (parts that predict
        further tokens).  Without it no stack of several is the main one.
        """
        counts: dict[str, int] = {}
        for name in names:
            found = _NUMBERED.match(name)
            if found is not None:
                stack, layer = found["stack"], int(found["layer"])
                counts[stack] = max(counts.get(stack, 0), layer + 1)
        known = {stack: n for stack, n in counts.items() if stack.rpartition(".")[2] in _WORDS}
        stacks = known or counts
        main = _main(stacks, layers)
        if main is None or not layers:
            return cls(stacks, main, 0)
        count = min(stacks[main], layers)
        return cls({**stacks, main: count}, main, stacks[main] - count)

    def layer(self, name: str) -> tuple[int, int] | None:
        """Return a tensor's layer and how many its stack has; None for a loose tensor."""
        found = _NUMBERED.match(name)
        count = None if found is None else self.stacks.get(found["stack"])
        if found is None or count is None or int(found["layer"]) >= count:
            return None
        return int(found["layer"]), count

    def part(self, name: str) -> tuple[int, str] | None:
        """Return a tensor's layer in the main stack, and its name there.

        The layer of one that comes after those that the config counts is their number or more.
        None for a tensor elsewhere.
        """
        found = _NUMBERED.match(name)
        if found is None or found["stack"] != self.main:
            return None
        return int(found["layer"]), found["rest"]

    def is_last(self, name: str) -> bool:
        """Return whether a tensor that is in no layer of the main stack comes after it.

        If no stack is the main one: whether it comes after a stack beside it.
        """
        stacks = list(self.stacks) if self.main is None else [self.main]
        own = {word for stack in stacks for word in stack.split(".")}
        path = name.split(".")
        if any(word in BEHIND - own for word in path) or self.part(name) is not None:
            return True
        if self.main is not None and any(word in AHEAD - own for word in path):
            return False
        if any(word in _HEADS for word in path) or _DECODER.fullmatch(name):
            return True
        words = path[:-1]
        if not words or "embed" in words[-1]:
            return False
        above = "".join(f"{word}." for word in words[:-1])
        is_beside = not stacks or any(stack.startswith(above) for stack in stacks)
        return words[-1].startswith(_FINAL) or (words[-1] in _NORMS and is_beside)

    def listed(self) -> str:
        """Return the stacks as text."""
        return ", ".join(f"{name} ({count})" for name, count in self.stacks.items()) or "none"

    def remark(self, *, has_gradients: bool) -> str | None:
        """Return what a user could not guess about layers, as a sentence; None for most models."""
        said = []
        if len(self.stacks) > 1 and has_gradients:
            said.append(f"a gradient runs over each of {self.listed()}")
        elif (
            len(self.stacks) == 1
            and self.main is not None
            and self.main.rpartition(".")[2] not in _WORDS
        ):
            said.append(f"layers are told by the numbers in names: {self.listed()}")
        if self.further:
            said.append(
                f"{self.further} of {self.main} are more than config.json counts, and come after "
                "the last layer"
            )
        return "; ".join(said) or None


def _main(stacks: Mapping[str, int], layers: int | None) -> str | None:
    """Return the stack that slices are of.

    Of several it is the one that is in no part known to come before or after the text model, if the
    config counts as many layers or less.
    """
    if len(stacks) == 1:
        return next(iter(stacks))
    found = [one for one in stacks if not (AHEAD | BEHIND).intersection(one.split("."))]
    if len(found) != 1 or layers is None or stacks[found[0]] < layers:
        return None
    return found[0]


def layers_of(config: Mapping[str, object]) -> int | None:
    """Return how many layers a model's config says that it has."""
    parts: list[object] = [config, *(config.get(key) for key in TEXT_CONFIGS)]
    for part in parts:
        if not isinstance(part, Mapping):
            continue
        for key in COUNTS:
            count = part.get(key)
            if isinstance(count, int) and not isinstance(count, bool) and count > 0:
                return count
    return None
