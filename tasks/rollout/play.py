"""One rollout: the collector plays a plan's groups, their trajectories become shards of a draft, with progress."""

import asyncio
import gc
import itertools
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from storage import interrupts
from storage.records import TRAJECTORY_SCHEMA, Problem, Trajectory
from storage.versions.checkpoints import Checkpoint
from storage.versions.datasets import ShardWriter, adopted
from storage.versions.drafts import Draft
from tasks.agents import AGENTS
from tasks.agents.chat import Chat
from tasks.agents.interface import Agent, AgentContext
from tasks.agents.trial import open_chat
from tasks.environments import ENVIRONMENTS
from tasks.environments.interface import Environment, EnvironmentContext
from tasks.inference.api import EngineClosedError
from tasks.inference.engine import Engine
from tasks.rollout.collector import Collector
from tasks.rollout.plan import Group, RolloutPlan
from tasks.rollout.selection import is_rejected, select_episodes
from tasks.rollout.tally import Tally
from tasks.score.verifier import Verifier


def play(
    plan: RolloutPlan,
    problems: Sequence[Problem],
    engine: Engine,
    verifier: Verifier,
    draft: Draft,
    progress: Callable[[str], None],
    spare: Iterable[Problem] = (),
) -> dict[str, Any]:
    """Play the groups of all `problems` with the policy that `engine` serves; return the rollout's metrics.

    Groups in shards that the draft took over from a killed attempt are not played again.

    If the plan selects, groups of `spare` problems replace the rejected groups, for at most
    `rollout.max_resampling_rounds` rounds. Groups that are rejected after that are not replaced.

    Raises:
        InferenceError: the engine refuses a request, or serves another version.
        ValueError: more than `rollout.max_failed_share` of the episodes failed.
    """
    tally, settings = Tally(progress), plan.config.rollout
    tally.resume(adopted(draft))
    rejected = {note["problem_id"]: bool(note["rejected"]) for note in draft.notes}  # by problem, of all groups played
    with ShardWriter(draft, TRAJECTORY_SCHEMA, settings.rows_per_shard) as writer:

        def sink(group: Group, trajectories: list[Trajectory]) -> None:
            refuse_closed(engine)
            selected = select_episodes(trajectories, settings) if plan.selecting else trajectories
            problem = group.problem.problem_id
            rejected[problem] = is_rejected(trajectories, selected)
            for trajectory in selected:
                tally.add(trajectory)
            writer.write_group(selected, {"problem_id": problem, "rejected": rejected[problem]})
            tally.report()

        async def rounds() -> None:
            spares, wanted = iter(spare), list(problems)
            for _ in range(1 + settings.max_resampling_rounds):
                tally.expect(len(wanted), plan.group_size)
                unplayed = [problem for problem in wanted if problem.problem_id not in rejected]
                if unplayed:
                    async with open_collector(plan, engine, verifier) as collector:
                        await collector.collect(plan.groups(unplayed), plan.together, sink)
                wanted = list(itertools.islice(spares, sum(rejected[problem.problem_id] for problem in wanted)))
                if not wanted:
                    break

        gc.freeze()  # collections skip half a million objects of torch and Prefect: halves the client's CPU time
        try:
            run_loop(rounds())
        finally:
            gc.unfreeze()
    tally.report(last=True)
    try:
        tally.check(settings.max_failed_share)
    except ValueError:
        draft.discard()  # the next attempt plays all episodes again
        raise
    return tally.metrics(groups_rejected=sum(rejected.values()))


def refuse_closed(engine: Engine) -> None:
    """Raise EngineClosedError if the flow ends: episodes may have failed only because verifier or engine are gone."""
    if engine.closed:
        raise EngineClosedError("the engine was closed while a rollout was playing")


def run_loop(playing: Coroutine[Any, Any, None]) -> None:
    """Play in an event loop of this thread.

    Raises:
        RuntimeError: an agent's code ended, cancelled or stopped the whole rollout; says which of these.
    """
    try:
        asyncio.run(playing)
    except (SystemExit, asyncio.CancelledError) as error:
        if interrupts.raised_by_handler(error):
            raise
        if isinstance(error, SystemExit):
            cause, remedy = f"a task of an agent called sys.exit({error.code!r})", "raise another exception"
        else:
            cause, remedy = "an agent has cancelled the rollout's own tasks", "cancel only tasks that it started"
        raise RuntimeError(f"{cause}, which ends the rollout: it must {remedy}") from error
    except RuntimeError as error:
        if not str(error).startswith("Event loop stopped"):  # asyncio has no exception class for it
            raise
        raise RuntimeError("an agent stopped the event loop, which ends the rollout: it must return instead") from error


@asynccontextmanager
async def open_collector(plan: RolloutPlan, engine: Engine, verifier: Verifier) -> AsyncIterator[Collector]:
    """Open a collector that plays with the agent and the environment of a plan, connected to the engine."""
    chat = load_chat(plan.policy)
    async with engine.connect() as connection:
        yield Collector(
            generator=connection,
            agent=_make_agent(plan, chat),
            make_environment=lambda: _make_environment(plan, verifier),
            chat=chat,
            settings=plan.config.rollout,
        )


def _make_agent(plan: RolloutPlan, chat: Chat) -> Agent:
    settings = plan.config.agent
    context = AgentContext(chat, plan.gconfig, plan.config.inference.max_model_len)
    return AGENTS.make(settings.type, context, settings.args)


def _make_environment(plan: RolloutPlan, verifier: Verifier) -> Environment:
    settings = plan.config.environment
    return ENVIRONMENTS.make(settings.type, EnvironmentContext(verifier), settings.args)


def load_chat(policy: Checkpoint) -> Chat:
    """Return the chat of the checkpoint's tokenizer; it is cached, because a run never changes its tokenizer."""
    fingerprint = tuple(file.sha256 for file in policy.manifest.files if "token" in file.name or "chat" in file.name)
    return _load_chat(fingerprint, _vocabulary(policy.model / "config.json"), _Unhashed(policy.model))


def _vocabulary(config: Path) -> int | None:
    """Return the `vocab_size` of the model's configuration; the import refuses models of several parts."""
    size = json.loads(config.read_bytes()).get("vocab_size")
    return int(size) if size else None


@dataclass(frozen=True)
class _Unhashed:
    folder: Path = field(hash=False, compare=False)


@lru_cache(maxsize=2)
def _load_chat(fingerprint: tuple[str, ...], vocabulary: int | None, model: _Unhashed) -> Chat:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.folder, trust_remote_code=False, local_files_only=True)
    return open_chat(tokenizer, vocabulary)
