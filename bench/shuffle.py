"""What a shuffle of layers costs in quality: two trained experts of one base.

    python bench/shuffle.py WORK

Writes and prints bench/results/shuffle.json.  WORK/family2 is trained by examples/family.py if it
is not there (three minutes; kept for the next run), WORK needs 100 MB.  Losses are held-out, nats a
byte, of each expert's domain.  Nothing is timed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent.parent / "examples"))

from family import DOMAINS, FULL, QUICK, domain_losses, train_family
from measure import RESULTS, keep, machine

from mstore import MergeRequest, Store

EXPERTS = tuple(domain.name for domain in DOMAINS[:2])
HALVES = [(name, 0.5) for name in EXPERTS]
SEEDS = range(8)


def requests(store: Store) -> Iterator[tuple[str, MergeRequest]]:
    """Yield what is merged, each with its kind."""
    yield "linear", MergeRequest(base="base", experts=HALVES, method="linear")
    for kind in ("shuffle", "full random"):
        for seed in SEEDS:
            text = store.shuffle(HALVES, seed=seed, full_random=kind == "full random")
            yield kind, store.read_recipe(text).request


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", type=Path, help="directory on a local disk")
    parser.add_argument("--quick", action="store_true", help="models of 1 M parameters")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes")
    arguments = parser.parse_args()
    family = arguments.work / ("family2quick" if arguments.quick else "family2")
    if not (family / "family.json").exists():
        shutil.rmtree(family, ignore_errors=True)
        train_family(family, size=QUICK if arguments.quick else FULL, experts=len(EXPERTS))
    losses: dict[str, list[dict[str, float]]] = {
        name: [domain_losses(family / name, family)] for name in ("base", *EXPERTS)
    }
    left, out = arguments.work / "shuffle-store", arguments.work / "shuffle-out"
    for one in (left, out):
        shutil.rmtree(one, ignore_errors=True)
    with Store.init(left, block_size=1 << 16) as store:
        for name in ("base", *EXPERTS):
            store.add(family / name, name=name)
        for kind, request in requests(store):
            store.merge(store.plan(request, allow_noop=True), name="merged")
            store.checkout("merged", out)
            losses.setdefault(kind, []).append(domain_losses(out, family))
            shutil.rmtree(out)
    shutil.rmtree(left)
    results: dict[str, Any] = {
        "machine": machine(),
        "experts": EXPERTS,
        "layers": (QUICK if arguments.quick else FULL).layers,
        "losses": losses,
    }
    keep(arguments.results, "shuffle", results)


if __name__ == "__main__":
    main()
