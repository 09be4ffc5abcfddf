"""Copies for servers: whole, or as earlier programs stored them, by what changed since the parent's copy."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from storage import layout
from storage.errors import DamagedError
from storage.maintenance import gc as garbage
from storage.maintenance.gc import Rules
from storage.objects.store import Store
from storage.versions import checkpoints
from storage.versions.checkpoints import Canary
from storage.versions.drafts import Draft, Provenance

WEIGHTS = [np.arange(1000, dtype=np.uint16) * (number + 1) for number in range(4)]
"""The numbers in the copies of four versions; only those of versions 1 and 2 are stored whole."""


def write_delta(before: np.ndarray, after: np.ndarray, path: Path) -> None:
    """Write what earlier programs did: the XOR of two files of weights as low and high bytes, compressed."""
    schema = pa.schema([pa.field(name, pa.uint8(), nullable=False) for name in ("low", "high")], {"bytes": "2000"})
    options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", 1))
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema, options=options) as writer:
        for start in (0, 600):  # in several batches
            change = (before ^ after)[start : start + 600]
            columns = [pa.array(change.astype(np.uint8)), pa.array((change >> 8).astype(np.uint8))]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))


@pytest.fixture
def chain(tmp_path: Path) -> Store:
    """Return a store with version 0 without a copy, 1 with a whole one, 2 with both, and 3 with what changed only."""
    store = Store(f"memory://{tmp_path.name}")
    for number, weights in enumerate(WEIGHTS):
        version, areas = layout.checkpoint("r", number), (["model"], ["serving"], ["serving"], ["delta"])[number]
        with Draft(store, version, "checkpoint") as draft:
            for area in {"model", *areas}:
                path = draft.scratch / "file"
                path.write_text(f'{{"number": {number}, "copy": {"false" if area == "model" else "true"}}}')
                draft.add(path, f"{area}/config.json")
            weights.tofile(path)
            draft.add(path, "model/model.safetensors")
            if "serving" in areas:
                draft.add(path, "serving/model.safetensors")
            if number > 1:
                write_delta(WEIGHTS[number - 1], weights, path)
                draft.add(path, "delta/model.safetensors.arrow")
            checkpoints.add_canary(draft, Canary([1, 2], [-1.0]))
            draft.commit(Provenance(config={}), [layout.checkpoint("r", number - 1)] if number else [])
    return store


@pytest.fixture
def served(chain: Store, tmp_path: Path) -> Callable[[int], Path]:
    """Return a function that opens a version for a server, checks what it gets, and returns the folder."""

    def serve(number: int) -> Path:
        model = checkpoints.open_checkpoint(chain, layout.checkpoint("r", number), tmp_path, serving=True).model
        is_copy = "true" if model.name == "serving" else "false"
        assert {path.name for path in model.iterdir()} == {"config.json", "model.safetensors"}
        assert (model / "config.json").read_text() == f'{{"number": {number}, "copy": {is_copy}}}'
        assert (model / "model.safetensors").read_bytes() == WEIGHTS[number].tobytes()
        return model

    return serve


def test_a_server_gets_the_copy_in_whatever_way_it_is_stored(served: Callable[[int], Path]) -> None:
    for _ in range(2):  # the second time from the cache
        assert [served(number).name for number in range(4)] == ["model", "serving", "serving", "serving"]


def test_without_what_gc_deleted_the_model_serves(
    chain: Store, served: Callable[[int], Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        garbage.collect(chain, Rules(keep_last=1, older_than_s=0))
        assert served(3).name == "model"
    assert "servers read model/, because" in caplog.text
    assert "collected by gc" in caplog.text


@pytest.mark.parametrize("number", [1, 3])
def test_a_file_that_does_not_belong_to_the_copy_is_refused(number: int, served: Callable[[int], Path]) -> None:
    (served(number) / "extra.safetensors").write_bytes(b"")
    with pytest.raises(DamagedError, match="extra.safetensors"):
        served(number)
