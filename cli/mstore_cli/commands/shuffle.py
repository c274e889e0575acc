"""`mstore shuffle`: a recipe of a stack whose layers are drawn from several models."""

from __future__ import annotations

from typing import Annotated

from mstore_cli import completion
from mstore_cli.command import Mistakes, command
from mstore_cli.merging import MISTAKEN, experts_of, hinting_at_directories, with_patterns
from mstore_cli.options import Option
from mstore_cli.output import Screen
from mstore_cli.session import Session

OTHER_WORDS = {
    "--model": "--expert VALUE",
    "-m": "--expert VALUE",
    "--weight": MISTAKEN["--weight"],
    "-w": MISTAKEN["--weight"],
    "--random-seed": "--seed VALUE",
    "--fp16": "mstore merge --recipe FILE --dtype float16",
    "--print-yaml": "leave it out: the recipe is all that is printed",
    "--dry-run": "leave it out: the recipe is all that is printed",
    "--write-yaml": "mstore shuffle ... > FILE",
}
"""What mergekit-layershuffle calls the options."""


@command(
    example="mstore shuffle --expert llama/base --expert llama/math=0.5 --seed 7 > recipe.yml",
    mistakes=Mistakes(OTHER_WORDS),
)
def shuffle(
    session: Session,
    expert: Annotated[
        tuple[str, ...],
        Option(
            "--expert",
            metavar="REF[=WEIGHT]",
            help="A model whose layers are drawn [default weight: 1]; files other than weights are "
            "from the first. Repeatable.",
            shell_complete=completion.refs,
        ),
    ],
    seed: Annotated[int, Option("--seed", metavar="N", min=0, help="Of the draws.")] = 0,
    full_random: Annotated[
        bool,
        Option(
            "--full-random",
            help="Draw the layers, too, and their order; WEIGHT is then the number of layers as "
            "a share of the model's.",
        ),
    ] = False,
) -> None:
    """Print a recipe of layers drawn from several models.

    Each layer of the result is that of one of the models at the same place, drawn by weight.
    `mstore merge --recipe -` takes the recipe. It is that of mergekit-layershuffle, with other
    draws: the same seed gives the same recipe on every machine, but not mergekit's.
    """
    from mstore import MergeRequest

    experts = experts_of(expert)
    with session.open() as store:
        found = with_patterns(store, experts)
        asked = MergeRequest(base=found[0][0], experts=found, method="passthrough")
        with hinting_at_directories(asked):
            text = store.shuffle(found, seed=seed, full_random=full_random)
    lines = text.splitlines()

    def human(screen: Screen) -> None:
        for line in lines:
            screen.line(line)

    session.output.emit({"recipe": text}, ids=lines, human=human)
