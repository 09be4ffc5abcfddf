"""The protocol of an evaluation: how a set is played.

It is a part of the evaluation's name, so only evaluations with the same protocol are compared.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Literal

from configs import Config
from storage import layout
from storage.version_names import EvaluationVersion, PolicyVersion, ProblemsVersion
from tasks.registry import PLAYS, own_code


@dataclass(frozen=True, slots=True)
class Protocol:
    """One way to play a set: one greedy episode of each problem, or several sampled episodes.

    Example: Protocol("greedy", "held-out", "problems/1f0c4a7be23d5566", samples=1, temperature=0.0, digest="9a0b…")
    """

    mode: Literal["greedy", "sampled"]
    set_name: str
    problem_set: ProblemsVersion
    samples: int  # episodes of each problem
    temperature: float
    digest: str  # of everything that decides what is played

    def evaluation(self, policy: PolicyVersion) -> EvaluationVersion:
        """Return the version of the evaluation of checkpoint `policy`."""
        return layout.evaluation(policy, self.set_name, f"{self.mode}-{self.digest}")


def greedy(config: Config, set_name: str, problem_set: ProblemsVersion) -> Protocol:
    """Return the protocol with one episode of each problem, at temperature 0."""
    return Protocol("greedy", set_name, problem_set, 1, 0.0, _digest(config, problem_set, 1, 0.0))


def sampled(config: Config, set_name: str, problem_set: ProblemsVersion) -> Protocol | None:
    """Return the protocol with `evaluation.samples` episodes of each problem, for pass@k; None if it is 0."""
    samples, temperature = config.evaluation.samples, config.evaluation.temperature
    digest = _digest(config, problem_set, samples, temperature)
    return Protocol("sampled", set_name, problem_set, samples, temperature, digest) if samples else None


def _digest(config: Config, problem_set: ProblemsVersion, samples: int, temperature: float) -> str:
    """Return a digest of everything that decides what is played: set, agent, environment, their code, sampling."""
    # Without tools an evaluation has the name that it had before there were tools.
    without = None if config.agent.tools else {"tools"}
    identity = {
        "problem_set": problem_set,
        "agent": config.agent.model_dump(mode="json", exclude=without),
        "environment": config.environment.model_dump(mode="json"),
        "samples": samples,
        "temperature": temperature,
        "max_new_tokens": config.sampling.max_new_tokens,
        "max_model_len": config.inference.max_model_len,
        "dtype": config.inference.dtype,
        "seed": config.run.seed if temperature else None,
    }
    if members := config.problems.members:
        identity["members"] = [each.model_dump(mode="json", include={"name", *PLAYS}) for each in members]
    identity["without_room"] = "left out"  # older programs played these problems, too
    if code := own_code(config, PLAYS):
        identity["code"] = code
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
