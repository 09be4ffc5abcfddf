"""The draws of a run: what it draws from is read once, and each draw is the same as when all was read each time."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from configs import load
from flows.run.workspace import Workspace
from flows.stages import rollout as task
from storage import layout
from storage.objects.store import Store
from storage.records import CURRICULUM_SCHEMA, PROBLEM_SCHEMA, CurriculumEntry, Exclusion, Problem
from storage.version_names import ProblemsVersion
from storage.versions import datasets
from storage.versions.drafts import Draft, Provenance
from tasks.problems.exclusions import commit_exclusions
from tasks.problems.problem_set import key

COUNT, SEED = 5, 3
PROBLEMS = [Problem(f"p{number}", f"What is {number} + 1?", [str(number + 1)]) for number in range(23)]
SET = layout.problems("0123456789abcdef")
WEIGHTS = {problem.problem_id: [0.0, 0.05, 0.5, 1.0][number % 4] for number, problem in enumerate(PROBLEMS)}
EXCLUDED = [PROBLEMS[number] for number in (1, 7, 8, 14, 22)]


BOTH = "curriculum+exclusions"
DRAWN = {
    "nothing": ["p9 p11 p21 p2 p14 p20 p16 p7", "p22 p15 p0 p2 p14 p6 p16 p17", "p6 p13 p7 p12 p3 p9 p22 p10"],
    "exclusions": ["p9 p11 p21 p2 p20 p16 p10 p12", "p15 p0 p2 p6 p16 p17 p20 p10", "p6 p13 p12 p3 p9 p10 p4 p11"],
    "curriculum": ["p2 p11 p14 p19 p3 p6 p7 p18", "p9 p10 p15 p6 p3 p22 p14 p11", "p7 p19 p18 p15 p2 p11 p22 p3"],
    BOTH: ["p2 p11 p19 p3 p6 p18 p10 p13", "p9 p10 p15 p6 p3 p11 p2 p5", "p19 p18 p15 p2 p11 p3 p6 p10"],
}
"""Draws of the first programs in iterations 0, 4 and 5, with the first three of the spare problems."""


def open_workspace(tmp_path: Path, case: str, excluded: Sequence[Problem] = EXCLUDED, count: int = COUNT) -> Workspace:
    """Commit problem set, curriculum and exclusions; return the workspace of a run that draws from them."""
    settings = [f"storage.root={tmp_path}/var", f"storage.cache={tmp_path}/cache", "run.name=r", f"run.seed={SEED}"]
    settings += [f"rollout.problems_per_iteration={count}"]
    workspace = Workspace(load("smoke", settings))
    commit(workspace, SET, "problems", PROBLEM_SCHEMA, PROBLEMS)
    if "curriculum" in case:
        settings += ["problems.sampling.prefer=middle"]
        entries = [CurriculumEntry(name, "", 16, 0.5, "middle", weight) for name, weight in WEIGHTS.items()]
        commit(workspace, layout.curriculum("r"), "curriculum", CURRICULUM_SCHEMA, entries)
    if "exclusions" in case:
        rows = [Exclusion("", "", "", -1, problem.problem_id, key(problem), True, "wrong") for problem in excluded]
        settings += [f"problems.exclusions=[{commit_exclusions(workspace.store, rows)}]"]
    return Workspace(load("smoke", settings))


def commit(workspace: Workspace, version: str, kind: Any, schema: Any, rows: list[Any]) -> None:
    with Draft(workspace.store, version, kind) as draft:
        datasets.write_rows(draft, schema, rows, 100)
        draft.commit(Provenance(config={}), [])


@pytest.fixture(autouse=True)
def without_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw without looking at a policy's tokenizer and context, and outside of a flow: the runs here have none."""
    monkeypatch.setattr(task, "unplayable", lambda *_: set())
    monkeypatch.setattr(task, "get_run_logger", logging.getLogger)


@pytest.mark.parametrize("case", DRAWN)
def test_draws_are_those_of_the_first_programs(case: str, tmp_path: Path) -> None:
    """A continued run draws what the program before this one would have drawn, the first spares included."""
    workspace = open_workspace(tmp_path, case)
    left = {problem.problem_id for problem in PROBLEMS if "exclusions" not in case or problem not in EXCLUDED}
    left -= {name for name, weight in WEIGHTS.items() if "curriculum" in case and not weight}
    for iteration, expected in [*zip((0, 4, 5), DRAWN[case], strict=True), (0, DRAWN[case][0])]:
        drawn, spare = task._draw(workspace, ProblemsVersion(SET), iteration)
        ids = [problem.problem_id for problem in (*drawn, *spare)]
        assert (len(drawn), " ".join(ids[: COUNT + 3])) == (COUNT, expected)
        assert sorted(ids) == sorted(left)


def test_a_flow_run_reads_once_what_it_draws_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later iterations read nothing; the workspace of another flow run reads anew."""
    read, original = list[str](), datasets.rows

    def rows(store: Store, version: str, *rest: Any) -> Any:
        read.append(version)
        return original(store, version, *rest)

    monkeypatch.setattr(datasets, "rows", rows)
    first, second = (open_workspace(tmp_path / name, BOTH) for name in ("first", "second"))
    for iteration in range(3):
        task._draw(first, ProblemsVersion(SET), iteration)
    assert len(read) == len(set(read)) == 3
    task._draw(second, ProblemsVersion(SET), 0)
    assert len(read) == 6


def test_a_pool_without_a_drawable_problem_is_refused(tmp_path: Path) -> None:
    """If exclusions leave only problems of weight 0, the message names the exclusions."""
    live = [problem for problem in PROBLEMS if WEIGHTS[problem.problem_id]]
    workspace = open_workspace(tmp_path, BOTH, live)
    with pytest.raises(ValueError, match=f"excludes all {len(live)} training problems"):
        task._draw(workspace, ProblemsVersion(SET), 0)


def test_an_iteration_that_comes_short_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    short = f"draw 3 has {len(PROBLEMS)} problems, not rollout.problems_per_iteration=100"
    for count, told in ((len(PROBLEMS), []), (100, [short])):
        workspace = open_workspace(tmp_path / str(count), "nothing", count=count)
        drawn, _ = task._draw(workspace, ProblemsVersion(SET), 3)
        assert len(drawn) == len(PROBLEMS)
        assert [message.partition(":")[0] for message in caplog.messages] == told
