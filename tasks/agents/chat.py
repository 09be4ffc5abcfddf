"""Conversations as token ids, by the model's own chat template.

Sampled ids are never decoded and encoded again while their sequence goes on: only what stands between two
completions is rendered, as the difference of a conversation with and without the next message. Where the template
rewrites what was said (thinking models forget earlier thoughts), a new sequence begins with the conversation as the
template now has it.
"""

import logging
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Message = dict[str, str]
"""{"role": "user", "content": "…"}"""

_QUESTION: Message = {"role": "user", "content": "?"}
_PLAIN, _THINKING = "!", "<think>\nx\n</think>\n\n!"
"""Toy completions that show whether a template keeps what was said."""


@dataclass(frozen=True, slots=True)
class NextPrompt:
    """What the policy is given after a completion.

    Example: NextPrompt(token_ids=[198, 1, 872, …], fresh=False, messages=[{"role": "user", "content": "1 + 2"}, …])
    """

    token_ids: list[int]  # to be appended to the ids held; where fresh, the whole prompt of a new sequence
    fresh: bool
    messages: list[Message]  # the conversation up to here


class Chat:
    """A tokenizer and its template.

    Toy histories of one and two turns, with and without a thought, show whether the template is append-only: whether
    what it renders begins with what the policy was given and said. If so, the ids between two completions depend on
    the next message alone and are rendered once. A template that trims the whitespace around real contents counts as
    append-only all the same: the sequence keeps it as it was sampled. If not, the real contents of each turn decide
    whether its sequence goes on.

    Raises:
        ValueError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer of {tokenizer.name_or_path} has no chat template: use an instruction-tuned model"
            )
        self._tokenizer = tokenizer
        self._lead = self._find_lead()
        histories = [[_QUESTION], self._extend([_QUESTION], _THINKING, "?")]
        toys = [self._rest(self._extend(past, said, "?")) for past in histories for said in (_PLAIN, _THINKING)]
        self._append_only = None not in toys
        # What ends a turn: in some models the template's token is another than the tokenizer's.
        self._ends = {tokenizer.eos_token_id, *(toys[0] or [])[:1]}
        if not self._append_only:
            logger.warning(
                "the chat template of %s rewrites earlier turns: a turn it changes begins a new sequence",
                tokenizer.name_or_path,
            )

    def prompt(self, messages: list[Message]) -> list[int]:
        """Ids of the conversation up to where the assistant begins to speak."""
        return list(self._prompt(tuple(tuple(message.items()) for message in messages)))

    def next_prompt(self, messages: list[Message], completion_ids: list[int], message: str) -> NextPrompt:
        """What follows when the user answers a completion of `messages` with `message`.

        Where the sequence goes on, that is the rest of the assistant's turn (all of it, if the completion was cut
        before its end), the user's turn and the assistant's header.
        """
        said = completion_ids[:-1] if completion_ids and completion_ids[-1] in self._ends else completion_ids
        following = self._extend(messages, self._text(said), message)
        rest = self._toy_rest(message) if self._append_only else self._rest(following)
        if rest is None:
            return NextPrompt(self.prompt(following), True, following)
        ended = rest[:1] == completion_ids[-1:]  # the template's end of turn was sampled
        return NextPrompt(rest[1:] if ended else list(rest), False, following)

    def encode(self, text: str) -> list[int]:
        """Ids of `text` as it stands; special tokens in it are recognised."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: list[int]) -> str:
        """Text of a completion, without special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    @lru_cache(maxsize=256)  # noqa: B019  # one Chat lives as long as its stage
    def _prompt(self, messages: tuple[tuple[tuple[str, str], ...], ...]) -> list[int]:
        """The episodes of a group ask with the same prompt."""
        return self.encode(self._render([dict(message) for message in messages]))

    @lru_cache(maxsize=256)  # noqa: B019
    def _toy_rest(self, message: str) -> list[int]:
        rest = self._rest(self._extend([_QUESTION], _PLAIN, message))
        assert rest is not None, "the template is append-only"
        return rest

    def _rest(self, messages: list[Message]) -> list[int] | None:
        """Ids after the last completion, which is the last but one message; None if what stands before is rewritten."""
        *before, completion, _ = messages
        held = self._render(before) + completion["content"].removeprefix(self._lead)
        after = self._render(messages)
        return self.encode(after[len(held) :]) if after.startswith(held) else None

    def _extend(self, messages: list[Message], completion: str, message: str) -> list[Message]:
        said = {"role": "assistant", "content": self._lead + completion}
        return [*messages, said, {"role": "user", "content": message}]

    def _find_lead(self) -> str:
        """Words that the template puts into the assistant's mouth, such as `<think>`: part of what it says."""
        prompt = self._render([_QUESTION])
        after = self._render([_QUESTION, {"role": "assistant", "content": _PLAIN}, _QUESTION])
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, after, strict=False)))
        return prompt[shared:] if after.startswith(_PLAIN, shared) else ""

    def _render(self, messages: list[Message]) -> str:
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert isinstance(text, str)
        return text

    def _text(self, token_ids: list[int]) -> str:
        """The exact text of `token_ids`."""
        decoded = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(decoded)
