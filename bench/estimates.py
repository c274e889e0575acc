"""Estimates of the error of merges under a budget, against the error that was measured.

    python bench/estimates.py WORK [--quick] [--method NAME]...

Writes and prints bench/results/estimates.json; `report.py` then writes the table of
docs/merge-methods.md.  WORK/family4 is trained by examples/family.py if it is not there (a minute
with --quick; kept for the next run), WORK needs 1 GB.  Nothing is timed, and everything is a
function of the families, so each merge is made once; --method measures these methods only, and
keeps what is known of the others.

Families of random numbers, three experts of half a million elements:

    normal        normal deltas that have nothing to do with each other
    related       the same, correlated by 0.7
    alike         the same, by 0.99
    sparse        the same as normal, at a tenth of the places
    uneven        normal deltas of norms 1, 5 and 25, from chunk to chunk those of another expert
    steps         every element moves by one step of bf16, up, down or not: all magnitudes tie
    grid          steps of a few sizes, in bf16 and in fp32
    undecided     two experts move every element apart by one step, and a light third one decides

Fishers of these are random over ten powers of ten, a tenth of them zero; Gram matrices and
magnitudes are of random inputs, of sizes over powers of ten.  Those of the trained family are what
`examples/fisher.py` and `examples/gram.py` make of 256 windows of what each expert was trained on,
the base's of all of that.  Masks are those of `mstore emr`; the aligned model is the last expert,
the unaligned one the base.

`ratios` are measured over estimated error: above 1 the merge is further off than was estimated.
`looked` are the bytes read to know the ties under a budget, once a density, over what the merge
without a budget reads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import struct
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from mstore import MergeRequest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent.parent / "examples"))

import ml_dtypes
import numpy as np
from measure import RESULTS, keep, machine
from safetensors.numpy import save_file

import mstore
from mstore.merge.measures.grid import Companion
from mstore.merge.methods.method import Method
from mstore.merge.methods.registry import METHODS
from mstore.store.objects.plan import BASE

BLOCK_SIZE = 1 << 16
ELEMENTS = 8 * BLOCK_SIZE
ROW = 1 << 10
INPUTS = 64
"""Inputs of a block of a Gram matrix."""
WINDOWS = 256
TOKENS = 128
SHARES = (0.1, 0.3, 0.6, 0.9, 0.99)
WEIGHTS = {
    "equal": (1.0, 1.0, 1.0, 1.0),
    "unequal": (1.0, 0.5, 0.75, 1.0),
    "steep": (1.0, 0.1, 0.3, 0.05),
}
DENSITIES = (0.1, 0.3, 0.6, 1.0)
REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("linear", {}),
    ("task_arithmetic", {}),
    *(("ties", {"density": density}) for density in DENSITIES),
    *(("ties", {"density": density, "normalize": False}) for density in DENSITIES),
    *(("dare_linear", {"density": density}) for density in DENSITIES),
    ("dare_linear", {"density": 0.3, "rescale": False}),
    *(("dare_ties", {"density": density}) for density in DENSITIES),
    *(("dare_ties", {"density": density, "normalize": True}) for density in DENSITIES),
    ("dare_ties", {"density": 0.3, "normalize": True, "rescale": False}),
    *(("breadcrumbs", {"density": density}) for density in DENSITIES),
    *(("slerp", {"t": t}) for t in (0.25, 0.5)),
    *(("breadcrumbs_ties", {"density": density}) for density in DENSITIES),
    ("karcher", {}),
    ("model_stock", {}),
    ("multislerp", {}),
    ("multislerp", {"around_base": False}),
    ("nuslerp", {}),
    ("nuslerp", {"around_base": False}),
    ("passthrough", {}),
    ("dare_linear", {"density": 0.3, "rescale": "l1"}),
    ("dare_ties", {"density": 0.3, "rescale": "l1"}),
    *(("della", {"density": density, "epsilon": 0.1}) for density in (0.3, 0.6)),
    *(("della_linear", {"density": density, "epsilon": 0.1}) for density in (0.3, 0.6)),
    *(("nearswap", {"t": t}) for t in (1e-4, 0.003, 0.03)),
    *(("ram", {"epsilon": epsilon}) for epsilon in (1e-5, 1e-3)),
    *(("ramplus_tl", {"epsilon": epsilon}) for epsilon in (1e-5, 1e-3)),
    *(("sce", {"select_topk": share}) for share in (1.0, 0.5, 0.1)),
    *(("consensus", {"tall_mask_lambda": ratio}) for ratio in (0.2, 1.0)),
    ("consensus", {"k": 1}),
    *(("fisher", {"floor": floor}) for floor in (0.0, 1e-6)),
    ("arcee_fusion", {}),
    *(("pcb", {"ratio": ratio}) for ratio in (0.05, 0.1, 0.3)),
    ("lines", {"alpha": 0.3, "beta": 0.7}),
    *(("guarded", {"threshold": 0.5, "alpha": alpha}) for alpha in (0.0, 0.5)),
    ("geometric_median", {}),
    ("add_perpendicular", {}),
    ("train_difference", {}),
    ("tensor_sum", {}),
    *((method, {"alpha": 0.5}) for method in ("add_cosine_a", "add_cosine_b")),
    *(("clamp", {"stiffness": stiffness}) for stiffness in (0.0, 0.5)),
    ("regmean", {}),
    ("aim", {"omega": 0.4}),
    # Above 1 no cosine is, so every matrix is mixed.
    *(("safe_merge", {"threshold": threshold}) for threshold in (0.35, 1.0)),
    ("emr", {}),
    ("masked", {}),
)
UNWEIGHTED = {name for name, method in METHODS.items() if not method.weighted}
Array = np.ndarray[Any, Any]
Model = dict[str, Array]
Figures = dict[str, Any]


def related(share: float) -> list[Model]:
    """A base, and experts whose deltas have so much in common."""
    rng = np.random.default_rng(13)
    base, common = rng.standard_normal(ELEMENTS), rng.standard_normal(ELEMENTS)
    models = [{"w": base}]
    for _ in range(3):
        own = rng.standard_normal(ELEMENTS) * np.sqrt(1 - share * share)
        models.append({"w": base + (share * common + own) / 64})
    return models


def sparse() -> list[Model]:
    """A tenth of the elements moves, of each expert others."""
    rng = np.random.default_rng(15)
    base = rng.standard_normal(ELEMENTS).astype(np.float32)
    moves = [rng.standard_normal(ELEMENTS) * (rng.random(ELEMENTS) < 0.1) for _ in range(3)]
    return [{"w": base}, *({"w": (base + one / 64).astype(np.float32)} for one in moves)]


def uneven() -> list[Model]:
    """In each chunk one expert moves far more than another."""
    rng = np.random.default_rng(16)
    base = rng.standard_normal(ELEMENTS).astype(np.float32)
    chunk = np.arange(ELEMENTS) // (BLOCK_SIZE // 4)
    models = [{"w": base}]
    for number in range(3):
        size = 5.0 ** ((chunk + number) % 3) / 512
        models.append({"w": (base + rng.standard_normal(ELEMENTS) * size).astype(np.float32)})
    return models


def steps() -> list[Model]:
    """One step up, down, or none."""
    rng = np.random.default_rng(12)
    base = (1 + rng.random(ELEMENTS)).astype(ml_dtypes.bfloat16).astype(np.float32)
    moves = (rng.integers(-1, 2, ELEMENTS) * 2.0**-7 for _ in range(3))
    return [{"w": base}, *({"w": base + move} for move in moves)]


def grid() -> list[Model]:
    """Up to three steps."""
    rng = np.random.default_rng(11)
    base = {"a": np.zeros(ELEMENTS), "b": np.zeros(ELEMENTS, np.float32), "c": np.ones(ELEMENTS)}
    models = [base]
    for _ in range(3):
        a, b = (2.0**-9 * rng.integers(-3, 4, ELEMENTS) for _ in "ab")
        models.append(base | {"a": a, "b": (b * 1.00003).astype(np.float32)})
    return models


def undecided() -> list[Model]:
    """Two that cancel, and a third, a thousand times as small, that decides."""
    rng = np.random.default_rng(14)
    base = np.ones(ELEMENTS, np.float32)
    move, light = (rng.choice([-1.0, 1.0], ELEMENTS) for _ in range(2))
    moves = (move * 2.0**-7, -move * 2.0**-7, light * 2.0**-17)
    return [{"w": base}, *({"w": (base + one).astype(np.float32)} for one in moves)]


FAMILIES: Mapping[str, Callable[[], list[Model]]] = {
    "normal": lambda: related(0.0),
    "related": lambda: related(0.7),
    "alike": lambda: related(0.99),
    "sparse": sparse,
    "uneven": uneven,
    "steps": steps,
    "grid": grid,
    "undecided": undecided,
}
TRAINED = "trained"


def write(directory: Path, model: Model) -> None:
    """A safetensors file; what is float64 becomes bf16."""
    header, data = {}, b""
    for name, array in model.items():
        is_single = array.dtype == np.float32
        stored = (array if is_single else array.astype(ml_dtypes.bfloat16)).tobytes()
        header[name] = {
            "dtype": "F32" if is_single else "BF16",
            # Rows, for methods that rank along them.
            "shape": [array.size // ROW, ROW],
            "data_offsets": [len(data), len(data) + len(stored)],
        }
        data += stored
    text = json.dumps(header).encode()
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def fishers(models: Sequence[Model]) -> list[Model]:
    """What each expert is said to know of its elements."""
    rng = np.random.default_rng(17)

    def known(array: Array) -> Array:
        values = 10.0 ** rng.uniform(-12, -2, array.shape) * (rng.random(array.shape) < 0.9)
        return values.astype(np.float32).reshape(-1, ROW)

    return [{name: known(array) for name, array in one.items()} for one in models]


def grams(models: Sequence[Model]) -> list[Model]:
    """Gram matrices of inputs that vary together, of sizes that differ a hundredfold."""
    from gram import packed

    rng = np.random.default_rng(18)
    blocks, tokens = ROW // INPUTS, 2 * INPUTS

    def drawn() -> Array:
        common = rng.standard_normal((blocks, tokens, 1))
        inputs = common + rng.standard_normal((blocks, tokens, INPUTS))
        inputs *= 10.0 ** rng.uniform(-1, 1, (blocks, 1, INPUTS))
        return packed(inputs.transpose(0, 2, 1) @ inputs / tokens)

    return [{name: drawn() for name in one} for one in models]


def magnitudes(models: Sequence[Model]) -> list[Model]:
    """Mean magnitudes of inputs, over four powers of ten."""
    rng = np.random.default_rng(19)
    return [
        {name: (10.0 ** rng.uniform(-2, 2, ROW)).astype(np.float32) for name in one}
        for one in models
    ]


def fisher_of(model: Any, windows: Sequence[Any]) -> Model:
    """What a trained model knows of its elements."""
    from fisher import diagonal

    return {name: one.numpy() for name, one in diagonal(model, windows).items()}


def inputs_of(model: Any, windows: Sequence[Any], block: int | None) -> Model:
    """Gram matrices of what a trained model's layers are given, or mean magnitudes: no block."""
    from gram import Sums, gather

    sums = Sums(block)
    gather(model, windows, sums)
    return sums.tensors()


INVENTED: Mapping[str, Callable[[Sequence[Model]], list[Model]]] = {
    "fisher": fishers,
    "gram": grams,
    "activation": magnitudes,
}
GATHERED: Mapping[str, Callable[[Any, Sequence[Any]], Model]] = {
    "fisher": fisher_of,
    "gram": lambda model, windows: inputs_of(model, windows, INPUTS),
    "activation": lambda model, windows: inputs_of(model, windows, None),
}
ROLES = {one.role: one for method in METHODS.values() for one in method.companions}


def called(one: Companion, experts: Sequence[str]) -> dict[str, str]:
    """The names of companions of one role in the store, by those of a request."""
    if one.of is None:
        return {one.role: one.role}
    names = ["base"] if one.of == BASE else experts
    return {f"{one.role}:{name}": f"{name}-{one.role}" for name in names}


def companions_of(method: Method, experts: Sequence[str]) -> dict[str, str]:
    """The companions of a request for a merge of these experts."""
    return {
        asked: name for one in method.companions for asked, name in called(one, experts).items()
    }


def gathered(trained: Path, members: Sequence[str], name: str, role: str) -> Path:
    """A companion of a trained model, of the texts it has seen, made now if it is not there."""
    path = trained / f"{name}-{role}"
    if not path.exists():
        from family import DOMAINS, load, read_corpus
        from fisher import windows_of

        domains = [one for one in DOMAINS if one.name in members and name in (one.name, "base")]
        windows = [
            window
            for one in domains
            for window in windows_of(
                read_corpus(one).training.tolist(), WINDOWS // len(domains), TOKENS
            )
        ]
        save(path, GATHERED[role](load(trained / name), windows))
    return path


def save(path: Path, tensors: Model) -> None:
    """A companion, as it is."""
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors")


def add_masks(store: mstore.Store, experts: Sequence[str]) -> None:
    """The masks with which a model of all experts would be theirs."""
    store.emr(MergeRequest(base="base", experts=experts, method="emr"), name="emr")
    for name in experts:
        store.tag(f"{name}-mask", f"emr/masks/{name}")


def add_alignment(store: mstore.Store, experts: Sequence[str]) -> None:
    """What alignment changed is said to be what the last expert did."""
    store.tag("aligned", experts[-1])
    store.tag("unaligned", "base")


def set_up(work: Path, family: str, trained: Path) -> tuple[mstore.Store, list[str]]:
    """A store of the family with all companions, and its experts."""
    root = work / "estimates"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    known = {}
    if family == TRAINED:
        members = json.loads((trained / "family.json").read_text())["members"]
        directories = {name: trained / name for name in members}
        experts = [name for name in members if name != "base"]
        for role in GATHERED:
            for of, name in called(ROLES[role], experts).items():
                known[name] = gathered(trained, members, of.partition(":")[2], role)
    else:
        models = {
            f"e{number}" if number else "base": model
            for number, model in enumerate(FAMILIES[family]())
        }
        directories = {name: root / name for name in models}
        experts = [name for name in models if name != "base"]
        for name, model in models.items():
            write(root / name, model)
        for role, invent in INVENTED.items():
            names = called(ROLES[role], experts)
            own = invent([models[of.partition(":")[2]] for of in names])
            for name, tensors in zip(names.values(), own, strict=True):
                known[name] = root / name
                save(root / name, tensors)
    store = mstore.Store.init(root / "store", block_size=BLOCK_SIZE)
    store.add(directories["base"], name="base")
    for name in experts:
        store.add(directories[name], name=name, base="base")
    for name, directory in known.items():
        store.add(directory, name=name)
    add_masks(store, experts)
    add_alignment(store, experts)
    return store, experts


def compare(
    store: mstore.Store, experts: Sequence[str], wanted: Container[str], known: Sequence[Figures]
) -> list[Figures]:
    """Each request at each share; known: what is taken of methods that are not wanted."""
    found = []
    for (method, parameters), (kind, weights) in itertools.product(REQUESTS, WEIGHTS.items()):
        if method in UNWEIGHTED and kind != "equal":
            continue
        if method not in wanted:
            asked = {"method": method, "parameters": parameters, "weights": kind}
            found += [one for one in known if asked.items() <= one.items()]
            continue
        own = experts[: METHODS[method].experts]
        report = store.sweep(
            MergeRequest(
                base="base",
                experts=list(zip(own, weights, strict=False)),
                method=method,
                companions=companions_of(METHODS[method], own),
                parameters=parameters,
            ),
            shares=SHARES,
            measure=True,
        )
        pairs = [(point.error_estimate, point.measured_error) for point in report.points]
        found.append(
            {
                "method": method,
                "parameters": parameters,
                "weights": kind,
                "ratios": [round(m / e, 4) for e, m in pairs if e and m is not None],
                # Of steps of one size none is important.
                "looked": report.analyze_bytes_read / (report.full_expert_bytes or 1),
            }
        )
    return found


def summary(found: Sequence[Figures]) -> dict[str, tuple[float, float]]:
    """Smallest and largest ratio of each method."""
    told: dict[str, tuple[float, float]] = {}
    for one in found:
        low, high = told.get(one["method"], (np.inf, 0.0))
        told[one["method"]] = (min([low, *one["ratios"]]), max([high, *one["ratios"]]))
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("work", type=Path)
    parser.add_argument("--quick", action="store_true", help="train a model of 1 M parameters")
    parser.add_argument("--method", action="append", choices=METHODS, help="only this one")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    trained = arguments.work / ("family4quick" if arguments.quick else "family4")
    if not (trained / "family.json").exists():
        from family import FULL, QUICK, train_family

        shutil.rmtree(trained, ignore_errors=True)
        train_family(trained, size=QUICK if arguments.quick else FULL, experts=4)
    known: Figures = {}
    if arguments.method:
        known = json.loads((arguments.results / "estimates.json").read_text())
    results: Figures = {"machine": machine(), "quick": arguments.quick, "block_size": BLOCK_SIZE}
    for family in (*FAMILIES, TRAINED):
        store, experts = set_up(arguments.work, family, trained)
        with store:
            own = known.get(family, {}).get("merges", [])
            found = compare(store, experts, arguments.method or METHODS, own)
        results[family] = {"merges": found}
        print(family, summary(found), max(one["looked"] for one in found), flush=True)
    shutil.rmtree(arguments.work / "estimates")
    keep(arguments.results, "estimates", results)


if __name__ == "__main__":
    main()
