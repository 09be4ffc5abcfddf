"""OpenMP's threads wait briefly, so that trainer and servers can share the cores."""

import os

import pytest

from flows.launch.threads import share_cores


def test_threads_sleep_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without these settings, threads that wait keep their core busy."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    share_cores()
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
    assert 0 < int(os.environ["GOMP_SPINCOUNT"]) <= 1000


def test_the_users_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user with cores to spare may let threads spin."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    monkeypatch.setenv("GOMP_SPINCOUNT", "infinity")
    share_cores()
    assert (os.environ["OMP_WAIT_POLICY"], os.environ["GOMP_SPINCOUNT"]) == ("active", "infinity")
