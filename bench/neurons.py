"""What aligned neurons are worth: midpoints of two trained models, before and after.

    python bench/neurons.py WORK [--quick]

Writes and prints bench/results/neurons.json.  WORK/neurons has two models that are trained from
different seeds on the same texts, those of examples/family.py, and two fine-tunes of the first;
they are trained if they are not there (five minutes; kept for the next run).  Nothing is timed.

Losses are held-out, in nats a byte, the mean over the domains.  Each row is the mean of the
elements of the first model and of the second, whose channels, neurons and heads were moved as the
row says; the last is what `mstore permute` makes, the others have less of the same symmetries.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent.parent / "examples"))

import torch
from family import (
    DOMAINS,
    QUICK,
    SHORT,
    Size,
    batches,
    domain_losses,
    load,
    new_model,
    one_thread,
    read_corpus,
    save,
    train,
)
from measure import RESULTS, keep, machine
from msgspec.structs import replace

from mstore import Incompatible, Store
from mstore.models.neurons.matching import matched
from mstore.models.neurons.permutation import moved
from mstore.models.neurons.symmetries import RESIDUAL, Symmetries, symmetries_of
from mstore.store.objects.tensor import Tensor

SEEDS = {"first": 20, "second": 21}
TUNED = ("code", "prose")
"""Domains that the first model is fine-tuned for."""
State = dict[str, torch.Tensor]


def trained(work: Path, size: Size) -> None:
    """Train what is missing in `work`: two models, and two fine-tunes of the first."""
    if (work / "heldout.json").exists():
        return
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    corpora = {domain.name: read_corpus(domain) for domain in DOMAINS}
    mixture = [(corpora[domain.name].training, domain.base_share) for domain in DOMAINS]
    with one_thread():
        for name, seed in SEEDS.items():
            model = new_model(size, seed)
            train(model, batches(mixture, name, size.base.batch), size.base)
            save(model, work / name)
        for name in TUNED:
            model = load(work / "first")
            own = [(corpora[name].training, 1.0)]
            train(model, batches(own, name, size.expert.batch), size.expert)
            save(model, work / name)
    held_out = {domain.name: corpora[domain.name].excerpts for domain in DOMAINS}
    (work / "heldout.json").write_text(json.dumps(held_out))


def state(directory: Path) -> State:
    """The tensors of a model, in float32."""
    return dict(load(directory).state_dict())


def loss(directory: Path, work: Path, *states: State) -> float:
    """The loss of the mean of some models of the architecture in `directory`."""
    model = load(directory)
    mean = {name: sum(one[name] for one in states) / len(states) for name in states[0]}
    model.load_state_dict(mean)
    return fmean(domain_losses(model, work).values())


def permuted(directory: Path, ours: State, theirs: State, less: Less) -> State:
    """The first model in the order of the second, by some of its symmetries."""
    config = json.loads((directory / "config.json").read_text())
    records = {
        name: Tensor("F32", tuple(one.shape), 4 * one.numel(), b"") for name, one in ours.items()
    }
    whole = symmetries_of(config, records, directory.name)
    axes = {name: less(own) for name, own in whole.axes.items()}
    used = {axis.symmetry for own in axes.values() for axis in own if axis is not None}
    signed = {axis.symmetry for own in axes.values() for axis in own if axis and axis.is_signed}
    named = {
        name: replace(one, is_signed=name in signed)
        for name, one in whole.named.items()
        if name in used
    }
    some = Symmetries(named, axes)
    bits = [{k: v.numpy().view("u4") for k, v in one.items()} for one in (ours, theirs)]
    orders, _ = matched(
        some,
        dict.fromkeys(records, ("F32", "F32")),
        bits[0].__getitem__,
        bits[1].__getitem__,
        lambda: lambda _: None,
    )
    return {
        name: torch.from_numpy(moved(one, axes[name], some, orders).view("f4"))
        for name, one in bits[0].items()
    }


Less = Callable[[tuple[Any, ...]], tuple[Any, ...]]
"""Leaves some of a tensor's axes."""


def no_residual(axes: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(None if one is None or one.symmetry == RESIDUAL else one for one in axes)


def no_signs(axes: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(None if one is None else replace(one, is_signed=False) for one in axes)


LESS: Mapping[str, Less] = {
    "neurons and heads": lambda axes: no_signs(no_residual(axes)),
    "residual stream, neurons, heads": no_signs,
}
SIGNED = "the same, channels with signs"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", type=Path, help="directory on a local disk")
    parser.add_argument("--quick", action="store_true", help="models of 1 M parameters")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes")
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else SHORT
    work = arguments.work / ("neurons-quick" if arguments.quick else "neurons")
    trained(work, size)
    first, second = (work / name for name in SEEDS)
    states = {name: state(work / name) for name in (*SEEDS, *TUNED)}
    losses = {name: loss(first, work, one) for name, one in states.items()}
    middles = {"as they are": loss(first, work, states["first"], states["second"])}
    for name, less in LESS.items():
        own = permuted(second, states["second"], states["first"], less)
        middles[name] = loss(first, work, states["first"], own)
    place, out = arguments.work / "neurons-store", arguments.work / "neurons-out"
    for one in (place, out):
        shutil.rmtree(one, ignore_errors=True)
    with Store.init(place, block_size=1 << 16) as store:
        for name in states:
            store.add(work / name, name=name)
        report = store.permute("second", to="first", name="permuted")
        store.checkout("permuted", out)
        try:
            store.permute(TUNED[0], to=TUNED[1], name="tuned")
            aligned = False
        except Incompatible:
            aligned = True
    made = state(out)
    losses["permuted"] = loss(first, work, made)
    middles[SIGNED] = loss(first, work, states["first"], made)
    for one in (place, out):
        shutil.rmtree(one)
    results: dict[str, Any] = {
        "machine": machine(),
        "parameters": sum(one.numel() for one in states["first"].values()),
        "losses": losses,
        "middles": middles,
        "middle of fine-tunes": loss(first, work, *(states[name] for name in TUNED)),
        "fine-tunes are aligned": aligned,
        "rounds": report.rounds,
        "cosine before": report.cosine_before,
        "cosine": report.cosine,
        "kinds": [[one.kind, one.total, one.moved, one.flipped] for one in report.kinds],
    }
    keep(arguments.results, "neurons", results)


if __name__ == "__main__":
    main()
