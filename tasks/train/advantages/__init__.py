"""Advantages of action tokens. An estimator is one function in a short module, and one line here."""

import dataclasses
from collections.abc import Sequence

from configs.schema import Advantage
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
    """Refuse a `ppo.advantage.type` that is not registered, with a ValueError."""
    if name not in _ESTIMATORS:
        known = ", ".join(sorted(_ESTIMATORS))
        raise ValueError(
            f"ppo.advantage.type={name!r} is not registered{nearest(name, _ESTIMATORS)}; there are {known}"
        )


def estimate(samples: Sequence[Sample], observed: Sequence[Observed], knobs: Advantage) -> Estimated:
    """Advantages, normalised as `knobs.normalisation` says, and the returns for a critic.

    Raises:
        ValueError: no estimator has the name `knobs.type`.
    """
    check_estimator(knobs.type)
    estimated = _ESTIMATORS[knobs.type](samples, observed, knobs)
    normalised = normalise(samples, estimated.advantages, knobs.normalisation, centred=estimated.centred)
    return dataclasses.replace(estimated, advantages=normalised)
