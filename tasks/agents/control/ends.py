"""The tokens at which completions end, and what the template writes after each of them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tasks.agents.control.tokens import marks_of
from tasks.agents.control.written import Written

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TurnEnds:
    """The ends of a policy's turns.

    The template writes an end after each message of the assistant: the first token there that may be a control token,
    since a token of ordinary text would end completions in the middle. Some templates have several ends, such as one
    after calls and one after other messages. In others, like GLM's, the header of the next message is the end, and each
    role has its own. The engine may stop at further tokens, which no template writes.

    Args:
        tokenizer: the policy's tokenizer.
        written: what its template writes.
        engine: tokens at which the engine stops on its own.

    Attributes:
        template: the ends that the template writes, each with the text between a completion and this end.
        headers: those of them with which the next message begins.
        engine: see above.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", written: Written, engine: Iterable[int]) -> None:
        self._tokenizer, self._marks = tokenizer, marks_of(tokenizer)
        self.engine = frozenset(engine)
        self.template: dict[int, str] = {}
        ends = [end for gap in written.after.values() if (end := self._note_end(gap)) is not None]
        begins = self._encode(written.around[0]) if written.around else []
        self.headers = frozenset(
            end for end, roles in Counter(ends).items() if roles == 1 and (len(ends) > 1 or end in begins)
        )
        self._note_end(written.end_of_calls)

    def __contains__(self, token_id: int) -> bool:
        return token_id in self.template or token_id in self.engine

    def following(self, rest: list[int], completion_ids: Sequence[int]) -> list[int] | None:
        """Return what follows a completion in the next prompt: `rest` is what the template writes after its text.

        If the completion ended, its end takes the place of the template's. Example, in which 2 is `<|im_end|>`, 0 the
        end that the engine knows, 9 any other token, and 198 a newline: the rest [2, 198, 1] follows 9; [198, 1]
        follows 2 and 0. None if the prompt cannot go on like this: the header of another role was sampled, or the
        template writes more than whitespace before its end.
        """
        last = completion_ids[-1] if completion_ids else None
        if last is None or last not in self:
            return rest
        place = next((place for place, number in enumerate(rest) if number in self.template), len(rest))
        if place == len(rest) and last not in self.template:
            return rest
        if self._text(rest[:place]).strip():
            return None
        if self.headers.intersection(rest[place : place + 1]) - {last}:
            return None if last in self.headers else rest
        return rest[place + 1 :]

    def _note_end(self, gap: str) -> int | None:
        """Note and return the end in the text between a completion and the next message; None if there is none."""
        ids = self._encode(gap)
        added = self._tokenizer.added_tokens_decoder
        for place, number in enumerate(ids):
            if number in added and added[number].content in self._marks:
                self.template.setdefault(number, self._text(ids[:place]))
                return number
        return None

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _text(self, token_ids: Sequence[int]) -> str:
        decoded = self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(decoded)
