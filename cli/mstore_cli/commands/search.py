"""`mstore search`: find the best numbers of a recipe, or its best experts, and merge them."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

from mstore_cli.command import command
from mstore_cli.errors import Interrupted, UsageError, remarks
from mstore_cli.judging import Checkout, Timeout, seconds_of, showing
from mstore_cli.options import DECIDES, HOW, REPORTS, RESULT, WHAT, Message, Option, Threads
from mstore_cli.output import Column, Screen, short
from mstore_cli.recipes import RecipeText, models_of_template
from mstore_cli.session import Session
from mstore_cli.sizes import counted, format_size

if TYPE_CHECKING:
    from mstore.api.reports import SearchReport, TrialReport
    from mstore.search.template import Template


NAMED = 6
"""The most free numbers, or experts, that a line names."""
_VALUE = 7
"""Letters of a sign and a value of four digits: =0.3333."""
_LISTED = 5
"""How many of the best trials are listed at the end."""
_ROLES = {
    "winner": "the winner",
    "start": "tried first",
    "all": "for comparison",
    "expert": "an expert",
}
_KEPT = {True: "kept", False: "left out", None: "not tried"}


@command(
    example="mstore search --recipe search.yml --eval 'python /srv/loss.py tune {}' "
    "--score loss.json:loss --minimize --report-eval 'python /srv/loss.py test {}' "
    "--name llama/best",
    failure="an error; what was tried is kept, and the same line goes on",
)
def search(
    session: Session,
    *,
    recipe: Annotated[
        str,
        Option(
            "--recipe",
            metavar="FILE",
            help="A recipe of mergekit (YAML) with free numbers, as weight: {min: 0, max: 1}; or a "
            "config of mergekit-evolve; - reads standard input.",
            group=WHAT,
        ),
    ],
    name: Annotated[
        str,
        Option(
            "--name",
            metavar="REF",
            help="The branch that will point at the best merge.",
            group=RESULT,
        ),
    ],
    decider: Annotated[
        str | None,
        Option(
            "--eval",
            metavar="COMMAND",
            help="The command that decides, split into words as a shell does; {} is the directory "
            "of a trial's merge.",
            group=DECIDES,
        ),
    ] = None,
    score: Annotated[
        str | None,
        Option(
            "--score",
            metavar="[NAME=]FILE:POINTER",
            help="The score that decides, as for `mstore eval`: a number in a file of JSON that "
            "the command writes.",
            group=DECIDES,
        ),
    ] = None,
    minimize: Annotated[
        bool, Option("--minimize", help="Less is better, as of a loss.", group=DECIDES)
    ] = False,
    report_eval: Annotated[
        str | None,
        Option(
            "--report-eval",
            metavar="COMMAND",
            help="The command that reports, by other examples than those that decide: on the "
            "winner, on all experts alike, on each expert.",
            group=REPORTS,
        ),
    ] = None,
    report_score: Annotated[
        str | None,
        Option(
            "--report-score",
            metavar="[NAME=]FILE:POINTER",
            help="The score that it reports [default: that of --score].",
            group=REPORTS,
        ),
    ] = None,
    same_set: Annotated[
        bool,
        Option(
            "--same-set",
            help="Let the command that decides report, too. Its scores of the winner are too good.",
            group=REPORTS,
        ),
    ] = False,
    trials: Annotated[
        int,
        Option("--trials", metavar="N", min=1, help="How many merges to try at most.", group=HOW),
    ] = 50,
    sampler: Annotated[
        str,
        Option(
            "--sampler",
            metavar="NAME",
            help="tpe or cmaes (these need mstore[search]) or grid, over free numbers; "
            "greedy-soup, leave-one-out or add-one-in, over experts.",
            group=HOW,
        ),
    ] = "tpe",
    seed: Annotated[
        int,
        Option("--seed", metavar="N", min=0, help="What its draws follow from.", group=HOW),
    ] = 0,
    jobs: Annotated[
        int,
        Option(
            "--jobs",
            metavar="N",
            min=1,
            help="How many trials to evaluate side by side, each with its own copy of the model; "
            "their $MSTORE_JOB is 0 to N-1, as to choose a GPU. The result is that of this seed "
            "and N.",
            group=HOW,
        ),
    ] = 1,
    restart: Annotated[
        bool,
        Option("--restart", help="Forget what an earlier search for this name tried.", group=HOW),
    ] = False,
    timeout: Timeout = None,
    checkout: Checkout = False,
    message: Message = "",
    threads: Threads = None,
) -> None:
    """Find the best weights of a recipe, or its best experts.

    Each trial is a virtual merge that the command sees as for `mstore eval`; nothing of it is
    stored, and the best one becomes an ordinary merge. Over free numbers, the first trial has
    weights of 1/K for K experts. Of more than 16 free numbers, some become one.

    What decided over many trials says too much good of the winner. So another command reports, by
    examples that decided nothing.

    A search that was stopped goes on where it was: type the same line again. With the same seed,
    jobs and scores it ends with the same merge.
    """
    text = RecipeText.read(recipe, strict=False)
    words = None if decider is None else _words("--eval", decider)
    report_words = None if report_eval is None else _words("--report-eval", report_eval)

    with session.open() as store:
        if words is None or score is None:
            raise _lacking(store.read_template(text.text, where=text.where), text.where)
        models = models_of_template(session, store, text)
        template = store.read_template(text.text, where=text.where, models=models).grouped()

        def told(trial: TrialReport, best: TrialReport | None) -> None:
            session.output.tell(line_of(template, trial, best, most=trials))

        try:
            with showing(session, checkout=checkout) as show:
                report = store.search(
                    text.text,
                    words,
                    name=name,
                    score=score,
                    minimize=minimize,
                    trials=trials,
                    sampler=sampler,
                    seed=seed,
                    jobs=jobs,
                    report_command=report_words,
                    report_score=report_score,
                    same_set=same_set,
                    restart=restart,
                    where=text.where,
                    models=models,
                    message=message,
                    timeout=None if timeout is None else seconds_of(timeout),
                    show=show,
                    tell=told,
                    threads=threads,
                )
            session.settled()
        except KeyboardInterrupt as stop:
            raise Interrupted("the same command goes on from what was tried") from stop
    session.output.emit(
        report, ids=[report.snapshot], human=lambda screen: _draw(screen, template, report)
    )


def _lacking(template: Template, where: str) -> UsageError:
    """Return what says which command may decide."""
    line, score, told = "python /path/to/score.py {}", "results.json:loss", ""
    found = template.evaluation
    if found is not None:
        words = ["lm_eval", "run", "--model", "hf", "--model_args", "pretrained={},dtype=bfloat16"]
        for name, value in found.options.items():
            words += [f"--{name}", *([] if value is True else [str(value)])]
        line, score = shlex.join([*words, "--output_path", "."]), found.score
        told = f"; the tasks of {where} are for a command here"
    return UsageError(
        f"--eval and --score say how good a merge is{told}",
        hint=f"add --eval {shlex.quote(line)} --score {shlex.quote(score)}",
    )


def _words(option: str, text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{option}: {str(error).lower()}: {text!r}") from None
    if not words:
        raise UsageError(f"{option}: it is empty")
    if not any("{}" in word or "MSTORE_DIR" in word for word in words):
        told = f"{option}: nothing in {shlex.join(words)} names the model"
        remarks([f"{told}: {{}} is its directory, and so is $MSTORE_DIR"])
    return words


def line_of(template: Template, trial: TrialReport, best: TrialReport | None, *, most: int) -> str:
    """Return a line on a trial: its number and score, the best one so far, and what was tried.

    most: how many trials there will be, whose lines shall be aligned.
    """
    digits = len(str(most - 1))
    told = f"trial {trial.number:>{digits}}  {_number(trial.score):>10}  best "
    told += f"{'-':>10}" if best is None else f"{_number(best.score):>10} ({best.number:>{digits}})"
    told += "  " + " ".join(one.ljust(width) for one, width in _cells(template, trial))
    if trial.score is None:
        told += f"  no score: {trial.error}"
    elif not trial.seconds:
        told += "  tried before"
    return told.rstrip()


def _cells(template: Template, trial: TrialReport) -> list[tuple[str, int]]:
    """Return what a trial tried, in pieces, each with the width that it has in all lines."""
    if trial.experts is not None:
        return [(" ".join(_what(template, trial)), 0)]
    widths = [len(one.name) + _VALUE for one in template.free]
    if len(widths) > NAMED:
        widths = [max(widths)] * NAMED
    pieces = _what(template, trial)
    return list(zip([*pieces, *[""] * (len(widths) - len(pieces))], widths, strict=True))


def _what(template: Template, trial: TrialReport) -> list[str]:
    """Return what a trial tried: its experts, or its free numbers by name.

    Of more numbers than `NAMED` those that are farthest from the start, as shares of their ranges.
    """
    if trial.experts is not None:
        left_out = [one for one in template.models if one not in trial.experts]
        if len(trial.experts) > NAMED:
            return ["all", *(("but", ", ".join(left_out)) if left_out else ())]
        return [" + ".join(trial.experts)]
    numbers = list(zip(template.free, trial.values, strict=True))
    if len(numbers) > NAMED:
        start = dict(zip(template.free, template.start(), strict=True))
        moved = sorted(
            (one for one in numbers if one[1] != start[one[0]]),
            key=lambda one: -abs(one[0].place(one[1]) - one[0].place(start[one[0]])),
        )[:NAMED]
        numbers = [one for one in numbers if one in moved]
    return [f"{free.name}={value:g}" for free, value in numbers] or ["the start"]


def _number(score: float | None) -> str:
    return "-" if score is None else f"{score:.6g}"


def _draw(screen: Screen, template: Template, report: SearchReport) -> None:
    done = f"merged {report.name} {short(report.snapshot)}"
    if not report.new_snapshot:
        done = f"nothing new: {report.name} holds this merge already"
    screen.line(done, style="green")
    first = "" if report.first is None else f"; the first trial had {_number(report.first)}"
    screen.fields(
        [
            ("was", short(report.was) if report.was and report.new_snapshot else None),
            (report.score, f"{_number(report.best)}{first}"),
            ("experts", None if report.experts is None else ", ".join(report.experts)),
            *((name, f"{value:g}") for name, value in report.values.items()),
            ("trials", f"{len(report.trials)} by {report.sampler}, seed {report.seed}"),
            ("  evaluated", counted(report.evaluated, "merge")),
            ("  resumed", report.resumed or None),
            ("written", format_size(report.bytes_written)),
            ("decided by", report.decided_by),
            ("reported by", report.reported_by),
        ]
    )
    if report.ingredients:
        _draw_ingredients(screen, report)
    else:
        _draw_best(screen, template, report)
    screen.table(
        [Column("model"), Column("what it is"), Column(report.reported_score, right=True)],
        [
            (
                one.name,
                _ROLES[one.role],
                _number(one.score),
            )
            for one in report.reported
        ],
    )
    if report.reported_by == report.decided_by:
        screen.line("the examples that decided also report: the winner is likely less good")
    for text in report.remarks:
        screen.line(f"remark: {text}")
    screen.command("to look at the trials", f"mstore report {report.name} -o {_page(report.name)}")


def _draw_ingredients(screen: Screen, report: SearchReport) -> None:
    screen.table(
        [
            Column("expert, the best first"),
            Column(f"{report.score} alone", right=True),
            Column("soup with it", right=True),
            Column(""),
        ],
        [
            (one.expert, _number(one.alone), _number(one.tried), _KEPT[one.kept])
            for one in report.ingredients
        ],
    )


def _draw_best(screen: Screen, template: Template, report: SearchReport) -> None:
    """Print the best trials, the winner first."""
    sign = 1 if report.minimize else -1
    best = sorted(
        (one for one in report.trials if one.score is not None),
        key=lambda one: (one.plan != report.plan, sign * (one.score or 0.0)),
    )[:_LISTED]
    names = [one.name for one in template.free]
    has_columns = len(names) <= NAMED and all(one.experts is None for one in best)
    more = [Column(one, right=True) for one in names] if has_columns else [Column("by")]
    screen.table(
        [Column("trial", right=True), Column(report.score, right=True), *more],
        [
            (
                str(one.number),
                _number(one.score),
                *(
                    [f"{value:g}" for value in one.values]
                    if has_columns
                    else [" ".join(_what(template, one))]
                ),
            )
            for one in best
        ],
    )


def _page(name: str) -> str:
    return shlex.quote(f"{name.replace('/', '-')}.html")
