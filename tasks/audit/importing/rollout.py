"""An episode of another program, as the functions of `formats` fill it. Validation refuses what cannot be stored."""

import json
import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from storage.records import Status

Number = Annotated[float, Field(ge=-3e38, le=3e38)]
"""Finite in 32 bits."""
_Ids = list[Annotated[int, Field(ge=0, lt=2**31)]]
_Label = Annotated[str, Field(strict=False, coerce_numbers_to_str=True)]
_ROLES = {"developer": "system", "function": "tool"}
"""Other names of roles, in newer and older files of OpenAI."""


class _Read(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


class ToolCall(_Read):
    """A call of a tool: that of OpenAI's chat completions, the part `function` of one, or either as a JSON text.

    Example: ToolCall(id="call_1", name="add", arguments='{"a": 1, "b": 2}')
    """

    id: str = ""
    name: str
    arguments: str

    @model_validator(mode="before")
    @classmethod
    def _of_any_form(cls, value: Any) -> Any:
        value = json.loads(value) if isinstance(value, str) else value
        function = (value.get("function") or value) if isinstance(value, dict) else None
        if not isinstance(function, dict):
            return value
        arguments = function.get("arguments") or ""
        written = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return {"id": value.get("id") or "", "name": function.get("name"), "arguments": written}


class Message(_Read):
    """One message, as in OpenAI's chat completions and its files for fine-tuning; other keys are ignored.

    Example: Message(role="assistant", content="3", token_ids=[7, 8], prompt_token_ids=[5, 6], logprobs=[-0.4, -0.1])
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: ToolCall | None = None  # the older form of one call
    tool_call_id: str | None = None  # of a tool's message: the call that it answers
    weight: float | None = None  # 0: the assistant's message is no turn, but context, which is not trained on
    reward: Number | None = None  # of this turn
    prompt_token_ids: _Ids | None = None  # the whole prompt of this completion, as vLLM returns it
    token_ids: _Ids | None = None  # N
    logprobs: list[Number] | None = None  # N

    @field_validator("role", mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        return _ROLES.get(str(value), value)

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, value: Any) -> Any:
        """Join parts of text; parts of another type, such as images, are refused."""
        if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
            return "\n".join(str(part.get("text")) for part in value)
        return "" if value is None else value

    @model_validator(mode="after")
    def _as_long(self) -> Self:
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids or ()):
            raise ValueError(f"it has {len(self.token_ids or ())} token_ids and {len(self.logprobs)} logprobs")
        return self

    @property
    def is_turn(self) -> bool:
        return self.role == "assistant" and self.weight != 0

    @property
    def calls(self) -> list[ToolCall]:
        return self.tool_calls or ([self.function_call] if self.function_call else [])

    @property
    def text(self) -> str:
        """The content, with the thoughts before it."""
        return (
            f"<think>\n{self.reasoning_content}\n</think>\n\n{self.content}" if self.reasoning_content else self.content
        )

    @property
    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.calls
        ]
        return {"role": self.role, "content": self.text} | ({"tool_calls": calls} if calls else {})


class Rollout(_Read):
    """One episode. The messages before the first turn are the prompt.

    Example: Rollout(messages=[Message(role="user", content="1 + 2?"), Message(role="assistant", content="3")],
    reward=1.0, golds=["3"])
    """

    messages: list[Message]
    reward: Number | None = None  # of the whole episode
    parts: dict[str, Number] = {}  # of the reward
    golds: list[str] = []
    id: _Label = ""  # of the problem; empty: problems are told apart by prompt and gold answers
    step: Annotated[int, Field(ge=0, lt=10**6)] = 0  # of the training; each step becomes a data set
    data_source: _Label = ""
    metadata: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []  # as in OpenAI's chat completions
    status: Status | None = None  # None: the dump does not say how it ended
    reason: str = ""  # why the status is not `completed`

    @model_validator(mode="after")
    def _has_turns(self) -> Self:
        if not self.turns and self.status != "failed":
            raise ValueError("no message is the policy's: one of the assistant, with another weight than 0")
        if not any(message.content.strip() and message.role != "system" for message in self.prompt):
            raise ValueError("no message asks something before the first turn")
        return self

    @property
    def turns(self) -> list[int]:
        """The positions of the turns among the messages."""
        return [number for number, message in enumerate(self.messages) if message.is_turn]

    @property
    def prompt(self) -> list[Message]:
        return self.messages[: self.turns[0]] if self.turns else self.messages


def rendered(text: str) -> list[dict[str, Any]]:
    r"""Return the messages of a prompt that is one text, as the template ChatML renders it, with its marks or without.

    A text of any other form is one message of the user.

    >>> rendered("system\nAdd.\nuser\n1 + 2?\nassistant\n")
    [{'role': 'system', 'content': 'Add.', 'weight': 0}, {'role': 'user', 'content': '1 + 2?', 'weight': 0}]
    """
    lead, *pieces = re.split(r"^(?:<\|im_start\|>)?(system|user|assistant|tool)\n", text, flags=re.MULTILINE)
    if lead.strip() or pieces[-2:-1] != ["assistant"] or "user" not in pieces[::2]:
        return [{"role": "user", "content": text}]
    said = [piece.strip().removesuffix("<|im_end|>").strip() for piece in pieces[1::2]]
    return [
        {"role": role, "content": content, "weight": 0} for role, content in zip(pieces[:-2:2], said[:-1], strict=True)
    ]
