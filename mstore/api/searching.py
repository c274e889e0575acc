"""Calls that search: for the best merge, and for what broke a model.

Part of `mstore.api.Store`, which combines all parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from mstore.api.judging import Judging
from mstore.api.merging import Merging
from mstore.terms.errors import BadRequest
from mstore.terms.ids import PlanId, Revision, SnapshotId
from mstore.terms.phrases import call, few, phrase

if TYPE_CHECKING:
    from mstore.judging.evaluation import Show
    from mstore.search.bisect import Bisection, BisectLog, BisectReport
    from mstore.search.search import SearchReport, TrialReport, Winner
    from mstore.search.template import Template
    from mstore.terms.report import ProgressCallback


class Searching(Judging, Merging):
    """Calls that search: for the best merge, and for what broke a model."""

    def read_template(
        self,
        text: str,
        *,
        where: str = "the recipe",
        models: Mapping[str, str] | None = None,
    ) -> Template:
        """Return a recipe with free numbers, or a config of mergekit-evolve, as `search` reads it.

        Arguments as for `read_recipe`.  `Template.fill` returns a recipe with numbers.

        Raises BadRequest for what is none, NotFound (a model of such a config, whose layers must be
        counted).
        """
        from mstore.search.genome import read_template

        return read_template(
            text, where, lambda model: self._layers_of((models or {}).get(model, model))
        )

    def search(
        self,
        recipe: str,
        command: Sequence[str],
        *,
        name: str,
        score: str,
        minimize: bool = False,
        trials: int = 50,
        sampler: str = "tpe",
        seed: int = 0,
        jobs: int = 1,
        report_command: Sequence[str] | None = None,
        report_score: str | None = None,
        same_set: bool = False,
        restart: bool = False,
        where: str = "the recipe",
        models: Mapping[str, str] | None = None,
        message: str = "",
        timeout: float | None = None,
        show: Show | None = None,
        output: int | None = None,
        tell: Callable[[TrialReport, TrialReport | None], None] | None = None,
        threads: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> SearchReport:
        """Search for the best numbers of a recipe, or for its best experts, and merge the winner.

        recipe: as for `read_recipe`, with free numbers: `weight: {min: 0, max: 1}` where a number
        stands; also `log: true` or a `step`.  A config of mergekit-evolve is read, too.  Models
        that it needs first must be there (`prepare_recipe`).
        command: decides: it is run on each trial's merge, as by `evaluate`.
        name: the branch that the winner is merged to.  It may exist: then it moves, as by `merge`.
        score: `[NAME=]FILE:POINTER`, the score that decides.  minimize: less is better.
        trials: how many merges to try at most.  A merge that was tried is not tried again.
        sampler: `tpe` (needs optuna), `cmaes` (needs cmaes) or `grid` over the free numbers, the
        first trial with weights of 1/K; or, over subsets of the experts, `greedy-soup`,
        `leave-one-out` or `add-one-in`.
        seed: what draws follow from.  jobs: how many trials to evaluate side by side, with 0 to
        jobs - 1 as `$MSTORE_JOB`.  Equal seed, jobs and scores give equal trials; with samplers
        other than `tpe`, any number of jobs does.
        report_command, report_score: report on the winner, the first trial and each expert, by
        other examples than those that decide.  same_set: let the deciding command report, too.
        restart: forget what an earlier search for this name tried.
        where, models: as for `read_recipe`. message, threads, progress: as for `merge`.
        timeout, show, output: as for `evaluate`, for both commands.
        tell: called after each trial, with it and the best one so far.

        A search that was interrupted goes on where it was, and ends with the same result.  Trials
        are virtual merges, of which only the best so far is kept, as a candidate.

        Raises BadRequest, NotFound, Conflict (another search has this name, or another process goes
        on with it; a gate guards the branch), Unavailable (a sampler's package), WrongCommand, and
        CommandFailed if nothing could be tried; a later trial that fails has no score.  Also what
        `plan` and `merge` raise.
        """
        from mstore.judging.evaluation import Command
        from mstore.search.search import Search

        guards = self.required_gates(name)
        if guards:
            raise BadRequest(
                f"it is guarded by {few(guards)}, which nothing has passed yet",
                where=name,
                hint=phrase(
                    "search for another name, then {judge} and {reset}",
                    judge=call("judge", "NAME"),
                    reset=call("reset", name, "NAME"),
                ),
            )
        revisions = dict(models or {})
        template = self.read_template(recipe, where=where, models=revisions)
        reports = None
        if report_command is not None or report_score is not None:
            reports = Command.of(
                command if report_command is None else report_command,
                [score if report_score is None else report_score],
                timeout=timeout,
            )
        search = Search.of(
            template,
            name,
            revisions,
            Command.of(command, [score], timeout=timeout),
            reports,
            sampler=sampler,
            seed=seed,
            jobs=jobs,
            most=trials,
            minimize=minimize,
            same_set=same_set,
        )
        merger = _Merger(
            self, name, where, revisions, message=message, threads=threads, progress=progress
        )
        # Most blocks of trials are read once.
        kept, self.keep_again = self.keep_again, True
        try:
            return search.run(
                self._catalog,
                merger,
                show or self._checked_out,
                restart=restart,
                output=output,
                tell=tell or (lambda trial, best: None),
            )
        finally:
            self.keep_again = kept

    def bisect_start(
        self,
        revision: Revision,
        *,
        good: Sequence[Revision] = (),
        experts: bool = False,
        layers: bool = False,
    ) -> BisectReport:
        """Begin to search for what made a snapshot bad.

        revision: the bad snapshot.
        good: earlier positions of its branch that are good.  Then the first bad position is
        searched.
        experts, layers: the snapshot is a merge; search for the experts, the layers, or the layers
        of experts that are to blame.  Units are tried without the others, which are the base's
        then, as virtual merges: only what somebody reads of them is computed.

        The report names what to try next.  A store has one bisection at a time, which goes on in
        any process.

        Raises NotFound, BadRequest, Conflict (one goes on already), StorageFailed.
        """
        by = _units(experts=experts, layers=layers)
        return self._bisection().begin(revision, good=good, by=by)

    def bisect_mark(self, answer: str, revision: Revision | None = None) -> BisectReport:
        """Say that a snapshot is `good` or `bad`, or that it cannot be judged: `skip`.

        revision: None means what is to be tried now.

        Raises NotFound, BadRequest (also: contradicts what was said before), StorageFailed; then
        the mark does not count.
        """
        from mstore.search.culprits import Answer

        try:
            told = Answer(answer)
        except ValueError:
            raise BadRequest(f"{answer!r} is not good, bad or skip", where="answer") from None
        return self._bisection().mark(told, revision)

    def bisect_run(
        self,
        revision: Revision,
        command: Sequence[str],
        *,
        good: Sequence[Revision] = (),
        experts: bool = False,
        layers: bool = False,
        timeout: float | None = None,
        show: Show | None = None,
        output: int | None = None,
        tell: Callable[[BisectReport, int], None] | None = None,
    ) -> BisectReport:
        """Run a command on what is to be tried, until it is found what made a snapshot bad.

        revision, good, experts, layers: as for `bisect_start`.  If this bisection goes on already,
        it goes on where it was, and `good` are marked that were not.
        command, timeout, show, output: as for `evaluate`.  Its exit status says what it found, as
        for `git bisect run`: 0 good, 125 cannot be judged, others up to 127 bad.  If 126 or 127 is
        the first, a good snapshot is tried, too, and must give another.
        tell: called after each try, with the report that named it, and the exit status.

        Raises CommandFailed (any other status, a signal, or it hangs; what was marked stays),
        WrongCommand, NotFound, BadRequest (also: over time, nothing is known to be good), Conflict
        (another bisection goes on, or another process goes on with it).
        """
        from mstore.judging.evaluation import Command, status_on

        wanted = Command.of(command, timeout=timeout)

        def try_(snapshot: SnapshotId) -> int:
            return status_on(wanted, snapshot, show or self._checked_out, output)

        return self._bisection().run(
            revision,
            try_,
            tell or (lambda report, status: None),
            good=good,
            by=_units(experts=experts, layers=layers),
        )

    def bisect_status(self) -> BisectReport:
        """Return where the bisection stands.  Raises NotFound if none goes on."""
        return self._bisection().status()

    def bisect_log(self) -> BisectLog:
        """Return what is bisected, and all marks.  Raises NotFound if none goes on."""
        return self._bisection().log()

    def bisect_reset(self) -> bool:
        """End the bisection and forget its marks; return whether one went on."""
        return self._bisection().reset()

    def _bisection(self) -> Bisection:
        from mstore.search.bisect import Bisection

        return Bisection(self._catalog)


def _units(*, experts: bool, layers: bool) -> list[str]:
    """Return of what a merge is bisected; nothing: its branch is."""
    return [*(("experts",) if experts else ()), *(("layers",) if layers else ())]


class _Merger:
    """Plans and runs the merges of a search, in an open store."""

    def __init__(
        self,
        store: Searching,
        name: str,
        where: str,
        models: Mapping[str, str],
        *,
        message: str,
        threads: int | None,
        progress: ProgressCallback | None,
    ) -> None:
        self._store = store
        self._name = name
        self._where = where
        self._models = models
        self._message = message
        self._threads = threads
        self._progress = progress

    def plan(self, recipe: str) -> PlanId:
        found = self._store.read_recipe(recipe, where=self._where, models=self._models)
        if found.vocabulary is not None:
            raise BadRequest(
                "a search takes models as they are, and the recipe has a tokenizer",
                where=self._where,
                hint=phrase(
                    "{align} first, and name the aligned models in the recipe", align=call("align")
                ),
            )
        return self._store.plan(
            found.request,
            allow_noop=True,
            keep=True,
            threads=self._threads,
            progress=self._progress,
        ).plan

    def merge(self, plan: PlanId) -> Winner:
        from mstore.search.search import Winner

        made = self._store.merge(
            plan,
            name=self._name,
            message=self._message,
            allow_noop=True,
            threads=self._threads,
            progress=self._progress,
        )
        return Winner(made.snapshot, made.new_snapshot, made.was, made.bytes_written)
