"""The trackers of packages, each read back with its own reader, after a feeding process that was killed."""

import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storage.objects.store import Store
from tasks.tracking.follow import feed
from tests.support.metrics_run import commit_iteration, commit_run
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow
pytest.importorskip("tensorboard", reason="make setup-agents")
Read = Callable[[Path, str], list[tuple[int, float]]]
"""Returns the steps and values of a metric."""
_KILLED = """
import os, signal, sys
from pathlib import Path
from storage.objects.store import Store
from tasks.tracking import follow
follow._ends = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # where it waits for further points
follow.feed(Store(sys.argv[1]), "r", sys.argv[2], Path(sys.argv[3]), 0)
"""


def read_tensorboard(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next(folder.glob("cache/tracking/tensorboard/r-*"))), size_guidance={"scalars": 0})
    events.Reload()
    assert set(events.Tags()["tensors"]) == {"config", "histogram/ratio", "versions"}
    return [(event.step, round(event.value, 6)) for event in events.Scalars(name)]


def read_wandb(folder: Path, name: str) -> list[tuple[int, float]]:
    """Read the newest offline file: LevelDB's log format with records in protobuf."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # as at the end of a process: `finish` may return before the last bytes are in the file
    found = []
    for path in sorted(folder.glob("cache/tracking/wandb/offline-run-*/*.wandb"))[-1:]:
        data, at, whole = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
            if kind == 0:  # the rest of the block is empty
                at += 32768 - at % 32768
                continue
            whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
            if kind in (1, 4):  # a whole record, or the last part of one
                record, whole = Record.FromString(whole), b""
                items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
                if name in items:
                    found.append((int(items["iteration"]), float(items[name])))
    return found


def read_trackio(folder: Path, name: str) -> list[tuple[int, float]]:
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = SQLiteStorage.get_runs("math-mt-ppo")
    return [(row["iteration"], row[name]) for row in SQLiteStorage.get_logs("math-mt-ppo", run) if name in row]


def read_mlflow(folder: Path, name: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("math-mt-ppo")
    assert experiment
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params["run.seed"] == "7"
    assert client.list_artifacts(run.info.run_id, "points")
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]


@pytest.fixture
def mlflow_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    place = [f"--backend-store-uri=sqlite:///{tmp_path}/ml.db", f"--artifacts-destination={tmp_path}/artifacts"]
    command = [sys.executable, "-m", "mlflow", "server", "--host=127.0.0.1", f"--port={port}", "--workers=1", *place]
    address = f"http://127.0.0.1:{port}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path) as server,
    ):
        while server.poll() is None:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        assert server.poll() is None, (tmp_path / "log").read_text()
        yield
        server.terminate()


READERS: dict[str, Read] = {"tensorboard": read_tensorboard, "trackio": read_trackio, "wandb": read_wandb}
READERS |= {"mlflow": read_mlflow}


@pytest.mark.parametrize("sink", ["tensorboard", "trackio", "wandb", pytest.param("mlflow", marks=pytest.mark.long)])
def test_a_tracker_has_one_curve(
    sink: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Three feeds give it three iterations; the first one's process is killed.

    In a folder of TensorBoard a new file takes the place of what the killed process may have written. A resumed run of
    trackio keeps the points that it has, and gets the others; the newest offline file of W&B has the whole curve.
    MLflow's server keeps one of two equal points.
    """
    monkeypatch.setenv("TRACKIO_DIR", f"{tmp_path}/trackio")
    monkeypatch.setenv("WANDB_MODE", "offline")
    if sink == "mlflow":
        request.getfixturevalue("mlflow_server")
    store = Store(f"{tmp_path}/var")
    commit_run(store, 2)
    arguments = [f"{tmp_path}/var", sink, f"{tmp_path}/cache"]
    killed = subprocess.run([sys.executable, "-c", _KILLED, *arguments], cwd=ROOT, capture_output=True, check=False)
    assert killed.returncode == -9, killed.stderr.decode()
    commit_iteration(store, 2)
    for _ in range(2):
        feed(store, "r", sink, tmp_path / "cache")
    assert READERS[sink](tmp_path, "policy/kl") == [(0, 0.01), (1, 0.01), (2, 0.01)]
    assert READERS[sink](tmp_path, "eval/held-out/first_turn_low") == [(0, 0.4)]
