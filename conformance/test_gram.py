"""regmean and aim: merges of real models are their formulas, computed by torch, of what
`examples/gram.py` gathers; and that example is what its page says."""

from __future__ import annotations

import shutil
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from generated import BLOCK, Tensors
from safetensors.numpy import save_file
from safetensors.torch import load_file
from test_fisher import VOCABULARY, loss, new, tuned, windows
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from mstore import MergeRequest, Store

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import gram

WEIGHTS = (1.0, 0.5)
WIDTHS = {32: "g", 0: "full"}
Wide = torch.Tensor


def unpacked(stored: torch.Tensor, inputs: int) -> Wide:
    """A Gram matrix as it is written, float64[inputs, inputs], zeros outside of its blocks."""
    blocks = []
    for row in stored.numpy():
        # 4 width + width (width - 1) / 2 bytes.
        width = next(w for w in range(1, 1 + len(row)) if 4 * w + w * (w - 1) // 2 == len(row))
        roots = np.array(struct.unpack(f"<{width}f", row[: 4 * width].tobytes()))
        block = np.eye(width)
        block[np.tril_indices(width, -1)] = row[4 * width :].view(np.int8) / 127.0
        block += np.tril(block, -1).T
        blocks.append(torch.tensor(block * np.outer(roots, roots)))
    return torch.block_diag(*blocks)[:inputs, :inputs]


@dataclass
class Place:
    """A base, two fine-tunes and what is known of their inputs, in a store."""

    root: Path
    store: Store
    models: list[LlamaForCausalLM]
    texts: list[list[torch.Tensor]]

    def tensors(self, name: str) -> Tensors:
        return load_file(self.root / name / "model.safetensors")

    def merged(self, width: int = 32, **options: object) -> Tensors:
        own = WIDTHS[width]
        given = {
            "method": "regmean",
            "experts": list(zip(("e0", "e1"), WEIGHTS, strict=True)),
            "companions": {"gram:e0": f"{own}0", "gram:e1": f"{own}1"},
            "dtype": "float32",
        }
        request = MergeRequest(base="base", **(given | options))
        self.store.merge(self.store.plan(request), name="merged")
        shutil.rmtree(self.root / "merged", ignore_errors=True)
        self.store.checkout("merged", self.root / "merged")
        return self.tensors("merged")


def gathered(model: LlamaForCausalLM, texts: list[torch.Tensor], block: int | None) -> gram.Sums:
    sums = gram.Sums(block)
    gram.gather(model, texts, sums)
    return sums


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    base = new(1, tied=False).bfloat16().float()
    base.bfloat16().save_pretrained(root / "base")
    models, texts = [], []
    with Store.init(root / "store", block_size=BLOCK) as store:

        def add(name: str, **options: str) -> None:
            store.add(root / name, name=name, **options)

        add("base")
        for k in range(2):
            model, own = tuned(base.float(), 10 + k)
            model.bfloat16().save_pretrained(root / f"e{k}")
            model = model.bfloat16().float()
            add(f"e{k}", base="base")
            for width, letter in WIDTHS.items():
                (root / f"{letter}{k}").mkdir()
                found = gathered(model, own, width).tensors()
                save_file(found, root / f"{letter}{k}" / "model.safetensors")
                add(f"{letter}{k}")
            models.append(model)
            texts.append(own)
        (root / "magnitudes").mkdir()
        found = gathered(base, [one for own in texts for one in own], None).tensors()
        save_file(found, root / "magnitudes" / "model.safetensors")
        add("magnitudes")
        yield Place(root, store, models, texts)


def inputs_of(model: LlamaForCausalLM, texts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """What each linear layer is given: float32[tokens, inputs], by the name of its weights."""
    found: dict[str, list[torch.Tensor]] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda _, given, own=f"{name}.weight": found.setdefault(own, []).append(given[0][0])
        )
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    with torch.no_grad():
        for text in texts:
            model(input_ids=text[None])
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(rows) for name, rows in found.items()}


@pytest.mark.parametrize("width", WIDTHS)
def test_the_example_gathers_gram_matrices(place: Place, width: int) -> None:
    """Of each linear layer the mean of x^T x, on the blocks of the diagonal, within half a unit of
    8 bits of each correlation."""
    inputs = inputs_of(place.models[0], place.texts[0])
    stored = place.tensors(f"{WIDTHS[width]}0")
    assert stored.keys() == inputs.keys()
    for name, rows in inputs.items():
        size = rows.shape[1]
        exact = (rows.double().T @ rows.double()) / len(rows)
        found = unpacked(stored[name], size)
        roots = exact.diag().sqrt()
        gap = ((found - exact) / torch.outer(roots, roots)).abs()
        wide = width or size
        kept = torch.block_diag(*[torch.ones(wide, wide)] * -(-size // wide))[:size, :size] > 0
        assert float(gap[kept].max()) <= 0.5 / 127 + 1e-5
        assert not found[~kept].any()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("shrink", [0.9, 0.3])
def test_a_merge_is_the_papers_formula(place: Place, width: int, shrink: float) -> None:
    """sum w W G (sum w G)^-1 in float64 by LAPACK, products of inputs shrunk; other tensors are
    averages."""
    found = place.merged(width, parameters={"block": width, "shrink": shrink})
    total = sum(WEIGHTS)
    for name in place.tensors("base"):
        own = [place.tensors(f"e{k}")[name].double() for k in range(2)]
        wanted = sum(w * one for w, one in zip(WEIGHTS, own, strict=True)) / total
        if name in place.tensors("g0"):
            above, below = 0.0, 0.0
            for k, weight in enumerate(WEIGHTS):
                matrix = unpacked(place.tensors(f"{WIDTHS[width]}{k}")[name], own[k].shape[1])
                matrix = shrink * matrix + (1 - shrink) * torch.diag(matrix.diag())
                above, below = above + weight * own[k] @ matrix, below + weight * matrix
            wanted = torch.linalg.solve(below, above, left=False)
        scale = float(wanted.abs().max())
        assert float((found[name].double() - wanted).abs().max()) <= 2e-6 * scale, name


def test_it_keeps_what_each_layer_makes_of_its_inputs(place: Place) -> None:
    """The outputs of a merged layer are nearer to those of the experts, on the experts' own inputs,
    than the outputs of an average: in every layer, and on the whole by a fifth or more."""
    found = place.merged(0, parameters={"block": 0, "shrink": 1.0}, experts=["e0", "e1"])
    inputs = [inputs_of(place.models[k], place.texts[k]) for k in range(2)]
    experts = [place.tensors(f"e{k}") for k in range(2)]
    nearer, farther = 0.0, 0.0
    for name in inputs[0]:
        mean = sum(one[name].float() for one in experts) / 2
        losses = [
            sum(
                float((inputs[k][name] @ (merged - experts[k][name].float()).T).square().sum())
                for k in range(2)
            )
            for merged in (found[name].float(), mean)
        ]
        assert losses[0] < losses[1], name
        nearer, farther = nearer + losses[0], farther + losses[1]
    assert nearer < 0.8 * farther


def test_magnitudes_hold_columns_back(place: Place) -> None:
    """aim: the sum of the deltas, each column times 1 - (1 - omega) of the mean |x| of the base's
    input over the layer's largest."""
    known = place.tensors("magnitudes")
    found = place.merged(
        method="aim", companions={"activation:base": "magnitudes"}, parameters={"omega": 0.25}
    )
    texts = [one for own in place.texts for one in own]
    base = AutoModelForCausalLM.from_pretrained(place.root / "base", dtype=torch.float32)
    inputs = inputs_of(base, texts)
    for name, start in place.tensors("base").items():
        moved = sum(
            w * (place.tensors(f"e{k}")[name].double() - start.double())
            for k, w in enumerate(WEIGHTS)
        )
        if name in known:
            mean = inputs[name].double().abs().mean(dim=0)
            assert torch.allclose(known[name].double(), mean, rtol=1e-5)
            moved = moved * (1 - 0.75 * mean / mean.max())
        gap = (found[name].double() - start.double() - moved).abs().max()
        assert float(gap) <= 1e-6, name


def test_transformers_loads_it_and_it_knows_what_the_experts_know(place: Place) -> None:
    """On the texts of both experts together its loss is below the base's."""
    place.merged(parameters={"block": 32}, experts=["e0", "e1"])
    losses = {}
    for name in ("base", "merged"):
        model = AutoModelForCausalLM.from_pretrained(place.root / name, dtype=torch.float32)
        with torch.inference_mode():
            losses[name] = float(loss(model.eval(), [one for own in place.texts for one in own]))
    assert losses["merged"] < losses["base"] - 0.5


CONFIGS = {
    "mistral": MistralConfig(sliding_window=8),
    "qwen2": Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3": Qwen3Config(head_dim=16),
}


@pytest.mark.parametrize("kind", ["llama", "tied", *CONFIGS])
def test_layer_by_layer_is_the_same(kind: str, tmp_path: Path) -> None:
    """A model of which one layer is in memory gathers what a whole one does, with layers that look
    back a few tokens only, and a head of its own or none."""
    torch.set_num_threads(1)
    if kind in CONFIGS:
        config: PretrainedConfig = CONFIGS[kind]
        small = new(0, tied=False).config.to_dict()
        for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
            setattr(config, key, small[key])
        config.num_hidden_layers, config.num_key_value_heads = 3, 2
        if kind != "mistral":
            last = "sliding" if kind == "qwen2" else "full"
            config.layer_types = ["full_attention", *[f"{last}_attention"] * 2]
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config).eval()
    else:
        model = new(1, tied=kind == "tied")
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    texts = windows(3, 3, 20)
    whole, by_layer = gram.Sums(64), gram.Sums(64)
    gram.gather(AutoModelForCausalLM.from_pretrained(tmp_path), texts, whole)
    gram.gather_by_layer(tmp_path, texts, by_layer, torch.float32)
    one, other = whole.tensors(), by_layer.tensors()
    assert one.keys() == other.keys()
    assert ("lm_head.weight" in one) == (kind != "tied")
    for name in one:
        for row, mine in zip(one[name], other[name], strict=True):
            roots = [part[:256].view("<f4") for part in (row, mine)]
            assert np.allclose(*roots, rtol=1e-4, atol=1e-6), name
            steps = [part[256:].view(np.int8).astype(int) for part in (row, mine)]
            assert np.abs(steps[0] - steps[1]).max() <= 1, name


def test_other_models_are_refused_by_layer(tmp_path: Path) -> None:
    """What has something between its layers is named."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match="takes llama, mistral, qwen2, qwen3, not gpt2"):
        gram.gather_by_layer(tmp_path, windows(3, 1, 4), gram.Sums(64), torch.float32)
