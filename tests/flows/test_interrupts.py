import errno
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import indent
from typing import IO

import psutil
import pytest

from storage import layout
from storage.interrupts import LATEST_S
from storage.logs.log import Log
from storage.maintenance.verify import verify
from storage.objects.store import Store
from tests.support.chain_helpers import nonces
from tests.support.killed_flow import ANSWERS, MARK, OVERLAP, RANKS, Point, marked, start
from tests.support.paths import ROOT
from tests.support.sandbox_helpers import wait_gone
from tests.support.soak import scaled

pytestmark = pytest.mark.slow

SLACK_S = 3.0
"""The time that Python itself needs to end on a busy machine."""


def start_code(code: str, output: int | IO[str] = subprocess.PIPE) -> "subprocess.Popen[str]":
    """Start a process that runs `code`."""
    begin = "import asyncio, ctypes, os, signal, sys, threading, time, weakref\nfrom storage import interrupts\n"
    return subprocess.Popen(
        [sys.executable, "-c", begin + code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
    )


def command(act: str, settings: str = "") -> "subprocess.Popen[str]":
    """Start a command line that does `act`."""
    interrupt = "def interrupt(*_): signal.raise_signal(signal.SIGINT)"
    return start_code(f"{settings}\n{interrupt}\ndef act():\n{indent(act, '    ')}\ninterrupts.run(act, 'advice')")


def test_an_interrupt_that_python_drops_ends_the_command_at_the_deadline() -> None:
    """Python drops it in destructors and callbacks. Nobody waits for ever."""
    work = "class D:\n    def __del__(self): interrupt()\nD()\nwhile True: time.sleep(0.01)"
    job = command(work, "interrupts.LATEST_S = 0.5")
    _, err = job.communicate(timeout=60)
    assert job.returncode == 130
    assert "clean-up takes longer than 0.5 s: ended without it" in err


def test_an_interrupt_cleans_up() -> None:
    """It says so, and what to do next."""
    job = command("try: interrupt()\nfinally: time.sleep(0.5); print('cleaned up')")
    out, err = job.communicate(timeout=60)
    assert (job.returncode, out) == (130, "cleaned up\n")
    assert err.splitlines() == ["interrupted: cleaning up, 10 s at most; Ctrl-C again ends at once", "advice"]


def test_an_interrupt_within_exec_has_the_same_status(tmp_path: Path) -> None:
    """`exec` runs for example when a dataclass is made. `python -m` would end by SIGINT though it was handled."""
    act = "exec('signal.raise_signal(signal.SIGINT)', {'signal': signal})"
    (tmp_path / "act.py").write_text(f"import signal\nfrom storage import interrupts\ninterrupts.run(lambda: {act})")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "act"], cwd=tmp_path, env=environment, timeout=60, check=False)
    assert done.returncode == 130


def test_sigterm_cleans_up() -> None:
    """`docker stop` and `kill` end a command with a clean-up, as Ctrl-C does."""
    job = command("try: os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)\nfinally: print('cleaned up')")
    out, err = job.communicate(timeout=60)
    assert (job.returncode, out) == (143, "cleaned up\n")
    assert err.startswith("terminated: ")


def test_a_second_ctrl_c_ends_at_once() -> None:
    """This holds even while the clean-up is busy in C, where no Python signal handler runs."""
    lock = "lock(mutex); threading.Timer(1, os.write, [1, b'busy\\n']).start(); lock(mutex)"  # a deadlock
    settings = "interrupts.LATEST_S = 600; mutex, lock = bytes(64), ctypes.CDLL(None).pthread_mutex_lock"
    job = command(f"try: interrupt()\nfinally: {lock}", settings)
    assert job.stdout
    assert job.stdout.readline() == "busy\n"
    job.send_signal(signal.SIGINT)
    assert job.wait(60) == 130


def test_two_ctrl_c_in_a_row_are_an_interrupt() -> None:
    """Impatient people press Ctrl-C twice. The exit status is the same wherever the second one arrives."""
    dice = random.Random(3)
    for _ in range(scaled(12, 300)):
        job = command("print('works', flush=True)\nwhile True: time.sleep(0.001)")
        assert job.stdout
        assert job.stdout.readline() == "works\n"
        job.send_signal(signal.SIGINT)
        time.sleep(dice.uniform(0, 0.01))
        job.send_signal(signal.SIGINT)
        _, err = job.communicate(timeout=60)
        assert job.returncode in (130, -signal.SIGINT), err  # a shell calls both 130
        assert "Traceback" not in err


def test_a_second_sigterm_leaves_the_clean_up_alone() -> None:
    """Impatient people send `kill` twice."""
    kill = "os.kill(os.getpid(), signal.SIGTERM)"
    job = command(f"try: {kill}; time.sleep(60)\nfinally: {kill}; time.sleep(0.1); print('cleaned up')")
    out, _ = job.communicate(timeout=60)
    assert (job.returncode, out) == (143, "cleaned up\n")


@pytest.mark.parametrize(("number", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_it_ends_when_its_output_is_not_read(number: str, status: int) -> None:
    """With `make demo 2>&1 | tee log`, Ctrl-C ends `tee` first."""
    buffered = "sys.stdout = open(1, 'w', closefd=False); print('buffered')"  # independent of PYTHONUNBUFFERED
    job = command(f"{buffered}; sys.stdin.read(); signal.raise_signal(signal.{number})")
    assert job.stdin
    assert job.stdout
    assert job.stderr
    job.stdout.close()
    job.stderr.close()
    job.stdin.close()
    assert job.wait(60) == status


@pytest.mark.parametrize(
    "act",
    [
        "threading.Thread(target=threading.Event().wait).start(); interrupt()",
        "try: interrupt()\nfinally: threading.Event().wait()",
    ],
    ids=["a thread that never ends", "a clean-up that hangs"],
)
def test_it_ends_after_the_time_limit(act: str) -> None:
    """An interrupt at the wrong moment may leave a lock that is never released."""
    job = command(act, "interrupts.LATEST_S = 0.5")
    _, err = job.communicate(timeout=60)
    assert job.returncode == 130
    assert "clean-up takes longer than 0.5 s: ended without it, while the threads were here:\n" in err
    assert "in wait\n" in err


def test_children_end_with_the_time_limit() -> None:
    """The clean-up that hangs might have been theirs."""
    start = "child = subprocess.Popen(['sleep', '600'], env=os.environ | mark()); print(child.pid, flush=True)"
    job = command(
        f"import subprocess\nfrom storage.processes.child import mark\n{start}\n"
        "try: interrupt()\nfinally: threading.Event().wait()",
        "interrupts.LATEST_S = 0.5",
    )
    out, _ = job.communicate(timeout=60)
    wait_gone([psutil.Process(int(out))] if psutil.pid_exists(int(out)) else [])


def test_an_error_that_an_interrupt_caused_is_an_interrupt() -> None:
    """If a library turns the interrupt into another error, the exit status is the same."""
    job = command("try: interrupt()\nexcept BaseException: raise ValueError('x')")
    _, err = job.communicate(timeout=60)
    assert job.returncode == 130
    assert err.splitlines()[1:] == ["error while ending: ValueError('x')", "advice"]


def test_an_ignored_signal_stays_ignored() -> None:
    """A shell script starts its background jobs with SIGINT ignored."""
    settings = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
    job = command("signal.raise_signal(signal.SIGINT); print('goes on')", settings)
    assert job.communicate(timeout=60) == ("goes on\n", "")
    assert job.returncode == 0


def test_other_ends_keep_their_status() -> None:
    """An exit with a status or a message, and an unexpected error, keep their exit status."""
    for act, status, said in (("sys.exit(3)", 3, ""), ("sys.exit('no')", 1, "no\n"), ("return 2", 2, "")):
        job = command(act)
        assert job.communicate(timeout=60)[1] == said
        assert job.returncode == status
    job = command("assert False, 'a bug'")
    assert "AssertionError: a bug" in job.communicate(timeout=60)[1]
    assert job.returncode == 1


@dataclass(frozen=True, slots=True)
class Ended:
    """The result of a command that got a signal."""

    after_s: float
    took_s: float
    status: int
    printed: str

    def __str__(self) -> str:
        return f"signal after {self.after_s:4.1f} s, status {self.status} {self.took_s:.1f} s later"


def start_flow(overrides: list[str], log: Path) -> "subprocess.Popen[bytes]":
    """Start the main flow's command line, with Prefect's ordinary log level."""
    return subprocess.Popen(
        [sys.executable, "-m", "flows.math_mt_ppo", "smoke", *overrides],
        cwd=ROOT,
        env=os.environ | {MARK: str(log), "PREFECT_LOGGING_LEVEL": "INFO"},
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def end_by_signal(pid: int, number: int, after_s: float, log: Path, wait: Callable[[], int | None]) -> Ended:
    """Send the signal after `after_s`, wait for the end, and check that no process is left."""
    time.sleep(after_s)
    began = time.monotonic()
    (os.killpg if number == signal.SIGINT else os.kill)(pid, number)  # Ctrl-C goes to all processes of a command
    status = wait()
    assert status is not None, log.read_text()
    ended = Ended(after_s, time.monotonic() - began, status, log.read_text())
    _no_process_left(str(log))
    return ended


def _catches_sigterm(pid: int) -> bool:
    caught = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()
    return bool(caught) and bool(int(caught[0], 16) >> (signal.SIGTERM - 1) & 1)


def _no_process_left(mark: str) -> None:
    deadline = time.monotonic() + 200
    while left := marked(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.timeout(scaled(600, 7200))
def test_ctrl_c_at_any_moment_of_a_command(overrides: list[str], tmp_path: Path) -> None:
    """The first command is interrupted while its server starts or serves, the others at any time after an import."""
    own_servers = [override for override in overrides if "inference.urls" not in override]
    dice, seconds = random.Random(1), []
    for number in range(scaled(1, 30)):
        log = tmp_path / f"log-{number}"
        job = start_flow([*own_servers, "run.iterations=100000"], log)
        while not _catches_sigterm(job.pid):  # until then Python itself starts
            time.sleep(0.001)
        server = tmp_path / "cache/logs/smoke/vllm-0.log"
        while number == 0 and not server.is_file():
            assert job.poll() is None, log.read_text()
            time.sleep(0.01)
        moment = dice.uniform(0, scaled(15, 60))
        ended = end_by_signal(job.pid, signal.SIGINT, moment, log, lambda job=job: job.wait(120))  # type: ignore[misc]
        assert_clean(ended, 130)
        seconds.append(ended.took_s)
    print_seconds(seconds)


@pytest.mark.long
@pytest.mark.timeout(scaled(600, 7200))
@pytest.mark.parametrize(
    ("number", "more"),
    [
        (signal.SIGINT, []),
        (signal.SIGTERM, OVERLAP),
        *scaled([], [(signal.SIGINT, OVERLAP), (signal.SIGTERM, []), (signal.SIGINT, RANKS), (signal.SIGTERM, RANKS)]),
    ],
)
def test_a_signal_at_any_moment_of_a_run(
    overrides: list[str],
    environment: dict[str, str],
    tmp_path: Path,
    number: signal.Signals,
    more: list[str],
) -> None:
    """Each attempt continues the run of the attempt before, and in the end the run is whole."""
    settings = [*overrides, *more]
    store, dice, seconds = Store(f"{tmp_path}/var"), random.Random(2), []
    for attempt in range(scaled(2, 35)):
        log = tmp_path / f"log-{attempt}"
        job = start([*settings, "run.iterations=100000"], None, log, environment | {MARK: str(log)})
        while Log(store, layout.lease("smoke")).length() <= attempt:
            assert job.is_alive(), log.read_text()
            time.sleep(0.01)
        assert job.pid
        moment = dice.uniform(0, scaled(3, 12))
        ended = end_by_signal(job.pid, number, moment, log, lambda job=job: (job.join(120), job.exitcode)[1])  # type: ignore[misc]
        assert_clean(ended, 128 + number)
        seconds.append(ended.took_s)
    print_seconds(seconds)
    log = tmp_path / "log"
    done = sum(item.path.endswith("/manifest.json") for item in store.walk("runs/smoke/checkpoints"))
    job = start([*settings, f"run.iterations={done}"], None, log, environment)
    job.join(200)
    assert job.exitcode == 0, log.read_text()
    assert verify(store, [layout.checkpoint("smoke", done)], deep=True).findings == []


STAGES = [
    pytest.param(Point("train", "tasks.train.step:Stepper.take"), [], id="train"),
    pytest.param(Point("train", ANSWERS, 3), RANKS, id="train with ranks"),
    pytest.param(Point("rollout ahead", "tasks.rollout.collector:Collector._episode", 20), OVERLAP, id="rollout ahead"),
    pytest.param(Point("rollout", "tasks.rollout.collector:Collector._episode", 3), [], id="rollout"),
    pytest.param(Point("score", "tasks.score.scoring:_score", 2), [], id="score"),
]


@pytest.mark.long
@pytest.mark.parametrize(("point", "settings"), scaled(STAGES[:3], STAGES))
def test_an_interrupt_within_a_stage_resumes(
    overrides: list[str],
    environment: dict[str, str],
    tmp_path: Path,
    point: Point,
    settings: list[str],
) -> None:
    """An interrupted stage commits nothing, and the next attempt continues from the version before."""
    log, run = tmp_path / "log", tmp_path / "var/runs/smoke"
    environment |= {MARK: str(log)}
    job = start([*overrides, *settings], replace(point, number=signal.SIGINT), log, environment)
    job.join(200)
    assert job.exitcode == 130, log.read_text()
    _no_process_left(str(log))
    before = nonces(run)
    assert not (run / "checkpoints/000001/manifest.json").exists()
    for path in run.glob("trajectories/*/manifest.json"):
        assert "failed" not in json.loads(path.read_text())["metrics"]["status"]
    job = start([*overrides, *settings], None, log, environment)
    job.join(200)
    assert job.exitcode == 0, log.read_text()
    assert before.items() <= nonces(run).items()
    assert (run / "report/summary.json").exists()


def print_seconds(seconds: list[float]) -> None:
    figures = f"min {min(seconds):.1f} s, median {statistics.median(seconds):.1f} s, max {max(seconds):.1f} s"
    print(f"{len(seconds)} moments: {figures}; load average {os.getloadavg()[0]:.1f}", flush=True)


def assert_clean(ended: Ended, status: int) -> None:
    """Check that the command ended in time, with this status, and without a traceback."""
    print(ended, flush=True)
    report = f"{ended}\n{ended.printed}"
    assert ended.status == status, report
    assert ended.took_s < LATEST_S + SLACK_S, report
    assert "Traceback" not in ended.printed, report
    assert "ended without it" not in ended.printed, report


BUFFERED = pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])


@BUFFERED
@pytest.mark.parametrize("line", ["storage --root ROOT alias", "flows.math_mt_ppo --print-config"])
def test_a_full_disk_behind_the_output_is_an_error_without_a_traceback(
    line: str, unbuffered: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds if Python notices while it prints, and if it notices only at its end."""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    (tmp_path / "some").touch()
    command = [sys.executable, "-m", *line.replace("ROOT", str(tmp_path)).split()]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.returncode == 1
    assert re.fullmatch(rf"(error: .*{os.strerror(errno.ENOSPC)}\n)+", done.stderr), done.stderr
