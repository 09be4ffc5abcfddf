"""Every check finds its planted fault, names the rows, and is silent on runs with other faults or none."""

from pathlib import Path

import pytest

from configs.audit import Checks
from storage.objects.store import Store
from storage.versions.checkpoints import Checkpoint
from tasks.audit.results import CheckResult
from tasks.score.verifier import Verifier
from tests.support.planted_faults import CLEAN, FAULTS, Found, Planted, examine, look, plant_all

pytestmark = pytest.mark.slow

NAMES = [fault.name for fault in FAULTS]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(str(tmp_path_factory.mktemp("faults")))


@pytest.fixture(scope="module")
def planted(store: Store, policies: list[Checkpoint]) -> list[Planted]:
    """All faults and a run without one, written to the store."""
    return plant_all(store, policies[:2])


@pytest.fixture(scope="module")
def found(store: Store, planted: list[Planted], verifier: Verifier) -> dict[str, Found]:
    """The results by fault."""
    return {
        result.planted.fault.name: result for result in examine(store, planted, verifier, Path(store.path("cache")))
    }


@pytest.fixture(scope="module")
def clean(store: Store, planted: list[Planted], verifier: Verifier) -> dict[str, CheckResult]:
    """The results of all checks for the run without a fault."""
    return look(store, [CLEAN], verifier, Path(store.path("cache")))


def test_every_check_has_a_fault() -> None:
    """A check without a planted fault might find nothing at all."""
    assert {fault.check for fault in FAULTS} == set(Checks.model_fields)
    assert len(set(NAMES)) == len(FAULTS)


@pytest.mark.parametrize("name", NAMES)
def test_a_planted_fault_is_found(found: dict[str, Found], name: str) -> None:
    """The check raises an alarm, and its cases include every planted row; no other check is alarmed without cause."""
    result = found[name]
    assert result.planted.ids, "nothing was planted"
    assert result.verdict in ("warn", "fail"), result.planted.fault.check
    assert result.missing == set()
    assert result.false_alarms == {}


@pytest.mark.parametrize("name", Checks.model_fields)
def test_a_clean_run_passes(clean: dict[str, CheckResult], name: str) -> None:
    """Every check passes, and not because it had nothing to check."""
    check = clean[name]
    assert check.verdict == "pass", check.says
    assert check.of > 0
