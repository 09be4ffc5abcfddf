"""Completions end at every token that ends a turn, and such a token is in the next prompt once."""

from copy import deepcopy

import pytest

from tasks.agents.answers import open_reader
from tasks.agents.chat import Chat
from tests.support.chat_formats import chat_of, tokenizer_of

QUESTION = {"role": "user", "content": "What is 1 + 2?"}


def ids(name: str, text: str) -> list[int]:
    return chat_of(name).encode(text)


ENDS = {
    "glm": ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
    "strict": ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|observation|>"],
    "single": ["<|eot|>", "<|eom|>"],
    "llama": ["<|eot_id|>", "<|eom_id|>"],
    "qwen3": ["<|im_end|>"],
    "opening": ["<|im_end|>"],
}


def test_all_ends_of_a_template_are_found() -> None:
    """GLM's turns end with each role's header. Llama's have another end after calls, and Qwen's calls have none.

    The closing tag of a call ends no turn, also where the template refuses a second call.
    """
    for name, ends in ENDS.items():
        assert list(chat_of(name).stop_token_ids) == sorted(tokenizer_of(name).get_vocab()[end] for end in ends)


LLAMA, QWEN3 = "<|start_header_id|>user<|end_header_id|>\n\nNo.<|eot_id|>", "\n<|im_start|>user\nNo.<|im_end|>\n"


@pytest.mark.parametrize(
    ("name", "end", "follows"),
    [
        ("glm", "", "<|user|>\nNo.<|assistant|>\n"),
        ("glm", "<|user|>", "\nNo.<|assistant|>\n"),
        ("glm", "<|endoftext|>", "<|user|>\nNo.<|assistant|>\n"),
        ("llama", "", "<|eot_id|>" + LLAMA),
        ("llama", "<|eot_id|>", LLAMA),
        ("llama", "<|end_of_text|>", LLAMA),
        ("qwen3", "<|endoftext|>", QWEN3),
    ],
)
def test_a_sampled_end_takes_the_place_of_the_templates(name: str, end: str, follows: str) -> None:
    """Whichever end was sampled, the prompt goes on behind that of the template. A role's header is not repeated."""
    tokenizer = tokenizer_of(name)
    more = [number for number, token in tokenizer.added_tokens_decoder.items() if "of" in token.content]
    chat = Chat(tokenizer, ends=more)
    said = ids(name, "4" + end)
    assert chat.completion_text(said) == chat.decode(said) == "4"
    following = chat.next_prompt([QUESTION], said, "No.")
    assert not following.fresh
    assert following.messages[1]["content"] == "4"
    headers = {"llama": "<|start_header_id|>assistant<|end_header_id|>\n\n", "qwen3": "<|im_start|>assistant\n"}
    assert following.token_ids == ids(name, follows + headers.get(name, ""))


def test_the_header_of_another_role_begins_a_sequence() -> None:
    """The policy expected the output of a tool, and a question came: no prompt of this format goes on like that."""
    chat = chat_of("glm")
    following = chat.next_prompt([QUESTION], ids("glm", "4<|observation|>"), "No.")
    assert following.fresh
    whole = "[gMASK]<sop><|user|>\nWhat is 1 + 2?<|assistant|>\n4<|user|>\nNo.<|assistant|>\n"
    assert following.token_ids == ids("glm", whole)
    result = {"role": "tool", "content": "3"}
    continued = chat.continuation([QUESTION], ids("glm", "4<|observation|>"), [result], [])
    assert continued == ids("glm", "\n3<|assistant|>\n")
    assert chat.continuation([QUESTION], ids("glm", "4<|user|>"), [result], []) is None


def test_a_template_that_shows_one_role_may_end_with_its_header() -> None:
    """Only its position before the first question tells the user's header from an end of the assistant's turn."""
    tokenizer = deepcopy(tokenizer_of("glm"))
    alternating = (
        "{% set ns = namespace(last='') %}{% for m in messages %}"
        "{% if m.role not in ['user', 'assistant'] or m.role == ns.last %}{{ raise_exception('no') }}{% endif %}"
        "{% set ns.last = m.role %}{% endfor %}"
    )
    tokenizer.chat_template = alternating + str(tokenizer.chat_template)
    chat = Chat(tokenizer)
    assert [tokenizer.decode(end) for end in chat.stop_token_ids] == ["<|endoftext|>", "<|user|>"]
    following = chat.next_prompt([QUESTION], chat.encode("4<|user|>"), "No.")
    assert tokenizer.decode(following.token_ids) == "\nNo.<|assistant|>\n"


@pytest.mark.parametrize("family", ["qwen3", "template"])
def test_ends_of_the_engine_are_not_in_the_message(family: str) -> None:
    """The family knows the first of them, the second is an end of this engine alone."""
    for end in ("<|endoftext|>", "<tool_response>"):
        chat = Chat(tokenizer_of("qwen3"), ends=ids("qwen3", end))
        prompt, said = chat.prompt([QUESTION]), ids("qwen3", "It is 4." + end)
        assert open_reader(chat, family).read(prompt, said, []).content == chat.completion_text(said) == "It is 4."
        rest = chat.continuation([QUESTION], said, [{"role": "user", "content": "No."}])
        assert rest == ids("qwen3", "\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n")
