"""Advantages of action tokens.

`interface` defines the input (`Observed`) and the output (`Estimated`) of an estimator. `group` and `gae` are the
estimators; `normalise` scales their advantages. `estimate` selects the estimator by name, calls it and normalises.
A new estimator is one function in a module of its own, and one line `register_advantage` here.
"""

import dataclasses
from collections.abc import Sequence

from configs.train import Advantage
from tasks.registry import nearest
from tasks.train.advantages.gae import gae
from tasks.train.advantages.group import group
from tasks.train.advantages.interface import Estimated, Estimator, Observed
from tasks.train.advantages.normalise import normalise
from tasks.train.samples import Sample

__all__ = ["Estimated", "Estimator", "Observed", "check_estimator", "estimate", "register_advantage"]

_ESTIMATORS: dict[str, Estimator] = {}


def register_advantage(name: str, estimator: Estimator) -> None:
    """Make an estimator available as `ppo.advantage.type: name`."""
    _ESTIMATORS[name] = estimator


register_advantage("group", group)
register_advantage("gae", gae)


def check_estimator(name: str) -> None:
    """Raise ValueError if `ppo.advantage.type` is not registered."""
    if name not in _ESTIMATORS:
        registered = ", ".join(sorted(_ESTIMATORS))
        raise ValueError(
            f"ppo.advantage.type={name!r} is not registered{nearest(name, _ESTIMATORS)}; there are {registered}"
        )


def estimate(samples: Sequence[Sample], observed: Sequence[Observed], knobs: Advantage) -> Estimated:
    """Estimate advantages, normalise them by `knobs.normalisation`, and return them with the returns for a critic.

    Advantages that the estimator gives for penalties are added as they are.

    Raises:
        ValueError: no estimator has the name `knobs.type`.
    """
    check_estimator(knobs.type)
    estimated = _ESTIMATORS[knobs.type](samples, observed, knobs)
    advantages = normalise(
        samples, estimated.advantages, knobs.normalisation, centred=estimated.centred, bound=knobs.bound
    )
    if estimated.of_penalties is not None:
        advantages = [task + penalty for task, penalty in zip(advantages, estimated.of_penalties, strict=True)]
    return dataclasses.replace(estimated, advantages=advantages)
