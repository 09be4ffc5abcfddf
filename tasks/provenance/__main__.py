"""Report which checkpoint was trained on which problem, and exclude wrong problems or trajectories from training.

python -m tasks.provenance impact 12+7
python -m tasks.provenance --root s3://bucket/prefix training-data demo/latest
"""

import argparse
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from storage import interrupts
from storage.commands.program import Command, Output, run_command, table
from storage.errors import counted, first_few
from storage.objects.store import Store
from storage.visible import visible
from tasks.problems.exclusions import commit_exclusions
from tasks.provenance import questions
from tasks.provenance.questions import FoundProblem, Impact, Proposal, TrainingData

_MOST_CHARACTERS = 200
_MOST_ROWS = 20


def _add_problem(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("problem", metavar="PROBLEM")


def _problem(problem: FoundProblem) -> str:
    """Return prompt, gold answers, ids and key on two lines."""
    prompt, gold = " ".join(problem.prompt.split()), "; ".join(problem.solutions)
    texts = f"{visible(prompt, _MOST_CHARACTERS)} -> {visible(gold, _MOST_CHARACTERS)}"
    return f"{texts}\nid {visible(first_few(problem.problem_ids))}, key {problem.key}"


def _rows(columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str = "") -> list[Table | str]:
    """Return the first rows as a table, and a line with the number of the others."""
    left = len(rows) - _MOST_ROWS
    more = [f"  … and {left:,} more: --json"] if left > 0 else []
    return [table(columns, rows[:_MOST_ROWS], title), *more] if rows else []


def _uncertain(doubtful: Sequence[str], unknown: Mapping[str, str]) -> list[str]:
    """Return lines about versions that cannot be read, and about checkpoints that may be affected because of them."""
    shown = first_few([f"{version}: {why}" for version, why in unknown.items()])
    lines = [f"UNKNOWN, because it cannot be read: {shown}"] if unknown else []
    more = counted(len(doubtful), "more checkpoint")
    return [*lines, f"{more} may descend from these, such as {doubtful[0]}"] if doubtful else lines


def _data(answer: Impact | TrainingData | Proposal) -> dict[str, Any]:
    """Return an answer for JSON, where the unknown versions are a list."""
    return asdict(answer) | {"unknown": [{"version": version, "why": why} for version, why in answer.unknown.items()]}


def _add_training_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a version, its URI, or an alias (demo/latest)")


def training_data(store: Store, arguments: argparse.Namespace) -> Output:
    """Print totals, and a row for each problem."""
    answer = questions.training_data(store, arguments.checkpoint, Path(arguments.cache))
    totals = (
        f"{answer.checkpoint}: {counted(answer.updates, 'update')} on {answer.trained:,} of "
        f"{counted(answer.trajectories, 'trajectory')}, {counted(answer.tokens, 'sampled token')}, "
        f"{counted(len(answer.problems), 'problem')}"
    )
    origins = [*(f"began with {line}" for line in answer.began)]
    origins.append(f"problem sets: {', '.join(answer.problem_sets) or 'none'}")
    columns = ["problem", "prompt", "episodes", "trained on", "updates", "first", "last"]
    names = ("episodes", "trained", "updates", "first", "last")
    rows = [
        (visible(each["problem_id"]), visible(" ".join(each["prompt"].split()), 50), *(each[name] for name in names))
        for each in answer.problems
    ]
    return Output(_data(answer), [totals, *origins, *_rows(columns, rows), *_uncertain([], answer.unknown)])


def impact(store: Store, arguments: argparse.Namespace) -> Output:
    """Print the updates, trajectories, evaluations, checkpoints and aliases of a problem, and advice."""
    answer = questions.impact(store, arguments.problem, Path(arguments.cache))
    outcomes = Counter(each["outcome"] for each in answer.trajectories)
    by_outcome = [f"{count} {'' if name == 'unscored' else 'scored '}{name}" for name, count in outcomes.items()]
    counts = (
        f"affected: {counted(len(answer.trajectories), 'trajectory')} ({', '.join(by_outcome) or 'never played'}), "
        f"{counted(len(answer.evaluations), 'evaluation')} and {counted(len(answer.checkpoints), 'checkpoint')}"
    )
    parts: list[Table | str] = [_problem(answer.problem), counts]
    use_columns = ["checkpoint", "data set", "episodes", "trained on"]
    uses = [[use[name] for name in ("checkpoint", "data_set", "episodes", "trained")] for use in answer.uses]
    parts += _rows(use_columns, uses, "Updates")
    trajectories = [
        (each["data_set"], visible(each["trajectory_id"]), each["outcome"], ", ".join(each["trained"]))
        for each in answer.trajectories
    ]
    columns = ["data set", "trajectory", "scored", "trained on by"]
    parts += _rows(columns, trajectories, "Trajectories")
    evaluations = [(each["name"], each["version"], each["problem_set"]) for each in answer.evaluations]
    parts += _rows(["set", "evaluation", "problem set"], evaluations, "Evaluations")
    columns = ["run", "first checkpoint", "checkpoints of the run", "last one before it"]
    first = [[value or "none" for value in each.values()] for each in answer.first]
    title = "Trained on it, or descended from one that was"
    parts += _rows(columns, first, title) or ["no checkpoint is known to be trained on it"]
    parts += _rows(["alias", "points at"], list(answer.aliases.items()), "Aliases")
    parts += _uncertain(answer.doubtful, answer.unknown)
    return Output(_data(answer), [*parts, "What to do about a wrong gold answer:", *_advice(store, answer)])


def _advice(store: Store, answer: Impact) -> list[str]:
    lines = ["correct the gold answer at its source: the corrected problem is another problem, which may be trained on"]
    if answer.trajectories or set(answer.problem_sets) - {each["problem_set"] for each in answer.evaluations}:
        command = f"python -m tasks.provenance --root {shlex.quote(store.root)} exclude {answer.problem.key} --reason …"
        lines.append(f"keep it out of training:\n    {command}")
    if sets := sorted({each["name"] for each in answer.evaluations}):
        lines.append(f"evaluate {', '.join(sets)} again with the corrected problem set")
    for each in answer.first:
        none = "no checkpoint left in the store is known to be free of it: begin from another policy"
        clean = each["clean"] and shlex.quote(f"policy.path={store.uri(each['clean'])}")
        lines.append(f"run {each['run']}: " + (f"begin a new run with\n    {clean}" if clean else none))
    return [f"- {line}" for line in lines]


def _add_exclude(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("problem", metavar="PROBLEM", nargs="?")
    about = "instead of PROBLEM: a file of trajectory ids, one in each line"
    parser.add_argument("--ids", metavar="FILE", type=Path, help=about)
    parser.add_argument("--reason", required=True, metavar="TEXT", help="why they are excluded, for later readers")


def exclude(store: Store, arguments: argparse.Namespace) -> Output:
    """Commit the exclusions; print the version and the override with which a run honours it."""
    cache, reason = Path(arguments.cache), arguments.reason
    if (arguments.problem is None) == (arguments.ids is None):
        raise ValueError("give either PROBLEM or --ids FILE")
    if arguments.ids:
        text = arguments.ids.read_text("utf-8-sig")  # -sig: some editors begin a file with a byte order mark
        proposal = questions.propose_ids(store, [*filter(None, map(str.strip, text.splitlines()))], cache, reason)
    else:
        proposal = questions.propose_problem(store, arguments.problem, cache, reason)
    version = commit_exclusions(store, proposal.rows)
    override = f"problems.exclusions=[{version}]"
    made = f"{version}\nuse it, in addition to others that a run already honours, with\n    {override!r}"
    parts = [_problem(proposal.problem)] if proposal.problem else []
    parts += [_summary(proposal), *_uncertain([], proposal.unknown), made]
    return Output(_data(proposal) | {"version": version, "override": override}, parts)


def _summary(proposal: Proposal) -> str:
    trajectories = [row for row in proposal.rows if row.trajectory_id]
    sets = counted(len({row.data_set for row in trajectories}), "data set")
    whole = "; the problem is no longer drawn, and no other trajectory of it is trained on" if proposal.problem else ""
    trained = f"; trained on some of them, and unchanged: {counted(len(proposal.trained), 'checkpoint')}, see `impact`"
    return f"{counted(len(trajectories), 'trajectory')} in {sets}{whole}{trained if proposal.trained else ''}"


COMMANDS = {
    "impact": Command("list what was trained on a problem, and what a wrong gold answer affects", _add_problem, impact),
    "training-data": Command("list what a checkpoint was trained on", _add_training_data, training_data),
    "exclude": Command("commit a version that keeps a problem or trajectories out of training", _add_exclude, exclude),
}


def main() -> int:
    """Run the command line, and return the exit status."""
    problem = "PROBLEM: an id, a key (32 hex digits of its content) or the whole prompt."
    return run_command(COMMANDS, "python -m tasks.provenance", __doc__, problem)


if __name__ == "__main__":
    interrupts.run(main)
