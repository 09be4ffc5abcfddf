"""The growth of cost with the work: with episodes in an iteration, versions in a store, problems in a problem set.

Every row compares the largest amount of work with the smallest. The goal is always "linear or better". Each measurement
has a new process, which runs this file or `growth_versions` with what to measure as its arguments.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from configs import load
from storage import layout
from storage.objects.store import Store
from storage.records import CURRICULUM_SCHEMA, CurriculumEntry, Exclusion, Problem
from storage.version_names import PolicyVersion, ProblemsVersion
from storage.versions import datasets
from storage.versions.drafts import Draft, Provenance
from tests.benchmarks.fixtures import Lab
from tests.benchmarks.result import Row, peak_memory_mb

if TYPE_CHECKING:
    from tasks.run.workspace import Workspace

GOAL = 1.1
"""A cost is linear if 16 times the work costs at most 16 times this."""
PROBLEMS_DRAWN = (32, 128, 512)  # of 16 episodes each
VERSIONS = (10, 100, 1_000, 10_000)
PROBLEMS = (1_000, 10_000, 100_000)
STAGES = ("rollout", "score", "train")
REPEATS = 5


def measure(lab: Lab) -> list[Row]:
    """Make all three measurements."""
    return [*_problem_rows(lab), *_version_rows(lab), *_episode_rows(lab)]


def _row(name: str, amounts: Sequence[int], costs: Sequence[float], show: Callable[[float], str], unit: str) -> Row:
    """Make a row: how many times the largest amount costs what the smallest one does."""
    work, cost = amounts[-1] / amounts[0], costs[-1] / max(costs[0], 1e-9)
    detail = ", ".join(f"{show(cost)} at {amount:,}" for cost, amount in zip(costs, amounts, strict=True))
    goal = f"{work:,.0f} times the {unit}: {work * GOAL:,.0f} or less"
    return Row(name, f"{cost:.3g} times", goal, cost <= work * GOAL, detail)


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 0.1 else f"{value * 1000:.2g} ms"


def _megabytes(value: float) -> str:
    return f"{value:,.0f} MB"


# Episodes


def _episode_rows(lab: Lab) -> list[Row]:
    """Play, grade and train on an iteration of the demo, of growing size, with vLLM."""
    episodes = tuple(problems * lab.config().rollout.group_size for problems in PROBLEMS_DRAWN)
    rows = []
    costs: dict[int, dict[str, Any]] = {problems: {} for problems in PROBLEMS_DRAWN}
    for problems in PROBLEMS_DRAWN:
        overrides = [f"run.name=growth-{problems}", f"rollout.problems_per_iteration={problems}"]
        overrides += ["rollout.max_head_offpolicyness=1"]  # the second update trains on what policy version 0 played
        for stage in STAGES:
            arguments = [stage, lab.policy.version, *lab.overrides, *overrides]
            costs[problems][stage] = lab.run_module("growth", "episodes", *arguments)
    for stage in STAGES:
        seconds, peaks = ([costs[problems][stage][what] for problems in PROBLEMS_DRAWN] for what in ("seconds", "peak"))
        rows.append(_row(f"seconds of {stage}", episodes, seconds, _seconds, "episodes"))
        rows.append(_row(f"peak memory of {stage}", episodes, peaks, _megabytes, "episodes"))
    return rows


def run_stage(stage: str, policy: str, *overrides: str) -> dict[str, float]:
    """Run a stage of iterations 0 and 1; return the seconds of the second and the peak memory in MB.

    In the first one libraries and vLLM's caches are warmed up.
    """
    from tasks.run.workspace import Workspace

    stages = {"rollout": _rollout, "score": _score, "train": _train}
    seconds = list(stages[stage](Workspace(load("demo", overrides)), PolicyVersion(policy)))
    return {"seconds": seconds[-1], "peak": peak_memory_mb()}


def _rollout(workspace: "Workspace", policy: PolicyVersion) -> Iterator[float]:
    from prefect.logging import disable_run_logger

    from tasks.problems.task import import_problems
    from tasks.rollout.task import rollout
    from tasks.run.resources import open_workers

    with disable_run_logger(), open_workers(workspace) as workers:
        problems, _ = import_problems.fn(workspace)
        for iteration in range(2):
            yield _timed(lambda: rollout.fn(workspace, workers, iteration, policy, problems))  # noqa: B023


def _score(workspace: "Workspace", _: PolicyVersion) -> Iterator[float]:
    from prefect.logging import disable_run_logger

    from tasks.run.resources import open_workers
    from tasks.score.task import score

    with disable_run_logger(), open_workers(workspace) as workers:
        for iteration in range(2):
            played = layout.trajectories(workspace.name, iteration)
            yield _timed(lambda: score.fn(workspace, workers, iteration, played))  # noqa: B023


def _train(workspace: "Workspace", policy: PolicyVersion) -> Iterator[float]:
    from prefect.logging import disable_run_logger

    from tasks.run.resources import open_trainer
    from tasks.score.scoring import scorer_fingerprint
    from tasks.train.task import train

    name, scorer = workspace.name, scorer_fingerprint(workspace.config.score)
    with disable_run_logger(), open_trainer(workspace) as trainer:
        for iteration in range(2):
            data = layout.trajectories(name, iteration), layout.scores(name, iteration, scorer)
            before = time.perf_counter()
            policy = train.fn(workspace, trainer, iteration, policy, *data)
            yield time.perf_counter() - before


# Versions


def _version_rows(lab: Lab) -> list[Row]:
    """Begin an iteration in stores of growing size: the first of a flow run, and a later one."""
    costs = [lab.run_module("growth_versions", str(count), str(REPEATS)) for count in VERSIONS]
    rows = []
    for mode in costs[0]:
        for when in ("first", "later"):
            seconds, requests = ([cost[mode][when][what] for cost in costs] for what in ("seconds", "requests"))
            row = _row(f"{when} iteration of a flow run, {mode}", VERSIONS, seconds, _seconds, "versions")
            detail = f"{row.detail}; {', '.join(f'{number:,.0f}' for number in requests)} requests"
            rows.append(replace(row, detail=detail, met=row.met and requests[-1] <= requests[0] * 1000 * GOAL))
    return rows


# Problems


def _problem_rows(lab: Lab) -> list[Row]:
    """Import problem sets of growing size, and draw iterations from them."""
    costs = []
    for count in PROBLEMS:
        path = lab.scratch / f"problems-{count}.jsonl"
        with path.open("w") as file:
            file.writelines(
                json.dumps({"question": _question(number), "answer": f"#### {number}"}) + "\n"
                for number in range(count)
            )
        costs.append(lab.run_module("growth", "problems", str(path), str(lab.scratch / f"store-{count}")))
    shows = {"peak memory": _megabytes}
    return [
        _row(what, PROBLEMS, [cost[what] for cost in costs], shows.get(what, _seconds), "problems") for what in costs[0]
    ]


def _question(number: int) -> str:
    """Write a problem as long as those of GSM8K."""
    return (
        f"Ada has {number} apples and buys {number % 97} more on each of {2 + number % 13} days. She gives a third of "
        f"them to Ben, who already has {number % 31}, and he eats one on each day of a week. How many are left?"
    )


def draw_problems(source: str, root: str) -> dict[str, float]:
    """Import a problem set and draw from it; return seconds by what was done, and the peak memory in MB."""
    from prefect.logging import disable_run_logger

    from tasks.problems.task import import_problems, read_problems
    from tasks.run.workspace import Workspace

    settings = [f"storage.root={root}", f"storage.cache={root}/cache", "policy.warm_start.teaches={kind: arithmetic}"]
    settings += [f"problems.train={{kind: jsonl, path: {source}, preset: gsm8k}}"]
    costs = {}
    with disable_run_logger():
        workspace = Workspace(load("demo", settings))
        costs["import of a problem set"] = _timed(lambda: import_problems.fn(workspace))
        train_set, _ = import_problems.fn(workspace)
        costs |= _draws(workspace, train_set, "")
        problems = read_problems(workspace, train_set)
        chosen = [*settings, *_exclude(workspace.store, problems), *_plan(workspace.store, problems)]
        costs |= _draws(Workspace(load("demo", chosen)), train_set, ", with exclusions and a curriculum")
    return costs | {"peak memory": peak_memory_mb()}


def _draws(workspace: "Workspace", train_set: ProblemsVersion, how: str) -> dict[str, float]:
    """Time the first draw of a flow run, and later ones."""
    from tasks.rollout.task import _draw

    seconds = [_timed(lambda: _draw(workspace, train_set, iteration)) for iteration in range(1 + REPEATS)]  # noqa: B023
    return {f"first draw of a flow run{how}": seconds[0], f"a later draw{how}": median(seconds[1:])}


def _exclude(store: Store, problems: Sequence[Problem]) -> list[str]:
    """Exclude every tenth problem, so that nearly every draw needs a spare one; return the override for it."""
    from tasks.problems.exclusions import commit_exclusions
    from tasks.problems.problem_set import key

    rows = [Exclusion("", "", "", -1, problem.problem_id, key(problem), True, "wrong") for problem in problems[::10]]
    return [f"problems.exclusions=[{commit_exclusions(store, rows)}]"]


def _plan(store: Store, problems: Sequence[Problem]) -> list[str]:
    """Commit a curriculum in which weights differ; return the override that uses it."""
    entries = [
        CurriculumEntry(problem.problem_id, "", 16, 0.5, "middle", 0.05 + 0.95 * (number % 7) / 6)
        for number, problem in enumerate(problems)
    ]
    with Draft(store, layout.curriculum("demo"), "curriculum") as draft:
        datasets.write_rows(draft, CURRICULUM_SCHEMA, entries, 50_000)
        draft.commit(Provenance(config={}), [])
    return ["problems.sampling.prefer=middle"]


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    measures: dict[str, Callable[..., dict[str, float]]] = {"episodes": run_stage, "problems": draw_problems}
    print(json.dumps(measures[sys.argv[1]](*sys.argv[2:])))
