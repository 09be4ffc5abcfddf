"""Shows where the seconds of an iteration go, part by part: the demo, SmolLM2 and, on a GPU, the shape of a 1.5B model.

Each run is a new process, which runs this file with `wall` or `processor` (what is counted), the name of a
configuration, and the flow's overrides. There the functions of `PARTS` are timed as the flow's thread calls them, each
without those that it calls, so that the parts add up to the iteration. What other threads do meanwhile is no part.
"""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from pkgutil import resolve_name
from statistics import median
from threading import get_ident
from typing import Any
from unittest.mock import patch

from tests.benchmarks.fixtures import Lab
from tests.benchmarks.result import ProcessorTime, Row
from tests.support.paths import ROOT

PARTS = {
    "rollout": "tasks.rollout.play:play",
    "swap": "tasks.rollout.workers:LocalWorker.serve",
    "score": "tasks.rollout.workers:LocalWorker.score",
    "read": "tasks.train.version_trainer:VersionTrainer._data",
    "prepare": "tasks.train.prepare:Preparation.prepare",
    "update": "tasks.train.trainer:Trainer.update",
    "weights": "tasks.train.version_trainer:save_weights",
    "canary": "tasks.train.trainer:Trainer.canary",
    "store": "flows.run.workspace:Workspace.settle",
    "commit": "storage.versions.drafts:Draft.commit",
    "log of metrics": "flows.run.workspace:Workspace.record",
    "Prefect": "prefect:Task.__call__",
}
"""Parts by name. `rollout` includes shards, `update` samples and metrics; `swap` and `store` are waits for threads."""
REST = "rest"
STAGES = "rollout", "score", "prepare", "update"
"""The parts for which an iteration exists."""
FEW = ["rollout.problems_per_iteration=4", "rollout.group_size=8", "rollout.reject_equal=false"]
FEW += ["problems.held_out.count=8", "run.iterations=4"]


class Clock:
    """Seconds of parts, which may be inside of each other: the inner one's count for it alone.

    Args:
        now: returns seconds, of the wall or of processors.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._thread, self._parts, self._since = now, get_ident(), [REST], now()
        self._seconds = defaultdict[str, float](float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the seconds of a block; in other threads than the clock's do nothing."""
        if get_ident() != self._thread:
            yield
            return
        self._count()
        self._parts.append(name)
        try:
            yield
        finally:
            self._count()
            self._parts.pop()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function as a part."""

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return timed

    def lap(self) -> dict[str, float]:
        """Return the seconds of the parts since the last lap."""
        self._count()
        seconds, self._seconds = self._seconds, defaultdict(float)
        return dict(seconds)

    def _count(self) -> None:
        now = self._now()
        self._seconds[self._parts[-1]] += now - self._since
        self._since = now


def measure(lab: Lab) -> Iterator[Row]:
    """Measure one row for each run."""
    import torch

    yield _row(lab, "demo", "demo", "run.iterations=12", warm_up=2)
    words = set(Path("/proc/cpuinfo").read_text().split())
    on_gpu = torch.cuda.is_available()
    half = on_gpu or words & {"avx512_bf16", "amx_bf16"}
    faster = ["inference.dtype=bfloat16", "train.autocast=bfloat16"] if half else []
    model = _smollm2()
    for name, knobs in (("all weights", []), ("an adapter", ["policy.lora={}"])):
        yield _row(lab, f"SmolLM2, {name}", "demo-llm", f"policy.path={model}", *FEW, *faster, *knobs)
    if on_gpu:
        shape = _random_policy(Path(model), lab.scratch / "1.5b")
        yield _row(lab, "1.5B, all weights", "demo-llm", f"policy.path={shape}", *FEW, *faster)


def _row(lab: Lab, name: str, config: str, *overrides: str, warm_up: int = 1) -> Row:
    """Run a configuration in a store of its own; iterations of the warm-up are not counted."""
    folder = f"{lab.scratch}/iteration-{name.replace(' ', '-')}"
    own = [f"storage.root={folder}", f"storage.cache={folder}/cache", "evaluation.every=1000"]
    laps = lab.run_module("iteration", "wall", config, *own, *overrides)[warm_up:]
    total = median(sum(lap.values()) for lap in laps)
    parts = {part: median(lap.get(part, 0.0) for lap in laps) for part in (*PARTS, REST)}
    shown = ", ".join(f"{part} {seconds:.3f} ({seconds / total:.0%})" for part, seconds in parts.items())
    beside = median(1 - sum(lap.get(stage, 0.0) for stage in STAGES) / sum(lap.values()) for lap in laps)
    return Row(f"iteration, {name}", f"{total:.2f} s, {beside:.0%} beside {', '.join(STAGES)}", shown)


def _smollm2() -> str:
    from tasks.warm_start import smollm2

    return smollm2.get(ROOT / smollm2.FOLDER)


def _random_policy(model: Path, folder: Path) -> Path:
    """Write random weights in the shape of Qwen2.5-1.5B, with the tokenizer of another model."""
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    from configs import load
    from tasks.warm_start.policy_sizes import policy_values

    values = policy_values(load("demo", ["policy.path=Qwen/Qwen2.5-1.5B-Instruct"]))
    Qwen2ForCausalLM(Qwen2Config(**values)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def main(counted: str, config: str, overrides: list[str]) -> None:
    """Run the main flow; print the parts of each iteration as JSON in the last line of output."""
    from flows.launch.temporary_server import temporary_server
    from flows.math_mt_ppo import math_mt_ppo
    from flows.run import progress

    processor, laps, iterations = ProcessorTime(), list[dict[str, float]](), progress.iterations
    clock = Clock(processor if counted == "processor" else time.perf_counter)

    def marked(*args: Any) -> Iterator[int]:
        for iteration in iterations(*args):
            processor.look()
            laps.append(clock.lap())
            yield iteration
        laps.append(clock.lap())

    with temporary_server(), patch("flows.run.progress.iterations", marked), timed_parts(clock):
        math_mt_ppo(config, overrides)
    print(json.dumps(laps[1:]))  # without the start


@contextmanager
def timed_parts(clock: Clock) -> Iterator[None]:
    """Time the functions of `PARTS` in the block. What a Prefect task does itself is no time of Prefect's."""
    from prefect import Task

    call = clock.timed("Prefect", Task.__call__)

    def called(task: "Task[Any, Any]", *args: Any, **kwargs: Any) -> Any:
        with patch.object(task, "fn", clock.timed(REST, task.fn)):
            return call(task, *args, **kwargs)

    with ExitStack() as stack:
        for part, target in PARTS.items():
            owner, _, name = target.replace(":", ".").rpartition(".")
            function = called if part == "Prefect" else clock.timed(part, resolve_name(target))
            stack.enter_context(patch.object(resolve_name(owner), name, function))
        yield


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
