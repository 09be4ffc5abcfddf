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

    `gpus` is for each rollout worker. `workers` and `judges` are the largest numbers of nodes that play, and that only
    grade; None for all.
    """

    gpus: int
    workers: int | None = None
    judges: int | None = None


@dataclass(frozen=True, slots=True)
class Gang:
    """The ranks of the trainer: `hosts` nodes, each with so many cores and GPUs for them."""

    hosts: int
    cores: int
    gpus: int


class PlacementError(ValueError):
    """The cluster has no room for the run; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The nodes that get a rollout worker, and those that get a worker that only grades (a judge)."""

    players: list[Node]
    judges: list[Node]


def check_gang(nodes: Sequence[Node], gang: Gang) -> None:
    """Raise PlacementError if too few nodes have room for the trainer's ranks."""
    able = [node for node in nodes if node.cpus >= gang.cores and node.gpus >= gang.gpus]
    if len(able) < gang.hosts:
        having = "; ".join(map(_free, nodes)) or "no node"
        raise PlacementError(
            f"the trainer needs {gang.hosts} node(s) with {gang.cores} core(s) and {gang.gpus} GPU(s) each, but the "
            f"cluster has {having}. Wait for other jobs, add nodes, or change trainer.hosts and ppo.parallel"
        )


def place(nodes: Sequence[Node], needs: Needs, players: int = 0, judges: int = 0) -> Placement:
    """Choose nodes for workers: those with the most free GPUs, then cores, first.

    A worker needs a core besides its GPUs, on which its episodes' agents and environments run.

    Args:
        nodes: nodes without a worker.
        needs: what the run needs.
        players: number of nodes that play already.
        judges: number of nodes that only grade already.
    """
    free = [node for node in nodes if node.cpus >= 1]
    able = sorted((node for node in free if node.gpus >= needs.gpus), key=_order)
    chosen = able[: _room(needs.workers, players)]
    others = sorted((node for node in free if node not in chosen), key=_order)
    return Placement(chosen, others[: _room(needs.judges, judges)])


def check(nodes: Sequence[Node], needs: Needs, placement: Placement) -> None:
    """Raise PlacementError if nobody plays, or nobody grades where nothing is played."""
    if placement.players or (needs.workers == 0 and placement.judges):
        return
    on_gpus = needs.gpus and needs.workers != 0
    wanted = f"1 core and {needs.gpus} GPU(s)" if on_gpus else "1 core"
    having = "; ".join(map(_free, nodes)) or "no node"
    lower = "add nodes, or lower inference.replicas or the parallel sizes in inference.extra_args"
    remedy = f"{lower} (cluster.gpus_per_worker)" if on_gpus else "or add nodes"
    raise PlacementError(
        f"a worker needs {wanted} on one node, the cluster has {having}. With trainer.launcher=ray the "
        f"trainer's ranks have taken their room already. Wait for other jobs, {remedy}"
    )


def table(nodes: Sequence[Node], placement: Placement, needs: Needs) -> str:
    """Say what goes where, a line for each node."""
    roles = dict.fromkeys((node.id for node in placement.players), f"plays and grades, with {needs.gpus} GPU(s)")
    roles |= dict.fromkeys((node.id for node in placement.judges), "grades")
    return "\n".join(f"  {_free(node)}: {roles.get(node.id, 'nothing')}" for node in nodes)


def _free(node: Node) -> str:
    return f"{node.name} with {node.cpus:g} cores and {node.gpus:g} GPU(s) free"


def _order(node: Node) -> tuple[float, float, str, str]:
    return -node.gpus, -node.cpus, node.name, node.id


def _room(most: int | None, present: int) -> int | None:
    return None if most is None else max(0, most - present)
