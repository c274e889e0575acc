"""The files of an adapter that mstore makes: weights and config, in PEFT's form.

Owns their names, and which branches may have them.  Does not own which tensors and
settings an adapter has.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mstore.checkpoint.declared import CARD
from mstore.checkpoint.strict_json import json_bytes
from mstore.models.adapters.config import CONFIG
from mstore.models.made.files import Slot, assembled, texts_of
from mstore.store.catalog import Catalog
from mstore.store.objects.manifest import Manifest, Part
from mstore.store.objects.tensor import Tensor
from mstore.store.refs import Ref
from mstore.store.transaction import Transaction, branch_to_move, tip_of
from mstore.store.view import array_dtype
from mstore.terms.errors import BadRequest, Corrupt, NotFound
from mstore.terms.phrases import Option, phrase

WEIGHTS: Final = "adapter_model.safetensors"

# A product is added as it is, so alpha / rank is 1: whoever makes an adapter sets both.
_SETTINGS: Final[Mapping[str, object]] = {
    "peft_type": "LORA",
    "lora_dropout": 0.0,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "use_rslora": False,
    "use_dora": False,
}


def branch_for_adapter(catalog: Catalog, name: str) -> Ref | None:
    """Return what the branch points at that an adapter is to move, None if it is new.

    Raises as `branch_to_move`, and BadRequest for a branch of a model.
    """
    current = branch_to_move(catalog, name)
    tip, _ = tip_of(catalog, current)
    if tip is not None:
        # A damaged tip says nothing.
        with suppress(NotFound, Corrupt):
            if catalog.manifest(tip.manifest_id()).file(CONFIG) is None:
                raise BadRequest(
                    f"{name} is a branch of a model: an adapter needs one of its own",
                    where=Option("name"),
                    hint=phrase("choose another {name}", name=Option("name")),
                )
    return current


def put_factor(transaction: Transaction, name: str, factor: npt.NDArray[Any], dtype: str) -> Tensor:
    """Store a matrix, rounded to an element type, and return its record, which is not stored."""
    data = np.ascontiguousarray(factor).astype(array_dtype(dtype))
    shape = (int(data.shape[0]), int(data.shape[1]))
    return transaction.put_tensor(dtype, shape, [data.tobytes()], name)


def put_files(
    catalog: Catalog,
    transaction: Transaction,
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, object],
    card: str | None = None,
) -> Manifest:
    """Store the files of an adapter whose tensors were put, and return what it consists of.

    settings: of its config, beside or in place of those that all adapters of mstore have. card: the
    text of its model card, None for no card.
    """
    names = sorted(tensors)
    records = [tensors[name] for name in names]
    parts = [
        Part(name, id, record.nbytes)
        for name, record, id in zip(names, records, transaction.put_records(records), strict=True)
    ]
    slots = [Slot(name, tensors[name].dtype, tensors[name].shape) for name in names]
    texts = texts_of(catalog, Manifest(()), {WEIGHTS: slots})
    texts[CONFIG] = json_bytes({**_SETTINGS, **settings})
    if card is not None:
        texts[CARD] = card.encode()
    return assembled((), texts, [WEIGHTS], lambda _: parts, transaction.put_bytes)
