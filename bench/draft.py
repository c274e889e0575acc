"""A draft model for speculative decoding: a small model gets the tokens of a large one.

    python bench/draft.py WORK [--mergekit VENV/bin/mergekit-tokensurgeon] [--quick]

Writes and prints bench/results/draft.json.  WORK/draft-models is trained if it is not there (kept
for the next run); WORK needs 1 GB.

Two byte-level BPE tokenizers are trained on different mixtures of the texts of examples/family.py,
then a *target* with one of them, and a small *draft* with the other.  `native` is what a transplant
is measured against: the same small model, trained with the target's tokenizer on the same texts for
as many steps.

Acceptance is the expected share of draft tokens that speculative sampling keeps at temperature 1:
the mean over positions of held-out texts of the sum over tokens of min(target, draft) (Leviathan
2023, arXiv 2211.17192).  Agreement is how often both find the same token likeliest.  Tokens a pass
are those that transformers' assisted generation gets of one forward pass of the target, greedy,
with five draft tokens a round.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent.parent / "examples"))

# Before the imports below: these set how torch and tokenizers work.
import family
import numpy as np
import torch
from family import HELD_OUT_EVERY, WINDOW, Schedule, batches, load, train
from measure import RESULTS, Run, keep, machine, median, run
from mergekit import peer_versions
from store import Store
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mstore.models.vocabulary.pursuit import pursue

TEXTS: dict[str, tuple[Callable[[], list[str]], float]] = {
    "code": (family.code_documents, 0.45),
    "prose": (family.prose_documents, 0.35),
    "records": (family.record_documents, 0.1),
    "unicode": (family.unicode_documents, 0.1),
}
"""What models learn, and how much of it; held-out texts are measured in the same shares."""

OMP_KS = (4, 16, 64)
WAYS = {f"omp {k}": ("omp", k) for k in OMP_KS} | {
    one: (one, 1) for one in ("subword", "mean", "zero")
}
TUNED = ("omp 64", "subword", "mean")
TUNED_STEPS = (100, 300)
TIED = ("omp 4", "omp 64", "subword", "mean")
PURSUITS = ((256, 30_000, 1024, 64), (256, 30_000, 1024, 16), (128, 60_000, 2048, 64))
PROMPT, NEW, A_ROUND = 64, 64, 5
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Words:
    """A tokenizer: what it is trained on, how large, and what its special tokens are called."""

    texts: tuple[str, ...]
    size: int
    end: str
    turns: tuple[str, str]
    template: str


SMALL = Words(
    ("prose", "code"),
    2000,
    "<|end|>",
    ("<|im_start|>", "<|im_end|>"),
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
)
LARGE = Words(
    ("code", "records", "unicode"),
    3000,
    "<|endoftext|>",
    ("<|header|>", "<|eot_id|>"),
    "{% for m in messages %}<|header|>{{ m.role }}\n{{ m.content }}<|eot_id|>{% endfor %}",
)


@dataclass(frozen=True, slots=True)
class Size:
    """The shape of a model, and how it is trained: one schedule after the other."""

    layers: int
    hidden: int
    schedules: tuple[Schedule, ...]
    tied: bool = False

    def model(self, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
        """Return an untrained model."""
        torch.manual_seed(family.SEED)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=self.hidden,
                num_hidden_layers=self.layers,
                intermediate_size=self.hidden * 8 // 3,
                num_attention_heads=self.hidden // 48,
                num_key_value_heads=self.hidden // 48,
                max_position_embeddings=512,
                tie_word_embeddings=self.tied,
                bos_token_id=tokenizer.eos_token_id,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        )


def sizes(*, quick: bool) -> dict[str, tuple[Size, Words]]:
    """Return the models of a run, with their tokenizers."""
    steps = 20 if quick else 700
    once = (Schedule(steps, 2e-3, 8),)
    small, tied = Size(2, 144, once), Size(2, 144, once, tied=True)
    large = Size(4, 288, (Schedule(steps, 1e-3, 8), Schedule(steps, 1e-3, 8)))
    return {
        "target": (large, LARGE),
        "draft": (small, SMALL),
        "native": (small, LARGE),
        "draft-tied": (tied, SMALL),
        "native-tied": (tied, LARGE),
    }


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents that models learn, and those that they never see, by the name of the text."""

    training: dict[str, list[str]]
    held_out: dict[str, str]

    @classmethod
    def read(cls) -> Corpus:
        """Split as examples/family.py does."""
        documents = {name: make() for name, (make, _) in TEXTS.items()}
        return cls(
            {
                name: [text for at, text in enumerate(own, 1) if at % HELD_OUT_EVERY]
                for name, own in documents.items()
            },
            {
                name: "".join(own[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
                for name, own in documents.items()
            },
        )

    def tokenizer(self, words: Words) -> PreTrainedTokenizerFast:
        """Train a tokenizer."""
        found = Tokenizer(models.BPE())
        found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        found.decoder = decoders.ByteLevel()
        special = (words.end, "<|pad|>", *words.turns)
        trainer = trainers.BpeTrainer(
            vocab_size=words.size,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[AddedToken(one, special=True) for one in special],
            show_progress=False,
        )
        found.train_from_iterator((t for n in words.texts for t in self.training[n]), trainer)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=found,
            bos_token=words.end,
            eos_token=words.end,
            pad_token="<|pad|>",
            clean_up_tokenization_spaces=False,
        )
        tokenizer.chat_template = words.template
        return tokenizer

    def encoded(self, tokenizer: PreTrainedTokenizerFast) -> list[tuple[torch.Tensor, float]]:
        """Return what `family.batches` draws from."""
        found = []
        for name, (_, share) in TEXTS.items():
            texts = tokenizer(self.training[name])["input_ids"]
            ids = [id for own in texts for id in (*own, tokenizer.eos_token_id)]
            found.append((torch.tensor(ids), share))
        return found

    def windows(self, tokenizer: PreTrainedTokenizerFast, count: int) -> dict[str, torch.Tensor]:
        """Return held-out windows, int64[n, WINDOW], by the name of the text."""
        found = {}
        for name, (_, share) in TEXTS.items():
            ids = torch.tensor(tokenizer(self.held_out[name])["input_ids"])
            starts = np.linspace(0, len(ids) - WINDOW, round(count * share)).astype(int)
            found[name] = torch.stack([ids[start : start + WINDOW] for start in starts])
        return found


def trained(folder: Path, *, quick: bool) -> None:
    """Train the models into a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    corpus = Corpus.read()
    tokenizers = {words: corpus.tokenizer(words) for words in (SMALL, LARGE)}
    told: Figures = {}
    for name, (size, words) in sizes(quick=quick).items():
        began, busy = time.perf_counter(), time.process_time()
        model = size.model(tokenizers[words])
        texts = corpus.encoded(tokenizers[words])
        for number, schedule in enumerate(size.schedules):
            train(model, batches(texts, f"{name}{number or ''}", schedule.batch), schedule)
        family.silence_transformers()
        model.bfloat16().save_pretrained(folder / name)
        tokenizers[words].save_pretrained(folder / name)
        told[name] = {
            "parameters": sum(one.numel() for one in model.parameters()),
            "steps": sum(one.steps for one in size.schedules),
            "seconds": round(time.perf_counter() - began, 1),
            "cpu_seconds": round(time.process_time() - busy, 1),
        }
        print(f"{name}: {told[name]}", file=sys.stderr, flush=True)
    (folder / "models.json").write_text(json.dumps(told))


class Judge:
    """The target on held-out texts, and drafts beside it."""

    def __init__(self, folder: Path, *, quick: bool) -> None:
        self.corpus = Corpus.read()
        self.count = 20 if quick else 80
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "target")
        self.windows = self.corpus.windows(self.tokenizer, self.count)
        self.target = load(folder / "target")
        self.likely = {name: self._chances(self.target, ids) for name, ids in self.windows.items()}
        flat = torch.cat(list(self.windows.values()))
        self.prompts = flat[:: 10 if quick else 5, :PROMPT]

    @staticmethod
    def _chances(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
        """Return float32[windows, positions, tokens]."""
        with torch.inference_mode():
            return model(input_ids=ids[:, :-1], use_cache=False).logits.float().softmax(dim=-1)

    def judged(self, draft: LlamaForCausalLM) -> Figures:
        """Compare the tokens of a draft, which has the target's tokenizer, with the target's."""
        shares, agreed = {}, []
        for name, ids in self.windows.items():
            own, goal = self._chances(draft, ids), self.likely[name]
            shares[name] = float(torch.minimum(own, goal).sum(dim=-1).mean())
            agreed.append((own.argmax(dim=-1) == goal.argmax(dim=-1)).float().flatten())
        weights = [len(ids) for ids in self.windows.values()]
        return {
            "acceptance": float(np.average(list(shares.values()), weights=weights)),
            "by_text": shares,
            "agreement": float(torch.cat(agreed).mean()),
            "bits_per_byte": self.bits_per_byte(draft, self.tokenizer),
        }

    def bits_per_byte(self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> float:
        """Return the held-out loss of a model with its tokenizer."""
        names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        lengths = torch.tensor([len(name) for name in names])  # a letter is a byte
        bits = size = 0.0
        for ids in self.corpus.windows(tokenizer, self.count).values():
            chances = self._chances(model, ids).gather(2, ids[:, 1:, None])
            bits -= float(chances.clamp_min(1e-30).log2().sum())
            size += int(lengths[ids[:, 1:]].sum())
        return bits / size

    def tokens_a_pass(self, draft: LlamaForCausalLM) -> float:
        """Return how many tokens assisted generation gets of one pass of the target."""
        settings = draft.generation_config
        settings.num_assistant_tokens = A_ROUND
        settings.num_assistant_tokens_schedule = "constant"
        settings.assistant_confidence_threshold = 0.0
        passes = 0

        def count(*_: object) -> None:
            nonlocal passes
            passes += 1

        hook = self.target.register_forward_hook(count)
        made = 0
        for prompt in self.prompts:
            ids = self.target.generate(
                prompt[None],
                attention_mask=torch.ones_like(prompt[None]),
                assistant_model=draft,
                do_sample=False,
                max_new_tokens=NEW,
                eos_token_id=None,
            )
            made += ids.shape[1] - PROMPT
        hook.remove()
        return made / passes


class Bench:
    """The models, a store of them, and what measures them."""

    def __init__(self, work: Path, program: Path | None, rounds: int, *, quick: bool) -> None:
        self.work = work
        self.program = program
        self.rounds = rounds
        self.quick = quick
        self.models = work / ("draft-models-quick" if quick else "draft-models")
        if not (self.models / "models.json").exists():
            trained(self.models, quick=quick)
        self.judge = Judge(self.models, quick=quick)
        self.texts = self.judge.corpus.encoded(self.judge.tokenizer)
        self.files = work / "draft-files"
        shutil.rmtree(self.files, ignore_errors=True)
        self.files.mkdir()
        self.surgeon = self.files / "surgeon"
        self.store = Store(work / "draft-store")
        self.store.make()
        for name in ("target", "draft", "draft-tied"):
            self.store.mstore("add", str(self.models / name), "--name", name)

    def close(self) -> None:
        """Remove all but the models."""
        shutil.rmtree(self.files)
        shutil.rmtree(self.store.path)

    def about(self) -> Figures:
        """Return what is known of the models, with their losses by their own tokenizers."""
        told: Figures = json.loads((self.models / "models.json").read_text())
        for name, one in told.items():
            model, own = load(self.models / name), self.models / name
            tokenizer = PreTrainedTokenizerFast.from_pretrained(own)
            one["tokens"] = len(tokenizer)
            one["bits_per_byte"] = self.judge.bits_per_byte(model, tokenizer)
        return told

    def transplanted(self, draft: str, way: str) -> tuple[Path, Figures]:
        """Return the draft with the target's tokens, made in one of the ways; and its report."""
        name, folder = f"{draft}-{way}".replace(" ", "-"), self.files / f"{draft}-{way}"
        done = self.store.mstore(*self._words(draft, way, name))
        self.store.mstore("checkout", name, str(folder))
        return folder, json.loads(done.output)

    @staticmethod
    def _words(draft: str, way: str, name: str) -> list[str]:
        approximation, k = WAYS[way]
        words = ["--json", "align", "--base", draft, "--transplant", "target", "--name", name]
        return [*words, "--approximation", approximation, "--k", str(k)]

    def way(self, draft: str, way: str) -> Figures:
        """Measure one way of making rows."""
        folder, report = self.transplanted(draft, way)
        print(folder.name, file=sys.stderr, flush=True)
        return self.judged(folder) | {
            "report": {
                "input": mean_cosine(report, "input"),
                "output": mean_cosine(report, "output"),
                "held_out_input": report["held_out_input"],
                "held_out_output": report["held_out_output"],
                "shared": report["shared"],
                "new": {one["name"]: one["tokens"] for one in report["classes"]},
            },
        }

    def judged(self, folder: Path) -> Figures:
        """Measure a draft."""
        model = load(folder)
        return self.judge.judged(model) | {"tokens_a_pass": self.judge.tokens_a_pass(model)}

    def tuned(self, folder: Path) -> Figures:
        """Train a transplanted draft for a short time: its embeddings, or all of it."""
        parts: Mapping[str, Callable[[str], float]] = {
            "embeddings": lambda name: float("embed_tokens" in name or "lm_head" in name),
            "all": lambda name: 1.0,
        }
        found: Figures = {}
        for part, rate in parts.items():
            for steps in (10,) if self.quick else TUNED_STEPS:
                model = load(folder)
                schedule = Schedule(steps, 1e-3, 8)
                train(model, batches(self.texts, "tuned", 8), schedule, rate)
                model.bfloat16().float()
                found.setdefault(part, {})[str(steps)] = self.judge.judged(model)
                print(f"{folder.name} {part} {steps}", file=sys.stderr, flush=True)
        return found

    def beside(self) -> Figures:
        """Run both programs in turn, as whole processes; before the store has any result."""
        ours: list[Run] = []
        theirs: list[Run] = []
        for _ in range(self.rounds):
            if self.program is not None:
                theirs.append(self._mergekit(self.program, "draft"))
            with self.store.copy(self.work / "draft-round") as copy:
                ours.append(copy.mstore(*self._words("draft", "omp 64", "round")))
        report = json.loads(ours[0].output)
        found = {"mstore": median(ours), "mstore_bytes": report["bytes_written"]}
        if self.program is not None:
            found |= {
                "mergekit": median(theirs),
                "mergekit_bytes": sum(one.stat().st_size for one in self.surgeon.iterdir()),
                "mergekit_judged": self.judged(self.surgeon),
                "versions": peer_versions(self.program),
            }
            self._mergekit(self.program, "draft-tied")
            found["mergekit_tied_judged"] = self.judged(self.surgeon)
        return found

    def _mergekit(self, program: Path, draft: str) -> Run:
        """Transplant with mergekit-tokensurgeon."""
        shutil.rmtree(self.surgeon, ignore_errors=True)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        words = [str(self.models / draft), str(self.models / "target"), str(self.surgeon)]
        return run(
            [str(program), *words, "--device", "cpu", "-a", "omp", "--quiet"],
            env=environment | {"HF_HUB_OFFLINE": "1"},
        )


def mean_cosine(report: Figures, role: str) -> float | None:
    """Return the mean over all new tokens of a report."""
    known = [(one[role], one["tokens"]) for one in report["classes"] if one[role] is not None]
    return (
        sum(value * count for value, count in known) / sum(n for _, n in known) if known else None
    )


def pursuits(*, quick: bool) -> Iterator[Figures]:
    """Time the pursuit alone, with random rows."""
    for count, rows, width, k in PURSUITS:
        tokens, shared = (count // 8, rows // 8) if quick else (count, rows)
        draw = np.random.default_rng(20)
        targets = draw.standard_normal((tokens, width), np.float32)
        atoms = draw.standard_normal((shared, width), np.float32)
        busy = time.process_time()
        for _ in pursue(targets, atoms, k, np.full(tokens, -1)):
            pass
        seconds = time.process_time() - busy
        yield {
            "tokens": tokens,
            "shared": shared,
            "width": width,
            "k": k,
            "cpu": seconds,
            "gigaflops": 2 * tokens * shared * width * k / seconds / 1e9,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", type=Path, help="directory on a local disk")
    parser.add_argument("--mergekit", type=Path, help="its mergekit-tokensurgeon")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="models that have learnt little")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    # As in examples/family.py: threads of torch wait for each other, spinning.
    torch.set_num_threads(1)
    bench = Bench(given.work.absolute(), given.mergekit, given.rounds, quick=given.quick)
    results: Figures = {
        "machine": machine(),
        "models": bench.about(),
        "prompts": len(bench.judge.prompts),
        "beside": bench.beside(),
        "ways": {way: bench.way("draft", way) for way in WAYS},
        "native": bench.judged(bench.models / "native"),
        "tied": {way: bench.way("draft-tied", way) for way in TIED},
        "native_tied": bench.judged(bench.models / "native-tied"),
        "tuned": {way: bench.tuned(bench.files / f"draft-{way}") for way in TUNED},
        "pursuits": list(pursuits(quick=given.quick)),
    }
    bench.close()
    keep(given.results, "draft", results)


if __name__ == "__main__":
    main()
