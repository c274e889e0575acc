"""Recipes of mergekit-moe 0.1.5: which models become experts, and what their routers are made of.

Keys that are none are refused: mergekit-moe ignores them, and so makes other routers than were
asked for.
"""

from __future__ import annotations

import math
from typing import Final, Literal, get_args

import msgspec

from mstore.merge.recipes.documents import Items, Node, Scalar, read_documents
from mstore.merge.recipes.parse import DocumentReader
from mstore.merge.recipes.recipe import Text, models_and_adapters
from mstore.terms.errors import BadRequest, did_you_mean

GateMode = Literal[
    "hidden", "hidden_avg", "hidden_last", "lda", "cheap_embed", "random", "uniform_random"
]
"""How the routers' weights are made.  `lda` is mstore's own."""

GATE_MODES: Final[tuple[GateMode, ...]] = get_args(GateMode)
DRAWN: Final[tuple[GateMode, ...]] = ("random", "uniform_random")
"""Those that take no prompts."""

_KEYS: Final = (
    *("base_model", "experts", "gate_mode", "dtype", "experts_per_token", "shared_experts"),
    "architecture",
)
_OF_EXPERTS: Final = (
    *("source_model", "positive_prompts", "negative_prompts", "noise_scale", "residual_scale"),
)


class MoeExpert(msgspec.Struct, frozen=True):
    """A dense model whose MLPs become one expert of each layer.

    positive, negative: prompts whose tokens the routers send to it, and away from it. noise: the
    standard deviation of normal noise on its weights, 0 for none. residual: the factor of its down
    projections.
    """

    model: Text
    positive: tuple[str, ...]
    negative: tuple[str, ...]
    noise: float
    residual: float
    line: int


class MoeRecipe(msgspec.Struct, frozen=True):
    """One recipe.  shared: experts that every token goes through. dtype, architecture: as asked."""

    where: str
    base: Text
    experts: tuple[MoeExpert, ...]
    shared: tuple[MoeExpert, ...]
    gate_mode: GateMode
    dtype: Text | None
    per_token: int
    architecture: Text | None
    line: int

    def every_source(self) -> tuple[()]:
        """Return the sources of slices: a mixture takes all layers of its models."""
        return ()

    def named(self) -> tuple[Text, ...]:
        """Return every model and adapter that it names, once, the base first."""
        return models_and_adapters(self.names())

    def names(self) -> tuple[Text, ...]:
        """Return the names of models as they are written, MODEL+ADAPTER too; the base first."""
        return (self.base, *(one.model for one in self.every_expert()))

    def every_expert(self) -> tuple[MoeExpert, ...]:
        """Return the experts, then the shared ones."""
        return (*self.experts, *self.shared)


def parse_moe(text: str, where: str) -> MoeRecipe:
    """Return the recipe of a file.  Raises BadRequest that names the line."""
    documents = read_documents(text, where)
    if len(documents) != 1:
        raise BadRequest("a recipe of a mixture of experts is one YAML document", where=where)
    return _Document(where, strict=True).moe(documents[0])


class _Document(DocumentReader):
    def moe(self, node: Node) -> MoeRecipe:
        fields = self.fields(node, "a recipe of a mixture of experts", _KEYS)
        for key in ("base_model", "experts"):
            if key not in fields:
                raise self.lacking(f"a recipe of a mixture of experts needs its {key}", node)
        mode = self._gate_mode(fields.get("gate_mode"))
        experts = self.items(fields, "experts", self._expert)
        shared = self.items(fields, "shared_experts", self._expert)
        asked = fields.get("experts_per_token")
        per_token = self._number(asked, "experts_per_token", 2)
        if per_token != int(per_token) or per_token < 1:
            raise self.refused("experts_per_token is a whole number from 1", asked or node)
        if len(experts) < per_token:
            default = "" if asked is not None else " (the default)"
            there = "1 expert" if len(experts) == 1 else f"{len(experts)} experts"
            raise self.refused(
                f"experts_per_token is {int(per_token)}{default}, and the recipe has {there}",
                asked or node,
            )
        self._require_prompts(mode, experts, shared)
        return MoeRecipe(
            where=self._where,
            base=self.adapted(fields["base_model"]),
            experts=experts,
            shared=shared,
            gate_mode=mode,
            dtype=self.maybe(fields, "dtype", lambda one: self.text(one, "dtype")),
            per_token=int(per_token),
            architecture=self.maybe(
                fields, "architecture", lambda one: self.text(one, "architecture")
            ),
            line=node.line,
        )

    def _expert(self, node: Node) -> MoeExpert:
        fields = self.fields(node, "an expert", _OF_EXPERTS)
        if "source_model" not in fields:
            raise self.lacking("an expert names its source_model", node)
        return MoeExpert(
            model=self.adapted(fields["source_model"]),
            positive=self._prompts(fields.get("positive_prompts"), "positive_prompts"),
            negative=self._prompts(fields.get("negative_prompts"), "negative_prompts"),
            noise=self._number(fields.get("noise_scale"), "noise_scale", 0.0),
            residual=self._number(fields.get("residual_scale"), "residual_scale", 1.0),
            line=node.line,
        )

    def _prompts(self, node: Node | None, what: str) -> tuple[str, ...]:
        if node is None or (isinstance(node, Scalar) and node.value is None):
            return ()
        texts = [
            one.value if isinstance(one, Scalar) else None for one in getattr(node, "items", ())
        ]
        if not isinstance(node, Items) or not all(isinstance(one, str) for one in texts):
            raise self.refused(f"{what} is a list of texts", node)
        return tuple(map(str, texts))

    def _number(self, node: Node | None, what: str, default: float) -> float:
        if node is None:
            return default
        value = node.value if isinstance(node, Scalar) else ""
        if value is None:
            return default
        if isinstance(value, bool | str) or not math.isfinite(value):
            raise self.refused(f"{what} is a number", node)
        return float(value)

    def _gate_mode(self, node: Node | None) -> GateMode:
        if node is None or (isinstance(node, Scalar) and node.value is None):
            return "hidden"
        mode = self.text(node, "gate_mode")
        if mode.text not in GATE_MODES:
            raise BadRequest(
                f"no gate_mode is called {mode.text[:40]!r}; there are {', '.join(GATE_MODES)}",
                where=f"{self._where}, line {mode.line}",
                hint=did_you_mean(mode.text, GATE_MODES),
            )
        return mode.text

    def _require_prompts(
        self, mode: GateMode, experts: tuple[MoeExpert, ...], shared: tuple[MoeExpert, ...]
    ) -> None:
        """Raise BadRequest where prompts are missing, or could not tell the experts apart."""
        if mode in DRAWN:
            return
        for number, one in enumerate((*experts, *shared)):
            if not one.positive:
                whose = f"expert {number}" if number < len(experts) else "a shared expert"
                raise BadRequest(
                    f"{whose}, {one.model}, has no positive_prompts, and gate_mode {mode} makes "
                    "routers from prompts",
                    where=f"{self._where}, line {one.line}",
                    hint=f"add positive_prompts, or take gate_mode: {DRAWN[0]}",
                )
        said = {(one.positive, one.negative) for one in experts}
        if len(experts) > 1 and len(said) == 1:
            raise BadRequest(
                "all experts have the same prompts, so routers could not tell them apart",
                where=f"{self._where}, line {experts[0].line}",
            )
