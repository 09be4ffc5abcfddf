"""`saw`: what a checkpoint was trained on, with all before it."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from storage.commands.output import Output
from storage.objects.store import Store
from storage.visible import visible
from tasks.provenance.commands.shared import add_last, show_uncertain, some

if TYPE_CHECKING:
    from tasks.provenance.answers import TrainedProblem

_PROMPT = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a version, its URI, or an alias (demo/latest)")
    parser.add_argument("--by", choices=["newest", "count"], default="newest", help="order of the problems")
    add_last(parser, "problems")


def run(store: Store, arguments: argparse.Namespace) -> Output:
    """Totals, and a row for each problem."""
    from tasks.provenance.questions import training_data

    answer = training_data(store, arguments.checkpoint, Path(arguments.cache))
    problems = answer.problems
    if arguments.by == "count":
        problems = sorted(problems, key=lambda seen: -seen.trained)
    totals = (
        f"{answer.checkpoint}: {answer.updates} updates on {answer.trained:,} of {answer.trajectories:,} trajectories, "
        f"{answer.tokens:,} sampled tokens, {len(problems):,} problems"
    )
    begun = [f"began with {line}" for line in answer.began]
    sets = f"problem sets: {', '.join(answer.problem_sets) or 'none'}"
    columns = ["problem", "prompt", "episodes", "trained on", "updates", "first", "last", "first turn", "any turn"]
    table = some(columns, [_row(seen) for seen in problems], arguments.last)
    data = asdict(answer) | {"problems": [asdict(seen) for seen in problems]}
    return Output(data, [totals, *begun, sets, *table, *show_uncertain([], answer.unknown)])


def _row(seen: "TrainedProblem") -> tuple[object, ...]:
    prompt = visible(" ".join(seen.prompt.split()), _PROMPT)
    rates = ["" if rate is None else f"{rate:.3f}" for rate in (seen.first_turn, seen.any_turn)]
    return visible(seen.problem_id), prompt, seen.episodes, seen.trained, seen.updates, seen.first, seen.last, *rates
