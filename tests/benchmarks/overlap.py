"""Sequential iterations against the same iterations with `run.overlap`.

`measure` runs the real flow in new processes, which run this file with a number of seconds and the flow's overrides as
arguments. If the number is above 0, an engine that only waits this long for every request replaces vLLM.
"""

import json
import sys
from statistics import fmean

from storage import layout
from storage.logs import catalog
from storage.versions import manifests
from tests.benchmarks.fixtures import Lab
from tests.benchmarks.result import Row

GOAL = 1.2
ITERATIONS = 8
TURNS = 2


def measure(lab: Lab) -> list[Row]:
    """Measure with an engine that waits about as long as training takes, and with vLLM on the same cores."""
    # The first run measures the training time. The requests of the two turns then wait half of it each.
    _, training = _run(lab, "probe", 0.1, overlap=False, iterations=3)
    return [_row(lab, "engine that waits", training / TURNS), _row(lab, "vLLM on the same cores", 0.0)]


def _row(lab: Lab, engine: str, seconds: float) -> Row:
    name = engine.split()[0]
    apart, _ = _run(lab, f"apart-{name}", seconds, overlap=False)
    together, _ = _run(lab, f"together-{name}", seconds, overlap=True)
    rollout, train = _stages(lab, f"apart-{name}")
    ideal = rollout + ITERATIONS * max(rollout, train)  # nothing overlaps the first rollout
    ratio = together / ideal
    return Row(
        benchmark=f"overlap, {engine}: wall time / larger stage",
        measured=f"{ratio:.2f}",
        goal=f"{GOAL} or less" if seconds else "",
        met=ratio <= GOAL if seconds else None,
        detail=f"{ITERATIONS} iterations: overlapped {together:.1f} s, apart {apart:.1f} s, ideal {ideal:.1f} s; "
        f"rollout {rollout:.2f} s, the rest {train:.2f} s an iteration when apart",
    )


def _run(lab: Lab, name: str, seconds: float, overlap: bool, iterations: int = ITERATIONS) -> tuple[float, float]:
    """Run the flow.

    Returns:
        Wall seconds from the first evaluation to the last checkpoint, and the mean training seconds of an iteration.
    """
    overrides = [f"run.name={name}", f"run.iterations={iterations}", f"evaluation.every={iterations}"]
    overrides += ["policy.warm_start=null", f"policy.path={lab.store.uri(lab.policy.version)}"]
    overrides += [f"run.overlap={str(overlap).lower()}", f"rollout.max_head_offpolicyness={int(overlap)}"]
    lab.run_module("overlap", str(seconds), *lab.overrides, *overrides)
    entries, folder = catalog.read_all(lab.store), f"runs/{name}/evaluations/000000/"
    first = next(entry.version for entry in entries if entry.kind == "scores" and entry.version.startswith(folder))
    last = layout.checkpoint(name, iterations)
    begin, end = (manifests.read(lab.store, version).created_at for version in (first, last))
    training = [manifests.read(lab.store, layout.checkpoint(name, i + 1)).metrics for i in range(iterations)]
    return (end - begin).total_seconds(), fmean(
        metrics["seconds/prepare"] + metrics["seconds/update"] for metrics in training[1:]
    )


def _stages(lab: Lab, name: str) -> tuple[float, float]:
    """Return an iteration's mean seconds to the commit of its trajectories, and from there to the next checkpoint."""
    played, trained = [], []
    before = manifests.read(lab.store, layout.checkpoint(name, 1)).created_at
    for iteration in range(1, ITERATIONS):
        middle = manifests.read(lab.store, layout.trajectories(name, iteration)).created_at
        after = manifests.read(lab.store, layout.checkpoint(name, iteration + 1)).created_at
        played.append((middle - before).total_seconds())
        trained.append((after - middle).total_seconds())
        before = after
    return fmean(played), fmean(trained)


def main(seconds: float, overrides: list[str]) -> None:
    from contextlib import nullcontext
    from unittest.mock import patch

    from flows.math_mt_ppo import math_mt_ppo
    from tests.support.waiting_engine import WaitingEngine, opens

    with patch("flows.math_mt_ppo.open_engine", opens(WaitingEngine(seconds))) if seconds else nullcontext():
        print(json.dumps(math_mt_ppo("demo", overrides)))


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
