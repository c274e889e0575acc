"""Which files in a checkpoint's directory are not part of the model.

Patterns come from three places, and the last one that matches a path decides: the defaults below,
the file `.mstoreignore` at the top of the directory, and the caller.  The caller may also say which
files to take: one that no pattern of these matches is left out, too.  The syntax of patterns is
that of gitignore(5):

    name        a file or directory of this name, at any depth
    dir/        a directory only, and so all that is in it
    /a, a/b     from the top of the checkpoint on
    *  ?  [a-z] within a name; `**` as a whole part stands for any number of directories
    !name       takes back what an earlier pattern left out; not within a directory that is left out
    # ...       a comment; \\# and \\! begin a name

The defaults leave out what programs put beside a model: version control, the download cache of the
Hub, and training state (optimizer, schedule, loss scale, random state, arguments).  They name such
files one by one: `*.pt` would also match weights, and voices and styles that some models load.
`training_args.bin` is a pickle, which runs its author's code when loaded.  `trainer_state.json`
stays: it is small, and records how the model was trained.  No default excludes a file that a model
is loaded from (`is_needed`), nor a directory that contains weights.

Patterns are data: they are matched part by part, in time that depends only on the lengths of path
and pattern.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Sequence
from fnmatch import translate
from typing import Final

import msgspec
from msgspec.structs import replace

from mstore.checkpoint.paths import quoted
from mstore.terms.errors import BadCheckpoint, BadRequest
from mstore.terms.phrases import Option

IGNORE_FILE: Final = ".mstoreignore"
MAX_IGNORE_BYTES: Final = 1 << 16
MAX_PATTERNS: Final = 1000
MAX_PARTS: Final = 64
WEIGHTS: Final = ".safetensors"
PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt")
DEFAULT: Final = "the defaults"
ASKED: Final = Option("exclude")
INCLUDED: Final = Option("include")
_EXAMPLE: Final = Option("exclude", ("logs/", "*.tmp"))

DEFAULT_PATTERNS: Final = (
    ".git",
    ".hg/",
    ".svn/",
    ".cache/huggingface/",
    IGNORE_FILE,
    "optimizer.pt",
    "optimizer.bin",
    "optimizer_[0-9]*.bin",
    "optimizer_[0-9]*/",
    "scheduler.pt",
    "scheduler.bin",
    "scheduler_[0-9]*.bin",
    "scaler.pt",
    "rng_state.pth",
    "rng_state_*.pth",
    "random_states_*.pkl",
    "global_step*/",
    "training_args.bin",
)
_OF_TRAINING: Final = re.compile(
    r"(training_args|optimizer|scheduler|scaler|rng_state|random_states|trainer_state)[^/]*"
    r"|[^/]*_optim_states[^/]*"
)
# Only directories with these names can hold files of any name without holding a model.
_NEVER_A_MODEL: Final = frozenset({".git", ".hg/", ".svn/", ".cache/huggingface/"})

_NEEDED: Final = frozenset(
    {
        "config.json",
        "adapter_config.json",
        "model_index.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "spiece.model",
        "sentencepiece.bpe.model",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
    }
)


class Pattern(msgspec.Struct, frozen=True):
    """One line: its text, its source, and what it matches."""

    text: str
    source: str | Option
    parts: tuple[str | re.Pattern[str], ...]
    takes_back: bool
    directories_only: bool

    @classmethod
    def parsed(cls, text: str, source: str | Option) -> Pattern | None:
        """Parse a line; None for a blank line or comment.  Raises BadRequest."""
        line = text.rstrip("\r\n")
        while line.endswith(" ") and not line.endswith("\\ "):
            line = line[:-1]
        if not line or line.startswith("#"):
            return None
        takes_back = line.startswith("!")
        glob = line[1:] if takes_back else line
        directories_only = glob.endswith("/")
        glob = glob.removesuffix("/")
        given = glob.removeprefix("/").split("/")
        if not glob or not all(given) or len(given) > MAX_PARTS:
            raise BadRequest(
                f"{quoted(line)} is no pattern",
                where=source,
                hint=_EXAMPLE,
            )
        parts = tuple(map(_part, given))
        if "/" not in glob:
            # Without a slash, it matches at any depth.
            parts = ("**", *parts)
        if parts[-1] == "**":
            # Matches all that is below a directory, and not the directory itself.
            parts = (*parts, _part("*"))
        return cls(line, source, parts, takes_back, directories_only)

    def fits(self, parts: Sequence[str], *, is_directory: bool) -> bool:
        """Return whether the pattern matches a path, given as its parts."""
        if self.directories_only and not is_directory:
            return False
        # The set of pattern prefixes that match the path so far: each part is examined once.
        here = self._past_stars({0})
        for name in parts:
            there = set()
            for at in here:
                if at == len(self.parts):
                    continue
                part = self.parts[at]
                if part == "**":
                    there.add(at)
                elif part == name if isinstance(part, str) else part.match(name):
                    there.add(at + 1)
            here = self._past_stars(there)
        return len(self.parts) in here

    def _past_stars(self, places: set[int]) -> set[int]:
        found = set(places)
        for at in sorted(places):
            place = at
            while place < len(self.parts) and self.parts[place] == "**":
                place += 1
                found.add(place)
        return found


_ESCAPED: Final = re.compile(r"\\(.)")


def _part(glob: str) -> str | re.Pattern[str]:
    """Return what matches one part of a path: the part itself, or an expression."""
    if glob == "**":
        return glob
    plain = _ESCAPED.sub(lambda found: f"[{found[1]}]" if found[1] in "*?[" else found[1], glob)
    if not any(character in plain for character in "*?["):
        return plain
    return re.compile(translate(plain.replace("[^", "[!")))


def escaped(path: str) -> str:
    """Return a pattern that matches exactly this path, with no special characters."""
    return re.sub(r"^[!#]|[\\*?\[]", lambda found: f"\\{found[0]}", path)


def _patterns(lines: Iterable[str], source: str | Option) -> tuple[Pattern, ...]:
    found = [Pattern.parsed(line, source) for line in lines]
    patterns = tuple(pattern for pattern in found if pattern is not None)
    if len(patterns) > MAX_PATTERNS:
        raise BadRequest(f"more than {MAX_PATTERNS} patterns", where=source)
    return patterns


def _requested(texts: Sequence[object], option: Option) -> tuple[Pattern, ...]:
    """Return the patterns of a caller.  Raises BadRequest."""
    given = [one for one in texts if isinstance(one, str) and one]
    if isinstance(texts, str) or len(given) < len(texts):
        raise BadRequest(
            f"patterns of what to {option.name} are a list of texts that are not empty",
            where=option,
            hint=Option(option.name, ("logs/", "*.tmp")),
        )
    return _patterns(given, option)


class Exclusion(msgspec.Struct, frozen=True):
    """Which files and directories of a checkpoint are left out; the last matching pattern decides.

    included: patterns of files, of which one must match each file; none: all files. reads_file:
    whether the checkpoint's own `.mstoreignore` applies. kept: paths that stay whatever patterns
    say.
    """

    patterns: tuple[Pattern, ...] = ()
    asked: tuple[Pattern, ...] = ()
    included: tuple[Pattern, ...] = ()
    reads_file: bool = True
    kept: frozenset[str] = frozenset()

    @classmethod
    def chosen(
        cls,
        exclude: Sequence[object] = (),
        include: Sequence[object] = (),
        *,
        defaults: bool = True,
    ) -> Exclusion:
        """Build the exclusion of a request.  Raises BadRequest for an invalid pattern."""
        own = _patterns(DEFAULT_PATTERNS, DEFAULT) if defaults else ()
        return cls(own, _requested(exclude, ASKED), _requested(include, INCLUDED))

    def with_file(self, data: bytes, where: str) -> Exclusion:
        """Return this exclusion with the lines of an `.mstoreignore`.  Raises BadCheckpoint."""
        try:
            if len(data) > MAX_IGNORE_BYTES:
                raise BadRequest(f"longer than {MAX_IGNORE_BYTES} bytes")
            lines = _patterns(data.decode("utf-8-sig").split("\n"), IGNORE_FILE)
        except UnicodeDecodeError as error:
            raise BadCheckpoint("is not valid UTF-8", where=where) from error
        except BadRequest as error:
            raise BadCheckpoint(error.what, where=where) from error
        return replace(self, patterns=(*self.patterns, *lines), reads_file=False)

    def keeping(self, paths: Iterable[str]) -> Exclusion:
        """Return this exclusion except for these files, and the directories on the way to them."""
        kept: set[str] = set()
        for path in paths:
            while path and path not in kept:
                kept.add(path)
                path = posixpath.dirname(path)  # noqa: PLW2901 -- upward, to the top
        return replace(self, kept=frozenset(kept))

    def deciding(self, path: str, *, is_directory: bool) -> Pattern | None:
        """Return the pattern that leaves a path out; None if it stays."""
        if path in self.kept:
            return None
        parts = path.split("/")
        if not is_directory and self.included and not self._is_included(parts):
            return self.included[0]
        for pattern in reversed((*self.patterns, *self.asked)):
            if pattern.fits(parts, is_directory=is_directory):
                return None if pattern.takes_back else pattern
        return None

    def _is_included(self, parts: Sequence[str]) -> bool:
        """Return whether a pattern matches a file, or a directory that it is in."""
        return any(
            pattern.fits(parts[:depth], is_directory=depth < len(parts))
            for pattern in self.included
            for depth in range(1, len(parts) + 1)
        )


NOTHING_EXCLUDED: Final = Exclusion(reads_file=False)


class Excluded(msgspec.Struct, frozen=True):
    """A file that was left out, or a directory (its path ends with a slash) with its contents."""

    path: str
    pattern: Pattern
    files: int
    size: int
    has_weights: bool


def spares(pattern: Pattern, *, has_weights: bool) -> bool:
    """Return whether a directory stays despite a match: a default pattern never takes weights."""
    return has_weights and pattern.source == DEFAULT and pattern.text not in _NEVER_A_MODEL


def is_of_training(path: str) -> bool:
    """Return whether a pickle of this name is a trainer's state, not weights."""
    return _OF_TRAINING.fullmatch(posixpath.basename(path)) is not None


def is_pickled_top(path: str) -> bool:
    """Return whether this may be pickled weights at the top of a checkpoint."""
    return "/" not in path and path.endswith(PICKLE_SUFFIXES) and not is_of_training(path)


def is_needed(path: str) -> bool:
    """Return whether loading a model beside this file needs it: config, tokenizer, index."""
    return posixpath.basename(path) in _NEEDED or path.endswith(f"{WEIGHTS}.index.json")
