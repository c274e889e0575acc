"""Ways to merge the experts of a family: what `method_quality.py` compares.

A candidate is a recipe whose outer scale is free, and what must be in the store for it.  There are
two kinds:

    methods    every method of the registry that takes any number of experts, by itself
    adapters   each expert becomes a LoRA adapter, these are combined into one, and that is merged

To add one: a method that must be told parameters has a line in PARAMETERS, a role of companions a
line in COMPANIONS, and a method that combines adapters a line in COMBINED.

Owns which candidates there are, and how each is prepared.  Does not measure, and imports torch
only where something is made with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from estimates import fisher_of

import mstore
from mstore.merge.methods.registry import METHODS
from mstore.store.objects.plan import EXPERT

BASE = "base"
FULL = "full"
# Left out where the defaults are what a user would type.  By default the methods that select
# elements take all of them, and most are then the plain sum; `lines` has no defaults.
PARAMETERS: Mapping[str, tuple[dict[str, Any], ...]] = {
    "breadcrumbs": ({"density": 0.9},),
    "breadcrumbs_ties": ({"density": 0.9},),
    "dare_linear": ({"density": 0.5},),
    "dare_ties": ({"density": 0.5},),
    "della": ({"density": 0.5},),
    "della_linear": ({"density": 0.5},),
    "lines": ({"alpha": 0.3, "beta": 0.7},),
    "regmean": ({}, {"block": FULL}),
    "sce": ({"select_topk": 0.1},),
    "ties": ({"density": 0.2},),
}


def _fisher(family: Path, model: str, _: Mapping[str, Any]) -> Path:
    from family import one_thread

    with one_thread():
        return fisher_of(family, model)


def _gathered(family: Path, domains: Sequence[str], model: str, block: int | None) -> Path:
    """What `examples/gram.py` gathers of a model, from the texts that these experts learned."""
    path = family / f"{model}-{'inputs' if block is None else f'gram{block or FULL}'}"
    if not path.exists():
        from family import DOMAINS, load, one_thread, read_corpus
        from gram import Sums, gather, windows_of
        from safetensors.numpy import save_file

        sums = Sums(block)
        with one_thread():
            for domain in DOMAINS:
                if domain.name in domains:
                    ids = read_corpus(domain).training.tolist()
                    gather(load(family / model).float(), windows_of(ids, 256, 128), sums)
        path.mkdir()
        save_file(sums.tensors(), path / "model.safetensors")
    return path


def _gram(family: Path, model: str, parameters: Mapping[str, Any]) -> Path:
    return _gathered(family, [model], model, 0 if parameters.get("block") == FULL else 64)


def _activation(family: Path, model: str, _: Mapping[str, Any]) -> Path:
    told = json.loads((family / "family.json").read_text())
    return _gathered(family, told["domains"], model, None)


# Role -> what makes one, of the folder of a family, the name of one of its models, and parameters.
COMPANIONS: dict[str, Callable[[Path, str, Mapping[str, Any]], Path]] = {
    "activation": _activation,
    "fisher": _fisher,
    "gram": _gram,
}
# Method of `combine-adapters`, its parameters, the rank of each expert's adapter, and that of the
# result: None for what the method takes.
COMBINED: tuple[tuple[str, dict[str, Any], int | str, str | None], ...] = (
    ("cat", {}, 64, None),
    ("svd", {}, FULL, None),
    ("ties_svd", {"density": 0.2}, FULL, None),
    ("ties_core", {"density": 0.2}, FULL, None),
    ("tsv", {}, FULL, FULL),
    ("svc", {}, FULL, None),
    ("iso_c", {}, FULL, FULL),
    ("iso_cts", {}, FULL, FULL),
    ("wudi_ridge", {}, FULL, None),
    ("wudi_ridge", {"ridge": 10.0}, FULL, None),
)


@dataclass(frozen=True, slots=True)
class Inputs:
    """A store with base and experts, and what candidates need besides; each is made once."""

    store: mstore.Store
    family: Path

    def companion(self, role: str, model: str, parameters: Mapping[str, Any]) -> str:
        """The ref of a companion of one model."""
        path = COMPANIONS[role](self.family, model, parameters)
        if path.name not in self.store:
            self.store.add(path, name=path.name)
        return path.name

    def adapter(self, expert: str, rank: int) -> str:
        """The ref of an expert's difference as an adapter."""
        name = f"{expert}-lora{rank}"
        if name not in self.store:
            self.store.extract_lora(expert, BASE, name=name, rank=rank)
        return name

    def combined(
        self,
        experts: Sequence[str],
        method: str,
        parameters: Mapping[str, Any],
        rank: int | str,
        of: str | None,
    ) -> str:
        """The ref of the adapter that is made of those of some experts; of: its rank."""
        config = json.loads((self.family / BASE / "config.json").read_text())
        own = config["hidden_size"] if isinstance(rank, str) else rank
        told = "".join(f"-{key}{value}" for key, value in parameters.items())
        name = f"{'-'.join(experts)}-{method}{rank}{told}"
        if name not in self.store:
            adapters = [self.adapter(expert, own) for expert in experts]
            self.store.combine_adapters(
                *(adapters, method),
                name=name,
                parameters=parameters,
                rank=None if of is None else config["hidden_size"],
            )
        return name


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a recipe merges: refs in the place of the experts, and companions by ROLE:MODEL."""

    experts: Sequence[str]
    companions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to merge experts.  name: with parameters; method, parameters: of its recipe."""

    name: str
    method: str
    parameters: Mapping[str, Any]
    prepare: Callable[[Inputs, Sequence[str]], Prepared]

    def recipe(self, prepared: Prepared, scale: Mapping[str, Any] | None = None) -> str:
        """The recipe of what was prepared; scale: the range in which it is free, None: no scale."""
        weights = dict.fromkeys(prepared.experts, 1.0)
        if self.method == "linear":
            # In a recipe, it averages the base like the others.
            weights[BASE] = 0.0
        is_weighted = METHODS[self.method].weighted
        return json.dumps(
            {
                "merge_method": self.method,
                "base_model": BASE,
                "dtype": "bfloat16",
                "models": [
                    {"model": one, **({"parameters": {"weight": weight}} if is_weighted else {})}
                    for one, weight in weights.items()
                ],
                "parameters": {**self.parameters, **({} if scale is None else {"scale": scale})},
                **({"companions": prepared.companions} if prepared.companions else {}),
            }
        )


def _named(name: str, parameters: Mapping[str, Any]) -> str:
    return ", ".join([name, *(f"{key} {value}" for key, value in parameters.items())])


def of_method(name: str, parameters: Mapping[str, Any]) -> Candidate:
    """The candidate of a method of the registry."""

    def prepare(inputs: Inputs, experts: Sequence[str]) -> Prepared:
        return Prepared(
            experts,
            {
                f"{one.role}:{model}": inputs.companion(one.role, model, parameters)
                for one in METHODS[name].companions
                for model in (experts if one.of == EXPERT else (BASE,))
            },
        )

    return Candidate(_named(name, parameters), name, parameters, prepare)


def of_adapters(
    method: str, parameters: Mapping[str, Any], rank: int | str, of: str | None
) -> Candidate:
    """The candidate of a way to combine adapters."""

    def prepare(inputs: Inputs, experts: Sequence[str]) -> Prepared:
        return Prepared([inputs.combined(experts, method, parameters, rank, of)])

    name = _named(f"adapters by {method}", {"rank": rank, **parameters})
    return Candidate(name, "task_arithmetic", {}, prepare)


def left_out() -> dict[str, str]:
    """Why methods of the registry are no candidates."""
    reasons = {}
    for name, method in METHODS.items():
        lacking = [one.role for one in method.companions if one.role not in COMPANIONS]
        if method.experts is not None:
            reasons[name] = f"{method.experts} expert" + "s" * (method.experts > 1)
        elif lacking:
            reasons[name] = f"nothing here makes its {lacking[0]}"
    return reasons


def candidates() -> list[Candidate]:
    """All of them, methods first."""
    reasons = left_out()
    methods = [
        of_method(name, parameters)
        for name in METHODS
        if name not in reasons
        for parameters in PARAMETERS.get(name, ({},))
    ]
    return [*methods, *(of_adapters(*one) for one in COMBINED)]
