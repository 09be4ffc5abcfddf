"""The algorithms by name: a class for each, with formula, source and an example; the page of training has a table.

Add one with `register_algorithm("name", Class)`, or configure it as `package.module:Class`. R in their formulas is the
return of a turn (`tasks.train.returns`), and means are over the episodes of a problem that `mixed` compares
(`tasks.train.advantages`). With one turn and a reward at its end both are those of the papers. Ratios are to the policy
that sampled, whose logprobs are stored; only `ppo` and `gspo` recompute them.
"""

from typing import TYPE_CHECKING

from configs.algorithms import Algorithm as Knobs
from tasks.registry import Registry

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
    "grpo": "group:GRPO",
    "dr_grpo": "group:DrGRPO",
    "rloo": "group:RLOO",
    "reinforce_pp": "group:ReinforcePP",
    "dapo": "group:DAPO",
    "gspo": "ratios:GSPO",
    "gspo_token": "ratios:GSPOToken",
    "cispo": "ratios:CISPO",
    "max_rl": "group:MaxRL",
    "mis": "ratios:MIS",
    "rft": "likelihood:RFT",
    "dpo": "likelihood:DPO",
    "kto": "likelihood:KTO",
    "opd": "ratios:OPD",
    "echo": "echo:Echo",
}.items():
    register_algorithm(name, f"{__name__}.{place}")


def check_algorithm(knobs: Knobs) -> None:
    """Check what an algorithm names: a class of the user's with its arguments, a loss.

    Raises:
        ValueError: something does not exist, an argument is wrong, or the user's code fails on made-up episodes.
    """
    if knobs.own:
        ALGORITHMS.check_arguments(knobs.type, getattr(knobs, "args", {}))
    if loss := getattr(knobs, "loss", None):
        OWN_LOSSES.find(loss)
    if loss or knobs.own:
        from tasks.train.algorithms.algorithm import try_algorithm

        try_algorithm(make_algorithm(knobs, max_new_tokens=1024))


def make_algorithm(knobs: Knobs, max_new_tokens: int) -> "Algorithm":
    """Return the algorithm that the section `algorithm` describes.

    Raises:
        ValueError: its class does not exist, or cannot be made.
    """
    from tasks.train.algorithms.algorithm import AlgorithmContext

    return ALGORITHMS.make(knobs.type, AlgorithmContext(knobs, max_new_tokens), getattr(knobs, "args", {}))
