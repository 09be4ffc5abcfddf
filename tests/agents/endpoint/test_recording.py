"""Whatever an agent asks, each sampled token is an action token once, after the prompt that it was sampled from."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.score import Reward
from storage.records import TRAJECTORY_SCHEMA, Score, Trajectory, to_table
from tasks.agents.answers import open_reader
from tasks.agents.endpoint.completions import Completions
from tasks.agents.endpoint.tree import record
from tasks.agents.interface import AgentContext
from tasks.inference.api import BundledGenerationOutputs, Completion, GenerationConfig
from tasks.rollout.admission import admit
from tasks.train.samples import build_samples
from tests.support.chat_formats import chat_of
from tests.support.rollout_helpers import PROBLEM, make_plan
from tests.support.tool_calling import ADD

CHAT = chat_of("qwen3")
SAID = [
    r"\boxed{3}", "It is 3.  ", '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>',
    "<tool_call>\nadd\n</tool_call>", "<think>\nHm\n</think>\n\n4", "",
]  # fmt: skip


SPEC = make_plan().group(PROBLEM).prompts[0]
Script = list[tuple[str, int, int]]
"""Kinds of requests, the conversations that they are about, and how many completions they ask for."""


@dataclass
class Episode:
    """An episode whose engine answers at random, some completions cut before their end."""

    seed: int
    sampled: list[tuple[list[int], Completion]] = field(default_factory=list)

    def __post_init__(self) -> None:
        context = AgentContext(CHAT, GenerationConfig(max_new_tokens=64), 100_000)
        self.completions = Completions("q", context, open_reader(CHAT), 1000, self)
        self._draw = random.Random(self.seed)

    async def generate(
        self, token_ids: list[int], gconfig: GenerationConfig, qid: str = ""
    ) -> BundledGenerationOutputs:
        await asyncio.sleep(0)
        completions = [self._complete() for _ in range(gconfig.n)]
        self.sampled += [(token_ids, completion) for completion in completions]
        return BundledGenerationOutputs(qid, token_ids, completions, [1] * gconfig.n, 0.1)

    def _complete(self) -> Completion:
        ids = CHAT.encode(self._draw.choice(SAID) + self._draw.choice(["<|im_end|>", ""])) or [7]
        logprobs = [-self._draw.random() for _ in ids]
        return Completion(ids, logprobs, [self._draw.randrange(3)] * len(ids), "stop")

    async def play(self, script: Script) -> Trajectory:
        """Send requests one after another; those of the kind `together` twice at the same time."""
        conversations: list[list[Any]] = [[{"role": "user", "content": "What is 1 + 2?"}]]
        async with self.completions.open():
            for kind, position, n in script:
                messages = self._messages(kind, conversations[position % len(conversations)])
                tools = None if kind == "without tools" else [ADD]
                body = {"model": "policy", "messages": messages, "n": n, "tools": tools}
                times = 2 if kind == "together" else 1
                for answered in await asyncio.gather(*(self.completions.complete(dict(body)) for _ in range(times))):
                    conversations += [[*messages, node.message] for node in answered.nodes]
        return record(SPEC, self.completions.tree.nodes, 1.0)

    def _messages(self, kind: str, conversation: list[Any]) -> list[Any]:
        if kind == "fresh":
            return [{"role": "user", "content": f"What is {self._draw.randrange(9)}?"}]
        if kind == "system":
            return [{"role": "system", "content": "Be brief."}, *conversation, {"role": "user", "content": "Why?"}]
        if conversation[-1]["role"] != "assistant":
            return conversation
        answer = conversation[-1]
        if kind == "retry":
            return conversation[:-1]
        if kind == "edited":
            answer = {"role": "assistant", "content": "I said something else."}
        if kind == "compacted":
            return [conversation[0], {"role": "user", "content": "In short: " + answer["content"]}]
        calls = answer.get("tool_calls", ())
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in calls]
        return [*conversation[:-1], answer, *(results or [{"role": "user", "content": "Try again."}])]


KINDS = ["go on", "go on", "go on", "retry", "fresh", "edited", "compacted", "together", "system", "without tools"]
SCRIPTS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 20), st.integers(1, 3)), min_size=1, max_size=8)


@given(script=SCRIPTS, seed=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_nothing_but_what_was_sampled_is_in_the_loss(script: Script, seed: int) -> None:
    """For random conversations with branches, retries, edited history, sub-agents and calls.

    What a turn follows, the agent had when it asked.
    """
    episode = Episode(seed)
    row = asyncio.run(episode.play(script))
    served = [completion for _, completion in episode.sampled]
    (row,) = admit([row], SPEC.record, CHAT.vocabulary, served)
    to_table([row], TRAJECTORY_SCHEMA)
    ends = [*row.sequence_starts[1:], len(row.token_ids)]
    recorded = []
    for turn in row.turns:
        start = max(start for start in row.sequence_starts if start < turn.start)
        assert turn.end <= next(end for end in ends if end > start)
        columns = (column[turn.start : turn.end] for column in (row.token_ids, row.logprobs, row.versions))
        recorded.append((tuple(row.token_ids[start : turn.start]), *map(tuple, columns)))
    assert Counter(recorded) == Counter(
        (tuple(prompt), tuple(done.token_ids), tuple(done.logprobs), tuple(done.versions))
        for prompt, done in episode.sampled
    )
    scores = [
        Score(row.trajectory_id, position, "none" if position in row.ungraded else "wrong", 0.0, "", "", "", 0.0)
        for position in range(len(row.turns))
    ]
    received, asked = (column or list(range(len(row.turns))) for column in (row.received, row.asked))
    assert sorted(received) == list(range(len(row.turns)))
    assert all(before < 0 or received[before] < asked[position] for position, before in enumerate(row.follows))
    (sample,) = build_samples([row], scores, Reward())
    assert np.array_equal(sample.actions, np.flatnonzero(row.action_mask))
    assert sum(row.action_mask) == sum(len(done.token_ids) for done in served)
