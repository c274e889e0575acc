"""Models that a recipe of one store needs first: the merges that make them, and where they are.

Owns their branches.  Does not own which models these are (`recipes.prepared`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Final

import msgspec
from blake3 import blake3

from mstore.adapters.targets import is_adapter
from mstore.errors import BadName, BadRequest, NotFound
from mstore.frozen import frozen
from mstore.ids import ManifestId, SnapshotId
from mstore.numeric.codes import CODES
from mstore.recipes.layout import Layout, layers_of
from mstore.recipes.nodes import at
from mstore.recipes.prepared import APPLY, Applied, Needed, prepare
from mstore.recipes.recipe import Recipe, Text
from mstore.recipes.resolve import DTYPES, KnownMethod
from mstore.requests import PREPARED, MergeRequest
from mstore.store.catalog import Catalog
from mstore.store.models import config_of, snapshot_of, tensors_of

STACK: Final = "passthrough"
"""The method of stacks."""


@frozen
class PreparedModel:
    """A model that was made for a recipe."""

    name: str
    """what it is: layers of models, or a model with an adapter"""
    ref: str
    """the branch that it is stored on"""
    snapshot: SnapshotId
    """its snapshot"""
    new_snapshot: bool
    """false if the branch already was this"""
    bytes_written: int
    """bytes that were written for it"""


class Preparation(msgspec.Struct, frozen=True):
    """A model that must be made before a recipe's merge is planned.

    name: what the recipe calls it. ref: the branch that it is stored on; the name follows from the
    contents that it is made of. request: the merge that makes it.
    """

    name: str
    ref: str
    request: MergeRequest

    def made(self, snapshot: SnapshotId, *, is_new: bool, written: int) -> PreparedModel:
        """Return the model once it is stored."""
        return PreparedModel(self.name, self.ref, snapshot, is_new, written)


def manifests_of(
    catalog: Catalog, recipe: Recipe, revisions: Mapping[str, str]
) -> dict[str, ManifestId]:
    """Return the content of each model that a recipe names."""
    return {
        one.text: _manifest(catalog, one, revisions[one.text], recipe.where)
        for one in recipe.named()
    }


def prepared(
    catalog: Catalog, recipe: Recipe, method: KnownMethod, revisions: Mapping[str, str]
) -> tuple[Recipe, tuple[Preparation, ...]]:
    """Return the recipe as it is once its models are made, and what makes them."""
    manifests = manifests_of(catalog, recipe, revisions)
    _require_adapters(catalog, recipe, manifests)

    @cache
    def layers_in(manifest: ManifestId) -> int | None:
        record = catalog.manifest(manifest)
        layout = Layout.of(tensors_of(catalog, record), layers_of(config_of(catalog, record)))
        return None if layout.main is None else layout.stacks[layout.main]

    def layers(model: Text) -> int | None:
        return layers_in(manifests[model.text])

    def same(one: Text, other: Text) -> bool:
        return manifests[one.text] == manifests[other.text]

    @cache
    def dtypes(model: Text) -> frozenset[str]:
        tensors = catalog.tensors(
            list(tensors_of(catalog, catalog.manifest(manifests[model.text])).values())
        )
        found = {tensor.dtype for tensor in tensors} & CODES.keys()
        return frozenset(DTYPES.get(one, one) for one in found)

    recipe, needed = prepare(recipe, method, same=same, layers=layers, dtypes=dtypes)
    known = dict(revisions)
    # What is made of a model that is not made yet is named after that one's branch.
    ids = {name: id.hex() for name, id in manifests.items()}
    found = []
    own: list[object]
    for one in needed:
        if isinstance(one, Applied):
            kind, own = "applied", [ids[one.model.text], ids[one.adapter.text]]
        else:
            runs = [[ids[model.text], first, end] for model, first, end in one.runs]
            kind, own = "stack", [ids[one.base.text], *runs]
        digest = blake3(json.dumps(own).encode()).hexdigest()[:12]
        made = Preparation(one.name, f"{PREPARED}{kind}-{digest}", _request_for(one, known))
        known[one.name] = ids[one.name] = made.ref
        found.append(made)
    return recipe, tuple(found)


def _require_adapters(
    catalog: Catalog, recipe: Recipe, manifests: Mapping[str, ManifestId]
) -> None:
    """Raise BadRequest for MODEL+ADAPTER where the first is no model, or the second no adapter."""
    for one in recipe.names():
        adapter = one.adapter()
        if adapter is None:
            continue
        for part, wanted in ((one.model(), False), (adapter, True)):
            if is_adapter(tensors_of(catalog, catalog.manifest(manifests[part.text]))) != wanted:
                raise BadRequest(
                    f"{one} is a model and an adapter of it, and {part} is "
                    + ("no adapter" if wanted else "an adapter"),
                    where=at(recipe.where, one.line),
                )


def _request_for(needed: Needed, revisions: Mapping[str, str]) -> MergeRequest:
    """Return the merge that makes a model."""
    if isinstance(needed, Applied):
        return MergeRequest(
            base=revisions[needed.model.text],
            experts=[revisions[needed.adapter.text]],
            method=APPLY,
        )
    base = revisions[needed.base.text]
    runs = [(revisions[model.text], first, end) for model, first, end in needed.runs]
    others = dict.fromkeys(model for model, _, _ in runs if model != base)
    return MergeRequest(base=base, experts=list(others) or [base], method=STACK, layers=runs)


def _manifest(catalog: Catalog, model: Text, revision: str, where: str) -> ManifestId:
    try:
        return catalog.snapshot(catalog.resolve(snapshot_of(revision))).manifest_id()
    except (NotFound, BadName) as error:
        place = at(where, model.line)
        raise NotFound(f"no model {model} in this store", where=place) from error
