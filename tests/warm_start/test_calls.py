"""What a warm start teaches of calls: their tokens and template, what is in the loss, and how often they occur."""

import asyncio
from functools import partial
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from configs.agent import ToolChoice
from configs.policy import WarmStart
from storage.records import Problem
from tasks.agents.answers import AnswerReader, ChatMessage
from tasks.agents.chat import Chat
from tasks.agents.interface import AgentContext
from tasks.agents.openai_agent import OpenAIAgent
from tasks.problems.arithmetic import answer, expression, render
from tasks.score.verifier import Verifier
from tasks.tools import open_toolbox
from tasks.tools.calculator import calculator
from tasks.tools.interface import ToolContext
from tasks.tools.sandbox import Sandboxes
from tasks.warm_start.teach import CALCULATOR, batches, one_turn, two_turn, with_call
from tasks.warm_start.tokenizer import CHARACTERS, build_tokenizer
from tests.support.rollout_helpers import GCONFIG, ScriptedEngine, play

FEEDBACK = "Your answer is wrong. Try again."
PROBLEM = Problem("1+2", "What is 1 + 2?", ["3"])
PROBLEMS = [PROBLEM, Problem("1+3", "What is 1 + 3?", ["4"])]
TEXTS = [PROBLEM.prompt, r"\boxed", FEEDBACK]
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 2"}}</tool_call>'
ANSWER = r"\boxed{3}"
NUMBERS = st.integers(-999, 9999)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(TEXTS, calculator=True)


def test_the_fixed_parts_of_a_call_are_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    """The demo's token limit depends on the length of a call."""
    opening = '{"name": "calculator", "arguments": {"expression": "'
    assert tokenizer.tokenize(CALL) == ["<tool_call>", opening, "1", " ", "+", " ", "2", '"}}', "</tool_call>"]


@given(st.lists(st.sampled_from([*CHARACTERS, CALL, CALL[:20], CALL[-12:], "calculator", "<|im_end|>"])).map("".join))
def test_any_text_survives_the_round_trip(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    """Calls, pieces of calls and other texts are read exactly as the policy wrote them."""
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_without_tools_nothing_changes(tokenizer: PreTrainedTokenizerFast) -> None:
    """A policy that knows calls sees the same text where an agent offers no tools; others have no tokens for calls."""
    plain = build_tokenizer(TEXTS)
    messages = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    shown = [
        each.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) for each in (plain, tokenizer)
    ]
    assert shown[0] == shown[1]
    assert not {"<tool_call>", "tool", " calculator"} & plain.get_vocab().keys()


def test_a_call_is_taught_as_the_agent_will_render_it(tokenizer: PreTrainedTokenizerFast) -> None:
    """The example has the ids of an episode: prompt, call, result and answer, as they follow each other there."""
    chat = Chat(tokenizer)
    messages: list[ChatMessage] = [{"role": "user", "content": PROBLEM.prompt}]
    prompt = chat.prompt(messages, CALCULATOR)
    call, right = (tokenizer.encode(f"{text}<|im_end|>") for text in (CALL, ANSWER))
    (parsed,) = AnswerReader(chat).read(prompt, call, CALCULATOR).calls
    assert (parsed.name, parsed.arguments, parsed.readable) == ("calculator", '{"expression": "1 + 2"}', True)
    between = chat.continuation(messages, call, [{"role": "tool", "content": "3"}], CALCULATOR)
    assert between is not None
    example = with_call(tokenizer, PROBLEM)
    assert example.token_ids == prompt + call + between + right
    parts = [(prompt, False), (call, True), (between, False), (right, True)]
    assert example.loss_mask == [taught for ids, taught in parts for _ in ids]
    assert str(tokenizer.decode(prompt)).startswith("<|im_start|>system\nTools: calculator<|im_end|>\n")
    assert tokenizer.decode(between) == "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"


def test_a_direct_answer_is_taught_with_the_same_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    """Whether to call is not in the prompt: all kinds of examples begin with the same one."""
    prompt = Chat(tokenizer).prompt([{"role": "user", "content": PROBLEM.prompt}], CALCULATOR)
    direct = one_turn(tokenizer, PROBLEM, CALCULATOR)
    corrected = two_turn(tokenizer, PROBLEM, "4", FEEDBACK, CALCULATOR)
    for example in (direct, corrected, with_call(tokenizer, PROBLEM)):
        assert example.token_ids[: len(prompt)] == prompt
    assert direct.loss_mask == [False] * len(prompt) + [True] * 5  # \boxed { 3 } <|im_end|>
    assert sum(corrected.loss_mask) == 5


@given(a=NUMBERS, operator=st.sampled_from("+-*"), b=NUMBERS)
def test_the_taught_result_is_the_calculators(a: int, operator: str, b: int) -> None:
    """The examples contain the solution in place of the calculator's output, without asking it."""
    assert asyncio.run(calculator(expression(render(a, operator, b)))) == str(answer(a, operator, b))


def test_shares_and_weights_of_a_batch(tokenizer: PreTrainedTokenizerFast) -> None:
    """Of 64 rows 16 correct an answer and 8 have a call; calls and direct answers count as two ways to solve it."""
    knobs = WarmStart(two_turn_share=0.25, tool_share=0.125)
    direct, corrected, called = next(batches(PROBLEMS, tokenizer, knobs, FEEDBACK, 1))
    assert [len(rows.token_ids) for rows in (direct, corrected, called)] == [40, 16, 8]
    assert direct.weight * 40 == called.weight * 8 == 48
    assert corrected.weight == 1
    assert called.token_ids[0].tolist() in [with_call(tokenizer, problem).token_ids for problem in PROBLEMS]


@pytest.mark.parametrize("two_turn_share", [0.0, 0.25])
def test_batches_without_calls_have_no_rows_for_them(two_turn_share: float) -> None:
    """Warm starts of before are unchanged: no row with a call, weights of 1, no tools in the prompt."""
    plain = build_tokenizer(TEXTS)
    for batch in islice(batches(PROBLEMS, plain, WarmStart(two_turn_share=two_turn_share), FEEDBACK, 1), 3):
        assert {rows.weight for rows in batch} == {1.0}
        assert len(batch) == 1 + (two_turn_share > 0)
        assert str(plain.decode(batch[0].token_ids[0])).startswith("<|im_start|>user\n")


def test_an_episode_with_a_call(tokenizer: PreTrainedTokenizerFast, verifier: Verifier) -> None:
    """The agent of the demo runs the call, and its tokens are those of the example that was taught."""
    toolbox = partial(open_toolbox, [ToolChoice(type="calculator")], ToolContext(Sandboxes()))
    chat = Chat(tokenizer)
    agent = OpenAIAgent(AgentContext(chat, GCONFIG, 256, open_toolbox=toolbox))
    (row,) = play(ScriptedEngine(chat, lambda turn, _: [CALL, ANSWER][turn]), agent, verifier, group_size=1)
    assert [(call.name, call.output, call.status) for call in row.calls] == [("calculator", "3", "answered")]
    assert ([turn.verdict for turn in row.turns], row.ungraded) == (["", "correct"], [0])
    example = with_call(tokenizer, PROBLEM)
    assert (row.token_ids, row.action_mask) == (example.token_ids, example.loss_mask)
