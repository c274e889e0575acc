"""The blocks of image models, by which their users weigh a merge: IN04, M00, OUT11.

A *network block* is a part of a denoiser with a name that supermerger, sd-mecha and "merge block
weighted" share; it has nothing to do with the blocks that a store keeps.  Which tensor is in which
follows from its name, in the layout of a model's authors (one file) or in that of diffusers:

    Stable Diffusion 1 and 2     BASE IN00..IN11 M00 OUT00..OUT11           26 blocks
    SDXL                         BASE IN00..IN08 M00 OUT00..OUT08           20
    Flux                         CLIP T5 IN D00..D18 S00..S37 OUT           61
    Stable Diffusion 3           BASE IN J00..J23 (or J37) OUT              27 (or 41)

BASE is what is in no other: text encoders and embeddings of time.  The VAE is one more, the last:
where a list of weights does not have it, it goes with BASE.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from glob import escape
from typing import Final, NamedTuple, TypeVar

import msgspec

from mstore.terms.errors import BadRequest, Incompatible
from mstore.terms.phrases import Option, few
from mstore.terms.requests import TensorRule

T = TypeVar("T")

BASE: Final = "BASE"
VAE: Final = "VAE"
_SHOWN: Final = 70

_TEXT: Final = re.compile(r"(cond_stage_model|conditioner|text_encoders?(_\d)?)[.:]")
_VAE: Final = re.compile(r"(first_stage_model|vae)[.:]")
_COMPONENT: Final = re.compile(r"text_encoder(_\d)?|vae|unet|transformer")
_DENOISER: Final = re.compile(r"(model\.diffusion_model\.|diffusion_model\.|unet:|transformer:)?")


class _Rule(NamedTuple):
    """Tensors of a denoiser: their block is `name` and a number, made of those in their names."""

    path: re.Pattern[str]
    name: str
    times: int = 1
    plus: int = 0

    def block(self, path: str) -> str | None:
        found = self.path.match(path)
        if found is None:
            return None
        first, *rest = [int(one) for one in found.groups()] or [0]
        return f"{self.name}{first * self.times + sum(rest) + self.plus:02}"


def _rule(path: str, name: str, times: int = 1, plus: int = 0) -> _Rule:
    return _Rule(re.compile(path), name, times, plus)


class _Family(NamedTuple):
    """A kind of model.

    mark: what only its denoisers have. rules: by numbers. ends: what comes after the last of the
    numbered blocks; `last`: its block, None for the last numbered one. rest: of other tensors.
    text: of text encoders, by what their names begin with.
    """

    mark: re.Pattern[str]
    rules: tuple[_Rule, ...]
    ends: re.Pattern[str]
    last: str | None
    rest: str
    text: tuple[tuple[str, str], ...]
    first: tuple[str, ...]


_UNET: Final = _Family(
    mark=re.compile(r"(input_blocks|down_blocks)\."),
    rules=(
        _rule(r"input_blocks\.(\d+)\.", "IN"),
        _rule(r"conv_in\.", "IN"),
        _rule(r"down_blocks\.(\d+)\.(?:resnets|attentions)\.(\d+)\.", "IN", 3, 1),
        _rule(r"down_blocks\.(\d+)\.downsamplers\.", "IN", 3, 3),
        _rule(r"(?:middle_block|mid_block)\.", "M"),
        _rule(r"output_blocks\.(\d+)\.", "OUT"),
        _rule(r"up_blocks\.(\d+)\.(?:resnets|attentions)\.(\d+)\.", "OUT", 3),
        _rule(r"up_blocks\.(\d+)\.upsamplers\.", "OUT", 3, 2),
    ),
    ends=re.compile(r"(out|conv_norm_out|conv_out)\."),
    last=None,
    rest=BASE,
    text=(("", BASE),),
    first=(BASE,),
)
_FLUX: Final = _Family(
    mark=re.compile(r"(single_blocks|single_transformer_blocks)\."),
    rules=(
        _rule(r"(?:double_blocks|transformer_blocks)\.(\d+)\.", "D"),
        _rule(r"(?:single_blocks|single_transformer_blocks)\.(\d+)\.", "S"),
    ),
    ends=re.compile(r"(final_layer|norm_out|proj_out)\."),
    last="OUT",
    rest="IN",
    text=(("text_encoders.t5", "T5"), ("text_encoder_2:", "T5"), ("", "CLIP")),
    first=("CLIP", "T5", "IN"),
)
_SD3: Final = _Family(
    mark=re.compile(r"(joint_blocks|pos_embed)\b"),
    rules=(_rule(r"(?:joint_blocks|transformer_blocks)\.(\d+)\.", "J"),),
    ends=re.compile(r"(final_layer|norm_out|proj_out)\."),
    last="OUT",
    rest="IN",
    text=(("", BASE),),
    first=(BASE, "IN"),
)
_FAMILIES: Final = (_UNET, _FLUX, _SD3)


class BlockLayout(msgspec.Struct, frozen=True):
    """The network blocks of one model.

    blocks: their names in order, without the VAE's. of: the block of each tensor.
    """

    blocks: tuple[str, ...]
    of: Mapping[str, str]

    def weights(self, asked: str | Sequence[float] | Mapping[str, float]) -> dict[str, float]:
        """Return the weight of each block, the VAE's too.

        asked: numbers in the order of the blocks, or by name or pattern (`IN*`; others are 1); as
        text `0,0.5,1` or `IN04=0.5,OUT*=0`.  Raises BadRequest.
        """
        given = _parsed(asked) if isinstance(asked, str) else asked
        every = (*self.blocks, VAE)
        if isinstance(given, Mapping):
            found = dict.fromkeys(every, 1.0)
            for pattern, weight in given.items():
                matched = [one for one in every if fnmatchcase(one, pattern.upper())]
                if not matched:
                    raise BadRequest(
                        f"no block is called {pattern[:_SHOWN]!r}; there are {self._told()}",
                        where=Option("blocks"),
                    )
                found |= dict.fromkeys(matched, float(weight))
        elif len(given) in (len(self.blocks), len(every)):
            found = dict(zip(every, map(float, given), strict=False))
            found.setdefault(VAE, found.get(BASE, 1.0))
        else:
            raise BadRequest(
                f"{len(given)} weights for {len(self.blocks)} blocks: {self._told()}",
                where=Option("blocks"),
                hint="one number for each, with commas between; or by name: IN04=0.5,OUT*=0",
            )
        if not all(map(math.isfinite, found.values())):
            raise BadRequest("a weight is not finite", where=Option("blocks"))
        return found

    def rules(
        self, weights: Sequence[float], asked: Sequence[Mapping[str, float]]
    ) -> tuple[TensorRule, ...]:
        """Return the rules of a merge: each expert's weight, times that of the block.

        weights: of the experts. asked: of each expert, the weights of the blocks.
        """
        found = {
            tensor: tuple(w * blocks[block] for w, blocks in zip(weights, asked, strict=True))
            for tensor, block in self.of.items()
        }
        return tuple(
            TensorRule(tensors=names, weights=own)
            for own, names in grouped(found).items()
            if own != tuple(weights)
        )

    def _told(self) -> str:
        """Return the names, runs of numbered ones as their ends."""
        runs: list[list[str]] = []
        for name in self.blocks:
            kind = name.rstrip("0123456789")
            if runs and kind != name and runs[-1][0].rstrip("0123456789") == kind:
                runs[-1][1:] = [name]
            else:
                runs.append([name])
        return " ".join("..".join(run) for run in runs)


def layout_of(tensors: Collection[str], where: str) -> BlockLayout:
    """Return the network blocks of a model.  tensors: as they are called.

    Raises Incompatible for a model of no known kind.
    """
    known = {name: _known(name) for name in tensors}
    paths = {name: _path(own) for name, own in known.items()}
    marks = [path for path in paths.values() if path is not None]
    family = next((one for one in _FAMILIES if any(map(one.mark.match, marks))), None)
    if family is None:
        raise Incompatible(
            "has no blocks that are known: they are those of Stable Diffusion 1 to 3, SDXL and "
            "Flux",
            where=where,
        )
    numbered = {
        name: next(filter(None, (rule.block(path) for rule in family.rules)), None)
        for name, path in paths.items()
        if path is not None
    }
    names = sorted(
        {block for block in numbered.values() if block is not None},
        key=lambda block: (_order(family, block), block),
    )
    last = family.last or names[-1]
    found = {}
    for name, path in paths.items():
        if path is None:
            own = known[name]
            text = next(block for begin, block in family.text if own.startswith(begin))
            found[name] = VAE if _VAE.match(own) else text
        else:
            ends = last if family.ends.match(path) else family.rest
            found[name] = numbered[name] or ends
    blocks = (*family.first, *names, *((family.last,) if family.last else ()))
    return BlockLayout(blocks, found)


def block_of_layer(layer: str) -> str | None:
    """Return the network block that a layer is, as reports name layers; None if it is none."""
    path = _path(_known(layer))
    rules = [rule for family in _FAMILIES for rule in family.rules]
    found = {rule.block(f"{path}.") for rule in rules} - {None} if path else set()
    return found.pop() if len(found) == 1 else None


def _order(family: _Family, block: str) -> int:
    kinds = [*dict.fromkeys(rule.name for rule in family.rules)]
    return kinds.index(block.rstrip("0123456789"))


def _known(name: str) -> str:
    """Return what a tensor would be called in a snapshot of its model or pipeline alone."""
    model, colon, rest = name.rpartition(":")
    component = model.rpartition("/")[2].partition("@")[0]
    return f"{component}:{rest}" if colon and _COMPONENT.fullmatch(component) else rest


def _path(name: str) -> str | None:
    """Return a tensor's path in its denoiser; None for one of a text encoder or a VAE."""
    if _TEXT.match(name) or _VAE.match(name):
        return None
    start = _DENOISER.match(name)
    assert start is not None
    return name[start.end() :]


def grouped(tensors: Mapping[str, T]) -> dict[T, tuple[str, ...]]:
    """Return patterns of the tensors that have each value, what most tensors have first."""
    found: dict[T, list[str]] = {}
    for name, value in tensors.items():
        found.setdefault(value, []).append(name)
    order = sorted(found, key=lambda value: -len(found[value]))
    return {value: patterns_of(found[value], tensors) for value in order}


def patterns_of(names: Iterable[str], every: Iterable[str]) -> tuple[str, ...]:
    """Return patterns that match these names, of all names, and no others: few, for people."""
    wanted = set(names)
    others = [name for name in every if name not in wanted]
    taken = {name[:end] for name in others for end in _ends(name)}
    found: dict[str, None] = {}
    for name in sorted(wanted):
        start = next((name[:end] for end in _ends(name) if name[:end] not in taken), None)
        found[escape(name) if start is None else f"{escape(start)}*"] = None
    return tuple(found)


def _ends(name: str) -> list[int]:
    """Return where a name's components end, with what ends them."""
    return [found.end() for found in re.finditer(r"[.:]", name)]


def _parsed(text: str) -> list[float] | dict[str, float]:
    items = [one.strip() for one in text.split(",")]
    named: dict[str, float] = {}
    numbers: list[float] = []
    for item in items:
        name, equals, value = item.rpartition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if math.isnan(number) or (bool(equals) != ("=" in items[0])) or (equals and not name):
            raise BadRequest(
                f"no weight of a block, nor a name in your settings: {few([item])!r}"
                if len(items) == 1 and not equals
                else f"no weight of a block: {few([item])!r}",
                where=Option("blocks"),
                hint="one number for each block, with commas between; or by name: IN04=0.5,OUT*=0",
            )
        if equals:
            named[name.strip()] = number
        else:
            numbers.append(number)
    return named or numbers
