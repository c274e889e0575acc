"""The first lines of a page: what was made, at which cost, and how good it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mstore.store.objects.note import EVALUATION, VERDICT
from mstore.terms.sizes import counted, format_size
from mstore_pages import figures, lineage, scores
from mstore_pages.figures import brief, number, percent
from mstore_pages.markup import Child, breaking, tag

if TYPE_CHECKING:
    from mstore.api.reports import NoteReport, PlanReport
    from mstore_pages.summary import ComparisonSummary, SnapshotSummary


_NOTES_TOLD, _TOLD_WIDTH = 4, 120
"""Of notes in the first lines: how many, and characters of each."""


def verdict(summary: SnapshotSummary) -> Iterator[Child]:
    """Yield what broke it, what was made, at which cost, and how good it is, in sentences."""
    shown, plan = summary.snapshot, summary.plan
    if summary.culprit is not None:
        blamed = f"A bisection found to blame: {_shortened(summary.culprit)}."
        yield tag("span", blamed, class_="flag")
        yield " "
    if plan is None:
        yield _told_made(summary)
    elif plan.assembled:
        yield lineage.told_assembly(plan)
    else:
        kind = "A virtual merge" if shown.virtual else "A merge"
        yield f"{kind} of {counted(len(plan.experts), 'expert')} into {plan.base} by {plan.method}"
        if plan.budget_bytes is None and plan.max_error is None:
            yield ", without a budget."
        else:
            full = plan.full_expert_bytes
            yield (
                f" that read {percent(plan.planned_expert_bytes / full if full else 0)} of the "
                f"experts: {_unbroken(plan.planned_expert_bytes)} of {_unbroken(full)}, "
                "as stored."
            )
        used = sum(one.chunks_used > 0 for one in summary.experts)
        if summary.experts and used < len(summary.experts):
            yield f" It uses {used} of {counted(len(summary.experts), 'expert')}."
        yield f" {_error(plan)}"
    judged = _judged(shown.notes)
    for one in judged[:_NOTES_TOLD]:
        yield " Gate " if one.kind == VERDICT else " Evaluation "
        yield tag("code", _shortened(scores.command(one)))
        yield f": {_shortened(scores.told(one))}."
    if len(judged) > _NOTES_TOLD:
        yield " "
        yield tag("a", f"{len(judged) - _NOTES_TOLD} more", href="#notes")
        yield "."
    if not judged:
        yield " No evaluation is noted."
    if summary.warnings:
        yield " "
        yield tag("a", counted(len(summary.warnings), "warning"), href="#warnings", class_="flag")
        yield "."


def _judged(notes: Sequence[NoteReport]) -> list[NoteReport]:
    """Return verdicts, then evaluations that are not a gate's own."""
    verdicts = [one for one in notes if one.kind == VERDICT]
    gates = {one.subject() for one in verdicts}
    return [
        *verdicts,
        *(one for one in notes if one.kind == EVALUATION and one.key not in gates),
    ]


def _shortened(text: str) -> str:
    return text if len(text) <= _TOLD_WIDTH else f"{text[: _TOLD_WIDTH - 1]}…"


def _unbroken(size: int) -> str:
    """Return a size that no line of a sentence breaks."""
    return format_size(size).replace(" ", figures.NO_BREAK)


def _part(size: int, whole: int) -> str:
    """Return one size of another, with the unit once where they have the same."""
    own, _, unit = format_size(size).partition(" ")
    every = _unbroken(whole)
    same = format_size(whole).endswith(f" {unit}")
    return f"{own if same else _unbroken(size)} of {every}"


def _told_made(summary: SnapshotSummary) -> str:
    shown = summary.snapshot
    size = f"{format_size(shown.plain_bytes)} in {counted(shown.tensors, 'tensor')}"
    made = {"add": "A checkpoint that was added"}.get(shown.made, f"Made by {shown.made}")
    if summary.base is None:
        return f"{made}: {size}. Its lineage names no base."
    change = ""
    if summary.change is not None:
        change = f" It differs from its base by {percent(summary.change)} of the base's norm."
    return f"{made}, with the base {summary.base}: {size}.{change}"


def _error(plan: PlanReport) -> str:
    if plan.error_bound == 0 or plan.error_estimate == 0:
        return "Nothing that matters was left out: it is the full merge."
    if plan.error_bound is not None:
        part = plan.error_share_estimate
        lost = (
            f" Of what the full merge changes, {_about(part)} is lost: an estimate." if part else ""
        )
        return (
            f"It is at most {percent(plan.error_bound)} of the base's norm away from the full "
            f"merge: a certified bound.{lost}"
        )
    if plan.error_estimate is not None:
        away = f"{_about(plan.error_estimate)} of the base's norm"
        share = plan.error_share_estimate
        if share is None:
            return f"It is {away} away from the full merge: an estimate, no bound."
        return (
            f"Of what the full merge changes, {_about(share)} is lost, which is {away}: estimates, "
            "no bounds."
        )
    return "How far it is from the full merge is not known."


def _about(estimate: float) -> str:
    """Return an estimate, with no more digits than it is good for."""
    return f"about {percent(estimate, figures.ESTIMATED)}"


def verdict_tiles(summary: SnapshotSummary) -> Iterator[tuple[str, Child, Child]]:
    plan, shown = summary.plan, summary.snapshot
    if plan is not None:
        yield "Method", breaking(plan.method), _parameters(plan)
        if not plan.assembled:
            budget = "none"
            if plan.budget_bytes is not None:
                full = plan.full_expert_bytes
                share = percent(plan.budget_bytes / full, 2) if full else figures.DASH
                budget = f"{_part(plan.budget_bytes, full)}, {share}"
            if plan.budget_bytes is None and plan.max_error is not None:
                budget = f"error ≤ {percent(plan.max_error)}"
            yield "Budget", budget, f"read {format_size(plan.planned_expert_bytes)} of experts"
            kind, error = (
                ("certified bound", plan.error_bound)
                if plan.error_bound is not None
                else ("estimate", plan.error_estimate)
            )
            if error is None:
                yield "Error", "not known", None
            elif error == 0:
                yield "Error", "none", f"{kind}, of the base's norm"
            elif kind == "certified bound":
                yield "Error", f"≤ {percent(error)}", f"{kind}, of the base's norm"
            elif plan.error_share_estimate is None:
                yield "Error", _about(error), f"{kind}, of the base's norm"
            else:
                away = percent(error, figures.ESTIMATED)
                yield (
                    "Change that is lost",
                    _about(plan.error_share_estimate),
                    f"of the full merge's; {away} of the base's norm (estimates)",
                )
    else:
        yield "Size", format_size(shown.plain_bytes), counted(shown.files, "file")
    if summary.change is not None:
        yield "Change", percent(summary.change), "of the base's norm"
    if summary.experts and any(one.share is not None for one in summary.experts):
        first = max(summary.experts, key=lambda one: one.share or 0.0)
        yield "Largest share", percent(first.share), first.expert
    if summary.blocks is not None and summary.blocks.blocks:
        blocks = summary.blocks
        yield (
            "New on the disk",
            format_size(blocks.new_bytes),
            f"{blocks.blocks - blocks.new_blocks} of {counted(blocks.blocks, 'block')} reused",
        )
    if shown.author:
        yield "Author", shown.author, "as the author tells"
    yield "Signed", lineage.signed(shown.signatures) if shown.signatures else "no", None


def _parameters(plan: PlanReport) -> str:
    return ", ".join(f"{name} {brief(value)}" for name, value in plan.parameters.items())


def difference(summary: ComparisonSummary) -> Iterator[Child]:
    diff = summary.diff
    if not diff.files and not diff.tensors:
        yield "They have the same content."
        return
    yield f"{counted(len(diff.tensors), 'tensor')} and {counted(len(diff.files), 'file')} differ."
    if summary.change is not None:
        yield (
            f" In the tensors of both, {summary.name_b} differs from {summary.name_a} by "
            f"{percent(summary.change)} of the norm of {summary.name_a}."
        )
    if summary.similarity is not None and summary.similarity.whole.pairs:
        pair = summary.similarity.whole.pairs[0]
        yield f" Both have one base; the cosine of their changes is {number(pair.cosine)}."


def difference_tiles(summary: ComparisonSummary) -> Iterator[tuple[str, Child, Child]]:
    diff = summary.diff
    yield "Change", percent(summary.change), f"of the norm of {summary.name_a}"
    yield "Tensors that differ", len(diff.tensors), _equal(diff.tensors_equal)
    yield "Files that differ", len(diff.files), _equal(diff.files_equal)
    share = diff.blocks_changed / diff.blocks_total if diff.blocks_total else None
    yield "Blocks that differ", percent(share), f"{diff.blocks_changed} of {diff.blocks_total}"


def _equal(count: int) -> str:
    return f"{count} {'is' if count == 1 else 'are'} equal"
