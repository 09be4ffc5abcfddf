"""OpenMP's threads wait briefly, so that trainer and servers can share the cores."""

import os

import pytest
import yaml

from flows.launch.threads import share_cores
from tests.support.paths import ROOT

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def test_threads_sleep_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise threads that wait keep their core busy. Deployed runs have the same settings."""
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    share_cores()
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
    assert 0 < int(os.environ["GOMP_SPINCOUNT"]) <= 1000
    deployed = yaml.safe_load((ROOT / "prefect.yaml").read_text())["definitions"]["work_pool"]["job_variables"]["env"]
    assert {name: deployed[name] for name in NAMES} == {name: os.environ[name] for name in NAMES}
