"""Seconds from the command to the first episode: of the demo, and of the same run when it goes on.

The parts are read where they leave a trace: the lines that the command prints, and the log of vLLM.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.fixtures import Lab
from tests.benchmarks.result import Row
from tests.support.paths import ROOT

_MARKS = {
    "run": r" run \S+ (begins|continues)",
    "vLLM has its imports": r"non-default args",
    "vLLM answers": r"Application startup complete",
    "first policy in": r"Reloading and processing weights took",
}
"""The line with which each part ends, in what the command prints or in vLLM's log."""
_POLL_S = 0.02


def measure(lab: Lab) -> Iterator[Row]:
    """Run the demo for one iteration, and then for another one."""
    for iterations, kind in enumerate(("a new demo", "a continued demo"), 1):
        seconds, parts = _start(lab, iterations)
        detail = ", ".join(f"{name} {at:.1f}" for name, at in parts.items())
        yield Row(
            f"start of {kind}", f"{seconds:.1f} s to the first stored episodes", f"seconds since the command: {detail}"
        )


def _start(lab: Lab, iterations: int) -> tuple[float, dict[str, float]]:
    """Run the demo; return when its first episodes were stored, and when the parts of the start ended."""
    store, log = Path(lab.store.root), lab.scratch / "cache/logs/benchmarks/vllm-0.log"
    log.unlink(missing_ok=True)
    before, parts = set(_rows(store)), dict[str, float]()
    command = [sys.executable, "-m", "flows.math_mt_ppo", "demo", *lab.settings]
    command += [f"run.iterations={iterations}", "evaluation.every=1000"]
    output = lab.scratch / "start.log"
    started = time.monotonic()
    with output.open("wb") as out:
        environment = {**os.environ, "PREFECT_HOME": f"{lab.scratch}/prefect"}
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, env=environment)
    found = None
    while process.poll() is None:
        now = time.monotonic() - started
        text = output.read_text() + (log.read_text(errors="replace") if log.exists() else "")
        parts |= {name: now for name, line in _MARKS.items() if name not in parts and re.search(line, text)}
        if found is None and set(_rows(store)) - before:
            found = now
        time.sleep(_POLL_S)
    assert process.returncode == 0, output.read_text()
    assert found, "no episode was stored"
    return found, parts


def _rows(store: Path) -> Iterator[Path]:
    return store.glob("runs/benchmarks/trajectories/**/*.parquet")
