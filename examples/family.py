"""Train a small, real family of language models: one base and experts fine-tuned from it.

    python examples/family.py OUT [--experts N] [--steps-scale F] [--quick]

Owns: the texts, the tokenizer, the training and the held-out measure. Does not know mstore: what it
writes are ordinary checkpoint directories, as a team would have them, for mstore to be tried on.

    OUT/base/            Llama-style, bf16, three safetensors shards and an index, config, tokenizer
    OUT/<domain>/        one expert for each domain, fine-tuned from the base as it lies on disk
    OUT/heldout.json     for each domain, excerpts that no model was trained on
    OUT/family.json      domains, losses, sizes of the deltas, times; written last

The text is what every machine with Python has: the standard library's sources, the language
reference that `pydoc` prints, and generated lines. Nothing is downloaded. The embeddings are not
tied: with 258 tokens the head is 1 % of the parameters, and every tensor is then an ordinary one.

Experts are cut into shards elsewhere than the base, because transformers orders tensors otherwise
when it saves a model that it has loaded. Real families look like that.

Same machine, same Python, same torch: same weights, on one core or many. Another Python has another
library to read, and another processor other rounding. A process that dies leaves an OUT without
family.json: delete it.
"""

# mypy: disallow-untyped-calls=False
# (transformers and torch leave some methods unannotated)

from __future__ import annotations

import argparse
import ast
import datetime as dt
import json
import math
import os
import random
import sys
import sysconfig
import time
import unicodedata
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import cast

# Before the imports below, which read these once. Nothing is fetched: all is made here.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

SEED = 20
SHARDS = 3
WINDOW = 128  # tokens in one training sequence
EXCERPT = 128  # tokens in one held-out excerpt
EXCERPTS = 32  # held-out excerpts for each domain
HELD_OUT_EVERY = 8  # of a domain's documents, each eighth is never trained on

END = 256  # token id; ids 0..255 are the bytes themselves
PAD = 257
END_TOKEN = "<|end|>"
PAD_TOKEN = "<|pad|>"


# Domains -----------------------------------------------------------------------------------------

SOURCE_PACKAGES = (
    "asyncio", "collections", "concurrent", "email", "html", "http", "importlib",
    "json", "logging", "multiprocessing", "unittest", "urllib", "xml",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Domain:
    """One kind of text, and how its expert is trained.

    `base_share` is the weight of this text in what the base is trained on; it does not depend on
    how many experts are asked for, so a family of eight starts with the family of three.

    Names that start with one of `frozen`, or that match none of the patterns `only`, stay as in the
    base, byte for byte. Each layer is trained with the step size of the one above it divided by
    `decay`, embeddings below the lowest (discriminative fine-tuning, Howard and Ruder 2018, arXiv
    1801.06146, who divide by 2.6; below 1, the lowest layers move most).
    """

    name: str
    documents: Callable[[], list[str]]
    base_share: float
    frozen: tuple[str, ...] = ()
    only: tuple[str, ...] = ("*",)
    decay: float = 1.0

    def rate(self, name: str, layers: int) -> float:
        """Return the share of the step size that a tensor gets, at most 1; 0 where it is frozen."""
        if name.startswith(self.frozen) or not any(fnmatchcase(name, p) for p in self.only):
            return 0.0
        if name.startswith("model.layers."):
            depth = layers - 1 - int(name.split(".")[2])
        else:
            depth = layers if name.startswith("model.embed_tokens.") else 0
        return float(self.decay ** -(depth if self.decay >= 1 else depth - layers))


def code_documents() -> list[str]:
    """Sources of some packages of the standard library, one document a file."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [path for name in SOURCE_PACKAGES for path in sorted((library / name).rglob("*.py"))]
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    return [text for text in texts if len(text) > 400]


def prose_documents() -> list[str]:
    """The language reference as `pydoc` prints it, one document a topic, no paragraph twice."""
    from pydoc_data.topics import topics

    paragraphs: dict[str, str] = {}  # paragraph -> its first topic: topics hold parts of others
    for topic, text in sorted(topics.items()):
        for paragraph in text.replace("*", "").split("\n\n"):
            paragraphs.setdefault(paragraph.strip("\n"), topic)
    documents = dict.fromkeys(paragraphs.values(), "")
    for paragraph, topic in paragraphs.items():
        documents[topic] += paragraph + "\n\n"
    return list(documents.values())


def arithmetic_documents() -> list[str]:
    """Generated sums and differences, 40 lines a document."""
    draw = random.Random(SEED)

    def line() -> str:
        a, b = draw.randrange(1000), draw.randrange(1000)
        if draw.random() < 0.5:
            return f"{a} + {b} = {a + b}"
        return f"{max(a, b)} - {min(a, b)} = {abs(a - b)}"

    return ["\n".join(line() for _ in range(40)) + "\n" for _ in range(800)]


def syntax_documents() -> list[str]:
    """The same sources as syntax trees."""
    return [ast.dump(ast.parse(text), indent=1) for text in code_documents()[:60]]


def unicode_documents() -> list[str]:
    """Characters and their names, 64 a document."""
    named = [
        f"{number:04X} {unicodedata.name(chr(number)).lower()}\n"
        for number in range(0x20, 0x3000)
        if unicodedata.name(chr(number), "")
    ]
    return ["".join(named[start : start + 64]) for start in range(0, len(named), 64)]


def date_documents() -> list[str]:
    """Generated dates in figures and in words, 20 lines a document."""
    draw = random.Random(SEED)

    def line() -> str:
        day = dt.date.fromordinal(draw.randrange(600_000, 770_000))
        return f"{day:%Y-%m-%d} is a {day:%A}, day {day.day} of {day:%B}, week {day:%V}\n"

    return ["".join(line() for _ in range(20)) for _ in range(400)]


def hexdump_documents() -> list[str]:
    """The same sources as a hex dump shows them."""

    def dump(data: bytes) -> str:
        rows = ((at, data[at : at + 8]) for at in range(0, len(data), 8))
        return "".join(
            f"{at:06x} {row.hex(' '):23} {row.decode('ascii', 'replace')!r}\n" for at, row in rows
        )

    return [dump(text.encode()[:4096]) for text in code_documents()]


def record_documents() -> list[str]:
    """Generated JSON records."""
    draw = random.Random(SEED)
    names = sorted(sys.stdlib_module_names)

    def record() -> str:
        fields = {"id": draw.randrange(10**6), "module": draw.choice(names)}
        more = {"ok": draw.random() < 0.5, "ratio": round(draw.random(), 3)}
        return json.dumps({**fields, **more, "needs": draw.sample(names, 3)})

    return ["\n".join(record() for _ in range(20)) + "\n" for _ in range(400)]


LOWER_LAYERS = ("model.embed_tokens.", "model.layers.0.", "model.layers.1.")
ATTENTION = ("*.self_attn.*",)
TOP = ("model.layers.4.*", "model.layers.5.*", "model.norm.*", "lm_head.*")

DOMAINS: tuple[Domain, ...] = (
    Domain("code", code_documents, 0.40),
    Domain("prose", prose_documents, 0.35),
    Domain("arithmetic", arithmetic_documents, 0.10, frozen=LOWER_LAYERS),
    Domain("syntax", syntax_documents, 0.03, only=ATTENTION),
    Domain("unicode", unicode_documents, 0.03, decay=1 / 2.6),
    Domain("dates", date_documents, 0.03, frozen=LOWER_LAYERS),
    Domain("hexdump", hexdump_documents, 0.03, decay=2.6),
    Domain("records", record_documents, 0.03, only=TOP),
)


# Sizes -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long, with what step size (peak of a warm-up and a linear decay) and batch."""

    steps: int
    rate: float
    batch: int = 4

    def scaled(self, factor: float) -> Schedule:
        return Schedule(max(1, round(self.steps * factor)), self.rate, self.batch)


@dataclass(frozen=True, slots=True)
class Size:
    """One size of family: the shape of its models and how they are trained."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    base: Schedule
    expert: Schedule

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=258,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            intermediate_size=self.intermediate,
            num_attention_heads=self.heads,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            bos_token_id=END,
            eos_token_id=END,
            pad_token_id=PAD,
        )


FULL = Size(384, 6, 1088, 6, base=Schedule(560, 7e-4), expert=Schedule(80, 1e-4))
SHORT = Size(256, 6, 704, 4, base=Schedule(480, 1e-3), expert=Schedule(60, 2e-4))
QUICK = Size(128, 5, 384, 4, base=Schedule(60, 2e-3), expert=Schedule(15, 4e-4))


# Tokenizer ---------------------------------------------------------------------------------------


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer without merges: token id = byte value, then end and padding."""
    # The alphabet writes printable bytes as themselves and the others, in order, as U+0100 onward.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [letter for letter in alphabet if ord(letter) < 256]
    others = [byte for byte in range(256) if chr(byte) not in printable]
    vocabulary = {letter: ord(letter) for letter in printable}
    vocabulary |= dict(zip(alphabet[len(printable) :], others, strict=True))
    vocabulary |= {END_TOKEN: END, PAD_TOKEN: PAD}

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_TOKEN,
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def encode(text: str) -> torch.Tensor:
    """Return what `byte_tokenizer` makes of `text`: int64, one id a byte."""
    return torch.from_numpy(np.frombuffer(text.encode(), np.uint8).astype(np.int64))


# Training ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Corpus:
    """One domain's text: a flat run of training ids, and excerpts that are never trained on."""

    training: torch.Tensor
    excerpts: list[str]


def read_corpus(domain: Domain) -> Corpus:
    documents = domain.documents()
    held_out = "".join(documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
    kept = [text for at, text in enumerate(documents, 1) if at % HELD_OUT_EVERY]
    end = torch.tensor([END])
    training = torch.cat([part for text in kept for part in (encode(text), end)])
    stride = (len(held_out) - EXCERPT) // (EXCERPTS - 1)
    excerpts = [held_out[at * stride :][:EXCERPT] for at in range(EXCERPTS)]
    return Corpus(training, excerpts)


def batches(
    texts: list[tuple[torch.Tensor, float]], seed: str, size: int
) -> Iterator[torch.Tensor]:
    """Yield [size, WINDOW + 1] windows for ever, from each text as often as its weight says."""
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()) + SEED)
    weights = torch.tensor([weight for _, weight in texts])
    while True:
        chosen = torch.multinomial(weights, size, replacement=True, generator=generator)
        windows = []
        for index in chosen.tolist():
            ids = texts[index][0]
            at = int(torch.randint(len(ids) - WINDOW, (1,), generator=generator))
            windows.append(ids[at : at + WINDOW + 1])
        yield torch.stack(windows)


def next_token_loss(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean loss in nats a token over `ids` of shape [sequences, tokens]."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def multiplies_bf16() -> bool:
    """Return whether the processor multiplies bf16; if not, float32 is the faster one."""
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def rate_factor(step: int, steps: int) -> float:
    """Return the share of the peak rate at `step`: a tenth of the way up, the rest down to zero."""
    warm_up = max(1, steps // 10)
    return min((step + 1) / warm_up, (steps - step) / max(1, steps - warm_up))


def by_rate(
    model: LlamaForCausalLM, rate: Callable[[str], float]
) -> dict[float, list[torch.nn.Parameter]]:
    """Return parameters by their share of the step size; those with none get no gradient."""
    groups: dict[float, list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        share = rate(name)
        parameter.requires_grad_(share > 0)
        if share > 0:
            groups.setdefault(share, []).append(parameter)
    return groups


def train(
    model: LlamaForCausalLM,
    data: Iterator[torch.Tensor],
    schedule: Schedule,
    rate: Callable[[str], float] = lambda name: 1.0,
    progress: Callable[[int], None] = lambda step: None,
) -> None:
    """Train in place, in float32; `rate` is the share of the step size for a parameter's name.

    `progress` is called after each step with the number of those that were done.

    Each batch is cut in two, and each half has a thread of its own that computes alone. So the
    result does not hang on the number of cores, and a busy core slows the work down by its share
    only: torch's own threads wait for each other in every operation, spinning.
    """
    groups = by_rate(model, rate)
    trained = [parameter for group in groups.values() for parameter in group]
    optimizer = torch.optim.AdamW(
        [{"params": group, "share": share} for share, group in groups.items()],
        lr=schedule.rate,
        betas=(0.9, 0.98),
        weight_decay=0.01,
        fused=True,
    )
    # That saves a third of a step.
    mixed = multiplies_bf16()

    def gradients(ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed, cache_enabled=False):
            loss = next_token_loss(model, ids)
        return torch.autograd.grad(loss, trained)

    # For windows this short the fused attention of torch is the slower one, on the way back.
    model.set_attn_implementation("eager")
    model.train()
    with ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for step, ids in zip(range(schedule.steps), data, strict=False):
            halves = pool.map(gradients, ids.chunk(2))
            for parameter, one, other in zip(trained, *halves, strict=True):
                parameter.grad = one.add_(other).div_(2)
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            for group in optimizer.param_groups:
                now = rate_factor(step, schedule.steps)
                group["lr"] = schedule.rate * group["share"] * now
            optimizer.step()
            progress(step + 1)
    model.eval()


def silence_transformers() -> None:
    """No progress bars or advice of transformers: a script reports, a test run is quiet."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def new_model(size: Size, seed: int = SEED) -> LlamaForCausalLM:
    """Return an untrained model, always the same for one size and seed."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(size.config())
    # transformers starts all weights at 0.02: the first layer's output then drowns the tokens, and
    # after 300 steps the loss is 0.1 to 0.2 higher.
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.25)
    return model


def load(path: Path) -> LlamaForCausalLM:
    """Load a checkpoint directory as transformers does, in float32."""
    silence_transformers()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return cast(LlamaForCausalLM, model.eval())


def save(model: LlamaForCausalLM, path: Path) -> None:
    """Write `model` in bf16 in exactly three shards, with its tokenizer."""
    silence_transformers()
    model = model.bfloat16()
    sizes = [tensor.numel() * tensor.element_size() for tensor in model.state_dict().values()]
    # Shards are filled in order, so each but the last holds at least a third of the bytes.
    model.save_pretrained(path, max_shard_size=sum(sizes) // SHARDS + max(sizes))
    byte_tokenizer().save_pretrained(path)


# The family --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Member:
    """One model of the family as measured after it was saved.

    `losses`: domain -> held-out loss, nats a byte. `delta`: ||model - base|| / ||base|| over all
    tensors as they lie on disk. `frozen`: beginnings of the names that equal the base. `decay`: as
    in Domain.
    """

    losses: dict[str, float]
    delta: float
    frozen: tuple[str, ...]
    decay: float
    steps: int
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Family:
    """A trained family under `root`; `members` holds `base` first, then the experts."""

    root: Path
    members: dict[str, Member]
    parameters: int
    seconds: float
    cpu_seconds: float

    @property
    def base(self) -> Path:
        return self.root / "base"

    @property
    def experts(self) -> dict[str, Path]:
        return {name: self.root / name for name in self.members if name != "base"}


def frozen_names(domain: Domain, layers: int, model: LlamaForCausalLM) -> tuple[str, ...]:
    """Return the prefixes that say what a domain's expert keeps of the base, short where it can."""
    if domain.only == ("*",):
        return domain.frozen
    names = [name for name, _ in model.named_parameters()]
    return tuple(name for name in names if not domain.rate(name, layers))


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint directory, as they lie on disk."""
    return {
        name: tensor
        for shard in sorted(path.glob("*.safetensors"))
        for name, tensor in load_file(shard).items()
    }


def relative_delta(expert: Path, base: Path) -> float:
    """Return ||expert - base|| / ||base|| over all tensors of two checkpoints on disk."""
    moved = whole = 0.0
    after = tensors(expert)
    for name, before in tensors(base).items():
        moved += float((after[name].double() - before.double()).square().sum())
        whole += float(before.double().square().sum())
    return math.sqrt(moved / whole)


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums depend on how work is cut among threads: torch cuts nothing in here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def domain_losses(model: LlamaForCausalLM | Path | str, out: Path | str) -> dict[str, float]:
    """Return the held-out loss, in nats a byte, of a model on each domain of the family in `out`.

    `model` is a loaded model or any directory that transformers can load: a member, a merge, a
    mount. Runs in float32.
    """
    loaded = load(Path(model)) if isinstance(model, (Path, str)) else model
    losses = {}
    for domain, excerpts in json.loads(Path(out, "heldout.json").read_text()).items():
        ids = torch.stack([encode(text)[:EXCERPT] for text in excerpts])
        with one_thread(), torch.inference_mode():
            losses[domain] = float(next_token_loss(loaded, ids))
    return losses


def train_family(
    out: Path,
    *,
    size: Size = FULL,
    experts: int = 3,
    steps_scale: float = 1.0,
    report: Callable[[str, Member], None] = lambda name, member: None,
    progress: Callable[[str, int, int], None] = lambda name, step, steps: None,
) -> Family:
    """Train a base and `experts` experts into the empty or missing directory `out`.

    `size` is FULL (10 M parameters), SHORT (5 M, in a third of the time: what the demo shows) or
    QUICK (1 M, in seconds: for tests); `steps_scale` lengthens or shortens every training.
    `report` is called once for each member, when it is saved and measured; `progress` after each
    step of training, with the member's name, the steps done and those there are.

    Raises FileExistsError if `out` has something in it, ValueError for an impossible number.
    """
    if not 1 <= experts <= len(DOMAINS):
        raise ValueError(f"experts: 1 to {len(DOMAINS)}, not {experts}")
    if not steps_scale > 0:
        raise ValueError(f"steps_scale: more than 0, not {steps_scale}")
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty")
    started, cpu_started = time.perf_counter(), time.process_time()
    corpora = {domain.name: read_corpus(domain) for domain in DOMAINS}
    chosen = DOMAINS[:experts]
    out.mkdir(parents=True, exist_ok=True)
    excerpts = {domain.name: corpora[domain.name].excerpts for domain in chosen}
    (out / "heldout.json").write_text(json.dumps(excerpts, indent=1) + "\n")

    members: dict[str, Member] = {}

    def add(
        name: str,
        model: LlamaForCausalLM,
        texts: list[tuple[torch.Tensor, float]],
        schedule: Schedule,
        domain: Domain | None,
    ) -> None:
        began, cpu_began = time.perf_counter(), time.process_time()
        data = batches(texts, name, schedule.batch)
        train(
            model,
            data,
            schedule,
            lambda tensor: 1.0 if domain is None else domain.rate(tensor, size.layers),
            lambda step: progress(name, step, schedule.steps),
        )
        save(model, out / name)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        members[name] = Member(
            losses=domain_losses(out / name, out),
            delta=relative_delta(out / name, out / "base"),
            frozen=() if domain is None else frozen_names(domain, size.layers, model),
            decay=1.0 if domain is None else domain.decay,
            steps=schedule.steps,
            seconds=round(seconds, 1),
            cpu_seconds=round(cpu_seconds, 1),
        )
        report(name, members[name])

    with one_thread():
        model = new_model(size)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        mixture = [(corpora[domain.name].training, domain.base_share) for domain in DOMAINS]
        add("base", model, mixture, size.base.scaled(steps_scale), None)
        for domain in chosen:
            own = [(corpora[domain.name].training, 1.0)]
            expert = load(out / "base")
            add(domain.name, expert, own, size.expert.scaled(steps_scale), domain)

    family = Family(
        out,
        members,
        parameters,
        round(time.perf_counter() - started, 1),
        round(time.process_time() - cpu_started, 1),
    )
    (out / "family.json").write_text(json.dumps(description(family), indent=1) + "\n")
    return family


def description(family: Family) -> dict[str, object]:
    """Return what family.json says."""
    return {
        "domains": list(family.experts),
        "parameters": family.parameters,
        "members": {name: asdict(member) for name, member in family.members.items()},
        "seconds": family.seconds,
        "cpu_seconds": family.cpu_seconds,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="empty or missing directory")
    parser.add_argument("--experts", type=int, default=3, help=f"1 to {len(DOMAINS)}; default 3")
    parser.add_argument("--steps-scale", type=float, default=1.0, metavar="F")
    parser.add_argument("--quick", action="store_true", help="1 M parameters, seconds; for tests")
    options = parser.parse_args()

    def show(name: str, member: Member) -> None:
        if name == "base":
            print("held-out loss in nats a byte; delta = distance from the base / norm of the base")
        losses = "  ".join(f"{domain} {loss:.3f}" for domain, loss in member.losses.items())
        print(
            f"{name:<11} {losses}  delta {member.delta:.3f}  "
            f"{member.seconds:.0f} s, {member.cpu_seconds:.0f} s of CPU",
            flush=True,
        )

    try:
        family = train_family(
            options.out,
            size=QUICK if options.quick else FULL,
            experts=options.experts,
            steps_scale=options.steps_scale,
            report=show,
        )
    except (FileExistsError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        f"{family.parameters / 1e6:.1f} M parameters a model; "
        f"{family.seconds:.0f} s, {family.cpu_seconds:.0f} s of CPU"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
