"""What docs/merge-methods.md lists as different from mergekit on purpose is so: each one is seen.

The other test files allow exactly these; here each is shown to be there, so that the list can
neither lack a reason to exist nor outlive it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from case import Case
from compare import differing
from conftest import Workplace
from generated import EMBEDDING, HEAD
from mergekit import sparsify
from oracle import recorded
from test_elementwise import minus_zeros, untouched
from test_ties import at_thresholds

from mstore.terms.errors import BadRequest

Workplaces = Callable[[str], Workplace]


def test_dare_rescales_by_the_density(workplaces: Workplaces) -> None:
    """mergekit's factor is near 1/density and seldom equal to it."""
    workplace = workplaces("fp32 untied")
    with recorded() as draws:
        workplace.theirs(Case("dare_linear", (1.0,), density=0.5), "float32")
    (drawn,) = draws[EMBEDDING]
    assert drawn.factor == pytest.approx(2, rel=0.05)
    assert drawn.factor != 2


def test_tied_elements_are_chosen_by_index(workplaces: Workplaces) -> None:
    """Where deltas tie at the threshold, mergekit does not keep those of the lowest index."""
    workplace = workplaces("bf16 untied")
    case = Case("ties", (1.0, 0.5, 0.7, 0.3), density=0.2, normalize=True)
    ours, theirs = workplace.ours(case, "float32"), workplace.theirs(case, "float32")
    tied = at_thresholds(workplace.family, case)
    assert sum(int((differing(ours[n], theirs[n]) & tied[n]).sum()) for n in ours) > 100


def test_deltas_are_float32(workplaces: Workplaces) -> None:
    """Without a dtype in the recipe mergekit rounds deltas to the models' type: other elements."""
    workplace = workplaces("bf16 untied")
    case = Case("task_arithmetic", (1.0, 0.4, -0.25, 0.7))
    exact = workplace.theirs(case, "bfloat16")
    rounded = workplace.theirs(case, "bfloat16", dtype=None)
    assert int(differing(exact[EMBEDDING], rounded[EMBEDDING]).sum()) > 1000


def test_a_base_that_nothing_moves_stays(workplaces: Workplaces) -> None:
    """mergekit turns a -0 that nothing moves into +0, and its mean of equal values is rounded."""
    workplace = workplaces("fp32 untied")
    case = Case("task_arithmetic", (1.0, 0.4))
    ours, theirs = workplace.ours(case, "float32"), workplace.theirs(case, "float32")
    zeros = minus_zeros(workplace.family, ours, theirs)
    changed = {name: differing(ours[name], theirs[name]) for name in ours}
    assert any(bool((changed[name] & zeros[name]).any()) for name in ours)
    case = Case("linear", (0.5, 0.3, 0.2), normalize=True)
    ours, theirs = workplace.ours(case, "float32"), workplace.theirs(case, "float32")
    same = untouched(workplace.family, case)
    assert any(bool((differing(ours[n], theirs[n]) & same[n]).any()) for n in ours)


def test_tied_tensors_stay_tied(workplaces: Workplaces) -> None:
    """mergekit draws anew for the second name of a tied tensor; here one tensor stays one."""
    workplace = workplaces("bf16 tied")
    case = Case("dare_linear", (1.0, 0.5), density=0.5)
    ours, theirs = workplace.ours(case, "bfloat16"), workplace.theirs(case, "bfloat16")
    assert torch.equal(ours[HEAD], ours[EMBEDDING])
    assert not torch.equal(theirs[HEAD], theirs[EMBEDDING])


def test_weights_that_add_up_to_zero(workplaces: Workplaces) -> None:
    """Where linear would divide by zero, mergekit writes infinities and NaN; here it is refused."""
    workplace = workplaces("fp32 untied")
    case = Case("linear", (1.0, -1.0), normalize=True)
    assert not theirs_finite(workplace, case)
    with pytest.raises(BadRequest, match="zero"):
        workplace.ours(case, "float32")


def theirs_finite(workplace: Workplace, case: Case) -> bool:
    """Whether mergekit's result has neither an infinity nor a NaN."""
    merged = workplace.theirs(case, "float32")
    return all(bool(tensor.isfinite().all()) for tensor in merged.values())


def test_nan_is_kept_there() -> None:
    """mergekit's trimming ranks a NaN above all numbers and keeps it."""
    delta = torch.tensor([1.0, float("nan"), 3.0, 2.0])
    assert sparsify.magnitude(delta, density=0.25).isnan().tolist() == [False, True, False, False]
