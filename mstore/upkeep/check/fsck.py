"""One run of fsck: all passes over one store.  Reads only.

Collects findings instead of raising them.  Other processes may add, move and collect meanwhile.  So
every finding is checked again at the end, and dropped if its row has changed, gc collected its
pack, or nothing in the store refers to it any more.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Collection, Container
from contextlib import closing

import msgspec

from mstore.blocks import lmdb_check
from mstore.blocks.elsewhere import PartReader
from mstore.blocks.index import Index
from mstore.blocks.location import pack_number
from mstore.store import generation, leases
from mstore.store.catalog import Catalog
from mstore.store.layout import Layout
from mstore.store.leaning import Leaning, all_leaning
from mstore.terms.errors import BadRequest
from mstore.terms.ids import PackId
from mstore.terms.phrases import Phrase, as_phrase, call, phrase
from mstore.terms.report import ProgressCallback, ProgressCounter, Report
from mstore.upkeep.check import index_file
from mstore.upkeep.check.findings import Affected, AffectedTensors, Findings, Problem
from mstore.upkeep.check.graph import Graph
from mstore.upkeep.check.packs import CheckedAmounts, FooterPass, PayloadPass


class CheckReport(Report, frozen=True):
    """The result of `fsck`; the store is sound if `problems` is empty."""

    read_data: bool
    """whether every block was read"""
    index_only: bool
    """whether only the index was checked, because it cannot be trusted; all counts are 0"""
    sample: float | None
    """the share of blocks that was read; None: not a sample"""
    seed: int | None
    """the seed of the sample: the same seed selects the same blocks; None: not a sample"""
    packs: int
    """packs checked"""
    blocks: int
    """blocks checked"""
    records: int
    """records checked"""
    snapshots: int
    """snapshots checked"""
    refs: int
    """refs checked"""
    bytes_read: int
    """stored bytes of the blocks read"""
    bytes_total: int
    """stored bytes of all blocks"""
    leans_on: tuple[Leaning, ...]
    """lazy remotes that have blocks which are not here, and were not checked"""
    garbage: tuple[str, ...]
    """what interrupted work left behind; harmless"""
    problems: tuple[Problem, ...]
    """what is wrong; empty in a sound store"""
    affected: tuple[Affected, ...]
    """every tensor and file that cannot be read as it is"""
    hint: Phrase | None
    """the next command; None in a sound store"""
    seconds: float
    """how long it took"""


class Scope(msgspec.Struct, frozen=True):
    """How much to read. share: of all blocks, 0 for none; the seed selects those of a sample."""

    share: float = 0.0
    seed: int = 0

    @classmethod
    def chosen(cls, *, read_data: bool, sample: float | None, seed: int) -> Scope:
        """Build the scope of a request.  Raises BadRequest for both options or an invalid share."""
        if sample is None:
            return cls(1.0 if read_data else 0.0, seed)
        if read_data:
            raise BadRequest("a sample and all of the data exclude each other")
        if not 0 < sample <= 1:
            raise BadRequest(f"a sample is a share above 0 and at most 1, not {sample:g}")
        return cls(sample, seed)

    @property
    def is_sample(self) -> bool:
        """Whether some blocks are read and some are not."""
        return 0 < self.share < 1


class Checker:
    """One check of one store.  `findings` is the input of repair.

    Opens the store itself: caches of an open store would hide what is on disk.
    """

    def __init__(
        self,
        layout: Layout,
        scope: Scope,
        *,
        threads: int,
        progress: ProgressCallback | None = None,
        reader: PartReader | None = None,
    ) -> None:
        self._reader = reader
        self._layout = layout
        self._scope = scope
        self._threads = threads
        self._progress = progress
        self.findings = Findings()

    def run(self) -> CheckReport:
        """Check everything.  Raises Corrupt if the index cannot be walked at all."""
        with closing(Catalog.opened(self._layout)) as catalog:
            catalog.read_elsewhere(self._reader)
            with catalog.index.env.read():
                found = index_file.faults(self._layout, catalog.index.env.opened())
            index_file.refuse(self._layout, found)
            return self._run(catalog)

    def _run(self, catalog: Catalog) -> CheckReport:
        began = time.monotonic()
        findings = self.findings
        self._index(catalog)
        graph = Graph(catalog, Findings())
        if findings.is_index_wrong:
            return self._report(catalog, CheckedAmounts(), graph, 0, began)
        totals = FooterPass(catalog, findings).run()
        self._side_tables()
        graph.run()
        bytes_read = self._payloads(catalog, totals)
        self._settle(catalog)
        graph = _confirmed(catalog, graph)
        findings.take(graph.findings)
        root, left = self._layout.root, leases.garbage(self._layout)
        findings.garbage += [str(path.relative_to(root)) for path in left]
        return self._report(catalog, totals, graph, bytes_read, began)

    def _index(self, catalog: Catalog) -> None:
        """Find faults that only a new index fixes; with such an index, nothing else is judged."""
        findings = self.findings
        for table, key in catalog.index.unsound():
            kind, name = table.subject(key)
            findings.tell(kind, name, "the row does not match its check")
        why = generation.lasting_doubt(catalog.layout, catalog.index, catalog.packs)
        if why is not None:
            findings.tell("index", str(catalog.layout.index), why)
        findings.is_index_wrong = bool(findings.problems)

    def _report(
        self,
        catalog: Catalog,
        totals: CheckedAmounts,
        graph: Graph,
        bytes_read: int,
        began: float,
    ) -> CheckReport:
        findings, names = self.findings, graph.names
        return CheckReport(
            read_data=self._scope.share == 1,
            index_only=findings.is_index_wrong,
            sample=self._scope.share if self._scope.is_sample else None,
            seed=self._scope.seed if self._scope.is_sample else None,
            packs=totals.packs,
            blocks=totals.blocks,
            records=totals.records,
            snapshots=graph.snapshots,
            refs=len(names),
            bytes_read=bytes_read,
            bytes_total=totals.stored_bytes,
            leans_on=() if findings.is_index_wrong else all_leaning(catalog),
            garbage=tuple(findings.garbage),
            problems=findings.problems,
            affected=AffectedTensors(catalog, findings).all(names, graph.pruned),
            hint=self._hint(catalog, names.keys(), graph.lost),
            seconds=time.monotonic() - began,
        )

    def _payloads(self, catalog: Catalog, totals: CheckedAmounts) -> int:
        if not self._scope.share:
            return 0
        # The size of a sample is known only after reading it.
        expected = int(totals.stored_bytes * self._scope.share)
        tick = ProgressCounter("fsck", expected, self._progress)
        payloads = PayloadPass(
            catalog,
            self.findings,
            tick,
            threads=self._threads,
            share=self._scope.share,
            seed=self._scope.seed,
        )
        payloads.run(sorted(totals.sound) if self._scope.is_sample else totals.sound)
        return tick.done

    def _side_tables(self) -> None:
        """Check the files that can be discarded; their rows carry their own checks."""
        for kind, path in (("statistics", self._layout.stats), ("memo", self._layout.memo)):
            found = lmdb_check.faults(path)
            if found:
                # Other processes write here all the time: real damage shows up both times.
                again = set(lmdb_check.faults(path))
                for what in found:
                    if what in again:
                        self.findings.tell(kind, str(path), what)

    def _settle(self, catalog: Catalog) -> None:
        """Drop findings that another process's commit explains."""
        findings, index = self.findings, catalog.index
        index.env.refresh()
        with index.env.read() as transaction:
            for key, row in list(findings.broken.items()):
                if row is not None and index.row(transaction, key) != row:
                    findings.forget_row(*key)
            for pack in list(findings.packs):
                if index.pack_number(transaction, pack) is None:
                    findings.forget_pack(pack)

    def _damaged_packs(self, index: Index) -> set[PackId]:
        """Return the packs with any problem; a missing pack counts."""
        broken = self.findings.broken.values()
        numbers = {pack_number(row) for row in broken if row is not None}
        with index.env.read() as transaction:
            packs = index.named_packs(transaction)
            named = {pack.id for pack in packs if pack.number in numbers}
        return named | set(self.findings.packs)

    def _hint(self, catalog: Catalog, refs: Container[str], lost: Collection[str]) -> Phrase | None:
        findings = self.findings
        if not findings.problems:
            return None
        if findings.is_index_wrong:
            return as_phrase(call("reindex"))
        damaged = self._damaged_packs(catalog.index)
        is_lacking = bool(findings.broken or findings.packs or findings.incomplete)
        if (damaged or is_lacking) and generation.is_backup(self._layout, catalog.index):
            # A repair would make it a separate store, which can no longer be a backup target.
            own = damaged - generation.damaged_when_copied(catalog.index)
            return _back_up_again(catalog, own)
        if is_lacking:
            return _repaired(bool(self._scope.share), lost)
        kinds = {problem.kind for problem in findings.problems}
        if findings.stale_mirror or kinds <= {"statistics", "memo"}:
            return as_phrase(call("repair"))
        names = [problem.where for problem in findings.problems if problem.kind == "ref"]
        # If a ref's row cannot be read, the mirror still has its value.
        if names and all(name in refs for name in names):
            return as_phrase(call("remove", names[0]))
        return as_phrase(call("reindex"))


def _repaired(read_data: bool, lost: Collection[str]) -> Phrase:
    """Return what fixes a store that lacks something; `lost`: refs whose snapshot is missing."""
    repair = phrase(
        "{repair}    (a store or checkpoint with copies)",
        repair=call("repair", read_data=read_data, sources=("PLACE",)),
    )
    if not lost:
        return repair
    name = min(lost)
    return phrase(
        "{repair}; with none left: {rm}, or {reset}",
        repair=repair,
        rm=call("remove", name),
        reset=call("reset", name, "OTHER"),
    )


def _back_up_again(catalog: Catalog, damaged: Collection[PackId]) -> Phrase:
    """Return what fixes a backup: new copies from its store replace packs damaged here.

    Without damage of its own, the backup matches its store and cannot be a source for repair.
    """
    again = call("backup", str(catalog.layout.root), store="STORE")
    if not damaged:
        return phrase(
            "{repair}, then: {again}    (this is a backup, and lacks what its store had lost; "
            "PLACE: another store or a checkpoint with copies)",
            repair=call("repair", read_data=True, sources=("PLACE",), store="STORE"),
            again=again,
        )
    files = " ".join(shlex.quote(catalog.packs.where(pack)) for pack in sorted(damaged))
    return phrase(
        "rm -f {files}    (this is a backup; back its store up again: {again})",
        files=files,
        again=again,
    )


def _confirmed(catalog: Catalog, graph: Graph) -> Graph:
    """Return problems of names and snapshots that were seen in both passes, so not due to gc."""
    if not graph.findings.problems:
        return graph
    catalog.index.env.refresh()
    again = Graph(catalog, Findings())
    again.run()
    again.findings.confirm(graph.findings)
    return again
