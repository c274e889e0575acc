"""Gather what a language model's layers are given, from texts: Gram matrices, or magnitudes.

    python examples/gram.py MODEL OUT --text FILE... [--windows N] [--tokens N] [--block N|full]
    mstore add OUT --name run1-gram
    mstore merge --method regmean --base B --expert run1 --with gram:run1=run1-gram ... --name M

    python examples/gram.py BASE OUT --text FILE... --magnitudes
    mstore merge --method aim --base B --expert M --with activation:base=REF --name M2

MODEL is a directory that transformers loads, OUT a new one. OUT/model.safetensors has a tensor for
the weights of each linear layer, of the same name:

    Gram matrices   uint8[blocks, 4 block + block (block - 1) / 2], the mean of x^T x over tokens,
                    in blocks of inputs on the diagonal; of each block the roots of its diagonal,
                    float32, then the correlations below it, row by row, int8, 127 for 1. The last
                    block has zeros where inputs end. `--block full` is all inputs in one.
    magnitudes      float32[inputs], the mean of |x|

A Gram matrix is of an expert, and the text is what that expert was trained for; magnitudes are of
the base, and of texts as they are. A text is cut into windows of equal length, of which N are taken
evenly, so no token is padding. The usual 256 windows of 512 tokens are plenty for blocks of 64.

`--by-layer` holds one layer in memory at a time, and what all windows are between two layers: for
models that do not fit. It takes models whose decoder is a list of layers (Llama, Mistral, Qwen).

Owns: windows, sums, and how they are written. Does not know mstore. Left out: layers that are not
torch.nn.Linear (GPT-2's lie transposed), and a head that is tied to the embedding.
"""

# mypy: disallow-untyped-calls=False
# (transformers and torch leave some methods unannotated)

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Before the imports below, which read these once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

try:
    import numpy as np
    import torch
    from safetensors import safe_open
    from safetensors.numpy import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
except ImportError as missing:
    sys.exit(f"gram.py: {missing}; pip install torch transformers")

FULL = "full"


class Sums:
    """Sums over tokens of what goes into linear layers, by the name of their weights.

    block: inputs of a block of Gram matrices; 0: all; None: magnitudes.
    """

    def __init__(self, block: int | None) -> None:
        self._block = block
        self._sums: dict[str, torch.Tensor] = {}
        self._inputs: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        # Query, key and value have one input: its sums are made once.
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def add(self, name: str, given: torch.Tensor) -> None:
        """Add what a layer is given: float[..., inputs]."""
        if self._last is None or self._last[0] is not given:
            self._last = given, self._made(given.detach().float().flatten(0, -2))
        own = self._last[1]
        self._sums[name] = own.double() + self._sums.get(name, 0)
        self._inputs[name] = given.shape[-1]
        self._tokens[name] = self._tokens.get(name, 0) + given.shape[:-1].numel()

    def _made(self, rows: torch.Tensor) -> torch.Tensor:
        if self._block is None:
            return rows.abs().sum(dim=0)
        inputs = rows.shape[1]
        width = min(self._block or inputs, inputs)
        padded = torch.nn.functional.pad(rows, (0, -inputs % width))
        parts = padded.view(len(rows), -1, width).transpose(0, 1)
        return parts.transpose(1, 2) @ parts

    def tensors(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return what is written, by name."""
        found = {}
        for name, total in self._sums.items():
            mean = (total / self._tokens[name]).cpu().numpy()
            found[name] = mean.astype(np.float32) if self._block is None else packed(mean)
        return found


def packed(blocks: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return Gram matrices, float64[blocks, width, width], as they are written."""
    width = blocks.shape[1]
    rows = []
    for block in blocks:
        roots = np.sqrt(np.diag(block)).astype("<f4")
        both = np.outer(roots, roots).astype(np.float64)
        shares = np.divide(block, both, out=np.zeros_like(block), where=both > 0)
        below = np.rint(127 * shares.clip(-1, 1))[np.tril_indices(width, -1)]
        own = roots.view(np.uint8), below.astype(np.int8).view(np.uint8)
        rows.append(np.concatenate(own))
    return np.stack(rows)


def watched(model: torch.nn.Module, sums: Sums, called: Callable[[str], str]) -> list[Any]:
    """Have the linear layers of a model add what they are given; return the hooks.

    called: the name of a layer's weights in the file, by that in this model.
    """
    tied = {id(one.weight) for one in model.modules() if isinstance(one, torch.nn.Embedding)}
    hooks = []
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or id(module.weight) in tied:
            continue

        def see(_: object, given: tuple[torch.Tensor, ...], own: str = f"{name}.weight") -> None:
            sums.add(called(own), given[0])

        hooks.append(module.register_forward_pre_hook(see))
    return hooks


def gather(model: Any, windows: Sequence[torch.Tensor], sums: Sums) -> None:
    """Run the windows through a model in memory."""
    hooks = watched(model, sums, lambda name: name)
    try:
        with torch.no_grad():
            for ids in windows:
                model(input_ids=ids[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()


KNOWN = ("llama", "mistral", "qwen2", "qwen3")
"""Models whose decoder is embeddings, layers, a norm and a head, with nothing between them."""


class Layers:
    """A model on disk, of which one layer is in memory: a model of one layer stands for each."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self._config = AutoConfig.from_pretrained(path)
        if self._config.model_type not in KNOWN:
            sys.exit(f"gram.py: --by-layer takes {', '.join(KNOWN)}, not {self._config.model_type}")
        self._dtype = dtype
        index = path / "model.safetensors.index.json"
        if index.exists():
            places = json.loads(index.read_text("utf-8"))["weight_map"]
            self._files = {name: path / file for name, file in places.items()}
        else:
            file = path / "model.safetensors"
            with safe_open(file, framework="pt") as opened:
                self._files = dict.fromkeys(opened.keys(), file)
        self.count = int(self._config.num_hidden_layers)
        self._models: dict[str, Any] = {}

    def _tensors(self, *, layer: int | None) -> dict[str, torch.Tensor]:
        """Return the tensors of a layer, as those of layer 0; or all that are in none."""
        every = "model.layers."
        if layer is None:
            wanted = {name: name for name in self._files if not name.startswith(every)}
        else:
            own, first = f"{every}{layer}.", f"{every}0."
            wanted = {n: first + n[len(own) :] for n in self._files if n.startswith(own)}
        found = {}
        for path in sorted({self._files[name] for name in wanted}):
            with safe_open(path, framework="pt") as file:
                for name, own in wanted.items():
                    if self._files[name] == path:
                        found[own] = file.get_tensor(name).to(self._dtype)
        return found

    def model(self, number: int) -> Any:
        """Return the model of one layer with the weights of layer `number`."""
        kinds = getattr(self._config, "layer_types", None)
        kind = kinds[number] if kinds else ""
        model = self._models.get(kind)
        if model is None:
            config = copy.deepcopy(self._config)
            config.num_hidden_layers = 1
            if kinds:
                config.layer_types = [kind]
            model = AutoModelForCausalLM.from_config(config, dtype=self._dtype).eval()
            model.load_state_dict(self._tensors(layer=None), strict=False)
            self._models = {kind: model}
        model.load_state_dict(self._tensors(layer=number), strict=False)
        return model


def gather_by_layer(
    path: Path, windows: Sequence[torch.Tensor], sums: Sums, dtype: torch.dtype
) -> None:
    """Run the windows through a model on disk, one layer after the other."""
    layers = Layers(path, dtype)
    states: list[torch.Tensor] = []
    with torch.no_grad():
        for number in range(layers.count):
            model = layers.model(number)
            decoder = model.get_decoder()
            states = states or [model.get_input_embeddings()(ids[None]) for ids in windows]
            made: list[torch.Tensor] = []

            def keep(_: object, __: object, given: Any, into: list[torch.Tensor] = made) -> None:
                into.append(given[0] if isinstance(given, tuple) else given)

            own = f"layers.{number}."
            hooks = watched(model, sums, lambda name, own=own: name.replace("layers.0.", own))
            hooks.append(decoder.layers[0].register_forward_hook(keep))
            for state in states:
                decoder(inputs_embeds=state, use_cache=False)
            for hook in hooks:
                hook.remove()
            states = made
        hooks = watched(model, sums, lambda name: name)
        for state in states:
            model.lm_head(decoder.norm(state))
        for hook in hooks:
            hook.remove()


def windows_of(ids: Sequence[int], count: int, length: int) -> list[torch.Tensor]:
    """Return `count` windows of `length` tokens, evenly spread; fewer if the text is short."""
    last = len(ids) - length
    if last < 0:
        raise SystemExit(f"gram.py: the text has {len(ids)} tokens: a window needs {length}")
    count = min(count, 1 + last)
    starts = {last * at // max(1, count - 1) for at in range(count)}
    return [torch.tensor(ids[start : start + length]) for start in sorted(starts)]


def block_of(text: str) -> int:
    """Return the inputs of a block; 0 for all."""
    if text == FULL:
        return 0
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a number from 1 on, or {FULL}, not {text!r}")
    return int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path, action="append", required=True, help="UTF-8 text")
    parser.add_argument("--windows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512, help="of a window")
    parser.add_argument("--block", type=block_of, default=64, help=f"inputs of a block, or {FULL}")
    parser.add_argument("--magnitudes", action="store_true", help="vectors for aim")
    parser.add_argument("--by-layer", action="store_true", help="one layer in memory at a time")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, not float32")
    given = parser.parse_args()
    if given.out.exists():
        parser.error(f"{given.out} exists")
    dtype = torch.bfloat16 if given.bf16 else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    ids = [
        id
        for text in given.text
        for id in tokenizer(text.read_text("utf-8"), verbose=False).input_ids
    ]
    windows = windows_of(ids, given.windows, given.tokens)
    sums = Sums(None if given.magnitudes else given.block)
    if given.by_layer:
        gather_by_layer(given.model, windows, sums, dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(given.model, dtype=dtype).eval()
        gather(model, windows, sums)
    found = sums.tensors()
    given.out.mkdir(parents=True)
    save_file(found, given.out / "model.safetensors", metadata={"format": "pt"})
    size = sum(one.nbytes for one in found.values())
    print(f"{len(windows)} windows of {given.tokens} tokens, {len(found)} layers, {size:,} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
