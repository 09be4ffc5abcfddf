"""What `--plan` says, and what it is computed from: the sizes of the policy, without weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from configs import load
from flows.run.configuration import plan
from storage.objects.store import Store
from storage.versions.checkpoints import Checkpoint
from tasks.warm_start.policy_sizes import policy_values
from tests.support.paths import ROOT


def test_the_plan_names_ranks_servers_and_gpus() -> None:
    printed = plan(load("gsm8k-7b", ["inference.replicas=2", "inference.tensor_parallel=2"]))
    for part in (
        "num_hidden_layers 28, hidden_size 3584",
        "replicate 1 x shard 4",
        "servers: 2; GPUs: 4",
        "together: GPUs: 8",
    ):
        assert part in printed
    assert "http://10.0.0.5:8003" in plan(load("gsm8k-7b", ["inference.urls=['http://10.0.0.5:8003']"]))
    with pytest.raises(ValueError, match="inference.tensor_parallel=8 does not divide the model's 28 attention heads"):
        plan(load("gsm8k-7b", ["inference.tensor_parallel=8"]))


@pytest.mark.slow
def test_the_plan_imports_no_torch() -> None:
    code = "import sys; from configs import load; from flows.run.configuration import plan; plan(load('demo'))"
    subprocess.run([sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)"], cwd=ROOT, check=True)


def test_sizes_are_found_in_a_folder_a_checkpoint_and_this_package(
    policy_folder: Path, policies: list[Checkpoint], checkpoint_store: Store
) -> None:
    """All three name the same policy."""
    folder = load("demo", [f"policy={{path: {policy_folder}}}"])
    checkpoint = load("demo", [f"policy={{path: '{checkpoint_store.uri(policies[0].version)}'}}"])
    values = json.loads((policy_folder / "config.json").read_bytes())
    assert policy_values(folder) == policy_values(checkpoint) == policy_values(load("smoke")) == values


def test_other_names_of_sizes_and_bad_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert "gpt2 with sizes of its own" in plan(load("demo", [f"policy={{path: {tmp_path}}}"]))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="config.json is not a JSON object"):
        plan(load("demo", [f"policy={{path: {tmp_path}}}"]))
