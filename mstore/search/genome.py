"""Configs of mergekit-evolve as templates: a `genome` says which numbers are free.

The numbers are those of mergekit 0.1.5 (`mergekit/evo/genome.py`): a weight for each model, for
`ties` and `dare_ties` a density, too; for each filter, and for all other tensors; for each group of
layers.  Weights are searched for from 0 (-1, if they may be negative) to 1, densities from 0.1
to 1.

How mergekit-evolve evaluates (`tasks`) is a command here, which the caller types.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from mstore.merge.recipes.documents import Entries, Items, Node, Scalar, read_documents
from mstore.merge.recipes.recipe import at
from mstore.search.template import Evaluation, Template, template_of
from mstore.terms.errors import BadRequest

_BETWEEN_TWO: Final = ("t",)
_PARAMETERS: Final[Mapping[str, tuple[str, ...]]] = {
    "linear": ("weight",),
    "task_arithmetic": ("weight",),
    "ties": ("weight", "density"),
    "dare_ties": ("weight", "density"),
    "slerp": _BETWEEN_TWO,
}
_NORMALIZED: Final = ("linear", "ties", "dare_ties")
_LEAST_DENSITY: Final = 0.1
_METRIC: Final = "acc,none"
_SINGLE: Final = ("limit", "num_fewshot")
_SWITCHES: Final = ("apply_chat_template", "fewshot_as_multiturn")

Layers = Callable[[str], int | None]
"""Returns how many layers a model has, by its name in the config; None if it does not say."""


def read_template(text: str, where: str, layers: Layers) -> Template:
    """Return the template of a recipe, or of a config of mergekit-evolve.

    where: the name of its file, for errors.

    Raises BadRequest, which names the line, for what is no YAML, for several recipes, and for a
    range that is none.  What else a recipe must be is known when it is filled in.
    """
    documents = read_documents(text, where)
    if len(documents) != 1:
        raise BadRequest(
            f"a search has one recipe, and there are {len(documents)} in it", where=where
        )
    (node,) = documents
    is_genome = isinstance(node, Entries) and any(key.value == "genome" for key, _ in node.entries)
    return _template_of_genome(node, where, layers) if is_genome else template_of(node, where)


def _template_of_genome(node: Node, where: str, layers: Layers) -> Template:
    """Return the template of a config.  Raises BadRequest, which names what is not supported."""
    config = _plain(node)
    genome = config["genome"]
    place = at(where, node.line)
    if not isinstance(genome, dict):
        raise BadRequest("a genome has models and a merge_method", where=place)
    _refuse_others(genome, place)
    reader = _Genome(genome, place, layers)
    (recipe,) = read_documents(json.dumps(reader.recipe()), where)
    template = template_of(recipe, where)
    remarks = [f"{name} is not read" for name in ("shuffle", "random_init") if config.get(name)]
    return msgspec.structs.replace(template, remarks=tuple(remarks), evaluation=_evaluation(config))


def _evaluation(config: Mapping[str, Any]) -> Evaluation | None:
    """Return how a config's tasks are evaluated; None if it has none."""
    tasks = config.get("tasks")
    named = [
        (one, _METRIC)
        if isinstance(one, str)
        else (str(one.get("name")), str(one.get("metric", _METRIC)))
        for one in (tasks if isinstance(tasks, list) else [])
        if isinstance(one, str | dict)
    ]
    if not named:
        return None
    options: dict[str, str | bool] = {"tasks": ",".join(name for name, _ in named)}
    options |= {key: str(config[key]) for key in _SINGLE if config.get(key) is not None}
    options |= {key: True for key in _SWITCHES if config.get(key) is True}
    name, metric = named[0]
    return Evaluation(options, f"**/results_*.json:results.{name}.{metric}")


def _refuse_others(genome: Mapping[str, Any], place: str) -> None:
    known = (
        *("models", "merge_method", "base_model", "tokenizer_source", "layer_granularity"),
        *("normalize", "allow_negative_weights", "filters", "smooth"),
    )
    for key in genome:
        if key not in known:
            raise BadRequest(f"a genome has no {key}", where=place)
    if genome.get("tokenizer_source") is not None:
        raise BadRequest(
            "tokenizer_source of a genome is not supported: align the models first", where=place
        )
    method = str(genome.get("merge_method"))
    if method not in _PARAMETERS:
        raise BadRequest(
            f"mergekit-evolve has no merge_method {method}: it has {', '.join(_PARAMETERS)}",
            where=place,
        )
    models = genome.get("models")
    if not isinstance(models, list) or not models:
        raise BadRequest("a genome has models", where=place)
    if _PARAMETERS[method] == _BETWEEN_TWO and len(models) != 2:
        raise BadRequest(
            f"{method} among {len(models)} models, two for each layer, is not supported: name two",
            where=place,
        )


class _Genome:
    """Writes a genome as a recipe with free numbers."""

    def __init__(self, genome: Mapping[str, Any], place: str, layers: Layers) -> None:
        self._method = str(genome["merge_method"])
        self._models = [_name(one) for one in genome["models"]]
        self._base = None if genome.get("base_model") is None else _name(genome["base_model"])
        self._filters = [*(genome.get("filters") or []), None]
        self._is_smooth = bool(genome.get("smooth"))
        self._least = -1 if genome.get("allow_negative_weights") else 0
        normalize = genome.get("normalize")
        self._normalize = self._method in _NORMALIZED if normalize is None else bool(normalize)
        self._groups = self._grouped(genome, place, layers)

    def _grouped(
        self, genome: Mapping[str, Any], place: str, layers: Layers
    ) -> list[tuple[int, int]]:
        """Return the groups of layers; none if all layers are one."""
        size = genome.get("layer_granularity") or 0
        if not isinstance(size, int) or size < 1:
            return []
        count = layers(self._models[0])
        if count is None or count % size:
            raise BadRequest(
                f"layer_granularity {size} does not divide {self._models[0]}, which has layers: "
                f"{count}",
                where=place,
            )
        return [(first, first + size) for first in range(0, count, size)]

    def recipe(self) -> dict[str, Any]:
        """Return the recipe."""
        if _PARAMETERS[self._method] == _BETWEEN_TWO:
            return self._between_two()
        made: dict[str, Any] = {"merge_method": self._method}
        if self._base is not None:
            made["base_model"] = self._base
        if self._groups and not self._is_smooth:
            made["slices"] = [
                {"sources": [self._source(model, run) for model in self._named()]}
                for run in self._groups
            ]
        else:
            made["models"] = [self._source(model, None) for model in self._models]
        made["parameters"] = {"normalize": self._normalize}
        return made | {"dtype": "bfloat16"}

    def _named(self) -> Sequence[str]:
        base = () if self._base is None or self._base in self._models else (self._base,)
        return (*self._models, *base)

    def _source(self, model: str, run: tuple[int, int] | None) -> dict[str, Any]:
        made: dict[str, Any] = {"model": model}
        if run is not None:
            made["layer_range"] = list(run)
        if model in self._models and model != self._base:
            own = {name: self._setting(name) for name in _PARAMETERS[self._method]}
            made["parameters"] = own
        return made

    def _setting(self, parameter: str) -> Any:
        least = _LEAST_DENSITY if parameter == "density" else self._least
        number: Any = {"min": least, "max": 1}
        if self._is_smooth and len(self._groups) > 1:
            number = [number] * len(self._groups)
        if self._filters == [None]:
            return number
        return [
            {"value": number} if one is None else {"filter": str(one), "value": number}
            for one in self._filters
        ]

    def _between_two(self) -> dict[str, Any]:
        first, second = self._models
        t = {"t": {"min": 0, "max": 1}}
        made: dict[str, Any] = {
            "merge_method": self._method,
            "base_model": first,
            "dtype": "bfloat16",
        }
        if not self._groups:
            return made | {"models": [{"model": first}, {"model": second}], "parameters": t}
        slices = [
            {
                "sources": [{"model": one, "layer_range": list(run)} for one in (first, second)],
                "parameters": t,
            }
            for run in self._groups
        ]
        return made | {"slices": slices}


def _name(model: Any) -> str:
    """Return a model's name, also where it is a mapping with a path."""
    while isinstance(model, dict):
        model = model.get("model", model.get("path"))
    return str(model)


def _plain(node: Node) -> Any:
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, Items):
        return [_plain(one) for one in node.items]
    return {key.value: _plain(one) for key, one in node.entries}
