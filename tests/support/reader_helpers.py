"""A small store for the reader: sums that are easy to check by hand, and rows that no pipeline writes."""

import dataclasses
from typing import Any

from storage import layout
from storage.objects.store import Store
from storage.records import Score, Trajectory
from tests.support.chain_helpers import commit_rows
from tests.support.train_helpers import make_scores, make_trajectory

EVIL = "<script>alert(1)</script>"
HOSTILE = f"{EVIL}'\"{{{{ 7 * 7 }}}} \u202eltr\u202c [a](javascript:alert(2)) $\\frac{{1}}{{2}}$"
LONG = "A" * 1_000_000
PLAIN, STRANGE, NORMALISED, CRITIC, CALLED = range(5)  # iterations, named by their advantages or rows
NONE = {"advantage": {"normalisation": "none"}}
PPO = [NONE, NONE, {"advantage": {"normalisation": "batch"}}, {"advantage": {"type": "gae"}, "critic": {}}, NONE]

Rows = tuple[list[Trajectory], list[Score]]


def spoken(iteration: int, name: str, texts: list[str], problem: str, **changes: Any) -> Trajectory:
    tokens = [[7, 8], [9, 10, 11]][: len(texts)]
    row = make_trajectory(name, tokens, problem=problem, logprob=-0.3, version=iteration)
    row.turns[:] = [dataclasses.replace(turn, text=text) for turn, text in zip(row.turns, texts, strict=True)]
    row.turns[:-1] = [dataclasses.replace(turn, feedback="100% wrong_, try again") for turn in row.turns[:-1]]
    known = {"run": "shared", "iteration": iteration, "prompt": f"What is {problem} + 1?", "solutions": ["2"]}
    return dataclasses.replace(row, **{**known, **changes})


def sums(iteration: int, groups: int) -> Rows:
    """Make groups in which sample 0 is right in its first turn, 1 in its second, 2 and 3 never; 3 has one turn."""
    answers = [["\\boxed{2}"], ["\\boxed{3}", "\\boxed{2}"], ["one", "\\Boxed{5}"], ["two"]]
    rows, scores = [], []
    for number in range(4 * groups):
        problem, sample = divmod(number, 4)
        name, status = f"{iteration}/{problem}/{sample}", "truncated" if number == 3 else "completed"
        row = spoken(iteration, name, answers[sample], str(problem), sample=sample, status=status, unplayed_turns=0)
        rows.append(row)
        scores += make_scores(name, *[float(turn == sample) for turn in range(len(answers[sample]))])
    return rows, scores


def strange() -> Rows:
    """Make rows that no pipeline writes, without scores."""
    nothing: dict[str, Any] = {"token_ids": [], "action_mask": [], "logprobs": [], "versions": []}
    rows = [
        spoken(STRANGE, f"evil/{HOSTILE}/?&#", [HOSTILE], EVIL, prompt=HOSTILE, solutions=[HOSTILE]),
        spoken(STRANGE, "long", [LONG], "long"),
        spoken(STRANGE, "twice", ["first"], "twice"),
        spoken(STRANGE, "twice", ["second"], "twice", sample=1),
        spoken(STRANGE, "broken", ["x"], "broken", logprobs=[float("nan")], versions=[], action_mask=[True] * 9),
        spoken(STRANGE, "empty", [], "empty", **nothing),
        spoken(STRANGE, "many", ["x"], "many", token_ids=[5] * 4500, action_mask=[False] * 4500),
    ]
    return rows, []


def commit(store: Store, iteration: int, rows: Rows, parents: list[str], **knobs: Any) -> None:
    version, scores = layout.trajectories("shared", iteration), layout.scores("shared", iteration, "5c0e")
    config = {"ppo": PPO[iteration], **knobs}
    commit_rows(store, version, "trajectories", rows[0], parents, config=config, shard=50)
    commit_rows(store, scores, "scores", rows[1], [version], config=config, shard=50)
