"""How an evaluation set is played: part of an evaluation's name, so that only what was played alike is compared."""

import hashlib
import json
from dataclasses import dataclass
from typing import Literal

from configs import Config
from storage import layout
from storage.version_names import EvaluationVersion, PolicyVersion, ProblemsVersion


@dataclass(frozen=True, slots=True)
class Protocol:
    """One way to play a set: one greedy episode of each problem, or several sampled ones.

    Example: Protocol("greedy", "held-out", "problems/1f0c4a7be23d5566", samples=1, temperature=0.0, digest="9a0b…")
    """

    mode: Literal["greedy", "sampled"]
    set_name: str
    problem_set: ProblemsVersion  # version
    samples: int  # of each problem
    temperature: float
    digest: str

    def evaluation(self, policy: PolicyVersion) -> EvaluationVersion:
        """The version of checkpoint `policy`'s evaluation."""
        return layout.evaluation(policy, self.set_name, f"{self.mode}-{self.digest}")


def greedy(config: Config, set_name: str, problem_set: ProblemsVersion) -> Protocol:
    """One episode of each problem, at temperature 0."""
    return _protocol("greedy", config, set_name, problem_set, 1, 0.0)


def sampled(config: Config, set_name: str, problem_set: ProblemsVersion) -> Protocol | None:
    """`evaluation.samples` episodes of each problem, for pass@k; None where it is 0."""
    settings = config.evaluation
    if not settings.samples:
        return None
    return _protocol("sampled", config, set_name, problem_set, settings.samples, settings.temperature)


def _protocol(
    mode: Literal["greedy", "sampled"],
    config: Config,
    set_name: str,
    problem_set: ProblemsVersion,
    samples: int,
    heat: float,
) -> Protocol:
    """The digest covers all that decides what is played: set, agent, environment, sampling and its seed."""
    identity = {
        "problem_set": problem_set,
        "agent": config.agent.model_dump(mode="json"),
        "environment": config.environment.model_dump(mode="json"),
        "samples": samples,
        "temperature": heat,
        "max_new_tokens": config.sampling.max_new_tokens,
        "max_model_len": config.inference.max_model_len,
        "dtype": config.inference.dtype,
        "seed": config.run.seed if heat else None,
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    return Protocol(mode, set_name, problem_set, samples, heat, digest)
