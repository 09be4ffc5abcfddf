"""vLLM on the device: weights that are reloaded and those that its graphs read, and whole runs."""

import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from configs import Config, load
from configs.train import Train
from storage import layout
from storage.objects.store import Store
from storage.versions import checkpoints, manifests
from storage.versions.checkpoints import Checkpoint
from storage.versions.drafts import Provenance
from tasks.inference.api import GenerationConfig
from tasks.inference.engine import Engine
from tasks.train.policy import StoredTokens, load_policy, make_canary, recompute
from tests.benchmarks.fixtures import Lab
from tests.gpu.conftest import GPU, LIMIT_S, Measured, needs_cuda, within
from tests.support.paths import ROOT

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(LIMIT_S)]
NOISES = {0: 0.0, 1: 0.02, 2: 0.04, 3: 0.04 + 1e-5}
"""Standard deviation of the noise on the weights of each version; the last two are as near as by an update."""
TOLERANCE = 0.3
"""Largest mean error of logprobs in bfloat16: random ids, as the canary has, blur most."""
ITERATIONS = 3 if GPU else 2


def common(eager: bool) -> list[str]:
    """Return overrides of the demo: bfloat16 on a GPU, float32 in a rehearsal."""
    half = ["inference.dtype=bfloat16", f"inference.canary_tolerance={TOLERANCE}", "train.autocast=bfloat16"]
    few = ["rollout.problems_per_iteration=4", "rollout.group_size=4", "policy.path=math-mt-ppo/smoke"]
    return [
        *("inference.gpu_memory_utilization=0.3", f"inference.enforce_eager={eager}".lower(), "evaluation.every=100"),
        *("problems.held_out.count=8", *(half if GPU else few)),
    ]


@pytest.mark.parametrize("eager", [needs_cuda(False), True], ids=["CUDA graphs", "eager"])
def test_weights_are_reloaded(tmp_path: Path, eager: bool, measured: Measured) -> None:
    """Compare the logprobs of tokens that are decoded, as graphs do, with the trainer's."""
    pytest.importorskip("vllm")
    with Lab(tmp_path) as lab:
        lab.settings += common(eager)
        config = load("demo", lab.settings)
        versions = [_commit(lab, number, noise) for number, noise in NOISES.items()]
        with Engine(config.inference, config.rollout, tmp_path) as engine:
            engine.serve(versions[0])
            previous = versions[-1]
            for policy in versions:
                start = time.perf_counter()
                engine.serve(policy)  # proven by canary or checksums, or an error
                swapped = time.perf_counter() - start
                own, others = _decoded(engine, config, policy, previous)
                measured({"version": policy.number, "swap s": swapped, "error": own, "to the version before": others})
                assert within(
                    {"error": own}, {"error": TOLERANCE if policy.number == 3 else min(TOLERANCE, others / 2)}
                )
                previous = policy


def _commit(lab: Lab, number: int, noise: float) -> Checkpoint:
    """Commit policy version 0 with noise on its weights, always of the same signs."""
    policy, generator = load_policy(lab.policy.model, Train(device="cpu")), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    with tempfile.TemporaryDirectory(dir=lab.scratch) as folder:
        policy.save_pretrained(folder)
        AutoTokenizer.from_pretrained(lab.policy.model).save_pretrained(folder)
        key = layout.checkpoint("versions", number)
        checkpoints.commit(lab.store, key, Path(folder), None, make_canary(policy), Provenance(config={}), [], {})
    return checkpoints.open_checkpoint(lab.store, key, lab.scratch / "cache")


def _decoded(engine: Engine, config: Config, policy: Checkpoint, before: Checkpoint) -> tuple[float, float]:
    """Let the server decode, as graphs do; return the error of its logprobs by these weights and by those before."""
    prompt, gconfig = [5, 6, 7, 8], GenerationConfig(n=16 if GPU else 4, max_new_tokens=32)

    async def ask() -> Any:
        async with engine.connect() as connection:
            return await connection.generate(prompt, gconfig, seed=7, replica=0)

    completions = asyncio.run(ask())
    rows = [
        StoredTokens(str(place), prompt + c.token_ids, [False] * 4 + [True] * len(c.token_ids), [0])
        for place, c in enumerate(completions)
    ]
    errors = []
    for version in (policy, before):
        logprobs = recompute(version.model, rows, 1.0, config.inference.dtype)
        pairs = zip(completions, logprobs, strict=True)
        errors.append(
            fmean(abs(a - b) for c, own in pairs if own is not None for a, b in zip(c.logprobs, own, strict=True))
        )
    return errors[0], errors[1]


@pytest.mark.parametrize(
    ("eager", "lr"),
    [needs_cuda(False, 1e-4), (True, 1e-5)],  # by the small steps the canary cannot distinguish two versions
    ids=["CUDA graphs", "eager, small steps"],
)
@pytest.mark.usefixtures("environment")
def test_the_whole_pipeline(tmp_path: Path, eager: bool, lr: float, measured: Measured) -> None:
    """Run the demo as a user does."""
    pytest.importorskip("vllm")
    settings = ["run.name=tests", f"run.iterations={ITERATIONS}", f"optimizer.lr={lr}", *common(eager)]
    settings += [f"storage.root={tmp_path}/store", f"storage.cache={tmp_path}/cache"]
    subprocess.run([sys.executable, "-m", "flows.math_mt_ppo", "demo", *settings], cwd=ROOT, check=True)
    store = Store(f"{tmp_path}/store")
    updates = [manifests.read(store, layout.checkpoint("tests", number + 1)).metrics for number in range(ITERATIONS)]
    apart = max(update["proximal/mean_difference"] for update in updates)
    measured({"s of the last update": updates[-1]["time/update"], "logprobs apart": apart})
    assert within({"apart": apart}, {"apart": TOLERANCE})
