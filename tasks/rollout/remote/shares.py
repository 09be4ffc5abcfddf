"""The shares of this host's processes (`rollout.processes`) in its servers, GPUs, episodes and verifier processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from configs import Config
from tasks.inference.engine import devices_of_servers


@dataclass(frozen=True, slots=True)
class Share:
    """What one process has: a configuration with its own numbers, and the GPUs of each server that it starts."""

    config: Config
    devices: Sequence[Sequence[str]]


def deal_shares(config: Config) -> list[Share]:
    """Deal out what this host has; each process gets neighbours, and as many episodes as its servers are of all.

        processes=2    urls=[a, b, c]  concurrency=512      [a], 170 and [b, c], 342
        processes=2    replicas=4      GPUs 0 1 2 3 4       GPUs [1] [2] and [3] [4]; the trainer has the first
        processes=4    score.workers=2                      1 each: the least

    Raises:
        InferenceError: this machine has fewer GPUs than the servers need.
    """
    settings, count = config.inference, config.rollout.processes
    servers, devices = len(settings.urls) or settings.replicas, devices_of_servers(settings)
    ends = [servers * number // count for number in range(count + 1)]
    return [Share(_part(config, start, end), devices[start:end]) for start, end in pairwise(ends)]


def _part(config: Config, start: int, end: int) -> Config:
    """Return the configuration of the process that has the servers from `start` up to `end`."""
    inference, rollout, score = config.inference, config.rollout, config.score
    servers = len(inference.urls) or inference.replicas

    def part_of(total: int) -> int:
        return max(1, total * end // servers - total * start // servers)

    return config.model_copy(
        update={
            "inference": inference.model_copy(update={"urls": inference.urls[start:end], "replicas": end - start}),
            "rollout": rollout.model_copy(update={"processes": 1, "concurrency": part_of(rollout.concurrency)}),
            "score": score.model_copy(update={"workers": part_of(score.workers)}),
        }
    )
