"""Scheduled retraining: train the champion on the problems since the last night; replace it only by a better policy.

    new problems ──┐
    champion ──────┴─> [ rollout ──> score ──> train ] within a budget ──> challenger
                                                                              │
    champion and challenger on every evaluation set ──> gate ──> promoted, or kept for study ──> report

A log in the store (`storage.logs.nights`) records the new problems and the outcome of each night. So the next flow run
continues a killed night, wherever it stopped.

    python -m flows.retrain retrain
    python -m flows.retrain retrain --explain
"""

from prefect import flow

from flows.launch.cli import Command, main
from flows.math_mt_ppo import learn
from flows.run.check import check
from flows.run.configuration import resolve
from flows.run.progress import newest_policy
from flows.run.resources import open_trainer, open_workers
from flows.run.workspace import open_leased, open_run
from flows.stages import retrain as nightly
from flows.stages.evaluate import evaluate_sets
from flows.stages.problems import import_problems
from flows.stages.warm_start import first_policy
from tasks.retrain.commands import explain, give_up, nights, retry, roll_back
from tasks.retrain.planning import continued


@flow(name="retrain")
def retrain(config: str = "retrain", overrides: list[str] | None = None) -> str:
    """Retrain the champion on new problems, and promote the challenger if it is better; return the outcome.

    Args:
        config: see `math_mt_ppo`; `run.name` names the retraining, `problems.train` is the source of new problems.
        overrides: see `math_mt_ppo`.
    """
    with open_leased(resolve(config, overrides)) as retraining:  # only one flow run at a time
        nightly.report_last(retraining)  # if the last night was killed before its report
        if (record := nightly.open_night(retraining)) is None:  # else the night that was killed, or a new one
            return nightly.report_nothing_new(retraining)
        night = record.night
        with open_run(continued(night, retraining.config)) as workspace:
            policy = newest_policy(workspace) or first_policy(workspace)
            champion = nightly.crown_first(workspace, night)
            with open_trainer(workspace) as trainer, open_workers(workspace) as workers:
                challenger = record.challenger
                if challenger is None:  # within the night's budget
                    challenger = learn(workspace, policy, workers, trainer, import_problems(workspace)[0])
                nightly.end_training(retraining, record, challenger)
                distance = nightly.measure_distance(workspace, trainer, champion, challenger)
                evaluations = {
                    version: evaluate_sets(workspace, workers, version, night.sets)
                    for version in (champion, challenger)
                }
            decision = nightly.decide(workspace, retraining, champion, challenger, evaluations, distance)
            outcome = nightly.promote(workspace, night, decision)
        return nightly.report_night(retraining, nightly.end_night(retraining, night, decision, outcome))


if __name__ == "__main__":
    commands: dict[str, Command] = {"check": check, "explain": explain, "nights": nights, "roll-back": roll_back}
    main(retrain, commands | {"retry": retry, "give-up": give_up})
