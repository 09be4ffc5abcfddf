"""How `make test` spreads the tests over processes of pytest-xdist, and which of them `make test-fast` leaves out."""

from collections.abc import Sequence

import pytest

_SERVERS = {"engine", "prefect_api", "s3_server", "rgw", "bucket", "any_store[s3]", "browser", "server"}
"""Fixtures that start a server or are one."""
_ENGINES = 2
"""Processes that start a vLLM server for their tests; each server costs as much time as the tests of a small file."""


def _fixtures(item: pytest.Item) -> set[str]:
    callspec = getattr(item, "callspec", None)
    on_s3 = {"any_store[s3]"} if callspec and callspec.params.get("any_store") == "s3" else set()
    return {*getattr(item, "fixturenames", ()), *on_s3}


def mark_slow(items: Sequence[pytest.Item]) -> None:
    """Mark tests that start a server as `slow`."""
    for item in items:
        if _fixtures(item) & _SERVERS:
            item.add_marker("slow")


def group(items: list[pytest.Item]) -> None:
    """Group the tests for `--dist loadgroup`: by file, and the files that need vLLM by the server that they share.

    The groups with vLLM come first, because they take longest.
    """
    files = dict.fromkeys(item.path for item in items)
    engine_files = [path for path in files if any(item.path == path and "engine" in _fixtures(item) for item in items)]
    groups = {path: f"engine-{number % _ENGINES}" for number, path in enumerate(engine_files)}
    for item in items:
        item.add_marker(
            pytest.mark.xdist_group(groups.get(item.path, str(item.path.relative_to(item.config.rootpath))))
        )
    items.sort(key=lambda item: groups.get(item.path, "others"))  # a stable sort: within a group the order stays
