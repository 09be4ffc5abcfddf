"""The algorithms by name: a class for each, with formula, source and an example; the page of training has a table.

R in their formulas is the return of a turn (`tasks.train.returns`), and means are over the episodes of a problem that
`mixed` compares (`tasks.train.advantages`). With one turn and a reward at its end both are those of the papers. Ratios
are to the policy that sampled, whose logprobs are stored; only `ppo` and `gspo` recompute them.
"""

from typing import TYPE_CHECKING

from configs.algorithms import FORMULAS
from configs.algorithms import Algorithm as Knobs
from tasks.registry import Registry

if TYPE_CHECKING:
    from tasks.train.algorithms.algorithm import Algorithm
    from tasks.train.components import Loss

ALGORITHMS: "Registry[Algorithm]" = Registry("algorithm")
OWN_LOSSES: "Registry[Loss]" = Registry("loss", own="function", key="algorithm.loss")
"""The user's policy losses, which have no short names."""
for name, formula in FORMULAS.items():  # imported when it is used: torch takes seconds
    ALGORITHMS.register(name, f"{__name__}.{formula}")


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
