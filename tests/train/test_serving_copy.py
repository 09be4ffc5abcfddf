"""A checkpoint's copy for servers is what a server in bfloat16 makes of the weights; without one, the model serves."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from storage.maintenance.verify import verify
from storage.versions.model_files import INDEX
from tasks.run.workspace import Workspace
from tasks.train.sharding import write_serving_copy
from tasks.train.version_trainer import VersionTrainer
from tests.support.train_helpers import tiny_model
from tests.support.training_run import TrainingRun

SERVED = ("inference.dtype=bfloat16", "storage.serving_copy=true")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("largest", ["1GB", "20KB"], ids=["one file", "files with an index"])
def test_it_is_the_model_in_bfloat16(tmp_path: Path, largest: str, tied: bool) -> None:
    """transformers loads from the copy what it rounds from the model; other files are equal."""
    model, copy = tmp_path / "model", tmp_path / "serving"
    tiny_model(tied=tied).save_pretrained(model, max_shard_size=largest)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    write_serving_copy(model, copy)
    rounded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).state_dict()
    served = AutoModelForCausalLM.from_pretrained(copy, dtype="auto").state_dict()
    assert served.keys() == rounded.keys()
    assert all(value.dtype == torch.bfloat16 and torch.equal(value, rounded[name]) for name, value in served.items())
    files = {path.name for path in model.iterdir()}
    assert {path.name for path in copy.iterdir()} == files
    assert (copy / "chat_template.jinja").read_text() == "{{ messages }}"
    sizes = [sum(path.stat().st_size for path in folder.glob("*.safetensors")) for folder in (model, copy)]
    assert 0.5 <= sizes[1] / sizes[0] < 0.6
    if INDEX in files:
        full, half = (json.loads((folder / INDEX).read_text()) for folder in (model, copy))
        assert half["weight_map"] == full["weight_map"]
        assert half["metadata"]["total_size"] == full["metadata"]["total_size"] / 2


def test_servers_read_it_and_trainers_do_not(tmp_path: Path) -> None:
    """A run may begin without copies, and go on with them; version 0 has none. `tests.cluster.test_trainer`: ranks."""
    run = TrainingRun(tmp_path, 2)
    run.train(VersionTrainer(run.config(*SERVED)), 0)
    run.train(VersionTrainer(run.config()), 1)
    assert [run.served(number) for number in range(3)] == ["model", "serving", "model"]
    assert Workspace(run.config()).open_served(run.policy(1)).model.name == "model"
    assert verify(run.store, [run.policy(number) for number in range(3)], deep=True).findings == []
