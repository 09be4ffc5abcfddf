"""The live page: what it says follows from the store alone, and it changes nothing there."""

import hashlib
from datetime import UTC, datetime
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from storage import layout
from storage.errors import StorageError
from storage.logs.leases import Lease, tenures
from storage.objects.store import Store
from storage.records import TRAJECTORY_SCHEMA
from storage.versions import datasets
from storage.versions.drafts import Draft, JournaledDraft, Provenance
from tasks.metrics.show import seconds_left
from tasks.watch.page import State, create_app
from tests.support.metrics_run import CONFIG, ROLLOUT, SCORES, UPDATE, commit, commit_iteration, commit_run
from tests.support.reader_helpers import EVIL, HOSTILE, spoken


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(f"{tmp_path}")
    commit_run(store, 2)
    return store


def contents(store: Store) -> dict[str, str]:
    files = (path for path in Path(store.root).rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_each_commit_moves_the_run_on(store: Store) -> None:
    """The stage that is going on follows from what is committed; tokens and seconds are sums over the iterations."""
    state = State(store, "r")
    assert (state.done, state.total, state.stage, state.is_working) == (2, 4, "evaluation", False)
    assert state.spent["rollout"] == {"seconds": 2.0, "total_s": 4.0, "tokens": 160, "tokens_per_second": 40}
    commit(store, layout.trajectories("r", 2), "trajectories", ROLLOUT)
    assert State(store, "r").stage == "score"
    commit(store, layout.scores("r", 2, "5c0e"), "scores", SCORES)
    assert State(store, "r").stage == "train"
    commit(store, layout.checkpoint("r", 3), "checkpoint", UPDATE)
    commit_iteration(store, 3)
    state = State(store, "r")
    assert (state.done, state.left_s, state.stored) == (4, None, 0)  # nothing is known of its flow runs
    with pytest.raises(StorageError, match="is no run: check the name"):
        State(store, "another")


def test_time_counts_while_a_lease_is_held(store: Store) -> None:
    """Two flow runs are two tenures, and the time between them is not worked; the one that holds the lease works."""
    labels = "flow run a", "gc", "flow run b"
    for label in labels:
        with Lease(store, "r", label=label):
            assert State(store, "r").is_working == (label != "gc")
    held = tenures(store, "r")
    assert [(each.label, each.ended) for each in held] == [(label, "it was released") for label in labels]
    state = State(store, "r")
    assert state.worked_s == pytest.approx(held[0].seconds + held[2].seconds)
    assert (state.is_working, state.holder, state.left_s) == (False, held[2], None)
    with Lease(store, "r", label="flow run c"):
        commit_iteration(store, 2)
        assert State(store, "r").left_s is not None
    night = [{"stage": "train", "at": f"2026-11-{at}+00:00"} for at in ("27T22:00:10", "28T08:00:20", "28T08:00:50")]
    assert seconds_left(datetime(2026, 11, 28, 8, tzinfo=UTC), night, 3) == 75  # of 20 and 30 seconds


def test_the_journal_tells_of_an_unfinished_rollout(store: Store, tmp_path: Path) -> None:
    """Episodes in finished shards count before their data set is committed."""
    version, expected = layout.trajectories("r", 2), State(store, "r").expected
    rollout = CONFIG["rollout"]
    assert expected == rollout["problems_per_iteration"] * (rollout["generation_size"] or rollout["group_size"])
    (file := tmp_path / "shard").write_bytes(b"rows")
    with JournaledDraft(store, version, "trajectories") as draft:
        draft.add_shard(file, "part-00000.parquet", 5, [])
        assert State(store, "r").stored == 5


def test_alarms_are_raised_where_they_begin(store: Store) -> None:
    """Faults and updates that learn nothing raise an alarm, once as long as they stay."""
    for number in (2, 3):
        commit(store, layout.trajectories("r", number), "trajectories", ROLLOUT | {"faults": {"policy": 0.25}})
        commit(store, layout.checkpoint("r", number + 1), "checkpoint", UPDATE | {"reward/all_minimal": 1.0})
    alarms = State(store, "r").alarms
    assert [number for number, _ in alarms] == [2, 2]
    for words in ("25.0% of the episodes ended", "No turn is right"):
        assert sum(text.startswith(words) for _, text in alarms) == 1


def test_the_page_is_read_only_and_shows_data_as_text(store: Store) -> None:
    """Page and pictures change no object, hostile text is escaped, and an error is a page that refreshes, too."""
    part, client = f"reward/{HOSTILE}", TestClient(create_app(store, "r", 3600), base_url="http://127.0.0.1")
    with Draft(store, layout.trajectories("r", 2), "trajectories") as draft:
        datasets.write_rows(draft, TRAJECTORY_SCHEMA, [spoken(2, HOSTILE, [HOSTILE], EVIL, prompt=HOSTILE)], 50)
        draft.commit(Provenance(config=CONFIG), [], ROLLOUT)
    commit(store, layout.scores("r", 2, "5c0e"), "scores", SCORES | {"parts": {HOSTILE: 1.0}})
    before = contents(store)
    page = client.get("/")
    assert (page.status_code, EVIL in page.text, "&lt;script&gt;" in page.text) == (200, False, True)
    assert 'http-equiv="refresh"' in page.text
    assert 'http-equiv="refresh"' not in client.get("/?still").text
    for dark in (False, True):
        picture = client.get("/curve", params={"name": part, "dark": dark, "rows": 1})
        assert (picture.status_code, b"<svg" in picture.content, b"<script" in picture.content) == (200, True, False)
    assert client.get("/curve?name=unknown&rows=1").status_code == 404
    assert client.post("/").status_code == 405
    assert contents(store) == before
    store.write("runs/r/metrics/000000.jsonl", b"{")
    failed = client.get("/")
    assert (failed.status_code, "is damaged" in failed.text, "refresh" in failed.text) == (503, True, True)
