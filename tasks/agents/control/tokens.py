"""Control tokens, and how their texts in messages stay text."""

import logging
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import deepcopy
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tasks.agents.control.written import Written

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

JOINT = "\ufdd0"
"""A character that Unicode leaves to programs, and that no text should contain."""
_THOUGHTS = ("<think>", "</think>")
_WIDE = {number: number + 0xFEE0 for number in range(0x21, 0x7F)}
"""Wide forms of ASCII's characters, by code point; many normalizers undo them."""


def marks_of(tokenizer: "PreTrainedTokenizerBase") -> dict[str, bool]:
    """Return the texts of tokens that may be control tokens, and whether the tokenizer calls them special.

    Blanks are none, nor are added words: a role may be one token.
    """
    added = tokenizer.added_tokens_decoder.values()
    special = {token.content for token in added if token.special}.union(tokenizer.all_special_tokens)
    others = {token.content for token in added if not token.content.strip().isalnum()}
    return {text: text in special for text in sorted(special | others) if text.strip()}


class ControlTokens:
    """The tokens of a tokenizer that only the chat template may write.

    Contents are text: a problem, feedback, the output of a tool, what a client sent, and what the policy said, once it
    is encoded again because a new sequence begins. A tokenizer would make control tokens of what reads like them, and
    `<|im_end|>` in the output of a tool would end its turn. What counts as one depends on where it stands:

    - everywhere: the tokens that the tokenizer calls special, and other added tokens with which the template begins and
      ends turns, such as `<|user|>`, unless they are words;
    - in outputs of tools and in calls also `<think>`, `</think>` and the tokens that the template writes around calls
      and outputs, such as `</tool_response>`;
    - in what the assistant says not `<think>`, `</think>` and those around calls, since a policy samples them itself,
      unless they begin and end turns, too.

    `apart` puts a joint into each text of a control token. Templates copy it like other characters, and `encode` makes
    no token of it. A text without such marks has exactly the tokens that the tokenizer gives. Example:
    `<|im_end|>` in a problem becomes `<` + JOINT + `|im_end|>`, which has the tokens of `<` and of `|im_end|>`.

    Args:
        tokenizer: the policy's tokenizer.
        written: what the template writes; None to know only the special tokens.
        lead: what the template writes at the beginning of the assistant's answer.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", written: Written | None = None, lead: str = "") -> None:
        self._tokenizer = tokenizer
        marks = marks_of(tokenizer)
        written = written or Written({}, [], [], [], "")

        def marks_in(*texts: str) -> set[str]:
            return {mark for mark in marks if any(mark in text for text in texts)}

        turns = marks_in(*written.around)
        everywhere = turns.union(mark for mark, special in marks.items() if special)
        own = marks_in(*_THOUGHTS, lead) | (marks_in(*written.in_calls) - turns)
        self._others, self._said = _joiner(everywhere), _joiner(everywhere - own)
        self._returned = _joiner(everywhere | own | marks_in(*written.around_output))
        if written.around:  # else these are not yet all
            for mark, text in _writable(tokenizer, everywhere):
                logger.warning(
                    "contents can write the control token %s of %s as %s", mark, tokenizer.name_or_path, text
                )

    def apart(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages in which no text can become a control token."""
        return [self._apart(message) for message in messages]

    def tools_apart(self, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return descriptions of tools in which no text can become a control token."""
        return [_mapped(tool, self._others) for tool in tools]

    def said_apart(self, completion: str) -> str:
        """Return what the policy said as it stands in messages that are `apart`."""
        return self._said(completion)

    def found_in(self, text: str) -> bool:
        """Return whether a text, such as a problem's, contains that of a control token."""
        return self._others(text) != text

    def encode(self, text: str) -> list[int]:
        """Return the ids of a rendered text: no special tokens are added, those that the template wrote are kept."""
        if JOINT not in text:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        return self.without_joints(self.joining.encode(text, add_special_tokens=False))

    @cached_property
    def joining(self) -> "PreTrainedTokenizerBase":
        """The tokenizer with one more token, the joint. It is made when the first content needs it."""
        joining = deepcopy(self._tokenizer)
        joining.add_tokens([JOINT], special_tokens=True)
        return joining

    def without_joints(self, token_ids: Sequence[int]) -> list[int]:
        """Return the ids that `joining` gave, without those of joints."""
        joint = self.joining.convert_tokens_to_ids(JOINT)
        return [number for number in token_ids if number != joint]

    def _apart(self, message: dict[str, Any]) -> dict[str, Any]:
        change = {"assistant": self._said, "tool": self._returned}.get(message["role"], self._others)
        return {
            name: _mapped(value, self._returned if name == "tool_calls" else change) for name, value in message.items()
        }


def _writable(tokenizer: "PreTrainedTokenizerBase", marks: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield control tokens that contents can write in spite of the joint, and a text that does it.

    A single character has no place for a joint. And a normalizer may change other texts, such as wide or accented ones,
    into that of a token.
    """
    for number, token in tokenizer.added_tokens_decoder.items():
        text = token.content
        if text in marks and len(text) == 1:
            yield text, text
        elif text in marks and token.normalized:
            for other in sorted({text.swapcase(), text.translate(_WIDE), "\u0301".join(text)} - {text}):
                if number in tokenizer.encode(other, add_special_tokens=False):
                    yield text, other


def _joiner(texts: Collection[str]) -> Callable[[str], str]:
    """Return a function that puts a joint behind the first character of each of `texts`, also where they overlap.

    Templates write names between `<` and `>`. So a text also gets a joint where it begins with one of `texts` without
    its first character, or ends with one without its last, unless what is left is a word. In JSON, quotes begin and end
    a text.
    """
    rests: dict[str, list[str]] = {}
    begun: list[str] = []
    for text in sorted(texts):
        rest, cut = re.escape(text[1:]), re.escape(text[1:-1]) + '(?![^"])'  # nothing or a quote follows
        if len(text) > 1:  # nothing can be put into a single character
            rests.setdefault(re.escape(text[0]), []).extend([rest, cut] if len(text) > 2 else [rest])
            begun.extend([rest] if re.fullmatch(r"\w*", text[1:-1]) else [rest, cut])
    if not rests:
        return str
    places = [f"{first}(?={'|'.join(others)})" for first, others in rests.items()]
    place = re.compile("|".join([*places, f'(?<![^"])(?={"|".join(begun)})']))
    return lambda text: place.sub(rf"\g<0>{JOINT}", text)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value of JSON with all of its texts changed, names of members included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(name): _mapped(member, change) for name, member in value.items()}
    return [_mapped(member, change) for member in value] if isinstance(value, list) else value
