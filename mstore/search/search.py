"""A search for the best numbers of a recipe, or for the best experts: trials, winner, report.

One command decides: its score of a trial's merge says how good that is.  Another one reports: it
sees the winner, the start (the merge of all experts alike, which most samplers try first), and each
expert, and its scores are what people may believe.  What decided over 50 trials says too much good
of the winner.

The winner is an ordinary merge, with notes: the evaluation that decided, the one that reports, and
the trials (key `search`), which pushes and clones carry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec
from blake3 import blake3

from mstore.judging.evaluation import (
    Command,
    Judgement,
    Show,
    evaluate,
    judged,
    judgement_on,
    known,
)
from mstore.search.samplers import Chosen, Sampler, sampler_of
from mstore.search.template import WEIGHT, Free, Template, short
from mstore.search.trials import SearchHead, Trial, Trials, ranked
from mstore.snapshots import notes
from mstore.snapshots.notes import NoteReport
from mstore.store.catalog import Catalog
from mstore.store.models import snapshot_of
from mstore.store.objects.note import EVALUATION, VALUE, packed
from mstore.terms.errors import BadRequest, CommandFailed, NotFound, WrongCommand
from mstore.terms.ids import PlanId, SnapshotId
from mstore.terms.phrases import Option, phrase
from mstore.terms.report import Report
from mstore.terms.sizes import counted

WINNER: Final = "winner"
START: Final = "start"
ALL: Final = "all"
EXPERT: Final = "expert"


class FreeNumber(Report, frozen=True):
    """A number that was searched for."""

    name: str
    """its name: the model, the parameter, and the filter, place or layers that it is for"""
    low: float
    """the least value"""
    high: float
    """the greatest value"""
    log: bool
    """whether values are compared by their ratio"""


class TrialReport(Report, frozen=True):
    """One trial of a search."""

    number: int
    """its number, from 0"""
    values: tuple[float, ...]
    """the free numbers, in their order"""
    experts: tuple[str, ...] | None
    """the experts of the merge, as the recipe names them; null: all"""
    score: float | None
    """what the deciding command said; null: it failed, or the merge cannot be planned"""
    plan: PlanId | None
    """the merge's plan"""
    seconds: float
    """how long the command took; 0 if the same plan was tried before"""
    error: str | None
    """why there is no score"""


class ReportedScore(Report, frozen=True):
    """What the reporting command said of one model."""

    role: str
    """winner, start (what was tried first), all (where the search began with less than all experts:
    all of them), or expert"""
    name: str
    """the model, as the recipe or the caller names it"""
    snapshot: SnapshotId | None
    """its snapshot; null for start and all, which are kept nowhere, and for adapters on models"""
    score: float | None
    """the score; null: there is none"""
    error: str | None
    """why there is none"""


class IngredientReport(Report, frozen=True):
    """What a greedy soup found of one expert."""

    expert: str
    """the expert, as the recipe names it"""
    alone: float | None
    """its own score; null: the command failed"""
    tried: float | None
    """the score of the soup with it, of the first expert its own; null: it failed, or not tried"""
    kept: bool | None
    """whether it stayed in the soup; null: it was not tried, as the trials were used up"""


class SearchedReport(Report, frozen=True):
    """What the note of a search tells."""

    sampler: str
    """what chose the trials"""
    seed: int
    """what its draws follow from"""
    score: str
    """the score that decided"""
    minimize: bool
    """whether less is better"""
    decided_by: str
    """the command that decided, as the key of its note"""
    reported_by: str
    """the command that reports, as the key of its note"""
    numbers: tuple[FreeNumber, ...]
    """what was searched for"""
    tried: int
    """how many trials there were"""
    trials: tuple[TrialReport, ...]
    """the best of them, the best first"""

    def text(self) -> str:
        """Return what was tried, and the best score, in a line."""
        best = self.trials[0].score if self.trials else None
        found = "" if best is None else f"; {self.score} {best:.6g} is best"
        return f"{self.sampler} tried {counted(self.tried, 'merge')}{found}"


class SearchReport(Report, frozen=True):
    """What a search found."""

    name: str
    """the branch of the winner"""
    snapshot: SnapshotId
    """the winner"""
    new_snapshot: bool
    """false if the branch already was this merge"""
    was: SnapshotId | None
    """where the branch pointed before; null for a new branch"""
    plan: PlanId
    """its plan"""
    sampler: str
    """what chose the trials"""
    seed: int
    """what its draws follow from"""
    score: str
    """the score that decided"""
    minimize: bool
    """whether less is better"""
    best: float
    """the winner's score"""
    first: float | None
    """the score of what was tried first; null: it failed, or was less than all experts"""
    values: dict[str, float]
    """the winner's free numbers by name"""
    experts: tuple[str, ...] | None
    """the winner's experts, as the recipe names them; null: all"""
    numbers: tuple[FreeNumber, ...]
    """what was searched for"""
    trials: tuple[TrialReport, ...]
    """the trials, in order"""
    ingredients: tuple[IngredientReport, ...]
    """of a greedy soup: its experts in the order of trying them, the best ones alone first"""
    evaluated: int
    """how often the command ran for them, in all runs of this search"""
    resumed: int
    """trials that the log of an earlier run had"""
    decided_by: str
    """the command that decided, as the key of its note"""
    reported_by: str
    """the command that reports, as the key of its note"""
    reported_score: str
    """the score that it reports"""
    reported: tuple[ReportedScore, ...]
    """its scores: of the winner, of the start or of all experts, of each expert"""
    bytes_written: int
    """bytes that the winner added to the store"""
    remarks: tuple[str, ...]
    """what else there is to say"""


class _Note(msgspec.Struct, frozen=True):
    """The value of a search's note.

    numbers: name, least, greatest, and whether values are compared by their ratio. tried: how many
    trials there were. trials: of the best ones, the best first, number, score, values, and which of
    `experts` it had; None for all.
    """

    sampler: str
    seed: int
    score: str
    minimize: bool
    decided_by: str
    reported_by: str
    numbers: tuple[tuple[str, float, float, bool], ...]
    experts: tuple[str, ...]
    tried: int
    trials: tuple[tuple[int, float | None, tuple[float, ...], tuple[int, ...] | None], ...]

    def report(self) -> SearchedReport | None:
        """Return what it tells; None if that is not sound: anybody may write notes."""
        free = [FreeNumber(*one) for one in self.numbers]
        is_sound = all(
            len(values) == len(free)
            and all(map(math.isfinite, (*values, score or 0.0)))
            and all(0 <= one < len(self.experts) for one in chosen or ())
            for _, score, values, chosen in self.trials
        )
        if not is_sound or not all(
            one.low < one.high and (one.low > 0 or not one.log) for one in free
        ):
            return None
        return SearchedReport(
            sampler=self.sampler,
            seed=self.seed,
            score=self.score,
            minimize=self.minimize,
            decided_by=self.decided_by,
            reported_by=self.reported_by,
            numbers=tuple(free),
            tried=self.tried,
            trials=tuple(
                TrialReport(
                    number=number,
                    values=values,
                    experts=None if own is None else tuple(self.experts[one] for one in own),
                    score=score,
                    plan=None,
                    seconds=0.0,
                    error=None,
                )
                for number, score, values, own in self.trials
            ),
        )


def searched(told: Iterable[NoteReport]) -> SearchedReport | None:
    """Return what the notes of a snapshot tell of the search that made it; None for no search."""
    value = next((one.value for one in told if (one.kind, one.key) == (VALUE, notes.SEARCH)), None)
    try:
        return msgspec.convert(value, _Note).report()
    except msgspec.ValidationError:
        return None


class Winner(msgspec.Struct, frozen=True):
    """The winner as a merge.  was: where the branch pointed before; None for a new one."""

    snapshot: SnapshotId
    is_new: bool
    was: SnapshotId | None
    bytes_written: int


class Merger(Protocol):
    """Plans and runs merges of recipes."""

    def plan(self, recipe: str) -> PlanId:
        """Plan the merge of a recipe.  Raises what `Store.plan` raises."""

    def merge(self, plan: PlanId) -> Winner:
        """Run a plan, and move the branch to its result.  Raises what `Store.merge` raises."""


class Search(msgspec.Struct, frozen=True):
    """What to search for, and how.

    name: the branch of the winner. revisions: of the recipe's models, by their names in it.
    decides, reports: the commands, each with one score. minimize: whether less is better.
    """

    template: Template
    name: str
    revisions: Mapping[str, str]
    decides: Command
    reports: Command
    sampler: str
    seed: int
    jobs: int
    most: int
    minimize: bool

    @classmethod
    def of(
        cls,
        template: Template,
        name: str,
        revisions: Mapping[str, str],
        decides: Command,
        reports: Command | None,
        *,
        sampler: str,
        seed: int,
        jobs: int,
        most: int,
        minimize: bool,
        same_set: bool,
    ) -> Search:
        """Return it.  Raises BadRequest."""
        for one, option in ((decides, "score"), (reports or decides, "report_score")):
            if len(one.scores) != 1:
                raise BadRequest(
                    f"a search goes by one score, not {len(one.scores)}",
                    where=Option(option),
                    hint=Option(option, "results.json:loss"),
                )
        if not same_set and (reports is None or reports.definition() == decides.definition()):
            raise BadRequest(
                "the score that decides says too much good of the winner, and no other reports",
                hint=phrase(
                    "name a command that sees other examples: {report}; or let the same one "
                    "report: {same}",
                    report=Option("report_command", "COMMAND {}"),
                    same=Option("same_set"),
                ),
            )
        for value, option in ((most, "trials"), (jobs, "jobs")):
            if value < 1:
                raise BadRequest("at least 1", where=Option(option))
        if not 0 <= seed < 2**63:
            raise BadRequest("a whole number from 0 to 2^63 - 1", where=Option("seed"))
        return cls(
            template.grouped(),
            name,
            revisions,
            decides,
            decides if reports is None else reports,
            sampler,
            seed,
            jobs,
            most,
            minimize,
        )

    @property
    def score(self) -> str:
        """The name of the score that decides."""
        return self.decides.scores[0].name

    def named(self, one: Trial) -> dict[str, float]:
        """Return the free numbers of a trial by name, without those of experts it leaves out."""
        left_out = set() if one.experts is None else set(self.template.models) - set(one.experts)
        owners = {short(model) for model in left_out}
        return {
            free.name: value
            for free, value in zip(self.template.free, one.values, strict=True)
            if free.model not in owners
        }

    def run(
        self,
        catalog: Catalog,
        merger: Merger,
        show: Show,
        *,
        restart: bool = False,
        output: int | None = None,
        tell: Callable[[TrialReport, TrialReport | None], None],
    ) -> SearchReport:
        """Search, publish the winner, and report on it.

        tell: called after each trial, with the best one so far.
        """
        sampler = sampler_of(self.sampler, self.template, self.seed)
        start = Chosen(self.template.start())

        def planned(choice: Chosen) -> PlanId:
            return merger.plan(self.template.fill(choice.values, choice.experts))

        def evaluated(snapshot: SnapshotId, job: int) -> Judgement:
            return judgement_on(self.decides, snapshot, show, output, job=job)

        start_plan = planned(start)
        trials = Trials(
            catalog,
            self.name,
            self._head(start_plan),
            plan=planned,
            evaluate=evaluated,
            tell=lambda one, best: tell(
                _report_of(one), None if best is None else _report_of(best)
            ),
        )
        done = trials.run(sampler, self.most, restart=restart)
        best = trials.best()
        if best is None or best.plan is None:
            raise CommandFailed("no trial has a score", where=self.name)
        merged = merger.merge(PlanId.fromhex(best.plan))
        try:
            self._note(catalog, merged.snapshot, best, done)
            is_first = done[0].plan == start_plan.hex()
            reported = self._reported(
                *(catalog, merged.snapshot, start_plan, trials, show, output), is_first=is_first
            )
        finally:
            trials.drop_candidates()
        return self._report(
            merged,
            best,
            done,
            first=done[0].score if is_first else None,
            resumed=trials.resumed,
            reported=reported,
            ingredients=self._ingredients(sampler),
        )

    def _head(self, start: PlanId) -> SearchHead:
        definition = msgspec.json.encode(self.decides.definition())
        return SearchHead(
            recipe=self.template.digest(),
            start=start.hex(),
            evaluation=blake3(definition).hexdigest(16),
            sampler=self.sampler,
            seed=self.seed,
            jobs=self.jobs,
            score=self.score,
            minimize=self.minimize,
        )

    # -- what is said of the winner ------------------------------------------------------------

    def _note(
        self, catalog: Catalog, winner: SnapshotId, best: Trial, done: Sequence[Trial]
    ) -> None:
        """Note the evaluation that decided, and the trials."""
        if best.score is not None and known(catalog, winner, self.decides) is None:
            # The candidate had the same plan, and so the same bytes.
            value = Judgement(
                self.decides, {self.score: best.score}, 0, best.seconds, best.results
            ).value()
            judged(catalog, winner, self.decides.key, value, EVALUATION, passed=False)
        notes.write(catalog, winner, {notes.SEARCH: self._told(done)}, VALUE)

    def _told(self, done: Sequence[Trial]) -> dict[str, Any]:
        """Return the value of the note: of too many trials the best ones."""
        kept = ranked(done, minimize=self.minimize)
        while True:
            value: dict[str, Any] = msgspec.to_builtins(
                _Note(
                    sampler=self.sampler,
                    seed=self.seed,
                    score=self.score,
                    minimize=self.minimize,
                    decided_by=self.decides.key,
                    reported_by=self.reports.key,
                    numbers=tuple(
                        (one.name, one.low, one.high, one.log) for one in self.template.free
                    ),
                    experts=self.template.models,
                    tried=len(done),
                    trials=tuple(
                        (one.number, one.score, one.values, self._numbers(one.experts))
                        for one in kept
                    ),
                )
            )
            try:
                packed(value)
            except BadRequest:
                if len(kept) < 2:
                    raise
                kept = kept[: len(kept) * 3 // 4]
            else:
                return value

    def _numbers(self, experts: Sequence[str] | None) -> tuple[int, ...] | None:
        """Return which of the recipe's experts these are."""
        return None if experts is None else tuple(map(self.template.models.index, experts))

    def _reported(
        self,
        catalog: Catalog,
        winner: SnapshotId,
        start: PlanId,
        trials: Trials,
        show: Show,
        output: int | None,
        *,
        is_first: bool,
    ) -> tuple[ReportedScore, ...]:
        """Return the scores of the command that reports.  is_first: whether the start was."""
        name = self.reports.scores[0].name

        def noted(role: str, called: str, snapshot: SnapshotId) -> ReportedScore:
            own = known(catalog, snapshot, self.reports)
            if own is not None:
                return ReportedScore(role, called, snapshot, own.scores[name], None)
            return _scored(
                role,
                called,
                snapshot,
                lambda: evaluate(catalog, snapshot, self.reports, show, output).scores[name],
            )

        def started() -> float:
            tried = trials.of_plan(start)
            if self.reports == self.decides and tried is not None and tried.score is not None:
                return tried.score
            shown = trials.committed(start, 0)
            return judgement_on(self.reports, shown, show, output).scores[name]

        found = [noted(WINNER, self.name, winner)]
        found.append(_scored(START if is_first else ALL, self.start_told, None, started))
        for model in self.template.models:
            try:
                snapshot = catalog.resolve(snapshot_of(self.revisions.get(model, model)))
            except NotFound:
                # Trials had it: it is a model with an adapter.
                why = "an adapter on a model, which is no snapshot by itself"
                found.append(ReportedScore(EXPERT, model, None, None, why))
            else:
                found.append(noted(EXPERT, model, snapshot))
        return tuple(found)

    @property
    def start_told(self) -> str:
        """The start, in words."""
        told = f"all {len(self.template.models)} experts"
        if any(one.parameter == WEIGHT for one in self.template.free):
            told += f", weights 1/{len(self.template.models)}"
        return told

    def _ingredients(self, sampler: Sampler) -> tuple[IngredientReport, ...]:
        # A sampler is told scores of which larger is better.
        sign = -1 if self.minimize else 1
        return tuple(
            IngredientReport(
                one.expert,
                None if one.alone is None else sign * one.alone,
                None if one.tried is None else sign * one.tried,
                one.kept,
            )
            for one in sampler.ingredients()
        )

    def _report(
        self,
        merged: Winner,
        best: Trial,
        done: Sequence[Trial],
        *,
        first: float | None,
        resumed: int,
        reported: tuple[ReportedScore, ...],
        ingredients: tuple[IngredientReport, ...],
    ) -> SearchReport:
        assert best.plan is not None
        assert best.score is not None
        remarks = list(self.template.remarks)
        failed = sum(one.score is None for one in done)
        if failed:
            remarks.append(f"{failed} of {len(done)} trials have no score")
        return SearchReport(
            name=self.name,
            snapshot=merged.snapshot,
            new_snapshot=merged.is_new,
            was=merged.was,
            plan=PlanId.fromhex(best.plan),
            sampler=self.sampler,
            seed=self.seed,
            score=self.score,
            minimize=self.minimize,
            best=best.score,
            first=first,
            values=self.named(best),
            experts=best.experts,
            numbers=tuple(map(_free, self.template.free)),
            trials=tuple(map(_report_of, done)),
            ingredients=ingredients,
            evaluated=len({one.plan for one in done if one.plan is not None}),
            resumed=resumed,
            decided_by=self.decides.key,
            reported_by=self.reports.key,
            reported_score=self.reports.scores[0].name,
            reported=reported,
            bytes_written=merged.bytes_written,
            remarks=tuple(remarks),
        )


def _scored(
    role: str, called: str, snapshot: SnapshotId | None, ask: Callable[[], float]
) -> ReportedScore:
    """Return the score of one model; an expert may be an adapter, which no command can load."""
    try:
        return ReportedScore(role, called, snapshot, ask(), None)
    except WrongCommand:
        raise
    except CommandFailed as error:
        return ReportedScore(role, called, snapshot, None, str(error))


def _free(one: Free) -> FreeNumber:
    return FreeNumber(one.name, one.low, one.high, one.log)


def _report_of(one: Trial) -> TrialReport:
    return TrialReport(
        number=one.number,
        values=one.values,
        experts=one.experts,
        score=one.score,
        plan=None if one.plan is None else PlanId.fromhex(one.plan),
        seconds=one.seconds,
        error=one.error,
    )
