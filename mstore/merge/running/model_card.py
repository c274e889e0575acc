"""The model card and the licence files of a merged checkpoint.

The base's README.md describes the base, and a licence file at the top level applies to everything
below it; neither is true of a merge. So a merge has a card of its own. It keeps the base's licence
files in place only if all parents state that one licence; otherwise the texts of all parents go to
licenses/, each under the parent that it is from.

Everything is a function of the plan and of the parents' contents, never of names, times, costs at
rest or versions. So the same merge has the same bytes in any store, also after replay and
materialize (docs/design/011-model-cards.md). A merge that is the base keeps the base's own.
Statements of parents' cards are read with limits and repeated, never interpreted.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any

import msgspec
import numpy as np

from mstore.blocks.schema import PlanInputs
from mstore.checkpoint.declared import (
    CARD,
    CONFIG,
    MERGEKIT,
    MERGEKIT_MOE,
    declared_bases,
    front_matter,
    values,
)
from mstore.checkpoint.paths import without_suffix
from mstore.merge.methods.parameters import written
from mstore.merge.planning.recipe_text import recipe_text
from mstore.merge.planning.validate import is_base, is_retyped
from mstore.merge.planning.warnings import LICENCE_TERMS, MergeWarning
from mstore.models.adapters.inputs import files_merged_into
from mstore.models.header_lineage import MadeOf, header_lineage
from mstore.models.made import (
    NAME,
    WORD,
    conflicts,
    is_licence,
    is_one_licence,
    licence_lines,
    licence_section,
    said,
    start_of,
)
from mstore.store import contents
from mstore.store.catalog import Catalog
from mstore.store.models import models_in
from mstore.store.objects.manifest import File, Manifest
from mstore.store.objects.plan import BASE, DROPPED, MOE, OMITTED, READ, SHARED, Plan, PlanInput
from mstore.terms.errors import BadRequest
from mstore.terms.ids import ManifestId

LICENCES = "licenses"
_RECIPES = (MERGEKIT, MERGEKIT_MOE)
_EXPERT = re.compile(r"\.experts\.(\d+)\.")

_PAPERS = (".png", ".jpg", ".jpeg", ".webp", ".civitai.info", ".json", ".txt", ".html", ".mp4")
"""Of what lies beside a file; a config (.yaml) says how to read it."""
NOT_NAMED = "not named by its card"
TO_PUBLISH = """\
Put the names of the models in place
of ids in `base_model` before you publish this."""
"""What the card asks for, and an export does (`mstore.exports.card`)."""
_OF_NAMES = f"""\
A name is what a model's own card says (`model_name`), or what all experts' cards call their
base. Content is mstore's id of all of a parent's files. {TO_PUBLISH}"""
_OF_RULES = """\
Some tensors were merged by rules of their own, which options cannot state; `mstore explain REF`
shows the method and the sources of each.
"""
_OF_THIS_PLAN = """\
REF is this merge, in a store that has it. Its plan names the chunks that were read; a number
of bytes would not, because a chunk's bytes depend on how a store keeps it. NEW is a name for
the result.
"""
_OF_THE_RECIPE = """\
The recipe is a file beside this card. It names models by the content ids above, as a store that
has them takes them; put directories or names in place of the ids elsewhere. Some tensors have
parameters or weights of their own, as it says.
"""
_OF_THE_STACK = """\
The recipe is a file beside this card. It names models by the content ids above, as a store that
has them takes them; put directories or names in place of the ids elsewhere. Every tensor is one of
a parent, as it is.
"""
_OF_THE_MIXTURE = f"""\
REF is this mixture, in a store that has it, and NEW a name for the result. The recipe as it was
written, with the names that its author has for the models, is {MERGEKIT_MOE} beside this
card. Every tensor is one of a parent, as it is.
"""
_OF_THE_EXPERT = """\
REF is this model, in a store that has it, and NEW a name for the result. Every tensor is one of the
mixture (the base above), as it is.
"""
_OF_THE_WHOLE = "The same merge with nothing left out:"
_OF_IDS = """\
In the store where it was made, `mstore log REF` tells this merge's snapshot and parents, and
`mstore explain REF` its plan and what of which expert is in it. A snapshot's id cannot stand
in its own content; those of its parents' contents can, and `mstore show ID` takes them."""


class CardParent(msgspec.Struct, frozen=True):
    """A parent as its own files describe it.

    role: base, expert N from 1 on, or a companion's and N, of that expert: it is no model. name:
    from its card; for the base also the name that all experts' cards give their base; None if there
    is none. licence: what its card states, None for nothing. texts: its licence files.
    """

    role: str
    manifest: ManifestId
    weight: float | None
    name: str | None
    licence: str | None
    texts: tuple[File, ...]

    @property
    def label(self) -> str:
        """Its name, else the id of its content."""
        return self.name or self.manifest.hex()


class ModelCard:
    """The card of one plan's merge, and the licence files beside it.

    Reads the parents' cards, and nothing else.
    """

    def __init__(self, catalog: Catalog, plan: Plan) -> None:
        self._catalog = catalog
        self._plan = plan

    def files(self, not_finite: int = 0) -> tuple[tuple[File, ...], dict[str, bytes]]:
        """Return the merge's files taken from parents, without the card; and new files by path.

        not_finite: elements that are infinite or NaN, and are finite in the base; the card tells.
        """
        base = files_merged_into(self._catalog, self._plan)
        if is_base(self._catalog, self._plan) or _has_directory(base, CARD):
            return base.files, {}
        new = {CARD: self.card(not_finite).encode()}
        replaced = {CARD.casefold()}
        # Another merge's recipe is not this one's, even if this one has none.
        recipes = [one for one in _RECIPES if not _has_directory(base, one)]
        replaced |= {one.casefold() for one in recipes}
        new |= self.files_of_recipe()
        replaced |= {path.casefold() for path in self._papers(base)}
        kept = [file for file in base.files if file.path.casefold() not in replaced]
        if not is_one_licence(self._stated):
            kept = [file for file in kept if not is_licence(file)]
            kept += self._licence_files()
        return tuple(kept), new

    def _papers(self, base: Manifest) -> Iterator[str]:
        """Yield what lies beside single files that are merged, and is about them: previews."""
        own = self._plan.model
        models = models_in(self._catalog, base).named
        merged = [one for one in models.values() if own in (None, one.name) and one.is_single_file]
        stems = tuple(f"{without_suffix(one.files[0])}." for one in merged)
        for file in base.files:
            if file.path.startswith(stems) and file.path.endswith(_PAPERS):
                yield file.path

    def header_lineage(self) -> dict[str, str]:
        """Return what headers of single files say of the merge (`models.header_lineage`)."""
        plan = self._plan
        how: dict[str, Any] = {
            "base": str(_made_of(plan.inputs[0])),
            "experts": [
                {"model": str(_made_of(one)), "weight": float(number_text(weight))}
                for one, weight in zip(plan.experts, plan.weights, strict=True)
            ],
            "method": plan.method,
            "parameters": dict(plan.operation.parameters),
        }
        if plan.companions:
            how["with"] = [
                {"role": one.role, "of": one.of, "model": str(_made_of(one))}
                for one in plan.companions
            ]
        recipe = self.recipe if len(plan.operations) > 1 or plan.layers else None
        how |= {} if recipe is None else {"recipe": recipe}
        models = (plan.inputs[0], *plan.experts)
        return header_lineage(self._catalog, how, map(_made_of, models))

    def files_of_recipe(self) -> dict[str, bytes]:
        """Return the file with the recipe, or nothing if no recipe can state the plan."""
        base = self._catalog.manifest(self._plan.base_id())
        path = MERGEKIT_MOE if self._plan.is_mixture else MERGEKIT
        recipe = None if _has_directory(base, path) else self.recipe
        return {} if recipe is None else {path: recipe.encode()}

    @cached_property
    def recipe(self) -> str | None:
        """Return the text of the recipe, None if no recipe can state the plan."""
        try:
            return recipe_text(self._catalog, self._plan)
        except BadRequest:
            return None

    @cached_property
    def parents(self) -> tuple[CardParent, ...]:
        """Base, experts and companions, in the plan's order."""
        plan = self._plan
        found = [self._parent("base", plan.base_id(), None)]
        for number, (expert, weight) in enumerate(zip(plan.experts, plan.weights, strict=True), 1):
            found.append(self._parent(f"expert {number}", expert.manifest_id(), weight))
        for one in plan.companions:
            of = "" if one.of is None else f" {one.of}"
            found.append(self._parent(f"{one.role}{of}", one.manifest_id(), None))
        return tuple(found)

    @property
    def models(self) -> tuple[CardParent, ...]:
        """The parents without companions: whose licences and names count."""
        return self.parents[: 1 + len(self._plan.experts)]

    @cached_property
    def _named(self) -> tuple[CardParent, ...]:
        """The parents; a base whose card has no name gets the one that experts use for it."""
        base, *experts = self.parents
        return (
            base if base.name else msgspec.structs.replace(base, name=self._name_of_base()),
            *experts,
        )

    def licence_warnings(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """Yield warnings: the parents concerned (0 the base, experts from 1 on), and the text."""
        return conflicts(self._stated)

    @property
    def _stated(self) -> list[str | None]:
        return [parent.licence for parent in self.models]

    # -- the card ------------------------------------------------------------------------------

    def card(self, not_finite: int) -> str:
        """Return the text of README.md."""
        return "\n".join([*self._front_matter(), "", *self._body(not_finite)]) + "\n"

    def _front_matter(self) -> Iterator[str]:
        yield "---"
        yield "base_model:"
        for label in dict.fromkeys(parent.label for parent in self._named[: len(self.models)]):
            # Quoted: YAML reads an unquoted id of digits only, or with one e, as a number.
            yield f"- {json.dumps(label)}"
        yield "base_model_relation: merge"
        yield from licence_lines(self._stated)
        yield from self._kept_keys()
        yield from ("tags:", "- merge", "- mstore", "---")

    def _kept_keys(self) -> Iterator[str]:
        matter = front_matter(start_of(self._catalog, self._plan.base_id(), CARD))
        for key in ("library_name", "pipeline_tag"):
            found = values(matter, key)
            if len(found) == 1 and WORD.fullmatch(found[0]):
                yield f"{key}: {json.dumps(found[0])}"

    def _body(self, not_finite: int) -> Iterator[str]:
        yield self._title()
        yield ""
        yield "Made by mstore. This card stands in place of the base's own."
        if self._plan.model is not None:
            model = json.dumps(self._plan.model) if self._plan.model else "model at its top"
            yield f"\nOnly the base's {model} was merged: all its other models are as they were."
        if not_finite:
            yield from ("", _odd(not_finite))
        yield from ("", "## Parents", "")
        yield "| role | model | weight | licence as its card states it | content |"
        yield "|---|---|---|---|---|"
        for parent in self._named:
            weight = "" if parent.weight is None else number_text(parent.weight)
            licence = parent.licence or "none stated"
            name = parent.name or NOT_NAMED
            yield f"| {parent.role} | {name} | {weight} | {licence} | `{parent.manifest.hex()}` |"
        yield ""
        yield _OF_NAMES
        yield from licence_section(self._stated)
        if not is_one_licence(self._stated):
            yield f"\nTexts that came with the parents, if any, are in `{LICENCES}/`."
        yield from ("", "## How it was made", "")
        yield from self._how()
        yield _OF_IDS

    def _title(self) -> str:
        plan = self._plan
        if plan.layers:
            models = len({member for member, _ in plan.layers})
            of = "one model" if models == 1 else f"{models} models"
            return f"# A stack of {len(plan.layers)} layers of {of}"
        if plan.is_mixture:
            return f"# A mixture of {len(plan.experts)} experts"
        if plan.is_assembly:
            numbers = {number for one in plan.taken for number in _EXPERT.findall(one.source)}
            number = f"Expert {numbers.pop()}" if len(numbers) == 1 else "An expert"
            return f"# {number} of a mixture, as a dense model"
        models = len(self.models) - 1
        count = "one model" if models == 1 else f"{models} models"
        return f"# A merge of {count} by {plan.method}"

    def _how(self) -> Iterator[str]:
        """Yield the command that makes this merge again, also if its plan leaves chunks out."""
        left, all_of_it = self._left_out()
        plan = self._plan
        if plan.made_by == MOE:
            told = _OF_THE_MIXTURE if plan.is_mixture else _OF_THE_EXPERT
            yield from ("```sh", "mstore merge --plan REF --name NEW", "```", "", told)
            return
        if (len(plan.operations) > 1 or plan.layers) and not left and self._has_whole_recipe():
            command = f"mstore merge --recipe {MERGEKIT} --name NEW"
            told = _OF_THE_STACK if plan.layers else _OF_THE_RECIPE
            yield from ("```sh", command, "```", "", told)
            return
        others = any(tensor.sources or tensor.dtype for tensor in plan.tensors)
        if others or len(plan.operations) > 1:
            yield from ("```sh", "mstore merge --plan REF --name NEW", "```", "", _OF_THIS_PLAN)
            yield _OF_RULES
            if left:
                yield f"{left} of {all_of_it} chunks of experts that matter were left out, for a"
                yield "budget, an allowed error, or a share of blocks to write."
            return
        if left:
            yield from ("```sh", "mstore merge --plan REF --name NEW", "```", "", _OF_THIS_PLAN)
            yield f"{left} of {all_of_it} chunks of experts that matter were left out, for a"
            yield f"budget, an allowed error, or a share of blocks to write. {_OF_THE_WHOLE}"
            yield ""
        yield from ("```sh", self._command(), "```", "")

    def _has_whole_recipe(self) -> bool:
        """Return whether the recipe beside the card, run alone, is this merge."""
        asked = self._plan.criteria
        more = asked.only or asked.skip or self._plan.allow_missing
        return not more and MERGEKIT in self.files_of_recipe()

    def _command(self) -> str:
        plan, words = self._plan, ["mstore", "merge", "--base", self._plan.base_id().hex()]
        if plan.model is not None:
            words[-1] += f":{plan.model}"
        named = []
        for expert, weight in zip(plan.experts, plan.weights, strict=True):
            model = "" if expert.model is None else f":{expert.model}"
            named.append(f"{expert.manifest_id().hex()}{model}")
            words += ["--expert", f"{named[-1]}={number_text(weight)}"]
        for one in plan.companions:
            of = "" if one.of is None else f":{named[one.of - 1] if one.of else BASE}"
            words += ["--with", f"{one.role}{of}={one.manifest_id().hex()}"]
        words += ["--method", plan.method]
        for key, value in plan.operation.parameters:
            words += ["--param", f"{key}={written(value)}"]
        if plan.dtype is not None and is_retyped(self._catalog, plan):
            words += ["--dtype", plan.dtype]
        for option, patterns in (("--only", plan.criteria.only), ("--skip", plan.criteria.skip)):
            for pattern in patterns:
                words += [option, pattern]
        if plan.allow_missing:
            words.append("--allow-missing")
        return f"{shlex.join(words)} --name REF"

    def _left_out(self) -> tuple[int, int]:
        left = taken = 0
        for tensor in self._plan.tensors:
            for states in tensor.states:
                left += states.count(OMITTED) + states.count(DROPPED)
                taken += states.count(READ) + states.count(SHARED)
        return left, left + taken

    # -- licences ------------------------------------------------------------------------------

    def _licence_files(self) -> list[File]:
        return [
            msgspec.structs.replace(
                text, path=f"{LICENCES}/{parent.role.replace(' ', '-')}/{text.path}"
            )
            for parent in self.parents
            for text in parent.texts
        ]

    # -- what parents say ----------------------------------------------------------------------

    def _parent(self, role: str, id: ManifestId, weight: float | None) -> CardParent:
        manifest = self._catalog.manifest(id)
        own = said(self._catalog, id)
        texts = tuple(file for file in manifest.files if is_licence(file))
        return CardParent(role, id, weight, own.name, own.licence, texts)

    def _name_of_base(self) -> str | None:
        found: set[str | None] = set()
        for expert in self._plan.experts:
            if expert.manifest == self._plan.inputs[0].manifest:
                continue
            id = expert.manifest_id()
            if self._is_merge(id):
                # What it was merged of is not what it was tuned from.
                return None
            names = declared_bases(partial(start_of, self._catalog, id))
            stated = [one.name for one in names if one.is_base and one.source in (CARD, CONFIG)]
            found.add(stated[0] if len(stated) == 1 and NAME.fullmatch(stated[0]) else None)
        return found.pop() if len(found) == 1 else None

    def _is_merge(self, id: ManifestId) -> bool:
        return values(front_matter(start_of(self._catalog, id, CARD)), "base_model_relation") == [
            "merge"
        ]


def licence_warnings(catalog: Catalog, plan: Plan, sources: PlanInputs) -> tuple[MergeWarning, ...]:
    """Return warnings about the licences that the inputs' model cards state.

    Raises NotFound if the contents of an input were pruned, Corrupt, StorageFailed.
    """
    inputs = (sources.base, *sources.experts)
    names = [source.name for source in inputs]
    with contents.held(catalog, (source.snapshot_id() for source in inputs)):
        for source in inputs:
            contents.require(catalog, source.snapshot_id(), source.name)
        return tuple(
            MergeWarning(
                LICENCE_TERMS,
                names[who[0]] if len(who) == 1 else None,
                f"{', '.join(dict.fromkeys(names[n] for n in who))}: {text}",
            )
            for who, text in ModelCard(catalog, plan).licence_warnings()
        )


def _made_of(one: PlanInput) -> MadeOf:
    return MadeOf(one.manifest_id(), one.model)


def _odd(count: int) -> str:
    many = "1 element is" if count == 1 else f"{count} elements are"
    return f"**{many} infinite or NaN**, and finite in the base: see `mstore show REF`."


def _has_directory(manifest: Manifest, path: str) -> bool:
    return any(file.path.startswith(f"{path}/") for file in manifest.files)


def number_text(value: float) -> str:
    """Return the shortest text of a float32."""
    return str(np.float32(value))
