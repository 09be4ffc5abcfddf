"""An external policy that cannot be trained or played: the error names the fault, and nothing is committed."""

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from configs import ConfigError
from flows.run.configuration import resolve
from flows.run.workspace import Workspace
from flows.stages import warm_start as first_policy
from storage import layout
from storage.objects.store import Store
from storage.versions import manifests
from storage.versions.drafts import Draft
from storage.versions.model_files import INDEX
from tasks.inference.location import identity_of, locate
from tasks.warm_start.importing import import_policy
from tasks.warm_start.policy_sizes import policy_tokenizer
from tests.conftest import commit_policy
from tests.support import begun

WEIGHTS = "model.safetensors"
PROBLEMS = "problems.train={{kind: arithmetic, high: {}}}"
Break = Callable[[Path], object]
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(policy_folder: Path, tmp_path: Path) -> Path:
    """A copy of a working policy."""
    return Path(shutil.copytree(policy_folder, tmp_path / "policy"))


@pytest.fixture
def policy(policy_folder: Path, plain: list[str]) -> str:
    """The override for a working policy."""
    return f"policy={{path: {policy_folder}}}"


def cut(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size // 2)


def json_with(name: str, **fields: Any) -> Break:
    """Change values in a JSON file."""
    return lambda folder: (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | fields))


def tensors(change: Callable[[Tensors], Tensors]) -> Break:
    return lambda folder: save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, {"format": "pt"})


def filled(name: str, value: float) -> Break:
    return tensors(lambda named: named | {name: torch.full_like(named[name], value)})


def as_type(kind: torch.dtype) -> Break:
    return tensors(lambda named: {name: value.to(kind) for name, value in named.items()})


def without_a_shard(folder: Path) -> None:
    shards = dict.fromkeys(load_file(folder / WEIGHTS), "model-00001-of-00002.safetensors")
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
    shards["lm_head.weight"] = "model-00002-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": shards}))


def with_more_tokens(folder: Path) -> None:
    values = json.loads((folder / "tokenizer.json").read_text())
    values["model"]["vocab"] |= {f"token {number}": number for number in range(1000, 2000)}
    (folder / "tokenizer.json").write_text(json.dumps(values))


def in_its_place(name: str, make: Break) -> Break:
    def replace(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).parent.mkdir(exist_ok=True)
        make(folder / name)

    return replace


ONE_FOR_SEVEN = {"type": "Replace", "pattern": {"String": "7"}, "content": "1"}
BROKEN: dict[str, tuple[Break, str]] = {
    "cut": (cut, r"model\.safetensors cannot be read as safetensors.*copy it again"),
    "a shard is missing": (without_a_shard, r"model-00002-of-00002\.safetensors is missing: copy all files"),
    "NaN": (filled("model.norm.weight", math.nan), r"model\.safetensors: model\.norm\.weight with NaN or infinities"),
    "integers": (as_type(torch.int8), "in I8, which cannot be trained; give weights in one of F64, F32, F16, BF16"),
    "another architecture": (json_with("config.json", model_type="unheard-of"), "has model type `unheard-of`"),
    "several modalities": (
        json_with("config.json", model_type="gemma3", text_config={"model_type": "gemma3_text"}),
        r"config\.json: gemma3 is a model of several modalities.*give a model that reads text alone",
    ),
    "a pipe": (in_its_place("tokenizer.json", os.mkfifo), r"tokenizer\.json is a pipe, a socket or a device"),
    "a device": (
        in_its_place("additional_chat_templates/a.jinja", lambda path: path.symlink_to("/dev/zero")),
        r"a\.jinja is a pipe, a socket or a device",
    ),
    "other digits": (
        json_with("tokenizer.json", normalizer=ONE_FOR_SEVEN),
        r"makes '12345 \+ 61890' of '12345 \+ 67890': give the model's own tokenizer",
    ),
    "another tokenizer": (with_more_tokens, r"has \d+ tokens, such as .* of the model \(vocab_size in config.json\)"),
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


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64])
def test_a_policy_as_many_are_published(folder: Path, kind: torch.dtype, tmp_path: Path, store: Store) -> None:
    """Weights become float32. A temperature may come without `do_sample`, which transformers would refuse to write.

    Added tokens may lie beyond the vocabulary: google/gemma-3-1b-it has one for images, which its model does not know.
    """
    as_type(kind)(folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": 2}')
    tokenizer = AutoTokenizer.from_pretrained(folder)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer.add_tokens([f"<token {number}>" for number in range(size - len(tokenizer) + 1)], special_tokens=True)
    tokenizer.save_pretrained(folder)
    import_policy(str(folder), tmp_path / "out", tmp_path / "cache", store)
    assert {value.dtype for value in load_file(tmp_path / "out" / WEIGHTS).values()} == {torch.float32}
    written = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert (written["temperature"], written["do_sample"], written["eos_token_id"]) == (0.6, True, 2)
    assert max(AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab().values()) == size


@pytest.mark.parametrize(
    ("lost", "message"),
    [("token*", "{} has no tokenizer: .* if this is the hub's cache"), ("config.json", "there is no {}/config.json")],
)
def test_a_cache_in_part_is_called_that(
    folder: Path, lost: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--check` says it, too: without a tokenizer transformers makes up an empty one, which has no chat template."""
    for path in folder.glob(lost):
        path.unlink()
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(folder))
    with pytest.raises(ValueError, match=message.format(folder)):
        policy_tokenizer(resolve("smoke", ["policy={path: acme/model}", f"storage.root={tmp_path}"]))


@pytest.mark.parametrize("part", ["", "/model", "/state", "/model/config.json"])
def test_a_part_of_a_checkpoint_is_refused_with_the_checkpoint(
    policy_folder: Path, part: str, tmp_path: Path, store: Store
) -> None:
    """Its files would be taken unverified, without lineage. A folder of another program that is called so is none."""
    manifest = commit_policy(store, 0, policy_folder).manifest
    inside = f"{store.uri(manifest.version)}/{manifest.nonce}"
    with pytest.raises(
        ValueError, match=f"{inside}{part} lies inside of a checkpoint: give {store.uri(manifest.version)}, whose files"
    ):
        import_policy(inside + part, tmp_path / "out", tmp_path / "cache", store)
    other = Path(shutil.copytree(f"{inside}/model", tmp_path / "runs/mine/checkpoints/000100/model"))
    assert locate(str(other), []) == other
    assert locate(f"{inside}/model", [], "models.judge.path") == Path(inside, "model")


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
    "overflow": (filled("lm_head.weight", 3e38), "logprobs are NaN or infinite: its weights overflow"),
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
    """The run can go on with another agent. An agent is made inside an event loop, as in a rollout."""
    (tmp_path / "agents_that_exit.py").write_text(
        "import asyncio, sys\n\nclass Agent:\n    def __init__(self, context, *, good: bool):\n"
        "        asyncio.get_running_loop()\n        good or sys.exit(3)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    agent = "agent={{type: 'agents_that_exit:Agent', args: {{good: {}}}}}"
    with pytest.raises(ValueError, match=r"its constructor raised SystemExit: 3 \(.*agents_that_exit.py, line 6\)"):
        begin(tmp_path, policy, agent.format("false"))
    assert not list((tmp_path / "var/runs/smoke").glob("checkpoints/*"))
    begin(tmp_path, policy, agent.format("true"))
    with pytest.raises(ConfigError, match=r"agent\.args\.good: True -> False"):
        begin(tmp_path, policy, agent.format("false"))


@pytest.mark.parametrize("held_by", ["policy", "curriculum"])
def test_problems_may_change_until_a_policy_or_a_curriculum_holds_them(
    policy: str, tmp_path: Path, held_by: str
) -> None:
    """A run whose problem file cannot be read can begin again with other problems."""
    start(tmp_path, policy, "problems.train={kind: jsonl, path: /no/such/file, preset: gsm8k}")
    workspace = start(tmp_path, policy, PROBLEMS.format(9))
    if held_by == "policy":
        begin(tmp_path, policy, PROBLEMS.format(9))
    else:
        with Draft(workspace.store, layout.curriculum("smoke"), "curriculum") as draft:
            draft.commit(workspace.provenance(), parents=[])
    start(tmp_path, policy, PROBLEMS.format(9))
    with pytest.raises(ConfigError, match=r"problems\.train\.high: 9 -> 8"):
        start(tmp_path, policy, PROBLEMS.format(8))


def start(tmp_path: Path, *overrides: str) -> Workspace:
    return begun.start(f"storage.root={tmp_path}/var", f"storage.cache={tmp_path}/cache", *overrides)


def begin(tmp_path: Path, *overrides: str) -> str:
    """Run the first steps of a run, up to its policy."""
    return first_policy.first_policy.fn(start(tmp_path, *overrides))


def test_links_to_files_are_followed(folder: Path, tmp_path: Path) -> None:
    """The hub's cache has a snapshot of links to its blobs. One that leads nowhere is no file, and git's are hidden."""
    snapshot, blobs = tmp_path / "snapshots" / "5c0e", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", path.name))
    folder.rename(blobs)
    (snapshot / "merges.txt").symlink_to("../../blobs/nothing")
    (snapshot / ".git").mkdir()
    os.mkfifo(snapshot / ".git" / "fsmonitor--daemon.ipc")
    assert identity_of(snapshot) == identity_of(blobs)
    assert import_policy(str(snapshot), tmp_path / "copy", tmp_path, Store(str(tmp_path))) is None
