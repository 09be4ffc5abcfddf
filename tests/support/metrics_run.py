"""A store with the versions of a run and the numbers of its stages, but without trajectories."""

from typing import Any

from configs import load
from storage import layout
from storage.objects.store import Store
from storage.version_names import EvaluationVersion
from storage.versions.drafts import Draft, Provenance
from storage.versions.manifests import Kind

CONFIG = load("smoke", ["run.name=r", "run.seed=7", "run.iterations=4"]).model_dump(mode="json")
EVALUATION = EvaluationVersion("runs/r/evaluations/000000/held-out/greedy-1f0c")
ROLLOUT = {
    "episodes": 4, "status": {"completed": 3, "failed": 1}, "generated_tokens": 80, "tokens_per_second": 40.0,
    "solved": 0.5, "success": [0.25, 0.5], "reward": 0.3, "calls": {"answered": 1.5, "failed": 0.5}, "seconds": 2.0,
    "policy_versions": [0],
}  # fmt: skip
SCORES = {"turns": 6, "reward": 0.4, "parts": {"format": 1.0, "mean": 0.2}, "verdicts": {"wrong": 6}, "seconds": 0.1}
UPDATE = {
    "policy/kl": 0.01, "grad_norm": 1.5, "time/prepare": 1.0, "time/update": 2.0, "time/iteration": 6.0,
    "histograms": {"ratio": {"edges": [0.9, 1.0, 1.1], "counts": [3, 5]}},
}  # fmt: skip
EVALUATED = {"set": "held-out", "first_turn": {"value": 0.5, "low": 0.4, "high": 0.6}, "fix_rate": None, "turns": 4}


def commit(store: Store, version: str, kind: Kind, metrics: dict[str, Any], config: dict[str, Any] = CONFIG) -> str:
    with Draft(store, version, kind) as draft:
        draft.commit(Provenance(config=config), [], metrics)
    return version


def commit_iteration(
    store: Store, number: int, update: dict[str, Any] = UPDATE, config: dict[str, Any] = CONFIG
) -> list[str]:
    """Commit the versions of an iteration of the run `r`."""
    return [
        commit(store, layout.trajectories("r", number), "trajectories", ROLLOUT),
        commit(store, layout.scores("r", number, "5c0e"), "scores", SCORES),
        commit(store, layout.checkpoint("r", number + 1), "checkpoint", update, config),
    ]


def commit_run(store: Store, iterations: int = 1) -> list[str]:
    """Commit the versions of a run, named `r`; return those that have a row of metrics."""
    commit(store, layout.run("r"), "run", {})
    commit(store, layout.checkpoint("r", 0), "checkpoint", {"loss": 1.0})
    commit(store, EVALUATION, "evaluation", {"episodes": 4})
    versions = [commit(store, layout.evaluation_scores(EVALUATION, "5c0e"), "scores", EVALUATED)]
    return versions + [version for number in range(iterations) for version in commit_iteration(store, number)]
