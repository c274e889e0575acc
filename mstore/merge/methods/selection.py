"""Selections: what of an expert a method takes, and all that follows from that.

For a base element b, expert elements e_k and d_k = e_k - b, in float32, a selection makes of each
expert what a combination then makes one number of.  Here are the contract and the two that need no
parameters: `Delta`, d_k itself, and `Whole`, e_k itself.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from mstore.merge.arithmetic.arguments import Chunk
from mstore.merge.arithmetic.masks import Singles
from mstore.merge.measures.grid import Bools, Floats, Grid
from mstore.merge.methods.parameters import AROUND_BASE, Parameter, Value
from mstore.store.objects.plan import Mixture, TrimThreshold
from mstore.terms.phrases import Option

if TYPE_CHECKING:
    from mstore.merge.measures.facts import TensorFacts


Masks = npt.NDArray[np.uint8]
Cuts = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]
EVERY = 2**32
"""The mask limit that keeps every element."""


class Cut(NamedTuple):
    """Where a tensor's selection ends; before: a flat index, -1 if all equal ones are selected."""

    value: float
    before: int


class Region(NamedTuple):
    """The flat indexes of a tensor from `start` to `end`; from `start` on and up to `end` if that
    is before it."""

    start: int
    end: int

    def within(self, first: int, length: int) -> list[tuple[int, int]]:
        """Return the runs of it in a chunk, beside the chunk's first index; none is empty."""
        last = first + length
        runs = [(self.start, self.end)]
        if self.end < self.start:
            runs = [(0, self.end), (self.start, last)]
        cut = [(max(start, first) - first, min(end, last) - first) for start, end in runs]
        return [(start, end) for start, end in cut if start < end]


class ChunkFacts(NamedTuple):
    """What the masks of a chunk follow from, beside its elements.

    row_length: of the tensor. weights: of each expert. cut: as `Selection.cut` returns it. numbers:
    what `Selection.measure` remembered of each row of the chunk; None if that is not in memory.
    """

    row_length: int
    weights: Sequence[float]
    cut: Cut | Region | None
    numbers: Singles | None


class Measured(msgspec.Struct, frozen=True):
    """What a selection knows of a whole tensor.

    cut: where it ends, if all experts share that. band: at most, or roughly, the sum of squares
    that it leaves of an expert.  squares: that sum, of each expert. factors: what the kept deltas
    of each expert are multiplied by. thresholds: what a plan keeps, if it is not the cut, one for
    all: `Selection.planned` numbers of each expert, the first of all experts first.
    """

    cut: Cut | None = None
    band: float = math.nan
    squares: Sequence[float] | None = None
    factors: tuple[float, ...] | None = None
    thresholds: tuple[TrimThreshold, ...] = ()

    def planned(self, experts: int) -> tuple[TrimThreshold, ...]:
        """Return what a plan keeps of it for so many experts."""
        return self.thresholds or (
            () if self.cut is None else (TrimThreshold(*self.cut),) * experts
        )


class Selection(msgspec.Struct, frozen=True):
    """What a method takes of each expert, with the parameters of one operation.

    A method names the class; `of` makes the selection of an operation.  It is a value: immutable,
    picklable (it travels to workers), and compared by its parameters.  This class takes the deltas
    as they are; a subclass overrides what differs, in these groups:

    - what is said of it: `facts`, `unbounded`, `estimated`, `leaves_nothing`
    - what it needs of whole tensors: `needs_facts`, `measure`, `ranks`
    - what need not be read: `weightless`, `idle`
    - what leaving out costs: `squares`, `certain`, `kept`, `shares`, `steps`
    - what a plan keeps of it: `planned`, `fits`
    - how a chunk is computed: `code`, `masked`, `cuts`, `thresholds`, `cut`, `keys`, `masks`
    - what determines its result: `chances`, `words`, `place`

    Arrays of planning are [K, C]: experts by chunks.

    experts: how many there are, K.
    """

    experts: int

    facts: ClassVar[str | None] = None
    """What must be measured of whole tensors first, for lists of methods; None for nothing."""
    unbounded: ClassVar[str | None] = None
    """What it does, where the error of leaving something out has no bound because of it."""
    estimated: ClassVar[str | None] = None
    """What to say of an estimate of errors, other than how good it usually is."""
    leaves_nothing: ClassVar[str | None] = None
    """What to say where nothing is left of all experts."""
    untrimmed: ClassVar[str | None] = "trims nothing to score by"
    """Why units cannot be ranked by what is trimmed; None if they can."""
    is_whole: ClassVar[bool] = False
    """Whether experts themselves are combined, and the base has no part but as one of them."""
    lists_base: ClassVar[bool] = False
    """Whether a base that a recipe lists counts like the experts."""
    needs_rows: ClassVar[bool] = False
    """Whether a chunk must be whole rows."""
    by_norms: ClassVar[bool] = True
    """Whether planning needs no more of deltas than what their norms do not exceed."""
    ranks_by_bound: ClassVar[bool] = False
    """Whether units are ranked by what is certain: then a larger budget has no larger bound."""
    sized_by_norms: ClassVar[bool] = True
    """Whether norms of deltas tell how much is selected."""
    leaves_base: ClassVar[bool] = True
    """Whether a chunk keeps the base's bytes if no expert moves it, however it is combined."""
    masked: ClassVar[int] = 0
    """The kernel's code for where masks come from (`Mix`); 0 for none."""
    remembers: ClassVar[bool] = False
    """Whether `measure` remembers a number of each row of the only expert."""
    weighs: ClassVar[bool] = True
    """Whether factors of a mixture take the place of weights; else kept deltas have both."""
    steps: ClassVar[int] = 0
    """Roundings of an element before it is combined, of whole experts (`model.Rounding`)."""
    code: ClassVar[int | None] = None
    """The kernel's code for what it does (`arithmetic.tiles`), if it is not the combination's."""

    @classmethod
    def of(cls, parameters: Mapping[str, Value], experts: int) -> Selection:
        """Return the selection with complete parameters (`Method.parse`)."""
        return cls(experts)

    def check(self, weights: Sequence[float], method: str) -> None:
        """Raise BadRequest, with the method's name, for parameters and weights that do not fit."""

    # -- facts -------------------------------------------------------------------------------

    @property
    def needs_facts(self) -> bool:
        """Whether factors of kept deltas follow from facts of the whole tensor."""
        return False

    def measure(self, facts: TensorFacts, weightless: Sequence[bool]) -> Measured:
        """Return what must be known of a tensor.  Raises BadRequest as `TensorFacts` does.

        weightless: for each expert whether it is multiplied by 0.
        """
        return Measured()

    def ranks(self, elements: int, expert: int = 0) -> tuple[int, ...]:
        """Return up to which ranks of |d_k|, from the largest, elements are kept; see `Trimmed`."""
        return ()

    @property
    def trims(self) -> bool:
        """Whether each expert and tensor needs thresholds of magnitude first."""
        return False

    @property
    def score(self) -> Literal["norm", "trimmed"]:
        """What units are ranked by, unless the caller says."""
        return "norm"

    @property
    def of_one(self) -> tuple[str, Option] | None:
        """Why nothing is selected of an expert that is alone, and what to change; None if it is."""
        return None

    @property
    def cancels(self) -> bool:
        """Whether two equal experts of opposite weights are nothing together."""
        return True

    # -- what is free ------------------------------------------------------------------------

    def weightless(self, weights: Sequence[float]) -> tuple[bool, ...]:
        """Return for each expert whether it need not be read, whatever its deltas are."""
        return tuple([weight == 0 for weight in weights])

    def idle(self, grid: Grid) -> Bools:
        """Return bool[K, C]: where nothing of an expert is selected."""
        return grid.nothing

    # -- what leaving out costs --------------------------------------------------------------

    def squares(self, grid: Grid) -> Floats:
        """Return ||selected d_k||^2, float64[K, C], roughly; infinite if it is not known."""
        return grid.whole

    def certain(self, grid: Grid, squares: Floats) -> Floats:
        """Return what these squares are at most."""
        return squares

    def scored(self, grid: Grid, squares: Floats, score: str) -> Floats:
        """Return the squares that units are ranked by."""
        return squares

    def kept(self, grid: Grid) -> Floats:
        """Return roughly the share of a chunk's elements that is selected, float64[K, C]."""
        return grid.moved

    @property
    def shares(self) -> Floats:
        """The share of elements that a random mask keeps, float64[K, 1]."""
        return np.ones((self.experts, 1))

    @property
    def mean_squares(self) -> Floats:
        """What random masks make of the mean square of a delta, float64[K, 1]."""
        return self.shares

    @property
    def thinning(self) -> Floats:
        """What a kept delta's typical size is divided by, float64[K, 1]."""
        return np.ones((self.experts, 1))

    # -- plans -------------------------------------------------------------------------------

    @property
    def planned(self) -> int:
        """How many thresholds a plan has of each expert and tensor."""
        return 0

    def fits(self, thresholds: Sequence[TrimThreshold], listed: int) -> bool:
        """Return whether a plan's thresholds of a tensor can be this selection's.

        listed: how many experts the plan lists, Fishers among them.
        """
        return len(thresholds) == self.planned * listed

    # -- computing ---------------------------------------------------------------------------

    def factor(self, factor: float) -> float:
        """Return the kernel's factor of the combined delta, a float32, or what it has instead."""
        return factor

    @property
    def cuts(self) -> int:
        """How many thresholds the kernel has of each expert."""
        return 0

    @property
    def limits(self) -> tuple[int, ...]:
        """For each expert, a draw below this is kept, of 2^32."""
        return (EVERY,) * self.experts

    def rescales(self, mixture: Mixture | None) -> tuple[float, ...]:
        """Return for each expert the factor of a delta that passed a random mask, as a float32.

        Where it is a fact that is not known yet: what it is near.
        """
        return (1.0,) * self.experts

    def thresholds(self, planned: Sequence[TrimThreshold]) -> Cuts | None:
        """Return the kernel's thresholds and quotas, from those of a plan; None if it has none."""
        return None

    def cut(self, planned: Sequence[TrimThreshold], shape: Sequence[int]) -> Cut | Region | None:
        """Return where a selection of all experts together ends, in a tensor of this shape."""
        return None

    def keys(self, name: str) -> npt.NDArray[np.uint32] | None:
        """Return the keys of a tensor's random masks, uint32[K, 2]; None if nothing is drawn."""
        return None

    def masks(self, chunk: Chunk, facts: ChunkFacts) -> Masks | None:
        """Return uint8[K, n], 1 where an element is taken; None if the kernel itself selects."""
        return None

    def mask_bytes(self, read: int) -> int:
        """Return how many bytes masks take for each element; read: of how many experts, at most."""
        return 0

    # -- memo keys ---------------------------------------------------------------------------

    def chances(self) -> tuple[bytes, ...]:
        """Return for each expert what its mask follows from, besides limits and thresholds."""
        return (b"",) * self.experts

    def words(self, keys: npt.NDArray[np.uint32]) -> bytes:
        """Return the keys of random masks, 8 bytes an expert; nothing if nothing is drawn."""
        return b""

    def place(self, cut: Cut | Region | None, first_index: int, length: int) -> bytes:
        """Return what a chunk's result follows from besides its elements.

        cut: as `cut` returns it.
        """
        return b""


class CutTogether(Selection, frozen=True):
    """A selection that one threshold of a tensor, the same for all experts, ends."""

    planned = 1

    def cut(self, planned: Sequence[TrimThreshold], shape: Sequence[int]) -> Cut:
        return Cut(planned[0].value, planned[0].quota)

    def mask_bytes(self, read: int) -> int:
        return self.experts

    def place(self, cut: Cut | Region | None, first_index: int, length: int) -> bytes:
        """Return the threshold, the number of experts, and how many ties of the chunk count."""
        assert isinstance(cut, Cut)
        before = cut.before - first_index if cut.before >= 0 else length
        return struct.pack("<fIQ", cut.value, self.experts, min(length, max(0, before)))


def alike(mask: Bools, experts: int) -> Masks:
    """Return a mask of n elements as that of all experts, uint8[K, n]."""
    found = np.empty((experts, mask.size), dtype=np.uint8)
    found[:] = mask
    return found


def each(parameters: Mapping[str, Value], parameter: Parameter, experts: int) -> tuple[float, ...]:
    """Return a parameter's value for each expert."""
    value = parameters.get(parameter.name, parameter.default)
    if isinstance(value, tuple):
        return value
    assert value is not None
    assert not isinstance(value, str)
    return (float(value),) * experts


def common(parameters: Mapping[str, Value], parameter: Parameter) -> float:
    """Return a parameter's value, where it is the same for all experts."""
    value = parameters.get(parameter.name, parameter.default)
    assert value is not None
    assert not isinstance(value, tuple | str)
    return float(value)


class Whole(Selection, frozen=True):
    """The experts themselves: an element counts although no expert moves it."""

    is_whole = True
    lists_base = True
    leaves_base = False
    cancels = False

    def idle(self, grid: Grid) -> Bools:
        return np.zeros(grid.shape, dtype=bool)


class Delta(Selection, frozen=True):
    """The deltas as they are."""

    @classmethod
    def of(cls, parameters: Mapping[str, Value], experts: int) -> Selection:
        """Return `Whole` with around_base=false."""
        return cls(experts) if parameters.get(AROUND_BASE.name, True) else Whole(experts)
