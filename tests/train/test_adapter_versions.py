"""Versions of a run that trains an adapter: each is small, names its base with a hash, and needs it."""

import getpass
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from configs import Config
from flows.stages.warm_start import _continued
from storage import layout
from storage.__main__ import main
from storage.errors import DamagedError, StorageError
from storage.maintenance import gc as garbage
from storage.maintenance.copying import copy_run
from storage.maintenance.export import export
from storage.maintenance.verify import verify
from storage.objects.store import Store
from storage.versions import checkpoints, manifests
from storage.versions.model_files import ADAPTER_FILES
from storage.versions.weights import canary_difference, load_model
from tasks.agents.chat import fetch_chat, load_chat
from tasks.audit.decoding import open_decoder
from tasks.train.orders import DistanceOrder
from tasks.train.version_trainer import VersionTrainer
from tasks.warm_start.importing import import_policy
from tests.support.chain_helpers import rewrite
from tests.support.paths import ROOT
from tests.support.programs import call_program
from tests.support.train_helpers import make_trainer, save_random_adapter
from tests.support.training_run import RUN, SCORER, TrainingRun, largest_difference
from tests.train.test_adapters import logits

OPTIONS = ["policy.lora.rank=3", "algorithm.kl.kl_ctl=0.1", "optimizer.lr=1e-2", "rollout.max_head_offpolicyness=99"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, policy_folder: Path) -> TrainingRun:
    """Return a run with two updates, each by a trainer that reads the checkpoint before."""
    run = TrainingRun(tmp_path_factory.mktemp("run"), 2, policy_folder, OPTIONS)
    for iteration in range(2):
        run.train(VersionTrainer(run.config()), iteration)
    return run


@pytest.fixture
def copied(run: TrainingRun, tmp_path: Path) -> Store:
    """Return a copy of the run's store, to be damaged."""
    shutil.copytree(run.root, tmp_path / "copied")
    return Store(str(tmp_path / "copied"))


def open_policy(run: TrainingRun, number: int, *, state: bool = False) -> checkpoints.Checkpoint:
    return checkpoints.open_checkpoint(run.store, run.policy(number), run.folder / "cache", state=state)


def test_a_version_has_the_adapter_alone(run: TrainingRun, tmp_path: Path) -> None:
    """No weights of the base are stored again, no path is; a trainer that keeps the policy makes the same bits."""
    manifest, first = manifests.read(run.store, run.policy(2)), manifests.read(run.store, run.policy(0))
    assert first.base is None
    assert b'"base"' not in run.store.read(layout.manifest(run.policy(0)))  # older programs know no such field
    assert manifest.base == manifests.as_parent(run.store, run.policy(0))
    assert Config.model_validate(manifest.settings).policy.lora
    assert manifest.names_in("model") == set()
    assert manifest.names_in("adapter") == set(ADAPTER_FILES)
    opened = open_policy(run, 2)
    assert (opened.number, opened.base_number, opened.model) == (2, 0, open_policy(run, 0).model)
    assert canary_difference(opened) < 1e-5
    assert str(run.folder) not in (opened.adapter or run.folder).joinpath(ADAPTER_FILES[0]).read_text()
    kept = TrainingRun(tmp_path, 2, opened.model, OPTIONS)
    trainer = VersionTrainer(kept.config())
    for iteration in range(2):
        kept.train(trainer, iteration)
    assert largest_difference(kept.tensors(2), run.tensors(2)) == 0
    data = layout.trajectories(RUN, 0), layout.scores(RUN, 0, SCORER)
    assert (trainer.distance(DistanceOrder(run.policy(2), run.policy(0), *data)) or 0) > 1e-6


def test_readers_of_the_tokenizer_take_the_base(run: TrainingRun) -> None:
    """Two policies with other tokenizers never share what is cached by the hashes of their files."""
    chats = load_chat(open_policy(run, 0)), load_chat(open_policy(run, 2))
    assert chats[0] is chats[1] is fetch_chat(run.store, run.policy(2), run.folder / "cache")
    assert open_decoder(run.store, run.policy(2), run.folder / "cache").tokenizer.decode([7])


def test_the_base_stays_as_long_as_its_adapters(run: TrainingRun, copied: Store, tmp_path: Path) -> None:
    """After gc, and in a copy of the run, the last version is whole, with weights that give its canary."""
    garbage.collect(copied, garbage.Rules(keep_last=1, older_than_s=0))
    assert copied.exists(layout.tombstone(run.policy(1)))
    there = Store(str(tmp_path / "there"))
    copy_run(copied, there, RUN)
    for store in (copied, there):
        report = verify(store, [run.policy(2)], deep=True)
        assert (report.findings, report.collected) == ([], 1)


def test_a_base_of_another_hash_is_refused(run: TrainingRun, copied: Store, tmp_path: Path) -> None:
    """On other weights the adapter would be another policy: nothing opens it, and verify says so."""
    path, version = Path(copied.path(layout.manifest(run.policy(0)))), run.policy(2)
    rewrite(copied, run.policy(0), lambda values: values.update(metrics={"another": 1}))
    with pytest.raises(DamagedError, match=r"is an adapter of .*000000 with the sha256"):
        checkpoints.open_checkpoint(copied, version, tmp_path)
    assert any("is an adapter of" in found.problem for found in verify(copied, [version], ancestors=False).findings)
    path.unlink()
    with pytest.raises(DamagedError, match="was never committed"):
        checkpoints.open_checkpoint(copied, version, tmp_path)


def test_it_is_exported_as_it_is_or_merged(run: TrainingRun, tmp_path: Path) -> None:
    """Without --merge it is a folder of peft, whose card names the base; with it, a plain one that computes alike."""
    root = ["--root", run.root, "export", run.policy(2)]
    call_program(main, *root, str(tmp_path / "adapter"))
    call_program(main, *root, str(tmp_path / "merged"), "--merge")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {*ADAPTER_FILES, "README.md"}
    assert f"It belongs to the weights of {run.policy(0)}" in (tmp_path / "adapter" / "README.md").read_text()
    assert "adapter (LoRA)" not in (tmp_path / "merged" / "README.md").read_text()
    opened, merged = open_policy(run, 2), load_model(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(load_model(opened.model, opened.adapter)), atol=1e-4, rtol=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").decode([7])
    with pytest.raises(ValueError, match=r"config\.json"):  # it is no policy: it has no weights of its own
        import_policy(str(tmp_path / "adapter"), tmp_path / "copy", tmp_path, run.store)
    plain = TrainingRun(tmp_path / "plain", 0, opened.model, [])
    with pytest.raises(StorageError, match="has no adapter: leave out --merge"):
        export(plain.store, plain.policy(0), tmp_path / "none", merge=True)


def test_another_run_begins_with_it_merged(run: TrainingRun, tmp_path: Path) -> None:
    """By `policy.path` or `policy.fork`: moments of the adapter begin anew, the draws of minibatches go on."""
    opened, config = open_policy(run, 2, state=True), run.config()
    assert import_policy(run.store.uri(run.policy(2)), tmp_path / "path", tmp_path, run.store) == run.policy(2)
    (tmp_path / "fork").mkdir()
    model, canary, state = _continued(opened, config, tmp_path / "fork")
    assert canary is None
    assert state
    assert json.loads((state / "state.json").read_text())["anew"] == ["optimizer", "reference"]
    fork, path, base = ((each / "model.safetensors").read_bytes() for each in (model, tmp_path / "path", opened.model))
    assert fork == path != base
    for adapter in (None, save_random_adapter(model, tmp_path / "adapter")):
        trainer = make_trainer(model, state=state, adapter=adapter)
        assert trainer.state.steps == 0  # so the learning rate warms up anew
        assert not trainer.state.adamw.state


@pytest.mark.long
def test_no_command_uses_the_folder_that_torch_would_make_in_tmpdir(run: TrainingRun, tmp_path: Path) -> None:
    """Its name is known, so another user may have made anything of it; and nothing is left in TMPDIR."""
    shared = tmp_path / "shared"
    shared.mkdir()
    os.mkfifo(shared / f"torchinductor_{getpass.getuser()}")
    place = {"TMPDIR": str(shared), "HOME": "/nonexistent"}
    environment = {name: os.environ[name] for name in os.environ.keys() - {"TORCHINDUCTOR_CACHE_DIR"}} | place
    replayed = ["verify", "--replay", f"{RUN}@1..2", "--cache", str(tmp_path / "cache")]
    for command in (["verify", "--deep"], replayed, ["export", run.policy(2), str(tmp_path / "merged"), "--merge"]):
        given = [sys.executable, "-m", "storage", "--root", run.root, *command]
        done = subprocess.run(given, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert "torchinductor" not in done.stderr
        assert done.returncode == 0, done.stdout + done.stderr
        assert [path.is_fifo() for path in shared.iterdir()] == [True]
