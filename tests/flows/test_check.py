"""A scripted episode at the start of a run, before anything expensive."""

from functools import partial
from pathlib import Path

import pytest

from configs import ConfigError
from flows.run import check
from flows.run.configuration import resolve
from flows.run.workspace import Workspace
from flows.stages import warm_start as warm_start
from storage import layout
from storage.versions import manifests
from tasks.inference.api import InferenceError
from tasks.problems import ProblemError
from tests.rollout.test_scripted import HERE, Maze
from tests.support.begun import begin
from tests.support.scripted_judge import scripted_judge


@pytest.fixture
def overrides(plain: list[str], policy_folder: Path) -> list[str]:
    """Return overrides for an imported policy and the environment `Maze`."""
    return [*plain, f"policy={{path: {policy_folder}}}", f"environment.type={HERE}:Maze"]


def test_a_new_run_plays_a_scripted_episode_before_it_has_a_policy(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What no policy could avoid refuses it, other findings are warnings; a run that goes on plays none."""
    with pytest.raises(ConfigError, match=r"KeyError: 'wall' \(test_scripted.py:\d+ in reset\)"):
        begin(*overrides, "environment.args.broken=reset")
    store = Workspace(resolve("smoke", [*overrides, "environment.args.broken=step"])).store
    assert not manifests.committed(store, layout.checkpoint("smoke", 0))
    *_, policy = begin(*overrides, "environment.args.broken=step")
    assert "KeyError: 'door' (test_scripted.py:" in caplog.text
    monkeypatch.setattr(Maze, "reset", None)
    assert begin(*overrides, "environment.args.broken=step")[-1] == policy


def test_each_model_is_asked_one_question_before_anything_is_paid_for(
    overrides: list[str], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """A service that refuses it ends `--check` and the start of a run, with the way out; an odd answer is a finding."""
    says = "Score: 7"

    def answer(question: str) -> tuple[int, str]:
        return (400, "") if "max_tokens" in judge.fields[-1] else (200, says)

    with scripted_judge(answer) as judge:
        knobs = [*overrides, "score.type=judge", "score.args.judge.prompt='{{ answer }}?'"]
        knobs += [f"models.judge={{name: new, urls: ['{judge.url}']}}", "environment={type: math-verify}"]
        known = "models.judge.request={max_tokens: null, max_completion_tokens: 9}"
        for command in (partial(check.check, resolve("smoke", knobs)), partial(begin, *knobs)):
            with pytest.raises(InferenceError, match=r"answered 400.*set models\.judge\.request, say to \{max_to"):
                command()
        assert len(judge.asked) == 2
        assert check.check(resolve("smoke", [*knobs, known])) == "the configuration plays"
        assert "models.judge says: Score: 7" in capsys.readouterr().out
        begin(*knobs, known)
        assert len(judge.asked) == 4
        assert "the judge gave no number" not in caplog.text
        says = "It is fine."
        with pytest.raises(ConfigError, match="the judge gave no number from 0 to 10: 'It is fine.'"):
            check.check(resolve("smoke", [*knobs, known]))
        begin(*knobs, known, "run.name=other")
        assert "the judge gave no number" in caplog.text


def test_the_check_starts_no_server_of_a_model(
    overrides: list[str], policy_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It tells the question, and what hinders that."""
    judge = [*overrides[:-1], "score.type=judge", f"models.judge.path={policy_folder}"]
    with pytest.raises(ConfigError, match="the question cannot be made: UndefinedError"):
        check.check(resolve("smoke", [*judge, "score.args.judge.prompt='{{ metadata.level }}'"]))
    assert check.check(resolve("smoke", judge)) == "the configuration plays"
    assert "models.judge would be asked: You grade an answer" in capsys.readouterr().out


def test_another_machine_may_have_what_the_episode_lacks(overrides: list[str]) -> None:
    """With workers in other processes, which may be on other nodes, a run is warned instead of refused."""
    config = resolve("smoke", [*overrides, "environment.args.broken=reset", "cluster.workers_per_node=2"])
    warnings: list[str] = []
    workspace = Workspace(config)
    check.check_new_run(workspace, check.problems_of(workspace), warnings.append)
    assert any("in reset)" in warning for warning in warnings)


def test_a_run_whose_problems_were_refused_begins_with_another_scorer(overrides: list[str], tmp_path: Path) -> None:
    """A game has no solutions, which math-verify needs; by then the run has taken its name."""
    games = tmp_path / "games.jsonl"
    games.write_text('{"problem": "Find the way."}\n')
    source = f"{{kind: jsonl, path: {games}, fields: {{prompt: problem}}}}"
    play = [*overrides, f"problems={{train: {source}, held_out: {source}}}", "environment.args.broken=step"]
    with pytest.raises(ProblemError, match="score"):
        begin(*play)
    with pytest.raises(ProblemError, match="score"):
        check.check(resolve("smoke", play))
    assert begin(*play, "score.type=environment")
