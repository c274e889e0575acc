"""The config of a PEFT adapter: what of it decides how its tensors change a base.

Owns which adapters mstore can apply; every other kind is refused by the name of its setting.  The
form is that of PEFT's `adapter_config.json` (LoRA: Hu et al. 2021, arXiv 2106.09685; rsLoRA:
Kalajdzievski 2023, arXiv 2312.03732; DoRA: Liu et al. 2024, arXiv 2402.09353).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec

from mstore.terms.errors import Incompatible

_Value = TypeVar("_Value")

MAX_PATH: Final = 256
"""Characters of a module's path; no pattern matches a longer one."""

MAX_STEPS: Final = 1 << 14
"""Steps that comparing a module takes at most: runs of tables, characters of expressions."""

_REPEATED: Final = 8
"""Steps that following a repeated character takes."""

_EXPRESSION: Final = re.compile(
    r"\^?(?P<body>(?:[\w-]|\\?\.|\.\*|\\d\+?|\[[\w-]+\]\+?|\([\w|]+\))+)\$?"
)
# Names, dots and wildcards; groups are alternatives of names and are never repeated.
_STEP: Final = re.compile(
    r"\((?P<words>[\w|]+)\)|(?P<one>\\?\.|\\d|\[[\w-]+\]|[\w-])(?P<repeat>[*+])?"
)
_ANY: Final = "."
_DOT: Final = r"\."


class _Step(NamedTuple):
    """A part of an expression: one of several words, or one character, repeated or not."""

    words: tuple[str, ...]
    one: str
    repeat: str


class _PathForm(NamedTuple):
    """Where the paths of a table have no wildcard: runs of places, and how long they are.

    whole: they match from the first character of a module's path on.
    """

    length: int
    runs: tuple[tuple[int, int], ...]
    whole: bool

    def key(self, path: str) -> tuple[str, ...] | None:
        """Return what a table has for the end of a path, None if that does not begin at a dot."""
        start = len(path) - self.length
        if start < 0 or (start and (self.whole or path[start - 1] != ".")):
            return None
        return tuple(path[start + first : start + end] for first, end in self.runs)


class Patterns(Generic[_Value]):
    r"""The entries of a rank_pattern or an alpha_pattern, in order.

    PEFT matches `(.*\.)?(PATTERN)$` against a module's path, and the first entry that matches
    counts.  Most patterns are paths, one for each module: they are looked up.  In a path, a dot
    stands for any character, so paths with dots at the same places share one table, and a module is
    looked up once in each.  Other patterns are regular expressions.  A stranger wrote them: only
    simple ones are matched, by the set of places that a match has reached, so nothing is tried
    twice.

    Raises Incompatible for patterns that cannot be matched, or that are of too many forms.
    """

    def __init__(self, entries: Mapping[str, _Value], where: str) -> None:
        self._values = tuple(entries.values())
        self._tables: dict[_PathForm, dict[tuple[str, ...], int]] = {}
        self._expressions: list[tuple[int, bool, tuple[_Step, ...]]] = []
        for number, pattern in enumerate(entries):
            found = _EXPRESSION.fullmatch(pattern)
            if found is None:
                raise _unknown(pattern, where)
            steps = tuple(_steps(found["body"]))
            whole = pattern.startswith("^")
            if all(_is_plain(step) for step in steps):
                form, key = _form(steps, whole=whole)
                self._tables.setdefault(form, {}).setdefault(key, number)
                continue
            _require_classes(steps, pattern, where)
            self._expressions.append((number, whole, steps))
        if self._steps() > MAX_STEPS:
            raise Incompatible(
                "its config has patterns of too many different forms, such as "
                f"{next(iter(entries))[:60]!r}",
                where=where,
            )

    def _steps(self) -> int:
        """Return how much a module is compared with."""
        tables = sum(1 + len(form.runs) for form in self._tables)
        every = (step for _, _, steps in self._expressions for step in steps)
        return tables + sum(
            _REPEATED if one.repeat else 1 + len("".join(one.words)) for one in every
        )

    def value(self, module: str, default: _Value) -> _Value:
        """Return the value of the first pattern that a module's path ends with."""
        if not self._values or len(module) > MAX_PATH:
            return default
        found = len(self._values)
        for form, table in self._tables.items():
            key = form.key(module)
            if key is not None:
                found = min(found, table.get(key, found))
        for number, whole, steps in self._expressions:
            if number > found:
                break
            if _matches(steps, module, whole=whole):
                found = number
                break
        return self._values[found] if found < len(self._values) else default


def _unknown(pattern: str, where: str) -> Incompatible:
    return Incompatible(
        f"its config has a pattern that cannot be matched: {pattern[:60]!r}", where=where
    )


def _steps(body: str) -> Iterator[_Step]:
    for found in _STEP.finditer(body):
        words = found["words"]
        yield _Step(
            () if words is None else tuple(words.split("|")),
            found["one"] or "",
            found["repeat"] or "",
        )


def _is_plain(step: _Step) -> bool:
    return not step.repeat and (step.one in (_ANY, _DOT) or len(step.one) == 1)


def _form(steps: tuple[_Step, ...], *, whole: bool) -> tuple[_PathForm, tuple[str, ...]]:
    """Return the form of a path, and its own key."""
    text = "".join("." if step.one == _DOT else step.one for step in steps)
    runs = []
    first = 0
    for place, step in enumerate(steps):
        if step.one == _ANY:
            runs.append((first, place))
            first = place + 1
    runs.append((first, len(steps)))
    form = _PathForm(len(steps), tuple(run for run in runs if run[0] < run[1]), whole)
    return form, tuple(text[first:end] for first, end in form.runs)


def _require_classes(steps: tuple[_Step, ...], pattern: str, where: str) -> None:
    """Raise Incompatible for a class of characters that is none, such as [9-0]."""
    try:
        for step in steps:
            if step.one:
                _is_of(step.one, "0")
    except re.error:
        raise _unknown(pattern, where) from None


@lru_cache(1 << 16)
def _is_of(one: str, character: str) -> bool:
    """Return whether an expression for one character matches this one."""
    return re.fullmatch(one, character) is not None


def _matches(steps: tuple[_Step, ...], path: str, *, whole: bool) -> bool:
    """Return whether steps lead from a place after a dot, or from the first, to a path's end.

    Bit i of `reached` stands for the place before character i.
    """
    at: dict[str, int] = {}
    for place, character in enumerate(path):
        at[character] = at.get(character, 0) | 1 << place
    reached = 1
    if not whole:
        reached |= at.get(".", 0) << 1
    for step in steps:
        if step.words:
            reached = _after_words(step.words, at, reached)
        else:
            fitting = sum(places for character, places in at.items() if _is_of(step.one, character))
            reached = _after(step.repeat, fitting, reached)
        if not reached:
            return False
    return bool(reached >> len(path) & 1)


def _after_words(words: tuple[str, ...], at: Mapping[str, int], before: int) -> int:
    reached = 0
    for word in words:
        here = before
        for character in word:
            here = (here & at.get(character, 0)) << 1
        reached |= here
    return reached


def _after(repeat: str, fitting: int, before: int) -> int:
    """Return the places after one character of those that fit, or after any run of them."""
    reached = before & fitting
    if repeat:
        # Each round doubles how far a run is followed.
        step, through = 1, fitting
        while step <= MAX_PATH:
            reached |= through & (reached << step)
            through &= through << step
            step *= 2
    reached <<= 1
    return reached | before if repeat == "*" else reached


CONFIG: Final = "adapter_config.json"
MAX_CONFIG: Final = 1 << 20
_MAX_PATTERNS: Final = 4096
_MOST_TERMS: Final = 64

# Initial values that are taken out of the base's weights: the adapter fits only that changed base.
_CHANGED_BASE: Final = ("pissa", "olora", "corda", "loftq", "orthogonal", "lora_ga")
_PLAIN_START: Final = ("gaussian", "eva")

# Settings that change what the tensors mean.
_UNSUPPORTED: Final = {
    "alora_invocation_tokens": "an adapter that acts on some tokens only",
    "arrow_config": "a mixture of adapters",
    "kasa_config": "KaSA",
    "layer_replication": "layers that are repeated",
    "monteclora_config": "MonteCLoRA",
    "target_parameters": "parameters of mixtures of experts",
    "trainable_token_indices": "trainable tokens",
    "use_bdlora": "block-diagonal LoRA",
    "use_qalora": "QALoRA",
    "velora_config": "VeLoRA",
}


class _ConfigFields(msgspec.Struct, frozen=True):
    """The keys that are read, with PEFT's defaults."""

    peft_type: str = ""
    r: int = 8
    lora_alpha: float = 8.0
    alpha: float = 8.0
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    init_lora_weights: bool | str | None = True
    feedforward_modules: list[str] | str | None = None
    save_projection: bool = True
    coft: bool = False
    eps: float = 6e-5
    use_cayley_neumann: bool | None = None
    num_cayley_neumann_terms: int | None = None
    ensure_weight_tying: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None


LORA, IA3, OFT, VERA = "LORA", "IA3", "OFT", "VERA"
_SCALED: Final = (LORA, "LOHA", "LOKR")
KINDS: Final = (*_SCALED, IA3, OFT, VERA)
"""Kinds of adapters of PEFT that mstore can apply."""


class LoraConfig(msgspec.Struct, frozen=True):
    """How an adapter scales its products.  kind: one of `KINDS`.

    rank, alpha: where no pattern names a module. rank_stabilized: divide by the root of the rank.
    transposed: weights lie as [inputs, outputs], so that products must be transposed. dora: rows
    have magnitudes of their own. tying: products of tied layers are one product. feedforward: ends
    of names of layers whose inputs IA3 scales. turns: settings of OFT (`multipliers.rotations`).
    """

    kind: str
    rank: int
    alpha: float
    rank_stabilized: bool
    transposed: bool
    dora: bool
    tying: bool
    ranks: Patterns[int]
    alphas: Patterns[float]
    feedforward: tuple[str, ...]
    turns: tuple[float, float]

    def scale_of(self, module: str) -> float:
        """Return the factor of a module's product: alpha / rank, or alpha / sqrt(rank)."""
        if self.kind not in _SCALED:
            return 1.0
        rank = self.rank_of(module)
        alpha = self.alphas.value(module, self.alpha)
        return alpha / math.sqrt(rank) if self.rank_stabilized else alpha / rank

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's product."""
        return self.ranks.value(module, self.rank)


def parse_config(raw: bytes, where: str) -> LoraConfig:
    """Parse an adapter_config.json.  Raises Incompatible for what mstore cannot apply."""
    if len(raw) > MAX_CONFIG:
        raise Incompatible(f"{CONFIG} has more than {MAX_CONFIG} bytes", where=where)
    try:
        found = msgspec.json.decode(raw, type=_ConfigFields)
        every: dict[str, Any] = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Incompatible(f"{CONFIG} is not one of PEFT: {error}", where=where) from error
    if found.peft_type not in KINDS:
        kind = found.peft_type[:40] or "unknown"
        raise Incompatible(
            f"an adapter of the kind {kind} (peft_type); mstore applies {', '.join(KINDS)}",
            where=where,
        )
    for key, what in _UNSUPPORTED.items():
        if every.get(key):
            raise Incompatible(f"cannot apply {what} ({key} in {CONFIG})", where=where)
    _require_plain_start(found.init_lora_weights, where)
    ranks, alphas = found.rank_pattern or {}, found.alpha_pattern or {}
    if len(ranks) + len(alphas) > _MAX_PATTERNS:
        raise Incompatible(f"{CONFIG} has more than {_MAX_PATTERNS} patterns", where=where)
    numbers = (found.lora_alpha, found.alpha, *alphas.values())
    rank = found.r or int(found.peft_type == OFT)
    if min(rank, *ranks.values(), 1) < 1 or not all(map(math.isfinite, numbers)):
        raise Incompatible(f"a rank or an alpha in {CONFIG} is out of range", where=where)
    if found.use_dora and found.fan_in_fan_out:
        raise Incompatible("cannot apply DoRA to transposed weights (fan_in_fan_out)", where=where)
    _require_whole(found, where)
    feedforward = found.feedforward_modules or []
    terms = (found.num_cayley_neumann_terms or 0) if found.use_cayley_neumann else 0
    return LoraConfig(
        kind=found.peft_type,
        rank=rank,
        alpha=found.lora_alpha if found.peft_type == LORA else found.alpha,
        rank_stabilized=found.use_rslora,
        transposed=found.fan_in_fan_out,
        dora=found.use_dora,
        tying=found.ensure_weight_tying,
        ranks=Patterns(ranks, where),
        alphas=Patterns(alphas, where),
        feedforward=tuple(feedforward) if isinstance(feedforward, list) else (),
        turns=(float(terms), found.eps if found.coft else 0.0),
    )


def _require_whole(found: _ConfigFields, where: str) -> None:
    """Raise Incompatible unless config and tensors say all about an IA3, an OFT or a VeRA."""
    if found.peft_type == VERA and not found.save_projection:
        raise Incompatible(
            "the matrices A and B of VeRA are not in the file (save_projection is false): only "
            "torch draws them again",
            where=where,
            hint="merge the adapter into its base with PEFT's merge_and_unload and add that model, "
            "or train with save_projection=True",
        )
    if found.peft_type == IA3 and isinstance(found.feedforward_modules, str):
        raise Incompatible(
            f"mstore knows feedforward_modules as a list of names only, not as an expression "
            f"({CONFIG})",
            where=where,
        )
    if found.peft_type != OFT:
        return
    if found.use_cayley_neumann is None:
        raise Incompatible(
            f"an OFT of an older version of PEFT, which turns weights otherwise: its {CONFIG} has "
            "no use_cayley_neumann",
            where=where,
        )
    terms = found.num_cayley_neumann_terms
    is_series = not found.use_cayley_neumann or (terms is not None and 1 <= terms <= _MOST_TERMS)
    if not is_series or found.fan_in_fan_out or not 0 < found.eps < math.inf:
        raise Incompatible(
            "mstore does not apply an OFT with these num_cayley_neumann_terms, eps or "
            f"fan_in_fan_out ({CONFIG})",
            where=where,
        )


def named_base(raw: bytes | None) -> str | None:
    """Return what an adapter_config.json calls the adapter's base; None if it says nothing."""
    try:
        found = msgspec.json.decode(raw or b"{}", type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    name = found.get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None


def _require_plain_start(start: bool | str | None, where: str) -> None:
    if not isinstance(start, str) or start.lower() in _PLAIN_START:
        return
    if start.lower().startswith(_CHANGED_BASE):
        raise Incompatible(
            f"an adapter that began as {start[:40]} fits only the changed base that PEFT made for "
            "it, not the base itself",
            where=where,
            hint="save it again with PEFT's path_initial_model_for_weight_conversion",
        )
    raise Incompatible(
        f"mstore does not know init_lora_weights {start[:40]!r} ({CONFIG})", where=where
    )
