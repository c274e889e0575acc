"""Scores of an evaluation: which file, which number; what lm-evaluation-harness says besides.

    results.json:acc                          the number under "acc"
    **/results_*.json:results.mmlu.acc,none   of the newest file that matches
    mmlu=/tmp/out.json:/results/mmlu/acc,none a name, an absolute path, a JSON pointer

Keys may hold dots: of several ways to split a pointer, the one with the longest first key that
leads to a value is taken. A pointer that begins with a slash is a JSON pointer (RFC 6901), which
splits in one way only. Only files that the run wrote count.
"""

from __future__ import annotations

import glob
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec
from blake3 import blake3

from mstore.checkpoint.paths import quoted
from mstore.checkpoint.reading import Stamp, open_regular, read_range
from mstore.terms.errors import BadRequest, CommandFailed, WrongCommand
from mstore.terms.phrases import Option, few

MAX_RESULT_BYTES: Final = 64 << 20
MAX_SAMPLES_BYTES: Final = 1 << 30
MAX_SAMPLES: Final = 200_000
MAX_VALUES: Final = 2000
"""Scores of samples that are kept, where they are not all 0 or 1."""
_MOST_NUMBERS: Final = 100
_DEEPEST: Final = 6
"""Of numbers that an error names: how many are looked for, below how many keys."""
_NAME = re.compile(r"(?P<name>[^=:/*?\[]+)=(?P<rest>.*)", re.DOTALL)
_SAMPLES = re.compile(r"samples_(?P<task>.+)_[^_]*\.jsonl")
_HARNESS = ("task_hashes", "versions", "n-samples", "higher_is_better")
"""What lm-evaluation-harness 0.4 says of its tasks, by task."""


class Score(msgspec.Struct, frozen=True):
    """Where one number of an evaluation is found."""

    name: str
    file: str
    pointer: str

    def __str__(self) -> str:
        return f"{self.name}={self.file}:{self.pointer}"

    @property
    def last_key(self) -> str:
        """The last key of the pointer, as far as its text tells: `acc,none`."""
        return re.split(r"[./]", self.pointer)[-1]


def parse_score(text: str) -> Score:
    """Parse `[NAME=]FILE:POINTER`; the name is the last key up to a comma.  Raises BadRequest."""
    named = _NAME.fullmatch(text)
    name, rest = ("", text) if named is None else (named["name"], named["rest"])
    file, colon, pointer = rest.partition(":")
    if not (file and colon and pointer.strip("./")):
        raise BadRequest(
            f"not [NAME=]FILE:POINTER: {quoted(text)}",
            where=Option("score"),
            hint=Option("score", "results.json:acc"),
        )
    if ".." in file.split("/"):
        raise BadRequest("a result lies in the directory of its run", where=Option("score"))
    found = Score(name, file, pointer)
    return found if name else msgspec.structs.replace(found, name=found.last_key.split(",")[0])


def parse_scores(texts: Iterable[str]) -> tuple[Score, ...]:
    """Parse several, whose names must differ.  Raises BadRequest."""
    found = tuple(map(parse_score, texts))
    names = [one.name for one in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadRequest(
            f"two scores are called {quoted(twice)}",
            where=Option("score"),
            hint=Option("score", "NAME=FILE:POINTER"),
        )
    return found


# -- files ---------------------------------------------------------------------------------------


class Written:
    """The files that a run writes: in its own directory, and those of absolute names."""

    def __init__(self, directory: Path, scores: Iterable[Score]) -> None:
        self._directory = directory
        elsewhere = {one.file for one in scores if os.path.isabs(one.file)}
        self._before = {file: dict(_regular(file)) for file in elsewhere}

    def newest(self, file: str) -> Path:
        """Return the newest file of this name or pattern.  Raises WrongCommand for none."""
        if os.path.isabs(file):
            before = self._before[file]
            found = {path: at for path, at in _regular(file) if before.get(path) != at}
        else:
            found = dict(_regular(os.path.join(glob.escape(str(self._directory)), file)))
        if not found:
            raise WrongCommand(f"the command wrote no such file{self._others()}", where=file)
        return Path(max(found, key=lambda path: (found[path].mtime_ns, path)))

    def _others(self) -> str:
        """Tell which files of JSON the command did write in its directory."""
        pattern = os.path.join(glob.escape(str(self._directory)), "**", "*.json")
        found = sorted(os.path.relpath(path, self._directory) for path, _ in _regular(pattern))
        return f"; it wrote {few(found)}" if found else ""

    def samples(self) -> Iterator[tuple[str, Path]]:
        """Yield files of single samples, as lm-evaluation-harness names them, with their tasks."""
        newest: dict[str, tuple[int, Path]] = {}
        pattern = os.path.join(glob.escape(str(self._directory)), "**", "samples_*.jsonl")
        for path, stamp in _regular(pattern):
            found = _SAMPLES.fullmatch(os.path.basename(path))
            if found is not None:
                last = newest.get(found["task"], (-1, Path()))
                newest[found["task"]] = max(last, (stamp.mtime_ns, Path(path)))
        yield from ((task, path) for task, (_, path) in sorted(newest.items()))


def _regular(pattern: str) -> Iterator[tuple[str, Stamp]]:
    """Yield the regular files that match, none through a link of that name."""
    for path in glob.iglob(pattern, recursive=True, include_hidden=True):
        try:
            status = os.lstat(path)
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode):
            yield path, Stamp.of(status)


class ResultFile(msgspec.Struct, frozen=True):
    """A result file: its name, the digest of its bytes, and what it says."""

    name: str
    digest: str
    document: Any


def read_result(path: Path, directory: Path) -> ResultFile:
    """Read a file of JSON.  Raises CommandFailed."""
    data = _whole(path, MAX_RESULT_BYTES)
    name = str(path.relative_to(directory)) if path.is_relative_to(directory) else str(path)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CommandFailed(f"the result is not JSON: {error}", where=name) from None
    return ResultFile(name, blake3(data).hexdigest(), document)


def _whole(path: Path, most: int) -> bytes:
    with open_regular(path) as (descriptor, status):
        if status.st_size > most:
            raise CommandFailed(f"longer than {most} bytes", where=str(path))
        return read_range(descriptor, 0, status.st_size)


def number_at(result: ResultFile, score: Score) -> float:
    """Return the number that a score names.

    Raises WrongCommand for what is none, CommandFailed if it is not finite.
    """
    try:
        value = _found(result.document, score.pointer)
    except LookupError:
        what = f"the result has nothing at {quoted(score.pointer)}"
        raise WrongCommand(what + _numbers_told(result), where=result.name) from None
    if not isinstance(value, bool | int | float):
        what = f"no number at {quoted(score.pointer)}"
        raise WrongCommand(what + _numbers_told(result), where=result.name)
    if not math.isfinite(value):
        raise CommandFailed(f"no finite number at {quoted(score.pointer)}", where=result.name)
    return float(value)


def _numbers_told(result: ResultFile) -> str:
    """Tell which numbers a result does have."""
    found = list(islice(_numbers(result.document, ""), _MOST_NUMBERS))
    return f"; it has {few(found)}" if found else ""


def _numbers(value: Any, pointer: str, depth: int = 0) -> Iterator[str]:
    """Yield pointers to numbers."""
    if isinstance(value, bool | int | float):
        yield pointer
    elif isinstance(value, dict) and depth < _DEEPEST:
        for key, child in value.items():
            yield from _numbers(child, f"{pointer}.{key}" if pointer else str(key), depth + 1)


def _found(value: Any, pointer: str) -> Any:
    """Return what is at a pointer.  Raises LookupError."""
    if pointer.startswith("/"):
        for key in pointer[1:].split("/"):
            value = _child(value, key.replace("~1", "/").replace("~0", "~"))
        return value
    if isinstance(value, dict):
        fitting = [key for key in value if pointer == key or pointer.startswith(f"{key}.")]
        for key in sorted(fitting, key=len, reverse=True):
            if pointer == key:
                return value[key]
            try:
                return _found(value[key], pointer[len(key) + 1 :])
            except LookupError:
                continue
        raise LookupError(pointer)
    first, _, rest = pointer.partition(".")
    child = _child(value, first)
    return _found(child, rest) if rest else child


def _child(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return value[key]
    if isinstance(value, list) and re.fullmatch("[0-9]{1,9}", key):
        return value[int(key)]
    raise LookupError(key)


def task_facts(documents: Iterable[Any]) -> dict[str, Any]:
    """Return what lm-evaluation-harness says of its tasks; nothing, for other results."""
    facts: dict[str, Any] = {}
    for document in documents:
        if isinstance(document, dict):
            facts |= {
                key: document[key]
                for key in _HARNESS
                if isinstance(document.get(key), dict) and document[key]
            }
    return facts


# -- single samples ------------------------------------------------------------------------------


class Samples(msgspec.Struct, frozen=True):
    """The scores of single samples of one evaluation, in an order that questions decide.

    questions: a digest of which they are, so that only equal ones are compared.
    """

    questions: str
    values: tuple[float, ...]

    def to_note(self) -> dict[str, Any] | None:
        """Return them as a note has them: bits, where all are 0 or 1; None for too many."""
        if all(value in (0.0, 1.0) for value in self.values):
            bits = "".join("1" if value else "0" for value in self.values)
            packed = int(f"1{bits}", 2)
            return {"questions": self.questions, "bits": f"{packed:x}"}
        if len(self.values) > MAX_VALUES:
            return None
        return {"questions": self.questions, "values": list(self.values)}

    @classmethod
    def of_note(cls, told: Any) -> Samples | None:
        """Return those that a note has; None for none."""
        match told:
            case {"questions": str(questions), "bits": str(bits)}:
                try:
                    digits = f"{int(bits, 16):b}"[1:]
                except ValueError:
                    return None
                return cls(questions, tuple(float(digit) for digit in digits))
            case {"questions": str(questions), "values": list(values)}:
                return cls(questions, tuple(float(value) for value in values))
        return None


def samples_of(written: Written, score: Score) -> Samples | None:
    """Return the scores of single samples behind a score; None if the run wrote none."""
    files = dict(written.samples())
    keys = re.split(r"[./]", score.pointer)
    tasks = [task for task in files if task in keys] or (list(files) if len(files) == 1 else [])
    if len(tasks) != 1:
        return None
    metric, _, kept = score.last_key.partition(",")
    found: dict[str, float] = {}
    for line in _whole(files[tasks[0]], MAX_SAMPLES_BYTES).splitlines():
        sample = _sample(line)
        if kept and sample.get("filter", kept) != kept:
            continue
        value = sample.get(metric)
        question = sample.get("doc_hash") or sample.get("doc_id")
        if not isinstance(value, bool | int | float) or not math.isfinite(value):
            return None
        if question is None or len(found) == MAX_SAMPLES:
            return None
        # Two questions may be equal.
        found[f"{question} {sample.get('doc_id')}"] = float(value)
    if not found:
        return None
    order = sorted(found)
    digest = blake3("\n".join(order).encode(errors="replace")).hexdigest(16)
    return Samples(digest, tuple(found[one] for one in order))


def _sample(line: bytes) -> Mapping[str, Any]:
    try:
        sample = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return sample if isinstance(sample, dict) else {}
