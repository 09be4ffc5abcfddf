"""Conversations as token ids, by the model's own chat template.

Sampled ids are never decoded and encoded again while their sequence goes on: only what stands between two
completions is rendered, as the difference of a conversation with and without the next message. Where the template
rewrites what was said (thinking models forget earlier thoughts; some templates move the system prompt into the newest
question), a new sequence begins with the conversation as the template now has it.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from tasks.agents.template import Message, Template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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

    Args:
        tokenizer: of the policy.
        vocabulary: number of token ids that the policy knows, where that is not the tokenizer's: many models round up.

    Attributes:
        stop_token_ids: what ends a turn: the tokenizer's end of text and the template's end of turn, which in some
            models is another token.

    Raises:
        ValueError: the tokenizer has no chat template, or it refuses a conversation.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", vocabulary: int | None = None) -> None:
        self.vocabulary = vocabulary or len(tokenizer)
        self._tokenizer, self._template = tokenizer, Template(tokenizer)
        self._tail, self._end = self._find_end()
        ends = {tokenizer.eos_token_id, self._end if self._template.keeps_plain() else None}
        self.stop_token_ids: tuple[int, ...] = tuple(sorted(ends - {None}))

    def prompt(self, messages: list[Message]) -> list[int]:
        """Ids of the conversation up to where the assistant begins to speak."""
        return list(self._prompt(tuple(tuple(message.items()) for message in messages)))

    def next_prompt(self, messages: list[Message], completion_ids: list[int], message: str) -> NextPrompt:
        """What follows when the user answers a completion of `messages` with `message`.

        Where the sequence goes on, that is the rest of the assistant's turn (all of it, if the completion was cut
        before its end), the user's turn and the assistant's header. Whitespace that the template would trim stays as
        it was sampled.
        """
        following = self._template.extend(messages, self._said(completion_ids), message)
        rest = self._template.rest(following)
        ids = None if rest is None else self._encode_once(rest)
        if ids and self._end in completion_ids[-1:]:  # the template's end of turn was sampled
            ids = self._after_end(ids)
        if ids is None:
            return NextPrompt(self.prompt(following), True, following)
        return NextPrompt(list(ids), False, following)

    def encode(self, text: str) -> list[int]:
        """Ids of `text` as it stands; special tokens in it are recognised."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: list[int]) -> str:
        """Text of a completion, without special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    @lru_cache(maxsize=256)  # noqa: B019  # one Chat lives as long as its stage
    def _prompt(self, messages: tuple[tuple[tuple[str, str], ...], ...]) -> list[int]:
        """The episodes of a group ask with the same prompt."""
        return self.encode(self._template.render([dict(message) for message in messages]))

    @lru_cache(maxsize=256)  # noqa: B019
    def _encode_once(self, text: str) -> list[int]:
        """Many episodes are told the same."""
        return self.encode(text)

    def _said(self, completion_ids: list[int]) -> str:
        """A completion as the template expects it: without what the template itself writes at the end of a turn."""
        if not completion_ids:
            return ""
        *said, last = completion_ids
        if last == self._end:
            return self._text(said).removesuffix(self._tail)
        return self._text(said if last in self.stop_token_ids else completion_ids)

    def _after_end(self, rest: list[int]) -> list[int] | None:
        """`rest` without the end of turn, which was sampled; None if more than whitespace stands before it."""
        place = rest.index(self._end) if self._end in rest else len(rest)
        return None if self._text(rest[:place]).strip() else rest[place + 1 :]

    def _find_end(self) -> tuple[str, int | None]:
        """What the template writes between a completion and the token that ends a turn, and this token.

        It is the first one behind a completion that was added to the vocabulary as a whole: ordinary text would end
        completions in the middle. A template that writes none leaves the end to the tokenizer's.
        """
        added = self._tokenizer.added_tokens_decoder
        ids = self.encode(self._template.between())
        for place, number in enumerate(ids):
            if number in added and added[number].content.strip():
                return self._text(ids[:place]), number
        return "", None

    def _text(self, token_ids: list[int]) -> str:
        """The exact text of `token_ids`."""
        decoded = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(decoded)
