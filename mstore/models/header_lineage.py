"""What the header of a single-file model says of the models that it was made of.

Such a file is copied alone, without its README.md, so its header says where it came from, in the
entries that A1111's user interface writes and supermerger and others show (`sd_merge_recipe`,
`sd_merge_models`), and in Stability AI's `modelspec.merged_from`.  Models are named by the ids of
their contents: like a card, this is a function of the plan and of the parents' contents
(docs/design/057-digests-and-headers.md).  What parents' headers say is repeated with limits, and
never interpreted.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from mstore.checkpoint.paths import without_suffix
from mstore.checkpoint.strict_json import json_object
from mstore.models.made import metadata_of
from mstore.store.catalog import Catalog
from mstore.store.models import models_in
from mstore.terms import TOOL
from mstore.terms.ids import ManifestId

RECIPE: Final = "sd_merge_recipe"
MODELS: Final = "sd_merge_models"
MERGED_FROM: Final = "modelspec.merged_from"
ARCHITECTURE: Final = "modelspec.architecture"
SPEC: Final = "modelspec.sai_model_spec"
_TITLE: Final = "modelspec.title"
_MOST_BYTES: Final = 256 << 10
"""Of what is told about all ancestors; then it is only parents."""
_MOST_TITLE: Final = 200


class MadeOf(NamedTuple):
    """A parent: the id of its content, and the one model of it that was taken, None for any."""

    content: ManifestId
    model: str | None = None

    def __str__(self) -> str:
        return self.content.hex() + ("" if self.model is None else f":{self.model}")


def header_lineage(
    catalog: Catalog, how: Mapping[str, Any], parents: Iterable[MadeOf]
) -> dict[str, str]:
    """Return the entries of a header about what a model was made of.

    how: what was done, as JSON can say it.  Raises Corrupt, StorageFailed.
    """
    direct: dict[str, Any] = {}
    earlier: dict[str, Any] = {}
    names: list[str] = []
    for parent in parents:
        name, metadata = told_by(catalog, parent)
        names.append(name)
        direct[parent.content.hex()] = {
            "name": name,
            "legacy_hash": None,
            RECIPE: _object(metadata.get(RECIPE, "")) or None,
        }
        earlier |= _object(metadata.get(MODELS, ""))
    models = _text(earlier | direct)
    if len(models) > _MOST_BYTES:
        models = _text({id: {**one, RECIPE: None} for id, one in direct.items()})
    told = {RECIPE: _text({"type": TOOL.partition(" ")[0], **how}), MODELS: models}
    return told | ({MERGED_FROM: ", ".join(dict.fromkeys(names))} if len(names) > 1 else {})


def told_by(catalog: Catalog, parent: MadeOf) -> tuple[str, dict[str, str]]:
    """Return what a model is called, and the metadata of its file."""
    manifest = catalog.manifest(parent.content)
    named = models_in(catalog, manifest).named
    model = named.get(parent.model or "") or next(iter(named.values()), None)
    file = None if model is None else manifest.file(model.files[0])
    if file is None:
        return parent.content.short, {}
    metadata = metadata_of(catalog.read_parts(file.parts[:1])) or {}
    # A merge has the name of its base's file.
    own = "" if RECIPE in metadata else posixpath.basename(file.path)
    name = metadata.get(_TITLE, "").strip()[:_MOST_TITLE] or without_suffix(own)
    return name or parent.content.short, metadata


def _object(text: str) -> dict[str, Any]:
    try:
        return json_object(text.encode())
    except RecursionError:
        return {}


def _text(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, ensure_ascii=False)
