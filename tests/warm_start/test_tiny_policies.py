"""The tiny policies that this package brings: their tokenizers, templates and weights, and how they are named."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from configs import load
from tasks.inference.location import POLICIES, locate
from tasks.problems.generated import generate
from tasks.warm_start.policy_sizes import policy_tokenizer
from tests.experiments.teach import RECIPES
from tests.support.tiny_tokenizer import CHARACTERS

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "12 + 7"}}</tool_call>'


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(POLICIES / name)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


PLAIN, TOOLS = tokenizer_of("demo"), tokenizer_of("demo-tools")
PARTS = [*CHARACTERS, CALL, CALL[:20], CALL[-12:], "calculator", "<|im_end|>"]


@given(st.lists(st.sampled_from(PARTS)).map("".join))
def test_any_text_survives_the_round_trip(text: str) -> None:
    """Calls, pieces of calls and words that the generator never uses are read exactly as the policy wrote them."""
    assert PLAIN.decode(PLAIN.encode(text)) == TOOLS.decode(TOOLS.encode(text)) == text


def test_digits_are_single_tokens_and_words_and_the_fixed_parts_of_a_call_whole() -> None:
    """The demo's token limits depend on these lengths."""
    assert PLAIN.tokenize("What is 12 + 7?") == ["What", " is", " ", "1", "2", " ", "+", " ", "7", "?"]
    assert PLAIN.tokenize(r"\boxed{-3}") == [r"\boxed", "{", "-", "3", "}"]
    opening = '{"name": "calculator", "arguments": {"expression": "'
    assert TOOLS.tokenize(CALL) == ["<tool_call>", opening, *"12 + 7", '"}}', "</tool_call>"]


def test_template_is_chatml_without_an_injected_system_prompt() -> None:
    """Both templates give exactly this text to an agent without tools."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1 + 1?"}]
    for tokenizer in (PLAIN, TOOLS):
        text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        system, rest = "<|im_start|>system\nBe brief.<|im_end|>\n", "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n"
        assert text == system + rest + "<|im_start|>assistant\n"
        assert tokenizer.apply_chat_template(messages[1:], tokenize=False) == rest


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_policies_are_small_untied_and_know_where_to_stop(name: str) -> None:
    """The server reloads only untied embeddings correctly, and stops at the end of a turn. Every clone holds them."""
    folder = locate(str(load(name).policy.path), ["*"])
    assert isinstance(folder, Path)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 2_500_000
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), tokenizer_of(name)
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


def test_held_out_problems_were_never_taught() -> None:
    """Problems used for training cannot measure the policy."""
    taught = {lesson.source.model_dump_json(): lesson.source for _, lessons in RECIPES.values() for lesson in lessons}
    for source in taught.values():
        held_out = generate(source.model_copy(update={"split": "held-out"}))
        assert not {problem.prompt for problem in generate(source)} & {problem.prompt for problem in held_out}


def test_policies_that_are_not_there() -> None:
    """An unknown name is not looked for on the hub. The warm start of an older program names the remedy."""
    with pytest.raises(ValueError, match="there is no math-mt-ppo/nothing/config.json"):
        locate("math-mt-ppo/nothing", ["*"])
    with pytest.raises(ValueError, match="no policy is taught any more; give policy.path=math-mt-ppo/demo"):
        policy_tokenizer(load("demo", ["policy={warm_start: {steps: 20}}"]))
