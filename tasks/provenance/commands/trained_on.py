"""`trained-on`: list the checkpoints that were trained on a problem."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from storage.commands.program import Output
from storage.objects.store import Store
from tasks.provenance.commands.shared import (
    add_last,
    add_problem,
    first_rows,
    show_first,
    show_problem,
    show_uncertain,
)
from tasks.provenance.questions import trained_on

if TYPE_CHECKING:
    from rich.table import Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_problem(parser)
    add_last(parser, "updates")


def run(store: Store, arguments: argparse.Namespace) -> Output:
    """Print the updates by run and iteration, and the first checkpoint of each run."""
    cache, name = Path(arguments.cache), arguments.problem
    answer = trained_on(store, name, cache, run=arguments.run, by_prompt=arguments.prompt)
    rows = [
        (use.checkpoint, use.how, use.data_set, use.episodes or "", use.trained if use.data_set else "")
        for use in answer.uses
    ]
    parts: list[Table | str] = [show_problem(answer.problem)]
    parts += first_rows(["checkpoint", "by", "data set", "episodes", "trained on"], rows, arguments.last)
    parts += show_first(answer.first) or ["no checkpoint is known to be trained on it"]
    return Output(asdict(answer), [*parts, *show_uncertain(answer.doubtful, answer.unknown)])
