"""One row of numbers for each committed stage of an iteration, and for each evaluation, with the field's names.

Example: the row of a rollout, of an update, and of an evaluation:

{"run": "demo", "iteration": 3, "stage": "rollout", "version": "runs/demo/trajectories/000003", "at": "2026-11-28T…",
 "episodes": 512, "success/turn_1": 0.486, "success/any_turn": 0.707, "tokens/generated": 4490, "time/rollout": 1.02, …}
{"run": "demo", "iteration": 3, "stage": "train", "version": "runs/demo/checkpoints/000004", "at": "2026-11-28T…",
 "policy/entropy": 0.189, "policy/kl": 0.00014, "policy/clip_fraction": 0.0, "grad_norm": 1.58, "time/train": 0.35, …}
{"run": "demo", "iteration": 20, "stage": "evaluate", "version": "runs/demo/evaluations/000020/held-out/…",
 "eval/held-out/first_turn": 0.41, "eval/held-out/first_turn_low": 0.34, "eval/held-out/first_turn_high": 0.48, …}
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from statistics import fmean
from typing import Any

from storage import layout
from storage.versions.manifests import Manifest

Row = dict[str, Any]
HEAD = "run", "iteration", "stage", "version", "at"
STAGES = {"trajectories": "rollout", "scores": "score", "checkpoint": "train"}
"""The stages of an iteration by the kinds of the versions that they commit."""
TIMES = tuple(f"time/{stage}" for stage in STAGES.values())
_NAMES: Mapping[str, Mapping[str, str]] = {
    "rollout": {
        "by_source": "source",
        "status": "episodes",
        "groups_rejected": "groups/rejected",
        "tokens": "tokens/all",
        "generated_tokens": "tokens/generated",
        "tokens_per_second": "tokens/per_second",
        "solved": "success/any_turn",
        "success": "success/turn",
        "reward": "environment/reward",
        "return_mean": "environment/return",
        "parts": "environment",
        "seconds": "time/rollout",
    },
    "score": {
        "by_source": "source",
        "return_mean": "return/mean",
        "reward": "reward/mean",
        "parts": "reward",
        "disagreement": "verdicts/disagree",
        "seconds": "time/score",
    },
    "train": {  # of updates by older programs
        "policy/kl_proximal": "policy/kl",
        "optimizer/grad_norm": "grad_norm",
        "optimizer/lr": "lr",
        "tokens/all": "tokens/trained",
        "tokens/per_second": "tokens/trained_per_second",
        "seconds/prepare": "time/prepare",
        "seconds/update": "time/update",
    },
}
"""Names in rows by the names in manifests, where they differ."""
_NO_NUMBERS = ("policy_versions", "histograms", "without_room")


def row_of(manifest: Manifest) -> Row | None:
    """Make the row of a committed version; None if it is no stage of an iteration and no evaluation's scores."""
    version, metrics, stage = manifest.version, manifest.metrics, STAGES.get(manifest.kind)
    number = layout.number_of(version)
    if stage is None or number is None or (stage == "train" and number == 0):
        return None
    head: Row = {"run": layout.run_of(version), "iteration": number, "stage": stage, "version": version}
    head["at"] = manifest.created_at.isoformat()
    if layout.evaluated_policy(version):
        return head | {"stage": "evaluate"} | dict(_of_evaluation(metrics))
    if stage == "train":
        head["iteration"] = number - 1  # the update that made this checkpoint
        # Older programs gave them the names of the rollout's numbers, which are of all episodes.
        metrics = {name.replace("success/turn_", "trained/turn_"): value for name, value in metrics.items()}
        if manifest.knob("run.overlap"):  # the stages work at the same time, and the iteration is less than their sum
            metrics.pop("time/iteration", None)
    names, numbers = _NAMES[stage], dict[str, float]()
    for name, value in metrics.items():
        if name not in _NO_NUMBERS:
            for renamed, flat in _flat(names.get(name, name), value):
                # A part of a reward may have any name: one that is taken keeps its longer name.
                numbers[f"parts/{renamed}" if renamed in numbers else renamed] = flat
    return head | numbers | _derived(stage, numbers)


def _derived(stage: str, numbers: Mapping[str, float]) -> dict[str, float]:
    """Compute the numbers that follow from others of the same stage."""
    if stage == "rollout" and numbers.get("episodes"):
        calls = sum(value for name, value in numbers.items() if name.startswith("calls/"))
        return {"length/mean": numbers.get("tokens/generated", 0) / numbers["episodes"], "calls/mean": calls}
    if stage == "train":
        return {"time/train": sum(numbers.get(f"time/{part}", 0) for part in ("read", "prepare", "update"))}
    return {}


def add_rest(rows: Iterable[Row]) -> list[Row]:
    """Add `time/rest` to the rows of updates: the seconds of their iterations in which no stage worked.

    Not known, and so left out, where a stage has no row or an earlier flow run did it, with `run.overlap`, and of
    updates by older programs.

    >>> stages = [{"stage": stage, "iteration": 3, "at": "2026-11-28T…"} for stage in ("rollout", "score", "train")]
    >>> seconds = {"time/rollout": 1.0}, {"time/score": 0.25}, {"time/train": 0.5, "time/iteration": 2.0}
    >>> add_rest([row | numbers for row, numbers in zip(stages, seconds)])[2]["time/rest"]
    0.25
    """
    rows = list(rows)
    whole = by_iteration(rows)
    for row in rows:
        merged = whole.get(row["iteration"], {})
        if row["stage"] == "train" and merged.keys() >= {"time/iteration", *TIMES}:
            rest = row["time/iteration"] - sum(merged[name] for name in TIMES)
            row |= {"time/rest": rest} if rest >= 0 else {}
    return rows


def _of_evaluation(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    prefix = f"eval/{metrics.get('set', 'held-out')}"
    for name, value in metrics.items():
        if name not in ("verdicts", "turns", "parts", *_NO_NUMBERS):
            path = {"by_turn": f"{prefix}/turn", "rewards": prefix, "by_source": prefix}.get(name, f"{prefix}/{name}")
            yield from _flat(path, value)


def _flat(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers in `value` by name.

    >>> dict(_flat("turn", [{"value": 0.5, "low": 0.4, "high": 0.6}])), dict(_flat("faults", {"policy": 0.1}))
    ({'turn_1': 0.5, 'turn_1_low': 0.4, 'turn_1_high': 0.6}, {'faults/policy': 0.1})
    """
    if isinstance(value, dict) and "value" in value:
        yield name, value["value"]
        yield from ((f"{name}_{end}", value[end]) for end in ("low", "high") if end in value)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name}/{key}", inner)
    elif isinstance(value, list):
        for turn, inner in enumerate(value, 1):
            yield from _flat(f"{name}_{turn}", inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value


def numbers_of(row: Row) -> dict[str, float]:
    """Return the metrics of a row, without what identifies it."""
    return {name: value for name, value in row.items() if name not in HEAD}


def by_iteration(rows: Iterable[Row], *, evaluations: bool = False) -> dict[int, Row]:
    """Merge the rows of each iteration into one, in order; or else the `evaluations` of each policy version.

    Where two stages have a number of the same name, the later stage's wins: it saw the scorer's verdicts. Scores that
    another verifier gave after the update are left out.
    """
    merged, rows = dict[int, Row](), sorted(rows, key=order)
    updated = {row["iteration"]: row["at"] for row in rows if row["stage"] == "train"}
    for row in rows:
        if (row["stage"] == "evaluate") == evaluations:
            known = merged.setdefault(row["iteration"], {})
            again = row["stage"] == known.get("stage") == "score"
            if not again or row["at"] < updated.get(row["iteration"], row["at"]):
                known.update(row)
    return merged


def earned(names: Iterable[str]) -> list[str]:
    """Select the names of what scores gave to episodes: returns, rewards of turns, and parts of rewards."""
    found = [name for name in names if name.startswith(("reward/", "return/", "parts/"))]
    return [name for name in found if name != "reward/all_minimal" and not re.search(r"/turn_\d+$", name)]


def spent(iterations: Iterable[Row]) -> dict[str, dict[str, float]]:
    """Sum up the stages and the rest, given merged rows; what took no time is left out, and updates of nothing.

    >>> spent([{"time/rollout": 2.0, "tokens/generated": 80, "staleness/mean": 1.0}, {"time/rollout": 3.0}])
    {'rollout': {'seconds': 2.5, 'total_s': 5.0, 'tokens': 80, 'tokens_per_second': 16.0}}
    """
    found, listed = dict[str, dict[str, float]](), list(iterations)
    for stage, tokens in (("rollout", "tokens/generated"), ("score", ""), ("train", "tokens/trained"), ("rest", "")):
        rows = [row for row in listed if f"time/{stage}" in row and row.get(tokens, 1)]
        if not rows:
            continue
        total_s, counted = sum(row[f"time/{stage}"] for row in rows), sum(row.get(tokens, 0) for row in rows)
        found[stage] = {"seconds": total_s / len(rows), "total_s": total_s}
        if counted:
            found[stage] |= {"tokens": counted, "tokens_per_second": counted / (total_s or 1.0)}
    staleness = [row["staleness/mean"] for row in listed if "staleness/mean" in row]
    if "train" in found and staleness:
        found["train"]["staleness"] = fmean(staleness)
    return found


_ORDER = ["evaluate", *STAGES.values()]


def order(row: Row) -> tuple[int, int, str]:
    """Return a sort key: policy version `n` is evaluated before iteration `n` begins."""
    return row["iteration"], _ORDER.index(row["stage"]), row["at"]
