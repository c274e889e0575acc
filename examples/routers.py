"""Compute the routers of a mixture of experts from the prompts of its recipe.

    python examples/routers.py RECIPE BASE OUT [--bf16] [--device DEVICE]
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

Does not know mstore. Memory: the model in float32 (--bf16: in bfloat16), on DEVICE as torch calls
it (cpu, cuda:0).
"""

# mypy: disallow-untyped-calls=False
# (transformers and torch leave some methods unannotated)

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

# Before the imports below, which read these once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

try:
    import torch
    import yaml
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
except ImportError as missing:
    sys.exit(f"routers.py: {missing}; pip install torch transformers")

MODES = ("hidden", "hidden_last", "hidden_avg", "cheap_embed", "lda")
ARCHITECTURES = ("mixtral", "qwen moe", "qwen3 moe")
KEYS = ("source_model", "positive_prompts", "negative_prompts", "noise_scale", "residual_scale")
"""Of an expert."""

SHRINKAGE = 0.1
"""How much of the covariance is that of equal variances: a few prompts have few tokens."""
RIDGE = 0.01
"""The same of the regression by which inputs become one."""

Tokens = dict[str, torch.Tensor]


class Prompts:
    """What a model makes of prompts."""

    def __init__(self, base: Path, dtype: torch.dtype, device: str = "cpu") -> None:
        self._device = device
        self._tokenizer: Any = AutoTokenizer.from_pretrained(base)
        self._tokenizer.padding_side = "left"
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.bos_token or self._tokenizer.eos_token
        self._model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
        self._model.to(device).eval()
        self.layers = int(self._model.config.num_hidden_layers)

    def _tokens(self, prompts: list[str]) -> Tokens:
        begin = self._tokenizer.bos_token or ""
        found: Tokens = self._tokenizer(
            [begin + one for one in prompts],
            return_tensors="pt",
            padding=True,
            add_special_tokens=False,
        ).to(self._device)
        return found

    def vectors(self, prompts: list[str], mode: str) -> torch.Tensor:
        """Return float32[layers, hidden], the mean over prompts."""
        tokens = self._tokens(prompts)
        mask = tokens["attention_mask"].bool()
        if mode == "cheap_embed":
            rows = self._model.get_input_embeddings()(tokens["input_ids"]).float()
            total = (rows * mask[..., None]).sum(dim=(0, 1))
            return total.cpu().expand(self.layers, -1)
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
        return torch.stack(found).cpu()

    def inputs(self, prompts: list[str]) -> list[torch.Tensor]:
        """Return float32[tokens, hidden] for each layer: what goes into its MLP."""
        tokens = self._tokens(prompts)
        mask = tokens["attention_mask"].bool()
        seen: list[torch.Tensor] = []

        def see(module: object, arguments: tuple[torch.Tensor, ...]) -> None:
            seen.append(arguments[0].detach().float()[mask].cpu())

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


def refused(why: str) -> NoReturn:
    """End the program."""
    sys.exit(f"routers.py: {why}")


def read(path: Path) -> dict[str, Any]:
    """Return a recipe from which routers can be made; any other ends the program."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        refused(f"{path} cannot be read: {error}")
    if not isinstance(found, dict) or not isinstance(found.get("experts"), list):
        refused(f"{path} is no recipe of a mixture of experts: it has no list `experts`")
    recipe: dict[str, Any] = found
    mode = recipe.get("gate_mode") or "hidden"
    if mode in ("random", "uniform_random"):
        refused(f"gate_mode {mode} takes no prompts: mstore moe draws these routers itself")
    if mode not in MODES:
        refused(f"no gate_mode is called {mode!r}; there are {', '.join(MODES)}")
    kind = str(recipe.get("architecture") or "").lower()
    if not any(one.startswith(kind) for one in ARCHITECTURES):
        refused(f"mstore makes no architecture {kind!r}; there are {', '.join(ARCHITECTURES)}")
    count, given = recipe.get("experts_per_token") or 2, len(recipe["experts"])
    if not isinstance(count, int) or count > given:
        refused(
            f"experts_per_token is {count} (2 if not given), and the recipe has {given} experts"
        )
    for number, one in enumerate((*recipe["experts"], *(recipe.get("shared_experts") or ()))):
        if not isinstance(one, dict) or not isinstance(one.get("source_model"), str):
            refused(f"expert {number} names no source_model")
        name = one["source_model"]
        for key in one.keys() - set(KEYS):
            refused(f"expert {number}, {name}, has no key {key!r}; there are {', '.join(KEYS)}")
        for key in ("positive_prompts", "negative_prompts"):
            said = one.get(key) or []
            if not isinstance(said, list) or not all(isinstance(text, str) for text in said):
                refused(f"the {key} of expert {number}, {name}, are no list of texts")
        if not one.get("positive_prompts"):
            refused(f"expert {number}, {name}, has no positive_prompts")
    return recipe


def require(base: Path, out: Path, device: str) -> None:
    """End the program for a base, a directory or a device that will not do."""
    if not (base / "config.json").is_file():
        refused(
            f"{base} has no config.json: BASE is a directory with the base's files, such as one "
            "that `mstore mount REF DIR` or `mstore checkout REF DIR` makes"
        )
    if out.exists():
        refused(f"{out} is there already: give the name of a new directory")
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        refused(f"torch has no device {device!r} here: {str(error).splitlines()[0]}")


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
    parser.add_argument("--device", default="cpu", help="where the model is: cpu, cuda:0, ...")
    given = parser.parse_args(words)
    recipe = read(given.recipe)
    require(given.base, given.out, given.device)
    told_type = "bfloat16" if given.bf16 else "float32 (--bf16 takes half the memory)"
    print(f"loading {given.base} in {told_type}", file=sys.stderr)
    dtype = torch.bfloat16 if given.bf16 else torch.float32
    prompts = Prompts(given.base, dtype, given.device)
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
