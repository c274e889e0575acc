"""Makes the golden store of this format version: everything that the format knows, in little.

    python tests/golden/make.py tests/golden/format-3

Run it once for a format version, and again when what is written changes, as for a new codec.  From
the first release on, what it made stays as it is, and every later version must read it
(tests/test_golden.py).

Beside the store it writes a JSON file of what is in it.  Statistics and
the memo table are left out, as they may be at any time, and so are LMDB's lock file and empty
directories, which git does not keep.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT.parent))

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
from checkpoints import safetensors_bytes  # noqa: E402
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: E402
from proof_models import BLOCK, model_files, write_files  # noqa: E402

from mstore import MergeRequest  # noqa: E402
from mstore.api import Store  # noqa: E402
from mstore.snapshots.signing import SigningKey  # noqa: E402


def make(target: Path) -> None:
    """A new store at `target`, and `target`.json."""
    with tempfile.TemporaryDirectory() as scratch:
        sources = Path(scratch)
        noise = {
            "noise.bin": random.Random("golden").randbytes(5000),
            "sub/ünï.txt": b"",
            "e": b"\n",
        }
        write_files(sources / "base", model_files(1) | noise)
        for number in (1, 2, 3):
            write_files(sources / f"tuned{number}", model_files(1, number))
        write_files(sources / "all", {"all.safetensors": all_kinds(moved=False)})
        write_files(sources / "moved", {"all.safetensors": all_kinds(moved=True)})
        with Store.init(target, block_size=BLOCK, codec="dense") as store:
            store.configure("reflog_days", 0)
            store.add(sources / "base", name="base", message="the base", codec="raw", threads=1)
            # Of this one only the lineage stays, and blocks that others are differences to.
            store.add(sources / "tuned3", name="team/tuned", message="an old one", threads=1)
            store.add(sources / "tuned1", name="team/tuned", base="base", threads=1)
            store.add(sources / "tuned2", name="team/other", base="team/tuned@{1}", threads=1)
            plan = store.plan(
                MergeRequest(
                    base="base",
                    experts=["team/tuned", ("team/other", 0.5)],
                    method="ties",
                    parameters={"density": 0.5},
                    skip=["i"],
                ),
                threads=1,
            )
            store.merge(plan, name="merged", message="both", threads=1)
            store.add(sources / "all", name="kinds/all", threads=1)
            store.add(sources / "moved", name="kinds/moved", base="kinds/all", threads=1)
            later = store.plan(
                MergeRequest(base="base", experts=["team/other"], method="linear", skip=["i"]),
                threads=1,
            )
            store.merge(later, name="virtual", virtual=True, threads=1)
            store.tag("v1", "merged")
            key = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
            store.sign("v1", key, signer="somebody")
            noted = store.note("v1", {"mmlu": 0.625, "seen": {"by": ["ada", None], "times": 300}})
            store.sign("v1", key, note=noted[0].note)
            store.remove_notes("v1", [store.note("v1", {"mmlu": 0.5})[0].note])
            store.add(sources / "tuned2", name="gone", threads=1)
            store.remove("gone")
            store.prune(keep_last=1)
            store.gc()
            expected = contents(store)
    for name in ("stats", "memo", "tmp"):
        shutil.rmtree(target / name, ignore_errors=True)
    (target / "index" / "lock.mdb").unlink()
    told = json.dumps(expected, indent=1, ensure_ascii=False, sort_keys=True)
    target.with_suffix(".json").write_text(told + "\n")


SHORT = 1500
"""Elements of a tensor that has few lanes in the code of its elements."""


def all_kinds(*, moved: bool) -> bytes:
    """Tensors of all widths that are coded, and others; or the same after a fine-tune.

    "far" ones move so far that differences of narrow ones are many, and of wide ones large; of
    "half" ones a part stays.
    """
    draw, noise, bits = (np.random.default_rng(seed) for seed in (4, 5, 6 + moved))
    tensors = []

    def put(name: str, kind: object, values: np.ndarray, steps: np.ndarray | float) -> None:
        array = (values + steps if moved else values).astype(kind)
        if name != BF16_IN_F32:
            # Of any bits, NaN and infinities among them.
            wild = array.view(np.uint8)[-40:]
            wild[:] = bits.integers(0, 256, 40)
        tensors.append((name, KINDS[array.dtype.name], array.shape, array.tobytes()))

    for name in ("float8_e4m3fn", "bfloat16", "float32"):
        kind = np.dtype(name if name == "float32" else getattr(ml_dtypes, name))
        long = BLOCK // kind.itemsize + SHORT
        place = np.arange(long)
        values = np.where(place % 31 == 0, draw.normal(0, 0.02, long), 0)
        steps = np.where((values != 0) & (place > long // 3), noise.normal(0, 1e-4, long), 0)
        put(f"{name}.long", kind, values, steps)
        short = draw.normal(0, 0.02, SHORT)
        put(f"{name}.far", kind, short, 0.05 * short * noise.normal(0, 1, SHORT))
        half = noise.normal(0, 1e-4, SHORT) * (np.arange(SHORT) > SHORT // 2)
        put(f"{name}.half", kind, short, half)
    short = draw.normal(0, 0.02, SHORT)
    put("float16.far", np.float16, short, 0.05 * short * noise.normal(0, 1, SHORT))
    short = draw.normal(0, 0.02, SHORT).astype(ml_dtypes.bfloat16).astype(np.float32)
    put(BF16_IN_F32, np.float32, short, short / 64)
    for name in ("int8", "int16", "int32", "int64"):
        short = draw.integers(-100, 100, SHORT)
        put(name, name, short, noise.integers(-2, 3, SHORT))
    return safetensors_bytes(tensors)


BF16_IN_F32 = "float32.of bfloat16"
KINDS = {
    "float8_e4m3fn": "F8_E4M3",
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
}


def contents(store: Store) -> dict[str, object]:
    """What a store tells of itself by its public face."""
    return {
        "refs": {ref.name: [ref.kind, str(ref.snapshot)] for ref in store.refs()},
        "files": {ref.name: files(store, ref.name) for ref in store.refs()},
        "log": [
            {
                "snapshot": str(one.snapshot),
                "manifest": str(one.manifest),
                "parents": [[parent.role, str(parent.snapshot)] for parent in one.parents],
                "made": one.made,
                "origin": one.origin and [one.origin.url, one.origin.revision, one.origin.commit],
                "author": one.author,
                "plan": None if one.plan is None else str(one.plan),
                "virtual": one.virtual,
                "message": one.message,
                "time_ns": one.time_ns,
                "signatures": [[s.key, s.state] for s in one.signatures],
                "notes": [[n.kind, n.key, n.value, n.time_ns] for n in one.notes],
            }
            for one in store.log()
        ],
        "reflogs": {
            name: [[str(m.old), str(m.new), m.action, m.time_ns] for m in store.reflog(name)]
            for name in [*(ref.name for ref in store.refs()), "gone"]
        },
        # As the file has it: what came later has its default, and is not in it.
        "config": {k: v for k, v in store.config.items() if k in ("codec", "reflog_days")},
    }


def files(store: Store, revision: str) -> dict[str, str]:
    """path -> SHA-256 of each file, read block by block."""
    found = {}
    view = store.view(revision)
    for path in view.files:
        hasher = hashlib.sha256()
        for piece in view.stream(path):
            hasher.update(piece)
        found[path] = hasher.hexdigest()
    return found


if __name__ == "__main__":
    make(Path(sys.argv[1]))
