"""`training-data`: list what a checkpoint, and those it descends from, were trained on."""

import argparse
from dataclasses import asdict
from pathlib import Path

from storage.commands.program import Output
from storage.objects.store import Store
from storage.visible import visible
from tasks.provenance.answers import TrainedProblem
from tasks.provenance.commands.shared import add_last, first_rows, show_uncertain
from tasks.provenance.questions import training_data

_MOST_CHARACTERS = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a version, its URI, or an alias (demo/latest)")
    parser.add_argument("--by", choices=["newest", "count"], default="newest", help="order of the problems")
    add_last(parser, "problems")


def run(store: Store, arguments: argparse.Namespace) -> Output:
    """Print totals, and a row for each problem."""
    answer = training_data(store, arguments.checkpoint, Path(arguments.cache))
    problems = answer.problems
    if arguments.by == "count":
        problems = sorted(problems, key=lambda problem: -problem.trained)
    totals = (
        f"{answer.checkpoint}: {answer.updates} updates on {answer.trained:,} of {answer.trajectories:,} trajectories, "
        f"{answer.tokens:,} sampled tokens, {len(problems):,} problems"
    )
    origins = [f"began with {line}" for line in answer.began]
    sets = f"problem sets: {', '.join(answer.problem_sets) or 'none'}"
    columns = ["problem", "prompt", "episodes", "trained on", "updates", "first", "last", "first turn", "any turn"]
    table = first_rows(columns, [_row(problem) for problem in problems], arguments.last)
    data = asdict(answer) | {"problems": [asdict(problem) for problem in problems]}
    return Output(data, [totals, *origins, sets, *table, *show_uncertain([], answer.unknown)])


def _row(problem: TrainedProblem) -> tuple[object, ...]:
    prompt = visible(" ".join(problem.prompt.split()), _MOST_CHARACTERS)
    rates = ["" if rate is None else f"{rate:.3f}" for rate in (problem.first_turn, problem.any_turn)]
    counts = (problem.episodes, problem.trained, problem.updates, problem.first, problem.last)
    return visible(problem.problem_id), prompt, *counts, *rates
