"""One rollout: the collector plays a plan's groups, their trajectories become shards of a draft, with progress."""

import asyncio
import gc
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from storage import interrupts
from storage.records import TRAJECTORY_SCHEMA, Problem, Trajectory
from storage.versions.checkpoints import Checkpoint
from storage.versions.datasets import ShardWriter, adopted
from storage.versions.drafts import Draft
from storage.visible import visible
from tasks.agents import AGENTS
from tasks.agents.chat import Chat
from tasks.agents.interface import Agent, AgentContext
from tasks.agents.trial import open_chat
from tasks.environments import ENVIRONMENTS
from tasks.environments.interface import Environment, EnvironmentContext
from tasks.inference.api import EngineClosedError
from tasks.inference.engine import Engine
from tasks.rollout.collector import Collector
from tasks.rollout.plan import RolloutPlan
from tasks.rollout.selection import is_rejected, select_episodes
from tasks.score.verifier import Verifier

_PROGRESS_S = 5.0
_LONGEST_REASON = 400  # characters of one reason in a message that lists several


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
    tally, settings = _Tally(progress), plan.config.rollout
    tally.resume(adopted(draft))
    rejected = {note["problem_id"]: bool(note["rejected"]) for note in draft.notes}  # by problem, of all groups played
    with ShardWriter(draft, TRAJECTORY_SCHEMA, settings.rows_per_shard) as writer:

        def sink(trajectories: list[Trajectory]) -> None:
            if engine.closed:  # the flow ends: episodes may have failed only because verifier or engine are gone
                raise EngineClosedError("the engine was closed while a rollout was playing")
            group = select_episodes(trajectories, settings) if plan.selecting else trajectories
            problem = group[0].problem_id
            rejected[problem] = is_rejected(trajectories, group)
            for trajectory in group:
                tally.add(trajectory)
            writer.write_group(group, {"problem_id": problem, "rejected": rejected[problem]})
            tally.report()

        async def rounds() -> None:
            spares, wanted = iter(spare), list(problems)
            for _ in range(1 + settings.max_resampling_rounds):
                tally.expect(len(wanted), plan.group_size)
                unplayed = [problem for problem in wanted if problem.problem_id not in rejected]
                if unplayed:
                    await _collect(plan, unplayed, engine, verifier, sink)
                wanted = list(itertools.islice(spares, sum(rejected[problem.problem_id] for problem in wanted)))
                if not wanted:
                    break

        gc.freeze()  # collections skip half a million objects of torch and Prefect: halves the client's CPU time
        try:
            _run(rounds())
        finally:
            gc.unfreeze()
    tally.report(last=True)
    try:
        tally.check(settings.max_failed_share)
    except ValueError:
        draft.discard()  # the next attempt plays all episodes again
        raise
    return tally.metrics(groups_rejected=sum(rejected.values()))


def _run(rounds: Coroutine[Any, Any, None]) -> None:
    """Play the rounds in an event loop.

    Raises:
        RuntimeError: an agent's code ended, cancelled or stopped the whole rollout; says which of these.
    """
    try:
        asyncio.run(rounds)
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


async def _collect(
    plan: RolloutPlan,
    problems: Sequence[Problem],
    engine: Engine,
    verifier: Verifier,
    sink: Callable[[list[Trajectory]], None],
) -> None:
    chat = load_chat(plan.policy)
    async with engine.connect() as connection:
        collector = Collector(
            generator=connection,
            agent=_make_agent(plan, chat),
            make_environment=lambda: _make_environment(plan, verifier),
            chat=chat,
            settings=plan.config.rollout,
        )
        await collector.collect(plan.groups(problems), plan.group_size, sink)


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


class _Tally:
    """The counts behind progress and metrics."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self._progress = progress
        self._expected = self._groups = self._resumed = self._resumed_tokens = 0
        self._started = self._reported = time.monotonic()
        self._statuses: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._successes: Counter[int] = Counter()
        self._turns: Counter[int] = Counter()
        self._versions: set[int] = set()
        self._generated = self._tokens = self._solved = self._sequences = 0

    def expect(self, groups: int, size: int) -> None:
        """Add `groups` of `size` episodes to the total."""
        self._groups += groups
        self._expected += groups * size

    def resume(self, trajectories: Iterable[Trajectory]) -> None:
        """Count episodes that a killed attempt played; they do not count for the speed of this attempt."""
        for trajectory in trajectories:
            self.add(trajectory)
        self._resumed, self._resumed_tokens = self._statuses.total(), self._generated
        if self._resumed:
            self._progress(f"{self._resumed} episodes were already stored: going on from there")
        self._started = self._reported = time.monotonic()

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

    def report(self, *, last: bool = False) -> None:
        """Report progress, every few seconds and at the end."""
        now = time.monotonic()
        if now - self._reported < _PROGRESS_S and not last:
            return
        self._reported = now
        done = self._statuses.total()
        rate, solved = self._rate(now), self._solved / max(1, done)
        self._progress(f"{done}/{self._expected} episodes, {rate:.0f} tokens/s, {solved:.1%} solved")

    def check(self, max_failed_share: float) -> None:
        done, failed = self._statuses.total(), self._statuses["failed"]
        if done and failed / done > max_failed_share:
            listing = "; ".join(
                f"{count} x {visible(reason, _LONGEST_REASON)}" for reason, count in self._reasons.most_common(3)
            )
            raise ValueError(
                f"{failed} of {done} episodes failed, more than rollout.max_failed_share={max_failed_share:g}: "
                f"{listing}"
            )

    def _rate(self, now: float) -> float:
        return (self._generated - self._resumed_tokens) / (now - self._started)

    def metrics(self, groups_rejected: int) -> dict[str, Any]:
        """Return the metrics for the manifest; `seconds` and the speed belong to the last attempt."""
        now = time.monotonic()
        return {
            "episodes": self._statuses.total(),
            "episodes_resumed": self._resumed,
            "status": dict(self._statuses),
            "groups": self._groups,
            "groups_rejected": groups_rejected,
            "sequences": self._sequences,
            "policy_versions": sorted(self._versions),
            "tokens": self._tokens,
            "generated_tokens": self._generated,
            "tokens_per_second": self._rate(now),
            "solved": self._solved / max(1, self._statuses.total()),
            "success": [self._successes[turn] / self._turns[turn] for turn in sorted(self._turns)],
            "seconds": now - self._started,
        }
