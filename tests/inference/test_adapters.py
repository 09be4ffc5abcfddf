"""The real vLLM server loads the adapter of each policy version by name, and proves it."""

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from configs.policy import LoRA
from configs.rollout import Rollout
from configs.train import Train
from storage import layout
from storage.objects.store import Store
from storage.versions import checkpoints
from storage.versions.checkpoints import Checkpoint
from storage.versions.drafts import Draft, Provenance
from tasks.inference.api import Completion, GenerationConfig, InferenceError
from tasks.inference.client import Client
from tasks.inference.engine import Engine
from tasks.train.policy import load_policy, make_canary
from tests.conftest import INFERENCE, forget
from tests.inference.test_engine import PROMPT, own_logprobs
from tests.support.train_helpers import save_random_adapter

pytestmark = [pytest.mark.long, pytest.mark.slow]

LONG = GenerationConfig(n=32, max_new_tokens=110, temperature=2.0)


def commit_adapter(store: Store, run: str, number: int, base: Path, noise: float) -> Checkpoint:
    """Commit an adapter of version 0 of a run, which is committed with it; both parts get random numbers."""
    version, first = layout.checkpoint(run, number), layout.checkpoint(run, 0)
    with TemporaryDirectory() as scratch, Draft(store, version, "checkpoint") as draft:
        folder = save_random_adapter(base, Path(scratch) / "adapter", LoRA(rank=4, alpha=8), noise, number)
        canary = make_canary(load_policy(base, Train(), adapter=folder))
        if number == 0:
            draft.add_folder(base, "model")
        draft.add_folder(folder, "adapter")
        checkpoints.add_canary(draft, canary)
        draft.commit(Provenance(config={}), [], base=first if number else None)
    return checkpoints.open_checkpoint(store, version, Path("unused"))


@pytest.fixture(scope="module")
def adapted(checkpoint_store: Store, policy_folder: Path) -> list[Checkpoint]:
    """Return version 0, whose adapter changes nothing, and two later ones."""
    return [commit_adapter(checkpoint_store, "adapted", number, policy_folder, 0.1 * number) for number in range(3)]


@pytest.fixture(scope="module")
def server(adapted: list[Checkpoint], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(INFERENCE, Rollout(), tmp_path_factory.mktemp("logs")) as engine:
        engine.serve(adapted[0])
        yield engine


async def ask(engine: Engine, gconfig: GenerationConfig, after: Checkpoint | None = None) -> list[Completion]:
    """Return completions; with `after`, serve that while they are sampled."""
    async with engine.connect() as connection:
        asked = asyncio.create_task(connection.generate(PROMPT, gconfig, seed=7, replica=0))
        if after:
            await asyncio.sleep(0.1)
            await asyncio.to_thread(engine.serve, after)
        return await asked


def assert_sampled_by(policy: Checkpoint, completions: list[Completion]) -> None:
    """Check that all tokens have the version of a policy, and logprobs that the trainer finds."""
    for completion in completions[:4]:
        assert set(completion.versions) == {policy.number}
        assert completion.logprobs == pytest.approx(own_logprobs(policy, completion, LONG.temperature), abs=1e-4)


def test_each_version_is_served_and_requests_in_flight_keep_theirs(server: Engine, adapted: list[Checkpoint]) -> None:
    """Also those of version 0, which beside an adapter must not be answered with it; the server is not restarted."""
    pid = server.servers[0].pid
    for policy, following in ((adapted[0], adapted[1]), (adapted[1], adapted[2]), (adapted[2], adapted[0])):
        server.serve(policy)
        assert_sampled_by(policy, asyncio.run(ask(server, LONG, following)))
        assert_sampled_by(following, asyncio.run(ask(server, LONG)))
    assert server.servers[0].pid == pid


@pytest.mark.parametrize("tolerance", [1e-4, 1.0], ids=["by the canary", "though the canary allows it"])
@pytest.mark.parametrize("noise", [0.3, 1e-5])
def test_a_stale_adapter_is_found(
    server: Engine, policy_folder: Path, tolerance: float, noise: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that has the former adapter under the new name is found, also if the update was small."""
    store, run = Store(str(tmp_path)), f"stale-{noise}-{tolerance}"
    before, after = (commit_adapter(store, run, number, policy_folder, noise) for number in (0, 1))
    load = Client.load_adapter

    async def load_former(client: Client, name: str, _: Path) -> None:
        assert before.adapter
        await load(client, name, before.adapter)

    settings = INFERENCE.model_copy(update={"urls": [server.servers[0].url], "canary_tolerance": tolerance})
    with Engine(settings, Rollout(), tmp_path) as engine:
        engine.serve(before)
        with monkeypatch.context() as patched:
            patched.setattr(Client, "load_adapter", load_former)
            with pytest.raises(InferenceError, match="does not serve"):
                engine.serve(after)
        engine.serve(before)
        engine.serve(after)
        assert [replica.proven and replica.proven.exact for replica in engine._replicas] == [True]  # of the base
    forget(server)


def test_a_killed_server_gets_the_adapter_again(server: Engine, adapted: list[Checkpoint]) -> None:
    """The next request restarts it with the base, and names the newest adapter."""
    server.serve(adapted[2])
    psutil.Process(server.servers[0].pid).kill()
    assert_sampled_by(adapted[2], asyncio.run(ask(server, LONG)))


def test_weights_of_another_base_are_not_taken_for_its_own(server: Engine, adapted: list[Checkpoint]) -> None:
    """A policy without adapter gets a server without, and a checkpoint whose base is another one fails its canary."""
    server.serve(adapted[1])
    merged = dataclasses.replace(adapted[1], model=adapted[0].model, adapter=adapted[2].adapter, number=7)
    with pytest.raises(InferenceError, match=r"does not serve .* served, .* expected"):
        server.serve(dataclasses.replace(merged, version=layout.checkpoint("adapted", 7)))
    plain = dataclasses.replace(adapted[0], adapter=None)
    server.serve(dataclasses.replace(plain, version=layout.checkpoint("plain", 0)))
    assert server.servers[0].adapted == []
    assert_sampled_by(plain, asyncio.run(ask(server, LONG)))
