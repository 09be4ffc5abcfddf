"""Numbers by source: of evaluations with intervals and differences, of rollouts and scores, and where they show."""

from dataclasses import replace
from pathlib import Path

import pytest

from tasks.evaluate.learning_curve import improvement, plot
from tasks.evaluate.outcomes import Outcome, compare, summarise, summarise_sampled
from tasks.evaluate.statistics import proportion
from tasks.evaluate.summary import accuracy_rows, comparison_rows
from tasks.metrics.rows import _of_evaluation
from tasks.metrics.show import cells, shown
from tasks.rollout.outcomes import Tally, counts_of
from tasks.score.scorers import SuccessRule
from tests.support.train_helpers import make_trajectory


def outcome(source: str, number: int, *success: float, rewards: tuple[float, ...] = ()) -> Outcome:
    turns = [5] * len(success)
    return Outcome(f"{source}/{number}", 0, "completed", [*success], turns, 0, rewards=[*rewards], source=source)


BEFORE = [outcome("game", 0, 0, 1, rewards=(0.0, 2.0)), outcome("game", 1, 0, 0, rewards=(0.0, 0.0))]
BEFORE += [outcome("sums", number, number == 1) for number in range(3)]
AFTER = [replace(each, success=[1.0], tokens=[5], rewards=[2.0] if each.rewards else []) for each in BEFORE]


def test_accuracies_of_each_source_have_their_own_intervals() -> None:
    """They are the numbers of the source's problems alone; with one source there is nothing to tell apart.

    Differences are paired within each source.
    """
    compared = compare(BEFORE, AFTER)
    assert compared["by_source"]["sums"] == compare(BEFORE[2:], AFTER[2:])
    numbers = summarise(BEFORE)
    assert list(numbers["by_source"]) == ["game", "sums"]
    assert numbers["by_source"]["sums"] == summarise(BEFORE[2:])
    assert numbers["by_source"]["game"]["any_turn"] == proportion([1, 0])._asdict()
    assert numbers["by_source"]["game"]["rewards"]["return"]["value"] == 1.0
    assert summarise(BEFORE[2:])["by_source"] == {}
    assert summarise_sampled(BEFORE)["by_source"]["sums"] == summarise_sampled(BEFORE[2:])


def test_tables_and_pictures_show_each_source(tmp_path: Path) -> None:
    """Before, after and difference of first and any turn, and of returns where rewards are more than successes."""
    evaluations = [{"policy_version": n} | summarise(each) for n, each in enumerate((BEFORE, AFTER))]
    numbers = {"run": "r", "training": [], "evaluations": evaluations, **improvement(BEFORE, AFTER)}
    rows = {row["held-out accuracy"]: row for row in accuracy_rows(numbers)}
    assert rows["sums: first turn"]["before"].startswith("0.333 [0.061, 0.792]")
    assert rows["sums: first turn"]["difference"].startswith("+0.667")
    assert rows["game: return"]["difference"].startswith("+1.000")
    assert "sums: return" not in rows
    assert {row["measure"] for row in comparison_rows(compare(BEFORE, AFTER))} >= {"game: any turn", "sums: any turn"}
    plot(numbers, tmp_path / "both.png")
    plot(numbers | {"evaluations": [each | {"by_source": {}} for each in evaluations]}, tmp_path / "alone.png")
    assert (tmp_path / "both.png").read_bytes() != (tmp_path / "alone.png").read_bytes()


def test_the_log_of_metrics_has_each_source() -> None:
    """Evaluations, and what a reader sees first of rollouts and scores; the line of an iteration, too."""
    logged = dict(_of_evaluation({"set": "held-out", **summarise(BEFORE)}))
    assert logged["eval/held-out/sums/first_turn"] == pytest.approx(1 / 3)
    assert logged["eval/held-out/game/any_turn_low"] == proportion([1, 0]).low
    row = {"source/game/success/any_turn": 0.25, "source/game/reward/mean": 0.5, "source/game/episodes": 8}
    names = shown({"r": [row | logged]})
    assert {"source/game/success/any_turn", "source/game/reward/mean", "eval/held-out/game/first_turn"} <= {*names}
    assert "source/game/episodes" not in names
    assert cells(row) == {"game": "0.250"}


@pytest.mark.parametrize("mixed", [False, True])
def test_a_rollout_counts_each_source(mixed: bool) -> None:
    """Two episodes of a game, of which a filter rejected one; an iteration may have but one member of a mixture."""
    lost, right = make_trajectory("a", [[10], [11]]).turns
    turns = [lost, replace(right, verdict="correct", reward=1.0)]
    won = replace(make_trajectory("a", [[10], [11]]), source="game", turns=turns)
    tally = Tally(lambda _: None, SuccessRule(), mixed=mixed)
    tally.counts.update(counts_of([won, replace(won, status="rejected")], SuccessRule()))
    game = {"episodes": 2, "episodes/rejected": 0.5, "success/turn_1": 0.0, "success/any_turn": 1.0}
    game["environment/return"] = 1.0
    assert tally.metrics(0)["by_source"] == ({"game": game} if mixed else {})
    tally.counts.update(counts_of([replace(won, source="sums")], SuccessRule()))
    assert tally.metrics(0)["by_source"]["game"] == game
    assert tally.metrics(0)["by_source"]["sums"]["episodes"] == 1
