"""One flipped byte anywhere in a small store: the right bytes or an error, and fsck finds it.

A nursery process forks workers that flip a byte, look in one way, and put the byte back.  A worker
that a signal ends is replaced: LMDB trusts its file, so reading a damaged one may end the process,
which is no wrong answer; fsck must survive even that.  What fsck does not find must change
nothing that can be told from outside (then the byte has no meaning), or be what `UNCHECKED` names.

Most bytes of a small store are padding and unused parts of pages.  So neighbours are flipped
together first, and one by one only where that changes an answer.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import pytest
import zstandard
from checkpoints import write_safetensors

from mstore import MergeRequest
from mstore.api import Store
from mstore.blocks.codecs import Codec
from mstore.blocks.packs import Kind, PackEntry, read_footer
from mstore.blocks.schema import DATABASES
from mstore.terms.errors import MstoreError

BLOCK = 1 << 16
PATIENCE = 120
"""Seconds after which a worker counts as hung: a loaded machine takes a tenth of that."""
TOGETHER = 40
"""Flips that are looked at together first."""
DATA = "index/data.mdb"
MIRROR = "refs/mirror"
PACK_HEADER = 48
"""Bytes of a pack's header; padding follows."""
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

EMPTY = {"condemned", "leases", "backup", "pruned", "pinned"}
"""Databases without rows: of work under way, of backups, and marks that gc and pins leave."""

UNCHECKED = {
    "reflog": "words and times of moves stand nowhere else",
    "plans": "the names that a plan's inputs were given stand nowhere else",
}
"""Databases whose rows fsck cannot check, and why."""


@dataclass(frozen=True)
class Flip:
    """A byte of a file of the store, and the bits of it to turn."""

    file: str
    offset: int
    bits: int


# -- in the nursery ----------------------------------------------------------------------------


def read_all(root: Path) -> Any:
    """Everything that can be read by the names of the refs, and the log; or the error."""
    found: dict[str, Any] = {}
    try:
        with Store.open(root) as store:
            for name in _NAMES:
                try:
                    view = store.view(name)
                    found[name] = {p: b"".join(view.stream(p)).hex() for p in view.files}
                    log = store.log(name)
                    found[f"log {name}"] = [str(one.snapshot) for one in log]
                    # A log goes on past what it cannot read, and marks it.
                    if lost := [str(one.snapshot) for one in log if one.missing]:
                        found[f"log {name}"] = f"error: snapshot {lost[0]}: missing"
                except MstoreError as error:
                    found[name] = _told(error)
            found["refs"] = [[r.name, r.kind, str(r.snapshot)] for r in store.refs()]
    except MstoreError as error:
        return _told(error)
    return found


def _told(error: MstoreError) -> str:
    return f"error: {type(error).__name__}: {error.where}: {error.what}"


def check(root: Path) -> str:
    """What fsck says: `clean`, or what it found first."""
    try:
        with Store.open_checked(root) as store:
            problems = store.fsck(read_data=True).problems
    except MstoreError as error:
        return _told(error)
    return f"found: {problems[0]}" if problems else "clean"


def rows(root: Path) -> dict[str, list[list[str]]]:
    """All rows of the index, by database."""
    with (
        lmdb.open(str(root / "index"), max_dbs=64, readonly=True, lock=False) as env,
        env.begin() as transaction,
    ):
        found = {}
        for name in DATABASES:
            with suppress(lmdb.NotFoundError):
                database = env.open_db(name.encode(), transaction, create=False)
                with transaction.cursor(db=database) as cursor:
                    found[name] = [[key.hex(), value.hex()] for key, value in cursor]
        return found


def write(root: Path) -> str:
    """Whether a writer that trusts this store does any harm: adds, then reads everything."""
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    source = root.parent / "more"
    write_safetensors(source / "model.safetensors", [("x", "U8", (3,), b"xyz")])
    try:
        with Store.open(root) as store:
            store.add(source, name="more", threads=1)
            store.remove("more")
        told = check(root)
        return told if told != "clean" else ("right" if read_all(root) == _TRUTH else "wrong")
    except MstoreError as error:
        return _told(error)
    finally:
        for path in list(root.rglob("*")):
            if path.is_file() and path not in before:
                path.unlink()
        for path, contents in before.items():
            path.write_bytes(contents)


WAYS: dict[str, Callable[[Path], Any]] = {
    way.__name__: way for way in (read_all, check, rows, write)
}
_NAMES: list[str] = []
_TRUTH: dict[str, Any] = {}


def nursery(pristine: str) -> None:
    """Answer each line of stdin, `[way, [[file, offset, bits], ...]]`, with a line."""
    tasks = [json.loads(line) for line in sys.stdin]
    store = Path(pristine)
    with Store.open(store) as opened:
        _NAMES.extend(ref.name for ref in opened.refs())
    _TRUTH.update(read_all(store))
    done = 0
    while done < len(tasks):
        scratch = Path(tempfile.mkdtemp())
        answers, answer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(answers)
            _work(store, scratch / "store", tasks[done:], answer)
        os.close(answer)
        with os.fdopen(answers) as lines:
            for line in lines:
                print(line, end="", flush=True)
                done += 1
        _, status = os.waitpid(child, 0)
        shutil.rmtree(scratch)
        if status:
            number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            print(json.dumps(f"died: {signal.Signals(number).name if number else status}"))
            done += 1


def _work(pristine: Path, root: Path, tasks: list[Any], answer: int) -> None:
    """A worker's life."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    shutil.copytree(pristine, root)
    for way, flips in tasks:
        signal.alarm(PATIENCE)
        for file, offset, bits in flips:
            turn(root / file, offset, bits)
        found = WAYS[way](root)
        if way == "read_all" and isinstance(found, dict):
            found = _compared(found)
        elif way == "rows":
            found = sorted(name for name in _rows_of(pristine) if found.get(name) != _ROWS[name])
        for file, offset, bits in flips:
            turn(root / file, offset, bits)
        os.write(answer, f"{json.dumps(found)}\n".encode())
    os._exit(0)


_ROWS: dict[str, list[list[str]]] = {}


def _rows_of(pristine: Path) -> dict[str, list[list[str]]]:
    if not _ROWS:
        _ROWS.update(rows(pristine))
    return _ROWS


def turn(path: Path, offset: int, bits: int) -> None:
    """Flip these bits of the byte at `offset`."""
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ bits]))


def _compared(found: dict[str, Any]) -> str:
    """`right`, `refs` where only the list of refs is another, `wrong`, or the first error."""
    differ = [key for key in _TRUTH if found.get(key) != _TRUTH[key]]
    errors = [found[key] for key in differ if isinstance(found.get(key), str)]
    silent = {key for key in differ if not isinstance(found.get(key), str)}
    # After an error there is no log.
    silent = {key for key in silent if not (key.startswith("log ") and key not in found)}
    if silent - {"refs"}:
        return f"wrong: {sorted(silent)}"
    return errors[0] if errors else "refs" if silent else "right"


# -- outside -----------------------------------------------------------------------------------


def ask(store: Path, tasks: Sequence[tuple[str, Sequence[Flip]]], workers: int = 2) -> list[Any]:
    """The answers to tasks, in their order: look in this way while these bytes are turned."""
    workers = min(workers, len(tasks))
    shares = [tasks[number::workers] for number in range(workers)]
    processes = []
    for share in shares:
        code = "import sys, test_flips; test_flips.nursery(sys.argv[1])"
        # Not a pipe: the others would wait until the first one's answers are read.
        answered = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- closed below
        with tempfile.TemporaryFile("w+") as lines:
            for way, flips in share:
                told = [[flip.file, flip.offset, flip.bits] for flip in flips]
                print(json.dumps([way, told]), file=lines)
            lines.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-c", code, str(store)],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=lines,
                stdout=answered,
            )
            processes.append((process, answered))
    answers: list[Any] = [None] * len(tasks)
    for number, (process, answered) in enumerate(processes):
        assert process.wait() == 0
        answered.seek(0)
        with answered:
            found = [json.loads(line) for line in answered]
        assert len(found) == len(shares[number])
        answers[number::workers] = found
    return answers


def ask_together(
    store: Path, flips: Sequence[Flip], harmless: Mapping[str, Any]
) -> dict[str, dict[Flip, Any]]:
    """The answers for each flip in each way; those that do no harm together are not asked one by
    one. harmless: the ways, with what each of them answers then.

    Only harm that two flips undo for each other is missed.
    """
    groups = [
        (way, flips[start : start + TOGETHER])
        for way in harmless
        for start in range(0, len(flips), TOGETHER)
    ]
    answers = zip(groups, ask(store, groups), strict=True)
    alone = [
        (way, [flip])
        for (way, group), answer in answers
        if answer != harmless[way]
        for flip in group
    ]
    found = {way: dict.fromkeys(flips, answer) for way, answer in harmless.items()}
    for (way, [flip]), answer in zip(alone, ask(store, alone), strict=True):
        found[way][flip] = answer
    return found


@dataclass
class Findings:
    """What came of many flips."""

    counts: Counter[str]
    violations: list[str]


def flip_all(store: Path, flips: list[Flip]) -> Findings:
    """Flip, read, check; and where fsck finds nothing, look closer."""
    counts: Counter[str] = Counter()
    violations: list[str] = []
    first = ask_together(store, flips, {"read_all": "right", "check": "clean"})
    unseen: list[tuple[Flip, str]] = []
    for flip in flips:
        read, checked = first["read_all"][flip], first["check"][flip]
        area = flip.file.partition("/")[0]
        counts[f"{area}: read {_kind(read)}"] += 1
        counts[f"{area}: fsck {_kind(checked)}"] += 1
        if read.startswith("wrong"):
            violations.append(f"{flip}: {read}")
        if read.startswith("error") and ": None: " in read:
            violations.append(f"{flip}: an error that names nothing: {read}")
        if read.startswith("died") and (flip.file != DATA or "SIGALRM" in read):
            violations.append(f"{flip}: reading {read}")
        if checked.startswith("died"):
            violations.append(f"{flip}: fsck {checked}")
        if checked == "clean":
            unseen.append((flip, read))
    closer = [flip for flip, _ in unseen if flip.file == DATA]
    second = ask_together(store, closer, {"rows": [], "write": "right"})
    for flip, read in unseen:
        told = second["rows"].get(flip, [])
        if told and set(told) <= UNCHECKED.keys():
            counts[f"not checked: {told[0]}"] += 1
        elif flip.file == "config" and read == "right":
            # Any number of days is as good as another, and a setting stands nowhere else.
            counts["not checked: config"] += 1
        elif read != "right" or told:
            violations.append(f"{flip}: reading says {read}, fsck nothing; other rows: {told}")
        elif flip.file == DATA:
            counts["index: without meaning"] += 1
            if (answer := second["write"][flip]) != "right":
                violations.append(f"{flip}: not found, and the next add: {answer}")
        elif not _means_nothing(store, flip):
            violations.append(f"{flip}: not found, and no padding")
        else:
            counts[f"{flip.file.partition('/')[0]}: without meaning"] += 1
    return Findings(counts, violations)


def _kind(answer: str) -> str:
    return answer.partition(":")[0]


def _means_nothing(store: Path, flip: Flip) -> bool:
    """Whether a byte of a pack is padding, or these bits of a payload say what nothing depends on.

    zstd ignores the unused bit of a frame's header, and bits that end a description of its codes:
    such a frame decodes to the same bytes. In a code of elements no element may have a certain
    class, context or symbol.
    """
    if not flip.file.startswith("packs/"):
        return False
    path = store / flip.file
    pack = path.read_bytes()
    entries = read_footer(path).entries
    tail = pack[-64:]
    used = [(0, PACK_HEADER), (len(pack) - 64, 64)]
    used.append((int.from_bytes(tail[:8], "little"), int.from_bytes(tail[8:16], "little")))
    for entry in entries:
        at = flip.offset - entry.offset
        if 0 <= at < entry.stored_length:
            frame = bytearray(pack[entry.offset : entry.offset + entry.stored_length])
            if entry.codec in (Codec.FLOATS, Codec.DELTA):
                return at in SHIFT_AND_LOWEST or CODED_HEADER <= at < _end_of_tables(entry, frame)
            return entry.codec == Codec.ZSTD and _is_ignored(frame, at, flip.bits)
    return not any(start <= flip.offset < start + length for start, length in used)


SHIFT_AND_LOWEST = (3, 4)
CODED_HEADER = 12


def _end_of_tables(entry: PackEntry, payload: bytes) -> int:
    """Where the words of coded elements begin (docs/format.md)."""
    lanes = 32 if entry.raw_length // entry.width < 1 << 14 else 128
    return len(payload) - 4 * lanes - 2 * int.from_bytes(payload[8:12], "little")


def _is_ignored(frame: bytearray, at: int, bits: int) -> bool:
    plain = zstandard.decompress(bytes(frame))
    frame[at] ^= bits
    return zstandard.decompress(bytes(frame)) == plain


# -- the store ---------------------------------------------------------------------------------


def small_store(root: Path) -> Path:
    """A store of a few kilobytes with all that `test_the_flipped_store_has_everything` asks for."""
    draw = random.Random("flips")

    def floats(count: int) -> bytes:
        # Exponents like those of weights: their planes can be compressed.
        return b"".join(
            bytes([draw.randrange(256), 0x3C | draw.randrange(2)]) for _ in range(count)
        )

    weights, noise = floats(800), draw.randbytes(300)
    tuned = bytes(b ^ (draw.random() < 0.1) if not n % 2 else b for n, b in enumerate(weights))
    for name, values in (("base", weights), ("tuned", tuned)):
        write_safetensors(
            root / name / "model.safetensors",
            [
                ("w", "BF16", (20, 40), values),
                ("i", "I32", (20, 20), values[2:] + values[:2]),
                ("zeros", "F32", (40,), bytes(160)),
                ("noise", "U8", (300,), noise),
            ],
        )
    (root / "base" / "config.json").write_text('{"model_type": "none"}\n')
    with Store.init(root / "store", block_size=BLOCK) as store:
        store.add(root / "base", name="base", threads=1)
        store.add(root / "tuned", name="team/tuned", base="base", message="tuned", threads=1)
        plan = store.plan(
            MergeRequest(
                base="base",
                experts=["team/tuned"],
                method="task_arithmetic",
                parameters={"lambda": 0.5},
                skip=["i"],
            ),
            threads=1,
        )
        store.merge(plan, name="merged", threads=1)
        later = store.plan(
            MergeRequest(base="base", experts=["team/tuned"], method="linear", skip=["i"]),
            threads=1,
        )
        store.merge(later, name="virtual", virtual=True, threads=1)
        store.tag("v1", "base")
        store.note("v1", {"mmlu": 0.5})
        store.evaluate("v1", ["true"])
    # Beside the store's own; they are made when somebody needs them.
    shutil.rmtree(root / "store" / "stats")
    (root / "store" / "stats").mkdir()
    shutil.rmtree(root / "store" / "memo", ignore_errors=True)
    return root / "store"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_store(tmp_path_factory.mktemp("flips"))


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    """A copy: who reads a store makes files in it, which no other test should flip."""
    return Path(shutil.copytree(made, tmp_path / "store"))


def every_byte(store: Path, *, bits: int = 0xFF) -> Iterator[Flip]:
    """Each byte of packs, index, mirror, format and configuration.

    Not of earlier mirrors and pack lists: they are spares, checked when they are asked.
    """
    lists = sorted(store.glob("refs/packs.*"), key=lambda path: int(path.suffix[1:]))
    spare_lists = {str(path.relative_to(store)) for path in lists[:-1]}
    for path in sorted(store.rglob("*")):
        name = str(path.relative_to(store))
        is_spare = name.startswith(f"{MIRROR}.") or name in spare_lists
        if path.is_file() and not is_spare and name not in ("lock", "index/lock.mdb"):
            yield from (Flip(name, at, bits) for at in range(path.stat().st_size))


def is_heavy(flip: Flip) -> bool:
    """Bytes on which much depends: small files whole, both ends of packs, LMDB's meta pages."""
    if flip.file == DATA:
        return flip.offset % 4096 < 160 and flip.offset < 8192
    return not flip.file.startswith("packs/") or flip.offset < PACK_HEADER


def sample(store: Path, every: int, heavy: int, seed: int) -> list[Flip]:
    """One byte of `every`, and one of `heavy` of those that are; one bit each, by the seed."""
    draw = random.Random(seed)
    start, heavy_start = draw.randrange(every), draw.randrange(heavy)

    def is_drawn(number: int, flip: Flip) -> bool:
        return number % every == start or (is_heavy(flip) and number % heavy == heavy_start)

    return [
        Flip(flip.file, flip.offset, 1 << draw.randrange(8))
        for number, flip in enumerate(every_byte(store))
        if is_drawn(number, flip)
    ]


PARTS = 12


def test_the_flipped_store_has_everything(store: Path) -> None:
    """The flipped store has each kind of record, each codec, and rows in all tables but `EMPTY`.
    Each of its parts has bytes that are flipped."""
    entries = [entry for path in store.rglob("*.pack") for entry in read_footer(path).entries]
    assert {Kind(entry.kind) for entry in entries} == set(Kind)
    assert {Codec(entry.codec) for entry in entries} == set(Codec)
    assert {entry.width for entry in entries if entry.codec == Codec.DELTA} == {2, 4}
    assert {name for name, found in rows(store).items() if found} == set(DATABASES) - EMPTY
    flipped = {flip.file.partition("/")[0] for flip in every_byte(store)}
    assert flipped == {"config", "format", "index", "packs", "refs"}


@pytest.mark.sampled(PARTS)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_flipped_byte_is_an_error_and_found(store: Path, part: int) -> None:
    """A sample of flips: never wrong bytes, never an error that names nothing, fsck finds it.

    Of all but the index, in which LMDB may stumble for a long time: that is for the long lane.
    """
    seed = random.SystemRandom().randrange(1 << 20)
    flips = [flip for flip in sample(store, 421, 5, seed) if flip.file != DATA]
    findings = flip_all(store, flips[part::PARTS])
    assert findings.violations == [], f"seed {seed}"
    assert findings.counts["packs: fsck found"] > 1


@pytest.mark.rest
def test_bits_that_zstd_ignores_change_nothing(store: Path) -> None:
    """The unused bit of each frame's header (RFC 8878, 3.1.1.1.1): right bytes, a clean fsck."""
    flips = [
        Flip(str(path.relative_to(store)), entry.offset + len(ZSTD_MAGIC), 1 << 4)
        for path in sorted(store.rglob("*.pack"))
        for entry in read_footer(path).entries
        if entry.codec == Codec.ZSTD
    ]
    assert len(flips) > 3
    findings = flip_all(store, flips)
    assert findings.violations == []
    assert findings.counts == {
        "packs: read right": len(flips),
        "packs: fsck clean": len(flips),
        "packs: without meaning": len(flips),
    }


@pytest.mark.slow
def test_each_flipped_byte_is_an_error_and_found(store: Path) -> None:
    """Each byte of the store, all of its bits at once."""
    findings = flip_all(store, list(every_byte(store)))
    print(*sorted(findings.counts.items()), sep="\n")
    assert findings.violations == []
