"""Both sides as processes, what is measured of each, and the check that both did the same work."""

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, variance

from configs import Config, load
from configs.algorithms import PPO
from storage import layout
from storage.objects.store import Store
from storage.versions import datasets, manifests
from storage.versions.fetch import fetch_folder
from tasks.inference.location import POLICIES
from tasks.metrics.log import read_rows
from tasks.metrics.rows import TIMES, by_iteration
from tests.benchmarks.fixtures import run_program
from tests.support.paths import ROOT

SURE = 5.0
"""Largest difference of the mean lengths, in standard errors."""
SLACK = 0.02
"""Further difference, as a fraction of the mean, because two trainings from one policy drift apart."""
MICRO_BATCH = 128
"""Samples in one forward and backward pass of TRL."""
OPTIMIZER = {
    "learning_rate": "lr",
    "weight_decay": "weight_decay",
    "adam_epsilon": "eps",
    "max_grad_norm": "max_grad_norm",
}
"""Arguments of GRPOConfig and the knobs of `optimizer` that they are taken from."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Overrides of the demo. One round is 32 problems x 16 episodes and two optimizer steps."""

    what: str
    overrides: tuple[str, ...]
    rounds: int  # that are counted
    warm_up: int  # rounds at the beginning of each process that are not counted
    untaught: bool = False  # the policy has the demo's sizes and random weights, so it stops at random

    def model(self, folder: Path) -> Path:
        """Return the folder of the policy that both sides begin with; one without training is written to `folder`."""
        demo = POLICIES / "demo"
        if not self.untaught:
            return demo
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed

        set_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(demo)).save_pretrained(folder)
        AutoTokenizer.from_pretrained(demo).save_pretrained(folder)
        return folder


ONE_TURN = "agent.args={num_turns: 1}"
# TRL's environments cannot end an episode: every episode has all its turns, here as well.
TWO_TURNS, FIVE_TURNS = (f"agent.args={{num_turns: {turns}, stop_on_success: false}}" for turns in (2, 5))
TO_64 = ("sampling.max_new_tokens=64", "inference.max_model_len=512")
TO_256 = ("sampling.max_new_tokens=256", "inference.max_model_len=320")
WORKLOADS = {
    "short": Workload("one turn, answers of about 6 tokens", (ONE_TURN,), 12, 3),
    "random": Workload("one turn, random lengths to 256 tokens", (ONE_TURN, *TO_256), 2, 1, untaught=True),
    "two-turn": Workload("two turns with feedback", (TWO_TURNS,), 10, 3),
    "five-turn": Workload("five turns, random lengths to 64 tokens each", (FIVE_TURNS, *TO_64), 1, 1, untaught=True),
}


@dataclass(frozen=True, slots=True)
class Side:
    """The counted rounds of one process.

    Example: Side([1.1, 1.0], [6, 5, …], 1024, 4, 619328, ("float32",), 2)
    """

    seconds: list[float]  # of each round
    lengths: list[int]  # sampled tokens of each episode, all rounds
    samples: int
    updates: int  # optimizer steps
    parameters: int
    dtypes: tuple[str, ...]
    threads: int  # of the trainer
    stages: dict[str, float] = field(default_factory=dict)  # seconds of a round's rollout, score, train; of TRL none

    @property
    def typical(self) -> float:
        """Seconds of a round: the median."""
        return median(self.seconds)

    @property
    def tokens(self) -> float:
        """Mean sampled tokens of an episode."""
        return fmean(self.lengths)

    @property
    def counts(self) -> tuple[object, ...]:
        """The counts that must be equal on both sides."""
        return (len(self.seconds), self.samples, self.updates, self.parameters, self.dtypes, self.threads)


def check_same_work(theirs: Side, ours: Side) -> None:
    """Check that both sides did the same work.

    Raises:
        ValueError: rounds, samples, updates, parameters, number formats or threads differ, or the mean lengths differ
            by more than chance explains.
    """
    if theirs.counts != ours.counts:
        names = "rounds, samples, updates, parameters, dtypes, threads"
        raise ValueError(f"the sides did not do the same work ({names}): TRL {theirs.counts}, here {ours.counts}")
    error = math.sqrt(sum(variance(side.lengths) / len(side.lengths) for side in (theirs, ours)))
    if abs(theirs.tokens - ours.tokens) > SURE * error + SLACK * ours.tokens:
        raise ValueError(
            f"the mean numbers of sampled tokens differ by more than chance: TRL {theirs.tokens:.2f}, "
            f"here {ours.tokens:.2f}, standard error {error:.3f}"
        )


def ratios(pairs: Sequence[tuple[Side, Side]]) -> list[float]:
    """Return TRL's seconds of a round divided by ours, for each pair."""
    return [theirs.typical / ours.typical for theirs, ours in pairs]


def pipeline(workload: Workload, model: Path, folder: Path) -> Side:
    """Run the main flow, as a user would, in the empty `folder`. A round ends when its checkpoint is committed."""
    from safetensors import safe_open

    name, cache = "peers", folder / "cache"
    last = workload.warm_up + workload.rounds
    settings = [f"run.name={name}", f"run.iterations={last}", f"evaluation.every={last}", f"policy={{path: {model}}}"]
    settings += [f"storage.root={folder}/store", f"storage.cache={cache}", *workload.overrides]
    settings += [f"storage.keep.every={workload.warm_up}"]  # the first counted checkpoint is read afterwards
    added = {"PYTHONPATH": str(ROOT), "PREFECT_HOME": f"{folder}/prefect", "OMP_WAIT_POLICY": "passive"}
    added |= {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
    _run([sys.executable, "-m", "flows.math_mt_ppo", "demo", *settings], folder, added, without="PREFECT_API_URL")
    store, config = Store(f"{folder}/store"), load("demo", settings)
    checkpoints = [manifests.read(store, layout.checkpoint(name, i)) for i in range(workload.warm_up, last + 1)]
    moments = [checkpoint.created_at for checkpoint in checkpoints]
    rows = [
        row
        for iteration in range(workload.warm_up, last)
        for row in datasets.trajectories(store, layout.trajectories(name, iteration), cache)
    ]
    counted = list(by_iteration(read_rows(store, name)).values())[workload.warm_up :]
    begun, done = (
        json.loads((fetch_folder(store, checkpoint, "state", cache) / "state.json").read_text())["steps"]
        for checkpoint in (checkpoints[0], checkpoints[-1])
    )
    with safe_open(fetch_folder(store, checkpoints[-1], "model", cache) / "model.safetensors", "np") as weights:
        tensors = [weights.get_tensor(tensor) for tensor in weights.keys()]  # noqa: SIM118 - it is no mapping
    stopped = sum(checkpoint.metrics["policy/early_stopped"] for checkpoint in checkpoints[1:])
    return Side(
        seconds=[(later - earlier).total_seconds() for earlier, later in pairwise(moments)],
        lengths=[sum(row.action_mask) for row in rows],
        samples=len(rows),
        updates=done - begun - round(stopped * _updates(config)),  # without those that stopped early
        parameters=sum(tensor.size for tensor in tensors),
        dtypes=tuple(sorted({str(tensor.dtype) for tensor in tensors})),
        threads=config.train.threads,
        stages={name: median(row[name] for row in counted) for name in TIMES},
    )


def trl(workload: Workload, model: Path, folder: Path, python: Path) -> Side:
    """Run TRL's side with the problems of the same iterations, in the empty `folder`."""
    total, path = workload.warm_up + workload.rounds, folder / "job.json"
    path.write_text(json.dumps(job(load("demo", list(workload.overrides)), total, model)))
    # Threads that spin are right where nothing else runs. OMP_WAIT_POLICY is for servers that share the cores.
    added = {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    command = [str(python), str(Path(__file__).with_name("trl_side.py")), str(path)]
    measured = json.loads(_run(command, folder, added, without="OMP_WAIT_POLICY").splitlines()[-1])
    lengths = measured["lengths"][workload.warm_up :]
    assert len(measured["seconds"]) == len(measured["lengths"]) == total
    return Side(
        seconds=measured["seconds"][workload.warm_up :],
        lengths=[length for of_round in lengths for length in of_round],
        samples=sum(map(len, lengths)),
        updates=measured["updates"] * workload.rounds // total,
        parameters=measured["parameters"],
        dtypes=tuple(measured["dtypes"]),
        threads=measured["threads"],
    )


def job(config: Config, rounds: int, model: Path) -> dict[str, object]:
    """Return the job of TRL's side (`Job` in trl_side.py) for the pipeline's configuration."""
    from tasks.agents.math_multi_turn import CORRECT_FEEDBACK, WRONG_FEEDBACK
    from tasks.problems import load_problems
    from tasks.rollout.plan import draw

    problems = load_problems(config.problems.trained[0].source, config.problems.max_bad_share).problems
    groups, seed = config.rollout.problems_per_iteration, config.run.seed
    drawn = [problem for i in range(rounds) for problem in draw(problems, groups, i, seed)]
    beta1, beta2 = config.optimizer.betas
    assert isinstance(config.algorithm, PPO)
    return {
        "model": str(model),
        "problems": [{"prompt": problem.prompt, "solution": problem.solutions[0]} for problem in drawn],
        "groups": groups,
        "samples": config.rollout.group_size,
        "updates": _updates(config),
        "rounds": rounds,
        "turns": config.agent.args["num_turns"],
        "max_new_tokens": config.sampling.max_new_tokens,
        "max_model_len": config.inference.max_model_len,
        "feedback": {"right": CORRECT_FEEDBACK, "wrong": WRONG_FEEDBACK},
        "optimizer": {
            **{name: getattr(config.optimizer, knob) for name, knob in OPTIMIZER.items()},
            "adam_beta1": beta1,
            "adam_beta2": beta2,
            "epsilon": config.algorithm.eps_clip,
        },
        "threads": config.train.threads,
        "seed": seed,
        "micro_batch": MICRO_BATCH,
    }


def _updates(config: Config) -> int:
    """Return the number of optimizer steps in a round."""
    return config.train.minibatches * config.train.epochs


def _run(command: list[str], folder: Path, added: dict[str, str], without: str) -> str:
    """Run a command in an environment with some variables `added` and one left out; return its output."""
    environment = {key: value for key, value in os.environ.items() if key not in (without, "PYTHONPATH")} | added
    return run_program(command, folder, environment)
