"""Conversations as token ids, rendered by the model's own chat template.

While a sequence continues, sampled ids are never decoded and encoded again. `Chat` renders only the text between two
completions: the difference between the conversation with and without the next message. Some templates rewrite earlier
messages: those of thinking models drop earlier thoughts, others move the system prompt into the newest question. Then
a new sequence begins with the whole conversation, as the template renders it now.

Contents are text. Only the template writes control tokens, see `tasks.agents.control`.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage.objects.store import Store
from storage.version_names import PolicyVersion
from storage.versions import manifests
from storage.versions.checkpoints import Checkpoint, manifest_of_model
from storage.versions.fetch import WEIGHTS, fetch_folder
from storage.versions.manifests import Manifest
from storage.versions.model_files import check_files
from tasks.agents.control import JOINT, TurnEnds, exact_text, quoted
from tasks.agents.template import Message, Messages, Template, Tools
from tasks.thoughts import PIECE, TAG, after, opened_by, split

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
        readable: number of token ids that the policy knows and the tokenizer can have; the others are padding.
        control: the tokens that only the template may write.
        toy_calls: calls as the template writes them, see `Written.toy_calls`.
        opening: the tag with which the template itself opens the thought of an answer, and the blanks after it; or "".
        stop_token_ids: tokens that end a turn: the tokenizer's end of text, `ends`, and the template's ends of turns.

    Raises:
        ValueError: the tokenizer has no chat template, or it refuses a conversation.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", vocabulary: int | None = None, ends: Sequence[int] = ()
    ) -> None:
        self.vocabulary = vocabulary or len(tokenizer)
        self.readable = min(self.vocabulary, 1 + max(tokenizer.get_vocab().values()))
        self.tokenizer, self._template = tokenizer, Template(tokenizer)
        self.control = self._template.control
        engine = {*ends, tokenizer.eos_token_id} - {None}
        # Some models end texts with padding, too: an engine that is told so may stop there.
        self._ends = TurnEnds(tokenizer, self._template.written, {*engine, tokenizer.pad_token_id} - {None})
        written = self._ends.template if self._template.keeps_plain() else ()
        self.stop_token_ids: tuple[int, ...] = tuple(sorted({*engine, *written}))
        self.toy_calls = self.encode(self._template.written.toy_calls)
        self._words = TAG.split(self._template.lead)[-1].lstrip()  # those with which the template begins a thought
        self.opening = self.opening_of(self.prompt([{"role": "user", "content": "?"}]))
        special = ((number, token) for number, token in tokenizer.added_tokens_decoder.items() if token.special)
        self._vanishing = frozenset(number for number, token in special if not PIECE.fullmatch(token.content))

    def prompt(self, messages: Messages, tools: Tools = ()) -> list[int]:
        """Return the ids of the conversation, up to the point where the assistant's answer begins.

        Args:
            messages: as in OpenAI's chat completions; contents are texts.
            tools: what may be called in it, as in OpenAI's chat completions.

        Raises:
            ValueError: the template refuses the conversation, or does not show all of its messages and tools.
        """
        return list(self._encode_cached(self._template.render(messages, tools)))

    def whole(self, messages: Messages) -> list[int]:
        """Return the ids of a conversation that ends with the assistant's answer; tags of thoughts in it are text."""
        text = self.tokenizer.apply_chat_template(self.control.apart(quoted(messages)), tokenize=False)
        return self.control.encode(str(text))

    def next_prompt(self, messages: list[Message], completion_ids: list[int], message: str) -> NextPrompt:
        """Return the prompt for the next turn, in which the user answers a completion of `messages` with `message`.

        If the sequence continues, the new ids are the end of the assistant's turn (without the end-of-turn token, if
        the policy sampled it), the user's turn and the assistant's header. Whitespace that the template would trim
        stays as it was sampled.
        """
        new = {"role": "user", "content": message}
        answer = {"role": "assistant", "content": self._template.lead + self.completion_text(completion_ids)}
        following, ids = [*messages, answer, new], self.continuation(messages, completion_ids, [new])
        return NextPrompt(self.prompt(following) if ids is None else ids, ids is None, following)

    def continuation(
        self, messages: Messages, completion_ids: list[int], new: Messages, tools: Tools = ()
    ) -> list[int] | None:
        """Return the ids that follow a completion when `new` messages answer it.

        The prompt of the next completion is that of this one, its tokens and these ids: what was sampled is never
        encoded again. None if the template rewrites what came before, or refuses the text of a completion with calls:
        the next prompt is then that of the whole conversation.

        Args:
            messages: the conversation before the completion.
            completion_ids: what the policy sampled.
            new: the messages after the completion; none if the policy is simply asked again.
            tools: the tools that the conversation began with.
        """
        try:
            rest = self._template.rest(messages, self.completion_text(completion_ids), new, tools)
        except ValueError:
            return None
        return None if rest is None else self._ends.following(list(self._encode_cached(rest)), completion_ids)

    def answer(self, text: str, calls: Sequence[dict[str, Any]] = (), tools: Tools = ()) -> list[int]:
        r"""Return a completion that says `text` and makes calls, with the end of its turn, as a policy would sample it.

        Where the template opens a thought, that of the text goes on: `<think>\nHm</think>42` becomes `Hm</think>42`.

        Args:
            text: a thought with its tags, if there is one, and what is said.
            calls: as in OpenAI's chat completions; nothing is returned if the template does not write them.
            tools: those of the conversation.
        """
        body = self.control.said_apart(after(self.opening, text) if self.opening else text)
        if not calls:
            return [*self.control.encode(body), *[*self._ends.template, *self.stop_token_ids][:1]]
        ids = self.control.encode(body + self._template.calls(calls, tools, said=bool(split(text)[1])))
        names, before = Counter(call["function"]["name"] for call in calls), body.replace(JOINT, "")
        for end in (end for end, token in enumerate(ids, 1) if token in self._ends):
            shown = exact_text(self.tokenizer, ids[:end]).removeprefix(before)
            if all(shown.count(name) >= count for name, count in names.items()):
                return ids[:end]  # some templates write each call as a message of its own, with an end
        return []

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text` and add no special tokens; those in the text are recognised."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: list[int], prompt_ids: Sequence[int] = ()) -> str:
        """Return the text of a completion, without its end and without special tokens, but with the tags of thoughts.

        That of a thought which the prompt opened is put before it. Without `prompt_ids`, it is a usual one.
        """
        kept = [number for number in self.without_end(token_ids) if number not in self._vanishing]
        return self.opening_of(prompt_ids) + str(self.tokenizer.decode(kept, skip_special_tokens=False))

    def opening_of(self, prompt_ids: Sequence[int] = ()) -> str:
        """Return the tag with which a prompt opens a thought; "" if it opens none: templates may decide by messages."""
        return self._opening_after(tuple(prompt_ids[-64:])) if prompt_ids else self.opening

    @lru_cache(maxsize=1024)  # noqa: B019  # the episodes of a group get the same prompt
    def _opening_after(self, end: tuple[int, ...]) -> str:
        # The template may begin the answer with words, too.
        return opened_by(exact_text(self.tokenizer, end).removesuffix(self._words))

    def without_end(self, completion_ids: Sequence[int]) -> list[int]:
        """Return a completion without the token that ended it."""
        return list(completion_ids[:-1] if completion_ids and completion_ids[-1] in self._ends else completion_ids)

    def completion_text(self, completion_ids: list[int]) -> str:
        """Return the completion's text without the end of turn, which the template itself writes."""
        ids = self.without_end(completion_ids)
        tail = "" if len(ids) == len(completion_ids) else self._ends.template.get(completion_ids[-1], "")
        return exact_text(self.tokenizer, ids).removesuffix(tail)

    @lru_cache(maxsize=256)  # noqa: B019  # one Chat lives as long as its stage
    def _encode_cached(self, text: str) -> list[int]:
        """Return the ids of a rendered text from a cache: many episodes get the same prompt or feedback."""
        return self.control.encode(text)


_PLAIN = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Classes of tokenizers that are all in `tokenizer.json`; the second is the name before transformers 5."""


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """Load a tokenizer from its files alone, which never run code.

    To find a model's own class, transformers imports torch: 6 s of processor time in each process that plays. A
    tokenizer without a class of its own needs a third of that.

    Raises:
        Exception: a file is missing or cannot be parsed; the library raises no narrower error. See `refuse_empty` and
            `check_files`.
    """
    import transformers  # it imports its parts when they are used

    stated = check_files(folder) / "tokenizer_config.json"
    plain = stated.exists() and json.loads(stated.read_bytes()).get("tokenizer_class") in _PLAIN
    kind: Any = transformers.PreTrainedTokenizerFast if plain else transformers.AutoTokenizer
    tokenizer: PreTrainedTokenizerBase = kind.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    refuse_empty(tokenizer, folder)
    return tokenizer


def refuse_empty(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Raise ValueError if a tokenizer is the empty one that transformers makes up if it finds none in a folder."""
    if tokenizer.get_vocab().keys() <= set(tokenizer.all_special_tokens):
        raise ValueError(
            f"{folder} has no tokenizer: copy tokenizer.json and tokenizer_config.json, too, or download the model "
            "again if this is the hub's cache"
        )


def differing_token(policy: Path, other: Path, *, templates: bool = True) -> str:
    """Say in what the tokenizer or chat template of two models differ, by the first token; empty: in nothing."""
    mine, its = (load_tokenizer(folder) for folder in (policy, other))
    own, others = ({number: token for token, number in each.get_vocab().items()} for each in (mine, its))
    for number in sorted(own.keys() | others.keys()) if own != others else ():
        if own.get(number) != others.get(number):
            difference = f"token {number} is {own.get(number)!r} to the policy and {others.get(number)!r} there"
            return f"its tokenizer is another one: {difference}"
    if templates and mine.chat_template != its.chat_template:
        return "its chat template is another one, so prompts and turns look different"
    return ""


def engine_ends(folder: Path) -> tuple[int, ...]:
    """Return the tokens at which vLLM stops because a model's configuration says so (`eos_token_id`).

    vLLM reads generation_config.json or, without it, config.json. It stops at the tokenizer's end of text as well.
    """
    stated = folder / "generation_config.json"
    ends = json.loads((stated if stated.exists() else folder / "config.json").read_bytes()).get("eos_token_id")
    return tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)


def load_chat(policy: Checkpoint) -> Chat:
    """Return the chat of the checkpoint's tokenizer; it is cached, because a run never changes its tokenizer."""
    return _chat_in(policy.base or policy.committed, policy.model)


def fetch_chat(store: Store, policy: PolicyVersion, cache: Path) -> Chat:
    """Return the chat of a checkpoint's tokenizer without fetching its weights."""
    manifest = manifest_of_model(store, manifests.read(store, policy))
    return _chat_in(manifest, fetch_folder(store, manifest, "model", cache, leave_out=WEIGHTS))


_CHATS: dict[object, Chat] = {}
"""The chats of this process, by all that they depend on."""


def _chat_in(manifest: Manifest | None, folder: Path) -> Chat:
    files = tuple(file.sha256 for file in manifest.files if re.search("token|chat", file.name)) if manifest else folder
    size = json.loads((folder / "config.json").read_bytes()).get("vocab_size")  # one model: the import refuses others
    vocabulary, ends = int(size) if size else None, engine_ends(folder)
    key = files, vocabulary, ends
    if key not in _CHATS:
        _CHATS[key] = Chat(load_tokenizer(folder), vocabulary, ends)
    return _CHATS[key]
