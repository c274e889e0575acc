"""Calls that judge snapshots by running commands on them.

Part of `mstore.api.Store`, which combines all parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mstore.api.open_store import OpenStore, thread_count
from mstore.store import refs
from mstore.terms.errors import NotFound
from mstore.terms.ids import Revision, SnapshotId
from mstore.terms.phrases import few

if TYPE_CHECKING:
    from mstore.judging.evaluation import EvaluationReport, Show
    from mstore.judging.gate import CandidateReport, Gate, VerdictReport, VerdictRow
    from mstore.judging.guarded import GateReport
    from mstore.judging.metrics import MetricsRow
    from mstore.snapshots.signing import SigningKey


class Judging(OpenStore):
    """Calls that judge snapshots by running commands on them."""

    def evaluate(
        self,
        revision: Revision,
        command: Sequence[str],
        *,
        scores: Sequence[str] = (),
        name: str | None = None,
        timeout: float | None = None,
        show: Show | None = None,
        output: int | None = None,
    ) -> EvaluationReport:
        """Run a command on the files of a snapshot, and note what it says as an evaluation.

        command: a program and its arguments; no shell reads them.  `{}` in them, and the variable
        MSTORE_DIR, is the directory of the snapshot.  It runs in an empty directory of its own,
        MSTORE_OUT, and when it has ended, so do all processes that it started.
        scores: `[NAME=]FILE:POINTER`, as `results.json:results.mmlu.acc,none`: a file that the run
        wrote, the newest that matches, and the keys of a number in it.  Without scores, the exit
        status is the score `passed`, 1 or 0.
        name: the key of the note; the command unless given.
        timeout: in seconds; a day unless given.
        show: shows the snapshot to the command, as `mstore_fuse.mounts.shown` does; None checks it
        out into a scratch directory.
        output: a descriptor for what the command prints; None drops it.

        Raises CommandFailed (it fails, hangs or changes the files) or WrongCommand (it does not
        start, or leaves no such score), and then nothing is noted; NotFound, BadRequest, Conflict,
        StorageFailed, Unavailable.
        """
        from mstore.judging.evaluation import Command, evaluate

        wanted = Command.of(command, scores, name, timeout)
        snapshot = self._catalog.resolve(revision)
        return evaluate(self._catalog, snapshot, wanted, show or self._checked_out, output)

    def _checked_out(self, snapshot: SnapshotId, scratch: Path) -> AbstractContextManager[Path]:
        """Show a snapshot by a checkout into a scratch directory."""
        from mstore.judging.evaluation import checked_out
        from mstore.snapshots.checkout import checkout

        def write(directory: Path) -> None:
            checkout(
                self._catalog,
                self._whole(snapshot),
                directory,
                threads=thread_count(None),
                computing=self._computing,
            )

        return checked_out(write, scratch / "model")

    def judge(
        self,
        revision: Revision,
        gates: Sequence[Gate],
        *,
        show: Show | None = None,
        key: SigningKey | None = None,
        output: int | None = None,
    ) -> tuple[VerdictReport, ...]:
        """Run gates on a snapshot, in order until one says no, and note their verdicts.

        gates: what `Gate.of` makes of a command and least scores.
        show, output: as for `evaluate`. key: signs the verdicts.

        A command that fails or hangs says no.

        Raises WrongCommand (one does not start, or leaves no such score: that is no verdict, and
        nothing is noted), NotFound (also: a reference of a least score), BadRequest, Conflict,
        StorageFailed, Unavailable.
        """
        from mstore.judging.gate import judge

        snapshot = self._catalog.resolve(revision)
        verdicts: list[VerdictReport] = []
        for gate in gates:
            made = judge(
                self._catalog,
                snapshot,
                gate,
                show or self._checked_out,
                key=key,
                output=output,
            )
            verdicts.append(made)
            if not made.passed:
                break
        return tuple(verdicts)

    def move_if_passed(
        self,
        candidate: str,
        expect: Revision | None,
        gates: Sequence[Gate],
        *,
        keep_failed: bool = False,
        show: Show | None = None,
        key: SigningKey | None = None,
        output: int | None = None,
    ) -> GateReport:
        """Move a branch to its candidate if that passes all gates; else leave the branch.

        The branch moves and the candidate goes in one step.  A candidate that does not pass is
        removed, too, and so is one whose branch somebody else moved meanwhile.

        candidate: the ref of a `merge` or `add` with `candidate`. expect: where the branch must be
        when it moves, as that call reported it; None: it must not exist.
        keep_failed: leave a candidate that does not pass, until it is removed or `reflog_days` are
        over.
        gates, show, key, output: as for `judge`.

        Raises what `judge` raises, and Conflict if the branch moved meanwhile.
        """
        from mstore.judging.guarded import move_if_passed

        refs.check(candidate, refs.CANDIDATE)
        return move_if_passed(
            self._catalog,
            candidate,
            None if expect is None else self._catalog.resolve(expect),
            lambda: self.judge(candidate, gates, show=show, key=key, output=output),
            keep_failed=keep_failed,
        )

    def required_gates(self, name: str) -> tuple[str, ...]:
        """Return the names of the gates that guard this branch or tag, by the store's settings."""
        from mstore.store.gates import required

        return required(self._catalog.config, name)

    def required_gates_by_pattern(self) -> dict[str, tuple[str, ...]]:
        """Return the patterns of refs that gates guard, with the names of these gates."""
        return dict(self._catalog.config.required_gates)

    @property
    def has_required_gates(self) -> bool:
        """Whether the store's settings name gates for any ref."""
        return bool(self._catalog.config.required_gates)

    def require_gates(self, pattern: str, gates: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Let branches and tags that match a pattern move only to what passed these gates.

        gates: names; what a gate runs is for each user to say.  None: the pattern is removed.
        Clones and fetches do not copy this setting.  Returns all patterns with their gates.

        Raises BadRequest, NotFound (no gates, and no such pattern), StorageFailed.
        """
        known = dict(self._catalog.config.required_gates)
        if known.pop(pattern, None) is None and not gates:
            raise NotFound(
                "no gate is required by this pattern",
                where=pattern,
                hint=f"the patterns are {few(list(known))}" if known else "no ref needs a gate",
            )
        if gates:
            known[pattern] = tuple(gates)
        self._catalog.configure({"required_gates": known})
        return self.required_gates_by_pattern()

    def unjudged(self) -> dict[str, tuple[str, ...]]:
        """Return branches and tags whose snapshots lack gates that guard them, with these gates.

        They stay where they are, but nothing pushes them.
        """
        from mstore.store.gates import unjudged

        return unjudged(self._catalog)

    def trust_verdicts(self, signers: Mapping[bytes, str]) -> None:
        """Let a verdict that one of these keys signed pass for one that was made here.

        signers: as for `verify`.  It holds for this object only.
        """
        from mstore.judging.gate import is_vouched

        self._catalog.vouched = partial(is_vouched, self._catalog, trusted=signers)

    def define_gates(self, defined: Callable[[str], Gate | None]) -> None:
        """Let required gates count only verdicts of these definitions.

        defined: returns the gate of a name, None if any verdict of that name counts. A verdict by
        another command, other scores or other limits counts no more then; one that a trusted signer
        vouches for does. It holds for this object only.
        """
        from mstore.judging.gate import is_current

        self._catalog.is_current_verdict = partial(is_current, self._catalog, defined=defined)

    def judged(self, revision: Revision) -> list[VerdictRow]:
        """Return what this store's own runs of gates say of a snapshot, by gate.

        Raises NotFound, BadName.
        """
        from mstore.judging.gate import verdicts_on

        return verdicts_on(self._catalog, self._catalog.resolve(revision))

    def candidates(self) -> list[CandidateReport]:
        """Return the candidates that no branch shows yet, with their verdicts, newest last."""
        from mstore.judging.gate import candidates

        return candidates(self._catalog)

    def metrics(self, *names: Revision) -> list[MetricsRow]:
        """Return how snapshots were made, and the scores of their evaluations.

        names: revisions, or patterns of refs; without any, all branches and tags that have a score.

        Raises NotFound, BadName.
        """
        from mstore.judging.metrics import metrics

        known = self._catalog.refs()
        if not names:
            listed = [one for one, ref in known.items() if ref.kind not in refs.DIRECTORIES]
            named = [(name, known[name].snapshot_id()) for name in sorted(listed)]
            return [row for row in metrics(self._catalog, named) if row.scores]
        chosen = refs.chosen(known, [str(one) for one in names])
        return metrics(self._catalog, [(name, self._catalog.resolve(name)) for name in chosen])
