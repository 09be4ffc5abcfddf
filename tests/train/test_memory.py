"""The memory of a rank, and FLOPs: computed from sizes, and compared with what PyTorch does."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from configs import load
from configs.algorithms import PPO
from configs.inference import Inference
from configs.train import Parallel, Train
from flows.run.configuration import pass_tokens, plan
from storage.errors import UnavailableError
from storage.objects.store import Store
from storage.versions.checkpoints import Checkpoint
from tasks.train.memory import PUBLIC, SUPPORTED, ModelSizes, memory_of, served_memory
from tasks.warm_start.policy_sizes import policy_sizes
from tests.gpu.speed import TINY as SHAPE
from tests.gpu.speed import make_random_trainer, timed_updates, training_flops
from tests.support.paths import ROOT

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}
LARGE = PUBLIC["Qwen/Qwen2.5-7B-Instruct"]
OTHERS, GATHERED = "reference policy, critic of its own", "what FSDP holds whole for a while"
OWN_CRITIC = {"advantage": {"type": "gae"}, "critic": {"model": "own"}}


def model(kind: str, **sizes: object) -> tuple[Any, ModelSizes]:
    """Make a model, and read its sizes from the config.json that it would save."""
    config = AutoConfig.for_model(kind, **SMALL | sizes)
    made = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return made, ModelSizes.of(json.loads(config.to_json_string()))


@pytest.mark.parametrize("kind", SUPPORTED)
@pytest.mark.parametrize(
    "sizes", [{}, {"tie_word_embeddings": True}, {"num_key_value_heads": 4}, {"num_hidden_layers": 1}]
)
def test_parameters_are_those_of_the_model(kind: str, sizes: dict[str, object]) -> None:
    made, read = model(kind, **sizes)
    assert read.parameters == made.num_parameters()
    assert read.layer_parameters == sum(parameter.numel() for parameter in made.base_model.layers[0].parameters())


def test_public_sizes_have_the_published_numbers_of_parameters() -> None:
    assert [round(sizes.parameters / 1e9, 2) for sizes in PUBLIC.values()] == [1.54, 7.62, 32.76, 72.71]


def test_memory_by_hand() -> None:
    """P parameters on one rank are 16 P bytes; a critic of its own as many again, a reference policy 4 P."""
    parameters = LARGE.parameters
    alone = memory_of(LARGE, Train(), 10)
    assert list(alone.values())[:3] == [4 * parameters, 4 * parameters, 8 * parameters]
    assert (alone[OTHERS], alone[GATHERED], alone["bfloat16 casts of weights"]) == (0, 0, 0)
    assert alone["logits of 4,096 tokens"] == 16 * 152064 * 10
    assert memory_of(LARGE, Train(moments="host"), 10)["moments of AdamW"] == 0
    half, casts = {"autocast": "bfloat16", "gradient_checkpointing": True}, "bfloat16 casts of weights"
    assert memory_of(LARGE, Train.model_validate(half), 10)[casts] == 2 * LARGE.layers * LARGE.layer_parameters
    assert memory_of(LARGE, Train.model_validate({**half, "kernels": "plain"}), 10)[casts] == 2 * LARGE.layer_parameters
    both = PPO.model_validate({**OWN_CRITIC, "kl": {"kl_ctl": 0.1}})
    assert memory_of(LARGE, Train(), 10, both)[OTHERS] == 20 * parameters
    sharded = memory_of(LARGE, Train(parallel=Parallel(shard=4)), 10)
    assert sharded[GATHERED] == 8 * LARGE.root_parameters + 20 * LARGE.layer_parameters
    copied = memory_of(LARGE, Train(parallel=Parallel(replicate=2)), 10)
    assert copied[GATHERED] == 4 * (2**24 + 152064 * LARGE.hidden)  # gradients in a message, the last one the largest


@pytest.mark.parametrize(("name", "card"), [("gsm8k-1.5b", 80), ("gsm8k-7b", 80), ("math-32b", 80), ("math-72b", 141)])
def test_recipes_fit_their_cards(name: str, card: int) -> None:
    """A twentieth is left for CUDA, NCCL, and small gaps. The smallest model shares its card with vLLM.

    A server has room for ten contexts or more, and the larger models have none on one card.
    """
    config = load(name)
    sizes, settings = policy_sizes(config), config.inference
    served = settings.gpu_memory_utilization if name == "gsm8k-1.5b" else 0.0
    needed = sum(memory_of(sizes, config.train, pass_tokens(config), config.algorithm).values())
    assert needed < (0.95 - served) * card * 1e9
    weights, token = served_memory(sizes, settings)
    most = settings.gpu_memory_utilization * card * 1e9
    assert weights + 10 * token * settings.max_model_len < most
    alone, token = served_memory(sizes, settings.model_copy(update={"tensor_parallel": 1}))
    assert (settings.ranks > 1) == (alone + 10 * token * settings.max_model_len > most)


def test_memory_of_a_server_by_hand() -> None:
    """Norms, and heads for keys and values that are fewer than the GPUs, are on each GPU; the rest is divided."""
    hidden, layers, vocabulary, width, head = 3584, 28, 152064, 18944, 128
    for tensor, heads, keys in ((1, 28, 4), (2, 14, 2), (4, 7, 1)):
        matrices = 2 * hidden * (heads + keys) * head + 3 * hidden * width // tensor
        layer = matrices + (heads + 2 * keys) * head + 2 * hidden
        parameters = layers * layer + 2 * hidden * vocabulary // tensor + hidden
        found = served_memory(LARGE, Inference(dtype="bfloat16", tensor_parallel=tensor))
        assert found == (2 * parameters, 2 * 2 * layers * keys * head)
    few = replace(LARGE, heads=32, kv_heads=2)
    assert served_memory(few, Inference(tensor_parallel=4))[1] == 4 * 2 * layers * 1 * head  # copies
    assert served_memory(LARGE, Inference()) == (4 * LARGE.parameters, 4 * 2 * layers * 4 * head)
    halves = served_memory(LARGE, Inference(pipeline_parallel=2))
    assert halves == (4 * (14 * LARGE.layer_parameters + vocabulary * hidden + hidden), 4 * 2 * 14 * 4 * head)


def test_the_plan_names_ranks_servers_and_memory() -> None:
    """A server of Qwen2.5-7B has 15.2 GB of weights in bfloat16, and 0.5 GB for a context; float32 is twice that."""
    printed = plan(load("gsm8k-7b", ["inference.replicas=2", "inference.tensor_parallel=2"]))
    gpus = "together: GPUs: 8; memory: "
    for said in (
        "replicate 1 x shard 4",
        "servers: 2",
        "activations",
        gpus,
        "servers: 2; GPUs: 4; memory of each: 15.7 GB",
    ):
        assert said in printed
    assert "http://10.0.0.5:8003" in plan(load("gsm8k-7b", ["inference.urls=['http://10.0.0.5:8003']"]))


def test_the_plan_divides_no_heads() -> None:
    with pytest.raises(ValueError, match="inference.tensor_parallel=8 does not divide the model's 28 attention heads"):
        plan(load("gsm8k-7b", ["inference.tensor_parallel=8"]))


@pytest.mark.slow
def test_the_command_line_prints_the_plan() -> None:
    command = [sys.executable, "-m", "flows.math_mt_ppo", "gsm8k-7b", "--plan"]
    printed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert "7,615,616,512 parameters" in printed


@pytest.mark.slow
def test_the_plan_of_a_small_policy_imports_no_torch() -> None:
    code = "import sys; from configs import load; from flows.run.configuration import plan; plan(load('demo'))"
    subprocess.run([sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)"], cwd=ROOT, check=True)


def test_sizes_are_found_in_a_folder_a_checkpoint_and_this_package(
    policy_folder: Path, policies: list[Checkpoint], checkpoint_store: Store
) -> None:
    """All three name the same policy."""
    folder = load("demo", [f"policy={{path: {policy_folder}}}"])
    checkpoint = load("demo", [f"policy={{path: '{checkpoint_store.uri(policies[0].version)}'}}"])
    found = ModelSizes.of(json.loads((policy_folder / "config.json").read_bytes()))
    assert policy_sizes(folder) == policy_sizes(checkpoint) == policy_sizes(load("smoke")) == found


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "qwen3_moe", "num_experts": 128}, "'qwen3_moe' is a mixture of experts .*only dense models"),
        ({"model_type": "gpt2"}, "model_type='gpt2' is of another architecture: only dense models of llama"),
        ({"model_type": "llama"}, "config.json has no 'hidden_size'"),
        ([], "config.json is not a JSON object"),
    ],
)
def test_other_models_are_refused(config: object, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message) as error:
        plan(load("demo", [f"policy={{path: {tmp_path}}}"]))
    assert str(tmp_path) in str(error.value)


def test_an_unknown_name_is_reported(tmp_path: Path) -> None:
    """The tests are offline, so the hub cannot be asked."""
    with pytest.raises(UnavailableError, match="'some/model' is not a folder here, and it cannot be downloaded"):
        policy_sizes(load("demo", ["policy={path: some/model}"]))
    with pytest.raises(ValueError, match="there is no .*/none/config.json"):
        policy_sizes(load("demo", [f"policy={{path: {tmp_path}/none}}"]))


def test_flops_by_hand() -> None:
    """A token costs 6 FLOPs for each parameter of a matrix; attention 12 * layers * hidden * T² / 2."""
    parameters = 2 * (2 * 32 * 8 * (4 + 2) + 3 * 32 * 64) + 32 * 50
    assert SHAPE.matrix_parameters == parameters == 20032
    assert training_flops(SHAPE, [10]) == 6 * 20032 * 10 + 12 * 2 * 32 * 10 * 10 / 2
    assert training_flops(SHAPE, [10, 10]) == 2 * training_flops(SHAPE, [10])
    runs = timed_updates(SHAPE, make_random_trainer(SHAPE, "cpu"))  # the code that times a GPU runs on the CPU, too
    assert len(runs) == 2
    assert all(run.tokens > 0 and run.flops > 0 and 0 < run.seconds < run.whole for run in runs)
