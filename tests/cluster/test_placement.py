"""What goes where, and who follows a lost worker; logs of nodes that cannot be stored hide no cause."""

from typing import Any

import pytest

from configs import load
from storage.errors import StorageError
from storage.objects.store import Store
from tasks.cluster.connection import keep_logs
from tasks.cluster.placement import LostWorkers, Needs, Node, PlacementError, Seat, check, place, table
from tasks.cluster.workers import needs_of
from tasks.inference.api import InferenceError
from tasks.rollout.remote.interface import WorkerFailedError, WorkerLostError


def nodes(*shapes: tuple[float, float]) -> list[Node]:
    return [Node(str(number), f"host-{number}", *shape) for number, shape in enumerate(shapes)]


def test_nodes_with_the_most_gpus_play() -> None:
    """The largest nodes play, those without enough GPUs grade, and a node without a free core gets nothing."""
    present, needs = nodes((4, 0), (8, 8), (8, 4), (0, 8)), Needs(gpus=4, per_node=2)
    seats = place(present, needs)
    assert seats == [Seat("1", 0), Seat("2", 0), Seat("1", 1), Seat("0", None)]
    lines = table(present, seats, needs)
    assert "host-1 with 8 cores and 8 GPU(s) free: 2 rollout worker(s), each with 4 GPU(s)" in lines
    assert "host-0 with 4 cores and 0 GPU(s) free: grades" in lines
    assert "host-3 with 0 cores and 8 GPU(s) free: nothing" in lines


@pytest.mark.parametrize(
    ("needs", "players", "graders"),
    [(Needs(0), 3, 0), (Needs(0, workers=1), 1, 2), (Needs(0, per_node=2), 4, 0), (Needs(0, workers=0), 0, 3)],
)
def test_limits(needs: Needs, players: int, graders: int) -> None:
    """Limits on the number of workers hold; the other nodes grade."""
    plays = [seat.plays for seat in place(nodes((1, 0), (1, 0), (2, 0)), needs)]
    assert (plays.count(True), plays.count(False)) == (players, graders)


def test_present_workers_count() -> None:
    """A node that joins, or only grades, gets a rollout worker only if one is missing."""
    joined, needs = nodes((2, 0)), Needs(0, per_node=2, workers=2)
    assert place(joined, needs, {Seat("other", 0)}) == [Seat("0", 0)]
    assert place(joined, needs, {Seat("other", 0), Seat("0", None)}) == [Seat("0", 0)]
    assert place(joined, needs, {Seat("other", 0), Seat("other", 1)}) == [Seat("0", None)]
    assert place(joined, needs, {Seat("0", 1)}) == [Seat("0", 0)]


def test_a_node_rests_after_a_loss_and_may_break(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that was useful is replaced after a rest, others after a longer pause, until none is."""
    now = [0.0]
    monkeypatch.setattr("tasks.cluster.placement.time.monotonic", lambda: now[0])
    lost, pauses = LostWorkers(rest_s=1.0), list[float]()
    assert lost.may_start("a")
    for useful in (True, False, True, False, False, False, False):
        lost.note("a", WorkerLostError("killed"), useful=useful)
        began = now[0]
        while not lost.may_start("a"):
            now[0] += 0.5
        pauses.append(now[0] - began)
    assert pauses == [1, 10, 1, 10, 10, 10, 10]
    lost.note("a", WorkerLostError("killed"), useful=False)
    now[0] += 1e6
    assert not lost.may_start("a")
    assert isinstance(lost.cause(), WorkerLostError)
    lost.note("b", WorkerLostError("killed"), useful=True)
    assert lost.cause() is None
    lost = LostWorkers()
    lost.note("b", WorkerFailedError(InferenceError("no GPU"), ""), useful=True)
    assert not lost.may_start("b")
    assert isinstance(lost.cause(), InferenceError)


def test_a_worker_needs_the_gpus_of_its_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """`math-32b` divides each of four servers among two GPUs, all on one node, besides the trainer's four.

    A cluster with too few GPUs or without a node is refused; the message names what it has.
    """
    monkeypatch.setattr("tasks.cluster.workers.cpu_build", lambda: False)
    needs = needs_of(load("math-32b"), playing=True)
    assert needs == Needs(gpus=8)
    assert [seat for seat in place(nodes(*[(32, 0)] * 4, (64, 8)), needs) if seat.plays] == [Seat("4", 0)]
    told = r"a worker needs 1 core and 8 GPU\(s\) on one node, .* has {}.* or lower inference.replicas or "
    for present, having in ((nodes((32, 4), (32, 4)), "host-0 with 32 cores and 4 GPU.*; host-1"), ([], "no node")):
        with pytest.raises(PlacementError, match=told.format(having)):
            check(present, needs, place(present, needs))


def test_a_store_that_cannot_be_written_hides_no_cause(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise StorageError("no route to host")

    monkeypatch.setattr(Store, "write", refuse)
    lines: list[str] = []
    keep_logs(store, "smoke", [], [ValueError("the cause")], lines.append)
    assert lines == ["the logs of the nodes stay there, in logs/smoke of their storage.cache: no route to host"]
