"""The evaluation stage alone: evaluate one policy version, or compare two on the same problems.

python -m flows.evaluate demo --policy demo/latest --against runs/demo/checkpoints/000000
"""

from typing import Any

from prefect import flow

from flows.launch.cli import main
from flows.run import configuration, progress, resources
from flows.run.workspace import open_unleased
from flows.stages.evaluate import evaluate_sets
from flows.stages.problems import import_sets
from storage import layout
from storage.versions import checkpoints
from tasks.inference.ahead import servers_begun


@flow(name="evaluate")
def evaluate(
    config: str = "demo", overrides: list[str] | None = None, policy: str = "", against: str = "", sets: str = ""
) -> dict[str, Any]:
    """Play and grade the evaluation sets with a policy; return its results for each set.

    Args:
        config: see `math_mt_ppo`; only its problems, agent, sampling and `evaluation` are used.
        overrides: see `math_mt_ppo`.
        policy: a checkpoint's version, its URI or an alias; empty: the newest of `run.name`.
        against: another policy, to compare with.
        sets: names of evaluation sets, separated by commas; empty: all.
    """
    with open_unleased(configuration.resolve(config, overrides)) as workspace:
        problem_sets = import_sets(workspace, [name for name in sets.split(",") if name])
        references = [policy or layout.latest(workspace.name), *([against] if against else [])]
        policies = [checkpoints.resolve_policy(workspace.store, reference) for reference in references]
        if len(set(policies)) < len(policies):
            raise ValueError(
                f"{policy!r} and {against!r} are the same policy, {policies[0]}: name two different ones to compare"
            )
        with resources.open_workers(workspace) as workers:
            evaluations = {version: evaluate_sets(workspace, workers, version, problem_sets) for version in policies}
        scores = [version for sets in evaluations.values() for versions in sets.values() for version in versions]
        progress.log_last(workspace, *scores)
        return progress.report_evaluations(workspace, evaluations)


if __name__ == "__main__":
    main(evaluate, ahead=servers_begun)
