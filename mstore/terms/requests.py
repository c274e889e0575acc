"""Requests: what a user asks a merge to do, as one value.

The command line, Python and sweeps all use it.  Owns the options and how experts are written.  Does
not own what the words mean for one store (`merge.planning.request` resolves them).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, cast

import msgspec

from mstore.terms.errors import BadRequest
from mstore.terms.ids import Identified, Revision
from mstore.terms.phrases import is_text
from mstore.terms.sizes import Budget

Experts = Sequence[Revision | tuple[Revision, float]] | Mapping[Revision, float]
"""Revisions, with or without a weight."""


AUTO = "auto"
"""As a chat template: the one that most models have."""
BASE = "base"
"""As the source of a vocabulary: the tokens of the merge's base."""
COMMON = "common"
"""As the source of a vocabulary: the tokens that all models have."""
PREPARED = "prepared/"
"""Models that recipes need first are branches below this name."""
UNION = "union"
"""As the source of a vocabulary: the tokens of all models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRule:
    """How some tensors of a merge differ from the rest of it.

    tensors: a pattern of names of the output's tensors, or several (fnmatch, case-sensitive).
    method: None for the merge's own; `parameters` then add to those of the merge.
    weights: one per expert, None for those of the experts.
    dtype: of the output, None for the merge's own.
    """

    tensors: str | Sequence[str]
    method: str | None = None
    parameters: Mapping[str, object] = field(default_factory=dict)
    weights: Sequence[float] | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))

    def patterns(self) -> tuple[str, ...]:
        """Return the patterns."""
        return (self.tensors,) if isinstance(self.tensors, str) else tuple(self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeRequest:
    """A merge to plan.  Nothing is checked before a store is asked to plan it.

    base: the revision to merge into, or one of its models as REF:MODEL.
    experts: revisions or their models, pairs of a revision and its weight, or weights by revision.
    method: one of those in docs/merge-methods.md.
    parameters: of the method, by name; the others keep their defaults.
    companions: further inputs that a method needs, by ROLE:EXPERT (the expert as in `experts`),
    ROLE:base, or ROLE for one of the whole merge.  For `fisher`, `{"fisher:code": "code-fisher"}`
    names the diagonal Fisher of each expert, stored as a checkpoint whose tensors have the names
    and shapes of the model's.
    budget: the most bytes to read from experts: a `Budget`, text as on the command line ("2GiB",
    "30%"), bytes (int), or a share of the full cost (float below 1).  The number 1 is refused.
    max_error: find the cheapest plan whose error, relative to the base's norm, is at most this.
    dtype: of the output, as safetensors or torch spells it ("BF16", "bfloat16"), or a torch or
    numpy dtype; None uses the base's.
    analyze: compute missing statistics; otherwise the plan chooses whole tensors.
    score: norm, trimmed, conflict or random; None uses the method's own.
    only, skip: patterns of tensor names; tensors that they leave out stay as in the base.
    expert_budget: as budget, for any one expert.
    top_p: the share of the output's blocks that may differ from the base's.
    rules: what holds for some tensors instead; the first rule that names a tensor counts.
    outputs: tensors of the output that the base does not have, by name: the name of the tensor that
    each is made of, in the base and in all experts, or one name for the base and one per expert.
    layers: stack these layers in place of the base's, and merge nothing: (model, first layer, last
    layer + 1) of the base or of an expert, in the order of the output.
    allow_missing: the base's tensor counts for one that an expert lacks, and one that only experts
    have is left out; otherwise both are errors, but for optional tensors such as position ids.
    """

    base: Revision
    experts: Experts
    method: str
    parameters: Mapping[str, object] = field(default_factory=dict)
    companions: Mapping[str, Revision] = field(default_factory=dict)
    budget: Budget | str | float | None = None
    max_error: float | None = None
    dtype: str | None = None
    analyze: bool = True
    score: str | None = None
    only: Sequence[str] = ()
    skip: Sequence[str] = ()
    expert_budget: Budget | str | float | None = None
    top_p: float | None = None
    rules: Sequence[TensorRule] = ()
    outputs: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    layers: Sequence[tuple[Revision, int, int]] = ()
    allow_missing: bool = False

    def __post_init__(self) -> None:
        # A frozen value may set its own fields only this way.
        object.__setattr__(self, "dtype", dtype_name(self.dtype))

    def weighted(self) -> list[tuple[Revision, float]]:
        """Return each expert with its weight, 1 if none is given.  Raises BadRequest."""
        return weighted(self.experts)


def require_types(request: MergeRequest) -> None:
    """Raise BadRequest for a field, of the request or of its rules, that has another type."""
    _require("request", isinstance(request, MergeRequest), "a MergeRequest")
    _require("method", is_text(request.method), "text")
    _require("parameters", _is_by_name(request.parameters), "values by the names of parameters")
    _require("companions", _is_by_name(request.companions), "revisions by role")
    _require("outputs", _is_by_name(request.outputs), "names of sources by the names of tensors")
    for name in ("dtype", "score"):
        given = getattr(request, name)
        _require(name, given is None or is_text(given), "text, or None")
    for name in ("max_error", "top_p"):
        given = getattr(request, name)
        is_number = isinstance(given, Real) and not isinstance(given, bool)
        _require(name, given is None or is_number, "a number, or None")
    for name in ("only", "skip"):
        _require(name, _is_texts(getattr(request, name)), "a list of texts")
    _require("rules", _is_list(request.rules), "a list of TensorRule")
    for rule in request.rules:
        _require("rules", isinstance(rule, TensorRule), "a list of TensorRule")
        _require("parameters", _is_by_name(rule.parameters), "values by their names")
        _require("tensors", _is_texts(rule.patterns()), "text, or a list of texts")
        for name in ("method", "dtype"):
            given = getattr(rule, name)
            _require(name, given is None or is_text(given), "text, or None")
    _require("layers", _is_list(request.layers), "a list of (model, first layer, last layer + 1)")


def weighted(experts: Any) -> list[tuple[Revision, float]]:
    """Return each of `Experts` with its weight, 1 if none is given.

    Raises BadRequest for anything else.
    """
    is_one = isinstance(experts, str | bytes | Identified)
    if is_one or not isinstance(experts, Collection):
        raise BadRequest(
            f"experts are a list of revisions, not {type(experts).__name__}",
            hint='experts=["code", ("math", 0.5)]',
        )
    found: list[tuple[Revision, float]] = []
    for one in experts.items() if isinstance(experts, Mapping) else experts:
        revision, weight = one if _is_pair(one) else (one, 1.0)
        if isinstance(revision, tuple | list) or not isinstance(weight, Real):
            raise BadRequest(
                f"an expert is a revision, or a pair of a revision and its weight, not {one!r}",
                hint='experts=["code", ("math", 0.5)]',
            )
        found.append((revision, cast(float, weight)))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """The embedding of one token, for models that lack it.

    model: the revision that it is taken from; None: zeros.
    token: the token of that model whose embedding it is, or its id; None: the same token.
    force: also for models that have the token.
    """

    model: Revision | None = None
    token: str | int | None = None
    force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokens that base and experts of a merge are to have.

    source: "base", "union" (the base's tokens, then those that only experts have), "common" (those
    of the base that all have), or the revision of the base or of an expert whose tokens they are.
    tokens: where embeddings of single tokens come from, by token.  Tokens that are not among those
    of the source are added to them.
    pad_to: the number of rows is rounded up to a multiple of this; the new rows are the mean of the
    others.
    keep_padding: keep rows of the base after those of its tokens; False: as many rows as tokens.
    base_first: a token that several models have, and another lacks, is the base's, if the base has
    it; False: their mean.
    chat_template: that of the base from then on, as Jinja; "auto": the one that most models have;
    None: it stays.
    """

    source: Revision = UNION
    tokens: Mapping[str, TokenRow] = field(default_factory=dict)
    pad_to: int | None = None
    keep_padding: bool = True
    base_first: bool = True
    chat_template: str | None = None


OMP = "omp"
SUBWORD = "subword"
MEAN = "mean"
ZERO = "zero"
APPROXIMATIONS = (OMP, SUBWORD, MEAN, ZERO)
"""How rows of tokens that a model lacks are made."""
DONOR = "donor"
MODEL = "model"
TEMPLATES_OF = (DONOR, MODEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transplant:
    """The tokens that a model is to get from another, the donor.

    approximation: how rows of tokens that the model lacks are made. "omp": of its rows of tokens
    that both have, as the donor's row is made of the donor's (orthogonal matching pursuit);
    "subword": the mean of the pieces that the model writes the token with; "mean": the mean of all
    its rows; "zero".
    k: of "omp", how many rows one is made of, at most; None: a 32nd of the donor's width, from 4 to
    64.
    tokens: the model's token for a token of the donor, where they are not the same text.
    pad_to: the number of rows is rounded up to a multiple of this.
    keep_padding: as many rows as the donor has; False: as many as it has tokens.
    chat_template: whose, "donor" or "model".
    """

    donor: Revision
    approximation: str = OMP
    k: int | None = None
    tokens: Mapping[str, str] = field(default_factory=dict)
    pad_to: int | None = None
    keep_padding: bool = True
    chat_template: str = DONOR


class RecipeRequest(msgspec.Struct, frozen=True):
    """The merge that a recipe asks for.

    request: to plan as it is, or changed (a budget). warnings: what of the recipe is ignored, as
    mergekit does, each with its line. remarks: what else has no effect, alike. vocabulary: what to
    align the models with before the merge is planned (`Store.align`); None if the recipe does not
    say.
    """

    request: MergeRequest
    warnings: tuple[str, ...]
    remarks: tuple[str, ...]
    vocabulary: Vocabulary | None = None


def dtype_name(given: Any) -> Any:
    """Return the name of a dtype of torch or numpy; anything else as it is.  Imports neither."""
    if type(given).__module__ == "torch":
        return str(given).removeprefix("torch.")
    if type(given).__module__.startswith("numpy"):
        return getattr(given, "name", given)
    if isinstance(given, type) and given.__module__ in ("numpy", "ml_dtypes"):
        return given.__name__
    return given


def _require(name: str, fits: bool, words: str) -> None:
    if not fits:
        raise BadRequest(f"{name} must be {words}", where="MergeRequest")


def _is_by_name(given: object) -> bool:
    return isinstance(given, Mapping) and all(isinstance(key, str) for key in given)


def _is_list(given: object) -> bool:
    return isinstance(given, Collection) and not isinstance(given, str | bytes | Mapping)


def _is_texts(given: object) -> bool:
    return _is_list(given) and all(is_text(one) for one in cast(Collection[object], given))


def _is_pair(one: object) -> bool:
    return isinstance(one, tuple | list) and len(one) == 2
