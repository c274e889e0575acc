"""Tokenizers of recipes: mergekit and mstore give each token the same embedding.

The order of new tokens in a union is that of a hash table in mergekit, so rows are compared token
by token.  mergekit drops rows after the tokens of the base, where mstore keeps those of the base.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from compare import bits
from generated import BLOCK, EMBEDDING, HEAD, Tensors
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from mstore import Store

HIDDEN = 32
WORDS = [f"word{number}" for number in range(40)]
SPECIAL = ["<unk>", "<s>", "</s>"]
MODELS: dict[str, tuple[list[str], list[str], int]] = {
    # Tokens, added tokens, rows after them.
    "base": ([*SPECIAL, *WORDS], ["<pad>"], 0),
    "chat": ([*SPECIAL, *WORDS], ["<pad>", "<|user|>", "<|end|>"], 0),
    "other": ([*SPECIAL, *reversed(WORDS[10:]), "new"], ["<tool>", "<|end|>"], 0),
    "padded": ([*SPECIAL, *WORDS[:35]], ["<pad>"], 9),
}


def write(folder: Path, name: str, dtype: torch.dtype) -> None:
    """A Llama of one layer, with random weights."""
    tokens, added, more = MODELS[name]
    path = folder / name
    path.mkdir(parents=True)
    rows = len(tokens) + len(added) + more
    generator = torch.Generator().manual_seed(sum(map(ord, name)))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    layer = "model.layers.0."
    tensors = {EMBEDDING: normal(rows, HIDDEN), HEAD: normal(rows, HIDDEN)}
    tensors |= {f"{layer}self_attn.{one}_proj.weight": normal(HIDDEN, HIDDEN) for one in "qkvo"}
    tensors |= {f"{layer}mlp.{one}_proj.weight": normal(48, HIDDEN) for one in ("up", "gate")}
    tensors[f"{layer}mlp.down_proj.weight"] = normal(HIDDEN, 48)
    for one in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{layer}{one}.weight"] = normal(HIDDEN)
    tensors["model.norm.weight"] = normal(HIDDEN)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "vocab_size": rows,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    (path / "config.json").write_text(json.dumps(config))
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    entries = [
        {"id": number, "content": token, "special": True, **special}
        for number, token in [
            *enumerate(SPECIAL),
            *enumerate(added, start=len(tokens)),
        ]
    ]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": entries,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    own = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    told = {"tokenizer_class": "PreTrainedTokenizerFast", **own}
    (path / "tokenizer_config.json").write_text(json.dumps(told))


class Place:
    """The models as directories and in a store."""

    def __init__(self, root: Path, dtype: torch.dtype) -> None:
        self.root = root
        self.dtype = dtype
        self.store = Store.init(root / "store", block_size=BLOCK)
        self.runs = 0
        for name in MODELS:
            write(root / "models", name, dtype)
            self.store.add(root / "models" / name, name=name)

    def path(self, name: str) -> str:
        return str(self.root / "models" / name)

    def ours(self, text: str) -> Path:
        self.runs += 1
        models = {self.path(name): name for name in MODELS}
        found = self.store.read_recipe(text, models=models)
        assert found.vocabulary is not None
        request = self.store.align(found.request, found.vocabulary).applied(found.request)
        self.store.merge(self.store.plan(request), name="merged")
        out = self.root / f"ours{self.runs}"
        self.store.checkout("merged", out)
        return out

    def theirs(self, text: str) -> Path:
        out = self.root / f"theirs{self.runs}"
        options = MergeOptions(write_model_card=False, quiet=True)
        run_merge(MergeConfiguration.model_validate(yaml.safe_load(text)), str(out), options)
        return out


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    made = Place(tmp_path_factory.mktemp("vocabularies"), request.param)
    yield made
    made.store.close()


def recipe(place: Place, models: Sequence[str], method: str, base: str | None, more: str) -> str:
    listed = "".join(
        f"- model: {place.path(name)}\n  parameters: {{weight: {0.25 + 0.125 * number}}}\n"
        for number, name in enumerate(models)
    )
    told = f"base_model: {place.path(base)}\n" if base else ""
    dtype = "out_dtype: float32\n"
    return f"merge_method: {method}\n{told}models:\n{listed}dtype: float32\n{dtype}{more}\n"


CASES: dict[str, tuple[tuple[str, ...], str, str | None, str]] = {
    "union": (("chat", "other"), "task_arithmetic", "base", "tokenizer_source: union"),
    "union of an average": (("base", "chat"), "linear", None, "tokenizer_source: union"),
    "union, ties": (("chat", "other"), "ties", "base", "tokenizer_source: union"),
    "base": (("chat", "other"), "task_arithmetic", "base", "tokenizer_source: base"),
    "by name": (("chat", "other"), "task_arithmetic", "base", "tokenizer_source: {base}"),
    "another": (("chat", "other"), "task_arithmetic", "base", "tokenizer: {{source: {other}}}"),
    "rounded up": (
        ("chat", "other"),
        "task_arithmetic",
        "base",
        "tokenizer: {{source: union, pad_to_multiple_of: 16}}",
    ),
    "padded": (("padded",), "task_arithmetic", "base", "tokenizer_source: union"),
    "of a padded one": (("chat",), "task_arithmetic", "padded", "tokenizer_source: union"),
    "tokens": (
        ("chat", "other"),
        "task_arithmetic",
        "base",
        """tokenizer:
  tokens:
    <tool>: {{source: {{kind: zero}}}}
    <|end|>: {{source: {other}}}
    <|user|>: {{source: {{kind: model_token, model: {base}, token: word3}}}}
    new: {{source: {{kind: model_token, model: {chat}, token_id: 5}}, force: true}}""",
    ),
    "new tokens": (
        ("chat", "other"),
        "task_arithmetic",
        "base",
        """tokenizer:
  source: {base}
  tokens:
    <tool>: {{source: {other}}}
    <fresh>: {{source: {{kind: model_token, model: {chat}, token: <|user|>}}}}
    <empty>: {{source: {{kind: zero}}}}""",
    ),
    "new tokens of a union": (
        ("chat", "other"),
        "linear",
        None,
        """tokenizer:
  source: union
  tokens:
    <fresh>: {{source: {{kind: model_token, model: {other}, token_id: 7}}, force: true}}""",
    ),
    "means": (("chat", "other", "base"), "linear", None, "tokenizer_source: union"),
    "means of two": (("chat", "other"), "linear", None, "tokenizer_source: {chat}"),
}


def is_mean(token: str, models: Sequence[str], base: str | None) -> bool:
    """Whether some model gets the mean of those that have a token."""
    members = {*models, *([base] if base else [])}
    having = {name for name in members if token in [*MODELS[name][0], *MODELS[name][1]]}
    return 1 < len(having) < len(members) and base not in having


def vocabulary(path: Path) -> dict[str, int]:
    return dict(AutoTokenizer.from_pretrained(path).get_vocab())


def tensors(path: Path) -> Tensors:
    return {
        name: tensor
        for file in sorted(path.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("case", CASES)
def test_every_token_has_its_row(case: str, place: Place) -> None:
    """Both make models of the same tokens; each token's rows, and every other tensor, are equal."""
    models, method, base, more = CASES[case]
    named = {name: place.path(name) for name in MODELS}
    text = recipe(place, models, method, base, more.format(**named))
    if method == "ties":
        text += "parameters: {density: 1.0}\n"
    ours, theirs = place.ours(text), place.theirs(text)
    own, other = vocabulary(ours), vocabulary(theirs)
    assert own.keys() == other.keys()
    mine, yours = tensors(ours), tensors(theirs)
    assert mine.keys() == yours.keys()
    for name in mine:
        if name not in (EMBEDDING, HEAD):
            assert torch.equal(bits(mine[name]), bits(yours[name])), name
            continue
        assert mine[name].shape == yours[name].shape
        for token, at in own.items():
            one, two = mine[name][at], yours[name][other[token]]
            if place.dtype != torch.float32 and is_mean(token, models, base):
                # The mean of models in bf16 is rounded to bf16 here.
                torch.testing.assert_close(one, two, rtol=2**-7, atol=2**-7)
            elif method == "linear":
                # An expert that is the base counts with the base, so sums differ in order.
                torch.testing.assert_close(one, two, rtol=2**-22, atol=2**-22)
            else:
                assert torch.equal(bits(one), bits(two)), (name, token)
        rest, their_rest = mine[name][len(own) :], yours[name][len(own) :]
        torch.testing.assert_close(rest, their_rest, rtol=2**-7, atol=2**-9)
    sizes = [json.loads((one / "config.json").read_text())["vocab_size"] for one in (ours, theirs)]
    assert sizes[0] == sizes[1]


def test_transformers_reads_the_union(place: Place) -> None:
    """The union's tokenizer encodes a text of tokens of all models to the ids of their rows."""
    text = recipe(place, ("chat", "other"), "task_arithmetic", "base", "tokenizer_source: union")
    ours = place.ours(text)
    tokenizer = AutoTokenizer.from_pretrained(ours)
    ids = vocabulary(ours)
    words = ["word3", "<|user|>", "<tool>", "word39", "<|end|>"]
    assert tokenizer(" ".join(words), add_special_tokens=False)["input_ids"] == [
        ids[word] for word in words
    ]
    assert tokenizer.eos_token == "</s>"
    assert tokenizer.added_tokens_decoder[ids["<tool>"]].special


TEMPLATE = "{% for one in messages %}{{ one['role'] }}: {{ one['content'] }}{% endfor %}"


def test_chat_templates(place: Place) -> None:
    """Both give the result the chat template of a recipe, and transformers finds it."""
    text = recipe(place, ("chat",), "task_arithmetic", "base", "tokenizer_source: union")
    text += f"chat_template: {json.dumps(TEMPLATE)}\n"
    found = [AutoTokenizer.from_pretrained(one(text)) for one in (place.ours, place.theirs)]
    assert [one.chat_template for one in found] == [TEMPLATE, TEMPLATE]


@pytest.mark.parametrize("more", [False, True])
def test_chatml_by_name(place: Place, more: bool) -> None:
    """Both write the same text of a chat where a recipe names ChatML."""
    text = recipe(place, ("chat",), "task_arithmetic", "base", "tokenizer_source: union")
    text += "chat_template: chatml\n"
    chat = [
        {"role": "system", "content": "word1"},
        {"role": "user", "content": "word2\nword3"},
        {"role": "assistant", "content": ""},
    ]
    own, other = (
        AutoTokenizer.from_pretrained(one(text)).apply_chat_template(
            chat, tokenize=False, add_generation_prompt=more
        )
        for one in (place.ours, place.theirs)
    )
    assert own == other
    assert own.startswith("<|im_start|>system\nword1<|im_end|>\n")
