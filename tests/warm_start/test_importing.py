"""An external policy that cannot be trained or played: the error names the fault, and nothing is committed."""

import json
import logging
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

from configs import ConfigError
from storage import layout
from storage.errors import UnavailableError
from storage.objects.store import Store
from storage.versions import manifests
from storage.versions.drafts import Draft
from storage.versions.model_files import INDEX
from tasks.run import workspace as run_workspace
from tasks.run.configuration import resolve
from tasks.run.workspace import Workspace
from tasks.warm_start import task as first_policy
from tasks.warm_start.importing import import_policy

WEIGHTS = "model.safetensors"
PROBLEMS = "problems.train={{kind: arithmetic, high: {}}}"
Break = Callable[[Path], object]
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(policy_folder: Path, tmp_path: Path) -> Path:
    """A copy of a working policy."""
    return Path(shutil.copytree(policy_folder, tmp_path / "policy"))


@pytest.fixture
def policy(policy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The override for a working policy. The tasks that import it get a plain logger, as there is no flow run."""
    for module in (run_workspace, first_policy):
        monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("test"))
    return f"policy={{path: {policy_folder}}}"


def cut(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def write(name: str, data: bytes) -> Break:
    return lambda folder: (folder / name).write_bytes(data)


def json_with(name: str, **fields: Any) -> Break:
    """Change values in a JSON file."""

    def change(folder: Path) -> None:
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | fields))

    return change


def tensors(change: Callable[[Tensors], object]) -> Break:
    def rewrite(folder: Path) -> None:
        named = load_file(folder / WEIGHTS)
        change(named)
        save_file(named, folder / WEIGHTS, {"format": "pt"})

    return rewrite


def as_type(kind: torch.dtype) -> Break:
    return tensors(lambda named: named.update({name: value.to(kind) for name, value in named.items()}))


def without_a_shard(folder: Path) -> None:
    named = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    save_file(named, folder / "model-00001-of-00002.safetensors", {"format": "pt"})
    shards = dict.fromkeys(named, "model-00001-of-00002.safetensors") | {
        "lm_head.weight": "model-00002-of-00002.safetensors"
    }
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": shards}))


def another_architecture(folder: Path) -> None:
    config = BertConfig(
        vocab_size=200, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    BertForMaskedLM(config).save_pretrained(folder)


def more_tokens(folder: Path) -> None:
    values = json.loads((folder / "tokenizer.json").read_text())
    values["model"]["vocab"] |= {f"token {number}": number for number in range(1000, 2000)}
    (folder / "tokenizer.json").write_text(json.dumps(values))


def other_digits(folder: Path) -> None:
    values = json.loads((folder / "tokenizer.json").read_text())
    values["normalizer"] = {"type": "Replace", "pattern": {"String": "7"}, "content": "1"}
    (folder / "tokenizer.json").write_text(json.dumps(values))


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("token*"):
        path.unlink()


BROKEN: dict[str, tuple[Break, str]] = {
    "cut": (cut, r"model\.safetensors cannot be read as safetensors.*copy it again"),
    "empty": (write(WEIGHTS, b""), r"model\.safetensors cannot be read as safetensors"),
    "no safetensors": (write(WEIGHTS, b"PK" * 50), r"model\.safetensors cannot be read as safetensors"),
    "a shard is missing": (without_a_shard, r"model-00002-of-00002\.safetensors is missing: copy all files"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), r"model\.safetensors is missing"),
    "NaN": (
        tensors(lambda named: named["model.norm.weight"].fill_(float("nan"))),
        r"model\.safetensors: model\.norm\.weight with NaN or infinities",
    ),
    "integers": (as_type(torch.int8), "in I8, which cannot be trained; give weights in one of F64, F32, F16, BF16"),
    "8 bits": (as_type(torch.float8_e4m3fn), "in F8_E4M3, which cannot be trained"),
    "a weight is missing": (
        tensors(lambda named: named.pop("model.norm.weight")),
        r"do not belong together: there are no weights model\.norm\.weight",
    ),
    "a weight too many": (
        tensors(lambda named: named.update({"model.other.weight": torch.zeros(2)})),
        r"does not use the weights model\.other\.weight",
    ),
    "another shape": (
        json_with("config.json", intermediate_size=52),
        r"down_proj\.weight has the shape \[64, \d+\], not \[64, 52\]",
    ),
    "no JSON": (write("config.json", b"{"), r"config\.json is not JSON"),
    "a list": (write("config.json", b"[]"), r"config\.json is not a JSON object"),
    "unheard-of": (json_with("config.json", model_type="unheard-of"), "has model type `unheard-of`"),
    "contradicts itself": (json_with("config.json", num_hidden_layers=7), "num_hidden_layers"),
    "several modalities": (
        json_with("config.json", model_type="gemma3", text_config={"model_type": "gemma3_text"}),
        r"config\.json: gemma3 is a model of several modalities.*give a model that reads text alone",
    ),
    "another architecture": (
        another_architecture,
        "made for BertForMaskedLM, but the causal language model is BertLMHeadModel",
    ),
    "no tokenizer": (without_tokenizer, "has no tokenizer: copy tokenizer.json and tokenizer_config.json"),
    "a broken tokenizer": (write("tokenizer.json", b"{"), "line 1"),
    "other digits": (other_digits, r"makes '12345 \+ 61890' of '12345 \+ 67890': give the model's own tokenizer"),
    "another tokenizer": (more_tokens, r"has \d+ tokens, such as .* of the model \(vocab_size in config.json\)"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_unusable_policy_is_refused_with_file_and_remedy(
    folder: Path, name: str, tmp_path: Path, store: Store
) -> None:
    """The message names config knob, file and remedy; no policy with random or broken weights is written."""
    damage, message = BROKEN[name]
    damage(folder)
    with pytest.raises(ValueError, match=message) as error:
        import_policy(str(folder), tmp_path / "out", tmp_path / "cache", store)
    assert str(error.value).startswith(f"policy.path={str(folder)!r} holds no usable policy: ")
    assert not (tmp_path / "out").exists()


def test_added_tokens_may_lie_beyond_the_vocabulary(folder: Path, tmp_path: Path, store: Store) -> None:
    """google/gemma-3-1b-it has a token for images that its text-only model does not know."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer.add_tokens([f"<token {number}>" for number in range(size - len(tokenizer) + 1)], special_tokens=True)
    tokenizer.save_pretrained(folder)
    import_policy(str(folder), tmp_path / "out", tmp_path / "cache", store)
    assert max(AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab().values()) == size


def test_a_temperature_without_do_sample_is_kept(folder: Path, tmp_path: Path, store: Store) -> None:
    """Many policies set a temperature without `do_sample`, which transformers would refuse to write again."""
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": 2}')
    import_policy(str(folder), tmp_path / "out", tmp_path / "cache", store)
    written = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert (written["temperature"], written["do_sample"], written["eos_token_id"]) == (0.6, True, 2)


def test_a_full_disk_is_not_blamed_on_the_policy(folder: Path, tmp_path: Path, store: Store) -> None:
    """Files above 4 KB cannot be written here, as on a full disk; the error blames the disk, not the policy."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises((OSError, SafetensorError), match="File too large"):
            import_policy(str(folder), tmp_path / "out", tmp_path / "cache", store)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_unreachable_hub_is_reported_as_such(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unreachable hub is not reported as an unusable policy."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UnavailableError, match=r"^policy\.path='some/model' is not a folder .*HF_HUB_OFFLINE"):
        import_policy("some/model", tmp_path / "out", tmp_path / "cache", store)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64])
def test_weights_of_other_precisions_become_float32(
    folder: Path, kind: torch.dtype, tmp_path: Path, store: Store
) -> None:
    """Most policies are published in half precision."""
    as_type(kind)(folder)
    import_policy(str(folder), tmp_path / "out", tmp_path / "cache", store)
    assert {value.dtype for value in load_file(tmp_path / "out" / WEIGHTS).values()} == {torch.float32}


def template(text: str) -> Break:
    return lambda folder: (folder / "chat_template.jinja").write_text(text)


def without_end(folder: Path) -> None:
    """Remove the end-of-turn token from template, tokenizer and the model's configuration, which the engine reads."""
    template("{% for message in messages %}{{ message.content }} {% endfor %}")(folder)
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        if (folder / name).exists():
            values = json.loads((folder / name).read_text())
            left = {key: value for key, value in values.items() if key not in ("eos_token", "eos_token_id")}
            (folder / name).write_text(json.dumps(left))


UNPLAYABLE: dict[str, tuple[Break, str]] = {
    "syntax error": (
        template("{% for message in messages %}"),
        "^the chat template of policy.path='.*' refuses a conversation of user: Unexpected end.* "
        "repair chat_template in",
    ),
    "no template": (
        lambda folder: (folder / "chat_template.jinja").unlink(),
        "^the tokenizer of policy.path=.* has no chat template",
    ),
    "no end": (without_end, "nothing ends a turn: set eos_token in tokenizer_config.json"),
    "short context": (
        json_with("config.json", max_position_embeddings=100),
        r"its context is 100 tokens .*inference.max_model_len=128 asks for more: set it to 100 at most",
    ),
    "overflow": (
        tensors(lambda named: named["lm_head.weight"].fill_(3e38)),
        "logprobs are NaN or infinite: its weights overflow",
    ),
}


@pytest.mark.parametrize("name", UNPLAYABLE)
@pytest.mark.usefixtures("policy")
def test_an_unplayable_policy_is_refused_before_it_is_committed(folder: Path, name: str, tmp_path: Path) -> None:
    """The message names the policy, not the scratch folder, which no longer exists when a user reads it."""
    damage, message = UNPLAYABLE[name]
    damage(folder)
    with pytest.raises(ValueError, match=message) as error:
        begin(tmp_path, f"policy={{path: {folder}}}")
    assert "policy-" not in str(error.value)
    assert str(error.value).count("chat_template.jinja") <= 1
    assert not list((tmp_path / "var/runs/smoke").glob("checkpoints/*"))


def test_the_policy_may_change_until_it_is_committed(
    folder: Path, tmp_path: Path, policy: str, policy_folder: Path
) -> None:
    """The same run begins with another policy after a refusal; with a third one it would be another run."""
    without_end(folder)
    with pytest.raises(ValueError, match="nothing ends a turn"):
        begin(tmp_path, f"policy={{path: {folder}}}")
    assert begin(tmp_path, policy) == begin(tmp_path, policy) == layout.checkpoint("smoke", 0)
    committed = manifests.read(Store(f"{tmp_path}/var"), layout.checkpoint("smoke", 0))
    assert committed.config["policy"]["path"] == str(policy_folder)
    with pytest.raises(ConfigError, match=r"(?s)policy\.path: .*begin another run"):
        begin(tmp_path, f"policy={{path: {folder}}}")


def test_an_agent_that_cannot_be_made_is_refused_before_a_policy_is_committed(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent whose constructor fails is refused before the commit; the run can go on with another agent."""
    (tmp_path / "agents_that_exit.py").write_text(
        "import sys\n\nclass Agent:\n    def __init__(self, context, *, good: bool):\n        good or sys.exit(3)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    agent = "agent={{type: 'agents_that_exit:Agent', args: {{good: {}}}}}"
    with pytest.raises(ValueError, match=r"its constructor raised SystemExit: 3 \(.*agents_that_exit.py, line 5\)"):
        begin(tmp_path, policy, agent.format("false"))
    assert not list((tmp_path / "var/runs/smoke").glob("checkpoints/*"))
    begin(tmp_path, policy, agent.format("true"))
    with pytest.raises(ConfigError, match=r"agent\.args\.good: True -> False"):
        begin(tmp_path, policy, agent.format("false"))


def test_problems_may_change_until_there_is_a_policy(policy: str, tmp_path: Path) -> None:
    """A run whose problem file cannot be read can begin again with other problems."""
    start(tmp_path, policy, "problems.train={kind: jsonl, path: /no/such/file, preset: gsm8k}")
    begin(tmp_path, policy, PROBLEMS.format(9))
    with pytest.raises(ConfigError, match=r"problems\.train\.high: 9 -> 8"):
        start(tmp_path, policy, PROBLEMS.format(8))


def test_problems_are_held_by_a_curriculum(policy: str, tmp_path: Path) -> None:
    """A curriculum is committed before the policy and fixes the problems."""
    workspace = start(tmp_path, policy, PROBLEMS.format(9))
    start(tmp_path, policy, PROBLEMS.format(8))
    with Draft(workspace.store, layout.curriculum("smoke"), "curriculum") as draft:
        draft.commit(workspace.provenance(), parents=[])
    start(tmp_path, policy, PROBLEMS.format(9))
    with pytest.raises(ConfigError, match=r"problems\.train\.high: 9 -> 8"):
        start(tmp_path, policy, PROBLEMS.format(8))


def test_an_agent_may_need_the_event_loop_when_it_is_made(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some HTTP client sessions need an event loop, so the try-out makes the agent inside one, like a rollout."""
    (tmp_path / "agents_of_a_loop.py").write_text(
        "import asyncio\n\nclass Agent:\n    def __init__(self, context):\n        asyncio.get_running_loop()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    begin(tmp_path, policy, "agent={type: 'agents_of_a_loop:Agent', args: {}}")


def start(tmp_path: Path, *overrides: str) -> Workspace:
    """Run the first step of a run."""
    config = resolve("smoke", [f"storage.root={tmp_path}/var", f"storage.cache={tmp_path}/cache", *overrides])
    workspace = Workspace(config)
    run_workspace.start_run.fn(workspace)
    return workspace


def begin(tmp_path: Path, *overrides: str) -> str:
    """Run the first steps of a run, up to its policy."""
    return first_policy.first_policy.fn(start(tmp_path, *overrides))
