"""`mstore recipe`: the recipe of a merged snapshot."""

from __future__ import annotations

from mstore_cli.command import command
from mstore_cli.options import Revision
from mstore_cli.output import Screen
from mstore_cli.session import Session


@command(
    example="mstore recipe llama/merged > recipe.yml",
)
def recipe(session: Session, revision: Revision) -> None:
    """Print how a snapshot was merged, as a mergekit recipe.

    The recipe (YAML) is made from the plan, also for merges without a recipe. It names models by
    their refs, with the ids of their contents as comments. The file mergekit_config.yml of the
    snapshot has ids alone: `mstore merge --recipe` takes these in any store. A budget is not in it:
    give it again. Of a mixture of experts it is the recipe of `mstore moe`, as it was written,
    after comments with the ids.
    """
    with session.open() as store:
        text = store.recipe(revision)
    lines = text.splitlines()

    def human(screen: Screen) -> None:
        for line in lines:
            screen.line(line)

    session.output.emit({"recipe": text}, ids=lines, human=human)
