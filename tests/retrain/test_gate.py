"""The gate: which policies it promotes, and its reasons."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.evaluate import Gate
from tasks.evaluate.outcomes import Outcome, compare
from tasks.retrain.gate import Decision, GateEvidence, decide

CLIMBING = [0.3, 0.4, 0.5, 0.5, 0.6, 0.7]


def outcomes(successes: list[bool], tokens: int = 5, truncated: int = 0) -> list[Outcome]:
    """Return one greedy episode of one turn per problem; the last `truncated` ones are cut."""
    cut = len(successes) - truncated
    return [
        Outcome(f"p{n}", 0, "completed" if n < cut else "truncated", [float(success)], [tokens], 0)
        for n, success in enumerate(successes)
    ]


def right(count: int, of: int = 200, **others: int) -> list[Outcome]:
    return outcomes([n < count for n in range(of)], **others)


def evidence(
    before: list[Outcome],
    after: list[Outcome],
    guarded: tuple[list[Outcome], list[Outcome]] | None = None,
    **others: Any,
) -> GateEvidence:
    comparisons = {"held-out": compare(before, after)}
    if guarded:
        comparisons["guarded"] = compare(*guarded)
    values: dict[str, Any] = {"failed_verdicts": 0.0, "kl": 0.1, "training": CLIMBING} | others
    return GateEvidence(comparisons, **values)


def failed(decision: Decision) -> list[tuple[str, str]]:
    return [(check.kind, check.subject) for check in decision.checks if not check.passed]


def test_better_on_the_target_is_promoted() -> None:
    """A gain from 80 to 110 of 200 is certain: the challenger is promoted and the check states the gain."""
    decision = decide(evidence(right(80), right(110)), Gate())
    assert (decision.promote, decision.harmful) == (True, False)
    assert decision.checks[0].says.startswith("first turn 0.400 -> 0.550, +0.150 [+0.09")
    assert "p = 1.9e-09" in decision.checks[0].says


def test_a_gain_by_chance_is_not_promoted() -> None:
    """12 won and 10 lost of 200 is no evidence, neither of gain nor of harm, so the problems may be tried again."""
    before = [n < 100 for n in range(200)]
    after = [n >= 10 and (value or n >= 188) for n, value in enumerate(before)]
    decision = decide(evidence(outcomes(before), outcomes(after)), Gate())
    assert failed(decision)[0] == ("better", "held-out")
    assert (decision.promote, decision.harmful) == (False, False)


def sampled(right_of_eight: list[int]) -> list[Outcome]:
    """Return eight sampled episodes per problem, with the given number of right ones."""
    return [
        Outcome(f"p{n:03d}", sample, "completed", [float(sample < right)], [5], 0)
        for n, right in enumerate(right_of_eight)
        for sample in range(8)
    ]


def test_sampled_episodes_show_what_greedy_ones_do_not() -> None:
    """Two right episodes of eight instead of one, on 100 problems, pass; a full gain on two problems does not."""
    gate = Gate(episodes="sampled")
    check = decide(evidence(sampled([1] * 100), sampled([2] * 100)), gate).checks[0]
    assert check.passed
    assert check.says.startswith("first turn, sampled 0.125 -> 0.250, +0.125 [")
    assert not decide(evidence(sampled([0] * 2), sampled([8] * 2)), gate).promote


def test_worse_on_a_guarded_set_is_harmful() -> None:
    """Better on the target but worse on a guarded set: rejected as harmful, and its problems are set aside."""
    decision = decide(evidence(right(80), right(110), guarded=(right(100), right(70))), Gate())
    assert failed(decision) == [("not worse", "guarded")]
    assert decision.harmful
    only_target = Gate(guarded=["held-out"])
    assert decide(evidence(right(80), right(110), guarded=(right(100), right(70))), only_target).promote


@pytest.mark.parametrize(
    ("found", "subject"),
    [
        (evidence(right(80), right(110), failed_verdicts=0.5), "verifier"),
        (evidence(right(80), right(110), kl=3.0), "KL"),
        (evidence(right(80), right(110, tokens=11)), "length on held-out"),
        (evidence(right(80), right(110, truncated=60)), "length on held-out"),
    ],
    ids=["verifier", "KL", "length", "truncated"],
)
def test_each_alarm_rejects(found: GateEvidence, subject: str) -> None:
    """One alarm rejects the challenger, but it is no evidence against the problems, which may be tried again."""
    decision = decide(found, Gate())
    assert ("alarm", subject) in failed(decision)
    assert (decision.promote, decision.harmful) == (False, False)


def test_little_training_says_nothing_about_hacking() -> None:
    """Three iterations make no trend, so a fall in accuracy is rejected for itself alone."""
    decision = decide(evidence(right(110), right(108), training=[0.1, 0.5, 0.9]), Gate())
    assert [kind for kind, _ in failed(decision)] == ["better"]


successes = st.lists(st.booleans(), min_size=1, max_size=40)


@given(successes)
def test_no_policy_beats_itself(found: list[bool]) -> None:
    """The champion as its own challenger is never promoted and never harmful."""
    decision = decide(evidence(outcomes(found), outcomes(found)), Gate())
    assert (decision.promote, decision.harmful) == (False, False)


@pytest.mark.slow
@given(successes, st.data())
def test_promoted_means_better(before: list[bool], data: st.DataObject) -> None:
    """A promoted policy solves more problems than the champion."""
    after = data.draw(st.lists(st.booleans(), min_size=len(before), max_size=len(before)))
    if decide(evidence(outcomes(before), outcomes(after)), Gate()).promote:
        assert sum(after) > sum(before)


def test_a_tiny_set_guards_nothing_and_says_so() -> None:
    """No difference in 20 problems proves nothing, although a bootstrap alone would accept it."""
    same = outcomes([n < 10 for n in range(20)])
    decision = decide(evidence(right(80), right(110), guarded=(same, same)), Gate())
    assert failed(decision) == [("not worse", "guarded")]
    assert not decision.harmful
    assert "+0.000 [-0.161, +0.161]" in decision.checks[2].says


def test_one_problem_less_is_no_hacking() -> None:
    """109 after 110 of 200 while training rises is chance; 100 after 110 is a suspicion."""
    for after, alarm in ((109, False), (100, True)):
        decision = decide(evidence(right(110), right(after)), Gate(margin=0.5))
        assert (("alarm", "reward hacking") in failed(decision)) is alarm


def test_a_silent_policy_raises_the_length_alarm() -> None:
    """A policy that never answers has no length to compare, so the length check fails."""
    silent = [Outcome(f"p{n}", 0, "failed", [], [], 0) for n in range(200)]
    decision = decide(evidence(silent, right(110)), Gate())
    assert ("alarm", "length on held-out") in failed(decision)
