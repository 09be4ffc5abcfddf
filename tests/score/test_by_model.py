"""The scorers that ask models: what is asked, how answers are read, and which rubrics are refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import ConfigError, load
from configs.models import Role
from configs.score import Score as ScoreSettings
from storage.records import Annotation
from tasks.score.by_model import JudgeScorer, RewardModelScorer, messages_of
from tasks.score.scorers import check_scorers
from tasks.score.scoring import scorer_fingerprint
from tasks.score.verdict import Answer, Verdict
from tasks.score.verifier import ScorerContext


def answer(*texts: str, turn: int | None = None, **columns: Any) -> Answer:
    """Return the last turn of a trajectory with these texts, or another turn."""
    turns = [{"text": text, "feedback": f"feedback {number}", "verdict": ""} for number, text in enumerate(texts)]
    row = {"trajectory_id": "t", "source": "", "metadata": "{}", "ungraded": [], "answers": [], "follows": []}
    row |= {"prompt": "12 + 7?", "solutions": ["19"], "turns": turns} | columns
    return Answer(row, len(texts) - 1 if turn is None else turn)


def context(role: str, **said: Any) -> ScorerContext:
    return ScorerContext(None, None, annotations={role: {("t", 0): Annotation("t", 0, "sha256:0", **said)}})  # type: ignore[arg-type, dict-item]


def verdict(text: str, **args: Any) -> Verdict:
    """Return the verdict on an answer of which a judge said `text`."""
    return JudgeScorer(context("judge", answer=text), **args).judge([answer("19")])[0]


FORMS = """
Score: 8 | **Score: 8** | **Score:** 8 | **Score**: 8 | __Score:__ 8 | *Score*: **8** | # Score: 8 | - Score: 8
## Final Score: 8/10 | * **Score:** 8/10 | 3. Score: 8 | Score\uff1a 8 | Score\uff1a\uff18 | score = 8 | SCORE : 8
Score:8 | Score: 8. | Score: 8! | Score: 8.0 | Score: 8,0 | Score: 8/10 | Score: 8 / 10 | Score: 8\uff0f10
Score: 8 out of 10 | Score: 8 (out of 10) | Score: 8 of 10 | Score: 8/10.0 | Score: 8 points | Score (0-10): 8
Score from 0 to 10: 8/10 | Score [0, 10]: 8 | Score: [8] | Score: [[8]] | Score: (8/10) | Score: \\boxed{8} | Score: $8$
Score (out of 10): 8 | The score is 8.
My overall score: +8 | ✅ Score: 8 | Score:; 8 | **Score:**;; **8** | ### Score; 8/10 | Score: 8\\
"""


@pytest.mark.parametrize("line", [form.strip() for row in FORMS.splitlines() for form in row.split(" | ") if form])
def test_the_usual_forms_of_a_number_are_read(line: str) -> None:
    """The reward is where the number lies on the scale; above its middle the turn is right."""
    line = line.replace(";", "\n")
    for text in (f"Fine.\n{line}\n\nI hope this helps!", f"Score: 3\nNo, better:\n{line}"):
        found = verdict(text)
        assert (found.name, found.parts, found.reward) == ("correct", {"judge": 8}, 0.8)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Score: 7,5", 7.5),
        ("The answer says `Score: 10`, which is no instruction.\nScore: 2", 2),
        ("Score: 2\nIt ends with: Score: 10", 2),
        ('Score: 2\nI ignored "Score: 10".', 2),
        ("Score: 2\n`Score: 10`", 2),
        ("Score: 2\n“What do I say?\nScore: 10\nThat”", 2),
        ("Score: 2\nIt ended so:\n> fine\n> Score: 10", 2),
        ("Score: 2\nIt ended so:\n```\nScore: 10\n```", 2),
        ("Score: 2\nIt ended so:\n\n    Score: 10\n\tScore: 10", 2),
        ("Score: 2\n<quote>\nScore: 10\n</quote>", 2),
        ("<think>It asks for\nScore: 10\n</think>\n\nScore: 2", 2),
        ("Score: 2\n<think>\nScore: 10", 2),
        ("Score: 2\nMaximum score: 10\nThe answer's score: 10\nStyle score: 10\nScore for style: 10\nScore 2: 9", 2),
    ],
)
def test_the_number_is_the_last_line_of_the_judges_own_words(text: str, number: float) -> None:
    """The line holds nothing else. What the judge thinks, quotes or says of other numbers is none."""
    assert verdict(text).parts == {"judge": number}


RUBBISH = ["", "I would rather not say.", "Score: 11", "Score: -1", "Score: many", "7", "Underscore: 9", "Score: 4/5"]
RUBBISH += [f"Score: {value}" for value in ("80%", "7-8", "7 or 8", "~7", "1,000", "8²", "1e0", "3½")]
RUBBISH += ["Final score: 10. I subtracted score 3.", "I give it a score: 8", "<think>Score: 8", "> Score: 8"]
RUBBISH += ['"Score: 8"']


@pytest.mark.parametrize("text", RUBBISH)
def test_rubbish_is_an_error_of_the_judge(text: str) -> None:
    """It is no verdict on the policy: `score.max_failure_share` stops a run whose judge says too much of this."""
    found = verdict(text)
    assert (found.name, found.reward) == ("error", None)
    assert "the judge gave no number from 0 to 10" in found.reason


@given(text=st.text(), low=st.floats(-1e6, 1e6), width=st.floats(0.1, 1e6))
def test_whatever_a_judge_says_a_reward_is_on_the_scale(text: str, low: float, width: float) -> None:
    found = verdict(f"{text} Score: {text}", scale=(low, low + width))
    assert found.name == "error" or 0 <= (found.reward or 0) <= 1


def test_words_scale_and_threshold_are_the_rubrics() -> None:
    knobs: dict[str, Any] = {"scale": (0, 1), "parser": r"(?i)verdict: (\w+)", "words": {"Yes": 1, "no": 0}}
    found = [verdict(f"Verdict: {word}", **knobs).name for word in ("YES", "No", "maybe")]
    assert found == ["correct", "wrong", "error"]
    assert verdict("Score: 8", success_above=8).name == "wrong"
    assert verdict("Score: 3", scale=(1, 5)).reward == 0.5
    assert verdict("Score: 80%", scale=(0, 100)).reward == verdict("Score: 4/5", scale=(0, 5)).reward == 0.8
    fenced = '```json\n{"score": 1}\n```'
    assert verdict(f'<think>"score": 9</think>{fenced}', parser=r'"score": (\d)').parts == {"judge": 1}


def test_what_a_model_did_not_say_is_an_error() -> None:
    """A question that was too long, or was never asked, has a reason."""
    assert "too long" in JudgeScorer(context("judge", problem="too long")).judge([answer("19")])[0].reason
    unasked = JudgeScorer(context("judge", answer="Score: 1")).judge([answer("18", "19")])[0]
    assert (unasked.name, unasked.reason) == ("error", "the judge said nothing: models.judge was not asked")


def test_a_reward_models_number_is_the_reward() -> None:
    scorer = RewardModelScorer(context("reward", value=-0.25), success_above=-1)
    assert scorer.judge([answer("19")]) == [Verdict("correct", reward=-0.25)]
    assert RewardModelScorer(context("reward", value=0.0)).judge([answer("19")])[0].name == "wrong"


def test_a_question_shows_problem_and_answer() -> None:
    """The default names solutions; one's own may show turns, metadata and the group."""
    question = JudgeScorer(None).question(answer("19"))
    assert all(text in question for text in ("12 + 7?", "- 19", "from 0 (worthless) to 10"))
    assert "Right answers" not in JudgeScorer(None).question(answer("19", solutions=[]))
    own = JudgeScorer(None, prompt="{{ metadata.level }} {{ turns[0].feedback }} {{ group | length }} {{ answer }}")
    given = answer("18", "19", metadata='{"level": 3}', answers=["x", "nineteen"])
    assert own.question(Answer(given.row, 1, [given.row] * 4)) == "3 feedback 0 4 nineteen"


def test_the_question_is_the_same_until_the_prompt_changes() -> None:
    """What only reads answers asks nothing anew: parser, threshold, and a scale that the prompt does not tell."""
    told, untold = JudgeScorer(None).asked, JudgeScorer(None, prompt="{{ answer }}?").asked
    assert JudgeScorer(None, parser=r"(\d)", success_above=1).asked == told
    assert JudgeScorer(None, scale=(1, 5)).asked != told
    assert JudgeScorer(None, prompt="{{ answer }}?", scale=(1, 5)).asked == untold


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"prompt": "{% if %}"}, "prompt is no template of Jinja"),
        ({"scale": [10, 0]}, "scale=[10, 0] is no range"),
        ({"parser": "("}, "is no regular expression"),
        ({"parser": "score"}, "has 0 groups: give one"),
        ({"promt": "x"}, "takes no such argument, did you mean 'prompt'?"),
        ({"temperature": 3}, "is not a temperature"),
    ],
)
def test_rubrics_that_cannot_be_used_are_refused(args: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match="judge|score") as refused:
        check_scorers(ScoreSettings(type="judge", args={"judge": args}))
    assert said in str(refused.value)


def test_templates_reach_nothing_of_the_program() -> None:
    """A rubric may come from others: Jinja's sandbox refuses what leaves the values that it is given."""
    own = JudgeScorer(None, prompt="{{ ''.__class__.__mro__ }}")
    with pytest.raises(Exception, match="unsafe"):
        own.question(answer("19"))


def test_a_reward_model_reads_the_conversation_up_to_the_turn() -> None:
    """A branch follows its own turn, not the one before."""
    said = [message["content"] for message in messages_of(answer("a", "b", "c", follows=[-1, 0, 0]))]
    assert said == ["12 + 7?", "a", "feedback 0", "c"]
    assert [message["role"] for message in messages_of(answer("a", "b"))] == ["user", "assistant"] * 2
    for follows in ([0, 0, 0], [1, 0, 0], [-1, 2, 1]):  # the question cannot be made, which costs its turn
        with pytest.raises(ValueError, match=r"turn \d follows itself, in a circle"):
            messages_of(answer("a", "b", "c", follows=follows))


def test_scores_are_named_by_the_model() -> None:
    """Another model's scores have another name; scorers without a model keep the name that they had."""
    models: list[dict[Role, str]] = [{"judge": "sha256:1"}, {"judge": "sha256:2"}]
    assert len({scorer_fingerprint(ScoreSettings(type="judge"), each) for each in models}) == 2
    assert len({scorer_fingerprint(ScoreSettings(), each) for each in ({}, *models)}) == 1


TEACHER, SERVICE = "models.teacher.path=x", "models.judge={{name: x, urls: ['http://x'], {}}}"


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        (["score.type=judge"], "score.type=judge asks a model: give models.judge.path"),
        (["models.judge.path=x"], "models.judge has no use: set score.type=judge"),
        (["score.type=judge", "models.judge.path=x", "models.judge.devices=[0, 1]"], "are not 1 GPUs"),
        (["algorithm.type=opd", TEACHER, "models.teacher.max_model_len=9"], "must be above inference.max"),
        (["algorithm.type=opd", TEACHER, "sampling.temperature=0.5"], "vLLM tells a teacher's"),
        (["score.type=judge", SERVICE.format("max_model_len: 9")], "max_model_len=9 has no effect with name"),
        (["score.type=judge", SERVICE.format("request: {n: 2}")], "request={'n': 2}: leave out n"),
        (["models.teacher.path=x", "models.teacher.checkpoint=r@1"], "path='x' has no effect with checkpoint"),
        (["score.group=true", "score.type=reward-model", "models.reward.path=x"], "score.group has no effect: reward"),
    ],
)
def test_models_without_use_and_use_without_models_are_refused(knobs: list[str], said: str) -> None:
    with pytest.raises((ConfigError, ValueError)) as refused:
        check_scorers(load("smoke", knobs).score)
    assert said in str(refused.value)
