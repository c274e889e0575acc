"""The common part of `plan` and `merge`: options, the request from them, and plan output.

Only parses text.  The library decides which methods and parameters exist, and which budgets are
valid.
"""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, NoReturn

from mstore.merge.methods import MODULES
from mstore_cli import completion
from mstore_cli.errors import UsageError
from mstore_cli.options import HOW_MUCH, RESULT, WHAT, WHERE, WHICH, Option
from mstore_cli.recipes import (
    RecipeFile,
    RecipeText,
    Strict,
    Vocab,
    aligned,
    documents,
    request_of_recipe,
)
from mstore_cli.session import Session
from mstore_cli.sizes import (
    counted,
    format_size,
    parse_budget,
)

if TYPE_CHECKING:
    from mstore import MergeRequest, Store
    from mstore.merge.running.runners import WorkerReport
    from mstore.terms.ids import Revision


def method_names() -> str:
    """Return the names as a list for a sentence."""
    *most, last = MODULES
    return f"{', '.join(most)} or {last}"


PARAMETER_HINT = "--param density=0.2"
MOST_PERCENT = 100

_RECIPE = "a recipe follows --recipe"
RECIPE_HINT = "--recipe FILE"
MISTAKEN = MappingProxyType(
    {
        "--weight": "--expert REF=VALUE",
        "--density": "--param density=VALUE",
        "--lambda": "--param lambda=VALUE",
        "--normalize": "--param normalize=true",
        "--rescale": "--param rescale=false",
        "--seed": "--param seed=VALUE",
        "--config": RECIPE_HINT,
    }
)
"""Options that people expect, and the equivalent ones."""


def as_options(values: Mapping[str, object], loose: list[str]) -> str:
    """Return models that stand as arguments as they must be given."""
    base, experts = ([], loose) if values.get("base") else (loose[:1], loose[1:])
    told = [f"the base as --base {shlex.quote(one)}" for one in base]
    if experts:
        told.append(f"experts as {' '.join(f'--expert {shlex.quote(one)}' for one in experts)}")
    return f"give {' and '.join(told)}"


RECIPES = {".yaml": _RECIPE, ".yml": _RECIPE, ".mecha": _RECIPE}
"""File name endings of other programs' recipes, and the message for each."""
# `REF:0.5` or `REF@0.5`: a ref has neither sign.
_OTHER_SIGN = re.compile(r"([^:@]+)[:@](-?[0-9.]+)")


def _parse_error(text: str) -> float:
    """Parse a number.  The library checks whether the error is valid.  Raises UsageError."""
    try:
        return float(text)
    except ValueError:
        raise UsageError(
            f"--max-error: not a number: {text!r}", hint="write a number such as 0.05"
        ) from None


AllowNonfinite = Annotated[
    bool,
    Option(
        "--allow-nonfinite",
        help="Also publish a result with infinite or NaN elements where all inputs are finite.",
    ),
]
Cluster = Annotated[
    str | None,
    Option(
        "--cluster",
        metavar="ADDRESS",
        help="Compute on workers: local:N, tcp://HOST:8786 or dask:FILE (Dask), ray:auto or "
        "ray://HOST:10001 (Ray), slurm:PARTITION.",
        group=WHERE,
    ),
]
ClusterRemote = Annotated[
    str | None,
    Option(
        "--remote",
        metavar="NAME",
        help="With --cluster: the remote where workers read and write. Without it, they use the "
        "store's directory.",
        shell_complete=completion.remotes,
        group=WHERE,
    ),
]
ClusterPush = Annotated[
    bool,
    Option(
        "--push",
        help="With --remote: leave the result at the remote and move its branch.",
        group=WHERE,
    ),
]


def workers_told(workers: Sequence[WorkerReport]) -> str | None:
    """Return how many workers computed what; None if the merge ran here."""
    if not workers:
        return None
    slices = sum(one.slices for one in workers)
    read = format_size(sum(one.bytes_read for one in workers))
    return f"{len(workers)}: {counted(slices, 'slice')}, {read} read"


_BASE = Option(
    "--base",
    metavar="REF[:MODEL]",
    help="The model to merge into; of a snapshot of several models, all, or the one named.",
    shell_complete=completion.refs,
    group=WHAT,
)
_EXPERT = Option(
    "--expert",
    metavar="REF[:MODEL][=WEIGHT]",
    shell_complete=completion.refs,
    help="A model, or a LoRA adapter of the base, whose difference from the base is merged "
    "[default weight: 1]. Repeatable; 'REF@{0..9}' are the last ten snapshots of a branch, and "
    "'runs/*' all refs of this pattern but the base and the result.",
    group=WHAT,
)
Base = Annotated[str, _BASE]
Experts = Annotated[tuple[str, ...], _EXPERT]
Budget = Annotated[
    str | None,
    Option(
        "--budget",
        metavar="SIZE|SHARE",
        help="The most bytes to read from experts: 2GiB, 512MB, or 30% of the full cost.",
        group=HOW_MUCH,
    ),
]


Only = Annotated[
    tuple[str, ...],
    Option(
        "--only",
        metavar="PATTERN",
        help="Merge only tensors whose names match; take the rest from the base. Repeatable.",
        group=WHICH,
    ),
]
Skip = Annotated[
    tuple[str, ...],
    Option(
        "--skip",
        metavar="PATTERN",
        help="Take tensors whose names match from the base. Repeatable.",
        group=WHICH,
    ),
]
AllowMissing = Annotated[
    bool,
    Option(
        "--allow-missing",
        help="Let experts lack tensors of the base (the base's count for them), or have others "
        "(they are left out).",
        group=WHICH,
    ),
]
AllowNoop = Annotated[
    bool,
    Option(
        "--allow-noop",
        help="Accept a plan that reads nothing, or whose result is the base itself.",
        group=RESULT,
    ),
]


@contextmanager
def hinting_at_directories(request: MergeRequest) -> Iterator[None]:
    """If an unknown model is a directory, make the hint the command that adds it."""
    from mstore.terms.errors import NotFound
    from mstore.terms.phrases import phrase

    try:
        yield
    except NotFound as error:
        named = (request.base, *(name for name, _ in request.weighted()))
        named = (*named, *request.companions.values())
        where = error.where
        if where is None or where not in named or not Path(where).is_dir():
            raise
        raise NotFound(
            phrase("{what}; it is a directory", what=error.texts[0]),
            where=where,
            hint=f"mstore add {shlex.quote(where)} --name {shlex.quote(_ref_for(Path(where)))}",
        ) from error


def _ref_for(directory: Path) -> str:
    """Return the directory's own name if it is a valid ref."""
    from mstore.store.refs import check_name
    from mstore.terms.errors import BadName

    name = directory.resolve().name
    try:
        check_name(name)
    except BadName:
        return "REF"
    return name


_SEVERAL = re.compile(r"(?P<ref>.+)@\{(?P<first>\d{1,6})\.\.(?P<last>\d{1,6})\}(?P<weight>=.*)?")
_MOST = 1000


def parse_experts(text: str) -> list[tuple[str, float]]:
    """Parse `REF`, `REF=WEIGHT`, or `REF@{N..M}` with or without a weight: one expert for each.

    Raises BadRequest.
    """
    several = _SEVERAL.fullmatch(text)
    if several is None:
        return [parse_expert(text)]
    first, last = int(several["first"]), int(several["last"])
    if not 0 <= last - first < _MOST:
        what = f"{text!r}: from {first} to {last} is not one to {_MOST} snapshots"
        _refuse(what, "--expert", f"--expert {shlex.quote(several['ref'] + '@{0..9}')}")
    weight = several["weight"] or ""
    return [
        parse_expert(f"{several['ref']}@{{{number}}}{weight}") for number in range(first, last + 1)
    ]


def experts_of(texts: Iterable[str]) -> tuple[tuple[str, float], ...]:
    """Parse all values of `--expert`.  Raises BadRequest."""
    return tuple(one for text in texts for one in parse_experts(text))


def with_patterns(
    store: Store, experts: Iterable[tuple[Revision, float]], *but: Revision
) -> tuple[tuple[str, float], ...]:
    """Return experts with each pattern replaced by the refs that match, in order of their names.

    but: refs that no pattern means: the base, and the branch of the result, so that the same
    command makes the same merge again.  Raises NotFound.
    """
    from mstore.store import refs
    from mstore.terms.errors import NotFound

    found: list[tuple[str, float]] = []
    for revision, weight in experts:
        name = str(revision)
        if not refs.is_pattern(name):
            found.append((name, weight))
            continue
        matched = [one for one in refs.chosen(store.ref_ids(), [name]) if one not in but]
        if not matched:
            raise NotFound("no other ref matches the pattern", where=name, hint="mstore refs")
        found += [(one, weight) for one in matched]
    return tuple(found)


def parse_expert(text: str) -> tuple[str, float]:
    """Parse `REF` or `REF=WEIGHT`.  Raises BadRequest."""
    name, equals, weight = text.partition("=")
    if not name:
        _refuse(f"no ref in {text!r}", "--expert", f"--expert REF{shlex.quote(text)}")
    if not equals:
        slip = _OTHER_SIGN.fullmatch(text)
        if slip is not None:
            _refuse(f"not REF=WEIGHT: {text!r}", "--expert", f"--expert {slip[1]}={slip[2]}")
        return name, 1.0
    hint = f"--expert {shlex.quote(name)}=0.5"
    try:
        number = float(weight)
    except ValueError:
        _refuse(f"the weight of {name} is not a number: {weight!r}", "--expert", hint)
    if not math.isfinite(number):
        _refuse(f"the weight of {name} is not finite: {weight!r}", "--expert", hint)
    return name, number


def parse_companions(texts: Sequence[str]) -> dict[str, str]:
    """Parse `ROLE[:EXPERT]=REF`, each once.  Raises BadRequest."""
    found: dict[str, str] = {}
    for text in texts:
        key, equals, name = text.rpartition("=")
        if not (key and equals and name):
            _refuse(f"not ROLE=REF: {text!r}", "--with", "--with fisher:EXPERT=REF")
        if key in found:
            _refuse(f"{key} is given twice", "--with", f"--with {key}=REF")
        found[key] = name
    return found


def parse_share(text: str, option: str = "--top-p") -> float:
    """Parse `20%` or `0.2`.  Raises BadRequest that names the option, also for more than 1."""
    number, percent, rest = text.partition("%")
    hint = f"{option} 20% or {option} 0.2"
    try:
        value = float(number)
    except ValueError:
        _refuse(f"not a share: {text!r}", option, hint)
    if rest:
        _refuse(f"not a share: {text!r}", option, hint)
    if percent:
        return value / 100
    if 1 < value <= MOST_PERCENT:
        _refuse(
            f"a share is at most 1, which is 100%, not {text}",
            option,
            f"did you mean {option} {number}%?",
        )
    return value


def parse_parameters(texts: Iterable[str]) -> dict[str, object]:
    """Parse `k=v` pairs; whole numbers, numbers, shares, `true` and `false` are converted.

    Raises BadRequest for a missing `=` and for a key given twice.
    """
    parameters: dict[str, object] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            _refuse(f"not KEY=VALUE: {text!r}", "--param", PARAMETER_HINT)
        if key in parameters:
            _refuse(
                f"{key} is given twice",
                "--param",
                f"one {key} serves all experts: --param {text}\n"
                f"or, where experts may differ, one for each: --param {key}=VALUE,VALUE",
            )
        parameters[key] = _value(value)
    return parameters


_WHAT = ("--base", "--expert", "--method")


def missing_of(*whole: str) -> Callable[[Mapping[str, object]], list[str]]:
    """Return what tells which options are missing to say what to merge.

    whole: the options that say it alone.
    """

    def missing(values: Mapping[str, object]) -> list[str]:
        if any(values.get(option.removeprefix("--")) for option in whole):
            return []
        names = [option for option in _WHAT if not values.get(option.removeprefix("--"))]
        if len(names) == len(_WHAT) and not values.get("param") and not values.get("with_"):
            return [f"what to merge ({', '.join(whole)}, or --base, --expert and --method)"]
        return names

    return missing


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The options of `plan` and `merge` that say what to merge."""

    recipe: RecipeFile = None
    strict: Strict = False
    base: Annotated[str | None, _BASE] = None
    expert: Annotated[tuple[str, ...], _EXPERT] = ()
    blocks: Annotated[
        tuple[str, ...],
        Option(
            "--blocks",
            metavar="WEIGHTS",
            help="Weights of the blocks of an image model (IN00, M00, ...), by which those of the "
            "experts are multiplied: '0,0.5,1,...' in order, 'IN04=0.5,OUT*=0' by name, or the "
            "name of weights in your settings. Once for all experts, or once for each, in order.",
            group=WHAT,
        ),
    ] = ()
    with_: Annotated[
        tuple[str, ...],
        Option(
            "--with",
            metavar="ROLE:EXPERT=REF",
            help="A further input that the method needs (a companion), of an expert as `--expert` "
            "names it, or ROLE=REF of the merge. `--method regmean` needs `gram:EXPERT=REF` for "
            "each expert, `aim` `activation:base=REF`, `safe_merge` `aligned=REF` and "
            "`unaligned=REF`; `mstore methods NAME` says what a method needs. Repeatable.",
            group=WHAT,
        ),
    ] = ()
    method: Annotated[
        str | None,
        Option(
            "--method",
            metavar="NAME",
            help=f"How experts are combined: {method_names()}.",
            shell_complete=completion.methods,
            group=WHAT,
        ),
    ] = None
    param: Annotated[
        tuple[str, ...],
        Option(
            "--param",
            metavar="KEY=VALUE",
            help="A parameter of the method; with commas, a value for each expert. Repeatable.",
            group=WHAT,
        ),
    ] = ()
    budget: Budget = None
    max_error: Annotated[
        float | None,
        Option(
            "--max-error",
            metavar="E",
            type=_parse_error,
            help="Find the cheapest plan whose error (relative to the base's norm) is at most E: "
            "the bound, or the estimate for methods that have none.",
            group=HOW_MUCH,
        ),
    ] = None
    dtype: Annotated[
        str | None,
        Option(
            "--dtype",
            metavar="DTYPE",
            help="The dtype of the output [default: the base's].",
            group=RESULT,
        ),
    ] = None
    no_analyze: Annotated[
        bool,
        Option(
            "--no-analyze",
            help="Do not read experts to compute missing statistics; choose whole tensors instead.",
            group=HOW_MUCH,
        ),
    ] = False
    score: Annotated[
        str | None,
        Option(
            "--score",
            metavar="NAME",
            help="Rank blocks by norm, trimmed, conflict or random [default: the method's own].",
            shell_complete=completion.scores,
            group=HOW_MUCH,
        ),
    ] = None
    only: Only = ()
    skip: Skip = ()
    allow_missing: AllowMissing = False
    per_expert_budget: Annotated[
        str | None,
        Option(
            "--per-expert-budget",
            metavar="SIZE|SHARE",
            help="The most bytes to read from any one expert: a size, or a share of the full cost.",
            group=HOW_MUCH,
        ),
    ] = None
    top_p: Annotated[
        str | None,
        Option(
            "--top-p",
            metavar="SHARE",
            help="Write only this share of the blocks that would change, the largest changes "
            "first.",
            group=HOW_MUCH,
        ),
    ] = None
    vocab: Vocab = None
    _read: list[RecipeText] = dataclasses.field(default_factory=list, init=False)

    def is_given(self) -> bool:
        """Return whether any of them is given."""
        own = (getattr(self, one.name) for one in dataclasses.fields(self) if one.init)
        # Compared by identity: a 0 counts as given.
        return any(one is not None and one is not False and one != () for one in own)

    def require(self, missing: Callable[[Mapping[str, object]], list[str]], hint: str) -> None:
        """Raise UsageError if they contradict each other, or do not say what to merge.

        missing: what they lack.  hint: for that.
        """
        if self.recipe is not None:
            told = [option for option in _WHAT if getattr(self, option.removeprefix("--"))]
            told += ["--with"] * bool(self.with_) + ["--param"] * bool(self.param)
            told += ["--vocab"] * (self.vocab is not None) + ["--blocks"] * bool(self.blocks)
            if told:
                raise UsageError(
                    f"the recipe already says what to merge; leave out {', '.join(told)}",
                    hint="--budget, --max-error, --dtype, --only, --skip and --allow-missing go "
                    "with a recipe",
                )
            return
        if self.strict:
            raise UsageError("--strict is about a recipe", hint="--recipe FILE")
        names = missing(vars(self))
        if names:
            listed = "mstore methods" if names == ["--method"] else hint
            raise UsageError(f"missing: {', '.join(names)}", hint=listed)

    def limits(self) -> MergeRequest:
        """Build the request; with a recipe, what to merge is missing until `request` has read it.

        Raises BadRequest.
        """
        from mstore import Budget, MergeRequest

        own = self.per_expert_budget
        return MergeRequest(
            base=self.base or "",
            experts=experts_of(self.expert),
            companions=parse_companions(self.with_),
            method=self.method or "",
            parameters=parse_parameters(self.param),
            budget=None if self.budget is None else Budget(parse_budget(self.budget)),
            max_error=self.max_error,
            dtype=self.dtype,
            analyze=not self.no_analyze,
            score=self.score,
            only=self.only,
            skip=self.skip,
            expert_budget=None
            if own is None
            else Budget(parse_budget(own, option="--per-expert-budget")),
            top_p=None if self.top_p is None else parse_share(self.top_p),
            allow_missing=self.allow_missing,
        )

    def steps(self) -> dict[int, str | None]:
        """Return the names of the recipes of the file by number, in an order to merge in."""
        if self.recipe is None:
            return {0: None}
        found = documents(self._text(self.recipe))
        return {
            number: None if one.name is None else one.name.text for number, one in found.items()
        }

    def _text(self, file: str) -> RecipeText:
        """Read the recipe once: it may be standard input."""
        if not self._read:
            self._read.append(RecipeText.read(file, strict=self.strict))
        return self._read[0]

    def request(
        self,
        session: Session,
        store: Store,
        limits: MergeRequest,
        *,
        result: str = "",
        step: int = 0,
        earlier: Mapping[str, str] = MappingProxyType({}),
        allow_nonfinite: bool = False,
    ) -> MergeRequest:
        """Return the request: `limits` with what to merge.

        result: the branch of the result, if it has one. step: which recipe of the file. earlier:
        refs of the merges that it may need, by name.

        Adds directories of a recipe, and aligns vocabularies.  Raises BadRequest, NotFound,
        Incompatible.
        """
        if self.recipe is None:
            experts = with_patterns(store, limits.weighted(), limits.base, result)
            limits = dataclasses.replace(limits, experts=experts)
            if self.blocks:
                from mstore_cli.user_config import block_presets

                presets = block_presets()
                asked = [presets.get(one, one) for one in self.blocks]
                with hinting_at_directories(limits):
                    rules = store.block_rules(limits.base, limits.experts, asked)
                limits = dataclasses.replace(limits, rules=rules)
            if self.vocab is None:
                return limits
            from mstore import Vocabulary

            with hinting_at_directories(limits):
                return aligned(session, store, limits, Vocabulary(source=self.vocab))
        found = request_of_recipe(
            *(session, store, self._text(self.recipe), step, earlier),
            allow_nonfinite=allow_nonfinite,
        )
        return dataclasses.replace(
            limits,
            base=found.base,
            experts=found.experts,
            companions=found.companions,
            method=found.method,
            parameters=found.parameters,
            dtype=limits.dtype or found.dtype,
            rules=found.rules,
            layers=found.layers,
            allow_missing=limits.allow_missing or found.allow_missing,
        )


def _value(text: str) -> object:
    if "," in text:
        return [_value(one.strip()) for one in text.split(",")]
    words: dict[str, object] = {"true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    number, percent, rest = text.partition("%")
    if percent and not rest:
        with suppress(ValueError):
            return float(number) / 100
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _refuse(what: str, option: str, hint: str) -> NoReturn:
    # Imported here because `mstore --help` must not pay for the library.
    from mstore.terms.errors import BadRequest

    raise BadRequest(what, where=option, hint=hint)
