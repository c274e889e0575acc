"""fisher: merges of real models and Fishers are the paper's formula, computed by torch.

The Fishers are those of `examples/fisher.py`, which is compared with the definition, too.
"""

from __future__ import annotations

import copy
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from generated import BLOCK, Tensors
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from mstore import MergeRequest, Store

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import fisher

VOCABULARY = 48
WEIGHTS = (1.0, 0.5)


def new(seed: int, *, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_hidden_layers=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


def windows(seed: int, count: int, length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randint(VOCABULARY, (count, length + 1), generator=generator))


def loss(model: LlamaForCausalLM, texts: list[torch.Tensor]) -> torch.Tensor:
    ids = torch.stack(texts)
    return model(input_ids=ids, labels=ids).loss


def tuned(base: LlamaForCausalLM, seed: int) -> tuple[LlamaForCausalLM, list[torch.Tensor]]:
    """A fine-tune of it on texts of its own."""
    model, texts = copy.deepcopy(base), windows(seed, 8, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        loss(model, texts).backward()
        optimizer.step()
    return model, texts


@dataclass
class Place:
    """A base, two fine-tunes and their Fishers, in a store."""

    root: Path
    store: Store
    texts: list[list[torch.Tensor]]

    def tensors(self, name: str) -> Tensors:
        return load_file(self.root / name / "model.safetensors")

    def merged(self, **options: object) -> Tensors:
        given = {
            "experts": list(zip(("e0", "e1"), WEIGHTS, strict=True)),
            "companions": {"fisher:e0": "f0", "fisher:e1": "f1"},
        }
        request = MergeRequest(base="base", method="fisher", **(given | options))
        self.store.merge(self.store.plan(request), name="merged")
        return self.checked_out("merged")

    def checked_out(self, name: str) -> Tensors:
        shutil.rmtree(self.root / name, ignore_errors=True)
        self.store.checkout(name, self.root / name)
        return self.tensors(name)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    base = new(1, tied=request.param).bfloat16().float()
    base.bfloat16().save_pretrained(root / "base")
    texts = []
    with Store.init(root / "store", block_size=BLOCK) as store:
        store.add(root / "base", name="base")
        for k in range(2):
            model, own = tuned(base.float(), 10 + k)
            model.bfloat16().save_pretrained(root / f"e{k}")
            store.add(root / f"e{k}", name=f"e{k}", base="base")
            fisher.write(fisher.diagonal(model.float(), own), root / f"f{k}")
            store.add(root / f"f{k}", name=f"f{k}")
            texts.append(own)
        yield Place(root, store, texts)


def formula(place: Place, floor: float) -> Tensors:
    """sum w F theta / sum w F in float64; the base where nothing is known."""
    base = place.tensors("base")
    found = {}
    for name, start in base.items():
        above, below = torch.zeros_like(start, dtype=torch.float64), 0.0
        for k, weight in enumerate(WEIGHTS):
            known = place.tensors(f"f{k}")[name].double()
            factor = weight * torch.clamp(known, min=float(torch.tensor(floor)))
            above += factor * place.tensors(f"e{k}")[name].double()
            below = below + factor
        found[name] = torch.where(below > 0, above / below, start.double())
    return found


@pytest.mark.parametrize("floor", [0.0, 1e-6])
def test_a_merge_is_the_papers_formula(place: Place, floor: float) -> None:
    """In float32 within a rounding of it, in the models' type but for ties of rounding its bits."""
    wanted = formula(place, floor)
    found = place.merged(parameters={"floor": floor}, dtype="float32")
    assert found.keys() == wanted.keys()
    for name, exact in wanted.items():
        assert torch.allclose(found[name].double(), exact, rtol=2.0**-23, atol=2.0**-40), name
    narrow = place.merged(parameters={"floor": floor})
    same = torch.cat([(narrow[n] == wanted[n].float().bfloat16()).flatten() for n in wanted])
    assert same.float().mean() > 0.9999


def test_transformers_loads_it_and_it_knows_what_the_experts_know(place: Place) -> None:
    """On the texts of both experts together its loss is below the base's."""
    place.merged()
    losses = {}
    for name in ("base", "merged"):
        model = AutoModelForCausalLM.from_pretrained(place.root / name, dtype=torch.float32)
        with torch.inference_mode():
            losses[name] = float(loss(model.eval(), [one for own in place.texts for one in own]))
    assert losses["merged"] < losses["base"] - 0.5


def test_the_example_estimates_the_fisher_information() -> None:
    """Drawn tokens give, on average, what the definition sums over all tokens with their
    probabilities; the text's own give the squares of its gradient."""
    model = new(3, tied=False)
    (text,) = windows(4, 1, 6)
    parameters = dict(model.named_parameters())
    exact = {name: torch.zeros_like(one) for name, one in parameters.items()}
    logits = model(input_ids=text[None, :-1]).logits[0]
    scores = logits.log_softmax(-1)
    for place, token in torch.cartesian_prod(torch.arange(6), torch.arange(VOCABULARY)).tolist():
        score = scores[place, token]
        gradients = torch.autograd.grad(score, list(parameters.values()), retain_graph=True)
        for total, gradient in zip(exact.values(), gradients, strict=True):
            total.add_(score.detach().exp() * gradient.square() / 6)
    found = fisher.diagonal(model, [text] * 3000)
    for name, one in exact.items():
        assert float(found[name].sum()) == pytest.approx(float(one.sum()), rel=0.05), name
    own = fisher.diagonal(model, [text], own=True)
    likelihood = scores[torch.arange(6), text[1:]].sum()
    gradients = torch.autograd.grad(likelihood, list(parameters.values()))
    for name, gradient in zip(parameters, gradients, strict=True):
        assert torch.allclose(own[name], gradient.square() / 6, rtol=1e-4, atol=1e-12), name


def test_windows_cover_the_text() -> None:
    """From its first token to its last, as many as are asked for or there are."""
    ids = list(range(100))
    found = fisher.windows_of(ids, 4, 9)
    assert [(int(one[0]), len(one)) for one in found] == [(0, 10), (30, 10), (60, 10), (90, 10)]
    assert len(fisher.windows_of(ids[:11], 8, 9)) == 2
    with pytest.raises(SystemExit, match="a window needs 102"):
        fisher.windows_of(ids, 4, 101)
