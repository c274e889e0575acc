"""Transplants of tokens: rows are those that mergekit-tokensurgeon makes, but for rounding.

Where mergekit differs on purpose: its means are over all rows, padding too; it gives one row of the
model to several tokens of the output; it drops padding; of a tied model, rows follow the donor's
input, not its output.  Here are models without any of that.
Three of its ten methods do not run, and three have no equal here.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mstore import Store, Transplant

TEXTS = {
    "model": ["the quick brown fox jumps over lazy dogs writing stories of the river"] * 4,
    "donor": ["def function(self): return import class the quick python code over lists"] * 4,
}
WIDTHS = {"model": 64, "donor": 96}
EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight")
CLOSE = {"float32": 2e-5, "bfloat16": 2**-8}
"""Of the largest element: sums in another order; in bfloat16, one of its units."""


def write(directory: Path, name: str, *, tied: bool, dtype: str) -> None:
    """A small Llama with a byte-level tokenizer, and as many rows as tokens."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.train_from_iterator(
        TEXTS[name],
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=found, bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(directory)
    torch.manual_seed(len(name))
    width = WIDTHS[name]
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(directory)


CASES = [
    *(("omp", *tied, "float32") for tied in ((False, False), (True, True), (False, True))),
    ("omp", False, False, "bfloat16"),
    *((one, False, False, "float32") for one in ("subword", "mean", "zero")),
]


@pytest.mark.parametrize(("approximation", "model_tied", "donor_tied", "dtype"), CASES)
def test_rows_are_those_of_mergekit(
    tmp_path: Path, approximation: str, model_tied: bool, donor_tied: bool, dtype: str
) -> None:
    """The same tensors: shared rows bit for bit, the others but for the order of sums."""
    write(tmp_path / "model", "model", tied=model_tied, dtype=dtype)
    write(tmp_path / "donor", "donor", tied=donor_tied, dtype=dtype)
    places = [str(tmp_path / name) for name in ("model", "donor", "theirs")]
    call = [str(Path(sys.executable).with_name("mergekit-tokensurgeon")), *places]
    done = subprocess.run(
        [*call, "--device", "cpu", "-a", approximation, "-k", "16"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    with Store.init(tmp_path / "store", block_size=1 << 16) as store:
        for name in ("model", "donor"):
            store.add(tmp_path / name, name=name)
        asked = Transplant(donor="donor", approximation=approximation, k=16)
        report = store.transplant("model", asked, name="ours")
        store.checkout("ours", tmp_path / "ours")
    theirs, ours = (load_file(tmp_path / one / "model.safetensors") for one in ("theirs", "ours"))
    assert theirs.keys() == ours.keys()
    before = load_file(tmp_path / "model" / "model.safetensors")
    changed = 0
    for name, expected in theirs.items():
        assert ours[name].shape == expected.shape
        differ = (ours[name].double() - expected.double()).abs()
        assert differ.max() <= CLOSE[dtype] * expected.abs().max()
        if name in EMBEDDINGS:
            rows = [at for at, row in enumerate(expected) if known(row, before[name])]
            assert len(rows) == report.shared
            assert torch.equal(ours[name][rows], expected[rows])
            changed += 1
    assert changed == (1 if model_tied else 2)


def known(row: torch.Tensor, rows: torch.Tensor) -> Any:
    """Whether a row is one of these."""
    return (rows == row).all(dim=1).any()
