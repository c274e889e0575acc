"""`mstore add`: store checkpoints under names."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mstore.checkpoint.paths import is_safetensors, name_for
from mstore.terms.phrases import few
from mstore_cli import completion
from mstore_cli.command import command
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
from mstore_cli.options import (
    Argument,
    Codec,
    Exclude,
    Include,
    Message,
    NoDefaultExcludes,
    OnlyCompared,
    Option,
    SkipCompared,
    Threads,
)
from mstore_cli.output import Column, Screen, short
from mstore_cli.session import Session
from mstore_cli.sizes import counted, format_seconds, format_share, format_size, parse_size

if TYPE_CHECKING:
    from mstore import Store
    from mstore.api.reports import AddReport, GateReport, ParentReport
    from mstore.checkpoint.conversion import ConversionLimits
    from mstore.checkpoint.directory import CheckpointLimits
    from mstore.terms.errors import NotFound
    from mstore.terms.phrases import Text

NO_BASE = "none"
NAMES_SHOWN = 4
SHOWN_WHOLE = 3
"""How many models are shown with all that is known of them; more get a line each."""

COLUMNS = (
    Column(""),
    Column("NAME", style="green"),
    Column("SNAPSHOT", style="yellow"),
    Column("SIZE", right=True),
    Column("WRITTEN", right=True),
    Column("BASE"),
)


@command(
    example="mstore add ./llama-base ./llama-math --name-prefix llama/",
    failure="an error; checkpoints before the failed one are stored\n"
    "  3  a checkpoint did not pass a check; its branch is where it was",
)
def add(
    session: Session,
    checks: Checks,
    paths: Annotated[
        tuple[Path, ...],
        Argument(
            metavar="PATH",
            help="Checkpoint directories, .safetensors files, models of the Hugging Face cache "
            "(their directories, or ORG/NAME[@REVISION]), models of the Hugging Face Hub: "
            "hf://ORG/NAME[@REVISION][/DIRECTORY], or artifacts in registries: "
            "oci://HOST/REPOSITORY[:TAG|@DIGEST].",
        ),
    ],
    name: Annotated[
        tuple[str, ...],
        Option(
            "--name",
            metavar="REF",
            help="The branch that will point at it; one per PATH, in the same order. A "
            ".safetensors file has its own name [default], a directory needs one.",
        ),
    ] = (),
    name_prefix: Annotated[
        str | None,
        Option(
            "--name-prefix", metavar="TEXT", help="Name each branch TEXT plus the name of its PATH."
        ),
    ] = None,
    base: Annotated[
        str | None,
        Option(
            "--base",
            metavar="REF",
            help="The model that it was fine-tuned from: compare block by block, keep statistics. "
            "It may be one that this command adds: that one is stored first. "
            f"[default: the nearest stored model, if one is near; {NO_BASE!r}: no base]",
            shell_complete=completion.refs,
        ),
    ] = None,
    with_base: Annotated[
        bool,
        Option(
            "--with-base",
            help="If the card of a model of the Hub names a base that the store lacks, add that "
            "first.",
        ),
    ] = False,
    kind: Annotated[
        str,
        Option(
            "--kind",
            metavar="full|delta",
            help="delta: the tensors are differences to --base; base + difference is stored.",
        ),
    ] = "full",
    only: OnlyCompared = (),
    skip: SkipCompared = (),
    include: Include = (),
    exclude: Exclude = (),
    no_default_excludes: NoDefaultExcludes = False,
    codec: Codec = None,
    convert: Annotated[
        bool,
        Option(
            "--convert",
            help="Store pickled weights (.bin, .pt, .pth, .ckpt) as safetensors; needs torch.",
        ),
    ] = False,
    max_sparse: Annotated[
        str | None,
        Option(
            "--max-sparse",
            metavar="SIZE",
            help="The most bytes of files that are mostly holes, all together "
            "[default: the free space of the store's disk].",
        ),
    ] = None,
    message: Message = "",
    keep_failed: KeepFailed = False,
    threads: Threads = None,
) -> None:
    """Store checkpoints, byte for byte, and name them.

    Blocks that are already in the store take no space. Adding the same bytes again changes nothing,
    but restores blocks that the store had lost. Each checkpoint is stored completely or not at
    all. If one checkpoint declares another as its base, the base is stored first.

    Some files are left out because they are not part of the model: .git, the Hub's download cache,
    and training states (optimizer.pt, scheduler.pt, training_args.bin, global_step*/ and others).
    To leave out more, use --exclude or a file .mstoreignore in the directory; the pattern '!NAME'
    keeps a file.

    A model of the Hub or of a registry is stored file by file as it arrives; run an interrupted
    command again, and it goes on with the next file. Its base is looked for by the name in its
    card.

    With --kind delta, PATH holds what to add to the tensors of --base: the sum is stored as an
    expert like any other, and a tensor that PATH lacks is the base's.

    With --check, the branch moves only if the command passes; see `mstore merge`.
    """
    if with_base and base is not None:
        raise UsageError("--with-base and --base exclude each other")
    found = [checkpoint(path) for path in paths]
    named = _named(paths, found, name, name_prefix)
    limits = None if max_sparse is None else _limits(max_sparse)
    from mstore.terms.errors import MstoreError

    reports: list[AddReport] = []
    outcomes: list[GateReport | None] = []
    with session.open() as store:
        if checks.check and len(named) > 1:
            raise UsageError("--check is for one checkpoint", hint="one mstore add for each PATH")
        if with_base:
            named = _with_bases(store, named, name_prefix or "")
        own = _own_base(store, base, named)
        for path, ref in _ordered(named, own):
            is_base = own == ref
            commit = partial(
                store.add,
                path,
                name=ref,
                base=None if is_base or base == NO_BASE else own or base,
                detect_base=is_base or base is None,
                kind="full" if is_base else kind,
                only=() if is_base else only,
                skip=() if is_base else skip,
                include=include,
                exclude=exclude,
                default_excludes=not no_default_excludes,
                codec=codec,
                convert=_conversion() if convert else None,
                limits=limits,
                message=message,
                threads=threads,
            )

            def added(run: str | None, commit: Callable[..., AddReport] = commit) -> AddReport:
                with session.progress() as tick:
                    return commit(candidate=run, progress=tick)

            try:
                report, outcome = guarded(
                    *(session, store, checks.gates(store, ref), checks, added),
                    was=lambda made: made.previous,
                    keep_failed=keep_failed,
                )
                reports.append(report)
                outcomes.append(outcome)
            except MstoreError as error:
                error.advise(_with_stored(error.texts[2], path, reports, len(named)))
                raise
            except KeyboardInterrupt as stop:
                if not reports:
                    raise
                names = ", ".join(report.name for report in reports)
                raise Interrupted(f"stored before that: {names}") from stop
        session.settled()

    session.warn_if_quiet(text for report in reports for text in report.warnings)

    def human(screen: Screen) -> None:
        _show(screen, reports, outcomes)
        for outcome in outcomes:
            draw_outcome(screen, outcome)

    made = list(zip(reports, outcomes, strict=True))
    whole = [with_verdicts(*one) for one in made]
    ids = [id for report, outcome in made for id in ids_of(report.snapshot, outcome)]
    document = whole[0] if len(named) == 1 else {"added": whole}
    session.output.emit(document, ids=ids, human=human)
    for outcome in outcomes:
        end(outcome)


def _conversion() -> ConversionLimits:
    from mstore.checkpoint.conversion import ConversionLimits

    return ConversionLimits()


def _limits(max_sparse: str) -> CheckpointLimits:
    from mstore.checkpoint.directory import CheckpointLimits

    return CheckpointLimits(max_sparse_bytes=parse_size(max_sparse, option="--max-sparse"))


def _with_bases(store: Store, named: list[tuple[Path, str]], prefix: str) -> list[tuple[Path, str]]:
    """Return the checkpoints with the bases that their cards name and the store lacks, first."""
    from mstore.origins.places import is_address

    bases: dict[Path, str] = {}
    for path, name in named:
        if not is_address(str(path)):
            continue
        address = store.missing_base(str(path))
        if address is None:
            remarks([f"{path}: its card names no base, or the store has it"])
            continue
        base = Path(address)
        ref = f"{prefix}{_given_name(base)}"
        if ref in store.ref_ids() or ref == name:
            raise UsageError(
                f"its base {address} would be called {ref}, and that name is taken",
                hint=f"mstore add {shlex.quote(address)} --name OTHER",
            )
        bases[base] = ref
    return [*bases.items(), *(one for one in named if one[0] not in bases)]


def _given_name(path: Path) -> str:
    """Return the usual name of what is added: of a directory, a file, or what an address names."""
    from mstore.checkpoint.tree import given_name
    from mstore.origins import places

    text = str(path)
    return places.parse(text).name if places.is_address(text) else given_name(path)


def _own_base(store: Store, base: str | None, named: list[tuple[Path, str]]) -> str | None:
    """Return the new branch that `base` means, by its name or its path; None if none."""
    if base is None or len(named) == 1:
        return None
    if any(name == base for _, name in named):
        return base
    called = [name for path, name in named if base in (str(path), _given_name(path))]
    return called[0] if len(called) == 1 and base not in store.ref_ids() else None


def _ordered(named: list[tuple[Path, str]], base: str | None) -> list[tuple[Path, str]]:
    """Return checkpoints in the order to add them: each after its base."""
    if len(named) == 1:
        return named
    from mstore.snapshots.nearest import bases_first

    return sorted(bases_first(named), key=lambda one: one[1] != base)


def _named(
    paths: Sequence[Path], found: list[Path], names: Sequence[str], prefix: str | None
) -> list[tuple[Path, str]]:
    """Return each path with its future branch.

    paths: as typed. found: where they are.  Raises UsageError, BadName.
    """
    # A path has one slash for the two of an address.
    typed = [re.sub(r"^(hf|oci):/(?=[^/])", r"\1://", str(path)) for path in paths]
    first = shlex.quote(typed[0])
    if names and prefix is not None:
        raise UsageError("--name and --name-prefix exclude each other")
    if prefix is not None:
        names = [f"{prefix}{name_for(Path(_given_name(path)))}" for path in found]
    elif not names and all(is_safetensors(path.name) for path in found):
        names = [name_for(path) for path in found]
    elif not names:
        hint = f"mstore add {first} --name {_suggested(found[0])}"
        if len(paths) > 1:
            hint = f"mstore add {shlex.join(typed)} --name-prefix TEXT"
        raise UsageError("no --name was given", hint=hint)
    if len(names) != len(paths):
        raise UsageError(
            f"{counted(len(paths), 'path')} and {counted(len(names), 'name')}: "
            "each path needs its own",
            hint="one --name REF for each PATH, or --name-prefix TEXT for all",
        )
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"two checkpoints would be called {twice}", hint="--name for each PATH")
    from mstore.store.refs import check_name

    for name in names:
        check_name(name)
    return list(zip(found, names, strict=True))


def _suggested(path: Path) -> str:
    """Suggest a name for a checkpoint: its own, if valid."""
    from mstore.store.refs import check_name
    from mstore.terms.errors import BadName

    name = _given_name(path)
    try:
        check_name(name)
    except BadName:
        return "REF"
    return shlex.quote(name)


def _with_stored(hint: Text | None, path: Path, stored: list[AddReport], asked: int) -> Text | None:
    """Extend the hint of an error at `path` by the checkpoints that are already stored."""
    from mstore.terms.phrases import joined

    if asked == 1:
        return hint
    names = ", ".join(report.name for report in stored)
    told = f"stored before {path}: {names}" if names else f"nothing was stored before {path}"
    return joined(hint, told)


def _show(screen: Screen, reports: list[AddReport], outcomes: Sequence[GateReport | None]) -> None:
    if len(reports) > SHOWN_WHOLE:
        _show_rows(screen, reports)
        return
    for number, (report, outcome) in enumerate(zip(reports, outcomes, strict=True)):
        if number:
            screen.line()
        _show_one(screen, report, dropped_told(outcome))


def _show_rows(screen: Screen, reports: list[AddReport]) -> None:
    """Print one line for each model, then all remarks."""
    screen.table(
        COLUMNS,
        (
            (
                "added" if one.new_snapshot else "restored" if one.bytes_written else "nothing new",
                one.name,
                short(one.snapshot),
                format_size(one.plain_bytes),
                f"{format_size(one.bytes_written)} ({_share(one)})",
                "-" if one.base is None else _base(one.base, None) or "-",
            )
            for one in reports
        ),
    )
    for one in reports:
        for remark in one.remarks:
            screen.line(f"remark: {one.name}: {screen.typed(remark)}")


def _share(report: AddReport) -> str:
    return format_share(report.bytes_written, report.plain_bytes)


def _show_one(screen: Screen, report: AddReport, dropped: str) -> None:
    if report.new_snapshot:
        screen.line(f"added {report.name} {short(report.snapshot)}{dropped}", style="green")
    elif report.bytes_written:
        blocks = counted(report.blocks_new, "block")
        screen.line(
            f"restored {report.name}: the store had lost some of its bytes ({blocks})",
            style="green",
        )
        screen.command("to check the rest", "mstore fsck --read-data")
    else:
        screen.line(f"nothing new: {report.name} holds these bytes already")
        # The blocks were found by their ids: only reading them detects bit rot.
        screen.command("the stored bytes were not read; to check them", "mstore fsck --read-data")
    stored = report.blocks_total - report.blocks_new
    equal = report.blocks_equal_base
    screen.fields(
        [
            ("was", short(report.previous) if report.previous and report.new_snapshot else None),
            ("manifest", short(report.manifest)),
            ("checkpoint", f"{counted(report.files, 'file')}, {counted(report.tensors, 'tensor')}"),
            ("size", format_size(report.plain_bytes)),
            ("written", f"{format_size(report.bytes_written)} ({_share(report)})"),
            (
                "blocks",
                f"{report.blocks_total}: {report.blocks_new} new, {stored} in the store before",
            ),
            ("base", _base(report.base, report.base_reason)),
            (
                "equal to base",
                None if equal is None else f"{equal} of {report.blocks_total} blocks",
            ),
            ("left out", _left_out(report)),
            ("time", format_seconds(report.seconds)),
        ]
    )
    for warning in report.warnings:
        screen.line(f"warning: {warning}", style="yellow")
    for remark in report.remarks:
        screen.line(f"remark: {screen.typed(remark)}")


def _left_out(report: AddReport) -> str | None:
    if not report.excluded:
        return None
    names = few(report.excluded, NAMES_SHOWN)
    files = counted(report.excluded_files, "file")
    return f"{files}, {format_size(report.excluded_bytes)}: {names}"


def _base(base: ParentReport | None, reason: str | None) -> str | None:
    if base is None:
        return None if reason is None else f"none: {reason}"
    name = base.refs[0] if base.refs else short(base.snapshot)
    return name if reason is None else f"{name}: {reason}"


_URL = re.compile(
    r"https?:/(?:www\.)?(?:huggingface\.co|hf\.co)/"
    r"(?P<id>(?!datasets/|spaces/)[^/@]+/[^/@]+)(?:@|/tree/)?(?P<revision>(?<=[@/])[^/]+)?(?:/.*)?"
)
"""An address of a model on the Hub, as a path: one slash for several."""


def cache() -> Path:
    """Return the directory of models in the Hub's cache, by the variables of huggingface_hub."""
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if given:
        return _expanded(given)
    home = os.environ.get("HF_HOME")
    above = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return _expanded(home or os.path.join(above, "huggingface")) / "hub"


def _expanded(text: str) -> Path:
    return Path(os.path.expandvars(text)).expanduser()


def checkpoint(path: Path) -> Path:
    """Return a path if it exists, an address of a place, or the cached model with this id.

    A path is taken before a model of the same id, with a remark.  Raises NotFound, BadCheckpoint,
    BadRequest for an address that is none.
    """
    from mstore.checkpoint.tree import cached_model, is_id
    from mstore.origins import places
    from mstore.terms.errors import MstoreError

    id = str(path)
    if places.is_address(id) and not os.path.lexists(path):
        return Path(str(places.parse(id)))
    url = _URL.fullmatch(id)
    if url is not None and not os.path.lexists(path):
        raise _is_url(url["id"], url["revision"])
    if not is_id(id):
        return path
    if not os.path.lexists(path):
        return cached_model(id, cache())
    try:
        other = cached_model(id, cache())
    except MstoreError:
        return path
    remarks([f"{id} is a path here, and a model of the Hub's cache: {shlex.quote(str(other))}"])
    return path


def _is_url(id: str, revision: str | None) -> NotFound:
    """Return the error for an address of a model's page: which command adds the model."""
    from mstore.terms.errors import NotFound

    wanted = f"{id}@{revision}" if revision else id
    return NotFound(
        "is the address of a page; add takes that of the model",
        where=wanted,
        hint=f"mstore add {shlex.quote(f'hf://{wanted}')} --name REF",
    )
