"""The turns of episodes: agents await completions, and short ones of equal prompts in a group become one request."""

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

from configs.rollout import Rollout
from tasks.agents.chat import Chat
from tasks.agents.faults import PolicyError
from tasks.agents.interface import Agent, EpisodeSpec, QueueAgent
from tasks.environments.interface import Environment
from tasks.inference.api import BundledGenerationOutputs, GenerationConfig, Generator, Observation, derive
from tasks.inference.client import CUT_S
from tasks.rollout.admission import RefusedError, check_observation, check_request
from tasks.rollout.plan import LONGEST_TOGETHER

MOST_AT_ONCE = 128
"""Most completions in one request. vLLM refuses more than its `--max-num-seqs`, whose smallest default is 128."""
PATIENCE_S = 0.2
"""Longest wait of an observation for those of other episodes, which may be slow, or may not have begun."""
MOST_ANSWERED = 64
"""Most observations of an episode that are answered at the same time."""
MOST_UNREAD = 256
"""Most observations, or answers, that may wait in a queue of an agent."""

Answer = asyncio.Task[BundledGenerationOutputs]


@dataclass(frozen=True, slots=True)
class Player:
    """Everything that the episodes of a configuration share.

    Observations must ask for the distribution of `gconfig`, unless it is None or `rollout.allow_own_sampling` is set.
    """

    generator: Generator
    agent: Agent
    make_environment: Callable[[], Environment]
    chat: Chat
    settings: Rollout
    gconfig: GenerationConfig | None = None
    private: Set[str] = frozenset()  # keys of problems' metadata that agents do not get
    members: Mapping[str, "Player"] = field(default_factory=dict)  # of a mixture, by the source of their problems


class _Pending(NamedTuple):
    observation: Observation
    seed: int
    future: asyncio.Future[BundledGenerationOutputs]


class TurnBatcher:
    """A batch of the observations of a group's episodes; equal observations become one request, or few.

    One request with n short completions is about twice as fast as n requests. The first observations of a group are
    equal, and later ones often are, if answers are short. Observations wait until no episode of the group is between
    two of them. Long completions are asked for at once and one by one, because all would wait for the longest. Agents
    do not notice it.

    Args:
        episodes: episodes in the group.
        player: what all episodes share.
        replica: the replica that answers the group, to use its prefix cache.
    """

    def __init__(self, episodes: int, player: Player, replica: int) -> None:
        self._coming = episodes  # episodes that may ask next
        self._player, self._replica = player, replica
        self._waiting: list[_Pending] = []
        self._patience: asyncio.TimerHandle | None = None
        self._requests: set[asyncio.Task[None]] = set()

    async def ask(self, observation: Observation, seed: int) -> BundledGenerationOutputs:
        """Return the answer to an observation.

        The completions have the seeds `seed`, `seed + 1` …, or those after the smallest seed of their request.
        """
        loop = asyncio.get_running_loop()
        pending = _Pending(observation, seed, loop.create_future())
        _, _, gconfig = observation
        self._waiting.append(pending)
        if gconfig.max_new_tokens > LONGEST_TOGETHER:
            self._send_waiting()
        else:
            self._patience = self._patience or loop.call_later(PATIENCE_S, self._send_waiting)
        self.leave()
        try:
            return await pending.future
        except asyncio.CancelledError:
            if not pending.future.cancelled():  # the answer is there, so the episode counted as coming again
                self.leave()
            raise

    def end(self, asking: int) -> None:
        """Note that an episode has ended, of which `asking` observations wait for answers that it no longer takes."""
        self._coming += asking
        self.leave()

    def leave(self) -> None:
        """Stop waiting for one episode: it has asked, or has ended."""
        self._coming -= 1
        if self._waiting and self._coming <= 0:
            self._send_waiting()

    def _send_waiting(self) -> None:
        if self._patience:
            self._patience.cancel()
        self._patience, waiting, self._waiting = None, self._waiting, []
        batches: dict[tuple[tuple[int, ...], GenerationConfig], list[_Pending]] = defaultdict(list)
        for pending in sorted(waiting, key=lambda pending: pending.seed):  # whatever the order in which they came
            _, token_ids, gconfig = pending.observation
            if not pending.future.done():  # an episode may have reached its deadline meanwhile
                batches[tuple(token_ids), gconfig].append(pending)
        for (_, gconfig), batch in batches.items():
            size = max(1, MOST_AT_ONCE // gconfig.n)
            for start in range(0, len(batch), size):
                request = asyncio.create_task(self._request(batch[start : start + size]))
                self._requests.add(request)  # the event loop holds only weak references to tasks
                request.add_done_callback(self._requests.discard)

    async def _request(self, batch: Sequence[_Pending]) -> None:
        _, token_ids, gconfig = batch[0].observation
        started, n, seed = time.monotonic(), gconfig.n, batch[0].seed
        try:
            # Every request needs the template's end of turn: vLLM itself knows only the model's end of text.
            stop_token_ids = (*gconfig.stop_token_ids, *self._player.chat.stop_token_ids)
            gconfig = replace(gconfig, n=n * len(batch), stop_token_ids=stop_token_ids)
            completions = await self._player.generator.generate(list(token_ids), gconfig, seed, self._replica)
            spans = [range(position * n, (position + 1) * n) for position in range(len(batch))]
            answers = [([completions[i] for i in span], [seed + i for i in span]) for span in spans]
        except BaseException as error:  # passed on to every episode that waits
            passed = error if isinstance(error, Exception) else RuntimeError("the engine cancelled a request")
            for pending in batch:
                if not pending.future.done():
                    pending.future.set_exception(passed)
            if passed is not error:
                raise
            return
        latency = time.monotonic() - started
        for ((qid, prompt_ids, _), _, future), (sampled, seeds) in zip(batch, answers, strict=True):
            if not future.done():
                self._coming += 1
                future.set_result(BundledGenerationOutputs(qid, prompt_ids, sampled, seeds, latency))


class BatchedEngine:
    """The engine as the agent of one episode asks it: see `tasks.agents.interface.EpisodeEngine`.

    Args:
        prompt: the episode.
        turns: answers its observations, together with those of its group.
        player: what all episodes share.

    Attributes:
        exchanges: all answers so far, as copies that the agent cannot change.
        slots: one for each observation that is answered now.
        failed: the error that ends the episode.
    """

    def __init__(self, prompt: EpisodeSpec, turns: TurnBatcher, player: Player) -> None:
        self._prompt, self._turns, self._player = prompt, turns, player
        self.exchanges: list[BundledGenerationOutputs] = []
        self.slots = asyncio.Semaphore(MOST_ANSWERED)
        self.failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._numbers, self._closed = itertools.count(), False
        self._answers = set[Answer]()
        self._asked: dict[int, float] = {}  # the observations that wait for their answers, and since when
        self._began = self._idle_since = time.monotonic()
        self._idle_s = 0.0  # how long none waited, up to `_idle_since`

    async def generate(
        self, token_ids: list[int], gconfig: GenerationConfig, qid: str = ""
    ) -> BundledGenerationOutputs:
        """See `EpisodeEngine.generate`."""
        await self.slots.acquire()
        return await asyncio.shield(self.begin((qid or self._prompt.qid, token_ids, gconfig)))

    def begin(self, observation: Observation, before: Answer | None = None) -> Answer:
        """Begin to answer an observation that has a slot, after the one `before` it was answered."""
        answer = asyncio.create_task(self._answer(observation, next(self._numbers), before))
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)
        return answer

    def fail(self, error: Exception) -> None:
        """End the episode with an error."""
        if not self.failed.done():
            self.failed.set_result(error)

    def close(self) -> set[Answer]:
        """Answer nothing more; return the answers that are to be cancelled, since nobody takes them."""
        self._closed = True
        self._turns.end(len(self._asked))
        return self._answers

    def is_sampling(self) -> bool:
        """Return whether the engine is sampling for the episode now, and was for more than half of its time.

        If a request has waited for longer than the engine takes to cut it, the engine is not sampling it.
        """
        if not self._asked:
            return False
        now = time.monotonic()
        overdue = now - min(self._asked.values()) > self._player.settings.longest_completion_s + CUT_S
        return not overdue and 2 * self._idle_s < now - self._began

    async def _answer(self, observation: Observation, number: int, before: Answer | None) -> BundledGenerationOutputs:
        """Answer the observation with this number in the episode."""
        (qid, token_ids, gconfig), player = observation, self._player
        try:
            known = player.chat.readable
            token_ids, gconfig = check_request(token_ids, gconfig, known, player.settings, player.gconfig)
            if before:
                await asyncio.wait([before])
            if self._closed:
                await _never()
            if not self._asked:
                self._idle_s += time.monotonic() - self._idle_since
            self._asked[number] = time.monotonic()
            source = (number,) if gconfig.seed is None else ("seed", gconfig.seed)
            outputs = await self._turns.ask((qid, token_ids, gconfig), derive(self._prompt.seed, *source))
            del self._asked[number]
            self._idle_since = time.monotonic()
            copies = [
                replace(each, token_ids=[*each.token_ids], logprobs=[*each.logprobs], versions=[*each.versions])
                for each in outputs.completions
            ]
            self.exchanges.append(replace(outputs, prompt_ids=[*outputs.prompt_ids], completions=copies))
            if padding := [number for ids in outputs.output_ids for number in ids if number >= known]:
                raise PolicyError(f"the policy sampled token {padding[0]}, but its tokenizer ends at {known - 1}")
        except Exception as error:  # noqa: BLE001  # the conversation raises it
            self.fail(error)
            await _never()
        self.slots.release()
        return outputs


async def _never() -> NoReturn:
    """Wait until the end of the episode, or of the rollout, cancels the task."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError("nothing sets the result")


async def play_with_queues(agent: QueueAgent, prompt: EpisodeSpec, env: Environment, engine: BatchedEngine) -> Any:
    """Let an agent with two queues play; return what it returns."""
    observations: asyncio.Queue[Observation] = asyncio.Queue(MOST_UNREAD)
    actions: asyncio.Queue[BundledGenerationOutputs] = asyncio.Queue()

    def deliver(answer: Answer) -> None:
        if not answer.cancelled():
            actions.put_nowait(answer.result())

    async def answer_all() -> None:
        """Answer observations until one is refused: those of one qid in order, others at the same time."""
        last: dict[str, Answer] = {}
        try:
            while True:
                await engine.slots.acquire()
                observation = check_observation(await observations.get())
                if actions.qsize() >= MOST_UNREAD:
                    raise RefusedError(f"{MOST_UNREAD} answers wait in act_queue: the agent must take each of them")
                qid = observation[0]
                last[qid] = engine.begin(observation, last.get(qid))
                last[qid].add_done_callback(deliver)
        except RefusedError as error:
            engine.fail(error)

    answering = asyncio.create_task(answer_all())
    try:
        return await agent.collect_trajectory(prompt, env, observations, actions)
    finally:
        answering.cancel()
