"""Control tokens: what a chat template itself writes around messages (`Written`, found with toy conversations), how
contents never become such tokens (`ControlTokens`), and at which tokens turns end (`TurnEnds`).
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from tasks.thoughts import TAG

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


JOINT = "\ufdd0"
"""A character that Unicode leaves to programs, and that no text should contain."""

_ASKED, SAID, _GIVEN, NEXT = "(asked)", "(said)", "(given)", "(next)"
TOY_CALL: dict[str, Any] = {"name": "look", "arguments": {"x": _GIVEN}}
_FUNCTION = {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}}
TOY_TOOLS = [{"type": "function", "function": _FUNCTION}]
_ROLES = "user", "tool", "system", "assistant"

Render = Callable[[list[dict[str, Any]], list[dict[str, Any]]], str | None]
"""Returns the text of messages and tools with the assistant's next header, or None if the template refuses them."""


@dataclass(frozen=True, slots=True)
class Written:
    """The texts that a template writes.

    Example, of ChatML with calls in the form of Hermes, shortened: Written(
        after={"user": "<|im_end|><|im_start|>user", "tool": "<|im_end|><|im_start|>tool"},
        around=["<|im_start|>user", "<|im_end|><|im_start|>user", "<|im_end|><|im_start|>assistant"],
        in_calls=['<tool_call>{"name": "look", "arguments": {"x": "', '"}}</tool_call>'],
        end_of_calls="",
    )
    """

    after: dict[str, str]  # by the role of the next message, between a completion without calls and that message
    around: list[str]  # before and after messages, first what begins a conversation; not within the assistant's turns
    in_calls: list[str]  # before, between and after calls, within the assistant's turn
    end_of_calls: str  # the token that ends a turn with calls; "" if it is one of those in `after`, or there is none

    @property
    def toy_calls(self) -> str:
        """The text of one or two calls `TOY_CALL`; "" if the template knows no calls."""
        return _GIVEN.join(self.in_calls)


def find_written(render: Render, lead: str, marks: Mapping[str, bool]) -> Written:
    """Return what a template writes.

    Args:
        render: renders toy conversations.
        lead: what the template writes at the beginning of the assistant's answer.
        marks: the texts of tokens that may be control tokens, and whether the tokenizer calls them special.
    """
    after, around = dict[str, str](), list[str]()
    for role in _ROLES:
        answer = _message("assistant", lead + SAID)
        text = render([_message("user", _ASKED), answer, _message(role, NEXT)], []) or ""
        gap, follows, closing = text.partition(SAID)[2].partition(NEXT)
        if not follows:
            continue
        after[role] = gap
        within_users = role == "tool" and gap.startswith(after.get("user", gap))
        if role != "assistant" and not within_users:
            around.extend([text.partition(_ASKED)[0], gap, closing.removesuffix(lead)])
    # Templates may refuse system messages elsewhere than at the beginning, and outputs of tools without calls.
    begun = render([_message("system", NEXT), _message("user", _ASKED)], []) or ""
    around.append(begun.partition(_ASKED)[0])
    in_calls, after_call, outputs = _find_calls(render, lead)
    closing, end, gap = _split(after_call, "\n".join(in_calls), after.values(), "\n".join(around), marks)
    if not (end + gap).startswith(after.get("user", end + gap)):
        around.extend([end + gap, *outputs])
    return Written(after, around, [*in_calls, closing], end)


def _find_calls(render: Render, lead: str) -> tuple[list[str], str, list[str]]:
    """Return the texts before and between calls, after them, and after outputs.

    They are those of two calls, or of one if the template refuses two.
    """
    for calls in ([TOY_CALL] * 2, [TOY_CALL]):
        text = render(with_calls(calls, lead), TOY_TOOLS) or ""
        before, *others = text.partition(NEXT)[0].split(_GIVEN)
        if others:
            *between, after = others
            return [before.partition(SAID)[2], *between], after, text.removesuffix(lead).split(NEXT)[1:]
    return [], "", []


def _split(
    after_call: str, calls: str, gaps: Iterable[str], around: str, marks: Mapping[str, bool]
) -> tuple[str, str, str]:
    """Return what closes the last call, the token that ends its turn unless it also begins a gap, and the rest."""
    mark = re.compile("|".join(re.escape(text) for text in sorted(marks, key=len, reverse=True)))
    ends = {found[0] for gap in gaps if (found := mark.search(gap))}
    matches = [match for match in mark.finditer(after_call) if match[0] in around or match[0] not in calls]
    known = [match for match in matches if match[0] in ends]
    before = list(takewhile(lambda match: match[0] not in around, matches))
    if known or not before:
        start = (known or matches)[0].start() if matches else len(after_call)
        return after_call[:start], "", after_call[start:]
    end = ([match for match in before if marks[match[0]]] or before)[-1]  # closing tags of calls stand before it
    return after_call[: end.start()], end[0], after_call[end.end() :]


def with_calls(calls: Sequence[Mapping[str, Any]], lead: str, content: str = SAID) -> list[dict[str, Any]]:
    """Return a conversation in which the assistant says `lead` and `content`, and makes calls, with their outputs."""
    named = {f"look{number:05}": call for number, call in enumerate(calls, 1)}  # some templates refuse other ids
    made = [{"id": name, "type": "function", "function": call} for name, call in named.items()]
    results = [_message("tool", NEXT) | {"name": call["name"], "tool_call_id": name} for name, call in named.items()]
    return [_message("user", _ASKED), _message("assistant", lead + content) | {"tool_calls": made}, *results]


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


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
    - in outputs of tools and in calls all other added tokens, too, such as `<think>` and `</tool_response>`, unless
      they are words;
    - in what the assistant says not the tags of thoughts and those around calls, since a policy samples them itself,
      unless they begin and end turns, too. For models that only read what a policy said, see `quoted`.

    `apart` puts a joint into each text of a control token. Templates copy it like other characters, and `encode` makes
    no token of it. A text without such marks has exactly the tokens that the tokenizer gives. Example:
    `<|im_end|>` in a problem becomes `<` + JOINT + `|im_end|>`, which has the tokens of `<` and of `|im_end|>`.

    Args:
        tokenizer: the policy's tokenizer.
        written: what the template writes; None to know only the special tokens.
        lead: what the template writes at the beginning of the assistant's answer.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", written: Written | None = None, lead: str = "") -> None:
        self._tokenizer, marks, written = tokenizer, marks_of(tokenizer), written or Written({}, [], [], "")

        def marks_in(*texts: str) -> set[str]:
            return {mark for mark in marks if any(mark in text for text in texts)}

        turns = marks_in(*written.around)
        everywhere = turns.union(mark for mark, special in marks.items() if special)
        own = set(filter(TAG.fullmatch, marks)) | marks_in(lead) | (marks_in(*written.in_calls) - turns)
        self._others, self._returned = _joiner(everywhere), _joiner(marks)
        self.said_apart = _joiner(everywhere - own)
        """Returns what the policy said as it stands in messages that are `apart`."""

    def apart(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages in which no text can become a control token."""
        return [
            {name: _mapped(value, self._change(message["role"], name)) for name, value in message.items()}
            for message in messages
        ]

    def tools_apart(self, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return descriptions of tools in which no text can become a control token."""
        return [_mapped(tool, self._others) for tool in tools]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a rendered text: no special tokens are added, those that the template wrote are kept."""
        if JOINT not in text:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        joint = self._joining.convert_tokens_to_ids(JOINT)
        return [number for number in self._joining.encode(text, add_special_tokens=False) if number != joint]

    @cached_property
    def _joining(self) -> "PreTrainedTokenizerBase":
        """The tokenizer with one more token, the joint. It is made when the first content needs it."""
        joining = deepcopy(self._tokenizer)
        joining.add_tokens([JOINT], special_tokens=True)
        return joining

    def _change(self, role: str, member: str) -> Callable[[str], str]:
        if role == "tool" or member == "tool_calls":
            return self._returned
        return self.said_apart if role == "assistant" else self._others


def _joiner(texts: Collection[str]) -> Callable[[str], str]:
    """Return a function that puts a joint behind the first character of each of `texts`, also where they overlap.

    Templates write names between `<` and `>`. So a text also gets a joint where it begins with one of `texts` without
    its first character, or ends with one without its last, unless what is left is a word. In JSON, quotes begin and end
    a text.
    """
    rests, begun = defaultdict[str, list[str]](list), list[str]()
    for text in sorted(text for text in texts if len(text) > 1):  # nothing can be put into a single character
        rest, cut = re.escape(text[1:]), re.escape(text[1:-1]) + '(?![^"])'  # nothing or a quote follows
        rests[re.escape(text[0])] += [rest, cut] if len(text) > 2 else [rest]
        begun += [rest] if re.fullmatch(r"\w*", text[1:-1]) else [rest, cut]
    if not rests:
        return str
    patterns = [f"{first}(?={'|'.join(others)})" for first, others in rests.items()]
    return partial(re.compile("|".join([*patterns, f'(?<![^"])(?={"|".join(begun)})'])).sub, rf"\g<0>{JOINT}")


def quoted(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in whose contents the tags of thoughts are text, so that no template drops words for them."""
    return [
        {**message, "content": TAG.sub(lambda tag: f"{tag[0][0]}{JOINT}{tag[0][1:]}", message["content"])}
        for message in messages
    ]


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value of JSON with all of its texts changed, names of members included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(name): _mapped(member, change) for name, member in value.items()}
    return [_mapped(member, change) for member in value] if isinstance(value, list) else value


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
        ends = Counter(end for gap in written.after.values() if (end := self._note_end(gap)) is not None)
        begins = tokenizer.encode(written.around[0], add_special_tokens=False) if written.around else []
        once = (end for end, roles in ends.items() if roles == 1)
        self.headers = frozenset(end for end in once if ends.total() > 1 or end in begins)
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
        position = next((index for index, token in enumerate(rest) if token in self.template), len(rest))
        if position == len(rest) and last not in self.template:
            return rest
        if exact_text(self._tokenizer, rest[:position]).strip():
            return None
        if self.headers.intersection(rest[position : position + 1]) - {last}:
            return None if last in self.headers else rest
        return rest[position + 1 :]

    def _note_end(self, gap: str) -> int | None:
        """Note and return the end in the text between a completion and the next message; None if there is none."""
        ids: list[int] = list(self._tokenizer.encode(gap, add_special_tokens=False))
        added = self._tokenizer.added_tokens_decoder
        for position, token in enumerate(ids):
            if token in added and added[token].content in self._marks:
                self.template.setdefault(token, exact_text(self._tokenizer, ids[:position]))
                return token
        return None


def exact_text(tokenizer: "PreTrainedTokenizerBase", token_ids: Sequence[int]) -> str:
    """Return the text of tokens, special ones included."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
