"""`--vocab`: base and experts of a merge with the same token in the same row of each.

Parses the option and tells what was aligned.  The library decides what a vocabulary is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from mstore_cli.declared import WHAT, Option
from mstore_cli.errors import remarks
from mstore_cli.session import Session

if TYPE_CHECKING:
    from mstore import MergeRequest, Store
    from mstore.reports import AlignedModel, AlignReport
    from mstore.requests import Vocabulary

Vocab = Annotated[
    str | None,
    Option(
        "--vocab",
        metavar="union|base|common|REF",
        help="First align the models' vocabularies: union keeps the tokens of all, base those of "
        "the base, common those that all have, REF those of this model (see `mstore align`).",
        completes="refs",
        group=WHAT,
    ),
]


def aligned(
    session: Session, store: Store, request: MergeRequest, vocabulary: Vocabulary
) -> MergeRequest:
    """Return the request with aligned models, and print which those are."""
    with session.progress() as tick:
        report = store.align(request, vocabulary, progress=tick)
    remarks([*report.remarks, *_told(report)])
    return report.applied(request)


def _told(report: AlignReport) -> Iterator[str]:
    for one in dict.fromkeys((report.base, *report.experts)):
        if one.new_snapshot:
            yield f"stored {one.name} as {one.ref}, {told_change(one, report)}"


def told_change(one: AlignedModel, report: AlignReport) -> str:
    """Return what alignment changed in a model."""
    if one.ref is None:
        return "as it is"
    more = f", {one.tokens_missing} that it lacked" if one.tokens_missing else ""
    return f"with {report.tokens} tokens{more}"
