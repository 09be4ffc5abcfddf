"""What `--plan` says, and what it is computed from: the sizes of the policy, without weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from configs import load
from flows.run.configuration import plan
from storage.objects.store import Store
from storage.versions.checkpoints import Checkpoint
from tasks.warm_start.policy_sizes import DENSE, parameters_of, policy_values
from tests.support.paths import ROOT

SMALL = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 50,
}  # fmt: skip
RECIPES = ("gsm8k-1.5b", "gsm8k-7b", "math-32b", "math-72b")


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize(
    "sizes", [{}, {"tie_word_embeddings": True}, {"num_key_value_heads": 4}, {"num_hidden_layers": 1}]
)
def test_parameters_are_those_of_the_model(kind: str, sizes: dict[str, object]) -> None:
    config = AutoConfig.for_model(kind, **SMALL | sizes)
    made = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    assert parameters_of(json.loads(config.to_json_string())) == made.num_parameters()


def test_public_sizes_have_the_published_numbers_of_parameters() -> None:
    counts = [parameters_of(policy_values(load(name))) or 0 for name in RECIPES]
    assert [round(count / 1e9, 2) for count in counts] == [1.54, 7.62, 32.76, 72.71]


def test_the_plan_names_ranks_servers_and_gpus() -> None:
    printed = plan(load("gsm8k-7b", ["inference.replicas=2", "inference.tensor_parallel=2"]))
    for part in ("7,615,616,512 parameters", "replicate 1 x shard 4", "servers: 2; GPUs: 4", "together: GPUs: 8"):
        assert part in printed
    assert "http://10.0.0.5:8003" in plan(load("gsm8k-7b", ["inference.urls=['http://10.0.0.5:8003']"]))


def test_the_plan_divides_no_heads() -> None:
    with pytest.raises(ValueError, match="inference.tensor_parallel=8 does not divide the model's 28 attention heads"):
        plan(load("gsm8k-7b", ["inference.tensor_parallel=8"]))


@pytest.mark.slow
def test_the_plan_imports_no_torch() -> None:
    code = "import sys; from configs import load; from flows.run.configuration import plan; plan(load('demo'))"
    subprocess.run([sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)"], cwd=ROOT, check=True)


def test_sizes_are_found_in_a_folder_a_checkpoint_and_this_package(
    policy_folder: Path, policies: list[Checkpoint], checkpoint_store: Store
) -> None:
    """All three name the same policy."""
    folder = load("demo", [f"policy={{path: {policy_folder}}}"])
    checkpoint = load("demo", [f"policy={{path: '{checkpoint_store.uri(policies[0].version)}'}}"])
    values = json.loads((policy_folder / "config.json").read_bytes())
    assert policy_values(folder) == policy_values(checkpoint) == policy_values(load("smoke")) == values


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt2"])
def test_other_architectures_are_not_counted(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert f"{kind} with parameters that are not counted" in plan(load("demo", [f"policy={{path: {tmp_path}}}"]))


@pytest.mark.parametrize(
    ("config", "message"),
    [({"model_type": "llama"}, "config.json has no 'hidden_size'"), ([], "config.json is not a JSON object")],
)
def test_bad_sizes_are_refused(config: object, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        plan(load("demo", [f"policy={{path: {tmp_path}}}"]))
