"""A stored model's config.json."""

from __future__ import annotations

from typing import Final

from mstore.checkpoint.declared import CONFIG
from mstore.checkpoint.strict_json import parse_object
from mstore.errors import BadCheckpoint
from mstore.objects.manifest import Manifest
from mstore.store.catalog import Catalog

_MAX_CONFIG: Final = 1 << 20
_MAX_CONTAINERS: Final = 65_536


def config_of(catalog: Catalog, model: Manifest, path: str = CONFIG) -> dict[str, object]:
    """Return the config of a model, empty if it has none of a usual size that can be parsed.

    path: of the file.

    Raises Corrupt, StorageFailed.
    """
    raw = catalog.read_small(model.file(path), _MAX_CONFIG)
    if raw is None:
        return {}
    try:
        return parse_object(raw, what=CONFIG, where=CONFIG, max_containers=_MAX_CONTAINERS)
    except BadCheckpoint:
        return {}
