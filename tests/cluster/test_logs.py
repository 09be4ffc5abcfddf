"""After a failure the store has its causes and the logs of all nodes; a store that is away hides no cause."""

from typing import Any

import pytest

from storage.errors import StorageError
from storage.objects.store import Store
from tasks.cluster.connection import keep_logs


def test_a_store_that_cannot_be_written_hides_no_cause(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise StorageError("no route to host")

    monkeypatch.setattr(Store, "write", refuse)
    told: list[str] = []
    keep_logs(store, "smoke", [], [ValueError("the cause")], told.append)
    assert told == ["the logs of the nodes stay there, in logs/smoke of their storage.cache: no route to host"]
