"""The placement of a run's processes on the nodes of a cluster, computed before anything starts."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster, with what is free on it.

    Example: Node(id="4f1c…", name="10.0.0.7", cpus=64.0, gpus=8.0)
    """

    id: str
    name: str
    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run needs.

    `gpus` is for each worker; `workers` is the largest number of nodes that play, None for all.
    """

    gpus: int
    workers: int | None = None


class PlacementError(ValueError):
    """The cluster has no room for the run; the message says what is missing."""


def place(nodes: Sequence[Node], needs: Needs) -> list[Node]:
    """Return the nodes that get a rollout worker: those with the most free GPUs, then cores, first.

    A worker needs a core besides its GPUs, on which its episodes' agents and environments run.

    Raises:
        PlacementError: no node has room.
    """
    fitting = [node for node in nodes if _fits(node, needs)]
    if not fitting:
        raise PlacementError(missing(nodes, needs))
    fitting.sort(key=lambda node: (-node.gpus, -node.cpus, node.name, node.id))
    return fitting[: needs.workers]


def missing(nodes: Sequence[Node], needs: Needs) -> str:
    """Say what a rollout worker needs and what the cluster has."""
    wanted = f"1 core and {needs.gpus} GPU(s)" if needs.gpus else "1 core"
    having = "; ".join(f"{node.name}: {node.cpus:g} cores and {node.gpus:g} GPU(s) free" for node in nodes) or "no node"
    return (
        f"a rollout worker needs {wanted} on one node, the cluster has {having}. Wait for other jobs, add nodes, or "
        "lower inference.replicas or the parallel sizes in inference.extra_args (cluster.gpus_per_worker)"
    )


def table(nodes: Sequence[Node], chosen: Sequence[Node], needs: Needs) -> str:
    """Say what goes where, a line for each node."""
    lines = []
    for node in nodes:
        work = f"rollout worker with {needs.gpus} GPU(s)" if node in chosen else "nothing"
        lines.append(f"  {node.name}: {node.cpus:g} cores and {node.gpus:g} GPU(s) free: {work}")
    return "\n".join(lines)


def _fits(node: Node, needs: Needs) -> bool:
    return node.cpus >= 1 and node.gpus >= needs.gpus
