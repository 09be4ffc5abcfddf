"""Tests of packages that are not in this environment run in another one, which `make setup-agents` makes."""

import os
import subprocess
import sys

import pytest

from configs import ConfigError
from flows.run.configuration import resolve
from tests.support.overlay import is_made
from tests.support.paths import ROOT

FOLDER, LOCK = ROOT / "var/agents/.venv", ROOT / "requirements-agents.lock"
REASON = "make setup-agents"
"""What tests of these packages say when they are skipped here."""


@pytest.mark.slow
@pytest.mark.long
def test_they_pass_where_their_packages_are() -> None:
    """All of them, and none is skipped there."""
    if not is_made(FOLDER, LOCK):
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"no {FOLDER}: {REASON}")
    needing = [str(path) for path in (ROOT / "tests").rglob("test_*.py") if f'reason="{REASON}"' in path.read_text()]
    command = [str(FOLDER / "bin/python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", *needing]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-10_000:]
    assert "skipped" not in done.stdout.splitlines()[-1]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a package is not installed, the configuration that needs it is refused with the remedy."""
    monkeypatch.setitem(sys.modules, "gymnasium", None)  # as if it were not there, wherever this runs
    monkeypatch.delitem(sys.modules, "tasks.environments.gymnasium_env", raising=False)
    with pytest.raises(ConfigError, match="pip install gymnasium"):
        resolve("smoke", ["environment={type: gymnasium, args: {id: x}}"])
