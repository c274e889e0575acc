"""Held-out loss of a language model, on one half of some texts.

    python loss.py MODEL TEXTS tune|test

TEXTS is a file of JSON: lists of texts by domain, as `examples/family.py` writes heldout.json.
Writes loss.json into the working directory: `loss`, the mean over the domains of the mean loss of a
token, in nats. `tune` takes every other text of a domain, `test` the others, so one half may decide
and the other one report.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

# Before the imports below, which read it once.
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HALVES = {"tune": 0, "test": 1}


def main() -> None:
    directory, texts, half = sys.argv[1], Path(sys.argv[2]), HALVES[sys.argv[3]]
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    losses = []
    for excerpts in json.loads(texts.read_text()).values():
        sums, tokens = 0.0, 0
        for text in excerpts[half::2]:
            ids = tokenizer(text, return_tensors="pt")["input_ids"]
            with torch.no_grad():
                sums += float(model(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
            tokens += ids.shape[1] - 1
        losses.append(sums / tokens)
    Path("loss.json").write_text(json.dumps({"loss": sum(losses) / len(losses)}))


if __name__ == "__main__":
    main()
