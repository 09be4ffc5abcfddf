import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from configs import load
from configs.evaluate import HELD_OUT
from storage import layout
from storage.objects.store import Store
from storage.records import SCORE_SCHEMA
from storage.versions.checkpoints import Canary
from storage.versions.datasets import write_rows
from storage.versions.drafts import Draft, Provenance
from tasks.evaluate.learning_curve import improvement, summary
from tasks.evaluate.outcomes import Outcome, compare, join, summarise, summarise_sampled
from tasks.evaluate.protocol import greedy
from tasks.evaluate.statistics import Estimate, mean, paired_means, paired_proportions, pass_at_k, proportion, sign_flip
from tasks.evaluate.summary import accuracy_rows, comparison_rows, evaluation_rows, table
from tests.support.chain_helpers import FIRST, PROBLEMS, ROWS, SECOND, commit_chain, commit_rows
from tests.support.train_helpers import make_scores

BITS = st.sampled_from([0.0, 1.0])


def played(problem: str, *success: float, tokens: Sequence[int] | None = None, **changes: Any) -> Outcome:
    """Return an outcome with one turn per success, of 10 tokens each by default."""
    outcome = Outcome(problem, 0, "completed", list(success), list(tokens or [10] * len(success)), 0)
    return replace(outcome, **changes)


GREEDY = [
    played("a", 0, 1, tokens=[4, 6]),
    played("b", 0, 0, 1, tokens=[1, 2, 3]),
    played("c", 1, tokens=[8]),
    played("d", 1, 0, tokens=[5, 5], failed_verdicts=1),
    played("e", 0, tokens=[16], status="truncated"),
    played("f", status="failed"),
]


def row(name: str, problem: str = "p", sample: int = 0, *lengths: int) -> dict[str, Any]:
    turns = [{"start": 3, "end": 3 + length} for length in lengths]
    return {"trajectory_id": name, "problem_id": problem, "sample": sample, "status": "completed", "turns": turns}


def verdict(name: str, turn: int, word: str) -> dict[str, Any]:
    return {"trajectory_id": name, "turn": turn, "verdict": word, "success": float(word == "correct")}


# Statistics


def test_wilson_intervals() -> None:
    """Wilson intervals have known values and stay inside [0, 1], unlike normal intervals."""
    estimate = proportion([1.0] * 8 + [0.0] * 2)
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)
    assert (proportion([1]).high, proportion([0]).low) == (1, 0)


def test_a_mean_without_spread_has_no_width() -> None:
    """One value or equal values give an interval of width 0, where scipy would fail or give NaN."""
    assert mean([3.0]) == mean([3.0, 3.0]) == mean([3.0, 3.0], [1, 5]) == Estimate(3.0, 3.0, 3.0)


def test_the_bootstrap_is_that_of_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interval does not depend on the batch size, and is close to the normal interval."""
    values = [0.0, 1.0, 1.0, 0.0, 2.0] * 60
    estimate = mean(values)
    half = 1.96 * (0.56 / len(values)) ** 0.5  # the variance of the five numbers is 0.56
    assert (estimate.low, estimate.high) == pytest.approx((0.8 - half, 0.8 + half), abs=0.01)
    monkeypatch.setattr("tasks.evaluate.statistics._BATCH", 9999)
    assert mean(values) == estimate


@given(st.integers(1, 7), st.data())
def test_pass_at_k_counts_the_draws(n: int, data: st.DataObject) -> None:
    """pass@k is the share of the k-subsets of episodes that hold a success; pass@1 is c / n."""
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    draws = [any(draw) for draw in combinations([True] * c + [False] * (n - c), k)]
    assert pass_at_k(n, c, k) == pytest.approx(fmean(draws))
    assert pass_at_k(n, c, 1) == c / n


@given(st.lists(st.tuples(BITS, BITS), min_size=1, max_size=9))
def test_sign_flips_of_single_episodes_are_mcnemars(pairs: list[tuple[float, float]]) -> None:
    """The permutation test equals McNemar's exact test where every success is 0 or 1."""
    before, after = [old for old, _ in pairs], [new for _, new in pairs]
    lost, won = pairs.count((1, 0)), pairs.count((0, 1))
    assert sign_flip(before, after) == pytest.approx(binomtest(lost, lost + won).pvalue if lost + won else 1)


def test_sign_flips_are_exact_for_means_of_episodes() -> None:
    """Of 2^30 sign patterns of 30 gains only two are as far from 0; 9,999 draws cannot tell this from 0.0002."""
    assert sign_flip([0.125] * 30, [0.5] * 30) == pytest.approx(2**-29)
    uneven = [value * math.pi / 10 for value in (0.1, 0.2, 0.3) * 10]  # multiples of nothing: rounded
    assert sign_flip([0.0] * 30, uneven) == pytest.approx(2**-29)


# Outcomes


def test_join_by_hand() -> None:
    """Turns are ordered, failed verdicts are counted, and an episode without turns is kept."""
    scores = [verdict("x", 1, "correct"), verdict("x", 0, "timeout"), verdict("elsewhere", 0, "correct")]
    outcomes = join([row("y", "q"), row("x", "p", 2, 5, 7)], scores)
    assert outcomes == [
        Outcome("p", 2, "completed", [0.0, 1.0], [5, 7], failed_verdicts=1),
        Outcome("q", 0, "completed", [], [], failed_verdicts=0),
    ]
    assert [(outcome.first, outcome.any) for outcome in outcomes] == [(0, 1), (0, 0)]


def test_calls_by_hand() -> None:
    """One of three episodes calls a tool: of its three calls one fails and one cannot be read. Files may have none."""
    called = [{"status": status} for status in ("answered", "failed", "unparsable")]
    outcomes = join([row("x") | {"calls": called}, row("y", "q") | {"calls": []}, row("z", "r")], [])
    assert [(outcome.calls, outcome.failed_calls) for outcome in outcomes] == [(3, 2), (0, 0), (0, 0)]
    assert values(summarise(outcomes), "called", "calls_failed") == pytest.approx([1 / 3, 2 / 3])
    assert summarise(outcomes[1:])["calls_failed"] is None


def test_calls_of_tools_count_in_no_accuracy() -> None:
    """The first turn of an evaluation is the first one that answers; an episode of calls alone has none."""
    scores = [verdict("x", 0, "none"), verdict("x", 1, "correct"), verdict("x", 2, "none"), verdict("y", 0, "none")]
    outcomes = join([row("x", "p", 0, 5, 7, 9), row("y", "q", 0, 3)], scores)
    found = [(outcome.success, outcome.first, outcome.tokens) for outcome in outcomes]
    assert found == [([1.0], 1.0, [5, 7, 9]), ([], 0.0, [3])]
    summary = summarise(outcomes)
    assert (summary["first_turn"]["value"], summary["by_turn"][0]["episodes"]) == (0.5, 1)
    assert summary["failed_verdicts"]["value"] == 0


def test_returns_and_parts_by_hand() -> None:
    """The return is the sum of an episode's rewards; an episode without a graded turn has none. Parts are of turns."""

    def scored(name: str, turn: int, reward: float, **parts: float) -> dict[str, Any]:
        return verdict(name, turn, "wrong") | {"reward": reward, "parts": [*parts.items()]}

    scores = [scored("x", 0, -0.5, step=-0.5), scored("x", 1, 2.0, step=-0.5, goal=2.5), scored("y", 0, 0.5)]
    rows = [row("x", "p", 0, 5, 7), row("y", "q", 0, 3), row("z", "r")]
    outcomes = join(rows, scores)
    assert [outcome.total for outcome in outcomes] == [1.5, 0.5, 0.0]
    rewards = summarise(outcomes)["rewards"]
    assert {name: each["value"] for name, each in rewards.items()} == {"return": 1, "part goal": 2.5, "part step": -0.5}
    assert rewards["return"]["low"] == 0.5
    later = join(rows, [score | {"reward": score["reward"] + 1} for score in scores])
    assert compare(outcomes, later)["return"]["difference"]["value"] == 1.5  # two rewards of x, one of y
    (line,) = [line for line in comparison_rows(compare(outcomes, later)) if line["measure"] == "return"]
    assert (line["before"], line["after"], line["difference"][:6]) == ("1.000", "2.500", "+1.500")
    report = {"evaluations": [summarise(outcomes), summarise(later)], **improvement(outcomes, later)}
    shown = {line["held-out accuracy"]: line["difference"][:6] for line in accuracy_rows(report)}
    assert (shown["return"], shown["part goal"]) == ("+1.500", "")


def test_two_scores_of_a_turn_are_refused() -> None:
    """Scores of two verifiers would shift every later turn by one."""
    with pytest.raises(ValueError, match="two scores for turn 0 of x: give the rows of one scorer"):
        join([row("x", "p", 0, 3)], [verdict("x", 0, "wrong"), verdict("x", 0, "correct")])


# What a run has committed


def test_a_run_that_another_verifier_began(store: Store, tmp_path: Path) -> None:
    """A run with scores of several verifiers is read whole; scores of the current verifier are preferred.

    The report compares the last evaluation with the first.
    """
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    commit_chain(store, tmp_path / "model", tmp_path / "model", Canary([1, 2], [-1.0]))
    config = load("smoke", ["run.name=r", "run.iterations=1"])
    begun, ended = (greedy(config, HELD_OUT, PROBLEMS).evaluation(policy) for policy in (FIRST, SECOND))
    for version, verifier, first in ((begun, "01d", 0.0), (ended, "01d", 0.0), (ended, "2ec", 1.0)):
        if verifier == "01d":
            commit_rows(store, version, "evaluation", ROWS[:1], [])
        with Draft(store, layout.evaluation_scores(version, verifier), "scores") as draft:
            write_rows(draft, SCORE_SCHEMA, make_scores(ROWS[0].trajectory_id, first, 1.0), 10)
            draft.commit(Provenance(config={}), [version], summarise([played("p", first, 1.0)]))
    with Draft(store, layout.evaluation_scores(ended, "dead"), "scores"):
        pass  # an attempt that died
    found = summary(store, config, "2ec", PROBLEMS, tmp_path / "cache")
    assert [row["iteration"] for row in found["training"]] == [0]
    shown = [(each["policy_version"], *each["scores"], each["first_turn"]["value"]) for each in found["evaluations"]]
    scores = layout.evaluation_scores(begun, "01d"), layout.evaluation_scores(ended, "2ec")
    assert shown == [(0, scores[0], 0.0), (1, scores[1], 1.0)]
    assert {name: each["value"] for name, each in found["improvement"].items()} == {"first_turn": 1.0, "any_turn": 0.0}
    assert accuracy_rows(found)[0]["difference"] == "+1.000 [+1.000, +1.000]"


# Summaries


def values(numbers: dict[str, Any], *names: str) -> list[float]:
    return [numbers[name]["value"] for name in names]


def test_a_summary_by_hand() -> None:
    """Six episodes, one of them cut and one failed before its first turn, have hand-computed numbers."""
    numbers = summarise(GREEDY)
    assert numbers["episodes"] == 6
    assert values(numbers, "first_turn", "any_turn", "truncated") == pytest.approx([2 / 6, 4 / 6, 1 / 6])
    assert [(turn["value"], turn["episodes"]) for turn in numbers["by_turn"]] == [(2 / 5, 5), (1 / 3, 3), (1.0, 1)]
    assert values(numbers, "fix_rate", "break_rate") == pytest.approx([2 / 3, 1])  # a; b wrong, then right; d
    assert values(numbers, "answer_tokens", "failed_verdicts") == pytest.approx([50 / 9, 1 / 9])
    assert numbers["first_turn"] == proportion([0, 0, 1, 1, 0, 0])._asdict()
    for name in ("fix_rate", "break_rate", "truncated", "answer_tokens", "failed_verdicts"):
        assert numbers[name]["low"] <= numbers[name]["value"] <= numbers[name]["high"]
    assert json.loads(json.dumps(numbers, allow_nan=False)) == numbers
    assert numbers["rewards"] == {}  # successes say it all


def test_unobserved_rates_are_none() -> None:
    """A rate without observations is None, neither 0 nor NaN."""
    single, failed = summarise([played("a", 1), played("b", 0)]), summarise([played("a", status="failed")])
    assert (single["fix_rate"], single["break_rate"], single["answer_tokens"]["value"]) == (None, None, 10)
    assert (failed["answer_tokens"], failed["failed_verdicts"], failed["by_turn"]) == (None, None, [])
    assert failed["any_turn"]["value"] == 0


def test_pass_at_k_of_sampled_episodes() -> None:
    """Success at any turn counts; a failed episode is unsolved; k is at most the fewest episodes of a problem."""
    sampled = [played("a", 0, 1), *[played("a", 0, 0)] * 4, played("a", status="failed")]
    sampled += [played("b", 1), played("b", 0, 1), *[played("b", 0)] * 3]
    numbers = summarise_sampled(sampled)
    expected = {k: (pass_at_k(6, 1, k) + pass_at_k(5, 2, k)) / 2 for k in (1, 2, 4, 5)}
    assert {int(k): value["value"] for k, value in numbers["pass_at"].items()} == pytest.approx(expected)
    assert expected[1] == pytest.approx((1 / 6 + 2 / 5) / 2)
    assert numbers["sampled_episodes"] == 11
    assert list(summarise_sampled([played("a", 0)] * 8)["pass_at"]) == ["1", "2", "4", "8"]


# Comparisons


def test_a_comparison_by_hand() -> None:
    """One of four problems is lost, two are won; the answers become twice as long and one is cut."""
    before = [played("a", 1), played("b", 0, 0), played("c", 0), played("d", 1)]
    after = [played("d", 1), played("a", 0, 1), played("c", 1), played("b", 1, status="truncated")]
    after = [replace(outcome, tokens=[20] * len(outcome.tokens)) for outcome in after]
    comparison = compare(before, after)
    assert comparison["problems"] == 4
    first = comparison["first_turn"]
    assert (first["before"], first["after"], first["difference"]["value"]) == (0.5, 0.75, 0.25)
    for measure, expected in (("first_turn", (1, 2, 1.0)), ("any_turn", (0, 2, 0.5))):
        assert tuple(comparison[measure][name] for name in ("only_before", "only_after", "p")) == expected
    assert comparison["answer_tokens"] == {"before": 10, "after": 20, "ratio": 2}
    assert comparison["truncated"] == {"before": 0, "after": 0.25}


def test_other_problems_are_refused() -> None:
    """Different problem sets cannot be compared; the message names some of the problems that differ."""
    before = [played(name, 1) for name in "abcdef"]
    with pytest.raises(ValueError, match=r"same problems: 5 only before \(a, b, c and 2 more\), 1 only after \(z\)"):
        compare(before, [played("f", 1), played("z", 1)])


def test_several_outcomes_of_a_problem_are_averaged() -> None:
    """A problem counts once, however many episodes it has; a gain in one of two problems proves nothing."""
    before = [played("a", 1), played("a", 0), played("a", 0), played("a", 0), played("b", 1)]
    compared = compare(before, [played("a", 1), played("b", 1)])
    accuracy = compared["first_turn"]
    assert (accuracy["before"], accuracy["after"]) == (0.625, 1)
    assert (accuracy["only_before"], accuracy["only_after"], accuracy["p"]) == (None, None, 1)
    assert accuracy["adjusted_interval"]["low"] < 0 < accuracy["adjusted_interval"]["high"]
    (line, *_) = comparison_rows(compared)
    assert (line["p"], line["fixed / broken"]) == ("1", "")


# The terminal


def test_rows_of_an_evaluation() -> None:
    """Each number has its interval; a value that was not observed is an empty cell."""
    rows = evaluation_rows(summarise(GREEDY) | summarise_sampled([played("a", 1), played("b", 0)]))
    shown = {line["measure"]: (line["value"], line["95 % interval"]) for line in rows}
    assert shown["first turn"] == ("0.333", "[0.097, 0.700]")
    assert shown["pass@1, any turn"][0] == shown["first turn, sampled"][0] == "0.500"
    assert shown["fix rate (wrong, then right)"][0] == "0.667"
    assert shown["tokens of an answer"][0] == "5.556"
    bare = evaluation_rows(summarise([played("a", 1)]))
    assert {line["measure"]: line["value"] for line in bare}["break rate (right, then wrong)"] == ""
    assert table("title", rows).row_count == len(rows) == 12


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 100))
def test_score_interval_laws(lost: int, won: int, same: int) -> None:
    """The interval contains the difference, mirrors when the policies are exchanged, and narrows with more problems.

    Ten equal pairs give 0 ± z sqrt((2 / 12) / 12).
    """
    half = 1.959963984540054 * (1 / 72) ** 0.5
    assert paired_means([0.5] * 10, [0.5] * 10) == pytest.approx((0, -half, half))
    pairs = max(1, lost + won + same)
    found, mirrored = paired_proportions(lost, won, pairs), paired_proportions(won, lost, pairs)
    assert found.low - 1e-6 <= found.value <= found.high + 1e-6
    assert (mirrored.low, mirrored.high) == pytest.approx((-found.high, -found.low), abs=1e-6)
    more = paired_proportions(4 * lost, 4 * won, 4 * pairs)
    assert more.high - more.low < found.high - found.low
