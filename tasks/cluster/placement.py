"""Where a run's processes go, computed before anything starts, and where a lost worker gets a successor."""

import math
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tasks.rollout.remote.interface import WorkerFailedError

_PAUSE_S = 10.0
"""Time before another worker starts on a node whose last one was lost before it finished an episode."""
_MOST_LOSSES = 5
"""After so many such losses in a row a node counts as broken."""


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

    `gpus` is for each rollout worker, `per_node` the largest number of them on a node, `workers` that on all nodes
    (None: as many as fit).
    """

    gpus: int
    per_node: int = 1
    workers: int | None = None


@dataclass(frozen=True, slots=True)
class Seat:
    """The position of a worker: the rollout worker of a node with a `number`, or, with None, the grader of the node."""

    node: str
    number: int | None

    @property
    def plays(self) -> bool:
        return self.number is not None


class PlacementError(ValueError):
    """The run does not fit on the cluster; the message says what is missing."""


def check_ranks(nodes: Sequence[Node], ranks: int, cpus: float, gpus: float) -> None:
    """Raise PlacementError unless the trainer's ranks fit on the nodes, each with some cores and GPUs."""
    most = sum(int(min(node.cpus // cpus, node.gpus // gpus if gpus else math.inf)) for node in nodes)
    if most < ranks:
        wanted = f"the trainer needs {cpus:g} core(s) and {gpus:g} GPU(s) for each of {ranks} rank(s)"
        raise _no_room(wanted, nodes, "change train.parallel")


def place(nodes: Sequence[Node], needs: Needs, taken: Collection[Seat] = ()) -> list[Seat]:
    """Choose seats for workers that are missing: first one on each node, those with the most free GPUs and cores first.

    A worker needs a core besides its GPUs, on which its episodes' agents and environments run. A node without any
    worker grades, if it has a free core.

    Args:
        nodes: the nodes, with what is free on them.
        needs: what the run needs.
        taken: the seats that have a worker.
    """
    able = sorted(nodes, key=lambda node: (-node.gpus, -node.cpus, node.name, node.id))
    playing = sum(seat.plays for seat in taken)
    chosen, begun = list[Seat](), Counter[str]()
    for number in range(needs.per_node):
        for node in able:
            seat, more = Seat(node.id, number), begun[node.id] + 1
            fits = node.cpus >= more and node.gpus >= more * needs.gpus
            if seat not in taken and fits and (needs.workers is None or playing < needs.workers):
                chosen.append(seat)
                begun[node.id] += 1
                playing += 1
    busy = {seat.node for seat in (*taken, *chosen)}
    return [*chosen, *(Seat(node.id, None) for node in able if node.id not in busy and node.cpus >= 1)]


def check(nodes: Sequence[Node], needs: Needs, seats: Sequence[Seat]) -> None:
    """Raise PlacementError if nobody plays, or nobody grades where nothing is played."""
    if not any(seat.plays or needs.workers == 0 for seat in seats):
        wanted = f"a worker needs 1 core and {needs.gpus} GPU(s) on one node, besides what the trainer's ranks have"
        raise _no_room(wanted, nodes, "lower inference.replicas or inference.tensor_parallel")


def _no_room(wanted: str, nodes: Sequence[Node], remedy: str) -> PlacementError:
    having = "; ".join(map(_free, nodes)) or "no node"
    return PlacementError(f"{wanted}, but the cluster has {having}. Wait for other jobs, add nodes, or {remedy}")


def table(nodes: Sequence[Node], seats: Sequence[Seat], needs: Needs) -> str:
    """Say what goes where, a line for each node."""
    players, all_seats = Counter(seat.node for seat in seats if seat.plays), {seat.node for seat in seats}
    roles = dict.fromkeys(all_seats, "grades") | {
        node: f"{count} rollout worker(s), each with {needs.gpus} GPU(s)" for node, count in players.items()
    }
    return "\n".join(f"  {_free(node)}: {roles.get(node.id, 'nothing')}" for node in nodes)


class LostWorkers:
    """Decides where another worker may start after one was lost; used under a lock of the caller.

    A node is broken, and gets no other worker, if one of its workers ended with an error of its own, or if it loses one
    after the other.

    Args:
        rest_s: shortest time between a loss and the next start, in which servers of the lost worker end.
    """

    def __init__(self, rest_s: float = 0.0) -> None:
        self._rest_s, self._last = rest_s, dict[str, float]()
        self._losses = Counter[str]()
        """Workers of each node that were lost before they finished an episode, since the last one that did."""
        self.broken: dict[str, BaseException] = {}
        """The errors of the nodes that get no other worker."""

    def note(self, node: str, error: BaseException, *, useful: bool) -> None:
        """Note that a worker of a node was lost, and whether it had finished an episode or graded a shard."""
        self._last[node] = time.monotonic()
        self._losses[node] = 0 if useful else self._losses[node] + 1
        if isinstance(error, WorkerFailedError) or self._losses[node] >= _MOST_LOSSES:
            self.broken[node] = error

    def cause(self) -> BaseException | None:
        """Return the error of the node that broke first; None unless all nodes that have lost a worker are broken."""
        if not self.broken or self.broken.keys() != self._last.keys():
            return None
        first = next(iter(self.broken.values()))
        return first.cause if isinstance(first, WorkerFailedError) else first

    def may_start(self, node: str) -> bool:
        """Return whether a worker may start on a node."""
        pause = _PAUSE_S if self._losses[node] else self._rest_s
        return node not in self.broken and time.monotonic() >= self._last.get(node, -pause) + pause


def _free(node: Node) -> str:
    return f"{node.name} with {node.cpus:g} cores and {node.gpus:g} GPU(s) free"
