import errno
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import indent

import pytest

from storage import layout
from storage.maintenance.verify import verify
from storage.objects.store import Store
from tests.support.chain_helpers import nonces
from tests.support.killed_flow import ANSWERS, MARK, OVERLAP, RANKS, Point, no_process_left, start
from tests.support.paths import ROOT
from tests.support.soak import scaled

pytestmark = pytest.mark.slow

DROPPED = re.compile(r"Exception ignored in: .*\nTraceback .*\n(?:[ \t].*\n|\n)*(?:KeyboardInterrupt|SystemExit)\b.*\n")
"""What Python prints when it drops an interrupt in a destructor; the time limit then ends the command."""
READ = "storage.objects.store:Store.read"
EPISODE = "tasks.rollout.conversation:Conversation.play"


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


@pytest.mark.parametrize("module", ["flows.math_mt_ppo", "storage", "tasks.audit"])
def test_an_interrupt_while_a_command_is_imported_leaves_no_traceback(module: str) -> None:
    """Commands import for seconds before they could clean up, and have nothing to clean up then."""
    arguments = [sys.executable, "-X", "importtime", "-m", module, "--help"]
    with subprocess.Popen(arguments, cwd=ROOT, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as begun:
        assert begun.stderr
        while "storage.errors" not in begun.stderr.readline():  # the packages are imported by then, most is not
            pass
        begun.send_signal(signal.SIGINT)
        assert "Traceback" not in begun.stderr.read()
    assert begun.returncode == 130


KILL = "os.kill(os.getpid(), signal.SIGTERM)"
LATE = "interrupts.LATEST_S = 0.5"
LATE_SAYS = "clean-up takes longer than 0.5 s: ended without it, while the threads were here:\n"
CASES = {  # act, settings, status, what it prints, what it says
    "an interrupt cleans up": (
        "try: interrupt()\nfinally: time.sleep(0.5); print('cleaned up')",
        *("", 130, "cleaned up\n"),
        "interrupted: cleaning up, 10 s at most; Ctrl-C again ends at once\nadvice\n",
    ),
    "a second SIGTERM leaves the clean-up alone": (
        f"try: {KILL}; time.sleep(60)\nfinally: {KILL}; time.sleep(0.1); print('cleaned up')",
        *("", 143, "cleaned up\n", "terminated: "),
    ),
    "Python drops an interrupt in a destructor": (
        "class D:\n    def __del__(self): interrupt()\nD()\nwhile True: time.sleep(0.01)",
        *(LATE, 130, "", LATE_SAYS),
    ),
    "an interrupt within exec": ("exec('signal.raise_signal(signal.SIGINT)')", "", 130, "", "advice"),
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


def test_it_ends_when_its_output_is_not_read() -> None:
    """With `make demo 2>&1 | tee log`, Ctrl-C ends `tee` first."""
    buffered = "sys.stdout = open(1, 'w', closefd=False); print('buffered')"  # independent of PYTHONUNBUFFERED
    job = command(f"{buffered}; sys.stdin.read(); interrupt()")
    for stream in (job.stdout, job.stderr, job.stdin):
        assert stream
        stream.close()
    assert job.wait(60) == 130


def assert_clean(printed: str) -> None:
    """Check that there is no traceback, and that the clean-up was no longer than the time limit."""
    others, dropped = DROPPED.subn("", printed)
    assert "Traceback" not in others, printed
    assert dropped or "ended without it" not in others, printed


SIGNALS = [
    pytest.param(signal.SIGINT, Point("train", "tasks.train.trainer:take_step"), [], id="train"),
    pytest.param(signal.SIGTERM, Point("train", ANSWERS, 3), RANKS, id="train with ranks"),
    pytest.param(signal.SIGTERM, Point("rollout ahead", EPISODE, 20), OVERLAP, id="rollout ahead"),
    pytest.param(signal.SIGINT, Point("rollout", EPISODE, 3), [], id="rollout"),
    pytest.param(signal.SIGTERM, Point("score", "tasks.score.scoring:Grades.add", 2), [], id="score"),
    *scaled([], [pytest.param(signal.SIGINT, Point("any", READ, nth), OVERLAP) for nth in range(1, 700, 20)]),
]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("number", "point", "settings"), SIGNALS)
def test_a_run_that_a_signal_has_ended_goes_on(
    overrides: list[str],
    environment: dict[str, str],
    tmp_path: Path,
    number: signal.Signals,
    point: Point,
    settings: list[str],
) -> None:
    """It ends in time and leaves no process; it commits nothing, and the next attempt makes the run whole."""
    log, run, store = tmp_path / "log", tmp_path / "var/runs/smoke", Store(f"{tmp_path}/var")
    environment |= {MARK: str(log)}
    job = start([*overrides, *settings], replace(point, number=number), log, environment)
    job.join(200)
    assert job.exitcode == 128 + number, log.read_text()
    assert_clean(log.read_text())
    no_process_left(str(log))
    before = nonces(run)
    assert point.stage == "any" or not (run / "checkpoints/000001/manifest.json").exists()
    for path in run.glob("trajectories/*/manifest.json"):
        assert "failed" not in json.loads(path.read_text())["metrics"]["status"]
    job = start([*overrides, *settings], None, log, environment)
    job.join(200)
    assert job.exitcode == 0, log.read_text()
    assert before.items() <= nonces(run).items()
    assert (run / "report/summary.json").exists()
    assert verify(store, [layout.checkpoint("smoke", 2)], deep=True).findings == []


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_full_disk_behind_the_output_is_an_error_without_a_traceback(
    unbuffered: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds if Python notices while it prints, and if it notices only at its end."""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    (tmp_path / "some").touch()
    command = [sys.executable, "-m", "storage", "--root", str(tmp_path), "alias"]
    run = partial(subprocess.run, command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    with open("/dev/full", "w") as full:
        done = run(stdout=full)
    assert done.returncode == 1
    assert re.fullmatch(rf"(error: .*{os.strerror(errno.ENOSPC)}\n)+", done.stderr), done.stderr
    reading, writing = os.pipe()
    os.close(reading)  # as after `… | head`
    assert not run(stdout=writing).stderr
    os.close(writing)
