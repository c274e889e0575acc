"""Calls that judge snapshots by running commands on them.

Part of `mstore.api.Store`, which combines all parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mstore.api.open_store import OpenStore, thread_count
from mstore.store import refs
from mstore.terms.ids import Revision, SnapshotId

if TYPE_CHECKING:
    from mstore.judging.evaluation import EvaluationReport, Show
    from mstore.judging.metrics import MetricsRow


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

        Raises CommandFailed (it does not start, fails, hangs, leaves no score, or changes the
        files; then nothing is noted), NotFound, BadRequest, Conflict, StorageFailed, Unavailable.
        """
        from mstore.judging.evaluation import Command, evaluate

        wanted = Command.of(command, scores, name, timeout)
        snapshot = self._catalog.resolve(revision)
        return evaluate(self._catalog, snapshot, wanted, show or self._checked_out, output)

    def _checked_out(self, snapshot: SnapshotId) -> AbstractContextManager[Path]:
        """Show a snapshot by a checkout that goes with the block."""
        from mstore.judging.evaluation import checked_out
        from mstore.snapshots.checkout import checkout

        return checked_out(
            partial(
                checkout,
                self._catalog,
                self._whole(snapshot),
                threads=thread_count(None),
                computing=self._computing,
            )
        )

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
