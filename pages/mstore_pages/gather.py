"""Gathers the summary of a snapshot, or of two, from what a store reports."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace as with_fields
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from mstore.api.reports import (
    BAD_SIGNATURE,
    BlameReport,
    ComparedPart,
    CompareReport,
    ExpertShare,
    Explanation,
    ParentReport,
    SnapshotReport,
    SweepReport,
    searched,
)
from mstore.checkpoint.declared import CARD, DEFAULT_LIMITS, front_matter, values
from mstore.snapshots.notes import culprit_of
from mstore.store.objects.plan import EXPERT
from mstore.store.objects.shapes import layers_of, parts_of
from mstore.store.objects.snapshot import BASE
from mstore.terms.errors import MstoreError
from mstore.terms.ids import Revision, SnapshotId
from mstore.terms.phrases import Text
from mstore.terms.report import ProgressCallback
from mstore_pages.summary import (
    OUTSIDE,
    Ancestor,
    ChangedTensor,
    ComparisonSummary,
    ExpertSummary,
    LayerMap,
    LayerShare,
    ModelMap,
    Numbers,
    SnapshotSummary,
)

if TYPE_CHECKING:
    from mstore import Store

T = TypeVar("T")
LINEAGE_SHOWN = 40
"""The most snapshots of a lineage."""
TENSORS_SHOWN = 20
BUDGETS = tuple(percent / 100 for percent in range(10, 101, 10))


class _Gatherer:
    """Asks a store, and keeps why something could not be told."""

    def __init__(
        self, store: Store, threads: int | None, progress: ProgressCallback | None, *, measure: bool
    ) -> None:
        self.store = store
        self.threads = threads
        self.progress = progress
        self.measure = measure
        self.gaps: dict[str, Text] = {}

    def told(self, section: str, ask: Callable[[], T]) -> T | None:
        """Return an answer; None, with the reason in `gaps`, where there is none."""
        try:
            return ask()
        except MstoreError as error:
            self.gaps[section] = error.what
            return None

    def lineage(
        self, starts: Sequence[Revision], signers: Mapping[bytes, str] | None
    ) -> tuple[tuple[Ancestor, ...], bool]:
        found: dict[bytes, SnapshotReport] = {}
        for start in starts:
            for one in self.store.log(start, LINEAGE_SHOWN + 1, signers=signers):
                found.setdefault(one.snapshot, one)
        kept = list(found.values())[:LINEAGE_SHOWN]
        return tuple(Ancestor(one, self.licence(one)) for one in kept), len(kept) == len(found)

    def licence(self, one: SnapshotReport) -> str | None:
        """Return the one licence that a card states."""
        card = b""
        try:
            for piece in self.store.read_file(one.snapshot, CARD):
                card += bytes(piece)
                if len(card) >= DEFAULT_LIMITS.max_card_bytes:
                    break
        except MstoreError:
            return None
        stated = values(front_matter(card), "license")
        return stated[0] if len(stated) == 1 else None

    def compare(
        self, section: str, base: str | None, models: Sequence[str], by: str
    ) -> CompareReport | None:
        """Compare models, each once.  How long it took is no fact of them."""
        found = self.told(
            section,
            lambda: self.store.compare(
                *dict.fromkeys(models),
                base=base,
                by=by,
                measure=self.measure,
                threads=self.threads,
                progress=self.progress,
            ),
        )
        return None if found is None else replace(found, seconds=0.0, bytes_read=0)

    def blame(self, snapshot: SnapshotId) -> BlameReport | None:
        """Return the shares of experts, if weights may be read."""
        if not self.measure:
            self.gaps["shares"] = "weights were not read"
            return None
        return self.told(
            "shares",
            lambda: self.store.blame(snapshot, threads=self.threads, progress=self.progress),
        )


def snapshot_summary(
    store: Store,
    revision: Revision,
    *,
    measure: bool = True,
    signers: Mapping[bytes, str] | None = None,
    threads: int | None = None,
    progress: ProgressCallback | None = None,
    name: str | None = None,
) -> SnapshotSummary:
    """Gather what the page of a snapshot shows.

    measure: read weights for what no statistics tell, and for the shares of experts, as `compare`
    and `blame` do; else nothing is read.  signers: as for `Store.log`.  name: what the page calls
    it; None: the revision.

    Raises NotFound, BadName.
    """
    called = str(revision) if name is None else name
    ask = _Gatherer(store, threads, progress, measure=measure)
    shown = store.show(revision, signers=signers)
    lineage, complete = ask.lineage([shown.snapshot], signers)
    merge = ask.told("merge", lambda: store.explain(shown.snapshot)) if shown.plan else None
    blame = None
    if merge is not None and not merge.plan.layers:
        blame = ask.blame(shown.snapshot)
    base, experts = _inputs(shown)
    compared = whole = None
    if base is None:
        ask.gaps["change"] = "its lineage names no base that it could be compared with"
    elif shown.virtual:
        ask.gaps["tensors"] = "a virtual merge has no weights at rest that could be compared"
        if experts:
            compared = ask.compare("change", base, experts, "part")
    else:
        compared = ask.compare("change", base, [str(shown.snapshot), *experts], "part")
        whole = compared and ask.compare("tensors", base, [str(shown.snapshot)], "tensor")
    tables = _Tables(called, shown, experts, compared, merge, blame)
    return SnapshotSummary(
        name=called,
        snapshot=shown,
        lineage=lineage,
        lineage_complete=complete,
        plan=None if merge is None else merge.plan,
        base=_base_name(shown, merge),
        change=None if whole is None else whole.whole.models[0].change,
        maps=tables.maps(),
        layers=tables.layers(),
        experts=tables.experts(),
        sweep=_sweep(ask, merge),
        tensors=() if whole is None else _most_changed(store, shown, whole, merge, blame),
        similarity=tables.similarity(),
        blocks=ask.told("blocks", lambda: store.reuse(shown.snapshot)),
        search=searched(shown.notes),
        culprit=culprit_of(shown.notes),
        recipe=None if merge is None else ask.told("recipe", lambda: store.recipe(shown.snapshot)),
        warnings=_warnings(shown, merge, compared),
        gaps=ask.gaps,
    )


def comparison_summary(
    store: Store,
    a: Revision,
    b: Revision,
    *,
    measure: bool = True,
    signers: Mapping[bytes, str] | None = None,
    threads: int | None = None,
    progress: ProgressCallback | None = None,
) -> ComparisonSummary:
    """Gather what the page of two snapshots shows; arguments as for `snapshot_summary`.

    Raises NotFound, BadName, Incompatible, Corrupt.
    """
    ask = _Gatherer(store, threads, progress, measure=measure)
    ours, theirs = (store.show(one, signers=signers) for one in (a, b))
    lineage, complete = ask.lineage([ours.snapshot, theirs.snapshot], signers)
    changes = ask.compare("change", str(a), [str(b)], "part")
    whole = changes and ask.compare("tensors", str(a), [str(b)], "tensor")
    both = ask.compare("similarity", None, [str(a), str(b)], "layer")
    if both is not None and all(pair.cosine is None for pair in both.whole.pairs):
        # One is the other's base, so it has no change; or changes are not known.
        both = None
    # Last: what was measured for the others makes its distances exact, also the next time.
    diff = store.diff(a, b, threads=threads)
    tables = _Tables(str(b), theirs, [], changes, None, None)
    return ComparisonSummary(
        name_a=str(a),
        name_b=str(b),
        a=ours,
        b=theirs,
        lineage=lineage,
        lineage_complete=complete,
        diff=diff,
        change=None if whole is None else whole.whole.models[0].change,
        maps=tables.maps(),
        tensors=() if whole is None else _most_changed(store, theirs, whole, None, None),
        similarity=both,
        gaps=ask.gaps,
    )


def _inputs(shown: SnapshotReport) -> tuple[str | None, list[str]]:
    """Return revisions of the base of a snapshot, None without one, and of its experts."""

    def revision(parent: ParentReport) -> str:
        model = "" if parent.model is None else f":{parent.model}"
        return f"{parent.snapshot}{model}"

    bases = [revision(one) for one in shown.parents if one.role == BASE]
    experts = [revision(one) for one in shown.parents if one.role == EXPERT]
    return next(iter(bases), None), experts


def _called(shown: SnapshotReport) -> list[str]:
    """Return names of the experts of what no merge made."""
    experts = (one for one in shown.parents if one.role == EXPERT)
    return [one.refs[0] if one.refs else one.snapshot.short for one in experts]


def _base_name(shown: SnapshotReport, merge: Explanation | None) -> str | None:
    if merge is not None:
        return merge.plan.base
    bases = [one for one in shown.parents if one.role == BASE]
    return next((one.refs[0] if one.refs else one.snapshot.short for one in bases), None)


class _Tables:
    """What a comparison, an explanation and shares say together, by layers, parts and experts.

    Cells are known by layer and part, joined by a dot.
    """

    def __init__(
        self,
        name: str,
        shown: SnapshotReport,
        experts: Sequence[str],
        compared: CompareReport | None,
        merge: Explanation | None,
        blame: BlameReport | None,
    ) -> None:
        self._compared = compared
        self._merge = merge
        self._blame = blame
        called = [expert for expert, _ in merge.plan.experts] if merge else _called(shown)
        self._names = dict(zip(experts, called, strict=False))
        self._experts = list(experts)
        self._called = called
        self._result = str(shown.snapshot)
        self._name = name
        names = [] if merge is None else [one.name for one in merge.tensors]
        self._cell_of = {
            name: ".".join(filter(None, where)) for name, where in parts_of(names).items()
        }

    def _shown_as(self, model: str) -> str:
        return self._names.get(model, self._name)

    def maps(self) -> tuple[LayerMap, ...]:
        """Return changes by layers and parts, and what the merge took of each expert."""
        if self._compared is None:
            return ()
        by_cell = {one.name or "": one for one in self._compared.parts}
        kinds: dict[str, dict[tuple[str, str], str]] = defaultdict(dict)
        for cell, (layer, part) in parts_of(by_cell).items():
            kind, _, number = layer.rpartition(".")
            if number.isascii() and number.isdigit() and part:
                kinds[kind][part, number] = cell
            else:
                kinds[OUTSIDE][cell, ""] = cell
        # What is outside of layers comes last, wherever the first of it lies.
        ordered = sorted(kinds.items(), key=lambda one: one[0] == OUTSIDE)
        return tuple(self._map(kind, cells, by_cell) for kind, cells in ordered)

    def _map(
        self,
        kind: str,
        cells: Mapping[tuple[str, str], str],
        by_cell: Mapping[str, ComparedPart],
    ) -> LayerMap:
        parts = list(dict.fromkeys(part for part, _ in cells))
        layers = sorted({layer for _, layer in cells}, key=lambda one: (len(one), one))

        def numbers(of: Callable[[str], float | None]) -> Numbers:
            return tuple(
                tuple(of(cell) if (cell := cells.get((part, layer))) else None for layer in layers)
                for part in parts
            )

        def of_model(k: int, model: str) -> ModelMap:
            is_expert = model in self._experts
            at = self._experts.index(model) if is_expert else 0
            share = left_out = None
            if is_expert and self._blame is not None:
                share = numbers(lambda cell: _at(self._shares.get(cell), at))
            if is_expert and self._merge is not None:
                left_out = numbers(lambda cell: _at(self._left_out.get(cell), at))
            return ModelMap(
                model=self._shown_as(model),
                change=numbers(lambda cell: by_cell[cell].models[k].change),
                share=share,
                left_out=left_out,
                equal=numbers(lambda cell: by_cell[cell].models[k].equal_blocks),
            )

        assert self._compared is not None
        models = [of_model(k, model) for k, model in enumerate(self._compared.models)]
        return LayerMap(kind, tuple(layers), tuple(parts), tuple(models))

    @cached_property
    def _shares(self) -> dict[str, list[float | None]]:
        """By cell: each expert's share of the merged delta, over all tensors of the cell."""
        sums: dict[str, list[float]] = {}
        squares: dict[str, float] = defaultdict(float)
        for one in self._blame.tensors if self._blame else ():
            cell = self._cell_of.get(one.name, one.name)
            square = one.norm * one.norm
            squares[cell] += square
            own = sums.setdefault(cell, [0.0] * len(one.experts))
            for number, expert in enumerate(one.experts):
                own[number] += (expert.share or 0.0) * square
        return {
            cell: [part / squares[cell] if squares[cell] else None for part in own]
            for cell, own in sums.items()
        }

    @cached_property
    def _left_out(self) -> dict[str, list[float | None]]:
        """By cell: the share of each expert's own chunks that was left out."""
        sums: dict[str, list[tuple[int, int]]] = {}
        for one in self._merge.tensors if self._merge else ():
            shares = experts_in(one.experts)
            if shares and one.tied_to is None:
                cell = self._cell_of[one.name]
                own = sums.get(cell, [(0, 0)] * len(shares))
                sums[cell] = [
                    (out + left_out(share), all_ + differing(share))
                    for (out, all_), share in zip(own, shares, strict=True)
                ]
        return {
            cell: [out / every if every else None for out, every in own]
            for cell, own in sums.items()
        }

    def layers(self) -> tuple[LayerShare, ...]:
        """Return shares of experts by layer, of layers in which an expert takes part."""
        if self._merge is None:
            return ()
        shares = {one.name: one.experts for one in self._blame.layers} if self._blame else {}
        found = []
        for layer in self._merge.layers:
            experts = experts_in(layer.experts)
            own = shares.get(layer.name)
            told = tuple(one.share for one in own) if own else (None,) * len(experts)
            out = tuple(left_out(one) / n if (n := differing(one)) else None for one in experts)
            if any(one is not None for one in (*told, *out)):
                found.append(LayerShare(layer.name, told, out))
        return tuple(found)

    def experts(self) -> tuple[ExpertSummary, ...]:
        """Return what the merge has of each expert."""
        if self._merge is None:
            return ()
        changes = {}
        if self._compared is not None:
            changes = {one.model: one.change for one in self._compared.whole.models}
        shares = [one.share for one in self._blame.experts] if self._blame else []
        revisions = [*self._experts, *[""] * len(self._called)]
        return tuple(
            ExpertSummary(
                expert=one.expert,
                weight=one.weight if one.weight is not None else 0.0,
                change=changes.get(revisions[number]),
                share=_at(shares, number),
                chunks=differing(one),
                chunks_used=one.chunks_read + one.chunks_shared,
                chunks_not_needed=one.chunks_not_needed,
                chunks_left_out=left_out(one),
                chunks_equal_base=one.chunks_equal_base,
            )
            for number, one in enumerate(experts_in(self._merge.experts))
        )

    def similarity(self) -> ComparedPart | None:
        """Return the cosines of the result and the experts, under their names."""
        if self._compared is None or len(self._compared.models) < 2:
            return None
        whole = self._compared.whole
        return replace(
            whole,
            models=tuple(replace(one, model=self._shown_as(one.model)) for one in whole.models),
            pairs=tuple(
                replace(one, a=self._shown_as(one.a), b=self._shown_as(one.b))
                for one in whole.pairs
            ),
        )


def _at(values: Sequence[float | None] | None, number: int) -> float | None:
    return values[number] if values and number < len(values) else None


def experts_in(shares: Sequence[ExpertShare]) -> list[ExpertShare]:
    """Return the shares without those of companions, which are in no element of the result."""
    return [share for share in shares if share.role == EXPERT]


def left_out(share: ExpertShare) -> int:
    """Return how many chunks were left out for a limit."""
    return share.chunks_over_budget + share.chunks_outside_top_p


def differing(share: ExpertShare) -> int:
    """Return how many chunks differ from the base's."""
    used = share.chunks_read + share.chunks_shared
    return used + share.chunks_not_needed + left_out(share)


def _most_changed(
    store: Store,
    shown: SnapshotReport,
    whole: CompareReport,
    merge: Explanation | None,
    blame: BlameReport | None,
) -> tuple[ChangedTensor, ...]:
    records = {one.name: one for one in store.tensors(shown.snapshot)}
    merged = {one.name: one for one in merge.tensors} if merge else {}
    shares = {one.name: one.experts for one in blame.tensors} if blame else {}
    changed = [
        (one.models[0].change, one.name)
        for one in whole.parts
        if one.models[0].change and one.name is not None
    ]
    layers = layers_of(one.name for one in whole.parts if one.name is not None)
    found = []
    for change, name in sorted(changed, key=lambda one: (-(one[0] or 0.0), one[1]))[:TENSORS_SHOWN]:
        record, own = records.get(name), merged.get(name)
        known = [one for one in shares.get(name, ()) if one.share is not None]
        first = max(known, key=lambda one: one.share or 0.0, default=None)
        found.append(
            ChangedTensor(
                name=name,
                layer=layers[name],
                dtype=None if record is None else record.dtype,
                shape=None if record is None else record.shape,
                change=change,
                blocks=None if own is None else own.blocks_total,
                blocks_changed=None if own is None else own.blocks_total - own.blocks_reused,
                expert=None if first is None else first.expert,
                share=None if first is None else first.share,
            )
        )
    return tuple(found)


def _sweep(ask: _Gatherer, merge: Explanation | None) -> SweepReport | None:
    """Return budgets and errors of the same merge, from statistics alone."""
    if merge is None or merge.plan.layers or "recipe" in ask.gaps:
        return None

    def swept() -> SweepReport:
        text = ask.store.recipe(merge.snapshot)
        request = ask.store.read_recipe(text).request
        # Without `analyze`, what has no statistics is taken whole, and no weights are read.
        asked = with_fields(request, budget=None, max_error=None, analyze=False)
        return ask.store.sweep(asked, shares=BUDGETS, threads=ask.threads)

    found = ask.told("sweep", swept)
    # How long it took is no fact of the merge.
    return None if found is None else replace(found, seconds=0.0)


def _warnings(
    shown: SnapshotReport, merge: Explanation | None, compared: CompareReport | None
) -> tuple[Text, ...]:
    found: list[Text] = []
    if shown.pruned:
        found.append("its contents were pruned: only records are left")
    for one in shown.not_finite:
        count = "some elements" if one.elements is None else f"{one.elements} elements"
        found.append(f"{one.tensor}: {count} that are infinite or NaN, and finite in the base")
    signatures = (*shown.signatures, *(s for note in shown.notes for s in note.signatures))
    found += [
        f"a signature was not made by its key {one.key}"
        for one in signatures
        if one.state == BAD_SIGNATURE
    ]
    if merge is not None:
        found += [one.text for one in merge.plan.warnings]
        found += merge.plan.remarks
    if compared is not None:
        found += compared.remarks
    return tuple(dict.fromkeys(found))


def lineage_of(
    store: Store, revision: Revision, signers: Mapping[bytes, str] | None = None
) -> tuple[tuple[Ancestor, ...], bool]:
    """Return a snapshot and what it was made from, and whether that is the whole lineage.

    signers: as for `Store.log`.

    Raises NotFound, BadName.
    """
    return _Gatherer(store, None, None, measure=False).lineage([revision], signers)


def card_of(store: Store, revision: Revision, most: int) -> str | None:
    """Return the beginning of a model card, `most` bytes and a block at most; None without one.

    Raises NotFound, BadName, Corrupt, StorageFailed.
    """
    if CARD not in {one.path for one in store.files(revision)}:
        return None
    card = bytearray()
    for piece in store.read_file(revision, CARD):
        card += piece
        if len(card) > most:
            break
    return card.decode(errors="replace")
