"""The section of bench/neurons.py."""

from __future__ import annotations

from tables import Told, machine, table

ABOUT = """\
{machine} `python bench/neurons.py WORK`. Two models of {millions:.1f} M parameters, trained from
different seeds on the texts of `examples/family.py`, have held-out losses of {first:.3f} and
{second:.3f} nats a byte. Below, the mean of the elements of both, after channels, neurons and heads
of the second were moved to be like the first's.
"""

AFTER = """\
`mstore permute` took {rounds} rounds; the mean cosine of their tensors was {before:.3f} before
and is {cosine:.3f}. The second model has a loss of {same:.3f} after it. Two fine-tunes of the first
({tuned}) have a mean with a loss of {middle:.3f}, and `permute` refuses them: each neuron matches
itself.
"""


def section(told: Told) -> str:
    """The section of bench/neurons.py."""
    losses = told["losses"]
    first, second, *tuned = list(losses)[:4]
    worst = max(losses[first], losses[second])
    rows = [(name, f"{loss:.3f}", f"{loss - worst:+.3f}") for name, loss in told["middles"].items()]
    return "\n".join(
        [
            "## Neurons of models of different pretraining\n",
            ABOUT.format(
                machine=machine(told),
                millions=told["parameters"] / 1e6,
                first=losses[first],
                second=losses[second],
            ),
            table(("moved", "loss of the mean", "beside the worse model"), rows),
            AFTER.format(
                rounds=told["rounds"],
                before=told["cosine before"],
                cosine=told["cosine"],
                same=losses["permuted"],
                tuned=", ".join(f"{losses[name]:.3f}" for name in tuned),
                middle=told["middle of fine-tunes"],
            ),
        ]
    )
