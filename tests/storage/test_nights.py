"""The log of nights is read as it was written, or not at all; `verify` checks it, and `repair` does not change it."""

from pathlib import Path
from typing import Any

import pytest

from storage import layout
from storage.errors import ConflictError, StorageError
from storage.logs.leases import Lease, own_identity
from storage.logs.log import Log
from storage.logs.nights import End, Night, Nights
from storage.maintenance.verify import check_logs, repair
from storage.objects.store import Store

NIGHT = Night(
    number=1,
    run="nightly-0001",
    champion=None,
    move=None,
    problems=layout.problems("0a"),
    fresh=layout.problems("0b"),
    accepted=None,
    seen=layout.problems("0c"),
    counts={"new": 3, "waiting": 0, "replayed": 0, "dropped": 0},
    sets={"held-out": layout.problems("0d")},
    config={"run": {"name": "nightly-0001"}},
    at="2026-11-21T02:00:00+00:00",
)
CHALLENGER = layout.checkpoint("nightly-0001", 3)
END = End(
    number=1,
    outcome="promoted",
    challenger=CHALLENGER,
    decision=layout.decision("nightly-0001"),
    move=1,
    accepted=layout.problems("0b"),
    waiting=None,
    at="2026-11-21T03:00:00+00:00",
)


@pytest.fixture
def ended(store: Store) -> Nights:
    """Return a log in which the first night has ended."""
    nights = Nights(store, "nightly")
    nights.begin(NIGHT)
    nights.trained(1, CHALLENGER)
    nights.end(END)
    return nights


def test_two_writers_never_both_append(store: Store) -> None:
    """The lease separates the writers. If the lease fails, the log does.

    Then a writer stops if another one has appended since it read the log.
    """
    one, other = Nights(store, "nightly"), Nights(Store(store.root), "nightly")
    assert one.read() == other.read() == []
    one.begin(NIGHT)
    one.end(END)
    with pytest.raises(StorageError, match="'nightly' is being written by another process"):
        other.begin(NIGHT)
    with Lease(store, "nightly", label="a night") as lease:
        late = Nights(store, "nightly", lease)
        late.read()
        successor = {"holder": own_identity() | {"lease": "another"}, "label": "another", "at": "", "ttl_s": 60}
        Log(store, layout.lease("nightly")).append(successor)
        with pytest.raises(ConflictError):
            late.begin(NIGHT.model_copy(update={"number": 2}))
    assert len(one.read()) == 1


@pytest.mark.parametrize("damage", ["lost", "flipped", "twice"])
def test_a_damaged_log_is_refused_and_reported(ended: Nights, store: Store, tmp_path: Path, damage: str) -> None:
    """It is not read as a shorter log: it is the watermark, so an overlooked night would be trained on again."""
    path = tmp_path / "store/retraining/nightly/00000000.json"
    if damage == "lost":
        path.unlink()
    elif damage == "flipped":
        path.write_bytes(path.read_bytes().replace(b"nightly-0001", b"nightly-0007"))
    else:  # night 2 is followed by an entry of night 1
        ended.begin(NIGHT)
    reopened = store if damage == "lost" else Store(store.root)
    with pytest.raises(StorageError):
        Nights(reopened, "nightly").read()
    assert [finding.version for finding in check_logs(Store(store.root)).findings] == ["retraining/nightly"]
    assert repair(Store(store.root)) == ([], [])


@pytest.mark.parametrize(
    "entry",
    [{"trained": {"number": 1, "challenger": CHALLENGER}}, {"began": {"number": "x"}}, {"ended": 3}, {"began": None}],
)
def test_verify_reports_an_entry_that_is_not_a_night(entry: dict[str, Any], store: Store) -> None:
    """The digest of the entry is right, but its content is checked as well, and reported without a traceback."""
    Log(store, layout.retraining("nightly")).append(entry)
    (finding,) = check_logs(store).findings
    assert finding.version == layout.retraining("nightly")
    assert "retraining 'nightly' has lost an entry" in finding.problem
