"""A small word and character tokenizer with a ChatML template, which can show tools and calls of them."""

import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from storage.records import Problem

IM_START, IM_END, END_OF_TEXT, UNKNOWN = "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<unk>"
ROLES = ("system", "user", "assistant")
CHARACTERS = [chr(code) for code in range(ord(" "), ord("~") + 1)] + ["\n"]

CHAT_TEMPLATE, TOOLS_TEMPLATE = (
    Path(__file__).with_name(name).read_text() for name in ("chat_template.jinja", "chat_template_with_tools.jinja")
)
"""The second shows names of tools alone, because a tiny model that was taught their calls reads no schemas."""
_TOOLS_TEXTS = ["Tools: calculator", "tool"]
_TOOLS_TOKENS = ["<tool_call>", '{"name": "calculator", "arguments": {"expression": "', '"}}', "</tool_call>"]
"""The fixed parts of a call are whole tokens. In characters, a call would have 90 tokens instead of 13."""


def taught_texts(problems: Iterable[Problem], feedback: str) -> list[str]:
    """List the texts whose words become tokens, for a policy that is taught these problems."""
    return [*(problem.prompt for problem in problems), r"\boxed", feedback]


def build_tokenizer(texts: Iterable[str], *, calculator: bool = False) -> PreTrainedTokenizerFast:
    r"""Build a tokenizer whose tokens are the words of `texts` and all printable ASCII characters.

    A word includes its leading space (` is`) or backslash (`\boxed`). Digits, all other characters, and the letters of
    words that are not in `texts` are single tokens. So encoding and decoding give back any text of printable ASCII
    characters and newlines; other characters become `<unk>`. The same texts give the same ids, in any order.
    `<|im_end|>` ends a turn, `<|endoftext|>` pads. With `calculator` the parts of its calls are tokens, too, and the
    template shows tools.
    """
    shown = [*texts, *(_TOOLS_TEXTS if calculator else [])]
    words_of_texts = {word for text in shown for word in re.findall(r"[ \\]?[A-Za-z]{2,}", text)}
    words = sorted({*words_of_texts, *ROLES, *(_TOOLS_TOKENS if calculator else [])})
    tokens = [END_OF_TEXT, IM_START, IM_END, UNKNOWN, *CHARACTERS, *words]
    backend = Tokenizer(WordLevel({token: number for number, token in enumerate(tokens)}, unk_token=UNKNOWN))
    alternatives = "|".join(map(re.escape, words))  # a whole word, else one character
    backend.pre_tokenizer = Split(Regex(rf"(?:{alternatives})(?![A-Za-z])|[\s\S]"), behavior="isolated")
    backend.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        unk_token=UNKNOWN,
        additional_special_tokens=[IM_START],
        chat_template=TOOLS_TEMPLATE if calculator else CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
