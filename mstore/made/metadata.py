"""What stays of a header's metadata when the tensors below it become others.

Programs write into the header of a safetensors file what the file is: its title, its date, a hash
of its tensors, a picture, how it was trained.  None of that is true of a model that was made of it,
as its README.md is not (docs/design/011-model-cards.md).  What says how to read the tensors stays,
and what nobody here knows.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final

_READING: Final[Mapping[str, frozenset[str]]] = {
    # Stability AI's model metadata: what a loader needs.
    "modelspec.": frozenset(
        {
            *("sai_model_spec", "architecture", "implementation", "implementation_version"),
            *("resolution", "prediction_type", "timestep_range", "encoder_layer", "preprocessor"),
            *("is_negative_embedding", "data_format", "format_type", "format_template"),
        }
    ),
    # sd-scripts: what its own merges of adapters keep (SS_METADATA_MINIMUM_KEYS).
    "ss_": frozenset(
        {
            *("v2", "base_model_version", "network_module", "network_dim", "network_alpha"),
            "network_args",
        }
    ),
    "sshs_": frozenset(),
    "sd_merge_": frozenset(),
}
"""Keys that say how to read a file, of each family that is known; its others say what it is."""

_SAYING: Final = re.compile(
    r"(.*[._-])?(hash|sha[0-9]*|md5|crc32|checksum|digest|title|name|description|thumbnail|date"
    r"|created|modified|author|licen[cs]e|prompt|workflow)s?",
    re.IGNORECASE,
)
"""Keys of no known family that say what a file is."""


def kept(metadata: Mapping[str, str], without: Collection[str] = ()) -> dict[str, str]:
    """Return what is true of any tensors of these names; nothing of the keys `without`."""
    return {
        key: text for key, text in metadata.items() if key not in without and _is_of_reading(key)
    }


def _is_of_reading(key: str) -> bool:
    for family, known in _READING.items():
        if key.startswith(family):
            return key.removeprefix(family) in known
    return not _SAYING.fullmatch(key)
