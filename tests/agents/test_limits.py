"""Each turn says how many tokens it could have had, and whose limit cut it."""

from typing import Any

import pytest

from tasks.agents.chat import Chat
from tasks.agents.endpoint.agent import AgentTask
from tasks.inference.api import Completion
from tasks.score.verifier import Verifier
from tests.agents.endpoint.asking import RIGHT, Asking, InTurn, question
from tests.support.rollout_helpers import play

CUT = "the last turn reached sampling.max_new_tokens"
CUT_OTHERWISE = "the last turn reached its limit: that of its request, the room in the context, or a request's time"
LONG = "3" * 300


class Cutting(InTurn):
    """An engine whose completions all reach their limit: that of the request, or the room, which `says` has."""

    def _completion(self, reply: str | Exception) -> Completion:
        made, most = super()._completion(reply), min(self.requests[-1][1].max_new_tokens, int(self.says[1]))
        return Completion(made.token_ids[:most], made.logprobs[:most], made.versions[:most], "length", most)


@pytest.mark.parametrize(
    ("own", "room", "limits", "status", "reason"),
    [
        (3, 100, [3], "completed", ""),
        (None, 100, [], "truncated", CUT),
        (100, 100, [], "truncated", CUT),
        (None, 5, [5], "truncated", CUT_OTHERWISE),
        (6, 5, [5], "truncated", CUT_OTHERWISE),
    ],
)
def test_only_a_limit_of_the_agents_own_truncates_nothing(
    chat: Chat, verifier: Verifier, own: int | None, room: int, limits: list[int], status: str, reason: str
) -> None:
    """The agent wanted no more tokens. At the run's limit (8), or that of the context, the answer is cut."""

    async def ask(task: AgentTask, client: Any) -> str:
        limit = {"max_tokens": own} if own else {}
        answer = await client.chat.completions.create(model=task.model, messages=question(task), **limit)
        assert answer.choices[0].finish_reason == "length"
        return RIGHT

    engine = Cutting(chat, lambda *_: "", says=[LONG, str(room)])
    (row,) = play(engine, Asking(chat, ask), verifier, group_size=1)
    assert (row.limits, row.status, row.reason) == (limits, status, reason)
