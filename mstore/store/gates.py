"""Required gates: refs that move only to snapshots that have passed.

A store's `config` names, by patterns of refs, the gates that these must pass. What a gate runs is
in the settings of each user, so that nobody's store makes another person run a command. What has
passed is in the table `judged`, which only this store's own runs fill (`mstore.snapshots.notes`),
or is vouched for by a signer whom the user trusts. The check is in the commit that moves the ref,
so every command that moves one has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase

from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.schema import JUDGED
from mstore.store import refs
from mstore.store.catalog import Catalog
from mstore.store.config import Config
from mstore.store.objects.note import verdict_key
from mstore.terms.errors import GateFailed
from mstore.terms.ids import SnapshotId
from mstore.terms.phrases import Option, Text, call, phrase


def required(config: Config, name: str) -> tuple[str, ...]:
    """Return the gates that guard a branch or tag; nothing guards other refs."""
    kept = config.required_gates
    if not kept or name.partition("/")[0] in refs.DIRECTORIES.values():
        return ()
    found = [gate for pattern, gates in kept if fnmatchcase(name, pattern) for gate in gates]
    return tuple(dict.fromkeys(found))


def _hint(name: str, snapshot: SnapshotId, gate: str) -> Text:
    """Say how a snapshot of this store gets a verdict."""
    return phrase(
        "{judge}; a new snapshot is judged by {check} of merge and add",
        judge=call("judge", snapshot.short, gates=(gate,)),
        check=Option("gates"),
    )


def require_passed(
    catalog: Catalog,
    transaction: IndexTransaction,
    moves: Mapping[str, SnapshotId],
    hint: Callable[[str, SnapshotId, str], Text] = _hint,
) -> None:
    """Raise GateFailed unless each snapshot has passed every gate that guards its ref.

    Reads the settings now: they may have changed since the store was opened. hint: returns what to
    do next, for a ref, its new snapshot and the gate.
    """
    if not moves:
        return
    config = Config.load(catalog.layout)
    for name, snapshot in moves.items():
        for gate, why in _lacking(catalog, transaction, config, name, snapshot):
            raise GateFailed(
                f"the gate {gate} guards this ref, and snapshot {snapshot.short} {why}",
                where=name,
                hint=hint(name, snapshot, gate),
            )


def unjudged(catalog: Catalog) -> dict[str, tuple[str, ...]]:
    """Return the branches and tags whose snapshots lack a gate that guards them, with the gates."""
    known = catalog.refs()
    with catalog.index.env.read() as transaction:
        found = {
            name: tuple(
                gate
                for gate, _ in _lacking(
                    catalog, transaction, catalog.config, name, ref.snapshot_id()
                )
            )
            for name, ref in known.items()
        }
    return {name: lacking for name, lacking in found.items() if lacking}


def _lacking(
    catalog: Catalog,
    transaction: IndexTransaction,
    config: Config,
    name: str,
    snapshot: SnapshotId,
) -> Iterator[tuple[str, str]]:
    """Yield the gates that guard a ref and that a snapshot has not passed, and why not."""
    for gate in required(config, name):
        row = catalog.index.get(transaction, JUDGED, (snapshot, verdict_key(gate)))
        note, passed = (None, 0) if row is None else row
        is_current = note is None or catalog.is_current_verdict(gate, note)
        if (passed and is_current) or catalog.vouched(snapshot, gate):
            continue
        if not is_current:
            yield gate, "was judged by another command or other limits than your settings say"
        else:
            yield gate, "has not passed it here" if note is None else "did not pass it"
