"""After a failure the store has its causes and the logs of all nodes; a store that is away hides no cause."""

from types import SimpleNamespace
from typing import Any

import pytest
import ray

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


def test_an_error_that_ends_workers_and_trainer_has_one_folder(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the logs of all their nodes, and the cause that the workers know."""
    monkeypatch.setattr(ray, "wait", lambda *_, **__: None)
    asked: list[tuple[str, str]] = []
    nodes = [
        SimpleNamespace(store_logs=SimpleNamespace(remote=lambda folder, name=name: asked.append((name, folder))))
        for name in ("worker", "trainer")
    ]
    error, told = ValueError("the end"), list[str]()
    keep_logs(store, "smoke", nodes[:1], [OSError("the first cause"), error], told.append)
    keep_logs(store, "smoke", nodes[1:], [error], told.append)
    (cause,) = [item.path for item in store.walk("runs/smoke/logs")]
    assert asked == [(name, cause.removesuffix("/cause.txt")) for name in ("worker", "trainer")]
    assert "the first cause" in store.read(cause).decode()
    assert len(told) == 1
    keep_logs(store, "smoke", nodes[:1], [ValueError("the end")], told.append)
    assert asked[-1][1] != asked[0][1]
