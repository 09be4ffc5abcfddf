"""Conversations as token ids, by the model's own chat template.

Sampled ids are never decoded and encoded again: only what stands between two completions is
rendered, as the difference of a conversation with and without the next message.
"""

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]
"""{"role": "user", "content": "…"}"""


class Chat:
    """A tokenizer and its template.

    Raises:
        ValueError: the tokenizer has no chat template, or one that rewrites earlier turns.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer of {tokenizer.name_or_path} has no chat template: use an instruction-tuned model"
            )
        self._tokenizer = tokenizer
        self.follow_up("?", ended=True)  # checks the template before anything is sampled

    def prompt(self, messages: list[Message]) -> list[int]:
        """Ids of the conversation up to where the assistant begins to speak."""
        return self._render(messages, True)

    @lru_cache(maxsize=256)  # noqa: B019  # one Chat lives as long as its stage
    def _follow_up(self, message: str, ended: bool) -> tuple[int, ...]:
        history = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "?"}]
        before = self._render(history, False)
        after = self._render([*history, {"role": "user", "content": message}], True)
        if after[: len(before)] != before:
            raise ValueError(
                f"the chat template of {self._tokenizer.name_or_path} rewrites earlier turns when one is added: "
                "use agent.type=math-single-step or another template"
            )
        eos = self._tokenizer.eos_token_id
        if eos not in before:
            return tuple(after[len(before) :])
        end = len(before) - 1 - before[::-1].index(eos)  # where the assistant's turn ends
        return tuple(after[end + 1 if ended else end :])

    def follow_up(self, message: str, *, ended: bool) -> list[int]:
        """Ids between a completion and the next: the rest of the turn, the user's message, the assistant's header.

        Args:
            message: what the user says next.
            ended: whether the completion holds its end-of-turn token; a truncated one does not.
        """
        return list(self._follow_up(message, ended))

    def encode(self, text: str) -> list[int]:
        """Ids of `text` as it stands; special tokens in it are recognised."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: list[int]) -> str:
        """Text of a completion, without special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def _render(self, messages: list[Message], generation_prompt: bool) -> list[int]:
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)
        assert isinstance(text, str)
        return self.encode(text)
