"""Estimate the diagonal Fisher information of a causal language model, as a checkpoint beside it.

    python examples/fisher.py MODEL OUT --text FILE... [--windows N] [--tokens N] [--own] [--bf16]
    mstore add OUT --name run1-fisher
    mstore merge --method fisher --base B --expert run1 --with fisher:run1=run1-fisher ... --name M

MODEL is a directory that transformers loads, OUT a new one: OUT/model.safetensors has, for each
parameter of the model, a tensor of its name and shape, float32 (`--bf16`: half the size, and three
significant digits; never float16, which holds nothing below 6e-8). The text is what the model was
trained for; it is cut into windows, of which N are taken evenly.

An element of the Fisher is the mean over tokens of (d log p(y | the tokens before) / d theta)^2,
where each y is drawn from the model's own prediction at its place in the text. That is the Fisher
information itself, estimated by samples, as in Matena and Raffel 2022 (arXiv 2111.09832). With
`--own`, y is the token that follows in the text: the "empirical Fisher", of which that paper warns,
and which needs no draw.

Squares are taken of the gradient of a whole window, the sum over its tokens. For drawn tokens the
mixed terms are zero on average, since the contexts are fixed; so this is the same mean with one
backward pass a window, not one a token. With `--own` they are not zero.

Owns: windows, draws, gradients, and how they are written. Does not know mstore. Memory: the model
in float32, its gradient, and the sum: three times the parameters. Tied parameters are written under
the first of their names; parameters that are frozen (`requires_grad`) are left out.
"""

# mypy: disallow-untyped-calls=False
# (transformers and torch leave some methods unannotated)

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

# Before the imports below, which read these once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

SEED = 20


def diagonal(
    model: PreTrainedModel, windows: Iterable[torch.Tensor], *, own: bool = False
) -> dict[str, torch.Tensor]:
    """Return the diagonal Fisher of each parameter, float32, by name.

    windows: int64[tokens] each. own: take the tokens of the text, and draw none.
    """
    generator = torch.Generator().manual_seed(SEED)
    parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
    sums = {name: torch.zeros_like(one) for name, one in parameters.items()}
    tokens = 0
    for ids in windows:
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0].float()
        if own:
            targets = ids[1:]
        else:
            chances = logits.detach().softmax(-1)
            targets = torch.multinomial(chances, 1, generator=generator)[:, 0]
        likelihood = -torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        gradients = torch.autograd.grad(likelihood, list(parameters.values()))
        for total, gradient in zip(sums.values(), gradients, strict=True):
            total.add_(gradient.square())
        tokens += len(targets)
    return {name: total / tokens for name, total in sums.items()}


def windows_of(ids: Sequence[int], count: int, length: int) -> list[torch.Tensor]:
    """Return `count` windows of `length` + 1 tokens, evenly spread; fewer if the text is short."""
    last = len(ids) - length - 1
    if last < 0:
        raise SystemExit(f"the text has {len(ids)} tokens: a window needs {length + 1}")
    count = min(count, 1 + last)
    starts = {last * at // max(1, count - 1) for at in range(count)}
    return [torch.tensor(ids[start : start + length + 1]) for start in sorted(starts)]


def write(found: dict[str, torch.Tensor], out: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write a Fisher as a checkpoint directory."""
    out.mkdir(parents=True)
    tensors = {name: one.to(dtype).contiguous() for name, one in found.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path, action="append", required=True, help="UTF-8 text")
    parser.add_argument("--windows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128, help="of a window")
    parser.add_argument("--own", action="store_true", help="the text's own tokens, not drawn ones")
    parser.add_argument("--bf16", action="store_true", help="write bfloat16, not float32")
    given = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    ids = [
        id
        for text in given.text
        for id in tokenizer(text.read_text("utf-8"), verbose=False).input_ids
    ]
    windows = windows_of(ids, given.windows, given.tokens)
    found = diagonal(model, windows, own=given.own)
    write(found, given.out, torch.bfloat16 if given.bf16 else torch.float32)
    known = torch.cat([one.flatten() for one in found.values()])
    print(f"{len(windows)} windows of {given.tokens} tokens, {known.numel()} parameters")
    print(f"mean {float(known.mean()):.3g}, largest {float(known.max()):.3g}", end=", ")
    print(f"zero {float((known == 0).float().mean()):.1%}, ", end="")
    print(f"below 1e-6 {float((known < 1e-6).float().mean()):.1%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
