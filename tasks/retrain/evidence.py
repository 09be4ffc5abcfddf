"""Read the evidence for the gate from committed versions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from storage.objects.store import Store
from storage.version_names import PolicyVersion, ScoresVersion
from storage.versions import manifests
from storage.versions.lineage import trained_on
from tasks.evaluate.outcomes import Outcome, read_outcomes

_COUNTS = ("turns", "verdicts", "reward", "return_mean", "parts", "seconds", "set", "problem_set")
"""Metrics of scores that are not about the policy."""


def outcomes_of(store: Store, scores: ScoresVersion, cache: Path) -> list[Outcome]:
    """Read the outcomes of an evaluation, given its scores."""
    assert scores.evaluation
    return read_outcomes(store, scores.evaluation, scores, cache)


def summary_of(store: Store, versions: Sequence[str]) -> dict[str, Any]:
    """Read the summary of a policy on one set from the manifests of its scores, greedy and sampled."""
    numbers: dict[str, Any] = {}
    for version in versions:
        metrics, known = manifests.read(store, version).metrics, numbers.get("by_source", {})
        of_each = {source: known.get(source, {}) | own for source, own in metrics.get("by_source", {}).items()}
        numbers |= metrics | {"by_source": of_each}
    return {key: value for key, value in numbers.items() if key not in _COUNTS} | {"scores": list(versions)}


def failed_verdicts(store: Store, scores: Sequence[str]) -> float:
    """Compute the share of timeouts and errors among the verdicts on answers of all versions."""
    all_metrics = [manifests.read(store, version).metrics for version in scores]
    failed = sum(metrics["verdicts"].get(name, 0) for metrics in all_metrics for name in ("timeout", "error"))
    graded = sum(metrics["turns"] - metrics["verdicts"].get("none", 0) for metrics in all_metrics)
    return float(failed / max(1, graded))


def training_of(store: Store, challenger: PolicyVersion) -> tuple[list[ScoresVersion], list[float], int]:
    """Read what `challenger` was trained on: scores and share of solved episodes by iteration, and all sampled tokens.

    Each checkpoint names its data.
    """
    scores, shares, tokens = list[ScoresVersion](), list[float](), 0
    for number in range(1, challenger.number + 1):
        rollout, iteration_scores = trained_on(store, challenger.run, number - 1)
        scores.append(iteration_scores)
        metrics = manifests.read(store, rollout).metrics
        shares.append(metrics["solved"])
        tokens += metrics["generated_tokens"]
    return scores, shares, tokens
