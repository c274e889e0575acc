"""`mstore moe`: dense models as a mixture of experts, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from mstore_cli import completion
from mstore_cli.command import command
from mstore_cli.errors import UsageError, remarks
from mstore_cli.options import Message, Option, Threads
from mstore_cli.output import Column, Screen, short
from mstore_cli.plan_output import draw_remarks
from mstore_cli.recipes import RecipeText, models_of_moe
from mstore_cli.session import Session
from mstore_cli.sizes import format_size

if TYPE_CHECKING:
    from mstore.merge.running.commit import MergeReport

COLUMNS = (
    Column("NAME", style="yellow"),
    Column("SNAPSHOT"),
    Column("BLOCKS", right=True),
    Column("REUSED", right=True),
    Column("WRITTEN", right=True),
)


@command(
    example="mstore moe --recipe moe.yml --name llama/moe",
    failure="an error; nothing was published",
)
def moe(
    session: Session,
    *,
    name: Annotated[
        str,
        Option(
            "--name",
            metavar="REF",
            help="The branch of the mixture; with --unpack, of its experts: REF/0, REF/1, ...",
        ),
    ],
    recipe: Annotated[
        str | None,
        Option(
            "--recipe",
            metavar="FILE",
            help="A recipe of mergekit-moe (YAML); - reads standard input.",
        ),
    ] = None,
    routers: Annotated[
        str | None,
        Option(
            "--routers",
            metavar="REF",
            help="A checkpoint with the router of each layer, which examples/routers.py computes "
            "from the prompts of the recipe.",
            shell_complete=completion.refs,
        ),
    ] = None,
    seed: Annotated[
        int, Option("--seed", metavar="N", min=0, help="Of routers that are drawn, and of noise.")
    ] = 0,
    unpack: Annotated[
        str | None,
        Option(
            "--unpack",
            metavar="REF",
            help="The other way: store each expert of this mixture as a dense model.",
            shell_complete=completion.refs,
        ),
    ] = None,
    message: Message = "",
    threads: Threads = None,
) -> None:
    """Make a mixture of experts (MoE), or take one apart.

    The MLPs of each expert are taken as they are, so a mixture takes hardly more room than its
    routers; everything else is the base's. Models of a recipe are refs of the store, or
    directories, which are added first. Mixtral of Llama and Mistral models, Qwen2-MoE, Qwen3-MoE,
    with a tensor for each expert, as published models have.
    """
    if (recipe is None) == (unpack is None):
        raise UsageError("give --recipe FILE, or --unpack REF", hint="mstore moe --help")
    made: list[MergeReport] = []
    with session.open() as store:
        if unpack is not None:
            count = store.experts_of(unpack)
            names = [f"{name}/{number}" for number in range(count)]
            for one in names:
                store.require_branch(one)
            plans = [store.plan_dense(unpack, number) for number in range(count)]
            told = [f"expert {number} of {unpack}" for number in range(count)]
        else:
            store.require_branch(name)
            text = RecipeText.read(recipe or "", strict=True)
            models = models_of_moe(session, store, text, routers)
            with session.progress() as tick:
                prepared = store.prepare_moe(
                    text.text,
                    where=text.where,
                    models=models,
                    seed=seed,
                    threads=threads,
                    progress=tick,
                )
            remarks([f"stored {one.ref}: {one.name}" for one in prepared if one.new_snapshot])
            names, told = [name], ["a mixture of experts"]
            plans = [
                store.plan_moe(
                    text.text, where=text.where, models=models, routers=routers, seed=seed
                )
            ]
        for one, plan, why in zip(names, plans, told, strict=True):
            with session.progress() as tick:
                made.append(
                    store.merge(
                        plan,
                        name=one,
                        message=message or why,
                        threads=threads,
                        progress=tick,
                    )
                )

    def human(screen: Screen) -> None:
        screen.table(
            COLUMNS,
            (
                (
                    one.name,
                    short(one.snapshot),
                    str(one.blocks_total),
                    str(one.blocks_reused),
                    format_size(one.bytes_written),
                )
                for one in made
            ),
        )
        # Some remarks are about all experts.
        told = dict.fromkeys(remark for one in made for remark in one.remarks)
        draw_remarks(screen, told, [warning for one in made for warning in one.warnings])

    session.output.emit({"made": made}, ids=[one.snapshot for one in made], human=human)
