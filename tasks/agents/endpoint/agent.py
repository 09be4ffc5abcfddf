"""The base of agents that speak to the endpoint: it plays an episode from the first request to its trajectory."""

import asyncio
import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Annotated, NamedTuple, Self

from pydantic import Field

from storage.records import Problem, Trajectory
from storage.visible import described
from tasks.agents.answers import open_reader
from tasks.agents.endpoint.completions import OUT_OF_CONTEXT, Completions, OverrunError
from tasks.agents.endpoint.protocol import MODEL, ResponseFormats, invalid
from tasks.agents.endpoint.server import EndpointServer
from tasks.agents.endpoint.tree import Node, record
from tasks.agents.faults import PolicyError, fault_of, reason_of
from tasks.agents.interface import AgentContext, EpisodeEngine, EpisodeSpec
from tasks.environments.interface import Environment, StepResult, verdict_of
from tasks.inference.api import ContextLengthError
from tasks.problems.rows import first_messages


class Reward(NamedTuple):
    """A reward with its named parts, for agents that grade themselves.

    Example: Reward(1.2, {"correct": 1.0, "format": 0.2}, success=True)

    Attributes:
        success: whether the answer is right, which evaluations, filters and the gate count. Without it the scorer
            decides.
    """

    value: float
    parts: Mapping[str, float] = {}
    success: bool | None = None


@dataclass(eq=False)
class AgentTask:
    """An episode, as the agent sees it.

    Attributes:
        prompt: the question, as the environment asks it.
        problem: the problem, with its metadata but for those that scorers call private, and without solutions.
        seed: of the episode.
        model: the name for requests.
        base_url, api_key: of the endpoint, for clients other than the given one.
        messages: the question as the user's message or, if the problem's row has messages, these with the question.
        num_answers: set it to the number of answers that the agent gives at most, if it knows: an episode that the
            policy ends before it answers earns the least reward for each that is missing.
    """

    prompt: str
    problem: Problem
    seed: int
    base_url: str
    api_key: str
    _environment: Environment
    _completions: Completions
    model: str = MODEL
    messages: list[dict[str, str]] = field(default_factory=list)
    num_answers: int | None = None
    steps: int = field(default=0, init=False)

    async def step(self, action: str) -> StepResult:
        """Give the environment an answer; what it says is recorded with the completion that gave this answer.

        This is the newest completion with this content. If the newest one calls a tool (`final_answer(answer="3")`),
        completions whose call of this tool holds the answer count, too. If none has the answer, it is the newest one.

        Raises:
            EndpointError: the agent has no completion yet.
        """
        return await self._completions.in_loop(self._step(action))

    async def _step(self, action: str) -> StepResult:
        received = self._completions.tree.received
        if not received:
            raise invalid("the agent gave an answer before it had a completion", code="no_completion")
        node, paid = _that_said(action, received), len(received)
        result = StepResult(*await self._environment.step(action))
        node.graded, node.verdict, node.paid = True, verdict_of(result.info), max(node.paid, paid)
        node.given = None if action.strip() == node.text.strip() else action
        node.reward += result.reward
        for name, value in (result.info.get("parts") or {}).items():
            node.parts[name] = node.parts.get(name, 0.0) + value
        self.steps += 1
        return result

    async def conclude(self, returned: object) -> None:
        """Take what the agent returned: its final answer as a text, a reward (a number or `Reward`), or None.

        A reward is that of the newest completion. The environment gets a text, unless it got this answer already:
        what came after it earns nothing by that. After None, the newest completion is the answer, unless the
        environment was stepped.

        Raises:
            TypeError: it is something else.
            RuntimeError: the agent has asked for no completion.
        """
        nodes = self._completions.tree.received
        if not nodes:
            raise RuntimeError("the agent ended without a completion: it must ask the endpoint")
        newest = nodes[-1]
        if isinstance(returned, int | float) and not isinstance(returned, bool):
            returned = Reward(float(returned))
        if isinstance(returned, Reward):
            if not math.isfinite(returned.value):
                raise ValueError(f"the agent returned the reward {returned.value}: give a finite number")
            newest.graded, newest.reward, newest.parts = True, returned.value, dict(returned.parts)
            newest.paid = len(nodes)
            if returned.success is not None:
                newest.verdict = "correct" if returned.success else "wrong"
        elif isinstance(returned, str):
            node = _that_said(returned, nodes)
            given = node.text if node.given is None else node.given
            if not (node.graded and returned.strip() == given.strip()):
                await self.step(returned)
        elif returned is not None:
            raise TypeError(f"the agent returned {type(returned).__name__}: return a text, a reward or None")
        elif not self.steps:
            await self.step(newest.message["content"])


def _that_said(answer: str, received: Sequence[Node]) -> Node:
    """Return the completion that gave an answer: the newest one that contains it or, without such, the newest one."""
    answer, names = answer.strip(), {call.name for call in received[-1].calls}
    answering = (node for node in reversed(received) if answer and answer in node.answers(names))
    return next(answering, received[-1])


@dataclass(eq=False, repr=False)
class EndpointAgent(ABC):
    """An agent that asks the endpoint; subclasses say how it runs.

    A subclass with arguments of its own is a data class, too, with `@dataclass(eq=False, repr=False, kw_only=True)`.
    If it has a `__post_init__`, this begins with `super().__post_init__()`.

    Args:
        context: the pipeline gives it to every agent.
        turn_discount: return of turn k = reward k + turn_discount * return of turn k+1.
        renderer: how completions are read, see `tasks.agents.answers.open_reader`.
        listen: where the endpoint listens: `127.0.0.1:0` (a free port of this machine), or another `host:port`.
        max_requests: most requests of an episode.
        response_format: what becomes of `response_format` in requests: `refuse` or `ignore`.
    """

    context: AgentContext
    _: KW_ONLY
    turn_discount: Annotated[float, Field(ge=0, le=1)] = 1.0
    renderer: str = "auto"
    listen: Annotated[str, Field(pattern=r"^.+:\d+$")] = "127.0.0.1:0"
    max_requests: Annotated[int, Field(ge=1)] = 256
    response_format: ResponseFormats = "refuse"

    def __post_init__(self) -> None:
        self._reader = open_reader(self.context.chat, self.renderer)
        self._server = EndpointServer(self.listen)

    async def __aenter__(self) -> Self:
        await self._server.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.__aexit__()

    @abstractmethod
    async def solve(self, task: AgentTask, completions: Completions) -> object:
        """Run the agent; return its final answer as a text, a reward, or None."""

    async def play(self, prompt: EpisodeSpec, env: Environment, engine: EpisodeEngine) -> list[Trajectory]:
        """See `AwaitingAgent.play`."""
        question, _ = await env.reset(seed=prompt.seed, options={"problem": prompt.problem})
        completions = Completions(
            prompt.qid, self.context, self._reader, self.max_requests, engine, self.response_format
        )
        problem = Problem(prompt.problem.problem_id, question, [], prompt.problem.source, prompt.problem.metadata)
        task = AgentTask(
            prompt=question,
            problem=problem,
            seed=prompt.seed,
            base_url=self._server.base_url,
            api_key=secrets.token_urlsafe(24),
            _environment=env,
            _completions=completions,
            messages=first_messages(prompt.problem, question),
        )
        ended: BaseException | None = None
        try:
            async with completions.open():
                with self._server.serve(task.api_key, completions, task.step):
                    await task.conclude(await self.solve(task, completions))
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - the record has its reason
            ended = self._cause(error, completions)
            if ended is not error:
                ended.__cause__ = error
        if completions.overrun:  # also if the agent has swallowed its cancellation
            ended = OverrunError(f"the agent sent more than {self.max_requests} requests")
        nodes = completions.tree.nodes
        if ended is None:
            return [record(prompt, nodes, self.turn_discount)]
        if not nodes:
            raise ended
        # If it was cancelled at the deadline, the rollout gives the record its reason and whose fault it is.
        full = isinstance(ended, ContextLengthError)
        reason = str(ended) if full else reason_of(ended)
        missing = -1 if task.num_answers is None else max(0, task.num_answers - task.steps)
        unfinished = record(prompt, nodes, self.turn_discount, "truncated" if full else "failed", reason, missing)
        return [replace(unfinished, fault=fault_of(ended, sampled=any(unfinished.action_mask)))]

    def _cause(self, error: BaseException, completions: Completions) -> BaseException:
        """Return why an episode ended, given the error that ended the agent."""
        nodes = completions.tree.nodes
        if not isinstance(error, Exception):
            return error
        refusal = completions.refusal
        if nodes and refusal and refusal.code == OUT_OF_CONTEXT:
            return ContextLengthError(f"no room in the context: {refusal}")
        if nodes and any(call.status == "unparsable" for call in nodes[-1].calls):
            return UnreadableCallsError(f"{described(error)}, after a call that cannot be read")
        return RuntimeError(f"{described(error)}; the endpoint had refused: {refusal}") if refusal else error


class UnreadableCallsError(PolicyError):
    """An agent failed after a completion with a call that cannot be read."""
