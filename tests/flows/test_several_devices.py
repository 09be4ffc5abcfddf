"""A vLLM server with two ranks plays, is swapped and proven, and ends whole; on a CPU each rank is a process."""

import re
from pathlib import Path

import pytest

from storage import layout
from storage.maintenance.verify import verify
from storage.objects.store import Store
from storage.versions.manifests import read
from tests.support.killed_flow import MARK, Point, no_process_left, start

pytestmark = [pytest.mark.slow, pytest.mark.long]

SHARED = Path("/dev/shm")
WEIGHTS = "model/model.safetensors"


def test_two_ranks_play_two_iterations_although_their_flow_is_killed(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """The flow ends while the server has its second weights; no process stays, and the same command goes on.

    The bonus for entropy changes the weights in each iteration, whatever is sampled.
    """
    overrides = [
        *(f"storage.root={tmp_path}/var", f"storage.cache={tmp_path}/cache", "score.workers=1"),
        *("inference.tensor_parallel=2", "algorithm.entropy_coefficient=0.01"),
        "inference.extra_args=[--kv-cache-memory-bytes, '67108864']",
    ]
    for point, status in ((Point("train", "tasks.train.trainer:Trainer.save", 2), -9), (None, 0)):
        process = start(overrides, point, tmp_path / "flow.log", environment | {MARK: str(tmp_path)})
        process.join()
        assert process.exitcode == status, (tmp_path / "flow.log").read_text()[-5000:]
        no_process_left(str(tmp_path))
    store = Store(f"{tmp_path}/var")
    policies = [layout.checkpoint("smoke", number) for number in range(3)]
    weights = [file.sha256 for policy in policies for file in read(store, policy).files if file.name == WEIGHTS]
    assert len(set(weights)) == 3
    assert verify(store, policies, deep=True).findings == []
    log = next((tmp_path / "cache").rglob("vllm-0.log")).read_text()
    assert set(re.findall(r"Worker_(TP\d)", log)) == {"TP0", "TP1"}
    meetings = re.findall(r"/(vllm_dist_[0-9a-f]+)", log)
    left = [path for meeting in meetings for path in SHARED.glob(f"{meeting}-*")]
    for path in left:  # of the server that was killed
        path.unlink(missing_ok=True)  # the log may name a meeting twice
    assert not [path for path in left if path.name.startswith(meetings[-1])]
