"""Command lines take options, overrides and names in any order, and name what they do not know."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from storage.logs import catalog
from storage.objects.store import Store
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow


def call(line: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", *line.split()]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("flows.evaluate evaluation.samples=4 --print-config demo run.seed=7 --policy=X", "demo"),
        ("flows.retrain --print-config evaluation.samples=4 run.seed=7", "nightly"),
    ],
)
def test_a_flow_takes_them_in_any_order(line: str, name: str) -> None:
    """Overrides also work without the name of a configuration, for the default one."""
    done = call(line)
    assert done.returncode == 0, done.stderr
    printed = yaml.safe_load(done.stdout)
    assert (printed["run"]["name"], printed["run"]["seed"], printed["evaluation"]["samples"]) == (name, 7, 4)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("flows.retrain retrain run.seed=7 smoke", "override 'smoke' is not key=value"),
        ("storage diff one --root ROOT", "arguments are required: VERSION"),
        ("storage ls --bogus", "unrecognized arguments: --bogus"),
        ("flows.rollout smoke --iteration -1", "argument --iteration: '-1' is not a whole number of at least 0"),
    ],
)
def test_a_wrong_argument_is_refused(line: str, says: str, tmp_path: Path) -> None:
    done = call(line.replace("ROOT", str(tmp_path)))
    assert done.returncode == 2
    assert says in done.stderr


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("storage verify one --deep two --root ROOT", "ROOT/one was never committed"),
        ("storage alias rollback --root ROOT --reason why champion", "'champion' has 0 moves"),
        ("tasks.audit read one --port 0 two --root ROOT", "'one' is neither a run"),
    ],
)
def test_a_command_takes_them_in_any_order(line: str, says: str, tmp_path: Path) -> None:
    """Options of all commands (`--root`) may also follow the command. The error shows which names were read."""
    catalog.enter(Store(str(tmp_path)), "runs/r/run", "run", [], "")
    done = call(line.replace("ROOT", str(tmp_path)))
    assert done.returncode == 1
    assert says.replace("ROOT", str(tmp_path)) in done.stderr


@pytest.mark.usefixtures("environment")
def test_a_flow_that_cannot_read_its_problems_says_so_without_a_traceback(tmp_path: Path) -> None:
    """With a traceback the error would come after a hundred lines of Prefect's output."""
    problems = 'policy.warm_start.teaches.kind=arithmetic problems.train={"kind":"jsonl","path":"/no","preset":"gsm8k"}'
    done = call(f"flows.math_mt_ppo smoke storage.root={tmp_path}/var storage.cache={tmp_path}/cache {problems}")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]  # Prefect may log after it
    assert [error.partition(" cannot")[0] for error in errors] == ["error: /no"]


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    "line",
    [
        "flows.history storage.root=ROOT",
        "flows.retrain --explain storage.root=ROOT",
    ],
)
def test_flows_that_only_read_refuse_an_empty_root(line: str, tmp_path: Path) -> None:
    """Otherwise a mistyped root would look like a store without any problem."""
    done = call(line.replace("ROOT", f"{tmp_path}/vra"))
    assert done.returncode == 1
    assert f"error: nothing is stored in {tmp_path}/vra: check the root" in done.stderr
    assert not (tmp_path / "vra").exists()
