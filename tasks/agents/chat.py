"""Conversations as token ids, rendered by the model's own chat template.

While a sequence continues, sampled ids are never decoded and encoded again. `Chat` renders only the text between two
completions: the difference between the conversation with and without the next message. Some templates rewrite earlier
messages: those of thinking models drop earlier thoughts, others move the system prompt into the newest question. Then
a new sequence begins with the whole conversation, as the template renders it now.

Contents are text. Only the template writes control tokens, see `tasks.agents.control.tokens`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tasks.agents.control.ends import TurnEnds
from tasks.agents.template import Message, Template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class NextPrompt:
    """The prompt that follows a completion.

    Example: NextPrompt(token_ids=[198, 1, 872, …], fresh=False, messages=[{"role": "user", "content": "1 + 2"}, …])
    """

    token_ids: list[int]  # to append to the current sequence; if fresh, the whole prompt of a new sequence
    fresh: bool
    messages: list[Message]  # the conversation, including the new user message


class Chat:
    """A tokenizer and its template.

    Args:
        tokenizer: the policy's tokenizer.
        vocabulary: number of token ids that the policy knows; default: the tokenizer's number. Many models round it up.
        ends: tokens at which the engine stops on its own, besides the tokenizer's end of text.

    Attributes:
        tokenizer: the tokenizer.
        control: the tokens that only the template may write.
        stop_token_ids: tokens that end a turn: the tokenizer's end of text, `ends`, and the template's ends of turns.

    Raises:
        ValueError: the tokenizer has no chat template, or it refuses a conversation.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", vocabulary: int | None = None, ends: Sequence[int] = ()
    ) -> None:
        self.vocabulary = vocabulary or len(tokenizer)
        self.tokenizer, self._template = tokenizer, Template(tokenizer)
        self.control = self._template.control
        engine = {*ends, tokenizer.eos_token_id} - {None}
        # Some models end texts with padding, too: an engine that is told so may stop there.
        self._ends = TurnEnds(tokenizer, self._template.written, {*engine, tokenizer.pad_token_id} - {None})
        written = self._ends.template if self._template.keeps_plain() else ()
        self.stop_token_ids: tuple[int, ...] = tuple(sorted({*engine, *written}))

    def prompt(self, messages: list[Message]) -> list[int]:
        """Return the ids of the conversation, up to the point where the assistant's answer begins."""
        return list(self._prompt(tuple(tuple(message.items()) for message in messages)))

    def next_prompt(self, messages: list[Message], completion_ids: list[int], message: str) -> NextPrompt:
        """Return the prompt for the next turn, in which the user answers a completion of `messages` with `message`.

        If the sequence continues, the new ids are the end of the assistant's turn (without the end-of-turn token, if
        the policy sampled it), the user's turn and the assistant's header. Whitespace that the template would trim
        stays as it was sampled.
        """
        following = self._template.extend(messages, self.completion_text(completion_ids), message)
        rest = self._template.rest(following)
        ids = None if rest is None else self._ends.following(self._encode_cached(rest), completion_ids)
        if ids is None:
            return NextPrompt(self.prompt(following), True, following)
        return NextPrompt(list(ids), False, following)

    @property
    def opens_thoughts(self) -> bool:
        """True if the template itself writes the `<think>` with which an answer begins."""
        return "<think>" in self._template.lead

    def conversation(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[int]:
        """Return the ids of a conversation in which tools may be called, up to where the assistant's answer begins.

        Args:
            messages: as in OpenAI's chat completions; contents are texts.
            tools: as in OpenAI's chat completions.

        Raises:
            ValueError: the template refuses the conversation, or does not show all of its messages and tools.
        """
        return list(self._encode_cached(self._template.render_tools(messages, tools)))

    def continuation(
        self,
        messages: Sequence[dict[str, Any]],
        completion_ids: list[int],
        new: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
    ) -> list[int] | None:
        """Return the ids that follow a completion of `messages` when `new` messages answer it.

        None if the template rewrites what came before, or refuses a completion with calls as the text that it is.
        """
        rest = self._template.rest_with_tools(messages, self.completion_text(completion_ids), new, tools)
        ids = None if rest is None else self._ends.following(self._encode_cached(rest), completion_ids)
        return None if ids is None else list(ids)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text` and add no special tokens; those in the text are recognised."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of a completion, without its end and without special tokens."""
        return str(self.tokenizer.decode(self.without_end(token_ids), skip_special_tokens=True))

    def without_end(self, completion_ids: Sequence[int]) -> list[int]:
        """Return a completion without the token that ended it."""
        ended = bool(completion_ids) and completion_ids[-1] in self._ends
        return list(completion_ids[:-1] if ended else completion_ids)

    def completion_text(self, completion_ids: list[int]) -> str:
        """Return the completion's text without the end of turn, which the template itself writes."""
        said = self.without_end(completion_ids)
        tail = "" if len(said) == len(completion_ids) else self._ends.template.get(completion_ids[-1], "")
        return self._text(said).removesuffix(tail)

    @lru_cache(maxsize=256)  # noqa: B019  # one Chat lives as long as its stage
    def _prompt(self, messages: tuple[tuple[tuple[str, str], ...], ...]) -> list[int]:
        """Return the ids from a cache: the episodes of a group begin with the same prompt."""
        return self.control.encode(self._template.render([dict(message) for message in messages]))

    @lru_cache(maxsize=256)  # noqa: B019
    def _encode_cached(self, text: str) -> list[int]:
        """Return the ids of a rendered text from a cache: many episodes get the same question or feedback."""
        return self.control.encode(text)

    def _text(self, token_ids: list[int]) -> str:
        """Return the exact text of `token_ids`, special tokens included."""
        decoded = self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(decoded)
