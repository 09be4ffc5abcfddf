"""Both sides as processes: each starts, warms up, runs its rounds and ends before the other begins."""

import json
import os
import subprocess
import sys
from pathlib import Path

from configs import Config, load
from storage import layout
from storage.objects.store import Store
from storage.versions import datasets, manifests
from storage.versions.fetch import fetch_folder
from storage.versions.manifests import Manifest
from tests.benchmarks.peers.bystanders import Bystanders
from tests.benchmarks.peers.sides import Side
from tests.benchmarks.peers.workloads import Workload
from tests.support.paths import ROOT

TRL_SIDE = Path(__file__).with_name("trl_side.py")
MICRO_BATCH = 128
"""Samples in one forward and backward pass of TRL."""
OPTIMIZER = {
    "learning_rate": "lr",
    "weight_decay": "weight_decay",
    "adam_epsilon": "eps",
    "max_grad_norm": "max_grad_norm",
}
"""Arguments of GRPOConfig and the knobs of `optimizer` that they are taken from."""


def pipeline(workload: Workload, rounds: int, model: Path, folder: Path, overrides: list[str]) -> Side:
    """Run the main flow, as a user would, in the empty `folder`. A round ends when its checkpoint is committed."""
    total = workload.warm_up + rounds
    settings = [
        f"run.name={workload.name}",
        f"run.iterations={total}",
        f"evaluation.every={total}",
        f"policy={{path: {model}}}",
        f"storage.root={folder}/store",
        f"storage.cache={folder}/cache",
        *workload.overrides,
        *overrides,
    ]
    environment = {key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"}
    environment |= {"PYTHONPATH": str(ROOT), "PREFECT_HOME": f"{folder}/prefect", "OMP_WAIT_POLICY": "passive"}
    environment |= {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
    _, others = _run([sys.executable, "-m", "flows.math_mt_ppo", "demo", *settings], folder, environment)
    return _read(load("demo", settings), workload.warm_up, others)


def _read(config: Config, warm_up: int, others: float) -> Side:
    """Read what a run measured from its manifests and trajectories, without the first `warm_up` iterations."""
    from safetensors import safe_open

    store, cache, run = Store.of(config.storage), Path(config.storage.cache), config.run.name
    last = config.run.iterations
    checkpoints = {i: manifests.read(store, layout.checkpoint(run, i)) for i in range(warm_up, last + 1)}
    counted = range(warm_up, last)
    rollouts = {i: manifests.read(store, layout.trajectories(run, i)) for i in counted}
    rows = [row for i in counted for row in datasets.trajectories(store, layout.trajectories(run, i), cache)]
    seconds = [(checkpoints[i + 1].created_at - checkpoints[i].created_at).total_seconds() for i in counted]
    parts = {"generating": [rollouts[i].metrics["seconds"] for i in counted]}
    parts["training"] = [
        checkpoints[i + 1].metrics["seconds/prepare"] + checkpoints[i + 1].metrics["seconds/update"] for i in counted
    ]
    with safe_open(fetch_folder(store, checkpoints[last], "model", cache) / "model.safetensors", "np") as weights:
        tensors = [weights.get_tensor(name) for name in weights.keys()]  # noqa: SIM118 - it is no mapping
    return Side(
        seconds,
        parts,
        lengths=[sum(row.action_mask) for row in rows],
        samples=len(rows),
        updates=_steps(config, last) - _steps(config, warm_up) - _skipped(config, list(checkpoints.values())[1:]),
        parameters=sum(tensor.size for tensor in tensors),
        dtypes=tuple(sorted({str(tensor.dtype) for tensor in tensors})),
        threads=config.ppo.threads,
        others=others,
    )


def _steps(config: Config, number: int) -> int:
    """Return the number of minibatches before a checkpoint, including those that changed nothing."""
    if number == 0:
        return 0
    store = Store.of(config.storage)
    manifest = manifests.read(store, layout.checkpoint(config.run.name, number))
    state = fetch_folder(store, manifest, "state", Path(config.storage.cache)) / "state.json"
    return int(json.loads(state.read_text())["steps"])


def _skipped(config: Config, checkpoints: list[Manifest]) -> int:
    """Return the number of minibatches that `ppo.early_stop_imp_ratio` left out, so that they were no updates."""
    share: float = sum(checkpoint.metrics["policy/early_stopped"] for checkpoint in checkpoints)
    return round(share * config.ppo.ppo_n_minibatches * config.ppo.epochs)


def trl(workload: Workload, rounds: int, model: Path, folder: Path, python: Path, micro_batch: int) -> Side:
    """Run TRL's side with the problems of the same iterations, in the empty `folder`."""
    total = workload.warm_up + rounds
    path = folder / "job.json"
    path.write_text(json.dumps(job(load("demo", list(workload.overrides)), total, model, micro_batch)))
    # Threads that spin are right where nothing else runs. OMP_WAIT_POLICY is for servers that share the cores.
    environment = {key: value for key, value in os.environ.items() if key not in ("OMP_WAIT_POLICY", "PYTHONPATH")}
    environment |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    printed, others = _run([str(python), str(TRL_SIDE), str(path)], folder, environment)
    measured, skipped = json.loads(printed.splitlines()[-1]), workload.warm_up
    lengths = measured["lengths"][skipped:]
    assert len(measured["seconds"]) == len(measured["lengths"]) == total
    return Side(
        seconds=measured["seconds"][skipped:],
        parts={part: measured[part][skipped:] for part in ("generating", "judging")},
        lengths=[length for of_round in lengths for length in of_round],
        samples=sum(map(len, lengths)),
        updates=measured["updates"] * rounds // total,
        parameters=measured["parameters"],
        dtypes=tuple(measured["dtypes"]),
        threads=measured["threads"],
        others=others,
    )


def job(config: Config, rounds: int, model: Path, micro_batch: int) -> dict[str, object]:
    """Return the job of TRL's side (`Job` in trl_side.py) for the pipeline's configuration."""
    from tasks.agents.math_multi_turn import CORRECT_FEEDBACK, WRONG_FEEDBACK
    from tasks.problems import load_problems
    from tasks.rollout.plan import draw

    problems = load_problems(config.problems.train, config.problems.max_bad_share).problems
    groups, seed = config.rollout.problems_per_iteration, config.run.seed
    drawn = [problem for i in range(rounds) for problem in draw(problems, groups, i, seed)]
    beta1, beta2 = config.optimizer.betas
    return {
        "model": str(model),
        "problems": [{"prompt": problem.prompt, "solution": problem.solutions[0]} for problem in drawn],
        "groups": groups,
        "samples": config.rollout.group_size,
        "updates": config.ppo.ppo_n_minibatches * config.ppo.epochs,
        "rounds": rounds,
        "turns": config.agent.args["num_turns"],
        "max_new_tokens": config.sampling.max_new_tokens,
        "max_model_len": config.inference.max_model_len,
        "feedback": {"right": CORRECT_FEEDBACK, "wrong": WRONG_FEEDBACK},
        "optimizer": {
            **{name: getattr(config.optimizer, knob) for name, knob in OPTIMIZER.items()},
            "adam_beta1": beta1,
            "adam_beta2": beta2,
            "epsilon": config.ppo.eps_clip,
        },
        "threads": config.ppo.threads,
        "seed": seed,
        "micro_batch": micro_batch,
    }


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[str, float]:
    """Run a command; return its output and the share of the processors that other processes used meanwhile."""
    printed, errors = folder / "printed", folder / "errors"
    with (
        printed.open("w") as out,
        errors.open("w") as err,
        subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=err) as process,
    ):
        try:
            with Bystanders(process.pid) as bystanders:
                process.wait()
        except BaseException:
            process.terminate()  # the flow then ends its servers
            raise
    if process.returncode:
        output = printed.read_text()[-3000:] + errors.read_text()[-3000:]
        raise RuntimeError(f"`{' '.join(command)}` failed:\n{output}")
    return printed.read_text(), bystanders.share
