"""Servers get the GPUs that are there, and sizes that a model allows; processes begin before an engine needs them."""

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import psutil
import pytest

from configs import Config, load
from configs.inference import Inference
from configs.models import Judge, Models, ServedModel
from configs.rollout import Rollout
from storage.versions.checkpoints import Checkpoint
from tasks.inference import devices, launch
from tasks.inference.ahead import serve_ahead, servers_begun, take_servers
from tasks.inference.api import InferenceError
from tasks.inference.devices import check_split, deal, deal_beside, visible_devices
from tasks.inference.engine import Engine
from tasks.inference.server import Server, _cache_bytes
from tests.support.sandbox_helpers import wait_gone


@pytest.mark.parametrize(
    ("visible", "replicas", "size", "servers"),
    [
        ("", 2, 1, ["", ""]), ("0", 1, 1, ["0"]), ("0 1", 1, 1, ["1"]), ("0 1", 2, 1, ["0", "1"]),
        ("0 1 2 3", 2, 1, ["2", "3"]), ("0 1 2 3", 1, 2, ["2 3"]), ("0 1 2 3", 2, 2, ["0 1", "2 3"]),
        ("5 GPU-1f MIG-2e", 2, 1, ["GPU-1f", "MIG-2e"]),
    ],
)  # fmt: skip
def test_devices_are_dealt(visible: str, replicas: int, size: int, servers: list[str]) -> None:
    """Each server gets its own devices. The first device is the trainer's and is used only if the others run out.

    Two servers that each take 90 % of the memory do not fit on one device, so the error comes before they start.
    """
    assert deal(visible.split(), replicas, size) == [server.split() for server in servers]
    for many, large in ((3, 1), (1, 3), (2, 2)):
        with pytest.raises(InferenceError, match=rf"inference.replicas={many}.* of {large} .*has 2 \(7, 8\)"):
            deal(["7", "8"], many, large)


QWEN = {"num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 8960, "num_hidden_layers": 28}


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"tensor_parallel": 5}, "tensor_parallel=5 does not divide the model's 12 attention heads"),
        ({"tensor_parallel": 3}, "tensor_parallel=3 does not divide the model's 8960 columns of the MLP"),
        ({"pipeline_parallel": 29}, "pipeline_parallel=29 is more than the model's 28 layers"),
        ({"pipeline_parallel": 2, "enforce_eager": True}, "set inference.enforce_eager=false"),
    ],
)
def test_sizes_that_do_not_divide_a_model_are_refused(
    knobs: dict[str, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one only on a CPU. More GPUs than heads for keys have copies; what is unknown is left to vLLM."""
    for model in (QWEN, {}, {"num_attention_heads": 12, "num_key_value_heads": None}):
        check_split(Inference(tensor_parallel=4, pipeline_parallel=28), model)
    monkeypatch.setattr(devices, "cpu_build", lambda: True)
    with pytest.raises(ValueError, match=message):
        check_split(Inference.model_validate(knobs), QWEN)
    with pytest.raises(ValueError, match="=4 is neither a divisor nor a multiple of the model's 6 heads for keys and"):
        check_split(Inference(tensor_parallel=4), QWEN | {"num_key_value_heads": 6})


@pytest.fixture
def gpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the code use the machine's devices even if the installed vLLM is the CPU build."""
    monkeypatch.setattr(devices, "cpu_build", lambda: False)


LISTED = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-6dd37b16-4ed7-5c1c-9d3e-3e1a7b3c5f00)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2a2e1f2c-11a9-8a0b-5a55-0f2d1c9b7e11)
  MIG 1g.10gb     Device  0: (UUID: MIG-0c3d1c5e-35d7-5c5f-8f5c-5a1d3f0b7a22)
"""


@pytest.mark.usefixtures("gpu_build")
@pytest.mark.parametrize(
    ("chosen", "program", "visible"),
    [
        ("3, 1", "exit 1", ["3", "1"]),
        ("GPU-8e4b,MIG-GPU-8e4b/1/0", "exit 1", ["GPU-8e4b", "MIG-GPU-8e4b/1/0"]),
        ("2,-1,3", "exit 1", ["2"]),  # CUDA sees nothing from the first invalid entry on
        ("NoDevFiles", f"echo '{LISTED}'", []),  # Slurm sets this for a job without GPUs
        ("", f"echo '{LISTED}'", []),
        (None, f"echo '{LISTED}'", ["0", "1"]),
        (None, "echo 'NVIDIA-SMI cannot reach the driver.'; exit 9", []),
        (None, None, []),
    ],
)
def test_the_devices_are_those_that_cuda_sees(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chosen: str | None, program: str | None, visible: list[str]
) -> None:
    """They have the names in CUDA_VISIBLE_DEVICES; without it the driver is asked, and they have CUDA's numbers."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if program:
        (tmp_path / "nvidia-smi").write_text(f"#!{shutil.which('sh', path=os.defpath)}\n{program}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert visible_devices() == visible
    monkeypatch.setattr(devices, "cpu_build", lambda: True)  # any number of its servers start beside GPUs, too
    assert visible_devices() == []


@pytest.mark.usefixtures("gpu_build")
def test_each_server_gets_its_own_devices(
    policies: list[Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has died in a swap or in a rollout gets the same devices again. The trainer's process still sees all."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,8")
    started = list[dict[str, str]]()
    monkeypatch.setattr(Server, "start", lambda _, __, environment, ___: started.append(environment))
    monkeypatch.setattr(Server, "wait_until_healthy", lambda _: None)
    died = iter([False, False, True, True, True, True])
    monkeypatch.setattr(Server, "lost", lambda _: next(died))
    monkeypatch.setattr(Engine, "_establish", AsyncMock())
    settings = Inference(replicas=2, tensor_parallel=2)
    with Engine(settings, Rollout(), tmp_path) as engine:
        engine.serve(policies[0])
        engine.serve(policies[1])
        engine.repair(1)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in started] == ["5,6", "7,8", "5,6", "7,8", "7,8"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5,6,7,8"


@pytest.mark.usefixtures("gpu_build")
def test_an_engine_that_cannot_start_its_servers_starts_none(
    policies: list[Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers that are given by URL need no devices of this machine."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(InferenceError, match="inference.replicas=2"):
        Engine(Inference(replicas=2), Rollout(), tmp_path)
    Engine(Inference(replicas=2, urls=["http://127.0.0.1:8000"]), Rollout(), tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with (
        Engine(Inference(tensor_parallel=3), Rollout(), tmp_path) as engine,
        pytest.raises(InferenceError, match="tensor_parallel=3 does not divide"),
    ):
        engine.serve(policies[0])
    assert not list(tmp_path.iterdir())  # no log


@pytest.mark.parametrize(
    ("visible", "knobs", "dealt"),
    [
        ("0123", {}, {"judge": [["2"]], "reward": [["1"]]}),  # the policy has 3, the trainer 0
        ("0123", {"replicas": 2}, {"judge": [["1"], ["2"]], "reward": [["0"]]}),
        ("01", {"devices": [1]}, {"judge": [["1"]], "reward": [["0"]]}),
        ("", {"replicas": 2}, {"judge": [[], []], "reward": [[]]}),
    ],
)
def test_models_beside_the_policy_have_the_devices_before_its_own(
    visible: str, knobs: dict[str, Any], dealt: dict[str, Any]
) -> None:
    """Where one is missing the run is refused; a policy on servers that are given by URL needs none."""
    models = Models(judge=Judge(path="j", **knobs), reward=ServedModel(path="r"))
    assert deal_beside(models, Inference(), list(visible)) == dealt
    both = Models(judge=Judge(path="j"), reward=ServedModel(path="r"))
    few = r"models\.reward\.replicas=1 .* find 0 beside the policy's.*models\.reward\.devices"
    with pytest.raises(InferenceError, match=few):
        deal_beside(both, Inference(), ["0", "1"])
    assert deal_beside(both, Inference(urls=["http://x"]), ["0", "1"]) == {"judge": [["1"]], "reward": [["0"]]}


@pytest.mark.parametrize(
    ("model", "gibibytes"),
    [
        ({"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}, 0.125),
        ({"num_hidden_layers": 3, "num_attention_heads": 32}, 0.75),  # the size of a head follows from the width
        ({"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}, 1),
        ({"text_config": {}}, 1),
    ],
)
def test_a_cpus_cache_has_room_for_full_contexts(model: dict[str, Any], gibibytes: float) -> None:
    """It is filled with zeros at the start, so it is no larger than needed; users may set another size."""
    width = {} if "text_config" in model else {"hidden_size": 512}
    assert _cache_bytes(model | width, 512 * 128) == gibibytes * 2**30


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Return a configuration with two servers, whose program imports nothing and prints its arguments."""
    program = tmp_path / "launch.py"
    program.write_text("import os, sys, time; print(os.fdopen(int(sys.argv[1])).read(), flush=True); time.sleep(600)")
    monkeypatch.setattr(launch, "__file__", str(program))
    (tmp_path / "config.json").write_text("{}")  # the folder is the model, too
    return load("smoke", [f"storage.cache={tmp_path}", "inference.replicas=2"])


def servers_now() -> list[psutil.Process]:
    return [each for each in psutil.Process().children(recursive=True) if launch.__file__ in each.cmdline()]


def test_an_engine_takes_the_servers_that_have_begun(config: Config, tmp_path: Path) -> None:
    """The processes are those that serve: they get the arguments, and live until the engine ends them."""
    with servers_begun(config):
        begun = servers_now()
        assert len(begun) == 2
        serve_ahead(lambda: Mock(spec=Checkpoint, model=tmp_path, adapter=None))
        servers = take_servers(config.servers)
        assert take_servers(config.servers) == []  # of a second engine
    for server in servers:
        server.start_serving(tmp_path)  # again, as the engine does
    assert {server.pid for server in servers} == {process.pid for process in begun}
    for server in servers:
        while f'"--model", "{tmp_path}"' not in server.log.read_text():
            assert server.alive
        server.close()
    wait_gone(begun)


def test_servers_that_no_engine_takes_end(config: Config) -> None:
    """The run may continue with settings that it was begun with, or be complete, refused or interrupted."""
    for error in (KeyboardInterrupt, ValueError):
        begun = []
        with contextlib.suppress(error), servers_begun(config):
            begun.extend(servers_now())
            assert len(begun) == 2
            if error is ValueError:
                assert take_servers(config.inference) == []
                wait_gone(begun)
            raise error
        wait_gone(begun)


@pytest.mark.parametrize("more", ["inference.urls=[http://127.0.0.1:9]", "cluster.workers_per_node=2"])
def test_no_server_begins_that_another_process_would_start(config: Config, more: str) -> None:
    with servers_begun(load("smoke", [f"storage.cache={config.storage.cache}", more])):
        assert servers_now() == []


def test_a_server_that_has_died_begins_again(config: Config, tmp_path: Path) -> None:
    """Otherwise the engine would wait for it in vain."""
    with servers_begun(config):
        first, second = take_servers(config.servers)
        psutil.Process(first.pid).kill()
        while first.alive:
            pass
        first.start_serving(tmp_path)
        assert first.alive
        for server in (first, second):
            server.close()


def test_what_prevents_servers_is_left_to_the_engine(config: Config, tmp_path: Path) -> None:
    """It says more about it, in its turn: here, no log can be written."""
    (tmp_path / "logs").touch()
    with servers_begun(config):
        for server in take_servers(config.servers):
            with pytest.raises(OSError, match="logs"):
                server.start_serving(tmp_path)
            server.close()
