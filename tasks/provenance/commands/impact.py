"""`falls`: what falls with a problem's gold answer, and what to do."""

import argparse
import shlex
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from storage.commands.output import Output
from storage.objects.store import Store
from storage.version_names import PolicyVersion
from storage.visible import visible
from tasks.provenance.commands.shared import add_last, add_problem, show_first, show_problem, show_uncertain, some

if TYPE_CHECKING:
    from rich.table import Table

    from tasks.provenance.answers import Affected


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_problem(parser)
    add_last(parser, "rows of each table")


def run(store: Store, arguments: argparse.Namespace) -> Output:
    """Trajectories, evaluations, checkpoints and aliases."""
    from tasks.provenance.questions import affected

    cache, name = Path(arguments.cache), arguments.problem
    answer = affected(store, name, cache, run=arguments.run, by_prompt=arguments.prompt)
    trajectories = [
        (each.data_set, visible(each.trajectory_id), each.outcome, ", ".join(each.trained))
        for each in answer.trajectories
    ]
    exams = [(each.name, each.version, each.problem_set) for each in answer.evaluations]
    parts: list[Table | str] = [show_problem(answer.problem), _count(answer)]
    parts += some(["data set", "trajectory", "scored", "trained on by"], trajectories, arguments.last, "Trajectories")
    parts += some(["set", "evaluation", "problem set"], exams, arguments.last, "Evaluations")
    parts += show_first(answer.first)
    parts += [f"{each.checkpoint} was taught it by a {each.how}" for each in answer.uses if each.how == "warm start"]
    parts += some(["alias", "points at"], list(answer.aliases.items()), arguments.last, "Aliases")
    parts += show_uncertain(answer.doubtful, answer.unknown)
    return Output(asdict(answer), [*parts, "What to do:", *(f"- {line}" for line in _advice(store, answer))])


def _count(answer: "Affected") -> str:
    scored = Counter(each.outcome for each in answer.trajectories)
    told = ", ".join(
        f"{count} scored {name}" if name != "unscored" else f"{count} unscored" for name, count in scored.items()
    )
    return (
        f"{len(answer.trajectories)} trajectories fall ({told or 'nobody played it'}), {len(answer.evaluations)} "
        f"evaluations and {len(answer.checkpoints)} checkpoints are affected"
    )


def _advice(store: Store, answer: "Affected") -> list[str]:
    root = f"--root {shlex.quote(store.root)}"
    lines = ["correct the gold answer where it comes from: corrected, it is another problem, and may be trained on"]
    if answer.trajectories or set(answer.problem_sets) - {each.problem_set for each in answer.evaluations}:
        lines.append(
            f"keep it out of training:\n    python -m tasks.provenance {root} exclude {answer.problem.key} --reason …"
        )
    if sets := sorted({each.name for each in answer.evaluations}):
        lines.append(f"evaluate again on {', '.join(sets)}, with the corrected set")
    for each in answer.first:
        if each.clean:
            lines.append(f"run {each.run}: begin a new run with\n    'policy={{path: {store.uri(each.clean)}}}'")
        else:
            lines.append(
                f"run {each.run}: no checkpoint that is still there is known to be free of it: begin elsewhere"
            )
    clean = {each.run: each.clean for each in answer.first}
    for name, version in answer.aliases.items():
        before = clean.get(PolicyVersion(version).run) or "VERSION"
        if not name.endswith("/latest"):  # the pipeline moves it itself
            lines.append(f"alias {name}: if that is better,\n    python -m storage {root} alias set {name} {before}")
    return lines
