"""Peak memory of each stage at 1,000 and at 10,000 trajectories; rollout and score must not grow with their number.

Each stage runs in a new process, which runs this file with the stage, the policy and overrides as arguments.
The vLLM server and the verifier's workers are other processes and are not counted.
"""

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from configs import load
from storage import layout
from storage.version_names import PolicyVersion
from tests.benchmarks.fixtures import Lab
from tests.benchmarks.result import Row

if TYPE_CHECKING:
    from tasks.run.workspace import Workspace

GOAL = 1.2
GROUPS = (63, 625)  # groups of 16 episodes: 1,008 and 10,000 trajectories
STAGES = {"rollout": GOAL, "score": GOAL, "train": None}


def measure(lab: Lab) -> list[Row]:
    """Run the stages one after the other, each on the versions that the stage before committed."""
    size = lab.config().rollout.group_size
    counts = [groups * size for groups in GROUPS]
    peaks = {groups: {stage: _peak(lab, stage, groups) for stage in STAGES} for groups in GROUPS}
    rows = []
    for stage, goal in STAGES.items():
        small, large = (peaks[groups][stage] for groups in GROUPS)
        growth = (large - small) * 1024 / (counts[1] - counts[0])
        rows.append(
            Row(
                benchmark=f"peak memory of {stage}",
                measured=f"{large / small:.2f}",
                goal=f"{goal} or less" if goal else "",
                met=large / small <= goal if goal else None,
                detail=f"{small:.0f} MB for {counts[0]:,} trajectories, {large:.0f} MB for {counts[1]:,}: "
                f"{growth:.1f} kB for each additional one",
            )
        )
    return rows


def _peak(lab: Lab, stage: str, groups: int) -> float:
    overrides = [f"run.name=memory-{groups}", f"rollout.problems_per_iteration={groups}"]
    return float(lab.run_module("memory", stage, lab.policy.version, *lab.overrides, *overrides))


def main(stage: str, policy: str, overrides: list[str]) -> None:
    """Run a stage; print its peak memory in MB as the last line of output."""
    from tasks.run.workspace import Workspace

    {"rollout": _rollout, "score": _score, "train": _train}[stage](
        Workspace(load("demo", overrides)), PolicyVersion(policy)
    )
    # getrusage is no use: ru_maxrss is inherited through fork and exec, so a child starts with its parent's peak.
    status = Path("/proc/self/status").read_text()
    print(json.dumps(int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 1024))


def _rollout(workspace: "Workspace", policy: PolicyVersion) -> None:
    from prefect.logging import disable_run_logger

    from tasks.problems.task import import_problems
    from tasks.rollout.task import rollout
    from tasks.run.resources import open_engine, open_verifier

    with disable_run_logger(), open_engine(workspace) as engine, open_verifier(workspace) as verifier:
        problems, _ = import_problems.fn(workspace)
        rollout.fn(workspace, engine, verifier, 0, policy, problems)


def _score(workspace: "Workspace", _: PolicyVersion) -> None:
    from prefect.logging import disable_run_logger

    from tasks.run.resources import open_verifier
    from tasks.score.task import score

    with disable_run_logger(), open_verifier(workspace) as verifier:
        score.fn(workspace, verifier, 0, layout.trajectories(workspace.name, 0))


def _train(workspace: "Workspace", policy: PolicyVersion) -> None:
    from prefect.logging import disable_run_logger

    from tasks.run.resources import open_trainer
    from tasks.score.scoring import scorer_fingerprint
    from tasks.train.task import train

    name = workspace.name
    scores = layout.scores(name, 0, scorer_fingerprint(workspace.config.score))
    with disable_run_logger(), open_trainer(workspace) as trainer:
        train.fn(workspace, trainer, 0, policy, layout.trajectories(name, 0), scores)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
