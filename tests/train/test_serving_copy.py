"""A checkpoint's copy for servers is what a server in bfloat16 makes of the weights; without one, the model serves."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from storage.maintenance.verify import verify
from storage.versions import manifests
from storage.versions.checkpoints import open_checkpoint
from storage.versions.model_files import INDEX
from tasks.run.workspace import Workspace
from tasks.train.ranks.launcher import Ranks
from tasks.train.serving_copy import write_serving_copy
from tasks.train.trainer import Trainer
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


@pytest.mark.slow
def test_servers_read_it_and_trainers_do_not(tmp_path: Path) -> None:
    """One process writes it, two ranks do, and a run may go on without it; version 0 has none."""
    run = TrainingRun(tmp_path, 3)
    run.train(VersionTrainer(run.config(*SERVED), Trainer.of(run.config())), 0)
    two = "trainer.launcher=torchrun", "ppo.parallel.shard=2"
    with Ranks(run.config(*SERVED, *two), tmp_path / "logs") as ranks:
        run.train(ranks, 1)
    run.train(VersionTrainer(run.config(), Trainer.of(run.config())), 2)
    workspace, folders = Workspace(run.config("inference.dtype=bfloat16")), dict[int, str]()
    for number in range(4):
        served = workspace.open_served(run.policy(number))
        model = open_checkpoint(run.store, run.policy(number), run.folder / "cache").model
        folders[number] = served.model.name
        wanted, found = (
            AutoModelForCausalLM.from_pretrained(each, dtype=torch.bfloat16).state_dict()
            for each in (model, served.model)
        )
        assert all(torch.equal(value, wanted[name]) for name, value in found.items())
    assert folders == {0: "model", 1: "serving", 2: "serving", 3: "model"}
    assert Workspace(run.config()).open_served(run.policy(1)).model.name == "model"
    parts = [file.name for file in manifests.read(run.store, run.policy(2)).files if "serving/model-" in file.name]
    assert parts == [f"serving/model-0000{part}-of-00002.safetensors" for part in (1, 2)]
    assert verify(run.store, [run.policy(number) for number in range(4)], deep=True).findings == []


@pytest.mark.slow
def test_deltas_of_trainers_make_the_same_copies(tmp_path: Path, bucket: str) -> None:
    """One process and two ranks write them, another mesh begins with whole files, and servers get the right numbers."""
    run = TrainingRun(tmp_path, 3, root=f"s3://{bucket}/root")
    run.train(VersionTrainer(run.config(*SERVED), Trainer.of(run.config())), 0)
    two = "trainer.launcher=torchrun", "ppo.parallel.shard=2"
    with Ranks(run.config(*SERVED, *two), tmp_path / "logs") as ranks:
        for iteration in (1, 2):
            run.train(ranks, iteration)
    stored = {n: {file.name for file in manifests.read(run.store, run.policy(n)).files} for n in range(1, 4)}
    whole = {
        n for n, names in stored.items() if any(re.fullmatch("serving/model.*safetensors", name) for name in names)
    }
    assert whole == {1, 2}
    assert {name for name in stored[3] if name.endswith(".arrow")} == {
        f"delta/model-0000{part}-of-00002.safetensors.arrow" for part in (1, 2)
    }
    for number in range(1, 4):
        served = open_checkpoint(run.store, run.policy(number), tmp_path / "node", serving=True).model
        assert served.name == "serving"
        model = open_checkpoint(run.store, run.policy(number), tmp_path / "node").model
        wanted, found = (
            AutoModelForCausalLM.from_pretrained(each, dtype=torch.bfloat16).state_dict() for each in (model, served)
        )
        assert all(torch.equal(value, wanted[name]) for name, value in found.items())
    assert verify(run.store, [run.policy(number) for number in range(4)], deep=True).findings == []
