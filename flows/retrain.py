"""Scheduled retraining: the champion learns from what came since the last night, and is replaced only by a better one.

    new problems ──┐
    champion ──────┴─> [ rollout ──> score ──> train ] within a budget ──> challenger
                                                                              │
    champion and challenger on every evaluation set ──> gate ──> promoted, or kept for study ──> report

What has come and what became of it stands in a log in the store (`storage.logs.nights`), so a night that was killed is
continued by the next one, wherever it stopped.

    python -m flows.retrain retrain
    python -m flows.retrain retrain --explain
"""

from typing import TYPE_CHECKING

from prefect import flow

from flows.launch.cli import main
from storage.version_names import PolicyVersion
from tasks.evaluate.task import evaluate_sets
from tasks.problems.task import import_problems
from tasks.retrain.commands import explain, give_up, nights, retry, roll_back
from tasks.retrain.gate_task import crown_first, decide, measure_distance, promote
from tasks.retrain.night_task import end_night, end_training, open_night
from tasks.retrain.planning import continued
from tasks.retrain.report_task import report_last, report_night, tell_nothing_new
from tasks.rollout.task import Rollouts
from tasks.run.configuration import resolve
from tasks.run.opening import open_leased, open_run
from tasks.run.progress import iterations, newest_policy
from tasks.run.resources import open_engine, open_trainer, open_verifier
from tasks.run.workspace import Workspace
from tasks.score.task import score
from tasks.train.task import train
from tasks.warm_start.task import first_policy

if TYPE_CHECKING:
    from tasks.inference.engine import Engine
    from tasks.score.verifier import Verifier
    from tasks.train.trainer import Trainer


@flow(name="retrain")
def retrain(config: str = "retrain", overrides: list[str] | None = None) -> str:
    """Retrain the champion on new problems, and promote what came of it if it is better; returns the outcome.

    Args:
        config: see `math_mt_ppo`; `run.name` is the retraining's, `problems.train` where new problems appear.
        overrides: see `math_mt_ppo`.
    """
    with open_leased(resolve(config, overrides)) as retraining:  # by one flow run at a time
        report_last(retraining)  # should it have been killed before it was told
        record = open_night(retraining)  # the one that was killed, or a new one
        if record is None:
            return tell_nothing_new(retraining)
        night = record.night
        with open_run(continued(night, retraining.config)) as workspace:
            policy = newest_policy(workspace) or first_policy(workspace)
            champion = crown_first(workspace, night)
            with (
                open_verifier(workspace) as verifier,
                open_engine(workspace) as engine,
                open_trainer(workspace) as trainer,
            ):
                challenger = record.challenger or learn(workspace, policy, verifier, engine, trainer)
                end_training(retraining, record, challenger)
                distance = measure_distance(workspace, trainer, champion, challenger)
                evaluations = {
                    each: evaluate_sets(workspace, engine, verifier, each, night.sets)
                    for each in (champion, challenger)
                }
            decision = decide(workspace, champion, challenger, evaluations, distance)
            outcome = promote(workspace, night, decision)
        return report_night(retraining, end_night(retraining, night, decision, outcome))


def learn(
    workspace: Workspace, policy: PolicyVersion, verifier: "Verifier", engine: "Engine", trainer: "Trainer"
) -> PolicyVersion:
    """The main job's loop, until the night's budget ends; returns the last policy version."""
    problems, _ = import_problems(workspace)
    rollouts = Rollouts(workspace, engine, verifier, problems)
    for iteration in iterations(workspace):
        trajectories = rollouts.take(iteration, policy)
        scores = score(workspace, verifier, iteration, trajectories)
        policy = train(workspace, trainer, iteration, policy, trajectories, scores)
        rollouts.swap(policy)
    rollouts.finish()
    return policy


if __name__ == "__main__":
    main(retrain, {"explain": explain, "nights": nights, "roll-back": roll_back, "retry": retry, "give-up": give_up})
