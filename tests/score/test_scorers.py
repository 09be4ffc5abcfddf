"""Scorers: which one judges what, what a user's function may do, and that stored data can be scored again."""

import dataclasses
import importlib.metadata
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.requirements import Requirement

from configs import load
from configs.score import Score as ScoreSettings
from storage.objects.store import Store
from storage.records import TRAJECTORY_SCHEMA, Score, Trajectory, to_score
from storage.versions import datasets
from storage.versions.drafts import Draft, Provenance
from tasks import registry
from tasks.rollout.workers import LocalWorker
from tasks.score.scorers import MathVerifyScorer, Scorers, check_scorers, identity
from tasks.score.scoring import _LIBRARIES, Grades, metrics_of, scorer_fingerprint
from tasks.score.verdict import Answer, Verdict
from tasks.score.verifier import Verifier, VerifierBrokenError
from tests.support.train_helpers import make_trajectory

OWN = "tests.support.own_scorers"
VERSION = "runs/r/trajectories/000000"


def row(*texts: str, solution: str = "3", **columns: Any) -> dict[str, Any]:
    """Return the columns of a stored trajectory whose turns have these texts."""
    turns = [{"text": text, "verdict": "", "reward": 0.0} for text in texts]
    defaults = {"trajectory_id": "t", "source": "", "metadata": "{}", "ungraded": [], "reward_parts": []}
    return {**defaults, "turns": turns, "solutions": [solution], **columns}


def answers(*texts: str, **columns: Any) -> list[Answer]:
    return [Answer(row(*texts, **columns), turn) for turn in range(len(texts))]


def judged(verifier: Verifier, settings: ScoreSettings, *given: Answer) -> list[Verdict]:
    return Scorers(settings, verifier).judge(given)


# Which scorer


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"type": "math-verfy"}, r"score\.type='math-verfy' is not registered, did you mean 'math-verify'\?"),
        ({"type": f"{OWN}:decide"}, "has no function 'decide', did you mean 'decides'"),
        ({"type": "__main__:decides"}, "into a module of its own"),
        ({"type": f"{OWN}:waits"}, "not async"),
        ({"type": f"{OWN}:takes_nothing"}, "takes an answer first"),
        ({"type": f"{OWN}:rewards", "args": {f"{OWN}:rewards": {"bonos": 1}}}, "did you mean 'bonus'"),
        ({"type": f"{OWN}:rewards", "args": {f"{OWN}:rewards": {"bonus": -1}}}, rf"args\.{OWN}:rewards\.bonus=-1"),
        ({"args": {"environment": {"success_above": 1}}}, "score.args.environment: no problem has this scorer"),
        ({"type": {"code": "environment"}}, "add default: math-verify"),
    ],
)
def test_wrong_settings_name_the_remedy(settings: dict[str, Any], message: str) -> None:
    """A wrong name or argument, or no scorer for other sources, is found before anything starts."""
    with pytest.raises(ValueError, match=message):
        check_scorers(ScoreSettings(**settings))
    args: dict[str, Any] = {"environment": {"success_above": 0.5}, f"{OWN}:rewards": {"bonus": 1}}
    check_scorers(ScoreSettings(type={"default": "environment", "mine": f"{OWN}:rewards"}, args=args))


# The fingerprint


def test_stored_scores_keep_their_fingerprint() -> None:
    """Scores that programs with a choice of readings and rules made as this one does are found again."""
    both = {"default": "math-verify", "gsm8k": "math-verify"}
    assert len({scorer_fingerprint(ScoreSettings(type=each)) for each in ("math-verify", both)}) == 1
    assert identity(ScoreSettings()) == {"reading": "answer", "version": MathVerifyScorer.version}
    of_environment = {"type": {"default": "environment"}, "args": {}, "scorers": {"environment": 1}, "success": "said"}
    assert identity(ScoreSettings(type="environment")) == of_environment


def test_what_the_environment_got_is_graded(verifier: Verifier) -> None:
    """With structured output the text is a call with a confidence in it; the answer that was given is graded."""
    call = '<tool_call>{"name": "final_result", "arguments": {"answer": "3", "confidence": 0.9}}</tool_call>'
    given = [Answer(row(call, "It is 4."), turn) for turn in (0, 1)]
    stored = [Answer(row(call, "It is 4.", answers=["3", None]), turn) for turn in (0, 1)]
    verdicts = [verdict.name for verdict in judged(verifier, ScoreSettings(), *given, *stored)]
    assert verdicts == ["unparsable", "wrong", "correct", "wrong"]


def test_scorers_arguments_and_sources_change_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that may differ never share a version: another scorer, argument, mapping, or source of one's module."""
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "a_users_scorer.py"
    module.write_text("def score(answer): return True\n")
    own = ScoreSettings(type="a_users_scorer:score")
    before = scorer_fingerprint(own)
    assert scorer_fingerprint(own) == before
    module.write_text("def score(answer): return False\n")
    registry._read.cache_clear()  # as in a new process
    others = [
        ScoreSettings(type="environment"),
        ScoreSettings(type="environment", args={"environment": {"success_above": 0.5}}),
        ScoreSettings(type={"default": "math-verify", "game": "environment"}),
        ScoreSettings(type={"default": "environment", "game": "math-verify"}),
    ]
    prints = [before, *map(scorer_fingerprint, [own, ScoreSettings(), *others])]
    assert len(set(prints)) == len(prints)


def test_every_library_of_the_verifier_names_it() -> None:
    """Another version of math-verify or of what it needs may change verdicts, so it changes the fingerprint."""
    found, pending = set[str](), ["math-verify"]
    while pending:
        name = pending.pop()
        found.add(name)
        needed = [Requirement(line) for line in importlib.metadata.requires(name) or []]
        here = [library.name for library in needed if not library.marker or library.marker.evaluate({"extra": ""})]
        pending += set(here) - found
    assert found <= set(_LIBRARIES)
    # The time limit changes the fingerprint, too; number of workers and allowed failures do not.
    now = scorer_fingerprint(ScoreSettings())
    assert now != scorer_fingerprint(ScoreSettings(timeout_s=6))
    assert scorer_fingerprint(ScoreSettings(workers=3, max_failure_share=0.5)) == now


# A user's function


def test_a_function_may_only_decide_or_give_a_verdict(verifier: Verifier) -> None:
    """True and False are verdicts; a Verdict has a reward and parts, and whether it is right is not its reward."""
    decided = judged(verifier, ScoreSettings(type=f"{OWN}:decides"), *answers("3", "4"))
    assert decided == [Verdict("correct"), Verdict("wrong")]
    settings = ScoreSettings(type=f"{OWN}:rewards", args={f"{OWN}:rewards": {"bonus": 0.5}})
    right, wrong = judged(verifier, settings, *answers("3", "4", metadata='{"gold": "3"}'))
    assert right == Verdict("correct", reward=1.5, parts={"gold": 1.0, "bonus": 0.5})
    assert (wrong.success, wrong.reward) == (0.0, 0.5)


def test_a_function_may_see_the_whole_group(tmp_path: Path, verifier: Verifier) -> None:
    """The shortest right answer of each problem is paid more; other problems and wrong answers do not count."""
    said = {"p": ["3", "1 + 2, so 3", "4"], "q": ["2 + 1, so 3"]}
    named = [(problem, f"{problem}{number}", text) for problem in said for number, text in enumerate(said[problem])]
    rows = [played(name, "", (text, "", 0.0), problem_id=problem) for problem, name, text in named]
    settings = ScoreSettings(type=f"{OWN}:shortest", group=True)
    scores, _ = scored(stored(tmp_path, rows), tmp_path, verifier, settings)
    assert [score.reward for score in scores] == [1.5, 1.0, 0.0, 1.5]
    assert scorer_fingerprint(settings) != scorer_fingerprint(settings.model_copy(update={"group": False}))


MISBEHAVIOUR = {
    "raise": ("error", r"KeyError: 'no such key' \(.*own_scorers\.py, line \d+\)"),
    "exit": ("error", "SystemExit: enough"),
    "nan": ("error", "reward is nan: give a finite number"),
    "infinite part": ("error", "part 'speed' of the reward is inf"),
    "half": ("error", "the function returned 0.5: return True or False, or a Verdict"),
    "strange name": ("error", r"Verdict\nname\n  Input should be .*input_value='great'"),
    "rewarded call": ("error", "'none', which has no reward"),
    "call": ("none", ""),
    "surrogate": ("wrong", ""),
    "good": ("correct", ""),
}


def test_a_function_that_misbehaves_costs_only_its_turn(verifier: Verifier) -> None:
    """Exceptions and values that cannot be stored become errors with the reason; other turns keep their verdicts."""
    verdicts = judged(verifier, ScoreSettings(type=f"{OWN}:misbehaves"), *answers(*MISBEHAVIOUR))
    for verdict, (name, reason) in zip(verdicts, MISBEHAVIOUR.values(), strict=True):
        assert verdict.name == name
        assert re.search(reason, verdict.reason)
    assert verdicts[-1].reward == 2.0
    assert verdicts[-2].extracted == "?" + "x" * 499


@pytest.mark.slow
def test_a_function_that_hangs_or_dies_costs_only_its_turn() -> None:
    """It runs in the verifier's workers: limits end it, and the answers that were sent with it are judged again.

    The time limit counts processor time, so that a machine that stalls costs no verdict.
    """
    texts = ("good", "loop", "die", "fill the memory", "wait")
    with Verifier(workers=1, timeout_s=1, memory_mb=512) as verifier:
        verdicts = judged(verifier, ScoreSettings(type=f"{OWN}:misbehaves"), *answers(*texts))
        assert [verdict.name for verdict in verdicts] == ["correct", "timeout", "error", "error", "correct"]
        reasons = ("needs more than 1 s of processor time", "the worker died 3 times", "needs more than 512 MB")
        for verdict, reason in zip(verdicts[1:-1], reasons, strict=True):
            assert verdict.reason.startswith(reason)
        assert verifier.grade([("3", ["3"])])[0].name == "correct"


# Registered scorers


def fragile(answers: Sequence[Answer]) -> list[Verdict]:
    """Judge as a registered scorer with a bug does."""
    for answer in answers:
        if error := {"broken": VerifierBrokenError("closed"), "bad": KeyError("tests")}.get(answer.text):
            raise error
    return [Verdict("correct", reward=float("inf") if answer.text == "inf" else None) for answer in answers]


def test_a_scorer_that_raises_costs_only_the_turn(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception becomes the error of the turn that causes it, and a reward that is no number that of its turn.

    If no worker is left, no answer is to blame: the stage stops instead of storing errors.
    """
    scorers = Scorers(ScoreSettings(), verifier)
    monkeypatch.setattr(scorers._scorers["math-verify"], "judge", fragile)
    verdicts = scorers.judge(answers("a", "bad", "inf", "b"))
    assert [verdict.name for verdict in verdicts] == ["correct", "error", "error", "correct"]
    assert verdicts[1].reason == "KeyError: 'tests'"
    with pytest.raises(VerifierBrokenError):
        scorers.judge(answers("a", "broken"))


# The environment


@pytest.mark.parametrize(
    ("verdict", "reward", "above", "parts", "name"),
    [
        ("correct", 0.0, 0.5, {}, "correct"),
        ("wrong", 0.9, 0.5, {}, "wrong"),
        ("", 0.5, 0.5, {}, "wrong"),
        ("", 0.6, 0.5, {"speed": 0.25}, "correct"),
        ("", float(np.float32(0.2)), 0.2, {}, "wrong"),  # rewards are stored as float32, in which 0.2 is a little more
        ("", 0.2, 0.0, {"correct": 0.0, "format": 0.2}, "wrong"),  # a wrong answer in a paid format is no success
        ("", -0.5, 0.0, {"correct": 1.0, "length": -1.5}, "correct"),
        ("correct", 0.2, 0.0, {"correct": 0.0}, "correct"),
    ],
)
def test_what_the_environment_said_counts(
    verifier: Verifier, verdict: str, reward: float, above: float, parts: dict[str, float], name: str
) -> None:
    """Its verdict decides, then the part `correct`, then the reward. The reward is stored as it was, with its parts."""
    settings = ScoreSettings(type="environment", args={"environment": {"success_above": above}})
    turns = [{"text": "x", "verdict": verdict, "reward": reward}]
    (found,) = judged(verifier, settings, Answer(row("x", turns=turns, reward_parts=[list(parts.items())]), 0))
    assert (found.name, found.reward, found.parts) == (name, reward, parts)


# Stored data


def stored(tmp_path: Path, rows: list[Trajectory]) -> Store:
    store = Store(str(tmp_path / "store"))
    with Draft(store, VERSION, "trajectories") as draft:
        datasets.write_rows(draft, TRAJECTORY_SCHEMA, rows, 2)
        draft.commit(Provenance(config={}), [], {})
    return store


def scored(store: Store, tmp_path: Path, verifier: Verifier, settings: ScoreSettings) -> tuple[list[Score], Grades]:
    workers = LocalWorker(None, verifier, lambda _: pytest.fail("nothing is played"), tmp_path / "cache")
    with Draft(store, f"runs/r/scores/000000-{scorer_fingerprint(settings)}", "scores") as draft:
        config = load("smoke", ["rollout.rows_per_shard=2"]).model_copy(update={"score": settings})
        grades = workers.score(VERSION, draft, config)  # type: ignore[arg-type]
        return [to_score(each) for each in datasets.drafted(draft)], grades


def played(name: str, source: str, *turns: tuple[str, str, float], **columns: Any) -> Trajectory:
    made = make_trajectory(name, [[10]] * len(turns))
    texts = [
        dataclasses.replace(turn, text=text, verdict=verdict, reward=reward)
        for turn, (text, verdict, reward) in zip(made.turns, turns, strict=True)
    ]
    return dataclasses.replace(made, turns=texts, source=source, solutions=["3"], **columns)


def test_stored_data_is_scored_by_several_scorers(tmp_path: Path, verifier: Verifier) -> None:
    """Mixed sources in one data set, with a call of a tool: each turn gets its verdict, reward and parts.

    The scorer of a problem is that of its source, or the default.
    """
    rows = [
        played("math", "gsm8k", (r"\boxed{3}", "correct", 1.0)),
        played("game", "game", ("move", "", 0.5), ("win", "correct", 2.0), reward_parts=[{"hp": 0.5}, {"hp": 2.0}]),
        played("mine", "mine", ("3", "", 0.0), metadata='{"gold": "3"}'),
        played("tool", "", ("call", "", 0.0), (r"\boxed{3}", "correct", 1.0), ungraded=[0]),
        played("talk", "game", ("hello", "none", 0.5)),
    ]
    store = stored(tmp_path, rows)
    types = {"default": "math-verify", "game": "environment", "mine": f"{OWN}:rewards"}
    settings = ScoreSettings(type=types, args={"environment": {"success_above": 1.0}})
    scores, grades = scored(store, tmp_path, verifier, settings)
    assert {(score.trajectory_id, score.turn): (score.verdict, score.success, score.reward) for score in scores} == {
        ("math", 0): ("correct", 1.0, 1.0),
        ("game", 0): ("wrong", 0.0, 0.5),
        ("game", 1): ("correct", 1.0, 2.0),
        ("mine", 0): ("correct", 1.0, 1.25),
        ("tool", 0): ("none", 0.0, 0.0),
        ("tool", 1): ("correct", 1.0, 1.0),
        ("talk", 0): ("none", 0.0, 0.0),
    }
    assert [score.parts for score in scores if score.parts] == [{"hp": 0.5}, {"hp": 2.0}, {"gold": 1.0, "bonus": 0.25}]
    metrics = metrics_of(grades, settings, 1.0)
    assert metrics["verdicts"] == {"correct": 4, "wrong": 1, "none": 2}
    assert (metrics["reward"], metrics["parts"]["hp"]) == ((1 + 1 + 0.5 + 2 + 1.25) / 5, 1.25)
    assert metrics["return_mean"] == (1 + 1 + (0.5 + 2) + 1.25) / 4  # the talk has no graded turn
    grades.join(grades)
    assert metrics_of(grades, settings, 1.0)["return_mean"] == metrics["return_mean"]
    again, _ = scored(store, tmp_path, verifier, ScoreSettings())
    verdicts = " ".join(score.verdict for score in again)
    assert verdicts == "correct unparsable unparsable correct none correct none"


def test_calls_of_tools_do_not_hide_failures() -> None:
    """The share of failures counts graded turns only: many calls of tools must not dilute it."""
    grades = Grades(Counter(correct=1, error=1, none=98))
    with pytest.raises(ValueError, match="1 of 2 answers ended in a timeout or an error"):
        metrics_of(grades, ScoreSettings(), 1.0)
