"""The common part of commands that judge snapshots: their options, and how a command sees files."""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

from msgspec.structs import replace

from mstore_cli import user_config
from mstore_cli.errors import REFUSED, Ended, UsageError, remarks
from mstore_cli.options import CHECKS, Argument, Option
from mstore_cli.output import Mode, Screen
from mstore_cli.session import Session, own_endpoints
from mstore_cli.sizes import counted

if TYPE_CHECKING:
    from mstore import Store
    from mstore.api.reports import (
        AddReport,
        CheckedScore,
        GateReport,
        MergeReport,
        VerdictReport,
    )
    from mstore.judging.evaluation import Show
    from mstore.judging.gate import Gate
    from mstore.snapshots.signing import SigningKey
    from mstore.terms.ids import SnapshotId
    from mstore.terms.report import Report

_STDERR = 2
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)")


def parse_duration(text: str) -> str:
    """Refuse what is no duration, for an option; the text stays as it is."""
    seconds_of(text)
    return text


def seconds_of(text: str) -> float:
    """Return the seconds of a duration: 90, 90s, 30m, 2h or 1d.  Raises ValueError."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ValueError(f"a time such as 90s, 30m or 2h, not {text!r}")
    return float(found[1]) * _SECONDS[found[2]]


Words = Annotated[
    tuple[str, ...],
    Argument(
        metavar="-- COMMAND",
        help="The program and its arguments, after `--`; {} is the snapshot's directory.",
        may_be_empty=True,
    ),
]
Timeout = Annotated[
    str | None,
    Option(
        "--timeout",
        metavar="TIME",
        type=parse_duration,
        help="End the command after this time: 90s, 30m, 2h [default: 1d].",
    ),
]
Checkout = Annotated[
    bool,
    Option(
        "--checkout",
        help="Show the snapshot by a checkout in $TMPDIR, not by a mount; also done where there "
        "is no FUSE.",
    ),
]


@contextmanager
def showing(session: Session, *, checkout: bool) -> Iterator[Show | None]:
    """Give what shows many snapshots to commands: mounts that stay for the time of the block.

    None for checkouts.  A block of a virtual merge is kept on disk when it is computed again.
    """
    from mstore_fuse.mounts import Mounted

    if not _can_mount(checkout=checkout):
        yield None
        return
    endpoints, cache_size = own_endpoints(), user_config.cache_size()
    with Mounted(
        session.store_path(), endpoints=endpoints, cache_size=cache_size, keep_again=True
    ) as mounted:
        yield mounted.show


def show_of(session: Session, *, checkout: bool) -> Show | None:
    """Return what shows snapshots to commands: a mount for each, or None for a checkout."""
    from mstore_fuse.mounts import shown

    if not _can_mount(checkout=checkout):
        return None
    store = session.store_path()
    endpoints, cache_size = own_endpoints(), user_config.cache_size()

    def show(snapshot: SnapshotId, scratch: Path) -> AbstractContextManager[Path]:
        place = scratch / "model"
        return shown(
            store,
            str(snapshot),
            place,
            endpoints=endpoints,
            cache_size=cache_size,
        )

    return show


def _can_mount(*, checkout: bool) -> bool:
    """Return whether commands see mounts.  Says so where there is no FUSE.

    checkout: whether the user wants checkouts.
    """
    from mstore.terms.errors import Unavailable
    from mstore_fuse.fuse_driver import require_fuse

    if checkout:
        return False
    try:
        require_fuse()
    except Unavailable as missing:
        remarks([f"checked out, as nothing can be mounted: {missing.what}"])
        return False
    return True


def output_of(session: Session) -> int | None:
    """Return the descriptor that gets what a command prints: standard error, if people read."""
    if session.output.mode is not Mode.HUMAN:
        return None
    try:
        os.fstat(_STDERR)
    except OSError:
        return None
    return _STDERR


# -- gates ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Checks:
    """The options that say what a snapshot must pass."""

    check: Annotated[
        tuple[str, ...],
        Option(
            "--check",
            metavar="NAME|COMMAND",
            help="A gate of your settings, or a command, split into words as a shell does; {} is "
            "the snapshot's directory. Repeatable.",
            group=CHECKS,
        ),
    ] = ()
    least: Annotated[
        tuple[str, ...],
        Option(
            "--min",
            metavar="SCORE=LIMIT",
            help="The least score: acc=0.61, 'acc>=REF-0.01' or, at most, 'loss<=2'; REF is also "
            "base or previous, the parent of that role. Repeatable.",
            group=CHECKS,
        ),
    ] = ()
    check_score: Annotated[
        tuple[str, ...],
        Option(
            "--check-score",
            metavar="[NAME=]FILE:POINTER",
            help="Where a score is, as for `mstore eval` [default: its name, in the newest file of "
            "JSON]. Repeatable.",
            group=CHECKS,
        ),
    ] = ()
    check_timeout: Annotated[
        str | None,
        Option(
            "--check-timeout",
            metavar="TIME",
            type=parse_duration,
            help="End the command after this time: 90s, 30m, 2h [default: 1d].",
            group=CHECKS,
        ),
    ] = None
    check_checkout: Annotated[
        bool,
        Option(
            "--check-checkout",
            help="Show the snapshot by a checkout, not by a mount.",
            group=CHECKS,
        ),
    ] = False

    def gates(self, store: Store, *names: str) -> list[Gate]:
        """Return the gates that are asked for, and those that the store requires for these refs.

        Raises BadRequest, Conflict where root would run a command for another user's store.
        """
        commands = [text for text in self.check if not _is_name(text)]
        if (self.least or self.check_score or self.check_timeout) and len(commands) != 1:
            self._refuse_limits(commands)
        for words in map(_words, commands):
            if not any("{}" in word or "MSTORE_DIR" in word for word in words):
                text = f"--check: nothing in {shlex.join(words)} names the snapshot"
                remarks([f"{text}: {{}} is its directory, and so is $MSTORE_DIR"])
        found = {one.name: one for one in map(self._gate, self.check)}
        for name in names:
            for gate in store.required_gates(name):
                if gate not in found:
                    _require_owned(store)
                    found[gate] = _known(gate, f"{name} is guarded by the gate {gate}")
        return list(found.values())

    def _refuse_limits(self, commands: Sequence[str]) -> NoReturn:
        """Say where limits go that cannot be given to one command."""
        options = "--min, --check-score and --check-timeout"
        if commands:
            raise UsageError(
                f"{options} are for one command, and --check gives {len(commands)}",
                hint=f"give each a table [gates.NAME] with its limits in {user_config.path()}, and "
                "name them: --check NAME",
            )
        if self.check:
            name = self.check[0]
            raise UsageError(
                f"{options} are for a command, and {name} is a gate of your settings",
                hint=f"write the limits into [gates.{name}] of {user_config.path()}: "
                'min = ["acc>=0.6"]',
            )
        raise UsageError(f"{options} are for a command", hint="add --check 'COMMAND {}'")

    def _gate(self, text: str) -> Gate:
        from mstore.judging.gate import Gate

        if _is_name(text):
            return _known(text, f"no gate is called {text}")
        timeout = self.check_timeout
        return Gate.of(
            _words(text),
            scores=self.check_score,
            minimums=self.least,
            timeout=None if timeout is None else seconds_of(timeout),
        )


def _words(text: str) -> list[str]:
    """Return the words of a command.  Raises UsageError."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--check: {str(error).lower()}: {text!r}") from None


def _is_name(text: str) -> bool:
    """Return whether --check names a gate of the user's settings, or one that is missing there."""
    return text in user_config.gates() or not re.search(r"[\s{}/]", text)


def gate_of_settings(name: str) -> Gate | None:
    """Return a gate of the user's settings; None if there is none.  Raises BadRequest."""
    from mstore.judging.gate import Gate
    from mstore.terms.errors import BadRequest

    told = user_config.gates().get(name)
    if told is None:
        return None
    try:
        timeout = None if told.timeout is None else seconds_of(told.timeout)
    except ValueError as error:
        raise BadRequest(f"timeout: {error}", where=f"gates.{name}") from None
    return Gate.of(told.command, name=name, scores=told.score, minimums=told.min, timeout=timeout)


def _known(name: str, why: str) -> Gate:
    """Return a gate of the user's settings.  Raises BadRequest, also if there is none."""
    from mstore.terms.errors import BadRequest

    found = gate_of_settings(name)
    if found is None:
        raise BadRequest(
            f"{why}, and your settings say no command for it",
            where=name,
            hint=f"add to {user_config.path()}:\n[gates.{name}]\n"
            'command = "python /path/to/score.py {}"\nmin = ["acc>=base-0.01"]',
        )
    return found


def _require_owned(store: Store) -> None:
    """Raise Conflict where root would run a command because another user's store names it."""
    from mstore import fs
    from mstore.terms.errors import Conflict

    stranger = next((one for one in fs.owners(store.path) if one not in {0}), None)
    if os.geteuid() == 0 and stranger is not None:
        raise Conflict(
            "root runs no command that the store of another user asks for",
            where=str(store.path),
            hint=f"run mstore as {fs.user_name(stranger)}",
        )


KeepFailed = Annotated[
    bool,
    Option(
        "--keep-failed",
        help="Keep a candidate that did not pass: `mstore gate` lists it.",
        group=CHECKS,
    ),
]
Made = TypeVar("Made", "MergeReport", "AddReport")


def guarded(
    session: Session,
    store: Store,
    gates: Sequence[Gate],
    checks: Checks,
    commit: Callable[[str | None], Made],
    was: Callable[[Made], SnapshotId | None],
    *,
    keep_failed: bool,
) -> tuple[Made, GateReport | None]:
    """Commit under a candidate, judge it, and move the branch if it passes.

    commit: publishes, under the candidate of this run if one is named; it shows its own progress,
    which must not be in the way of what the command prints. was: where the branch was,
    as the report of that says. Without gates the branch moves at once.
    """
    if not gates:
        return commit(None), None
    # What can be refused is, before anything is computed.
    _require_references(store, gates)
    show, key = show_of(session, checkout=checks.check_checkout), own_key()
    made = commit(f"gate-{secrets.token_hex(4)}")
    outcome = store.move_if_passed(
        made.name,
        was(made),
        gates,
        keep_failed=keep_failed,
        show=show,
        key=key,
        output=output_of(session),
    )
    return replace(made, name=outcome.name if outcome.moved else made.name), outcome


def _require_references(store: Store, gates: Sequence[Gate]) -> None:
    """Raise NotFound for a limit by a snapshot that is not there; parents are known later."""
    from mstore.judging.gate import ROLES

    for gate in gates:
        for one in gate.minimums:
            if one.reference and one.reference not in ROLES:
                store.show(one.reference)


def judged(
    session: Session, store: Store, revision: str, gates: Sequence[Gate], checks: Checks
) -> tuple[VerdictReport, ...]:
    """Run gates on a snapshot, with this run's output, and the user's key."""
    return store.judge(
        revision,
        gates,
        show=show_of(session, checkout=checks.check_checkout),
        key=own_key(),
        output=output_of(session),
    )


def own_key() -> SigningKey | None:
    """Return the key of the user's settings that signs verdicts.  Raises as `load_key`."""
    file = str(user_config.read()["signing_key"])
    if not file:
        return None
    from mstore.snapshots.signing import load_key
    from mstore_cli.signers import ask_passphrase

    return load_key(Path(file), lambda: ask_passphrase(Path(file)))


def draw_verdicts(
    screen: Screen, verdicts: Sequence[VerdictReport], ref: str | None = None
) -> None:
    """Print what gates said, each with the ref where there may be several."""
    for verdict in verdicts:
        said = "passed" if verdict.passed else "did not pass"
        if ref is not None:
            said = f"{ref} {said}"
        style = "green" if verdict.passed else "red"
        screen.line(f"{said} {verdict.gate}", style=style)
        if verdict.reason is not None:
            screen.line(f"  {verdict.reason}")
        for one in verdict.comparisons:
            screen.line(f"  {described(one)}")


def described(one: CheckedScore) -> str:
    """Describe one score and its limit in a line."""
    text = f"{one.score} {one.value:.6g}"
    if one.limit is None:
        return f"{text}: there is no {one.reference} snapshot yet, so it has no limit"
    text += f" is {'' if one.held else 'not '}{one.sign} {one.limit:.6g}"
    if one.reference is not None:
        text += f"; {one.reference} has {one.reference_value:.6g}"
    if one.distinguishable is not None:
        word = "distinguishable" if one.distinguishable else "not distinguishable"
        text += f", {word} (p = {one.p_value:.2g}, {counted(one.samples or 0, 'sample')})"
    return text


def with_verdicts(report: Report, outcome: GateReport | None) -> dict[str, object]:
    """Return the JSON of a report with what gates said."""
    from mstore.terms.report import fields

    verdicts = () if outcome is None else outcome.verdicts
    moved = outcome is None or outcome.moved
    kept = outcome is not None and outcome.kept
    return {**fields(report), "verdicts": verdicts, "moved": moved, "kept": kept}


def ids_of(snapshot: SnapshotId, outcome: GateReport | None) -> list[SnapshotId]:
    """Return the snapshot to print with --quiet: none, for a candidate that was dropped."""
    return [snapshot] if outcome is None or outcome.moved or outcome.kept else []


def dropped_told(outcome: GateReport | None) -> str:
    """Return what to add to the line of a snapshot whose candidate was dropped."""
    is_dropped = outcome is not None and not (outcome.moved or outcome.kept)
    return ", which is dropped" if is_dropped else ""


def end(outcome: GateReport | None) -> None:
    """End with the status that says no, if a gate did."""
    if outcome is not None and not outcome.moved:
        raise Ended(REFUSED)


def draw_outcome(screen: Screen, outcome: GateReport | None) -> None:
    """Print verdicts, and what became of a candidate that did not pass."""
    if outcome is None:
        return
    draw_verdicts(screen, outcome.verdicts)
    if outcome.moved:
        return
    became = "was not made" if outcome.was is None else "stays where it was"
    screen.line(f"{outcome.name} {became}", style="red")
    if outcome.kept:
        screen.command("to drop the candidate", f"mstore gate drop {outcome.candidate}")
