"""The trainer's own process trains the same weights, forwards progress, logs and errors, and never stays behind."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from configs import load
from tasks.child_process import sendable
from tasks.train.trainer import Trainer
from tasks.train.trainer_process import TrainerProcess
from tests.support.paths import ROOT
from tests.support.train_helpers import random_rows, save_tiny

CONFIG = load("smoke", ["ppo.kl.kl_ctl=0.1", "ppo.ppo_n_minibatches=2"])


@pytest.fixture(scope="module")
def trainer() -> Iterator[TrainerProcess]:
    with TrainerProcess(CONFIG) as trainer:
        yield trainer


def start(folder: Path, script: str) -> subprocess.Popen[str]:
    """Run a script from a file, because processes that are spawned import it; its output and errors are one pipe."""
    (folder / "flow.py").write_text(script)
    command, environment = [sys.executable, str(folder / "flow.py")], os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT
    )


@pytest.mark.slow
def test_same_weights_bit_for_bit(trainer: TrainerProcess, tmp_path: Path) -> None:
    """The files are equal, and so are canary, progress, the distance of two policies, and all metrics but the times."""
    folder, told = save_tiny(tmp_path / "start"), dict[str, list[str]]()
    results = {}
    for name, each in (("here", Trainer.of(CONFIG)), ("apart", trainer)):
        each.load(folder, None, seed=3, first=folder)
        lines = list[str]()
        metrics = [each.update(*random_rows(seed=number), number, lines.append) for number in (1, 2)]
        told[name] = [re.sub("in .* s$", "", line) for line in lines]
        each.save(tmp_path / name / "model", tmp_path / name / "state")
        timeless = [{k: v for k, v in of_one.items() if "second" not in k} for of_one in metrics]
        results[name] = timeless, each.canary(), each.distance(folder, *random_rows(seed=1))
    assert results["here"] == results["apart"]
    assert told["here"] == told["apart"] != []
    here, apart = tmp_path / "here", tmp_path / "apart"
    files = sorted(path.relative_to(here) for path in here.rglob("*.*"))
    assert len(files) > 4
    assert [file for file in files if (here / file).read_bytes() != (apart / file).read_bytes()] == []


@pytest.mark.slow
def test_errors_and_alarms_arrive(trainer: TrainerProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An error keeps its type and says where it was raised; the process goes on."""
    rows, scores = random_rows()
    trainer.load(save_tiny(tmp_path), None, seed=3)
    trainer.holds = "runs/a/checkpoints/000000"
    with pytest.raises(ValueError, match="turn") as caught:
        trainer.update(rows, scores[:1], 0)
    assert trainer.holds is None
    assert "tasks/train/samples.py" in "".join(caught.value.__notes__)
    trainer.load(tmp_path, None, seed=3)
    trainer.update(rows, [replace(score, success=0.0) for score in scores], 0)
    assert "ALARM: not one of" in caplog.text


class UnlikeItsArgumentsError(Exception):
    """Libraries have such errors: copies of it cannot be made."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def test_errors_that_cannot_be_sent_keep_their_text() -> None:
    try:
        raise UnlikeItsArgumentsError("here", "there")
    except UnlikeItsArgumentsError as error:
        sent = sendable(error, "the trainer's process")
    assert isinstance(sent, RuntimeError)
    assert str(sent).endswith("UnlikeItsArgumentsError: here and there")
    assert "test_trainer_process.py" in sent.__notes__[0]


@pytest.mark.slow
def test_an_alarm_is_logged_once(tmp_path: Path) -> None:
    """The process imports what the flow's main module does: Prefect, which adds handlers of its own."""
    script = f"""
from pathlib import Path
import flows.math_mt_ppo
from configs import load
from tasks.train.trainer_process import TrainerProcess
from tests.support.train_helpers import random_rows
from dataclasses import replace
if __name__ == "__main__":
    with TrainerProcess(load("smoke", [])) as trainer:
        trainer.load(Path({str(save_tiny(tmp_path))!r}), None, 3)
        rows, scores = random_rows()
        trainer.update(rows, [replace(score, success=0.0) for score in scores], 0)
"""
    with start(tmp_path, script) as flow:
        assert flow.communicate()[0].count("ALARM") == 1
    assert flow.returncode == 0


@pytest.mark.slow
def test_a_killed_process_is_named(tmp_path: Path) -> None:
    with TrainerProcess(CONFIG) as trainer:
        trainer.load(save_tiny(tmp_path), None, seed=3)
        os.kill(trainer._process.pid or 0, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"exit code -9 during `canary`.*continues from the last checkpoint"):
            trainer.canary()


@pytest.mark.slow
def test_an_interrupt_ends_the_process(tmp_path: Path) -> None:
    """Nobody would read the answer, and the next call would take it for its own."""

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    with TrainerProcess(CONFIG) as trainer:
        trainer.load(save_tiny(tmp_path), None, seed=3)
        with pytest.raises(KeyboardInterrupt):
            trainer.update(*random_rows(), 0, interrupt)
        assert trainer._process.exitcode == -signal.SIGKILL


@pytest.mark.slow
def test_no_process_stays_behind(tmp_path: Path) -> None:
    """The process ends with a flow that is killed, even in the middle of a long operation."""
    script = f"""
from pathlib import Path
from configs import load
from tasks.train.trainer_process import TrainerProcess
if __name__ == "__main__":
    trainer = TrainerProcess(load("smoke", []))
    print("pid", trainer._process.pid, flush=True)
    trainer._call("load", Path({str(save_tiny(tmp_path))!r}), None, 3, None)
    print("loaded", flush=True)
    trainer._connection.recv()
"""
    with start(tmp_path, script) as flow:
        assert flow.stdout
        lines = iter(flow.stdout.readline, "")
        process = psutil.Process(next(int(line.split()[1]) for line in lines if line.startswith("pid")))
        assert "loaded\n" in lines  # waits for it
        process.suspend()  # so that it cannot find its connection closed
        flow.kill()
    process.wait(60)
