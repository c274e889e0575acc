"""The section of bench/draft.py."""

from __future__ import annotations

from tables import MIB, Told, aim, machine, percent, table, wall

ABOUT = """\
{machine} `python bench/draft.py WORK`. A target of {target_millions:.1f} M parameters with {tokens}
tokens, and a draft model of {draft_millions:.1f} M with {own} of its own, trained for {steps} and
{own_steps} steps on code, prose, records and names of characters ({seconds:.0f} s of CPU for all
models). {shared} of the target's tokens have a row of the draft's; `mstore align --transplant`
makes the other {new}. *Native* is the same small model, trained with the target's tokens. Bits a
byte of held-out texts, each model with its own tokens: {losses}.

*Acceptance* is the share of draft tokens that speculative sampling keeps at temperature 1, over
held-out texts; *agreement*, how often both models find the same token likeliest; *tokens a pass*,
what greedy assisted generation of transformers gets of one pass of the target, with 5 draft tokens
a round ({prompts} prompts).
"""

TIED = """\
The same with a draft whose output is its input (tied). mstore makes its rows as those of the
target's output are made, mergekit-tokensurgeon as those of its input.
"""

REPORT = """\
### What the report says

Mean cosines of `mstore align`: of new tokens in the *donor*, and of tokens that both have, made as
if they were new (*held out*); input / output. The first only says how well rows of the donor are
sums of k others, and rises with k; the second is the one to read.
"""

TUNED = """\
### After a short training

Acceptance of the transplanted drafts after training on the same texts, all of the model or its
embeddings only, with steps of 8 windows of 128 tokens.
"""

BESIDE = """\
### Beside mergekit-tokensurgeon

Whole processes in turn, median of {runs} rounds; both with `omp` of 64 rows.
"""

PURSUIT = """\
### The pursuit alone

Random rows, in float32. It takes 2 · new tokens · shared tokens · width · k operations.
"""


def section(told: Told) -> str:
    """The section of bench/draft.py."""
    models, ways = told["models"], told["ways"]
    target, draft = models["target"], models["draft"]
    report = ways["omp 64"]["report"]
    losses = ", ".join(f"{name} {one['bits_per_byte']:.2f}" for name, one in models.items())
    about = ABOUT.format(
        machine=machine(told),
        target_millions=target["parameters"] / 1e6,
        draft_millions=draft["parameters"] / 1e6,
        tokens=target["tokens"],
        own=draft["tokens"],
        steps=target["steps"],
        shared=report["shared"],
        new=sum(report["new"].values()),
        own_steps=draft["steps"],
        seconds=sum(one["cpu_seconds"] for one in models.values()),
        losses=losses,
        prompts=told["prompts"],
    )
    parts = [
        "## Draft models with the target's tokens\n",
        about,
        _ways({**ways, "native": told["native"]}),
        TIED,
        _ways({**told["tied"], **_peer(told["beside"]), "native": told["native_tied"]}),
        REPORT,
        _reports(ways),
        TUNED,
        _tuned(told),
        _beside(told["beside"], ways) if "mergekit" in told["beside"] else "",
        PURSUIT,
        _pursuits(told["pursuits"]),
    ]
    return "\n".join(part for part in parts if part)


def _ways(ways: Told) -> str:
    texts = list(next(iter(ways.values()))["by_text"])
    rows = [
        (
            f"`{way}`" if way != "native" else way,
            percent(one["acceptance"]),
            *(percent(one["by_text"][text]) for text in texts),
            percent(one["agreement"]),
            f"{one['bits_per_byte']:.2f}",
            f"{one['tokens_a_pass']:.2f}",
        )
        for way, one in ways.items()
    ]
    head = ("draft", "acceptance", *texts, "agreement", "bits a byte", "tokens a pass")
    return table(head, rows)


def _peer(found: Told) -> Told:
    judged = found.get("mergekit_tied_judged")
    return {} if judged is None else {"omp 64 of mergekit-tokensurgeon": judged}


def _pair(report: Told, one: str, other: str) -> str:
    cells = ["-" if report[key] is None else f"{report[key]:.2f}" for key in (one, other)]
    return " / ".join(cells)


def _reports(ways: Told) -> str:
    rows = [
        (
            f"`{way}`",
            _pair(one["report"], "input", "output"),
            _pair(one["report"], "held_out_input", "held_out_output"),
            percent(one["acceptance"]),
        )
        for way, one in ways.items()
    ]
    return table(("draft", "donor", "held out", "acceptance"), rows)


def _tuned(told: Told) -> str:
    rows = []
    steps: list[str] = []
    for way, parts in told["tuned"].items():
        for part, found in parts.items():
            steps = list(found)
            cells = [percent(one["acceptance"]) for one in found.values()]
            rows.append((f"`{way}`", part, percent(told["ways"][way]["acceptance"]), *cells))
    return table(("draft", "trained", "before", *(f"{n} steps" for n in steps)), rows)


def _beside(found: Told, ways: Told) -> str:
    accepted = {
        "mergekit": found["mergekit_judged"]["acceptance"],
        "mstore": ways["omp 64"]["acceptance"],
    }
    rows = [
        (
            name,
            wall(found[key]),
            f"{found[key]['cpu']:.1f}",
            f"{found[key]['anonymous'] / MIB:.0f}",
            f"{found[f'{key}_bytes'] / 1e6:.2f}",
            percent(accepted[key], 2),
        )
        for key, name in (("mergekit", "mergekit-tokensurgeon"), ("mstore", "mstore"))
    ]
    times = found["mergekit"]["cpu"] / found["mstore"]["cpu"]
    head = ("program", "wall s", "CPU s", "memory MiB", "MB written", "acceptance")
    off = abs(accepted["mergekit"] - accepted["mstore"])
    return "\n".join(
        [
            BESIDE.format(runs=found["mstore"]["runs"]),
            table(head, rows),
            aim(
                f"no more processor time ({times:.1f} times less), and an acceptance within 0.5 % "
                f"of the other's ({percent(off, 2)})",
                met=times >= 1 and off <= 0.005,
            ),
        ]
    )


def _pursuits(found: list[Told]) -> str:
    rows = [
        (
            str(one["tokens"]),
            f"{one['shared']:,}",
            str(one["width"]),
            str(one["k"]),
            f"{one['cpu']:.0f}",
            f"{one['gigaflops']:.0f}",
        )
        for one in found
    ]
    head = ("new tokens", "shared tokens", "width", "k", "CPU s", "10^9 operations a CPU s")
    return table(head, rows)
