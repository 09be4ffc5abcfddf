"""A chat template as text: what it writes behind a completion, and whether it rewrites what was said before."""

import logging
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

REMEDY = "mend chat_template in the model's folder (chat_template.jinja, or in tokenizer_config.json)"

Message = dict[str, str]
"""{"role": "user", "content": "…"}"""

_QUESTION: Message = {"role": "user", "content": "?"}
_PLAIN, _THINKING = "!", "<think>\nx\n</think>\n\n!"
"""Toy completions that show whether a template keeps what was said."""
_LINES = 20
"""Of a toy message that has to be shown to its end."""


class Template:
    """The template of a tokenizer.

    Toy conversations with the roles of the real one, with and without thoughts, show whether the template is
    append-only: whether what it renders begins with what the policy was given and said. The first real conversation of
    these roles has to agree. If so, what it writes behind a completion depends on the roles and the next message alone
    and is rendered once. If not, the real contents of each conversation decide. A template that trims the whitespace
    around real contents counts as append-only all the same.

    Attributes:
        lead: words that it puts into the assistant's mouth, such as `<think>`: part of what the assistant says.

    Raises:
        ValueError: the tokenizer has no chat template, or it refuses a conversation, or does not show all messages.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer, self._name = tokenizer, tokenizer.name_or_path
        if not tokenizer.chat_template:
            raise ValueError(f"the tokenizer of {self._name} has no chat template: use an instruction-tuned model")
        self._shown: set[tuple[str, ...]] = set()
        """Roles of the conversations whose messages it is known to show."""
        self.lead = self._find_lead()
        self._toys: dict[tuple[str, ...], list[Message] | None] = {}
        """By roles: a toy conversation that stands for all of these; None where each real one is to be rendered."""
        self._warned = False  # that it rewrites earlier turns
        twice = self.extend(self.extend([_QUESTION], _PLAIN, "?"), _PLAIN, "?")
        for conversation in (twice[:3], twice):
            self._find_toy(conversation)  # what it rewrites is told at the start

    def render(self, messages: list[Message]) -> str:
        """The conversation up to where the assistant begins to speak."""
        roles = tuple(message["role"] for message in messages)
        if roles not in self._shown:
            self._check_shown(messages)
            self._shown.add(roles)
        return self._render(messages)

    def _render(self, messages: list[Message]) -> str:
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except MemoryError:
            raise
        except Exception as error:  # templates raise what they like
            raise ValueError(
                f"the chat template of {self._name} refuses a conversation of {_roles(messages)}: "
                f"{str(error) or repr(error)}. {_remedy(messages)}"
            ) from error
        assert isinstance(text, str)
        return text

    def extend(self, messages: list[Message], completion: str, message: str) -> list[Message]:
        """`messages`, what the assistant said, and what the user answers."""
        said = {"role": "assistant", "content": self.lead + completion}
        return [*messages, said, {"role": "user", "content": message}]

    def rest(self, messages: list[Message]) -> str | None:
        """What it writes after the last completion, which is the last but one of `messages`.

        None if it rewrites what stands before.
        """
        roles = tuple(message["role"] for message in messages)
        if roles not in self._toys:
            toy = self._find_toy(messages)
            self._toys[roles] = toy if toy and self._agrees(toy, messages) else None
        return self._toy_rest(roles, messages[-1]["content"]) if self._toys[roles] else self._rest(messages)

    def between(self) -> str:
        """What it writes between a completion and the next question."""
        said, asked = "⟨said⟩", "⟨asked⟩"
        return self.render(self.extend([_QUESTION], said, asked)).partition(said)[2].partition(asked)[0]

    def keeps_plain(self) -> bool:
        """Whether it keeps the plainest completion as it was said.

        Else it may write into the assistant's turns what the policy has to say itself, as where they have several
        parts, of which each has an end.
        """
        return self._rest(self.extend([_QUESTION], _PLAIN, "?")) is not None

    @lru_cache(maxsize=256)  # noqa: B019  # one template lives as long as its stage
    def _toy_rest(self, roles: tuple[str, ...], message: str) -> str | None:
        toy = self._toys[roles]
        assert toy
        return self._rest(_answered(toy, message))

    def _rest(self, messages: list[Message]) -> str | None:
        held, after = self._held(messages), self.render(messages)
        return after[len(held) :] if after.startswith(held) else None

    def _held(self, messages: list[Message]) -> str:
        """What the policy was given and said, up to the last completion."""
        *before, completion, _ = messages
        return self.render(before) + completion["content"].removeprefix(self.lead)

    def _find_toy(self, messages: list[Message]) -> list[Message] | None:
        """A toy conversation like `messages`; None if the template rewrites it."""
        thinking, plain = (self._make_toy(messages, said) for said in (_THINKING, _PLAIN))
        if self._rest(thinking) is not None and self._rest(plain) is not None:
            return plain
        if not self._warned:
            self._warned = True
            logger.warning(
                "the chat template of %s rewrites earlier turns (of %s, for one): a turn it changes begins a new "
                "sequence",
                self._name,
                _roles(messages),
            )
        return None

    def _make_toy(self, messages: list[Message], said: str) -> list[Message]:
        """`messages` with other contents: no two alike, thoughts in all completions but the last, which is `said`."""
        contents = [
            self.lead + _THINKING if message["role"] == "assistant" else f"{message['role']} {place}"
            for place, message in enumerate(messages)
        ]
        contents[-2] = self.lead + said
        return [message | {"content": content} for message, content in zip(messages, contents, strict=True)]

    def _agrees(self, toy: list[Message], messages: list[Message]) -> bool:
        """Whether `messages` are rendered as the toy says, but for whitespace, which templates trim."""
        rest = self._rest(_answered(toy, messages[-1]["content"]))
        if rest is not None and _letters(self._held(messages) + rest) == _letters(self.render(messages)):
            return True
        logger.warning(
            "the chat template of %s renders the first real conversation of %s in another way than a toy one: each of "
            "these is rendered in full from now on, which takes longer, and a turn it changes begins a new sequence",
            self._name,
            _roles(messages),
        )
        return False

    def _check_shown(self, messages: list[Message]) -> None:
        """Whether messages of these roles stand in the text, line by line; thoughts may be dropped.

        Whitespace does not count, nor what is written between lines: some templates write what tools return as JSON.

        Raises:
            ValueError: one does not; says which, and what to do.
        """
        toys = [
            message | {"content": "\n".join(f"{message['role']} {place}.{line:02}" for line in range(_LINES))}
            for place, message in enumerate(messages, 1)
        ]
        text = _letters(self._render(toys))
        for place, toy in enumerate(toys, 1):
            if any(_letters(line) not in text for line in toy["content"].splitlines()):
                raise ValueError(
                    f"the chat template of {self._name} does not show message {place} ({toy['role']}) of a "
                    f"conversation of {_roles(messages)}: the policy would not know of it. Use an instruction-tuned "
                    f"model, or {REMEDY}"
                )

    def _find_lead(self) -> str:
        prompt = self.render([_QUESTION])
        after = self.render([_QUESTION, {"role": "assistant", "content": _PLAIN}, _QUESTION])
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, after, strict=False)))
        return prompt[shared:] if after.startswith(_PLAIN, shared) else ""


def _answered(toy: list[Message], message: str) -> list[Message]:
    return [*toy[:-1], toy[-1] | {"content": message}]


def _roles(messages: list[Message]) -> str:
    return ", ".join(message["role"] for message in messages)


def _remedy(messages: list[Message]) -> str:
    if any(message["role"] == "system" for message in messages):
        return "Where it takes no system prompt, leave agent.args.system_prompt empty and use agent.args.instruction"
    return f"If that is an error in the template, {REMEDY}"


def _letters(text: str) -> str:
    """`text` without its whitespace."""
    return "".join(text.split())
