"""Which folder of a checkpoint a server gets: the copy for servers if it is stored whole, else the model."""

from pathlib import Path

import pytest

from storage import layout
from storage.errors import DamagedError
from storage.objects.store import Store
from storage.versions import checkpoints
from storage.versions.checkpoints import Canary
from storage.versions.drafts import Draft, Provenance

MODEL, COPY = ["model/config.json", "model/model.safetensors"], ["serving/config.json", "serving/model.safetensors"]
CHANGED = ["delta/config.json", "delta/model.safetensors.arrow"]


def commit(store: Store, names: list[str]) -> str:
    version = layout.checkpoint("r", 0)
    with Draft(store, version, "checkpoint") as draft:
        path = draft.scratch / "file"
        path.write_text("{}")
        for name in names:
            draft.add(path, name)
        checkpoints.add_canary(draft, Canary([1, 2], [-1.0]))
        draft.commit(Provenance(config={}), [])
    return version


@pytest.mark.parametrize(
    ("stored", "served"),
    [
        (MODEL, "model"),
        (MODEL + COPY, "serving"),
        # What earlier programs stored: what changed beside a whole copy, and instead of all or of some of its files.
        (MODEL + COPY + CHANGED[1:], "serving"),
        (MODEL + CHANGED, "model"),
        (MODEL + COPY[1:] + ["delta/config.json", "delta/other.safetensors.arrow"], "model"),
    ],
)
def test_a_server_gets_the_copy_if_it_is_whole(stored: list[str], served: str, store: Store, tmp_path: Path) -> None:
    version = commit(store, stored)
    model = checkpoints.open_checkpoint(store, version, tmp_path, serving=True).model
    assert model.name == served
    (model / "extra.safetensors").write_bytes(b"")
    with pytest.raises(DamagedError, match="extra.safetensors"):
        checkpoints.open_checkpoint(store, version, tmp_path, serving=True)
