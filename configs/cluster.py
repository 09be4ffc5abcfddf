"""The knobs of processes beside the flow's own: the trainer's ranks and the workers on a cluster."""

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from configs.knobs import Knobs, NonNegativeInt

_HOST_AND_PORT = r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}"


class Trainer(Knobs):
    """Place, time limits and restarts of the trainer's ranks. No knob here changes a number."""

    on_cluster: bool = False
    """Run a trainer of one rank on the cluster (`cluster.address`), too, and not in the flow's process. Several ranks
    (`ppo.parallel`), and the trainer of a stream (`run.overlap`), are always processes of their own in Ray."""
    timeout_s: Annotated[float, Field(ge=5, le=86_400)] = 600.0
    """Longest wait of a rank for the others, for example until those of its node have fetched a checkpoint. After it,
    all ranks end: one of them hangs, or a node is unreachable."""
    startup_timeout_s: Annotated[float, Field(ge=5, le=86_400)] = 600.0
    """Longest wait in each step of starting the ranks."""
    max_restarts: NonNegativeInt = 0
    """Number of times in a flow run that all ranks start again, from the last checkpoint, after one was lost."""


class Cluster(Knobs):
    """Processes beside the flow's own, which Ray runs on this host or on many. No knob here changes a number."""

    address: Annotated[str, Field(pattern=rf"^(local|auto|{_HOST_AND_PORT})$")] | None = None
    """Ray that runs the processes: `local` for one of this host alone, which the flow starts and ends, `auto` for the
    cluster that this host belongs to, or `host:port` of its head. Empty: one process, or `local` if more are needed.
    If it is set, or `workers_per_node` is 2 or more, episodes move into worker processes with vLLM servers of their
    own, unless `inference.urls` names some; the trainer stays in the flow's process, unless it must leave
    (`trainer.on_cluster`)."""
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
