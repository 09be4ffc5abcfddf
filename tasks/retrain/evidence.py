"""What the gate goes by, read back from versions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.schema import Gate
from storage.objects.store import Store
from storage.version_names import PolicyVersion, ScoresVersion
from storage.versions import manifests
from storage.versions.lineage import trained_on
from tasks.evaluate.comparison import compare
from tasks.evaluate.outcomes import Outcome, read_outcomes
from tasks.retrain.gate import GateEvidence

_COUNTS = ("turns", "verdicts", "seconds", "set", "problem_set")
"""Metrics of scores that say nothing about the policy."""


@dataclass(frozen=True, slots=True)
class Training:
    """What a run was trained on, iteration by iteration."""

    scores: list[ScoresVersion]
    solved: list[float]  # share of the episodes
    tokens: int  # sampled


def outcomes_of(store: Store, scores: ScoresVersion, cache: Path) -> list[Outcome]:
    """The outcomes of an evaluation, by the version of its scores."""
    assert scores.evaluation
    return read_outcomes(store, scores.evaluation, scores, cache)


def summary_of(store: Store, versions: Sequence[str]) -> dict[str, Any]:
    """What a policy can do on a set, from the manifests of its scores, greedy and sampled."""
    numbers: dict[str, Any] = {}
    for version in versions:
        numbers |= manifests.read(store, version).metrics
    return {key: value for key, value in numbers.items() if key not in _COUNTS} | {"scores": list(versions)}


def failed_verdicts(store: Store, scores: Sequence[str]) -> float:
    """Share of timeouts and errors among the verdicts of all the versions."""
    found = [manifests.read(store, version).metrics for version in scores]
    failed = sum(metrics["verdicts"].get(name, 0) for metrics in found for name in ("timeout", "error"))
    return float(failed / max(1, sum(metrics["turns"] for metrics in found)))


def solved(store: Store, challenger: PolicyVersion) -> Training:
    """Of the iterations that led to `challenger`; each checkpoint names what it was trained on."""
    scores, shares, tokens = list[ScoresVersion](), list[float](), 0
    for number in range(1, challenger.number + 1):
        rollout, judged = trained_on(store, challenger.run, number - 1)
        scores.append(judged)
        metrics = manifests.read(store, rollout).metrics
        shares.append(metrics["solved"])
        tokens += metrics["generated_tokens"]
    return Training(scores, shares, tokens)


def gather(
    store: Store,
    cache: Path,
    champion: PolicyVersion,
    challenger: PolicyVersion,
    evaluations: Mapping[PolicyVersion, Mapping[str, Sequence[ScoresVersion]]],
    distance: float | None,
    gate: Gate,
) -> tuple[Training, GateEvidence]:
    """Everything that the gate looks at.

    Args:
        store: where everything lies.
        cache: local folder for objects of a remote root.
        champion: version of a checkpoint, as is `challenger`.
        challenger: what the night trained.
        evaluations: versions of scores by policy and set, that of greedy episodes first, that of sampled ones second.
        distance: nats a token between the two policies.
        gate: says which episodes are compared.
    """
    before, after, place = evaluations[champion], evaluations[challenger], int(gate.episodes == "sampled")
    comparisons = {
        name: compare(*(outcomes_of(store, found[name][place], cache) for found in (before, after))) for name in after
    }
    training = solved(store, challenger)
    return training, GateEvidence(comparisons, failed_verdicts(store, training.scores), distance, training.solved)
