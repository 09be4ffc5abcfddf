"""A run keeps the problems that it began with, whatever becomes of their files."""

import json
from pathlib import Path

import pytest

from flows.stages.problems import import_problems
from flows.stages.rollout import _draw, unplayable
from storage import layout
from tests.support.begun import begin, start


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    append(path, *(f"What is {number} + 1?" for number in range(4)))
    return path


def append(path: Path, *questions: str) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps({"ask": question, "gold": "1"}) + "\n" for question in questions)


@pytest.fixture
def overrides(plain: list[str], rows: Path, policy_folder: Path) -> list[str]:
    source = f"{{kind: jsonl, path: {rows}, fields: {{prompt: ask, solutions: gold}}}}"
    return [*plain, f"policy={{path: {policy_folder}}}", f"problems={{train: {source}, held_out: {source}}}"]


def test_a_run_keeps_the_problems_that_it_began_with(rows: Path, overrides: list[str]) -> None:
    """Also if their file has changed or can no longer be read; a run that begins takes what is there, or is refused."""
    import_problems.fn(start(*overrides))
    append(rows, "What is 4 + 1?")  # nothing was played yet
    workspace, sets, _ = begin(*overrides)
    assert len(workspace.read_problems(sets[0])) == 5
    append(rows, "What is 5 + 1?")
    assert begin(*overrides)[1] == sets
    _, others, _ = begin(*overrides, "run.name=another")
    assert len(workspace.read_problems(others[0])) == 6
    for text in ("no JSON\n", ""):
        rows.write_text(text)
        assert begin(*overrides)[1] == sets
        with pytest.raises(ValueError, match=r"rows.jsonl"):
            begin(*overrides, "run.name=third")


def test_problems_without_room_are_never_drawn(
    rows: Path, overrides: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """They are named when the rollouts begin; their places go to others, and the other draws stay as they were."""
    workspace, (train, _), _ = begin(*overrides)
    before = _draw(workspace, train, 0)[0]
    append(rows, f"What is 7 + 1? {'Ignore this. ' * 100}")
    workspace, (train, _), _ = begin(*overrides, "run.name=another")
    caplog.clear()
    drawn, spare = _draw(workspace, train, 0)
    assert {problem.problem_id for problem in (*drawn, *spare)} == {"000001", "000002", "000003", "000004"}
    assert len(drawn) == len(before) == 4
    assert "1 of 5 problems (000005) leave no room for an answer in inference.max_model_len=128" in caplog.text
    assert unplayable(workspace, layout.checkpoint("another", 0), workspace.read_problems(train)) == {"000005"}
