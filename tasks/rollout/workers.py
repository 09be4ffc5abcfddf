"""The workers, which play the groups of a rollout: by default this process, with its engine and its verifier."""

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import lru_cache, partial
from pathlib import Path

from configs import Config
from storage.records import Trajectory
from storage.version_names import PolicyVersion, TrajectoriesVersion
from storage.versions import datasets
from storage.versions.checkpoints import Checkpoint
from storage.versions.drafts import Draft
from tasks.agents import AGENTS
from tasks.agents.chat import Chat, load_chat
from tasks.agents.interface import AgentContext, entered
from tasks.environments import ENVIRONMENTS
from tasks.environments.interface import EnvironmentContext
from tasks.inference.api import EngineClosedError, Generator
from tasks.inference.engine import Engine
from tasks.problems.mixture import naming
from tasks.rollout.collector import collect
from tasks.rollout.outcomes import FinishedGroup, select_episodes
from tasks.rollout.plan import Group, RolloutPlan
from tasks.rollout.play import Groups
from tasks.rollout.turns import Player
from tasks.score.scorers import Scorers, private_metadata
from tasks.score.scoring import NO_ANNOTATIONS, ByRole, Grades, read_annotations, score_rows
from tasks.score.verifier import Verifier
from tasks.tools import open_toolbox
from tasks.tools.interface import ToolContext
from tasks.tools.sandbox import Sandboxes

OpenPolicy = Callable[[PolicyVersion], Checkpoint]
_sandboxes = lru_cache(Sandboxes)
"""Returns the sandboxes of this process, which bound how many run at the same time."""


class LocalWorker:
    """One worker, which plays in this process.

    Args:
        engine: answers the requests; None if nothing will be played.
        verifier: for the environments, and for scores.
        open_policy: fetches and verifies a checkpoint for servers.
        cache: keeps objects of a remote root.
    """

    def __init__(
        self, engine: Engine | None, verifier: Verifier, open_policy: OpenPolicy, cache: Path = Path("/nonexistent")
    ) -> None:
        self._engine, self.verifier, self._open_policy, self.cache = engine, verifier, open_policy, cache
        self._policy: Checkpoint | None = None
        self._chat: Chat | None = None
        self._serving = threading.Lock()

    def serve(self, policy: PolicyVersion) -> None:
        """See `Workers.serve`."""
        assert self._engine
        with self._serving:
            if self._policy and self._engine.serves(policy):
                return
            checkpoint = self._open_policy(policy)
            if checkpoint.committed or not self._chat:  # one that was trained just now has the tokenizer of the others
                self._chat = load_chat(checkpoint)  # reports an unusable tokenizer before servers start
            self._engine.serve(checkpoint)
            self._policy = checkpoint

    async def play(self, plan: RolloutPlan, groups: Groups) -> None:
        """See `Workers.play`."""

        def store(group: Group, trajectories: list[Trajectory]) -> None:
            if self._engine and self._engine.closed:  # episodes may have failed only because it or the verifier is gone
                raise EngineClosedError("the engine was closed while a rollout was playing")
            config = plan.config.of_source(group.problem.source)
            rows = select_episodes(trajectories, config) if plan.selecting else trajectories
            groups.finish(FinishedGroup.of(group, trajectories, rows, config), rows)

        async def as_they_begin() -> AsyncIterator[Group]:
            """Yield each group as soon as it may begin with the policy that is served then, until all is done."""
            while not groups.complete:
                assert self._policy
                if group := groups.next(self._policy.version):
                    yield group
                else:
                    await groups.changed.wait()

        assert self._engine
        chat = self._chat
        assert chat, "serve a policy first"
        with groups.changed.listening():
            async with self._engine.connect() as engine, open_player(plan, engine, chat, self.verifier) as player:
                await collect(player, as_they_begin(), plan.together, store)

    def score(
        self, trajectories: TrajectoriesVersion, draft: Draft, config: Config, annotations: ByRole = NO_ANNOTATIONS
    ) -> Grades:
        """See `Workers.score`."""
        annotated = read_annotations(draft.store, annotations, self.cache)
        scorers = Scorers(config.score, self.verifier, annotations=annotated)
        rows = datasets.rows(draft.store, trajectories, self.cache, scorers.columns)
        return score_rows(rows, scorers, draft, config.rollout.rows_per_shard)


@asynccontextmanager
async def open_player(plan: RolloutPlan, generator: Generator, chat: Chat, verifier: Verifier) -> AsyncIterator[Player]:
    """Open what plays a plan: its agent and environment, and those of a mixture's members.

    Raises:
        ValueError: an agent cannot be made.
    """
    private, context = private_metadata(plan.config.score), EnvironmentContext(verifier)
    async with AsyncExitStack() as stack:

        async def opened(config: Config, members: dict[str, Player]) -> Player:
            toolbox = partial(open_toolbox, config.agent.tools, ToolContext(_sandboxes()))
            made = AgentContext(chat, plan.gconfig, config.inference.max_model_len, toolbox)
            agent = AGENTS.make(config.agent.type, made, config.agent.args)
            await stack.enter_async_context(entered(agent))
            environment = partial(ENVIRONMENTS.make, config.environment.type, context, config.environment.args)
            return Player(generator, agent, environment, chat, config.rollout, plan.gconfig, private, members)

        members = dict[str, Player]()
        for member, (where, config) in zip(plan.config.problems.members, plan.config.played, strict=False):
            with naming(where):
                members[member.name] = await opened(config, {})
        yield await opened(plan.config, members)
