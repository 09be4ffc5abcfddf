import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from storage.objects.store import Store
from storage.records import Problem, Trajectory
from tasks.audit.checks import SkippedError, all_checks, integrity
from tasks.score.verifier import Verifier
from tests.support.audit_play import SUM, TEXTS, Audited, Play, scored
from tests.support.audit_scene import say
from tests.support.chain_helpers import FIRST, PROBLEMS
from tests.support.train_helpers import make_trajectory, tiny_model


def test_text_differs(audited: Audited, play: Play) -> None:
    """Ids outside of the vocabulary, and changed text, are found."""
    rows = [play(str(number), r"\boxed{18}", r"\boxed{19}") for number in range(3)]
    rows[1].token_ids[rows[1].turns[0].start + 1] = -5
    audited.add([*rows[:2], say(rows[2], 1, text=r"\boxed{18}")])
    measured, found = audited.run("text_differs")
    assert (measured.value, measured.of, [name for name, _ in found]) == (2, 6, ["1", "2"])
    assert 'turn 2: its tokens say "\\boxed{19}", its text "\\boxed{18}"' in found[1][1]


SUMS = [Problem(f"{number}", f"{number} + 1?", [f"{number + 1}"]) for number in range(5)]


@pytest.mark.parametrize(
    ("answers", "said", "problems", "names"),
    [
        (["18", "19"], {}, [SUM], []),
        (["18"], {"before": "The answer is 19. "}, [SUM], ["12+7"]),  # in the tokens only
        (["18", "19"], {"feedback": "No, it is 19."}, [SUM], ["a"]),
        (["19", "19"], {"feedback": "No, not 19."}, [SUM], []),
        (["0"], {"before": "1 + 2? The answer is 3. "}, SUMS, []),  # an example that all prompts share, and fits one
    ],
)
def test_leaked_answers(
    audited: Audited, play: Play, answers: list[str], said: dict[str, str], problems: list[Problem], names: list[str]
) -> None:
    audited.add([play("a" * number, *answers, problem=of, **said) for number, of in enumerate(problems, 1)])
    measured, found = audited.run("leaked_answers")
    assert (measured.value, [name for name, _ in found]) == (len(names), names)


@pytest.mark.parametrize("check", TEXTS)
def test_searches_texts(audited: Audited, play: Play, check: str) -> None:
    """A pattern is found in a turn, in feedback and in the prompt; the case does not repeat the text."""
    row, rows, expected = play("", "18", "19"), list[Trajectory](), dict[str, str]()
    for number, (text, detail) in enumerate(TEXTS[check]):
        in_turn = dataclasses.replace(row, trajectory_id=f"said {number}")
        in_feedback = dataclasses.replace(row, trajectory_id=f"told {number}")
        in_prompt = dataclasses.replace(row, prompt=text, problem_id=f"asked {number}")
        rows += [say(in_turn, 0, text=text), say(in_feedback, 0, feedback=text), in_prompt]
        expected |= {f"{place} {number}": detail for place in ("said", "told", "asked") if detail}
    audited.add(rows)
    measured, found = audited.run(check)
    assert measured.value == len(found)
    assert {name: detail[-len(expected.get(name, "?")) :] for name, detail in found} == expected
    assert not any(text in detail for text, _ in TEXTS[check] for _, detail in found)


def sampled_by(weights: PreTrainedModel, name: str, number: int, shift: float = 0.0) -> Trajectory:
    """Return a trajectory with the logprobs of a model at temperature 0.5, all moved by `shift`."""
    row = dataclasses.replace(make_trajectory(name, [[number + 7, 8], [9]]), policy=FIRST)
    logprobs = (weights(torch.tensor([row.token_ids])).logits.detach().float() / 0.5).log_softmax(-1)[0]
    known = [0.0] + [float(logprobs[at, token]) for at, token in enumerate(row.token_ids[1:])]
    known = [value + shift if sampled else 0.0 for value, sampled in zip(known, row.action_mask, strict=True)]
    return dataclasses.replace(row, logprobs=known, sampling='{"temperature": 0.5}')


@pytest.mark.parametrize(("shift", "passes"), [(0.0, True), (0.1, False)])
def test_logprobs_of_a_policy_served_in_half_precision(
    audited: Audited, monkeypatch: pytest.MonkeyPatch, shift: float, passes: bool
) -> None:
    """The rounding of an engine in bfloat16 is no drift, whatever its size; several times as much is."""
    monkeypatch.setattr(integrity, "_served_format", lambda *_: "bfloat16")
    weights = tiny_model().bfloat16()
    audited.add([sampled_by(weights, str(number), number, shift) for number in range(5)])
    measured, _ = audited.run("logprob_drift")
    assert (measured.value <= 0) == passes


def test_little_judged_is_no_pass(audited: Audited, play: Play) -> None:
    """Of 30 right answers the second checker can judge none: the examples are shown, and the audit warns."""
    problem = Problem("p", "Expand (x + 1)^2.", ["x^2 + 2x + 1"])
    rows = [play(str(number), r"\boxed{1 + 2x + x^2}", problem=problem) for number in range(30)]
    audited.add(rows, *(score for row in rows for score in scored(row, "correct")))
    measured, found = audited.run("false_positives")
    assert (measured.value, measured.judged, len(found)) == (0, 0, 30)
    assert "the second checker cannot judge" in found[0][1]


def test_without_checkpoints(store: Store, tmp_path: Path, verifier: Verifier) -> None:
    """Checks that need a tokenizer or weights are skipped."""
    audited = Audited(store, tmp_path, verifier)
    audited.add([make_trajectory("t0", [[7, 8]])], parents=[PROBLEMS])
    with audited.evidence() as evidence:
        for check in ("text_differs", "template_drift"):
            with pytest.raises(SkippedError, match="the data sets lack a tokenizer, as no checkpoint"):
                evidence.left_out(all_checks()[check].needs)
        for check in ("logprob_drift", "contamination"):
            with pytest.raises(SkippedError):
                all_checks()[check].run(evidence)
