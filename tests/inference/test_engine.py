"""The real vLLM server swaps weights, proves what it serves, and is restarted and ended reliably."""

import asyncio
import contextlib
import dataclasses
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import aiohttp
import psutil
import pytest

from configs.inference import Inference
from configs.rollout import Rollout
from storage import layout
from storage.objects.store import Store
from storage.versions.checkpoints import Checkpoint
from tasks.agents.chat import load_tokenizer
from tasks.inference import launch
from tasks.inference.api import AbortedError, Completion, ContextLengthError, GenerationConfig, InferenceError
from tasks.inference.client import Client
from tasks.inference.engine import Connection, Engine
from tasks.inference.server import Server
from tasks.rollout.admission import MOST_COMPLETIONS
from tests.conftest import INFERENCE, commit_policy, forget
from tests.support.engine_process import engine_core
from tests.support.sandbox_helpers import wait_gone

pytestmark = pytest.mark.slow

PROMPT = [5, 6, 7, 8]
Again = Callable[..., Engine]


def generate(engine: Engine, gconfig: GenerationConfig, token_ids: list[int] = PROMPT) -> list[Completion]:
    async def ask() -> list[Completion]:
        async with engine.connect() as connection:
            return await connection.generate(token_ids, gconfig, seed=7, replica=0)

    return asyncio.run(ask())


def versions(engine: Engine) -> set[int]:
    """Return the policy versions of the tokens of a new completion."""
    return {number for made in generate(engine, GenerationConfig(max_new_tokens=4)) for number in made.versions}


def own_logprobs(policy: Checkpoint, completion: Completion, temperature: float) -> list[float]:
    """Return the trainer's logprobs of a completion of `PROMPT`."""
    import torch

    from configs.train import Train
    from tasks.train.policy import load_policy

    ids = torch.tensor([PROMPT + completion.token_ids])
    with torch.no_grad():
        logits = load_policy(policy.model, Train(), adapter=policy.adapter)(ids).logits[0, len(PROMPT) - 1 : -1]
    own: list[float] = torch.log_softmax(logits / temperature, -1).gather(1, ids[0, len(PROMPT) :, None])[:, 0].tolist()
    return own


def test_swapped_weights_are_proven(engine: Engine, policies: list[Checkpoint]) -> None:
    """Each policy's weights are swapped into the running server, and each token has the version that sampled it.

    At other temperatures, the lowest and the highest included, vLLM's logprobs equal the trainer's.
    """
    logprobs = []
    for policy in (policies[1], policies[2], policies[1]):
        engine.serve(policy)
        completions = generate(engine, GenerationConfig(n=3, max_new_tokens=6))
        assert len(completions) == 3
        for completion in completions:
            assert set(completion.versions) == {policy.number}
            assert len(completion.token_ids) == len(completion.logprobs) == len(completion.versions)
        logprobs.append([completion.logprobs for completion in completions])
    assert logprobs[0] == logprobs[2]
    assert logprobs[0] != logprobs[1]
    for temperature in (0.01, 0.5, 2):
        (completion,) = generate(engine, GenerationConfig(temperature=temperature, max_new_tokens=6))
        assert completion.logprobs == pytest.approx(own_logprobs(policies[1], completion, temperature), abs=1e-3)


def test_texts_and_tokens_end_a_completion(engine: Engine, policies: list[Checkpoint]) -> None:
    """What ends it is returned, since the policy sampled it, and nothing after it: also an end of a turn that only the
    request names.
    """
    engine.serve(policies[1])
    tokenizer = load_tokenizer(policies[1].model)
    asked = GenerationConfig(n=32, max_new_tokens=64, temperature=2.0)
    by_text = generate(engine, dataclasses.replace(asked, stop=("7", "1")))
    texts = [tokenizer.decode(completion.token_ids[:-1]) for completion in by_text]
    assert not any("7" in text or "1" in text for text in texts)
    end = generate(engine, asked)[0].token_ids[1]
    by_token = generate(engine, dataclasses.replace(asked, stop_token_ids=(end,)))
    assert not any(end in completion.token_ids[:-1] for completion in by_token)
    assert any(completion.token_ids[-1] == end for completion in by_token)
    for completion in (*by_text, *by_token):
        assert len(completion.token_ids) == len(completion.logprobs) == len(completion.versions)
    assert {"stop"} == {each.finish_reason for each in by_token if each.token_ids[-1] == end}
    assert any(completion.finish_reason == "stop" for completion in by_text)


def test_requests_in_flight_are_kept_over_a_swap(engine: Engine, policies: list[Checkpoint]) -> None:
    """They continue with the new weights, tokens record their version, and the new weights recompute the KV cache."""
    mixed, delay_s = list[Completion](), 0.1

    async def swap_in_flight() -> list[Completion]:
        async with engine.connect() as connection:
            long = GenerationConfig(n=64, max_new_tokens=110, temperature=2.0)
            asked = asyncio.create_task(connection.generate(PROMPT, long, seed=7, replica=0))
            await asyncio.sleep(delay_s)
            await asyncio.to_thread(engine.serve, policies[2])
            return await asked

    for _ in range(20):  # the server's speed depends on the load of the machine
        engine.serve(policies[1])
        completions = asyncio.run(swap_in_flight())
        if mixed := [completion for completion in completions if set(completion.versions) == {1, 2}]:
            break
        delay_s *= 1.6 if completions[0].versions[0] == 2 else 0.7  # 2: it was early
    assert mixed
    for completion in mixed[:5]:
        assert completion.versions == sorted(completion.versions)
        swap = completion.versions.index(2)
        before, after = (own_logprobs(policy, completion, 2.0) for policy in policies[1:])
        assert completion.logprobs[:swap] == pytest.approx(before[:swap], abs=1e-4)
        assert completion.logprobs[swap:] == pytest.approx(after[swap:], abs=1e-4)
        assert before[swap:] != pytest.approx(after[swap:], abs=1e-2)
    engine.serve(policies[0])


async def test_a_failed_request_is_sent_again(policies: list[Checkpoint]) -> None:
    """After a repair of its server, such as a restart; an aborted completion is not used as a turn."""
    answers = [AbortedError("abort"), aiohttp.ClientConnectionError("gone"), [Completion([7], [-1.0], [1], "stop")]]
    repaired, client = list[int](), AsyncMock(generate=AsyncMock(side_effect=answers))
    engine: Any = SimpleNamespace(served=policies[1], closed=False, history=[1], repair=repaired.append)
    made = await Connection(engine, [client], 0).generate(PROMPT, GenerationConfig(), seed=7, replica=0)
    assert (made, repaired) == (answers[-1], [0, 0])


def test_vllm_returns_what_it_has_sampled_of_a_request_that_is_cut(engine: Engine, policies: list[Checkpoint]) -> None:
    """The tokens of a completion that takes too long have the logprobs of the trainer, as whole ones have."""
    engine.serve(policies[1])
    long, cut, longest_s = GenerationConfig(n=64, max_new_tokens=120, temperature=2.0), list[Completion](), 0.05

    async def ask() -> list[Completion]:
        async with Client(engine.servers[0].url, None, 600, 128, longest_s=longest_s) as client:
            with contextlib.suppress(AbortedError):  # nothing was sampled yet
                return await client.generate(PROMPT, long, seed=7)
        return []

    while not cut and longest_s < 20:  # the server's speed depends on the load of the machine
        ended = [completion for completion in asyncio.run(ask()) if completion.finish_reason == "length"]
        cut = [completion for completion in ended if len(completion.token_ids) < 120]
        longest_s *= 1.5
    for completion in cut[:5]:
        assert len(completion.token_ids) == len(completion.logprobs)
        assert completion.versions == [1] * len(completion.token_ids)
        assert completion.logprobs == pytest.approx(own_logprobs(policies[1], completion, 2.0), abs=1e-3)
    assert cut


@pytest.mark.long
def test_a_swap_that_fails_is_repaired_by_the_next(engine: Engine, policies: list[Checkpoint]) -> None:
    """Until then the engine serves nothing, least of all half of the weights, and a running rollout ends at once."""
    engine.serve(policies[1])
    broken = dataclasses.replace(policies[2], version=layout.checkpoint("shared", 8), model=Path("/no/such/model"))

    async def ask() -> None:
        async with engine.connect() as connection:
            with pytest.raises(InferenceError):
                await asyncio.to_thread(engine.serve, broken)
            with pytest.raises(InferenceError, match="serves no policy any more"):
                await connection.generate(PROMPT, GenerationConfig(), seed=7, replica=0)

    asyncio.run(ask())
    with pytest.raises(AssertionError, match="serve a policy first"):
        generate(engine, GenerationConfig())
    engine.serve(policies[1])
    assert versions(engine) == {1}
    engine.serve(policies[0])


def test_a_closed_engine_ends_a_rollout_at_once(policies: list[Checkpoint], again: Again) -> None:
    """When the flow fails, an overlapped rollout must neither wait for retries nor restart servers."""
    with again() as other:
        other.serve(policies[0])
    with pytest.raises(InferenceError, match="closed while a rollout was playing"):
        generate(other, GenerationConfig())


@pytest.fixture
def again(engine: Engine, tmp_path: Path) -> Iterator[Again]:
    """Yield a function that makes another engine, with the knobs that it gets, of the session's server."""
    settings = Inference(urls=[engine.servers[0].url], max_model_len=128)
    yield lambda **knobs: Engine(settings.model_copy(update=knobs), Rollout(), tmp_path)
    forget(engine)


@pytest.mark.parametrize(
    ("noise", "told"), [(1e-8, True), (3e-3, False)], ids=["found by sums of weights", "found by the canary"]
)
def test_a_new_label_on_old_weights_is_found(
    again: Again, store: Store, policy_folder: Path, noise: float, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found even if the update was small and its effect is below the tolerance of 0.1."""
    before = commit_policy(store, 100, policy_folder, 0.02)
    after = commit_policy(store, 101, before.model, noise)
    same = commit_policy(store, 102, after.model)
    step = fmean(abs(a - b) for a, b in zip(before.canary.logprobs, after.canary.logprobs, strict=True))
    assert step < 0.1
    if not told:
        monkeypatch.setattr(Client, "_call_workers", AsyncMock(return_value=None))

    async def relabel(client: Client, _: Path, version: int) -> None:
        await client.set_weight_version(version)

    with again(canary_tolerance=0.1) as other:  # which half precision needs
        other.serve(before)
        with monkeypatch.context() as patched:
            patched.setattr(Client, "_reload", relabel)
            with pytest.raises(InferenceError, match=r"does not serve .*(it holds other weights in .*layer 0|before)"):
                other.serve(after)
            with pytest.raises(InferenceError, match="does not serve"):
                other.serve(after)  # as another command would, which does not know of the failure
        for policy in (before, after, same):  # the same weights under another version are no error
            other.serve(policy)
        assert versions(other) == {same.number}


def test_weights_in_another_form_are_proven_by_the_canary(
    again: Again, policies: list[Checkpoint], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server may round or arrange them differently, or lack the extension that tells them.

    It needs a tolerance, unless that of float32 is kept: nothing else would show a small update. The error comes before
    the first rollout, and says what to do.
    """
    with again(dtype="float16") as other, pytest.raises(InferenceError, match="nothing proves that"):
        other.serve(policies[1])
    with again(dtype="float16", canary_tolerance=0.1) as other:
        for policy in policies:
            other.serve(policy)
    assert caplog.text.count("The canary alone proves what it serves") == 1
    monkeypatch.setattr(Client, "_call_workers", AsyncMock(return_value=None))
    with again(dtype="float16") as other, pytest.raises(InferenceError, match="--worker-extension-cls"):
        other.serve(policies[1])


def test_another_version_in_an_answer_stops_the_run(engine: Engine, policies: list[Checkpoint]) -> None:
    """The rollout stops if another program has swapped the server's weights."""
    engine.serve(policies[1])
    server = engine.servers[0]

    async def relabel() -> None:
        async with Client(server.url, None, 10, 128) as client:
            await client.set_weight_version(42)

    asyncio.run(relabel())
    with pytest.raises(InferenceError, match=r"weight version \[42\], asked for 1"):
        generate(engine, GenerationConfig(max_new_tokens=2))
    engine.serve(policies[0])


def test_a_request_has_limits(engine: Engine, policies: list[Checkpoint]) -> None:
    """vLLM would refuse more completions than the server plays at once, and a prompt that fills the context.

    A completion says how long it could have been, by its request or the room in the context: a penalty needs it.
    """
    engine.serve(policies[0])
    assert len(generate(engine, GenerationConfig(n=MOST_COMPLETIONS, max_new_tokens=1))) == MOST_COMPLETIONS
    with pytest.raises(ContextLengthError, match="prompt of 128 tokens.*max_model_len=128"):
        generate(engine, GenerationConfig(), [5] * 128)
    for most, limit in [(60, 28), (20, 20)]:
        (completion,) = generate(engine, GenerationConfig(max_new_tokens=most), [5] * 100)
        assert completion.limit == limit >= len(completion.token_ids)


NAMES_ANOTHER = [*["a frame"] * 20, "RuntimeError: Engine core initialization failed. See root cause above."]
FAULT = ["RuntimeError: no config.json in this folder", "  with more about it", "(APIServer) INFO sends sigterm"]
TRACEBACK = ["Traceback (most recent call last):", "  a frame"]
PREFIXED = [f"(EngineCore pid=7) ERROR {line}" for line in [*TRACEBACK, "Exception: look for the root cause"]]
LOG = "\n".join([*TRACEBACK, *FAULT, *PREFIXED, *TRACEBACK, *NAMES_ANOTHER])


def test_a_server_that_does_not_start_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error shows the end of the server's log; if it only names a root cause above, the end of that."""
    failing = tmp_path / "failing.py"
    failing.write_text(f"import sys; sys.exit({LOG!r})")
    monkeypatch.setattr(launch, "__file__", str(failing))
    (tmp_path / "config.json").write_text("{}")
    server = Server(INFERENCE, tmp_path / "vllm.log")
    server.start_serving(tmp_path)
    with pytest.raises(InferenceError, match=r"vLLM ended while starting(.|\n)*no config.json in this folder") as error:
        server.wait_until_healthy()
    assert "root cause" not in str(error.value)
    server.close()


def test_a_path_that_is_a_pattern_for_vllm_is_refused(tmp_path: Path) -> None:
    """It globs the folder of a model: a name with brackets would be another folder's."""
    (folder := tmp_path / "[a]").mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(InferenceError, match="for a pattern: move it"):
        Server(INFERENCE, tmp_path / "vllm.log").start_serving(folder)


def test_unreachable_servers_are_named(policies: list[Checkpoint], tmp_path: Path) -> None:
    engine = Engine(Inference(urls=["http://127.0.0.1:9"]), Rollout(), tmp_path)
    with pytest.raises(InferenceError, match="http://127.0.0.1:9 cannot be reached"):
        engine.serve(policies[0])


@pytest.fixture
def impatient(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Return the session's engine with time limits of seconds."""
    monkeypatch.setattr("tasks.inference.engine.REQUEST_TIMEOUT_S", 8.0)
    monkeypatch.setattr("tasks.inference.server.SILENT_S", 5.0)
    monkeypatch.setattr("tasks.inference.client.CUT_S", 2.0)
    monkeypatch.setattr(Rollout, "longest_completion_s", 5.0)
    return engine


@pytest.mark.long
@pytest.mark.parametrize("moment", ["before a request", "before a swap", "in a swap"])
@pytest.mark.parametrize("victim", ["server", "engine", "silent engine"])
def test_what_has_died_is_started_again(
    impatient: Engine, policies: list[Checkpoint], moment: str, victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets the newest policy, and nothing of the old server is left.

    The process that takes requests may live on, and vLLM leaves some of them without an answer.
    """
    impatient.serve(policies[1])
    (server,) = impatient.servers
    first, reload = psutil.Process(server.pid), Client._reload
    family = [first, *first.children(recursive=True)]
    target = first if victim == "server" else engine_core(server)

    def strike() -> None:
        target.send_signal(signal.SIGSTOP if victim == "silent engine" else signal.SIGKILL)

    async def struck(client: Client, model: Path, version: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):  # the next attempt meets another server
            strike()
        await reload(client, model, version)

    newest = policies[1] if moment == "before a request" else policies[2]
    if moment == "in a swap":
        monkeypatch.setattr(Client, "_reload", struck)
    else:
        strike()
    impatient.serve(newest)
    assert versions(impatient) == {newest.number}
    wait_gone(family)
    impatient.serve(policies[0])
