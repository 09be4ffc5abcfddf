"""The feed of a tracker, with a tracker of one's own that writes lines into a file."""

import json
import os
import threading
from pathlib import Path

import pytest

from configs import ConfigError, load
from flows.run.configuration import resolve
from storage.errors import UnavailableError
from storage.objects.store import Store
from tasks.metrics.log import read_rows
from tasks.metrics.rows import Row
from tasks.tracking.follow import feed, follow, followed
from tasks.tracking.points import Point, TrackedRun, points
from tests.support.metrics_run import commit_iteration, commit_run

OWN = f"{__name__}:Lines"


class Lines:
    """A tracker of one's own: a line for each point. It is down while a file `down` lies in its folder."""

    def __init__(self, run: TrackedRun) -> None:
        self._folder = run.folder
        assert run.config["run.seed"] == 7

    def log(self, point: Point) -> None:
        if (self._folder / "down").exists():
            raise ConnectionError("the tracker is down")
        with (self._folder / "lines").open("a") as file:
            file.write(json.dumps([point.index, point.step, sorted(point.histograms), *sorted(point.versions)]) + "\n")

    def close(self) -> None:
        (self._folder / "closed").touch()


def lines(tmp_path: Path) -> list[int]:
    return [json.loads(line)[0] for line in (tmp_path / "cache/tracking/lines").read_text().splitlines()]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(f"{tmp_path}/var")
    commit_run(store, 2)
    return store


def test_points_are_given_in_order(store: Store, tmp_path: Path) -> None:
    """Evaluations come before the iteration of the same number; a new process gives all, since one may be killed."""
    assert feed(store, "r", OWN, tmp_path / "cache") == 3
    commit_iteration(store, 2)
    assert feed(store, "r", OWN, tmp_path / "cache") == 4
    assert lines(tmp_path) == [0, 1, 3, 0, 1, 3, 5]
    first, second = ((tmp_path / "cache/tracking/lines").read_text().splitlines())[:2]
    assert json.loads(first) == [0, 0, [], "evaluate"]
    assert json.loads(second) == [1, 0, ["ratio"], "rollout", "score", "train"]


def test_a_tracker_that_is_down_gets_the_points_later(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Errors are logged, nothing is lost or doubled, and what comes at the very end is given, too."""
    for name in ("POLL_S", "RETRY_S"):
        monkeypatch.setattr(f"tasks.tracking.follow.{name}", 0.02)
    down = tmp_path / "cache/tracking/down"
    down.parent.mkdir(parents=True)
    down.touch()
    reading, writing = os.pipe()
    following = threading.Thread(target=follow, args=[store, "r", OWN, tmp_path / "cache", reading])
    following.start()
    while "the tracker is down" not in caplog.text:
        following.join(0.01)
    down.unlink()
    while not down.with_name("lines").exists():
        following.join(0.01)
    commit_iteration(store, 2)
    os.close(writing)
    following.join()
    assert lines(tmp_path) == [0, 1, 3, 5]
    assert down.with_name("closed").exists()


def test_a_pass_that_fails_as_the_flow_ends_is_tried_again(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its points would be lost. The pass after the end is the last."""
    reading, writing = os.pipe()
    passes = list[int]()

    def fail(*_: object) -> None:
        passes.append(len(passes))
        if len(passes) == 1:
            os.close(writing)
        raise ConnectionError("the tracker is down")

    monkeypatch.setattr("tasks.tracking.follow.feed", fail)
    with pytest.raises(ConnectionError):
        follow(store, "r", OWN, tmp_path, reading)
    assert passes == [0, 1]


def test_a_store_that_does_not_answer_closes_the_tracker(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tracker is well and stores what it has."""
    monkeypatch.setattr("tasks.tracking.follow.POLL_S", 0.0)
    found = iter([read_rows(store, "r")])

    def read(*_: object) -> list[Row]:
        if rows := next(found, None):
            return rows
        raise UnavailableError("it does not answer")

    monkeypatch.setattr("tasks.tracking.follow.read_rows", read)
    with pytest.raises(UnavailableError):
        feed(store, "r", OWN, tmp_path / "cache", os.pipe()[0])
    assert (tmp_path / "cache/tracking/closed").exists()


def test_the_newest_evaluations_wait_for_those_on_other_sets(tmp_path: Path) -> None:
    """They are one point, which is given when the run goes on, or at the end."""
    commit_run(store := Store(f"{tmp_path}/var"), 0)
    rows = read_rows(store, "r")
    assert [len([*points(store, rows, 0, last=last)]) for last in (False, True)] == [0, 1]


@pytest.mark.slow
def test_a_flow_starts_its_trackers_and_names_those_that_lack_something(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The process beside the flow gets what was committed; for one that cannot, the flow says what to do."""
    place = [f"storage.root={tmp_path}/var", f"storage.cache={tmp_path}/cache", "run.name=r"]
    with followed(load("smoke", [*place, f'tracking=["{OWN}"]'])):
        pass
    assert lines(tmp_path) == [0, 1, 3]
    assert not caplog.text
    (tmp_path / "cache/tracking/down").touch()
    with followed(load("smoke", [*place, f'tracking=["{OWN}"]'])):
        pass
    assert f"python -m flows.track r --to {OWN}" in caplog.text


@pytest.mark.parametrize(
    ("tracker", "says"),
    [("mlfow", "did you mean 'mlflow'"), ("nowhere:Sink", "no module 'nowhere'"), ("wandb", "pip install wandb")],
)
def test_a_tracker_that_cannot_be_used_is_refused_at_once(
    tracker: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything starts, with the remedy."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=says):
        resolve("smoke", [f'tracking=["{tracker}"]'])
