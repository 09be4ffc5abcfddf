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


def test_an_appended_line_does_not_change_a_run(
    rows: Path, overrides: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The run that goes on keeps its set and names the change and the ways on; another run gets what is there now."""
    workspace, sets, _ = begin(*overrides)
    caplog.clear()
    assert begin(*overrides)[1] == sets
    assert "its source has changed" not in caplog.text
    append(rows, "What is 5 + 1?")
    assert begin(*overrides)[1] == sets
    lines = [line for record in caplog.records if (line := record.getMessage()).startswith("problems.")]
    for name, told in zip(("train", "held-out"), lines, strict=True):
        assert told.startswith(f"problems.{name}: its source has changed since the run began: 5 problems instead of 4")
        assert f"keeps the problems that it began with ({sets[0]})" in told
        assert "another run with run.name=…" in told
    _, others, _ = begin(*overrides, "run.name=another")
    assert len(workspace.read_problems(others[0])) == 5


def test_rows_that_ask_the_same_are_in_the_log(
    rows: Path, overrides: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """They stay in the set."""
    append(rows, "What  is 3+1?")
    workspace, (train, _), _ = begin(*overrides)
    assert "jsonl: 1 row asks the same as an earlier one (000005 as 000004)" in caplog.text
    assert len(workspace.read_problems(train)) == 5


@pytest.mark.parametrize("change", ["gone", "damaged", "mapped otherwise"])
def test_a_source_that_can_no_longer_be_used(
    rows: Path, overrides: list[str], caplog: pytest.LogCaptureFixture, change: str
) -> None:
    """It ends no run that has its problems already; a run that begins is refused."""
    _, sets, _ = begin(*overrides)
    if change == "gone":
        rows.unlink()
    else:
        rows.write_text("no JSON\n" if change == "damaged" else '{"question": "?", "gold": "1"}\n')
    caplog.clear()
    assert begin(*overrides)[1] == sets
    assert "although its source cannot be used now" in caplog.text
    with pytest.raises(ValueError, match=r"rows.jsonl"):
        begin(*overrides, "run.name=another")


def test_problems_may_change_until_the_policy_is_there(rows: Path, overrides: list[str]) -> None:
    """Nothing has been played with them; the configuration of problems may change until then, too."""
    workspace = start(*overrides)
    import_problems.fn(workspace)
    append(rows, "What is 5 + 1?")
    _, sets, _ = begin(*overrides)
    assert len(workspace.read_problems(sets[0])) == 5


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
