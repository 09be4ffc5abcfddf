"""One rollout: a plan's groups through the collector into the shards of a draft, with progress."""

import asyncio
import gc
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from storage.checkpoints import Checkpoint
from storage.datasets import ShardWriter
from storage.manifests import Draft
from storage.records import TRAJECTORY_SCHEMA, Problem, Trajectory
from tasks.agents import AGENTS
from tasks.agents.chat import Chat
from tasks.agents.interface import Agent, AgentContext
from tasks.environments import ENVIRONMENTS
from tasks.environments.interface import Environment, EnvironmentContext
from tasks.inference.api import InferenceError
from tasks.inference.engine import Engine
from tasks.rewards.verifier import Verifier
from tasks.rollouts.collector import Collector
from tasks.rollouts.plan import Plan
from tasks.rollouts.selection import is_rejected, select

_PROGRESS_S = 5.0


def play(
    plan: Plan,
    problems: Sequence[Problem],
    engine: Engine,
    verifier: Verifier,
    draft: Draft,
    progress: Callable[[str], None],
    spare: Iterable[Problem] = (),
) -> dict[str, Any]:
    """Play all groups of `problems` with the policy that `engine` serves; returns the rollout's metrics.

    Where the plan selects, groups that it rejects are replaced by those of `spare` problems, for
    `rollout.max_resampling_rounds` rounds; what is missing then stays missing.

    Raises:
        InferenceError: the engine refuses, or serves another version.
        ValueError: more than `rollout.max_failed_share` of the episodes failed.
    """
    tally, settings = _Tally(progress), plan.config.rollout
    with ShardWriter(draft, TRAJECTORY_SCHEMA, settings.rows_per_shard) as writer:

        def sink(trajectories: list[Trajectory]) -> None:
            group = select(trajectories, settings) if plan.selecting else trajectories
            tally.groups_rejected += is_rejected(trajectories, group)
            for trajectory in group:
                tally.add(trajectory)
                writer.write(trajectory)
            tally.tell()

        async def rounds() -> None:
            rest, wanted = iter(spare), list(problems)
            for _ in range(1 + settings.max_resampling_rounds):
                tally.expect(len(wanted), plan.group_size)
                before = tally.groups_rejected
                await _collect(plan, wanted, engine, verifier, sink)
                wanted = list(itertools.islice(rest, tally.groups_rejected - before))
                if not wanted:
                    break

        gc.freeze()  # the half million objects of torch and Prefect need no walking: halves the client's CPU time
        try:
            asyncio.run(rounds())
        finally:
            gc.unfreeze()
    if engine.closed:  # the flow ends: what failed for want of a judge or an engine is no data
        raise InferenceError("the engine was closed while a rollout was playing")
    tally.tell(last=True)
    tally.check(settings.max_failed_share)
    return tally.metrics()


async def _collect(
    plan: Plan,
    problems: Sequence[Problem],
    engine: Engine,
    verifier: Verifier,
    sink: Callable[[list[Trajectory]], None],
) -> None:
    chat = load_chat(plan.policy)
    async with engine.connect() as connection:
        collector = Collector(
            generator=connection,
            agent=_agent(plan, chat),
            make_environment=lambda: _environment(plan, verifier),
            chat=chat,
            settings=plan.config.rollout,
        )
        await collector.collect(plan.groups(problems), plan.group_size, sink)


def _agent(plan: Plan, chat: Chat) -> Agent:
    settings = plan.config.agent
    context = AgentContext(chat, plan.gconfig, plan.config.inference.max_model_len)
    return AGENTS.make(settings.type, context, settings.args)


def _environment(plan: Plan, verifier: Verifier) -> Environment:
    settings = plan.config.environment
    return ENVIRONMENTS.make(settings.type, EnvironmentContext(verifier), settings.args)


def load_chat(policy: Checkpoint) -> Chat:
    """The checkpoint's tokenizer; it stays the same through a run, so it is loaded once."""
    fingerprint = tuple(file.sha256 for file in policy.manifest.files if "token" in file.name or "chat" in file.name)
    return _load_chat(fingerprint, _Unhashed(policy.model))


@dataclass(frozen=True)
class _Unhashed:
    folder: Path = field(hash=False, compare=False)


@lru_cache(maxsize=2)
def _load_chat(fingerprint: tuple[str, ...], where: _Unhashed) -> Chat:
    from transformers import AutoTokenizer

    return Chat(AutoTokenizer.from_pretrained(where.folder, local_files_only=True))


class _Tally:
    """Counts for progress and metrics."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self._progress = progress
        self._expected = self._groups = self.groups_rejected = 0
        self._started = self._told = time.monotonic()
        self._statuses: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._successes: Counter[int] = Counter()
        self._turns: Counter[int] = Counter()
        self._versions: set[int] = set()
        self._generated = self._tokens = self._solved = self._sequences = 0

    def expect(self, groups: int, size: int) -> None:
        """More groups begin."""
        self._groups += groups
        self._expected += groups * size

    def add(self, trajectory: Trajectory) -> None:
        self._statuses[trajectory.status] += 1
        if trajectory.status == "failed":
            self._reasons[trajectory.reason] += 1
        self._tokens += len(trajectory.token_ids)
        self._sequences += len(trajectory.sequence_starts)
        self._versions |= set(trajectory.versions) - {-1}
        self._generated += sum(turn.end - turn.start for turn in trajectory.turns)
        self._solved += any(turn.reward > 0 for turn in trajectory.turns)
        for index, turn in enumerate(trajectory.turns):
            self._turns[index] += 1
            self._successes[index] += turn.reward > 0

    def tell(self, *, last: bool = False) -> None:
        """A line of progress, every few seconds and at the end."""
        now = time.monotonic()
        if now - self._told < _PROGRESS_S and not last:
            return
        self._told = now
        done = self._statuses.total()
        rate, solved = self._generated / (now - self._started), self._solved / max(1, done)
        self._progress(f"{done}/{self._expected} episodes, {rate:.0f} tokens/s, {solved:.1%} solved")

    def check(self, max_failed_share: float) -> None:
        done, failed = self._statuses.total(), self._statuses["failed"]
        if done and failed / done > max_failed_share:
            listing = "; ".join(f"{count} x {reason}" for reason, count in self._reasons.most_common(3))
            raise ValueError(
                f"{failed} of {done} episodes failed, more than rollout.max_failed_share={max_failed_share:g}: "
                f"{listing}"
            )

    def metrics(self) -> dict[str, Any]:
        seconds = time.monotonic() - self._started
        return {
            "episodes": self._statuses.total(),
            "status": dict(self._statuses),
            "groups": self._groups,
            "groups_rejected": self.groups_rejected,
            "sequences": self._sequences,
            "policy_versions": sorted(self._versions),
            "tokens": self._tokens,
            "generated_tokens": self._generated,
            "tokens_per_second": self._generated / seconds,
            "solved": self._solved / max(1, self._statuses.total()),
            "success": [self._successes[turn] / self._turns[turn] for turn in sorted(self._turns)],
            "seconds": seconds,
        }
