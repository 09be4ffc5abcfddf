"""An update of SmolLM2-135M with an adapter, on made-up episodes: 16 problems, 16 episodes of 16 tokens each.

In turns with an older commit, whose folder is OLD (in both the same episodes, weights and configuration):

    make bench ARGS=smollm2
    cd OLD && PYTHONPATH=. .venv/bin/python NEW/tests/benchmarks/smollm2.py var/models/SmolLM2-135M-Instruct
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from configs import load
from storage.records import Score, Trajectory, Turn
from tests.benchmarks.result import Row, spread
from tests.support.train_helpers import make_scores, make_trajectory

if TYPE_CHECKING:
    from tests.benchmarks.fixtures import Lab

PROBLEMS, GROUP, PROMPT, ANSWER = 16, 16, 56, 16
WARM_UP, ROUNDS = 1, 4
BFLOAT16 = {"avx512_bf16", "amx_bf16"}
"""Flags of processors that multiply in bfloat16: `make demo-llm` trains in it there."""


def measure(_: "Lab | None", model: str | None = None) -> Iterator[Row]:
    """Measure one row: the median seconds of an update."""
    from storage.versions.weights import load_model, make_adapter
    from tasks.train.train_state import load_train_state
    from tasks.train.trainer import Trainer
    from tasks.warm_start import smollm2

    folder = Path(model or smollm2.get(smollm2.FOLDER)).resolve()
    rounded = bool(BFLOAT16 & set(Path("/proc/cpuinfo").read_text().split()))
    with tempfile.TemporaryDirectory() as scratch:
        config = load(
            "demo-llm",
            [
                f"policy.path={folder}",
                "policy.lora={}",
                f"storage.root={scratch}/store",
                f"storage.cache={scratch}/cache",
                *(["train.autocast=bfloat16"] if rounded else []),
            ],
        )
        assert config.policy.lora
        make_adapter(load_model(folder), config.policy.lora, 1, Path(scratch, "adapter"))
        trainer = Trainer(load_train_state(config, folder, adapter=Path(scratch, "adapter")))
        rows, scores = _episodes()
        rounds = []
        for _round in range(WARM_UP + ROUNDS):
            start = time.perf_counter()
            metrics = trainer.update(rows, scores, version=0)
            rounds.append((time.perf_counter() - start, metrics))
    seconds = [each for each, _ in rounds[WARM_UP:]]
    first = rounds[0][1]
    yield Row(
        "update of SmolLM2-135M with an adapter",
        f"{spread(seconds, '{:.1f}'.format)} s",
        f"{'bfloat16' if rounded else 'float32'}, {len(rows)} episodes, {first['tokens/trained']:.0f} tokens, of which "
        f"{first['tokens/shared_share']:.0%} are computed once for several; first gradient norm "
        f"{first['grad_norm']:.5g}; {ROUNDS} rounds",
    )


def _episodes() -> tuple[list[Trajectory], list[Score]]:
    """Make episodes of random tokens, half of them right."""
    rng, rows, scores = np.random.default_rng(0), list[Trajectory](), list[Score]()
    for problem in range(PROBLEMS):
        prompt = rng.integers(100, 49_000, PROMPT).tolist()
        for sample in range(GROUP):
            ids = [*prompt, *rng.integers(100, 49_000, ANSWER).tolist()]
            mask = [False] * PROMPT + [True] * ANSWER
            row = replace(
                make_trajectory(f"{problem:02}/{sample:02}", [], problem=f"p{problem}"),
                token_ids=ids,
                action_mask=mask,
                turns=[Turn(PROMPT, len(ids), "", "wrong", 0.0, "stop", "", 0.0, 0)],
                logprobs=[-10.0 if sampled else 0.0 for sampled in mask],
                versions=[0 if sampled else -1 for sampled in mask],
            )
            rows.append(row)
            scores += make_scores(row.trajectory_id, float(rng.random() < 0.5))
    return rows, scores


if __name__ == "__main__":
    print(*measure(None, sys.argv[1]))
