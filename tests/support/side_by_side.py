"""Spread the test files over processes so that two of them start vLLM, and each starts Prefect's server at most once.

Starting these servers takes as much processor time as the tests of a whole file.
"""

import pytest
from xdist.scheduler import LoadFileScheduling

GROUPS = {
    f"tests/{folder}/test_{name}.py": group
    for group, folder, names in (
        ("first", "flows", "arguments flows killed local_server mixtures models_beside"),
        ("first", "retrain", "retrain"),
        ("first", "evaluate", "evaluate"),
        ("second", "flows", "interrupts kept_stores monitoring other_users safety"),
        ("second", "audit", "flow"),
        ("second", "rollout", "selection"),
        ("second", "inference", "engine"),
        ("second", "gpu", "serving"),
        ("second", "problems", "exclusions"),
        ("second", "retrain", "schedule"),
        ("ranks", "cluster", "cluster kills local trainer"),
        ("ranks", "flows", "demo_llm"),
    )
    for name in names.split()
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
