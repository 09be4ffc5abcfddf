"""An episode of another program, as the functions of `formats` fill it. Validation refuses what cannot be stored."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from storage.records import Status

_Number = Annotated[float, Field(ge=-3e38, le=3e38)]
"""Finite in 32 bits."""
_Ids = list[Annotated[int, Field(ge=0, lt=2**31)]]


def _joined(content: Any) -> Any:
    """Join parts of text; parts of another type, such as images, are left to validation, which refuses them."""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "\n".join(str(part.get("text")) for part in content)
    return "" if content is None else content


class _Read(BaseModel):
    model_config = ConfigDict(coerce_numbers_to_str=True, allow_inf_nan=False)


class _Function(_Read):
    name: str
    arguments: Annotated[str, BeforeValidator(lambda given: given if isinstance(given, str) else json.dumps(given))]


class ToolCall(_Read):
    """A call of a tool, as in OpenAI's chat completions; also without the level `function`, and as a JSON text.

    Example: ToolCall.model_validate({"id": "call_1", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}})
    """

    id: str = ""
    type: str = "function"
    function: _Function

    @model_validator(mode="before")
    @classmethod
    def _of_any_form(cls, value: Any) -> Any:
        value = json.loads(value) if isinstance(value, str) else value
        is_flat = isinstance(value, dict) and "function" not in value
        return {"id": value.get("id") or "", "function": value} if is_flat else value


class Message(_Read):
    """One message, as in OpenAI's chat completions and its files for fine-tuning; other keys are ignored.

    Example: Message(role="assistant", content="3", token_ids=[7, 8], prompt_token_ids=[5, 6], logprobs=[-0.4, -0.1])
    """

    role: Annotated[
        Literal["system", "user", "assistant", "tool"],
        BeforeValidator(lambda given: "system" if given == "developer" else given),
    ]
    content: Annotated[str, BeforeValidator(_joined)] = ""
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None  # of a tool's message: the call that it answers
    weight: float | None = None  # 0: the assistant's message is no turn, but context, which is not trained on
    prompt_token_ids: _Ids | None = None  # the whole prompt of this completion, as vLLM returns it
    token_ids: _Ids | None = None  # N
    logprobs: list[_Number] | None = None  # N

    @model_validator(mode="after")
    def _as_long(self) -> Self:
        if self.logprobs and len(self.logprobs) != len(self.token_ids or ()):
            raise ValueError(f"it has {len(self.token_ids or ())} token_ids and {len(self.logprobs)} logprobs")
        return self

    @property
    def text(self) -> str:
        """The content, with the thoughts before it."""
        thoughts = f"<think>\n{self.reasoning_content}\n</think>\n\n" if self.reasoning_content else ""
        return thoughts + self.content


class Rollout(_Read):
    """One episode. The messages before the first turn are the prompt.

    Example: Rollout(messages=[Message(role="user", content="1 + 2?"), Message(role="assistant", content="3")],
    reward=1.0, golds=["3"])
    """

    messages: list[Message]
    rendered: bool = False  # whether the prompt is one text, as the chat template made it
    reward: _Number | None = None  # of the whole episode
    parts: dict[str, _Number] = {}  # of the reward
    golds: list[str] = []
    id: str = ""  # of the problem
    step: Annotated[int, Field(ge=0, lt=10**6)] = 0  # of the training; each step becomes a data set
    data_source: str = ""
    metadata: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []  # as in OpenAI's chat completions
    status: Status | None = None  # None: the dump does not say how it ended
    reason: str = ""  # why the status is not `completed`
    row: str = ""  # where it was read

    @model_validator(mode="after")
    def _has_turns(self) -> Self:
        """Check that somebody asks and the policy answers; drop tokens unless all turns have them."""
        if not self.turns and self.status != "failed":
            raise ValueError("no message is the policy's: one of the assistant, with another weight than 0")
        if not any(message.content.strip() and message.role != "system" for message in self.prompt):
            raise ValueError("no message asks something before the first turn")
        turns = [self.messages[turn] for turn in self.turns]
        if not all(each.token_ids and each.prompt_token_ids for each in turns):
            for each in turns:
                each.prompt_token_ids = each.token_ids = each.logprobs = None
        return self

    @property
    def turns(self) -> list[int]:
        """The positions of the turns among the messages."""
        said = enumerate(self.messages)
        return [number for number, message in said if message.role == "assistant" and message.weight != 0]

    @property
    def prompt(self) -> list[Message]:
        return self.messages[: self.turns[0]] if self.turns else self.messages

    def following(self, turn: int) -> list[Message]:
        """Return the messages between a turn, given by its position, and the next turn."""
        return self.messages[turn + 1 : next((each for each in self.turns if each > turn), None)]

    @property
    def lacks(self) -> set[str]:
        """What the episode lacks, in the words of `tasks.audit.checks.LACKED`. No format has versions and seeds."""
        turns = [self.messages[turn] for turn in self.turns]
        there = {
            "tokens": all(each.token_ids for each in turns),
            "logprobs": all(each.logprobs for each in turns),
            "ends": self.status,
            "golds": self.golds,
            "rewards": self.reward is not None,
        }
        return {"versions", "seeds", *(name for name, value in there.items() if not value)}
