"""The checkpoint of a mixture's routers: what no dense model has.

    layers.N.router          [experts, hidden]   the weights of layer N's router
    layers.N.shared_router   [1, hidden]         what scales its shared expert
    layers.N.q_proj.bias     zeros, where a mixture has biases that the dense models lack

`random` and `uniform_random` are drawn here, as mergekit-moe 0.1.5 means them: normal numbers of
deviation 1, and the begin of torch.nn.Linear.  All other modes need prompts and what a model makes
of them: `examples/routers.py` computes them with torch, and they come as a checkpoint, with
`routers.json` beside them: gate_mode, the prompts of each expert in order, and the SHA-256 of the
base's config.json.  Routers that have none, such as trained ones, are taken as they are.  Draws are
whole numbers added up, so no bit depends on the machine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from mstore.checkpoint.declared import CONFIG, MERGEKIT_MOE
from mstore.merge.moe.architectures import Architecture
from mstore.merge.moe.assemble import (
    Layer,
    bias_name,
    lacking_biases,
    router_name,
    shared_router_name,
)
from mstore.merge.moe.recipe import GateMode, MoeExpert, MoeRecipe
from mstore.models.made import published, put_array, put_model
from mstore.numeric.casts import singles
from mstore.store.catalog import Catalog
from mstore.store.models import Input, tensors_of
from mstore.store.transaction import Transaction
from mstore.terms.errors import Incompatible
from mstore.terms.ids import SnapshotId
from mstore.terms.requests import PREPARED

Singles = npt.NDArray[np.float32]

_WEIGHTS: Final = "model.safetensors"
_ORIGIN: Final = "routers.json"
_MOST_BYTES: Final = 1 << 24
_DRAWS: Final = 12
"""A sum of so many even draws has the variance 1, and nearly the form of a normal one."""
_LEAST_APART: Final = 0.02
"""Of two rows, relative to the longer one: nearer ones have a cosine of 0.9998, and the longer one
takes the tokens of both."""


class Routers(msgspec.Struct, frozen=True):
    """Routers of all layers: float32[experts, hidden], and [1, hidden] of the shared expert."""

    weights: tuple[Singles, ...]
    shared: tuple[Singles, ...]


class _Prompts(msgspec.Struct, frozen=True):
    """Of one expert.  source_model: as the recipe called it then; it may call it otherwise now."""

    source_model: str
    positive_prompts: tuple[str, ...]
    negative_prompts: tuple[str, ...]

    @classmethod
    def of(cls, one: MoeExpert) -> _Prompts:
        return cls(one.model.text, one.positive, one.negative)

    def said(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self.positive_prompts, self.negative_prompts


class _Origin(msgspec.Struct, frozen=True):
    """What routers follow from (`routers.json`)."""

    gate_mode: str
    experts: tuple[_Prompts, ...]
    shared_experts: tuple[_Prompts, ...]
    base_config_sha256: str

    def difference(self, recipe: MoeRecipe, config: bytes) -> str | None:
        """Return why these are not the routers of a recipe, None if they are.

        config: the config.json of its base.
        """
        if self.gate_mode != recipe.gate_mode:
            return f"gate_mode was {self.gate_mode}; here {recipe.gate_mode}"
        for what, theirs, experts in (
            ("experts", self.experts, recipe.experts),
            ("shared experts", self.shared_experts, recipe.shared),
        ):
            ours = tuple(map(_Prompts.of, experts))
            pairs = list(zip(theirs, ours, strict=False))
            others = [one for then, one in pairs if then.said() != one.said()]
            if not others and len(theirs) == len(ours):
                continue
            then, now = ([one.source_model for one in named] for named in (theirs, ours))
            if then != now:
                return f"{what} were {', '.join(then) or 'none'}; here {', '.join(now) or 'none'}"
            return f"the prompts of {others[0].source_model} were others"
        if self.base_config_sha256 != sha256(config).hexdigest():
            return f"the base was another one: its config.json was not that of {recipe.base}"
        return None


def drawn(
    mode: GateMode, layers: int, experts: int, shared: int, hidden: int, seed: int
) -> Routers:
    """Return routers of random numbers, of `random` or `uniform_random`."""
    bits = np.random.Philox(key=seed)

    def draw(rows: int) -> Singles:
        each = _DRAWS if mode == "random" else 1
        raw = bits.random_raw(rows * hidden * each)
        numbers = (raw >> np.uint64(32)).reshape(rows, hidden, each)
        # Whole numbers below 2^36 are exact in float64, so each result is rounded once.
        even = numbers.sum(axis=2, dtype=np.uint64).astype(np.float64) / 2.0**32
        is_normal = mode == "random"
        values = even - _DRAWS / 2 if is_normal else (2 * even - 1) * math.sqrt(1 / hidden)
        return np.asarray(values, np.float32)

    found = [(draw(experts), draw(shared)) for _ in range(layers)]
    weights, others = zip(*found, strict=True)
    return Routers(weights, others if shared else ())


def given(
    catalog: Catalog,
    one: Input,
    recipe: MoeRecipe,
    base: Input,
    layers: Sequence[Layer],
    hidden: int,
) -> Routers:
    """Return the routers of a stored checkpoint.  base: the recipe's, as the store has it.

    Raises Incompatible for routers of another recipe, another number of layers, experts or columns,
    and for routers that cannot tell experts apart; Corrupt, StorageFailed.
    """
    _require_origin(catalog, one, recipe, base)
    experts, shared = len(recipe.experts), len(recipe.shared)
    names = tensors_of(catalog, catalog.manifest_of(one.snapshot))

    def read(name: str, rows: int) -> Singles:
        if name not in names:
            raise Incompatible(f"has no {name}: it is no checkpoint of routers", where=one.name)
        record = catalog.tensor(names[name])
        if record.shape != (rows, hidden):
            raise Incompatible(
                f"{name} is {list(record.shape)}, and the mixture needs {[rows, hidden]}",
                where=one.name,
            )
        data = catalog.read_blocks(list(record.block_ids()))
        values = singles(data, record.dtype, rows * hidden).reshape(rows, hidden)
        if not np.isfinite(values).all():
            raise Incompatible(f"{name} has numbers that are not finite", where=one.name)
        return values

    weights = tuple(read(router_name(layer.number), experts) for layer in layers)
    others = tuple(read(shared_router_name(layer.number), 1) for layer in layers) if shared else ()
    for layer, own in zip(layers, weights, strict=True):
        near = _near(own.astype(np.float64))
        if near is not None:
            raise Incompatible(
                f"the router of layer {layer.number} cannot tell experts {near[0]} and {near[1]} "
                "apart: their prompts are too much alike",
                where=one.name,
                hint="take other prompts, or gate_mode: random and train the routers",
            )
    return Routers(weights, others)


def _require_origin(catalog: Catalog, one: Input, recipe: MoeRecipe, base: Input) -> None:
    """Raise Incompatible for routers that were made from another recipe, or with another base."""
    raw = catalog.read_small(catalog.manifest_of(one.snapshot).file(_ORIGIN), _MOST_BYTES)
    if raw is None:
        return
    try:
        made = msgspec.json.decode(raw, type=_Origin)
    except msgspec.DecodeError as error:
        raise Incompatible(f"{_ORIGIN} is not what routers.py writes", where=one.name) from error
    config = catalog.read_small(catalog.manifest_of(base.snapshot).file(CONFIG), _MOST_BYTES)
    why = made.difference(recipe, config or b"")
    if why is not None:
        raise Incompatible(
            f"these routers were made from another recipe: {why}",
            where=one.name,
            hint="make them again from this recipe, with examples/routers.py",
        )


def _near(rows: npt.NDArray[np.float64]) -> tuple[int, int] | None:
    """Return two rows between which a router cannot tell; None if there are none."""
    lengths = np.linalg.norm(rows, axis=1)
    for a, b in itertools.combinations(range(len(rows)), 2):
        longest = max(lengths[a], lengths[b])
        if np.linalg.norm(rows[a] - rows[b]) <= _LEAST_APART * longest:
            return a, b
    return None


def stored(
    catalog: Catalog,
    kind: Architecture,
    layers: Sequence[Layer],
    routers: Routers,
    biases: Mapping[str, int],
    dtype: str,
    recipe: str,
) -> SnapshotId:
    """Store routers as a checkpoint on a branch below `prepared/`; the same ones stay.

    biases: how many elements each projection's bias of zeros has. dtype: of all tensors. recipe:
    the text, which is kept beside them. Raises Conflict, StorageFailed.
    """
    arrays: dict[str, Singles] = {}
    for number, layer in enumerate(layers):
        arrays[router_name(layer.number)] = routers.weights[number]
        if routers.shared:
            arrays[shared_router_name(layer.number)] = routers.shared[number]
        for projection in lacking_biases(layer, kind):
            arrays[bias_name(layer.number, projection)] = np.zeros(biases[projection], np.float32)
    with Transaction(catalog, "routers") as transaction:
        tensors = {name: put_array(transaction, name, one, dtype) for name, one in arrays.items()}
        texts = {MERGEKIT_MOE: recipe.encode()}
        content = put_model(transaction, _WEIGHTS, tensors, texts)
        branch = f"{PREPARED}routers-{content.id().hex()[:16]}"
        return published(
            catalog,
            transaction,
            branch,
            content,
            message="routers of a mixture of experts",
            action="moe: routers",
        )
