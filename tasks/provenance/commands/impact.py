"""`impact`: list what a wrong gold answer of a problem affects, and what to do."""

import argparse
import shlex
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from storage.commands.program import Output
from storage.objects.store import Store
from storage.version_names import PolicyVersion
from storage.visible import visible
from tasks.provenance.answers import Affected
from tasks.provenance.commands.shared import (
    add_last,
    add_problem,
    first_rows,
    show_first,
    show_problem,
    show_uncertain,
)
from tasks.provenance.questions import affected

if TYPE_CHECKING:
    from rich.table import Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_problem(parser)
    add_last(parser, "rows of each table")


def run(store: Store, arguments: argparse.Namespace) -> Output:
    """Print the affected trajectories, evaluations, checkpoints and aliases, and advice."""
    cache, name = Path(arguments.cache), arguments.problem
    answer = affected(store, name, cache, run=arguments.run, by_prompt=arguments.prompt)
    trajectories = [
        (each.data_set, visible(each.trajectory_id), each.outcome, ", ".join(each.trained))
        for each in answer.trajectories
    ]
    evaluations = [(each.name, each.version, each.problem_set) for each in answer.evaluations]
    parts: list[Table | str] = [show_problem(answer.problem), _counts(answer)]
    columns = ["data set", "trajectory", "scored", "trained on by"]
    parts += first_rows(columns, trajectories, arguments.last, "Trajectories")
    parts += first_rows(["set", "evaluation", "problem set"], evaluations, arguments.last, "Evaluations")
    parts += show_first(answer.first)
    parts += [f"{each.checkpoint} was taught it by a {each.how}" for each in answer.uses if each.how == "warm start"]
    parts += first_rows(["alias", "points at"], list(answer.aliases.items()), arguments.last, "Aliases")
    parts += show_uncertain(answer.doubtful, answer.unknown)
    return Output(asdict(answer), [*parts, "What to do:", *(f"- {line}" for line in _advice(store, answer))])


def _counts(answer: Affected) -> str:
    outcomes = Counter(each.outcome for each in answer.trajectories)
    by_outcome = ", ".join(
        f"{count} scored {name}" if name != "unscored" else f"{count} unscored" for name, count in outcomes.items()
    )
    return (
        f"{len(answer.trajectories)} trajectories ({by_outcome or 'never played'}), {len(answer.evaluations)} "
        f"evaluations and {len(answer.checkpoints)} checkpoints are affected"
    )


def _advice(store: Store, answer: Affected) -> list[str]:
    root = f"--root {shlex.quote(store.root)}"
    lines = ["correct the gold answer at its source: the corrected problem is another problem, which may be trained on"]
    if answer.trajectories or set(answer.problem_sets) - {each.problem_set for each in answer.evaluations}:
        lines.append(
            f"keep it out of training:\n    python -m tasks.provenance {root} exclude {answer.problem.key} --reason …"
        )
    if sets := sorted({each.name for each in answer.evaluations}):
        lines.append(f"evaluate {', '.join(sets)} again with the corrected problem set")
    for each in answer.first:
        if each.clean:
            lines.append(f"run {each.run}: begin a new run with\n    'policy={{path: {store.uri(each.clean)}}}'")
        else:
            lines.append(
                f"run {each.run}: no checkpoint left in the store is known to be free of it: begin from another policy"
            )
    clean = {each.run: each.clean for each in answer.first}
    for name, version in answer.aliases.items():
        earlier = clean.get(PolicyVersion(version).run) or "VERSION"
        if not name.endswith("/latest"):  # the pipeline moves this alias itself
            command = f"python -m storage {root} alias set {name} {earlier}"
            lines.append(f"alias {name}: if the earlier policy is better, move it with\n    {command}")
    return lines
