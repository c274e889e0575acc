"""`mstore check-merge`: can these models be merged, and what is risky about it?"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from mstore_cli.command import command
from mstore_cli.commands.compare import draw_parts
from mstore_cli.errors import FAILURE, Ended
from mstore_cli.merging import AllowMissing, Base, Experts, Only, Skip, experts_of, with_patterns
from mstore_cli.output import Column, Screen
from mstore_cli.session import Session
from mstore_cli.sizes import counted

if TYPE_CHECKING:
    from mstore.api.reports import CompatibilityFinding

COLUMNS = (
    Column("EXPERT", style="yellow"),
    Column("", style="red"),
    Column("ABOUT"),
    Column("WHAT DIFFERS FROM THE BASE", sentence=True),
)


@command(
    example="mstore check-merge --base llama/base --expert llama/chat --expert llama/code",
    failure="a merge is impossible or meaningless, or another error",
)
def check_merge(
    session: Session,
    base: Base,
    expert: Experts,
    only: Only = (),
    skip: Skip = (),
    allow_missing: AllowMissing = False,
) -> None:
    """Compare models with a base before you merge them.

    Compares names, shapes and element types of tensors, architectures and settings in configs,
    vocabularies, tokenizers, chat templates, and licences. Prints how far each model moved and how
    alike the changes are, as `mstore compare` does, as far as statistics know that. Reads no
    weights. An error means that a merge is impossible or meaningless, a warning that it is risky.
    Exit status 0 if there are no errors.
    """
    from mstore import MergeRequest

    experts = experts_of(expert)
    with session.open() as store:
        request = MergeRequest(
            base=base,
            experts=with_patterns(store, experts, base),
            method="linear",
            only=only,
            skip=skip,
            allow_missing=allow_missing,
        )
        report = store.check_merge(request)

    def human(screen: Screen) -> None:
        rows = (
            (one.expert or "several", one.severity, one.aspect, one.text) for one in report.findings
        )
        screen.table(COLUMNS, rows)
        if report.findings:
            screen.line()
        if report.changes is not None:
            draw_parts(screen, (report.changes,))
            unknown = [one.model for one in report.changes.models if one.change is None]
            if unknown:
                words = shlex.join(["mstore", "compare", *unknown, "--base", report.base])
                screen.command("unknown: no statistics of these pairs; to read them", words)
            screen.line()
        models = counted(len(report.experts), "expert")
        if report.mergeable:
            screen.line(f"{models} can be merged into {report.base}", style="green")
        else:
            screen.line(f"cannot be merged into {report.base} as they are", style="red")
        for hint in dict.fromkeys(one.hint for one in report.findings if one.hint):
            screen.line(f"hint: {screen.typed(hint)}")
        if any(one.aspect == "vocabulary" for one in report.findings):
            told = " ".join(f"--expert {name}" for name in report.experts)
            screen.command("one vocabulary for all", f"mstore align --base {report.base} {told}")

    session.output.emit(report, ids=[_line(one) for one in report.findings], human=human)
    if not report.mergeable:
        raise Ended(FAILURE)


def _line(one: CompatibilityFinding) -> str:
    return f"{one.severity} {one.expert or 'several'}: {one.text}"
