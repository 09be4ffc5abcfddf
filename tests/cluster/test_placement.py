"""What goes where is computed before anything starts."""

import pytest

from tasks.cluster.placement import Needs, Node, PlacementError, check, place, table


def nodes(*shapes: tuple[float, float]) -> list[Node]:
    return [Node(str(number), f"host-{number}", *shape) for number, shape in enumerate(shapes)]


def test_nodes_with_the_most_gpus_play() -> None:
    """The largest nodes play, the others grade, and a node without a free core gets nothing."""
    present = nodes((4, 0), (8, 8), (8, 4), (0, 8))
    placement = place(present, Needs(gpus=4))
    assert [node.name for node in placement.players] == ["host-1", "host-2"]
    assert [node.name for node in placement.judges] == ["host-0"]
    assert "host-3 with 0 cores and 8 GPU(s) free: nothing" in table(present, placement, Needs(gpus=4))


@pytest.mark.parametrize(
    ("needs", "players", "judges"),
    [(Needs(0), 3, 0), (Needs(0, workers=1), 1, 2), (Needs(0, workers=1, judges=1), 1, 1), (Needs(0, workers=0), 0, 3)],
)
def test_limits(needs: Needs, players: int, judges: int) -> None:
    """Limits on the number of workers and judges hold."""
    placement = place(nodes((1, 0), (1, 0), (2, 0)), needs)
    assert (len(placement.players), len(placement.judges)) == (players, judges)


def test_present_workers_count() -> None:
    """A node that joins gets a worker only if there is room for one more."""
    joined = nodes((2, 0))
    assert place(joined, Needs(0, workers=2), players=1).players == joined
    assert place(joined, Needs(0, workers=2, judges=0), players=2).judges == []


def test_what_is_missing_is_told() -> None:
    """A cluster without room is refused with what it has."""
    present, needs = nodes((4, 2), (4, 0)), Needs(gpus=4)
    with pytest.raises(PlacementError, match=r"needs 1 core and 4 GPU\(s\) on one node, the cluster has host-0 with 4"):
        check(present, needs, place(present, needs))
    with pytest.raises(PlacementError, match="the cluster has no node"):
        check([], needs, place([], needs))
