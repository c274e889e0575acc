"""Calls that search: for what broke a model.

Part of `mstore.api.Store`, which combines all parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mstore.api.judging import Judging
from mstore.terms.errors import BadRequest
from mstore.terms.ids import Revision, SnapshotId

if TYPE_CHECKING:
    from mstore.judging.evaluation import Show
    from mstore.search.bisect import Bisection, BisectLog, BisectReport


class Searching(Judging):
    """Calls that search: for what broke a model."""

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
        by = [*(("experts",) if experts else ()), *(("layers",) if layers else ())]
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
        command: Sequence[str],
        *,
        timeout: float | None = None,
        show: Show | None = None,
        output: int | None = None,
        tell: Callable[[BisectReport, int], None] | None = None,
    ) -> BisectReport:
        """Run a command on what is to be tried, until the end.

        command, timeout, show, output: as for `evaluate`.  Its exit status says what it found, as
        for `git bisect run`: 0 good, 125 cannot be judged, others up to 127 bad.  If 126 or 127 is
        the first, a good snapshot is tried, too, and must give another.
        tell: called after each try, with the report that named it, and the exit status.

        Raises CommandFailed (any other status, a signal, or it hangs; what was marked stays),
        WrongCommand, NotFound, BadRequest, Conflict (another process goes on with it).
        """
        from mstore.judging.evaluation import Command, status_on

        wanted = Command.of(command, timeout=timeout)

        def try_(snapshot: SnapshotId) -> int:
            return status_on(wanted, snapshot, show or self._checked_out, output)

        return self._bisection().run(try_, tell or (lambda report, status: None))

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
