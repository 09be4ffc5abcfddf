"""Models beside the policy on real servers: what they say is what transformers computes, and they are proven."""

import asyncio
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from configs import Config, load
from storage.records import Annotation
from storage.versions.checkpoints import Checkpoint
from tasks.agents.chat import Chat, load_chat
from tasks.annotate.annotating import Question, asker
from tasks.inference.api import InferenceError
from tasks.inference.beside import BesideModels
from tasks.inference.location import folder_of, identities
from tests.support.engine_process import engine_core
from tests.support.reward_model import forget_models, save_reward_model
from tests.support.sandbox_helpers import wait_gone

pytestmark = pytest.mark.slow

SERVER = "{max_model_len: 256, enforce_eager: true, extra_args: [--kv-cache-memory-bytes, '67108864'], path: %s}"


@pytest.fixture(scope="module")
def chat(policies: list[Checkpoint]) -> Chat:
    return load_chat(policies[0])


@pytest.fixture(scope="module")
def config(policies: list[Checkpoint], tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Return a configuration with a teacher and a reward model, all small."""
    folder = save_reward_model(policies[0].model, tmp_path_factory.mktemp("reward") / "model")
    models = [f"models.teacher={SERVER % policies[1].model}", f"models.reward={SERVER % folder}"]
    return load("smoke", ["algorithm.type=opd", "score.type=reward-model", *models])


@pytest.fixture(scope="module")
def models(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BesideModels]:
    with BesideModels(config, tmp_path_factory.mktemp("logs")) as models:
        yield models


def ask(models: BesideModels, config: Config, role: str, content: object) -> Annotation:
    async def asked() -> Annotation:
        async with models.connect(role) as (client,):  # type: ignore[arg-type]
            return await asker(config, role).ask(client, Question("t", 0, content))  # type: ignore[arg-type]

    return asyncio.run(asked())


@pytest.mark.long
def test_a_reward_is_the_classifiers_number(models: BesideModels, config: Config, chat: Chat) -> None:
    """Without any activation; a conversation that is too long gets none, and says why."""
    ids = chat.whole([{"role": "user", "content": "3 + 4"}, {"role": "assistant", "content": "7"}])
    model = AutoModelForSequenceClassification.from_pretrained(folder_of(config, "reward"))
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits.item()
    assert ask(models, config, "reward", tuple(ids)).value == pytest.approx(expected, abs=1e-5)
    problem = "300 tokens are more than models.reward.max_model_len=256"
    assert ask(models, config, "reward", (5,) * 300).problem == problem


@pytest.mark.long
def test_a_teacher_tells_the_logprob_of_each_token(models: BesideModels, config: Config) -> None:
    """Of every sequence; its first token has none, and 0 is in its place."""
    sequences = ((5, 6, 7, 8), (9,), (10, 11))
    model, expected = AutoModelForCausalLM.from_pretrained(folder_of(config, "teacher")), list[float]()
    for sequence in sequences:
        ids = torch.tensor([sequence])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids).logits[0, :-1], -1)
        expected += [0.0, *logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()]
    assert ask(models, config, "teacher", sequences).logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.long
def test_servers_by_url_are_proven_to_hold_the_model(
    models: BesideModels, config: Config, policies: list[Checkpoint], tmp_path: Path
) -> None:
    """A judge on the teacher's server is accepted with the teacher's weights, and refused with another's."""
    ask(models, config, "teacher", ((5, 6),))
    (server,) = models._servers["teacher"]
    rubric = "score.args.judge={prompt: '{{ answer }}', max_new_tokens: 4}"

    def judged_by(policy: Checkpoint) -> Annotation:
        where = f"models.judge={{path: {policy.model}, urls: ['{server.url}']}}"
        judged = load("smoke", ["score.type=judge", rubric, where])
        with BesideModels(judged, tmp_path) as beside:
            return ask(beside, judged, "judge", "3 + 4 <|im_end|>")

    said = judged_by(policies[1])
    assert said.prompt == "3 + 4 <|im_end|>"
    assert said == judged_by(policies[1])  # greedy
    with pytest.raises(InferenceError, match="holds other weights"):
        judged_by(policies[2])


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "silent"])
def test_a_question_is_answered_after_the_models_engine_has_died(
    models: BesideModels, config: Config, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server is started again and proven; the process that takes requests may live on."""
    monkeypatch.setattr("tasks.inference.beside._REQUEST_S", 8.0)
    monkeypatch.setattr("tasks.inference.server.SILENT_S", 5.0)
    question = Question("t", 0, ((5, 6, 7, 8),))
    before = ask(models, config, "teacher", question.content)
    (server,) = models._servers["teacher"]
    core = engine_core(server)

    async def asked() -> Annotation:
        async with models.connect("teacher") as (client,):
            core.send_signal(number)
            return await asker(config, "teacher").answer(models, client, question, 3)

    assert asyncio.run(asked()).logprobs == before.logprobs
    wait_gone([core])


def test_the_identity_is_that_of_the_files(policies: list[Checkpoint], tmp_path: Path) -> None:
    """A copy elsewhere is the same model; another template or one changed byte of weights makes it another."""

    def identity(folder: Path) -> str:
        forget_models()
        return identities(load("smoke", ["score.type=judge", f"models.judge.path={folder}"]))["judge"]

    copy = tmp_path / "copy"
    shutil.copytree(policies[1].model, copy)
    known = identity(policies[1].model)
    assert known.startswith("sha256:")
    assert identity(copy) == known
    assert identity(policies[2].model) != known
    values = json.loads((copy / "config.json").read_bytes())
    (copy / "config.json").write_text(json.dumps(values | {"rms_norm_eps": 1e-3}))
    assert identity(copy) != known
    for path in copy.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ValueError, match=r"models\.judge\.path=.*there are no \*\.safetensors"):
        identity(copy)
