"""vLLM on the device: weights that are reloaded and those that its graphs read, its speed, and whole runs."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any

from configs import Config, load
from storage import layout
from storage.objects.store import Store
from storage.versions import checkpoints, manifests
from storage.versions.checkpoints import Checkpoint
from storage.versions.drafts import Provenance
from tests.benchmarks.fixtures import Lab
from tests.gpu.checks import Check, Setting, limited, needs_cuda
from tests.support.paths import ROOT

NOISES = {0: 0.0, 1: 0.02, 2: 0.04, 3: 0.04 + 1e-5}
"""Standard deviation of the noise on the weights of each version; the last two are as near as by an update."""
TOLERANCE = 0.3
"""Largest mean error of logprobs in bfloat16: random ids, as the canary has, blur most."""
ITERATIONS = 3


def _common(setting: Setting, eager: bool) -> list[str]:
    """Return overrides of the demo: bfloat16 on a GPU, float32 in a rehearsal."""
    half = ["inference.dtype=bfloat16", f"inference.canary_tolerance={TOLERANCE}", "train.autocast=bfloat16"]
    few = ["rollout.problems_per_iteration=4", "rollout.group_size=4"] if setting.rehearsal else []
    return [
        *("inference.gpu_memory_utilization=0.3", f"inference.enforce_eager={eager}".lower(), "evaluation.every=100"),
        *("problems.held_out.count=8", *few, *(["policy.path=math-mt-ppo/smoke"] if setting.rehearsal else half)),
    ]


def _missing(setting: Setting, title: str, eager: bool) -> Check | None:
    if find_spec("vllm") is None:
        return Check(title, "skipped", said="vLLM is not installed")
    return None if eager or not setting.rehearsal else needs_cuda(title)


def _served(setting: Setting, *, mode: str, eager: bool) -> Iterator[Check]:
    """Reload weights; compare the logprobs of tokens that are decoded, as graphs do, with the trainer's."""
    from tasks.inference.engine import Engine

    title = f"weights reloaded, {mode}"
    if missing := _missing(setting, title, eager):
        yield missing
        return
    with Lab(setting.folder) as lab:
        lab.settings += _common(setting, eager)
        config = load("demo", lab.settings)
        versions = [_commit(lab, number, noise) for number, noise in NOISES.items()]
        with Engine(config.inference, config.rollout, setting.folder) as engine:
            start = time.perf_counter()
            engine.serve(versions[0])
            started, previous = time.perf_counter() - start, versions[-1]
            for policy in versions:
                start = time.perf_counter()
                engine.serve(policy)  # proven by canary or checksums, or an error
                swapped = time.perf_counter() - start
                own, others = _decoded(engine, config, policy, previous, setting)
                numbers = {"swap s": swapped, "error of decoded logprobs": own, "to the version before": others}
                limits = {"error of decoded logprobs": TOLERANCE if policy.number == 3 else min(TOLERANCE, others / 2)}
                yield limited(f"{title}, version {policy.number}", numbers, limits, f"started in {started:.0f} s")
                previous = policy
    if eager == setting.rehearsal:
        yield _speed(setting, eager)


def _commit(lab: Lab, number: int, noise: float) -> Checkpoint:
    """Commit policy version 0 with noise on its weights, always of the same signs."""
    import torch
    from transformers import AutoTokenizer

    from configs.train import Train
    from tasks.train.policy import load_policy, make_canary

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


def _decoded(
    engine: Any, config: Config, policy: Checkpoint, before: Checkpoint, setting: Setting
) -> tuple[float, float]:
    """Let the server decode, as graphs do; return the error of its logprobs by these weights and by those before."""
    from tasks.inference.api import GenerationConfig
    from tasks.train.policy import StoredTokens, recompute

    prompt, gconfig = [5, 6, 7, 8], GenerationConfig(n=4 if setting.rehearsal else 16, max_new_tokens=32)

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


def _speed(setting: Setting, eager: bool) -> Check:
    """Compare iterations of the rollout stage with the same requests alone."""
    from tests.benchmarks import rollout

    rollout.WARM_UP, rollout.PAIRS = (0, 1) if setting.rehearsal else (1, 4)
    with Lab(setting.folder / "speed") as lab:
        lab.settings += _common(setting, eager)
        stages, bare = zip(*rollout.pairs_of(lab)[0], strict=True)
    rates = [median(each.tokens / each.seconds for each in runs) for runs in (stages, bare)]
    numbers = {"rollout tokens/s": rates[0], "bare tokens/s": rates[1], "share": rates[0] / rates[1]}
    return Check("rollout against the same requests bare", "pass", dict(numbers))


def _run(setting: Setting, *, mode: str, eager: bool, lr: float) -> Iterator[Check]:
    """Run the whole pipeline, as a user does."""
    title = f"pipeline, {mode}"
    if missing := _missing(setting, title, eager):
        yield missing
        return
    root, iterations = setting.folder / "store", 2 if setting.rehearsal else ITERATIONS
    settings = ["run.name=tests", f"run.iterations={iterations}", f"storage.root={root}", f"optimizer.lr={lr}"]
    overrides = [*settings, f"storage.cache={setting.folder}/cache", *_common(setting, eager)]
    environment = {key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"}
    environment |= {"PREFECT_HOME": str(setting.folder / "prefect"), "DO_NOT_TRACK": "1", "OMP_WAIT_POLICY": "passive"}
    start = time.perf_counter()
    command = [sys.executable, "-m", "flows.math_mt_ppo", "demo", *overrides]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="\n")  # into the log of this check
    if done.returncode:
        yield Check(title, "fail", {"status": float(done.returncode)}, "; ".join(done.stderr.splitlines()[-3:]))
        return
    store = Store(str(root))
    updates = [manifests.read(store, layout.checkpoint("tests", number + 1)).metrics for number in range(iterations)]
    numbers = {"seconds": time.perf_counter() - start, "s of the last update": updates[-1]["time/update"]}
    numbers["logprobs apart"] = max(update["proximal/mean_difference"] for update in updates)
    yield limited(f"{title}, {iterations} iterations", numbers, {"logprobs apart": TOLERANCE}, "server and trainer")


served_eager, served_graphs = (partial(_served, mode=m, eager=m == "eager") for m in ("eager", "CUDA graphs"))
run_eager = partial(_run, mode="eager, small steps", eager=True, lr=1e-5)  # the canary cannot distinguish two versions
run_graphs = partial(_run, mode="CUDA graphs", eager=False, lr=1e-4)
