"""The knobs of processes beside the flow's own: where they run, and the workers that play episodes."""

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from configs.knobs import Knobs

_HOST_AND_PORT = r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}"


class Cluster(Knobs):
    """Processes beside the flow's own, which Ray runs on this host or on many. No knob here changes a number."""

    address: Annotated[str, Field(pattern=rf"^(local|auto|{_HOST_AND_PORT})$")] | None = None
    """Ray that runs the processes: `local` for one of this host alone, which the flow starts and ends, `auto` for the
    cluster that this host belongs to, or `host:port` of its head. Empty: one process, or `local` if more are needed.
    If it is set, or `workers_per_node` is 2 or more, episodes move into worker processes with vLLM servers of their
    own, unless `inference.urls` names some; the trainer stays in the flow's process, unless it must leave
    (`train.on_cluster`)."""
    workers_per_node: PositiveInt = 1
    """Rollout workers on each node, each with its own `inference.replicas` servers, or its share of `inference.urls`,
    and its own `rollout.concurrency` and `score.workers`. One is full at about 130,000 tokens/s, or 700 short
    episodes/s."""
    rollout_workers: PositiveInt | None = None
    """Largest number of rollout workers in all. Empty: as many as fit, also on nodes that join later. Nodes without one
    help to grade."""
    startup_timeout_s: PositiveFloat = 600.0
    """Longest wait for the first rollout worker, and for another one after all were lost."""
    silence_s: Annotated[float, Field(ge=5)] = 60.0
    """A worker that has not answered for so many seconds is lost: others play its episodes."""
