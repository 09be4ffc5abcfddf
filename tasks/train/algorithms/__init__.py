"""The algorithms by name, one file for each with formula, source and an example; the page of training has a table.

Add one with `register_algorithm("name", Class)`, or configure it as `package.module:Class`. R in their formulas is the
return of a turn (`tasks.train.returns`), and means are over the episodes of a problem that `mixed` compares
(`tasks.train.advantages`). With one turn and a reward at its end both are those of the papers. Ratios are to the policy
that sampled, whose logprobs are stored; only `ppo` and `gspo` recompute them.
"""

from typing import TYPE_CHECKING

from configs.algorithms import PPO, OwnAlgorithm
from configs.algorithms import Algorithm as Knobs
from tasks.registry import Registry
from tasks.train.advantages import check_estimator

if TYPE_CHECKING:
    from tasks.train.algorithms.algorithm import Algorithm
    from tasks.train.components import Loss

ALGORITHMS: "Registry[Algorithm]" = Registry("algorithm")
OWN_LOSSES: "Registry[Loss]" = Registry("loss", own="function", key="algorithm.loss")
"""The user's policy losses, which have no short names."""
register_algorithm = ALGORITHMS.register

# They import torch, which takes seconds.
for name, place in {
    "ppo": "ppo:PPO",
    "grpo": "grpo:GRPO",
    "dr_grpo": "dr_grpo:DrGRPO",
    "rloo": "rloo:RLOO",
    "reinforce_pp": "reinforce_pp:ReinforcePP",
    "dapo": "dapo:DAPO",
    "gspo": "gspo:GSPO",
    "gspo_token": "gspo:GSPOToken",
    "cispo": "cispo:CISPO",
    "max_rl": "max_rl:MaxRL",
    "mis": "mis:MIS",
    "rft": "rft:RFT",
    "dpo": "dpo:DPO",
    "kto": "kto:KTO",
    "opd": "opd:OPD",
    "echo": "echo:Echo",
}.items():
    register_algorithm(name, f"{__name__}.{place}")


def check_algorithm(knobs: Knobs) -> None:
    """Check what an algorithm names: a class and a loss of the user's, its arguments, an advantage estimator.

    Raises:
        ValueError: something does not exist, an argument is wrong, or the user's code fails on made-up episodes.
    """
    if isinstance(knobs, PPO):
        check_estimator(knobs.advantage.type)
    if isinstance(knobs, OwnAlgorithm):
        ALGORITHMS.check_arguments(knobs.type, knobs.args)
    if loss := getattr(knobs, "loss", None):
        OWN_LOSSES.find(loss)
    if loss or isinstance(knobs, OwnAlgorithm):
        from tasks.train.algorithms.trial import try_algorithm

        try_algorithm(make_algorithm(knobs, max_new_tokens=1024))


def make_algorithm(knobs: Knobs, max_new_tokens: int) -> "Algorithm":
    """Return the algorithm that the section `algorithm` describes.

    Raises:
        ValueError: its class does not exist, or cannot be made.
    """
    from tasks.train.algorithms.algorithm import AlgorithmContext

    arguments = knobs.args if isinstance(knobs, OwnAlgorithm) else {}
    return ALGORITHMS.make(knobs.type, AlgorithmContext(knobs, max_new_tokens), arguments)
