"""The program for GPUs, rehearsed on the CPU: what it computes is there, and what goes wrong ends nothing else."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.__main__ import CHECKS, _supervised
from tests.gpu.checks import Check, attempt, limited
from tests.support.paths import ROOT


def test_numbers_without_a_limit_or_that_are_nan() -> None:
    """NaN is above every limit; an error is a failed check."""
    assert limited("a", {"x": 0.1, "y": 9.0}, {"x": 0.2}).status == "pass"
    assert limited("a", {"x": 0.3}, {"x": 0.2}).said == "x is above 0.2"
    assert limited("a", {"x": float("nan")}, {"x": 0.2}).status == "fail"
    assert attempt("a", lambda: Check("a", "pass", {"x": 1 / 0})).said.startswith("ZeroDivisionError")


@pytest.mark.long
def test_the_whole_program_without_a_gpu(tmp_path: Path) -> None:
    """Every check passes with tiny shapes, vLLM included; what needs CUDA is named as skipped."""
    command = [sys.executable, "-m", "tests.gpu", "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    checks = {check["name"]: check for of_name in report["checks"].values() for check in of_name}
    assert report["checks"].keys() == CHECKS.keys()
    assert {"torch", "transformers"} <= report["versions"].keys()
    skipped = {name for name, check in checks.items() if check["status"] == "skipped"}
    assert skipped == {"NCCL", "pipeline, CUDA graphs", "weights reloaded, CUDA graphs"}
    assert f"{len(checks) - 3} passed, 0 failed, 3 skipped" in done.stdout
    assert checks["float32, defaults"]["numbers"]["gradients"] > 0  # the two were not the same computation


def test_a_check_that_takes_too_long_or_has_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped, and has failed; one that cannot begin is named."""
    monkeypatch.setitem(CHECKS, "losses", ("numerics", 0.05, "imports alone take longer"))
    (stopped,) = _supervised("losses", "cpu", time.monotonic() + 100, tmp_path)
    assert (stopped.name, stopped.status) == ("losses: not ended", "fail")
    (late,) = _supervised("losses", "cpu", time.monotonic() + 1, tmp_path)
    assert (late.status, late.said) == ("skipped", "no time is left: --minutes")
