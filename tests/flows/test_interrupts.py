import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import indent

import psutil
import pytest

from storage import layout
from storage.interrupts import LATEST_S
from storage.logs.log import Log
from storage.maintenance.verify import verify
from storage.objects.store import Store
from tests.support.chain_helpers import nonces
from tests.support.killed_flow import ANSWERS, MARK, OVERLAP, RANKS, Point, no_process_left, start
from tests.support.paths import ROOT
from tests.support.sandbox_helpers import wait_gone
from tests.support.soak import scaled

pytestmark = pytest.mark.slow

SLACK_S = 3.0
"""The time that Python itself needs to end on a busy machine."""


def command(act: str, settings: str = "") -> "subprocess.Popen[str]":
    """Start a command line that does `act`."""
    code = (
        "import asyncio, ctypes, os, signal, subprocess, sys, threading, time\nfrom storage import interrupts\n"
        f"from storage.processes.child import mark\n{settings}\n"
        f"def interrupt(*_): signal.raise_signal(signal.SIGINT)\n"
        f"def act():\n{indent(act, '    ')}\ninterrupts.run(act, 'advice')"
    )
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, **pipes)  # type: ignore[call-overload, no-any-return]


KILL = "os.kill(os.getpid(), signal.SIGTERM)"
LATE = "interrupts.LATEST_S = 0.5"
LATE_SAYS = "clean-up takes longer than 0.5 s: ended without it, while the threads were here:\n"
CASES = {  # act, settings, status, what it prints, what it says
    "an interrupt cleans up": (
        "try: interrupt()\nfinally: time.sleep(0.5); print('cleaned up')",
        *("", 130, "cleaned up\n"),
        "interrupted: cleaning up, 10 s at most; Ctrl-C again ends at once\nadvice\n",
    ),
    "SIGTERM cleans up": (f"try: {KILL}; time.sleep(60)\nfinally: print('x')", "", 143, "x\n", "terminated: "),
    "a second SIGTERM leaves the clean-up alone": (
        f"try: {KILL}; time.sleep(60)\nfinally: {KILL}; time.sleep(0.1); print('cleaned up')",
        *("", 143, "cleaned up\n", "terminated: "),
    ),
    "Python drops an interrupt in a destructor": (
        "class D:\n    def __del__(self): interrupt()\nD()\nwhile True: time.sleep(0.01)",
        *(LATE, 130, "", LATE_SAYS),
    ),
    "an interrupt within exec": ("exec('signal.raise_signal(signal.SIGINT)')", "", 130, "", "advice"),
    "a thread that never ends": (
        "threading.Thread(target=threading.Event().wait).start(); interrupt()",
        *(LATE, 130, "", LATE_SAYS),
    ),
    "a clean-up that hangs": ("try: interrupt()\nfinally: threading.Event().wait()", LATE, 130, "", "in wait\n"),
    "an interrupt that a library turned into an error": (
        "try: interrupt()\nexcept BaseException: raise ValueError('x')",
        *("", 130, "", "error while ending: ValueError('x')\nadvice\n"),
    ),
    "an ignored signal stays ignored": (
        "interrupt(); print('goes on')",
        *("signal.signal(signal.SIGINT, signal.SIG_IGN)", 0, "goes on\n", ""),
    ),
    "an exit with a status": ("sys.exit(3)", "", 3, "", ""),
    "an exit with a message": ("sys.exit('no')", "", 1, "", "no\n"),
    "a bug": ("assert False, 'a bug'", "", 1, "", "AssertionError: a bug"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_status_says_how_a_command_ended(case: str) -> None:
    """Interrupts and `kill` clean up, or end without it after the time limit. Nobody waits for ever."""
    act, settings, status, prints, says = CASES[case]
    job = command(act, settings)
    out, err = job.communicate(timeout=60)
    assert (job.returncode, out) == (status, prints), err
    assert says in err


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
    for _ in range(scaled(4, 300)):
        job = command("print('works', flush=True)\nwhile True: time.sleep(0.001)")
        assert job.stdout
        assert job.stdout.readline() == "works\n"
        job.send_signal(signal.SIGINT)
        time.sleep(dice.uniform(0, 0.01))
        job.send_signal(signal.SIGINT)
        _, err = job.communicate(timeout=60)
        assert job.returncode in (130, -signal.SIGINT), err  # a shell calls both 130
        assert "Traceback" not in err


def test_it_ends_when_its_output_is_not_read() -> None:
    """With `make demo 2>&1 | tee log`, Ctrl-C ends `tee` first."""
    buffered = "sys.stdout = open(1, 'w', closefd=False); print('buffered')"  # independent of PYTHONUNBUFFERED
    job = command(f"{buffered}; sys.stdin.read(); interrupt()")
    for stream in (job.stdout, job.stderr, job.stdin):
        assert stream
        stream.close()
    assert job.wait(60) == 130


def test_children_end_with_the_time_limit() -> None:
    """The clean-up that hangs might have been theirs."""
    child = "child = subprocess.Popen(['sleep', '600'], env=os.environ | mark()); print(child.pid, flush=True)"
    job = command(f"{child}\ntry: interrupt()\nfinally: threading.Event().wait()", LATE)
    out, _ = job.communicate(timeout=60)
    wait_gone([psutil.Process(int(out))] if psutil.pid_exists(int(out)) else [])


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
    no_process_left(str(log))
    return ended


def _catches_sigterm(pid: int) -> bool:
    caught = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()
    return bool(caught) and bool(int(caught[0], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.long
@pytest.mark.timeout(scaled(600, 7200))
def test_ctrl_c_at_any_moment_of_a_command(overrides: list[str], tmp_path: Path) -> None:
    """The first command is interrupted while its server starts or serves, the others at any time after an import."""
    own_servers = [override for override in overrides if "inference.urls" not in override]
    dice = random.Random(1)
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
    store, dice = Store(f"{tmp_path}/var"), random.Random(2)
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
    no_process_left(str(log))
    before = nonces(run)
    assert not (run / "checkpoints/000001/manifest.json").exists()
    for path in run.glob("trajectories/*/manifest.json"):
        assert "failed" not in json.loads(path.read_text())["metrics"]["status"]
    job = start([*overrides, *settings], None, log, environment)
    job.join(200)
    assert job.exitcode == 0, log.read_text()
    assert before.items() <= nonces(run).items()
    assert (run / "report/summary.json").exists()


def assert_clean(ended: Ended, status: int) -> None:
    """Check that the command ended in time, with this status, and without a traceback."""
    print(ended, flush=True)
    report = f"{ended}\n{ended.printed}"
    assert ended.status == status, report
    assert ended.took_s < LATEST_S + SLACK_S, report
    assert "Traceback" not in ended.printed, report
    assert "ended without it" not in ended.printed, report


def test_files_and_sockets_do_not_get_the_numbers_of_missing_standard_streams() -> None:
    """If a server inherited a socket as file descriptor 2, its log would replace the socket."""
    code = "import os, socket; from storage import interrupts; interrupts.run(lambda: socket.socket().fileno())"
    done = subprocess.run(["sh", "-c", f"exec {sys.executable} -c '{code}' <&- >&- 2>&-"], cwd=ROOT, check=False)
    assert done.returncode > 2


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_full_disk_behind_the_output_is_an_error_without_a_traceback(
    unbuffered: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds if Python notices while it prints, and if it notices only at its end."""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    (tmp_path / "some").touch()
    command = [sys.executable, "-m", "storage", "--root", str(tmp_path), "alias"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.returncode == 1
    assert re.fullmatch(rf"(error: .*{os.strerror(errno.ENOSPC)}\n)+", done.stderr), done.stderr
