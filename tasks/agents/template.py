"""The text that a chat template writes after a completion, and a check whether it rewrites earlier messages."""

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Any

import orjson

from tasks.agents.control import JOINT, NEXT, SAID, ControlTokens, find_written, marks_of, with_calls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

REMEDY = "repair chat_template in the model's folder (chat_template.jinja, or in tokenizer_config.json)"

Message = dict[str, str]
"""{"role": "user", "content": "…"}"""
Messages = Sequence[dict[str, Any]]
Tools = Sequence[dict[str, Any]]
"""Both as in OpenAI's chat completions; contents are texts."""

_QUESTION: Message = {"role": "user", "content": "?"}
_PLAIN = "!"
"""A toy completion, to find out what a template writes after completions."""
_LINES = 20
"""Lines of a toy message; the template must show all of them."""


class Template:
    """The chat template of a tokenizer.

    A conversation goes on with the tokens before it if its text begins with that of the earlier prompt and completion,
    which is compared each time. A template may trim the whitespace of a completion: that counts as unchanged.

    Attributes:
        lead: words that the template writes at the beginning of the assistant's answer, such as `<think>`. They are
            part of the assistant's message.
        written: what the template writes around messages.
        control: the tokens that only the template may write. Rendered texts have a joint in what only reads like one.

    Raises:
        ValueError: the tokenizer has no chat template, or it refuses a conversation, or does not show all messages.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer, self._name = tokenizer, tokenizer.name_or_path
        if not tokenizer.chat_template:
            raise ValueError(f"the tokenizer of {self._name} has no chat template: use an instruction-tuned model")
        self._warned = False  # whether the warning about rewritten turns was logged
        self.control = ControlTokens(tokenizer)  # the special ones, until the others are found
        self._shown = set[int]()
        """Conversations that it shows whole, and their beginnings: hashes of roles, numbers of calls, and of tools."""
        self.lead = self._find_lead()
        self.written = find_written(self._try, self.lead, marks_of(tokenizer))
        self.control = ControlTokens(tokenizer, self.written, self.lead)

    def render(self, messages: Messages, tools: Tools = ()) -> str:
        """Return the text of a conversation, up to the point where the assistant's answer begins.

        Raises:
            ValueError: the template refuses it, or does not show all messages, calls and tools.
        """
        forms = ((message["role"], len(message.get("tool_calls", ()))) for message in messages)
        shapes = [*accumulate(forms, lambda *form: hash(form), initial=int(bool(tools)))]
        if shapes[-1] not in self._shown:
            self._check_shown([_with_objects(message) for message in messages], list(tools))
            self._shown.update(shapes)
        return self._rendered(orjson.dumps([messages, tools]))

    @lru_cache(maxsize=256)  # noqa: B019  # one template lives as long as its stage
    def _rendered(self, conversation: bytes) -> str:
        """Return the text of messages and tools from a cache: a group's episodes begin with the same conversation."""
        messages, tools = orjson.loads(conversation)
        return self._render([_with_objects(message) for message in messages], tools)

    def _render(self, messages: list[Any], tools: list[dict[str, Any]] | None = None) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                self.control.apart(messages),
                tools=self.control.tools_apart(tools or ()) or None,  # type: ignore[arg-type]  # allows no nested schema
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:  # templates may raise anything
            raise ValueError(
                f"the chat template of {self._name} refuses a conversation of {_roles(messages)}: "
                f"{str(error) or repr(error)}. "
                "If it takes no system prompt, leave agent.args.system_prompt empty and use agent.args.instruction; if "
                f"this is an error in the template, {REMEDY}"
            ) from error
        assert isinstance(text, str)
        return text

    def _try(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str | None:
        """Return the text of a toy conversation; None if the template refuses it."""
        try:
            return self._render(messages, tools)
        except ValueError:
            return None

    def rest(self, messages: Messages, completion: str, new: Messages, tools: Tools = ()) -> str | None:
        """Return the text that the template writes after a completion, which `new` messages answer.

        The completion is given to the template as the text that was sampled, calls of tools included. None if the
        template rewrites the text before it.
        """
        answer = {"role": "assistant", "content": self.lead + completion}
        before = self.render(messages, tools) + self.control.said_apart(answer["content"]).removeprefix(self.lead)
        text = self.render([*messages, answer, *new], tools)
        if text.startswith(before):
            return text[len(before) :]
        if completion != _PLAIN:
            rest = self.rest(messages, _PLAIN, new, tools)
            if rest is not None and _without_whitespace(before + rest) == _without_whitespace(text):
                return rest
        if not self._warned:
            message = "the chat template of %s rewrites earlier turns (for example of %s): each begins a new sequence"
            logger.warning(message, self._name, _roles([*messages, answer, *new]))
        self._warned = True
        return None

    def calls(self, calls: Sequence[dict[str, Any]], tools: Tools, *, said: bool) -> str:
        """Return what the template writes for calls in one turn, up to the first output; "" if it writes no such calls.

        Args:
            calls: as in OpenAI's chat completions.
            tools: those of the conversation.
            said: whether there are words before the calls.
        """
        functions = [call["function"] for call in _with_objects({"tool_calls": list(calls)})["tool_calls"]]
        for words in (SAID,) if said or self.lead else ("", SAID):
            asked, *others = with_calls(functions, self.lead, words)
            before, text = (self._try(each, list(tools)) or "" for each in ([asked], [asked, *others]))
            shown = text.partition(words)[2] if words else ""  # some templates show no words beside a call
            rest = (shown or (text.removeprefix(before) if text.startswith(before) else "")).partition(NEXT)[0]
            if all(function["name"] in rest for function in functions):
                return rest.lstrip() if words and not said else rest
        return ""

    def keeps_plain(self) -> bool:
        """Return whether the template keeps the plainest completion unchanged.

        If it does not, it may write text into the assistant's turns that the policy has to sample itself. An example
        are turns of several parts, each with its own end.
        """
        return self.rest([_QUESTION], _PLAIN, [_QUESTION]) is not None

    def _check_shown(self, messages: list[Any], tools: Tools = ()) -> None:
        """Check that the template shows every line of messages of this form, every call and every tool.

        It may drop thoughts. Whitespace is ignored, and so is text between the lines: some templates write the results
        of tools as JSON.

        Raises:
            ValueError: something is missing; says what, and what to do.
        """
        toys = [
            message
            if message.get("tool_calls")
            else message | {"content": "\n".join(f"{message['role']} {number}.{line:02}" for line in range(_LINES))}
            for number, message in enumerate(messages, 1)
        ]
        text = _without_whitespace(self._render(toys, list(tools)).replace(JOINT, ""))
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        needed = [(f"the tool {each['function']['name']!r}", each["function"]["name"]) for each in (*tools, *calls)]
        for number, toy in enumerate(toys, 1):
            lines = [] if toy.get("tool_calls") else toy["content"].splitlines()
            needed += [(f"message {number} ({toy['role']})", line) for line in lines]
        position = 0
        for what, words in needed:
            # Most stand in this order: searching the whole text for each would take minutes for thousands of messages.
            found = text.find(_without_whitespace(words), position)
            position = found if found >= 0 else text.find(_without_whitespace(words))
            if position < 0:
                raise ValueError(
                    f"the chat template of {self._name} does not show {what} of a conversation of {_roles(messages)}: "
                    f"the policy would never see it. Use an instruction-tuned model, or {REMEDY}"
                )

    def _find_lead(self) -> str:
        prompt = self.render([_QUESTION])
        after = self.render([_QUESTION, {"role": "assistant", "content": _PLAIN}, _QUESTION])
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, after, strict=False)))
        return prompt[shared:] if after.startswith(_PLAIN, shared) else ""


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in which the arguments of calls are objects instead of JSON texts, as templates expect.

    A text that is no object, by a policy, is in one.
    """

    def read(function: dict[str, Any]) -> dict[str, Any]:
        arguments = function["arguments"] or "{}"
        with suppress(ValueError, RecursionError):
            if isinstance(found := json.loads(arguments), dict):
                return function | {"arguments": found}
        return function | {"arguments": {"arguments": arguments}}

    calls = [call | {"function": read(call["function"])} for call in message.get("tool_calls") or ()]
    return message | {"tool_calls": calls} if calls else message


def _roles(messages: Messages) -> str:
    return ", ".join(message["role"] for message in messages)


def _without_whitespace(text: str) -> str:
    return "".join(text.split())
