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


def test_a_check_states_the_gain() -> None:
    """A gain from 80 to 110 of 200 is certain, and the check states it."""
    decision = decide(evidence(right(80), right(110)), Gate())
    assert decision.checks[0].says.startswith("first turn 0.400 -> 0.550, +0.150 [+0.09")
    assert "p = 1.9e-09" in decision.checks[0].says


SILENT = [Outcome(f"p{n}", 0, "failed", [], [], 0) for n in range(200)]
BY_CHANCE = outcomes([10 <= n < 100 or n >= 188 for n in range(200)])
"""12 won and 10 lost, compared with `right(100)`."""
HARMED = evidence(right(80), right(110), guarded=(right(100), right(70)))
ALL, RISKY = Gate(), Gate(margin=0.5)
BETTER, HARM, HACKED = ("better", "held-out"), ("not worse", "guarded"), ("alarm", "reward hacking")
DECISIONS: dict[str, tuple[GateEvidence, Gate, list[tuple[str, str]]]] = {
    "a gain": (evidence(right(80), right(110)), ALL, []),
    "a gain by chance": (evidence(right(100), BY_CHANCE), ALL, [BETTER]),
    "worse on a guarded set": (HARMED, ALL, [HARM]),
    "only the target counts": (HARMED, Gate(guarded=["held-out"]), []),
    "verifier": (evidence(right(80), right(110), failed_verdicts=0.5), ALL, [("alarm", "verifier")]),
    "KL": (evidence(right(80), right(110), kl=3.0), ALL, [("alarm", "KL")]),
    "long answers": (evidence(right(80), right(110, tokens=11)), ALL, [("alarm", "length on held-out")]),
    "cut answers": (evidence(right(80), right(110, truncated=60)), ALL, [("alarm", "length on held-out")]),
    "no answer before": (evidence(SILENT, right(110)), ALL, [("alarm", "length on held-out")]),
    "no trend yet": (evidence(right(110), right(108), training=[0.1, 0.5, 0.9]), ALL, [BETTER]),
    "one problem less": (evidence(right(110), right(109)), RISKY, [BETTER]),
    "hacking": (evidence(right(110), right(100)), RISKY, [BETTER, HACKED]),
}


@pytest.mark.parametrize(("found", "gate", "reasons"), DECISIONS.values(), ids=DECISIONS)
def test_decisions(found: GateEvidence, gate: Gate, reasons: list[tuple[str, str]]) -> None:
    """A challenger that any check fails is rejected; only a certain loss speaks against its problems."""
    decision = decide(found, gate)
    assert failed(decision) == reasons
    assert (decision.promote, decision.harmful) == (not reasons, HARM in reasons or HACKED in reasons)


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
