"""Trials: a search tries merges one after another, and keeps a log of what each one gave.

A trial is a plan, committed as a virtual merge under a candidate of its own, `candidates/trial-N/
NAME`; the candidate goes when its round is over, unless it is the best so far.  A plan that was
tried is not tried again.  What to try follows from the log alone, so whoever types the search again
goes on where it was, and ends with the same result.

Trials of one round are asked for before any of them is told, and told in the order of asking.  So
the result follows from the seed and from how many are tried side by side, and not from which is
done first.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Final

import msgspec

from mstore.blocks.lmdb_types import IndexTransaction
from mstore.judging.evaluation import Judgement
from mstore.merge.virtual.deferred import commit_virtual
from mstore.search.runlog import RunLog
from mstore.search.samplers import Chosen, Sampler
from mstore.store import refs
from mstore.store.catalog import Catalog
from mstore.store.objects.plan import Plan
from mstore.store.plans import sources_of
from mstore.store.refs import refs_in
from mstore.store.transaction import RefMove, choose_moves
from mstore.terms.errors import BadRequest, CommandFailed, Conflict, Incompatible, WrongCommand
from mstore.terms.ids import PlanId, SnapshotId
from mstore.terms.phrases import Option, phrase

_TRIAL: Final = re.compile(rf"candidates/{refs.TRIAL}-[0-9]+/(.+)")


def _run(number: int) -> str:
    """Return the word that tells a trial's candidate from others for the branch."""
    return f"{refs.TRIAL}-{number}"


class SearchHead(msgspec.Struct, frozen=True):
    """What is searched for; with another head, it is another search.

    recipe: a digest of it, with its ranges. start: the plan of what is tried first, which names the
    contents of the models. evaluation: a digest of the command and of where its score is.
    """

    recipe: str
    start: str
    evaluation: str
    sampler: str
    seed: int
    jobs: int
    score: str
    minimize: bool


class Trial(msgspec.Struct, frozen=True):
    """What one trial was, and what it gave.

    number: from 0. plan: None for what cannot be planned. score: None if the trial failed, and
    `error` says how. seconds: that the command took; 0 where the plan was tried before. results:
    the BLAKE3 of each result file by name.
    """

    number: int
    plan: str | None
    values: tuple[float, ...]
    experts: tuple[str, ...] | None
    score: float | None
    seconds: float = 0.0
    results: dict[str, str] = {}
    error: str | None = None

    @property
    def choice(self) -> Chosen:
        """What was tried."""
        return Chosen(self.values, self.experts)


class Trials:
    """The trials of one search.

    name: the branch that the winner is for. evaluate: judges a snapshot; its second argument tells
    those that run side by side apart, from 0.
    """

    def __init__(
        self,
        catalog: Catalog,
        name: str,
        head: SearchHead,
        *,
        plan: Callable[[Chosen], PlanId],
        evaluate: Callable[[SnapshotId, int], Judgement],
        tell: Callable[[Trial, Trial | None], None],
    ) -> None:
        self._catalog = catalog
        self._name = name
        self._head = head
        self._plan = plan
        self._evaluate = evaluate
        self._tell = tell
        # A name of a ref may hold slashes, and never a colon.
        log = f"search-{name.replace('/', ':')}"
        self._log = RunLog(catalog.layout, log, SearchHead, Trial)
        self._done: dict[int, Trial] = {}
        self.resumed = 0
        """How many trials the log had already."""

    def run(self, sampler: Sampler, most: int, *, restart: bool = False) -> list[Trial]:
        """Try what the sampler chooses until it ends, or there are `most` trials; return them.

        There may be more in the log.

        restart: forget the log first.

        Raises Conflict (another search has this name, or another process goes on with it),
        WrongCommand, CommandFailed (nothing could be tried yet), and what planning raises.  What
        was tried stays in the log.
        """
        with self._log.held():
            if restart:
                self._log.remove()
            self._resume()
            # A search forgets no trial.
            most = max(most, self.resumed)
            number = 0
            while True:
                asked: list[Chosen] = []
                while len(asked) < min(self._head.jobs, most - number):
                    choice = sampler.ask()
                    if choice is None:
                        break
                    asked.append(choice)
                if not asked:
                    break
                numbers = range(number, number + len(asked))
                try:
                    self._round(dict(zip(numbers, asked, strict=True)))
                finally:
                    self.drop_candidates(self.best())
                for one in numbers:
                    score = self._done[one].score
                    sampler.tell(None if score is None else self._signed(score))
                number += len(asked)
            return [self._done[one] for one in range(number)]

    def best(self) -> Trial | None:
        """Return the best trial, as `ranked` orders them; None if none has a score."""
        first = next(iter(ranked(self._done.values(), minimize=self._head.minimize)), None)
        return None if first is None or first.score is None else first

    def committed(self, plan: PlanId, number: int) -> SnapshotId:
        """Commit a plan as the candidate of a trial."""
        record = self._catalog.record(Plan, plan)
        return commit_virtual(
            self._catalog,
            record,
            sources_of(self._catalog, plan, record),
            name=self._name,
            message=f"trial {number} of a search for {self._name}",
            candidate=_run(number),
        ).snapshot

    def drop_candidates(self, but: Trial | None = None) -> None:
        """Remove the candidates of all trials but one."""
        kept = None if but is None else refs.below(refs.CANDIDATE, _run(but.number), self._name)

        def choose(transaction: IndexTransaction) -> list[RefMove]:
            return [
                RefMove(name, ref, None, "search")
                for name, ref in refs_in(self._catalog.index, transaction).walk()
                if name != kept and (found := _TRIAL.fullmatch(name)) and found[1] == self._name
            ]

        choose_moves(self._catalog, choose)

    def _signed(self, score: float) -> float:
        """Return a score so that larger is better."""
        return -score if self._head.minimize else score

    def _resume(self) -> None:
        """Read the log, or begin one.  Raises Conflict if it is of another search."""
        found = self._log.read()
        if found is None:
            self._log.write(self._head, [])
            return
        head, lines = found
        if head != self._head:
            if all(one.score is None for one in lines):
                # A typing error was corrected.
                self._log.write(self._head, [])
                return
            raise Conflict(
                f"a search for this name goes on with {_difference(head, self._head)}",
                where=self._name,
                hint=phrase(
                    "type that one again to go on with it, or begin anew: {restart}",
                    restart=Option("restart"),
                ),
            )
        self._done = {one.number: one for one in lines}
        self.resumed = len(self._done)

    def _round(self, choices: Mapping[int, Chosen]) -> None:
        """Try what is not in the log."""
        planned: dict[int, PlanId] = {}
        for number, choice in choices.items():
            known = self._done.get(number)
            if known is None:
                plan = self._planned(number, choice)
                if plan is not None:
                    planned[number] = plan
            elif known.choice != choice:
                raise Conflict(
                    f"its log has another trial {number} than {self._head.sampler} chooses now: "
                    "another version made it",
                    where=self._name,
                    hint=Option("restart"),
                )
        # The first of equal plans is tried, and counts for the others.
        first: dict[PlanId, int] = {}
        for number, plan in planned.items():
            if self.of_plan(plan) is None:
                first.setdefault(plan, number)
        self._try({number: plan for plan, number in first.items()}, choices)
        for number, plan in planned.items():
            same = self.of_plan(plan)
            if number not in self._done and same is not None:
                again = msgspec.structs.replace(
                    same,
                    number=number,
                    values=choices[number].values,
                    experts=choices[number].experts,
                    seconds=0.0,
                )
                self._keep(again)

    def _planned(self, number: int, choice: Chosen) -> PlanId | None:
        """Return the plan of a choice; None, with a line in the log, if it cannot be planned."""
        try:
            return self._plan(choice)
        except (BadRequest, Incompatible) as error:
            if self.best() is None:
                raise
            self._keep(Trial(number, None, choice.values, choice.experts, None, error=str(error)))
            return None

    def of_plan(self, plan: PlanId) -> Trial | None:
        """Return the trial of a plan."""
        return next((one for one in self._done.values() if one.plan == plan.hex()), None)

    def _try(self, plans: Mapping[int, PlanId], choices: Mapping[int, Chosen]) -> None:
        """Evaluate plans side by side; each gets its line when it is done."""
        shown = {number: self.committed(plan, number) for number, plan in plans.items()}
        jobs = {number: job for job, number in enumerate(plans)}

        def tried(number: int) -> Trial:
            choice = choices[number]
            made = partial(Trial, number, plans[number].hex(), choice.values, choice.experts)
            began = time.monotonic()
            try:
                judgement = self._evaluate(shown[number], jobs[number])
            except WrongCommand:
                raise
            except CommandFailed as error:
                seconds = round(time.monotonic() - began, 3)
                return made(None, seconds, error=str(error)[:1000])
            score = judgement.scores[self._head.score]
            return made(score, round(judgement.seconds, 3), judgement.results)

        self._finish(list(shown), tried)

    def _finish(self, numbers: Sequence[int], tried: Callable[[int], Trial]) -> None:
        """Call `tried` for each number, side by side, and keep what it returns."""
        if len(numbers) == 1:
            # In this thread, which Ctrl-C interrupts, and with it the command.
            outcomes: Iterator[Trial | BaseException] = iter([tried(numbers[0])])
        else:
            outcomes = _side_by_side(tried, numbers)
        failed, raised = [], []
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raised.append(outcome)
            elif outcome.score is None:
                failed.append(outcome)
            else:
                self._keep(outcome)
        for trial in failed:
            if self.best() is None:
                raise CommandFailed(trial.error or "failed", where=self._name)
            self._keep(trial)
        if raised:
            raise raised[0]

    def _keep(self, trial: Trial) -> None:
        """Write the line of a trial, and tell it."""
        self._done[trial.number] = trial
        self._log.write(self._head, list(self._done.values()))
        self._tell(trial, self.best())


def _side_by_side(
    tried: Callable[[int], Trial], numbers: Sequence[int]
) -> Iterator[Trial | BaseException]:
    """Yield what calls return or raise, as they end.

    Nobody waits for the threads: where Ctrl-C ends this process, the commands end with it.
    """
    ended: SimpleQueue[Trial | BaseException] = SimpleQueue()

    def call(number: int) -> None:
        try:
            ended.put(tried(number))
        except BaseException as error:  # noqa: BLE001 -- raised where it is waited for
            ended.put(error)

    for number in numbers:
        threading.Thread(target=call, args=(number,), name="trial", daemon=True).start()
    for _ in numbers:
        yield ended.get()


def _difference(old: SearchHead, new: SearchHead) -> str:
    """Return in words what of a search another one has not."""
    told = {
        "recipe": "another recipe",
        "start": "other contents of its models",
        "evaluation": "another command or score",
        "sampler": f"the sampler {old.sampler}",
        "seed": f"the seed {old.seed}",
        "jobs": f"{old.jobs} jobs",
        "score": f"the score {old.score}",
        "minimize": "the other direction",
    }
    words = [word for field, word in told.items() if getattr(old, field) != getattr(new, field)]
    return " and ".join(words[:2])


def ranked(trials: Iterable[Trial], *, minimize: bool) -> list[Trial]:
    """Return trials, the best first; those that failed last.

    Of equal scores the one of more experts is first, so that a greedy soup has what did not make it
    worse; then by names, then the earlier one.
    """

    def place(one: Trial) -> tuple[bool, float, int, tuple[str, ...], int]:
        score = one.score or 0.0
        experts = one.experts or ()
        return (
            one.score is None,
            score if minimize else -score,
            -len(experts),
            experts,
            one.number,
        )

    return sorted(trials, key=place)
