"""`mstore merge`: run a plan and publish the result."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec.structs import replace

from mstore_cli.command import Mistakes, command
from mstore_cli.errors import Interrupted, UsageError, remarks
from mstore_cli.judging import (
    Checks,
    KeepFailed,
    draw_outcome,
    dropped_told,
    end,
    guarded,
    ids_of,
    with_verdicts,
)
from mstore_cli.merging import (
    MISTAKEN,
    RECIPE_HINT,
    RECIPES,
    AllowNonfinite,
    AllowNoop,
    Cluster,
    ClusterPush,
    ClusterRemote,
    Wanted,
    as_options,
    hinting_at_directories,
    missing_of,
    workers_told,
)
from mstore_cli.options import RESULT, WHAT, Codec, Message, Option, Threads
from mstore_cli.output import Screen, short
from mstore_cli.plan_output import draw_remarks, error_fields, format_bound, of_full
from mstore_cli.session import Session
from mstore_cli.sizes import counted, format_seconds, format_size, parse_size

if TYPE_CHECKING:
    from mstore import MergeRequest, Store
    from mstore.merge.running.commit import MergeReport
    from mstore.terms.ids import SnapshotId

HELP = "mstore merge --help"
_LACKS = missing_of("--plan", "--recipe")
PLAN_HINT = "mstore plan --help"


@command(
    example="mstore merge --base llama/base --expert llama/math --expert llama/code=0.5 "
    "--method ties --budget 50% --name llama/merged",
    failure="an error; nothing was published\n"
    "  3  the result did not pass a check; the branch is where it was",
    mistakes=Mistakes(
        {
            **MISTAKEN,
            "--abort": "nothing to abort: a merge publishes all or nothing, and Ctrl-C stops it",
            "--continue": "the same command continues an interrupted merge",
        },
        RECIPES,
        f"mstore merge {RECIPE_HINT}",
        as_options,
        _LACKS,
    ),
)
def merge(
    session: Session,
    *,
    name: Annotated[
        str,
        Option(
            "--name",
            metavar="REF",
            help="The branch that will point at the result.",
            group=RESULT,
        ),
    ],
    candidate: Annotated[
        str | None,
        Option(
            "--candidate",
            metavar="RUN",
            help="Leave the branch; name the result candidates/RUN/REF, to test it first.",
            group=RESULT,
        ),
    ] = None,
    plan: Annotated[
        str | None,
        Option(
            "--plan",
            metavar="ID|FILE|REF",
            help="Run this plan: its id, the beginning of the id, a file made by `plan -o`, or "
            "the plan of this merged snapshot.",
            group=WHAT,
        ),
    ] = None,
    wanted: Wanted,
    checks: Checks,
    keep_failed: KeepFailed = False,
    allow_noop: AllowNoop = False,
    allow_nonfinite: AllowNonfinite = False,
    virtual: Annotated[
        bool,
        Option(
            "--virtual",
            help="Commit only the plan: read and write no blocks now, compute them when read.",
            group=RESULT,
        ),
    ] = False,
    no_memo: Annotated[
        bool,
        Option(
            "--no-memo",
            help="Compute everything, even outputs of earlier merges, and remember nothing.",
        ),
    ] = False,
    memory: Annotated[
        str | None,
        Option(
            "--memory", metavar="SIZE", help="The most anonymous memory to use [default: 512MiB]."
        ),
    ] = None,
    codec: Codec = None,
    cluster: Cluster = None,
    remote: ClusterRemote = None,
    push: ClusterPush = False,
    message: Message = "",
    threads: Threads = None,
) -> None:
    """Merge experts into a base, by a new plan or a stored one.

    An expert is a fine-tune of the base, or a LoRA adapter of it. Give --base, --expert and
    --method, or a recipe with --recipe, or --plan. A merge
    never reads more from experts than its plan says. Models of a recipe are refs of the store, or
    directories, which are added first. Of several recipes in one file, that without a name is the
    result; each other is merged as REF.NAME.

    With --check, the result becomes a candidate first: the command sees its files, and the branch
    moves only if it ends with 0 and every --min holds. Else the branch stays, and the exit status
    is 3.
    """
    request: MergeRequest | None = None
    if plan is None:
        wanted.require(_LACKS, HELP)
        request = wanted.limits()
    elif wanted.is_given():
        raise UsageError("--plan already says what to merge; leave out the plan options", hint=HELP)
    bound = None if memory is None else parse_size(memory, option="--memory")
    with session.open() as store:
        # Planning may take long, and stores the plan.
        store.require_branch(name)
        gates = [] if candidate is not None else checks.gates(store, name)
        if checks.check and (candidate is not None or push):
            raise UsageError(
                "--check goes without --candidate and --push: it makes a candidate, and moves the "
                "branch of this store",
                hint=f"mstore merge ... --name {name} --check ..., then mstore push",
            )
        before = {} if candidate is None else store.ref_ids()
        if request is not None:
            steps = wanted.steps()
            if cluster is not None and len(steps) > 1:
                raise UsageError(
                    "a recipe of several documents is merged on this machine",
                    hint="leave out --cluster, or give one document at a time",
                )
            earlier: dict[str, str] = {}
            *needed, (last, _) = steps.items()
            for number, step in needed:
                own = wanted.request(
                    *(session, store, request),
                    step=number,
                    earlier=earlier,
                    allow_nonfinite=allow_nonfinite,
                )
                with session.planning(store) as tick:
                    made = store.plan(own, keep=True, threads=threads, progress=tick)
                    part = store.merge(
                        made,
                        name=f"{name}.{step}",
                        candidate=candidate,
                        allow_nonfinite=allow_nonfinite,
                        threads=threads,
                        memo=not no_memo,
                        memory=bound,
                        codec=codec,
                        progress=tick,
                    )
                    earlier[str(step)] = part.name
                remarks([f"merged {step} as {earlier[str(step)]}"])
            # What it adds has a progress bar of its own.
            request = wanted.request(
                *(session, store, request),
                result=name,
                step=last,
                earlier=earlier,
                allow_nonfinite=allow_nonfinite,
            )
        planned = None
        with session.planning(store) as tick:
            if request is not None:
                with hinting_at_directories(request):
                    planned = store.plan(
                        request, allow_noop=allow_noop, keep=True, threads=threads, progress=tick
                    )
        chosen = planned or _known_plan(store, plan or "", name)

        def commit(run: str | None) -> MergeReport:
            with session.progress() as tick:
                return store.merge(
                    chosen,
                    name=name,
                    candidate=candidate if run is None else run,
                    message=message,
                    virtual=virtual,
                    allow_noop=allow_noop,
                    allow_nonfinite=allow_nonfinite,
                    threads=threads,
                    memo=not no_memo,
                    memory=bound,
                    codec=codec,
                    cluster=cluster,
                    remote=remote,
                    push=push,
                    progress=tick,
                )

        try:
            report, outcome = guarded(
                *(session, store, gates, checks, commit),
                was=lambda made: made.was,
                keep_failed=keep_failed,
            )
            session.settled()
            is_here = not push or name in store.ref_ids()
        except KeyboardInterrupt as stop:
            raise Interrupted("the same command goes on from what is finished") from stop
        if planned is not None:
            report = replace(report, seconds=planned.seconds + report.seconds)

    def human(screen: Screen) -> None:
        if report.new_snapshot:
            done = f"merged {report.name} {short(report.snapshot)}"
            done += dropped_told(outcome)
            if report.virtual:
                done += screen.typed(f", virtual: mstore materialize {report.name} stores it")
            screen.line(done, style="green")
            if report.pushed_to is not None:
                screen.line(f"{report.pushed_to} has it as {report.name}")
        else:
            screen.line(f"nothing new: {report.name} holds this merge already")
            if message:
                screen.line("remark: the message was not kept, as there is no new snapshot")
        # A mixture, or an expert of one, takes tensors as they are.
        is_mixture = report.method == "moe"
        screen.fields(
            [
                ("was", short(report.was) if report.was and report.new_snapshot else None),
                ("replaces", _replaced(before.get(report.name), report)),
                ("plan", short(report.plan)),
                ("manifest", short(report.manifest)),
                ("method", report.method),
                *([] if is_mixture else _reads(report)),
                ("from remotes", _from_remotes(report)),
                ("workers", workers_told(report.workers)),
                ("written", format_size(report.bytes_written)),
                ("blocks", f"{report.blocks_total}: {report.blocks_reused} reused"),
                *([] if is_mixture else error_fields(report)),
                ("time", format_seconds(report.seconds)),
            ]
        )
        draw_remarks(screen, report.remarks, report.warnings)
        draw_outcome(screen, outcome)
        if not is_here:
            screen.command("to have it here", f"mstore pull {report.pushed_to} {name}")
        if candidate is not None:
            was = short(report.was) if report.was else "''"
            move = f"mstore reset {name} {report.name} --expect {was}"
            screen.command("to move the branch", move)
            screen.command("to drop the candidate", f"mstore rm {report.name}")

    document = with_verdicts(report, outcome)
    session.output.emit(document, ids=ids_of(report.snapshot, outcome), human=human)
    session.warn_if_quiet(warning.text for warning in report.warnings)
    end(outcome)


def _known_plan(store: Store, id_or_file: str, name: str) -> str:
    """Return the id of a plan named by id, prefix or file.  A file wins, and is imported first.

    name: the branch of the result.
    """
    path = Path(id_or_file)
    if path.suffix in RECIPES:
        hint = f"mstore merge --recipe {shlex.quote(id_or_file)} --name {shlex.quote(name)}"
        raise UsageError(RECIPES[path.suffix], hint=hint)
    if not path.is_file():
        is_ref = any(ref.name == id_or_file for ref in store.refs())
        if set(id_or_file) <= set("0123456789abcdef") and not is_ref:
            return id_or_file
        return _plan_of(store, id_or_file)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        from mstore.terms.errors import BadRequest

        raise BadRequest("not a plan: not a text file", where=str(path), hint=PLAN_HINT) from error
    return str(store.import_plan(text).plan)


def _plan_of(store: Store, name: str) -> str:
    """Return the id of the plan that made a snapshot."""
    from mstore.terms.errors import BadName, BadRequest, NotFound

    try:
        report = store.show(name)
    except (NotFound, BadName) as error:
        what = "neither a plan's id, nor a file, nor a merged snapshot"
        raise NotFound(what, where=name, hint="mstore plans lists the plans") from error
    if report.plan is None:
        raise BadRequest("no merge made it, so it has no plan", where=name, hint=PLAN_HINT)
    return str(report.plan)


def _replaced(before: SnapshotId | None, report: MergeReport) -> str | None:
    """Return what the candidate's name meant before."""
    if before is None or before == report.snapshot:
        return None
    return f"{short(before)}, the candidate before this one"


def _reads(report: MergeReport) -> Iterable[tuple[str, str | None]]:
    yield "budget", _optional_size(report.budget_bytes)
    yield "max error", None if report.max_error is None else format_bound(report.max_error)
    yield "experts read", of_full(report.expert_bytes_read, report.full_expert_bytes)
    yield "  remembered", _some_size(report.memo_expert_bytes)
    yield "  resumed", _some_size(report.resumed_expert_bytes)
    yield "analysis read", format_size(report.analyze_bytes_read)
    yield "base read", format_size(report.base_bytes_read)


def _optional_size(size: int | None) -> str:
    return "none" if size is None else format_size(size)


def _some_size(size: int) -> str | None:
    """Format a size; None, which prints no line, for zero."""
    return format_size(size) if size else None


def _from_remotes(report: MergeReport) -> str | None:
    if not report.remote_requests:
        return None
    return f"{format_size(report.remote_bytes)} in {counted(report.remote_requests, 'request')}"
