"""Spread the test files over processes so that two of them start vLLM, and each starts Prefect's server at most once.

Starting these servers takes as much processor time as the tests of a whole file.
"""

import pytest
from xdist.scheduler import LoadFileScheduling

GROUPS = {
    "tests/flows/test_arguments.py": "first",
    "tests/flows/test_bad_network.py": "first",
    "tests/flows/test_flows.py": "first",
    "tests/flows/test_killed.py": "first",
    "tests/flows/test_local_server.py": "first",
    "tests/flows/test_mixtures.py": "first",
    "tests/flows/test_models_beside.py": "first",
    "tests/retrain/test_retrain.py": "first",
    "tests/agents/test_turn_ends.py": "second",
    "tests/audit/test_flow.py": "second",
    "tests/rollout/test_selection.py": "second",
    "tests/evaluate/test_evaluate.py": "second",
    "tests/flows/test_interrupts.py": "second",
    "tests/flows/test_kept_stores.py": "second",
    "tests/flows/test_monitoring.py": "second",
    "tests/flows/test_other_users.py": "second",
    "tests/flows/test_safety.py": "second",
    "tests/flows/test_several_devices.py": "second",
    "tests/inference/test_engine.py": "second",
    "tests/problems/test_exclusions.py": "second",
    "tests/retrain/test_schedule.py": "second",
    "tests/cluster/test_cluster.py": "ranks",
    "tests/cluster/test_kills.py": "ranks",
    "tests/cluster/test_local.py": "ranks",
    "tests/cluster/test_trainer.py": "ranks",
    "tests/flows/test_demo_llm.py": "ranks",
}
"""The group of each file that uses these servers, or waits long for ranks. One process runs all files of a group; the
first two groups take about the same time."""


class FilesByServer(LoadFileScheduling):  # type: ignore[misc] # pytest-xdist has no types
    """Gives each process one file after another, and one of the groups above as if it were one file."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return GROUPS.get(file, file)


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def put_long_files_first(items: list[pytest.Item]) -> None:
    """Sort the tests: the groups, then other files with slow tests, then quick files, so that all end together."""
    slow = {file_of(item) for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (file_of(item) not in GROUPS, file_of(item) not in slow))
