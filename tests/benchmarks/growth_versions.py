"""The time and the requests until an iteration's first episode, in a store of a given number of versions.

`growth` runs this file in a new process. The store is a local folder whose backend counts the requests that a remote
one would get. It holds one run, with small manifests for its trajectories, scores and checkpoints, of which only the
newest checkpoint has files. Nothing is played.
"""

import json
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from uuid import UUID

from configs import Config, load
from storage import layout
from storage.objects.local import LocalBackend
from storage.objects.seal import seal
from storage.objects.store import Store
from storage.versions import checkpoints
from storage.versions.checkpoints import Canary
from storage.versions.drafts import Provenance
from storage.versions.manifests import MANIFEST_VERSION, Kind, Manifest
from tests.support.train_helpers import save_tiny
from tests.support.waiting_engine import WaitingEngine

if TYPE_CHECKING:
    from tasks.rollout.stream import Stream

RUN = "growth"
PER_ITERATION = 3  # versions: trajectories, scores and a checkpoint
MODES = {
    "played and trained in turn": [],
    "run.max_tokens": ["run.max_tokens=1000000000000"],
    "run.overlap": ["run.overlap=true", "rollout.max_head_offpolicyness=2"],
}
"""Ways in which iterations begin, with their overrides."""

Cost = tuple[float, int]
"""Seconds and requests."""


class CountedBackend(LocalBackend):
    """A local folder that counts requests."""

    requests = 0

    def __getattribute__(self, name: str) -> Any:
        CountedBackend.requests += name in ("size", "read", "write", "create", "upload", "download", "walk")
        return super().__getattribute__(name)


class Stage:
    """Takes the place of the rollout's Prefect tasks; notes when the first episode of an iteration would begin."""

    def __init__(self) -> None:
        self.begun = _now()
        self.trained = 0.0  # when the iteration before was trained

    def play(self, *_: object) -> dict[str, Any]:
        """Stand in for `tasks.rollout.play.play`."""
        self.begun = _now()
        return {"generated_tokens": 1}

    def submit(self, _: "Stream") -> None:
        """Stand in for the task that plays a stream."""
        self.begun = _now()

    def wait_for(self, stream: "Stream", iteration: int) -> None:
        """Stand in for the task that waits for a data set; a later iteration's groups are drawn first."""
        if self.begun[0] < self.trained:
            stream._draw(iteration + 1)
            self.begun = _now()


def main(versions: int, repeats: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return the medians of seconds and requests, by mode, of the first and of a later iteration."""
    from prefect.logging import disable_run_logger

    from tasks.rollout.task import rollout
    from tasks.run.workspace import start_run

    stage = Stage()
    replacements = {
        "storage.objects.store.LocalBackend": CountedBackend,
        "storage.objects.store.Store.is_local": False,  # so files are fetched into the cache, with requests
        "tasks.run.workspace.start_run": start_run.fn,
        "tasks.run.workspace.create_progress_artifact": lambda **_: UUID(int=0),
        "tasks.run.workspace.update_progress_artifact": lambda **_: None,
        "tasks.rollout.workers.load_chat": lambda _: None,
        "tasks.rollout.task.warn_of_marks": lambda *_: None,
        "tasks.rollout.play.play": stage.play,
        "tasks.rollout.task.rollout": rollout.fn,
        "tasks.rollout.task._play_stream": stage,
        "tasks.rollout.task._wait_for": stage.wait_for,
    }
    costs = {}
    with tempfile.TemporaryDirectory(prefix="growth-") as scratch, disable_run_logger(), ExitStack() as stack:
        for target, replacement in replacements.items():
            stack.enter_context(patch(target, replacement))
        model = save_tiny(Path(scratch) / "model")
        for number, (mode, overrides) in enumerate(MODES.items()):
            places = [f"storage.root={scratch}/{number}", f"storage.cache={scratch}/cache-{number}"]
            config = load("demo", [f"run.name={RUN}", f"run.iterations={versions}", *places, *overrides])
            _fill(config, versions // PER_ITERATION, model)
            pairs = [_begin_twice(config, model, stage) for _ in range(1 + repeats)][1:]  # the first one warms up
            costs[mode] = {
                when: {"seconds": median(cost[0] for cost in pair), "requests": median(cost[1] for cost in pair)}
                for when, pair in zip(("first", "later"), zip(*pairs, strict=True), strict=True)
            }
    return costs


def _now() -> Cost:
    return time.perf_counter(), CountedBackend.requests


def _between(before: Cost, after: Cost) -> Cost:
    return after[0] - before[0], after[1] - before[1]


def _fill(config: Config, iterations: int, model: Path) -> None:
    """Store a run of so many iterations."""
    store, settings = Store.of(config.storage), config.model_dump(mode="json")
    versions: list[tuple[Kind, str]] = [("checkpoint", layout.checkpoint(RUN, 0))]
    for number in range(iterations):
        versions.append(("trajectories", layout.trajectories(RUN, number)))
        versions.append(("scores", layout.scores(RUN, number, "a")))
        versions.append(("checkpoint", layout.checkpoint(RUN, number + 1)))
    newest = versions.pop()[1]
    for number, (kind, version) in enumerate(versions):
        _put(store, layout.manifest(version), _manifest(kind, version, settings))
        entry = {"kind": kind, "version": version, "parents": [], "attempt": "a"}
        _put(store, f"{layout.CATALOG}/{number:08d}.json", entry)
    checkpoints.commit(store, newest, model, None, Canary([1, 2], [-1.0]), Provenance(config=settings), [], {})
    for number in range(iterations):
        moved = {"version": layout.checkpoint(RUN, number + 1), "sha256": "0", "reason": "", "by": "", "at": ""}
        _put(store, f"{layout.alias(layout.latest(RUN))}/{number:08d}.json", moved)


def _manifest(kind: Kind, version: str, settings: dict[str, Any]) -> dict[str, Any]:
    number = layout.number_of(version) or 0
    manifest = Manifest(
        manifest_version=MANIFEST_VERSION,
        kind=kind,
        version=version,
        parents=[],
        files=[],
        config=settings,
        code_version="",
        prefect_run_id=None,
        metrics={"generated_tokens": 1000, "stream": {"groups": [*range(32 * number, 32 * number + 32)],
                 "begun": 32 * number + 32, "later": []}},
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        nonce="a",
    )  # fmt: skip
    values = json.loads(manifest.model_dump_json())
    assert isinstance(values, dict)
    return values


def _put(store: Store, key: str, values: dict[str, Any]) -> None:
    """Write without waiting for the disk."""
    path = Path(store.path(key))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(seal({**values, "nonce": "a"}))


def _begin_twice(config: Config, model: Path, stage: Stage) -> tuple[Cost, Cost]:
    """Begin a flow run's first iteration and the next one, up to their first episodes; delete what they wrote."""
    from tasks.problems.task import import_problems
    from tasks.rollout.task import Rollouts
    from tasks.rollout.workers import LocalWorkers
    from tasks.run.workspace import iterations, newest_policy, open_run

    started = _now()
    with open_run(config) as workspace:
        train_set, _ = import_problems.fn(workspace)
        policy = newest_policy(workspace)
        assert policy
        workers = LocalWorkers(WaitingEngine(0), None, workspace.open_served)  # type: ignore[arg-type]
        rollouts = Rollouts(workspace, workers, train_set)
        progress = iterations(workspace)
        rollouts.take(number := next(progress), policy)
        first = _between(started, stage.begun)
        trained = layout.checkpoint(RUN, number + 1)
        provenance = workspace.provenance()
        checkpoints.commit(workspace.store, trained, model, None, Canary([1, 2], [-1.0]), provenance, [], {})
        started = _now()
        stage.trained = started[0]
        rollouts.swap(trained)
        rollouts.take(next(progress), trained)
        later = _between(started, stage.begun)
    for version in (trained, layout.trajectories(RUN, number), layout.trajectories(RUN, number + 1)):
        shutil.rmtree(workspace.store.path(version), ignore_errors=True)
    return first, later


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]))))
