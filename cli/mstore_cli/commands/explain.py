"""`mstore explain`: which experts made a merged snapshot, block by block."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mstore_cli import pictures
from mstore_cli.command import command
from mstore_cli.groups import WIDTH, By, Group, draw_groups, layer_note
from mstore_cli.options import Argument, Option, Revision, drawing
from mstore_cli.output import Column, Screen, distinct, printable, short
from mstore_cli.plan_output import draw_plan
from mstore_cli.session import Session
from mstore_cli.sizes import counted

if TYPE_CHECKING:
    from mstore import Store
    from mstore.api.reports import (
        ExpertShare,
        Explanation,
        LayerExplanation,
        PlanReport,
        TensorExplanation,
    )
    from mstore_pages.matrix import Matrix

CHUNKS = {
    "READ": "chunks_read",
    "SHARED": "chunks_shared",
    "EQUAL TO BASE": "chunks_equal_base",
    "NOT NEEDED": "chunks_not_needed",
    "LEFT OUT": "chunks_over_budget",
    "OUTSIDE TOP-P": "chunks_outside_top_p",
}
CAPTION = "number of chunks of each expert, and the norm of its change that was left out:"
EXPERT = "expert"
MADE = ("read", "shared")
SHOWN = {"over budget": "left out"}
"""Words of the report that are shown as the table has them."""
LONGEST_NAME = 40


@command(
    example="mstore explain llama/merged --svg merged.svg",
)
def explain(
    session: Session,
    revision: Revision,
    tensor: Annotated[
        str | None, Argument(metavar="TENSOR", help="Only this tensor, with every block.")
    ] = None,
    by: Annotated[
        By, Option("--by", help="Sums over each tensor, each layer, or each expert.")
    ] = By.LAYER,
    svg: Annotated[
        Path | None, drawing(help="Also draw layers and experts as a heat map, as SVG.")
    ] = None,
) -> None:
    """Print what a merge read of each expert, and left out.

    The table counts pairs of an expert and a chunk (a block, where all tensors have one dtype).
    READ: read and merged. SHARED: equal to a chunk of an earlier expert, so read once. EQUAL TO
    BASE: there is nothing to read. NOT NEEDED: the method takes nothing of it. LEFT OUT:
    left out for the budget or --max-error. OUTSIDE TOP-P: outside the share of --top-p. Columns of
    zeros are not shown. NORM LEFT OUT is the norm of the delta in LEFT OUT and OUTSIDE TOP-P. What
    was read to plan (`analysis read` of plan and merge) is not counted. --by tensor also tells how
    experts were mixed where that followed from the tensor, and by which cosine.
    """
    with session.open() as store:
        report = store.explain(revision, tensor)
        made = list(_prepared(store, report))
    if svg is not None:
        pictures.write_matrix(svg, shares_read(report, revision))

    def human(screen: Screen) -> None:
        _draw(screen, report, by, detailed=tensor is not None)
        for line in made:
            screen.line(line)
        if svg is not None:
            screen.line(f"drawn in {svg}")

    session.output.emit(report, ids=[one.name for one in report.tensors], human=human)


def _prepared(store: Store, report: Explanation) -> Iterator[str]:
    """Yield a line for each model that was made for the recipe of a merge."""
    from mstore.terms.errors import MstoreError

    plan = report.plan
    names = [plan.base, *(name for name, _ in plan.experts)]
    parents = [one for one in store.show(report.snapshot).parents if one.role != "previous"]
    for name, parent in dict(zip(names, parents, strict=False)).items():
        with suppress(MstoreError):
            made = store.show(parent.snapshot)
            if made.made == "prepare":
                yield f"{name} is {made.message}: mstore explain {short(parent.snapshot)}"


def shares_read(report: Explanation, name: str) -> Matrix:
    """Layers by experts: the share of an expert's changes that was used."""
    from mstore_pages.figures import SHARES
    from mstore_pages.matrix import Matrix

    return Matrix(
        title=f"{name}: what was read of each expert",
        rows=tuple(layer.name for layer in report.layers),
        columns=tuple(share.expert for share in _of_experts(report.experts)),
        cells=tuple(
            tuple(_share_read(share) for share in _of_experts(layer.experts))
            for layer in report.layers
        ),
        measure="chunks read or shared, of those that differ from the base",
        unknown="nothing of its own to read",
        levels=SHARES,
        axes=("layer", "expert"),
    )


def _of_experts(shares: Sequence[ExpertShare]) -> list[ExpertShare]:
    """Return the shares without those of companions, which are in no element of the result."""
    return [share for share in shares if share.role == EXPERT]


def _share_read(share: ExpertShare) -> float | None:
    taken = share.chunks_read + share.chunks_shared
    differ = taken + share.chunks_not_needed + share.chunks_over_budget + share.chunks_outside_top_p
    return taken / differ if differ else None


def _draw(screen: Screen, report: Explanation, by: By, *, detailed: bool) -> None:
    screen.line(f"{short(report.snapshot)} was merged by plan {short(report.plan.plan)}")
    if not detailed:
        draw_plan(screen, report.plan)
    screen.line()
    if report.plan.assembled:
        _draw_assembly(screen, report, by_layer=not detailed and by is not By.TENSOR)
        return
    used = [
        title
        for title, field in CHUNKS.items()
        if title == "READ" or any(getattr(share, field) for share in report.experts)
    ]
    total = Group("all", "", _rows(report.experts, used))
    groups = []
    # A single tensor is also its own layer and total.
    if by is By.TENSOR or detailed:
        groups = [
            Group(one.name, _fate(one, report.plan), _rows(one.experts, used))
            for one in report.tensors
        ]
    elif by is By.LAYER:
        groups = [
            Group(one.name, layer_note(one.name, _size(one)), _rows(one.experts, used))
            for one in report.layers
        ]
    if not detailed:
        groups.append(total)
    if groups:
        _wrapped(screen, "", CAPTION)
    title = "TENSOR" if detailed else "" if by is By.EXPERT else by.name
    draw_groups(screen, title, (*used, "NORM LEFT OUT"), groups)
    if detailed:
        for one in report.tensors:
            _draw_chunks(screen, one)


def _draw_assembly(screen: Screen, report: Explanation, *, by_layer: bool) -> None:
    """Print which model each tensor comes from, or each layer of a stack, or how many tensors of
    each layer of a mixture.
    """
    rows: dict[str, str] = {}
    counts: dict[str, Counter[str]] = {}
    for one in report.tensors:
        source, _, model = one.treatment.rpartition(" of ")
        if not source:
            source, model = one.name, report.plan.base
        counts.setdefault(one.layer, Counter())[model] += 1
        if by_layer:
            source = source[: len(source) - _tail(one)]
        rows.setdefault(one.layer if by_layer else one.name, f"{source} of {model}")
    if by_layer and not report.plan.layers:
        told = {name: [f"{n} of {one}" for one, n in of.items()] for name, of in counts.items()}
        rows = {name: ", ".join(own) for name, own in told.items()}
    title = "LAYER" if by_layer else "TENSOR"
    screen.table((Column(title), Column("FROM")), _in_order(list(rows.items())))


def _in_order(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return rows with layers in the order of their numbers, which files may not have."""
    numbered = [row for row in rows if row[0].rpartition(".")[2].isdigit()]
    loose = [row for row in rows if row not in numbered]
    first = rows.index(numbered[0]) if numbered else len(rows)
    numbered.sort(key=lambda row: int(row[0].rpartition(".")[2]))
    return [*loose[:first], *numbered, *loose[first:]]


def _tail(one: TensorExplanation) -> int:
    """Return the length of what follows a tensor's layer in its name."""
    return len(one.name) - len(one.layer) if one.name.startswith(one.layer) else 0


def _rows(shares: Sequence[ExpertShare], used: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (
            f"{share.expert}={share.weight:g}" if share.role == EXPERT else share.role,
            *(str(getattr(share, CHUNKS[title])) for title in used),
            "unknown" if share.omitted_norm is None else f"{share.omitted_norm:.3g}",
        )
        for share in shares
        # Skip what has no chunks: a layer in which no expert takes part.
        if any(getattr(share, field) for field in CHUNKS.values())
    )


def _fate(one: TensorExplanation, plan: PlanReport) -> str:
    tied = "" if one.tied_to is None else f", tied to {one.tied_to}"
    if not one.experts:
        return f"{one.treatment}{tied}"
    from mstore.merge.methods.parameters import written

    own = ""
    if (one.method, one.parameters) != (plan.method, plan.parameters):
        values = (f"{name}={written(value)}" for name, value in (one.parameters or {}).items())
        own = f", by {' '.join((one.method or '', *values))}"
    if one.sources:
        own += f", made of {', '.join(dict.fromkeys(one.sources))}"
    own += _mixture(one)
    if one.not_finite:
        own += f", {counted(one.not_finite, 'element')} infinite or NaN"
    return f"{counted(one.blocks_total, 'block')}, {one.blocks_reused} the base's own{tied}{own}"


def _mixture(one: TensorExplanation) -> str:
    """Return how the experts of a tensor were mixed, and by which cosine."""
    if one.mixture is None:
        return ""
    threshold = (one.parameters or {}).get("threshold")
    why = ""
    if one.cosine is not None and isinstance(threshold, float):
        sign = "<" if one.cosine < threshold else ">="
        why = f", cosine {one.cosine:.3f} {sign} {threshold:g}"
    return f"{why}, mixed {' : '.join(f'{factor:.3g}' for factor in one.mixture)}"


def _size(one: LayerExplanation) -> str:
    tensors = counted(one.tensors, "tensor")
    if not one.blocks_total:
        return f"{tensors}, empty or tied to others"
    blocks = counted(one.blocks_total, "block")
    return f"{tensors}, {blocks}, {one.blocks_reused} the base's own"


def _draw_chunks(screen: Screen, one: TensorExplanation) -> None:
    shares = _of_experts(one.experts)
    fates = list(zip(*(share.chunks or () for share in shares), strict=True))
    names = distinct([share.expert for share in shares], LONGEST_NAME)
    if fates:
        screen.line()
    for span, words in runs(fates):
        made = [name for name, word in zip(names, words, strict=True) if word in MADE]
        _wrapped(screen, f"{span}: ", ", ".join(made) or "the base alone")
        for fate in dict.fromkeys(words):
            if fate not in MADE:
                left = [name for name, word in zip(names, words, strict=True) if word == fate]
                _wrapped(screen, f"  {SHOWN.get(fate, fate)}: ", ", ".join(left))


def _wrapped(screen: Screen, head: str, text: str) -> None:
    for line in textwrap.wrap(
        printable(head + text),
        screen.width or WIDTH,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    ):
        screen.line(line)


def runs(fates: Sequence[tuple[str, ...]]) -> list[tuple[str, tuple[str, ...]]]:
    """Join neighbouring chunks of the same fate: `("0-3", ("read", "shared"))`."""
    found = []
    for words, group in groupby(enumerate(fates), key=lambda pair: pair[1]):
        places = [place for place, _words in group]
        first, last = places[0], places[-1]
        found.append((str(first) if first == last else f"{first}-{last}", words))
    return found
