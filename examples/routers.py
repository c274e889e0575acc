"""Compute the routers of a mixture of experts from the prompts of its recipe.

    python examples/routers.py RECIPE BASE OUT [--bf16]
    mstore add OUT --name routers
    mstore moe --recipe RECIPE --routers routers --name moe

RECIPE is one of mergekit-moe, BASE a directory of its base_model that transformers loads (a mount
or a checkout), OUT a new one: OUT/model.safetensors has `layers.N.router`, float32[experts,
hidden], and `layers.N.shared_router`, float32[1, hidden], where an expert is shared;
OUT/routers.json says what they follow from: `mstore moe` refuses them for a recipe with another
gate_mode, other prompts, another order of experts or another base. By gate_mode:

    hidden, hidden_last   the hidden state that goes into layer N, at the last token of a prompt
    hidden_avg            its mean over the tokens of a prompt; padding does not count
    cheap_embed           the sum of the token embeddings of all prompts, the same for each layer
    lda                   a linear discriminant of what goes into the MLP of layer N at each token,
                          as the router will see it: (mean of an expert - mean of all) times the
                          inverse of the covariance within experts, and its constant

In all but lda, as in mergekit-moe 0.1.5: the mean over the positive prompts, less that over the
negative ones, of length 1. An lda has no use for negative prompts; its rows have the mean length 1.

Prints which share of the positive prompts' tokens goes to each expert, and which share of its own
prompts' tokens reaches it: the mean over layers, the least and the most. Measured on what goes into
the MLPs of BASE; in the mixture, that depends on the experts of the layers below, too.

Does not know mstore. Memory: the model in float32 (--bf16: in bfloat16).
"""

# mypy: disallow-untyped-calls=False
# (transformers and torch leave some methods unannotated)

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

# Before the imports below, which read these once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import yaml
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

SHRINKAGE = 0.1
"""How much of the covariance is that of equal variances: a few prompts have few tokens."""
RIDGE = 0.01
"""The same of the regression by which inputs become one."""

Tokens = dict[str, torch.Tensor]


class Prompts:
    """What a model makes of prompts."""

    def __init__(self, base: Path, dtype: torch.dtype) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(base)
        self._tokenizer.padding_side = "left"
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.bos_token or self._tokenizer.eos_token
        self._model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
        self._model.eval()
        self.layers = int(self._model.config.num_hidden_layers)

    def _tokens(self, prompts: list[str]) -> Tokens:
        begin = self._tokenizer.bos_token or ""
        found: Tokens = self._tokenizer(
            [begin + one for one in prompts],
            return_tensors="pt",
            padding=True,
            add_special_tokens=False,
        )
        return found

    def vectors(self, prompts: list[str], mode: str) -> torch.Tensor:
        """Return float32[layers, hidden], the mean over prompts."""
        tokens = self._tokens(prompts)
        mask = tokens["attention_mask"].bool()
        if mode == "cheap_embed":
            rows = self._model.get_input_embeddings()(tokens["input_ids"]).float()
            total = (rows * mask[..., None]).sum(dim=(0, 1))
            return total.expand(self.layers, -1)
        with torch.no_grad():
            states = self._model(
                input_ids=tokens["input_ids"],
                attention_mask=tokens["attention_mask"],
                output_hidden_states=True,
            ).hidden_states[:-1]
        found = []
        for state in states:
            values = state.float()
            if mode == "hidden_avg":
                each = (values * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
            else:
                # Padding is on the left.
                each = values[:, -1]
            found.append(each.mean(dim=0))
        return torch.stack(found)

    def inputs(self, prompts: list[str]) -> list[torch.Tensor]:
        """Return float32[tokens, hidden] for each layer: what goes into its MLP."""
        tokens = self._tokens(prompts)
        mask = tokens["attention_mask"].bool()
        seen: list[torch.Tensor] = []

        def see(module: object, arguments: tuple[torch.Tensor, ...]) -> None:
            seen.append(arguments[0].detach().float()[mask])

        hooks = [
            layer.mlp.register_forward_pre_hook(see) for layer in self._model.get_decoder().layers
        ]
        try:
            with torch.no_grad():
                self._model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
        finally:
            for hook in hooks:
                hook.remove()
        return seen


def of_length_one(rows: torch.Tensor) -> torch.Tensor:
    """Return vectors of the same directions."""
    return rows / rows.norm(dim=-1, keepdim=True).clamp(min=1e-8)


def discriminant(groups: list[torch.Tensor]) -> torch.Tensor:
    """Return float32[experts, hidden].  groups: float32[tokens, hidden] of each expert."""
    inputs = torch.cat(groups).double()
    means = torch.stack([one.double().mean(dim=0) for one in groups])
    middle = means.mean(dim=0)
    within = torch.cat([one.double() - mean for one, mean in zip(groups, means, strict=True)])
    covariance = within.T @ within / max(1, len(within) - len(groups))
    covariance = (1 - SHRINKAGE) * covariance + SHRINKAGE * evened(covariance)
    rows = torch.linalg.solve(covariance, (means - middle).T).T
    # A discriminant has a constant for each expert, and a router has none. So it goes along the
    # direction in which all inputs are nearly one.
    constants = -(rows * (means + middle)).sum(dim=1, keepdim=True) / 2
    squares = inputs.T @ inputs
    rows += constants * torch.linalg.solve(squares + RIDGE * evened(squares), inputs.sum(dim=0))
    return (rows / rows.norm(dim=1).mean()).float()


def evened(matrix: torch.Tensor) -> torch.Tensor:
    """Return a diagonal matrix with the same trace, and equal entries."""
    return torch.eye(len(matrix), dtype=matrix.dtype) * matrix.diagonal().mean()


def routers(
    recipe: dict[str, Any], prompts: Prompts, seen: list[list[torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Return the routers of all layers by name.  seen: `Prompts.inputs` of each expert's."""
    mode = recipe.get("gate_mode") or "hidden"
    experts, shared = recipe["experts"], recipe.get("shared_experts") or []

    def vectors(one: dict[str, Any]) -> torch.Tensor:
        found = prompts.vectors(one["positive_prompts"], mode)
        if one.get("negative_prompts"):
            found = found - prompts.vectors(one["negative_prompts"], mode)
        return of_length_one(found)

    if mode == "lda":
        rows = [discriminant([own[layer] for own in seen]) for layer in range(prompts.layers)]
        # A shared expert is no class of its own: what it scales is scaled by one half on average.
        others = [torch.zeros_like(one[:1]) for one in rows] if shared else []
    else:
        rows = list(torch.stack([vectors(one) for one in experts], dim=1))
        others = list(torch.stack([vectors(one) for one in shared], dim=1)) if shared else []
    found = {f"layers.{layer}.router": one for layer, one in enumerate(rows)}
    found |= {f"layers.{layer}.shared_router": one for layer, one in enumerate(others)}
    return {name: one.contiguous().float() for name, one in found.items()}


def shares(seen: list[list[torch.Tensor]], rows: list[torch.Tensor], count: int) -> torch.Tensor:
    """Return float32[prompts, layers, experts]: the share of tokens that goes to each expert.

    seen: what goes into each layer's MLP, of each expert's prompts. rows: the router of each layer.
    count: to how many experts a token goes.
    """
    found = torch.zeros(len(seen), len(rows), len(rows[0]))
    for number, inputs in enumerate(seen):
        for layer, (values, router) in enumerate(zip(inputs, rows, strict=True)):
            best = (values @ router.T).topk(count, dim=-1).indices
            counts = torch.bincount(best.flatten(), minlength=len(router))
            found[number, layer] = counts / len(values)
    return found


def told(recipe: dict[str, Any], seen: list[list[torch.Tensor]], rows: list[torch.Tensor]) -> str:
    """Return what the routers do with the prompts, a line for each expert."""
    count = recipe.get("experts_per_token") or 2
    found = shares(seen, rows, count)
    sizes = torch.tensor([float(len(one[0])) for one in seen])
    every = torch.einsum("p,ple->le", sizes / sizes.sum(), found)
    lines = [f"tokens of the prompts that go to each expert, {count} for each token, over layers:"]
    for number, one in enumerate(recipe["experts"]):
        ranges = [
            f"{100 * part.mean():3.0f} % ({100 * part.min():.0f} to {100 * part.max():.0f})"
            for part in (every[:, number], found[number, :, number])
        ]
        lines.append(f"  {ranges[0]:18}  of its own {ranges[1]:18}  {one['source_model']}")
    return "\n".join(lines)


def origin(recipe: dict[str, Any], base: Path) -> dict[str, Any]:
    """Return what routers follow from."""

    def told(one: dict[str, Any]) -> dict[str, Any]:
        return {
            "source_model": one["source_model"],
            "positive_prompts": one["positive_prompts"],
            "negative_prompts": one.get("negative_prompts") or [],
        }

    return {
        "gate_mode": recipe.get("gate_mode") or "hidden",
        "experts": [told(one) for one in recipe["experts"]],
        "shared_experts": [told(one) for one in recipe.get("shared_experts") or []],
        "base_config_sha256": sha256((base / "config.json").read_bytes()).hexdigest(),
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("base", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bf16", action="store_true", help="load the model in bfloat16")
    given = parser.parse_args(words)
    recipe = yaml.safe_load(given.recipe.read_text())
    prompts = Prompts(given.base, torch.bfloat16 if given.bf16 else torch.float32)
    seen = [prompts.inputs(one["positive_prompts"]) for one in recipe["experts"]]
    found = routers(recipe, prompts, seen)
    given.out.mkdir(parents=True)
    save_file(found, given.out / "model.safetensors", metadata={"format": "pt"})
    told_origin = json.dumps(origin(recipe, given.base), indent=2, ensure_ascii=False)
    (given.out / "routers.json").write_text(told_origin + "\n", encoding="utf-8")
    print(f"wrote {len(found)} routers to {given.out}")
    print(told(recipe, seen, [found[f"layers.{n}.router"] for n in range(prompts.layers)]))


if __name__ == "__main__":
    main()
