"""Tied embeddings: which names of a model stand for one tensor.

A config says if the output layer of a model (its head) is its embedding (`tie_word_embeddings`).
Such a model stores that tensor once, or under both names.  Names whose contents differ are not
tied, whatever the config says: that model has a head of its own.  Equal values alone do not tie
(the norms of a young model are all ones), and in safetensors no two names share storage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from mstore.checkpoint.models import split_name
from mstore.store.catalog import Catalog
from mstore.store.models import config_of, models_in
from mstore.store.objects.manifest import Manifest
from mstore.store.objects.shapes import EMBEDDINGS

KEY: Final = "tie_word_embeddings"
HEAD: Final = re.compile(
    r"(^|[.:])(lm_head|embed_out|output|output_projection|decoder)(\.weight)?$"
)
"""Finds, among word embeddings, those of the output."""
_USUAL: Final = ("model.embed_tokens.weight", "lm_head.weight")

_Value = TypeVar("_Value")


def ties(config: Mapping[str, Any]) -> bool | None:
    """Return whether a config, or that of a part of the model, ties embeddings; None: not said."""
    parts = (value for value in config.values() if isinstance(value, dict))
    said = [one[KEY] for one in (config, *parts) if isinstance(one.get(KEY), bool)]
    return any(said) if said else None


def ties_embeddings(catalog: Catalog, manifest: Manifest) -> frozenset[str]:
    """Return the models whose configs tie their embeddings.  Raises Corrupt, StorageFailed."""
    models = models_in(catalog, manifest)
    return frozenset(
        name
        for name in models.named
        if ties(config_of(catalog, manifest, models.config(name))) is True
    )


def untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config that ties no embeddings, neither those of a part of the model."""
    return {
        key: untied(value) if isinstance(value, dict) and value.get(KEY) else value
        for key, value in config.items()
    } | {KEY: False}


class Tied(msgspec.Struct, frozen=True):
    """What is tied in a model.

    groups: names that stand for one tensor, in the model's order. unstored: the second name of the
    only group, if the model stores but the first.
    """

    groups: tuple[tuple[str, ...], ...] = ()
    unstored: str | None = None

    @classmethod
    def of(
        cls, catalog: Catalog, manifest: Manifest, model: str, adapter: Iterable[str] = ()
    ) -> Tied:
        """Return what is tied in a stored model, by names in it.  Raises Corrupt, StorageFailed.

        adapter: names of an adapter's tensors.  If one is of a head that the model lacks, the model
        is tied unless its config says otherwise: of some kinds of models the config need not say.
        """
        models = models_in(catalog, manifest)
        tensors = models.in_model(model)
        named = {name: id for name, id in tensors.items() if EMBEDDINGS.search(name)}
        config = config_of(catalog, manifest, models.config(model)) if named else {}
        told = ties(config)
        if told is None and config and len(named) == 1:
            told = any("lm_head." in name for name in adapter)
        if not told:
            return cls()
        if len(named) == 1:
            (name,) = named
            second = _USUAL[HEAD.search(name) is None]
            return cls(((name, second),), second)
        found: dict[object, list[str]] = {}
        for name, id in named.items():
            found.setdefault(id, []).append(name)
        return cls(tuple(tuple(group) for group in found.values() if len(group) > 1))

    def both(self, model: Mapping[str, _Value]) -> dict[str, _Value]:
        """Return tensors of the model by name, as if it stored each under all its names."""
        found = dict(model)
        for first, *others in self.groups:
            if self.unstored in others and first in found:
                found[self.unstored] = found[first]
        return found


def own_head(sizes: Mapping[str, int], contents: Mapping[str, object]) -> tuple[str, str] | None:
    """Return a head that is no embedding of its size, and that embedding; None if there is none.

    sizes: bytes of each tensor. contents: of those that count, equal if the tensors are equal.
    """
    named = [name for name in sizes if name in contents and EMBEDDINGS.search(name)]
    for head in filter(HEAD.search, named):
        inputs = [
            name
            for name in named
            if not HEAD.search(name)
            and (split_name(name)[0], sizes[name]) == (split_name(head)[0], sizes[head])
        ]
        if inputs and contents[head] not in [contents[name] for name in inputs]:
            return head, inputs[0]
    return None


def sizes_of(catalog: Catalog, manifest: Manifest) -> dict[str, int]:
    """Return the bytes of each tensor by what it is called.  Raises Corrupt, StorageFailed."""
    models = models_in(catalog, manifest)
    return {name: part.nbytes for file in manifest.files for part, name in models.parts(file)}
