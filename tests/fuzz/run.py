"""Fuzzing: give a target changed inputs until the time is over, in a process with limits.

    python tests/fuzz/run.py SECONDS [TARGET]... [--seed N] [--found DIR]

Exit status 0: nothing found; 1: an input for which a target raised anything but MstoreError, took
longer than LONGEST or more memory than MEMORY.  Such an input is written to DIR
(default tests/fuzz/corpus/TARGET), where from then on every run of the tests tries it.
Where the module atheris is installed, it looks for inputs by coverage for half of the time.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from mutation import mutate  # noqa: E402 -- its directory is known only now

CORPUS = HERE / "corpus"
TARGETS = (
    *("tensor", "manifest", "snapshot", "plan", "coverage", "virtual", "note"),
    *("header", "shard_index", "declared", "plan_text", "recipe", "adapter", "tokenizer"),
    *("pack", "codec", "mirror", "format_line", "config", "signers", "private_key"),
    *("remote_root", "remote_list", "remote_table", "remote_statistics", "bundle"),
    *("registry_manifest", "registry_layer"),
)
LONGEST = 2.0
"""Seconds of the processor for one input of at most `mutation.LIMIT` bytes."""
MEMORY = 1 << 30
"""Bytes of address space beyond what the process has when it begins."""


def inputs(name: str) -> list[bytes]:
    """What a target begins with: its seeds and its corpus."""
    files = sorted((CORPUS / name).glob("*"))
    return [*module(name).seeds(), *(file.read_bytes() for file in files)]


def module(name: str) -> Any:
    """The module of a target."""
    return import_module(f"targets.{name}")


def complaint(target: Callable[[bytes], None], data: bytes, longest: float = LONGEST) -> str | None:
    """What is wrong with how a target takes an input, or None."""
    from mstore.terms.errors import MstoreError

    # The processor's time, so that a busy machine accuses nobody.
    began = time.process_time()
    try:
        target(data)
    except MstoreError:
        pass
    except Exception:  # noqa: BLE001 -- whatever it is, it is what this looks for
        return traceback.format_exc()
    seconds = time.process_time() - began
    return f"took {seconds:.1f} s for {len(data)} bytes" if seconds > longest else None


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """End this process, with every thread's stack, if what is inside takes longer by the clock.

    For a process of its own only: a run of the tests that ends so says nothing of the rest.
    """
    if "pytest" in sys.modules:
        raise AssertionError("a watchdog that ends the process belongs in a child process")
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def limit_memory() -> None:
    """Let this process take MEMORY more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def keep(directory: Path, data: bytes) -> Path:
    """Write an input where it is tried again."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / sha256(data).hexdigest()[:16]
    path.write_bytes(data)
    return path


def fuzz(names: Sequence[str], seconds: float, seed: int, found: Path | None) -> int:
    """Try changed inputs of each target in turn.  Returns the exit status."""
    draw = random.Random(seed)
    pools = {name: inputs(name) for name in names}
    # First inputs compile and import what the later ones need: that is no input's fault.
    for name in names:
        for data in pools[name]:
            with ended_after(1200.0):
                wrong = complaint(module(name).target, data, longest=60.0)
            if wrong is not None:
                print(f"{name}: an input of the corpus: {wrong}")
                return 1
    limit_memory()
    tried = dict.fromkeys(names, 0)
    running = tempfile.NamedTemporaryFile(prefix="mstore-fuzz-", delete=False)  # noqa: SIM115
    print(f"seed {seed}; the input under way is {running.name}", flush=True)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        for name in names:
            target, form = module(name).target, module(name).FORM
            turn = time.monotonic() + seconds / len(names) / 4
            while time.monotonic() < turn:
                data = mutate(draw.choice(pools[name]), form, draw, pools[name])
                # Where it is found if this process does not live to say what was wrong.
                os.ftruncate(running.fileno(), 0)
                os.pwrite(running.fileno(), data, 0)
                # What hangs, or only waits, takes no processor's time.
                with ended_after(20 * LONGEST):
                    wrong = complaint(target, data)
                tried[name] += 1
                if wrong is not None:
                    path = keep(found or CORPUS / name, data)
                    print(f"{name}: seed {seed}, input kept as {path}\n{wrong}")
                    return 1
    os.unlink(running.name)
    print(" ".join(f"{name}:{count}" for name, count in tried.items()))
    return 0


def guided(name: str, seconds: int) -> int:
    """Let atheris try one target, in a process of its own."""
    program = (
        "import sys, atheris\n"
        f"sys.path[:0] = {[str(HERE), str(HERE.parent)]!r}\n"
        "with atheris.instrument_imports(include=['mstore']):\n"
        f"    from targets import {name} as module\n"
        "from mstore.terms.errors import MstoreError\n"
        "def one(data):\n"
        "    try:\n"
        "        module.target(data)\n"
        "    except MstoreError:\n"
        "        pass\n"
        "atheris.Setup(sys.argv, one)\n"
        "atheris.Fuzz()\n"
    )
    found = CORPUS / name
    found.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mstore-fuzz-") as scratch:
        learnt = Path(scratch) / "learnt"
        for data in inputs(name):
            keep(learnt, data)
        options = [f"-max_total_time={seconds}", "-timeout=20", "-rss_limit_mb=4096"]
        options += ["-max_len=65536", "-verbosity=0", f"-artifact_prefix={found}/", str(learnt)]
        command = [sys.executable, "-c", program, *options]
        # It ends without cleaning up after itself.
        environment = {**os.environ, "TMPDIR": scratch}
        status = subprocess.run(command, check=False, env=environment).returncode
    if not any(found.iterdir()):
        found.rmdir()
    return status


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("seconds", type=float)
    parser.add_argument("targets", nargs="*", choices=[[], *TARGETS], default=[])
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--found", type=Path)
    parser.add_argument("--plain", action="store_true", help="without atheris")
    asked = parser.parse_args()
    names = tuple(asked.targets) or TARGETS
    with_guide = not asked.plain and find_spec("atheris") is not None
    status = fuzz(names, asked.seconds / (2 if with_guide else 1), asked.seed, asked.found)
    if with_guide:
        for name in names:
            status |= guided(name, max(1, int(asked.seconds / 2 / len(names))))
    return int(status != 0)


if __name__ == "__main__":
    sys.exit(main())
