"""The warm start: tokenizer, examples of answers and of calls, what is in the loss, and the supervised training."""

import asyncio
import json
import math
import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from configs import load
from configs.agent import ToolChoice
from configs.policy import WarmStart
from configs.problems import ArithmeticSource
from storage.records import Problem
from tasks.agents.answers import AnswerReader, ChatMessage
from tasks.agents.chat import Chat
from tasks.agents.interface import AgentContext
from tasks.agents.openai_agent import OpenAIAgent
from tasks.problems.generated import answer, expression, generate, render
from tasks.score.verifier import Verifier
from tasks.tools import open_toolbox
from tasks.tools.calculator import calculator
from tasks.tools.interface import ToolContext
from tasks.tools.sandbox import Sandboxes
from tasks.warm_start.policy_sizes import Lesson, policy_tokenizer
from tasks.warm_start.teach import (
    CALCULATOR,
    Rows,
    _loss,
    batches,
    make_policy,
    one_turn,
    two_turn,
    with_call,
    wrong_answer,
)
from tasks.warm_start.tokenizer import CHARACTERS, build_tokenizer
from tests.support.rollout_helpers import GCONFIG, ScriptedEngine, play

FEEDBACK = "Your answer is wrong. Try again."
PROBLEM = Problem("12+7", "What is 12 + 7?", ["19"])
PROBLEMS = [PROBLEM, Problem("1+3", "What is 1 + 3?", ["4"])]
TEXTS = [PROBLEM.prompt, r"\boxed", FEEDBACK]
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "12 + 7"}}</tool_call>'
ANSWER = r"\boxed{19}"
TRAIN = ArithmeticSource(kind="arithmetic", low=0, high=5)
TINY = WarmStart(hidden_size=32, layers=1, steps=30, target_accuracy=1.0)
PLAIN, TOOLS = build_tokenizer(TEXTS), build_tokenizer(TEXTS, calculator=True)


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float], list[float]]:
    """A folder with a warm-started policy, its metrics, and the losses passed to `progress`."""
    folder, losses = tmp_path_factory.mktemp("policy"), list[float]()
    lesson = Lesson(TRAIN, FEEDBACK)
    metrics = make_policy(TINY, [lesson], 1, folder, progress=lambda step, loss, accuracy: losses.append(loss))
    return folder, metrics, losses


PARTS = [*CHARACTERS, CALL, CALL[:20], CALL[-12:], "calculator", "<|im_end|>"]


@given(st.lists(st.sampled_from(PARTS)).map("".join))
def test_any_text_survives_the_round_trip(text: str) -> None:
    """Calls, pieces of calls and words that the generator never uses are read exactly as the policy wrote them."""
    assert PLAIN.decode(PLAIN.encode(text)) == TOOLS.decode(TOOLS.encode(text)) == text


def test_digits_are_single_tokens_and_words_and_the_fixed_parts_of_a_call_whole() -> None:
    """The demo's token limits depend on these lengths. The same texts in any order give the same ids."""
    assert PLAIN.tokenize("What is 12 + 7?") == ["What", " is", " ", "1", "2", " ", "+", " ", "7", "?"]
    assert PLAIN.tokenize(r"\boxed{-3}") == [r"\boxed", "{", "-", "3", "}"]
    assert PLAIN.tokenize("Whatever") == list("Whatever")
    opening = '{"name": "calculator", "arguments": {"expression": "'
    assert TOOLS.tokenize(CALL) == ["<tool_call>", opening, *"12 + 7", '"}}', "</tool_call>"]
    assert not {"<tool_call>", "tool", " calculator"} & PLAIN.get_vocab().keys()
    assert PLAIN.get_vocab() == build_tokenizer(reversed(TEXTS)).get_vocab()


def test_template_is_chatml_without_an_injected_system_prompt() -> None:
    """Both templates give exactly this text to an agent without tools."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1 + 1?"}]
    for tokenizer in (PLAIN, TOOLS):
        text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        system, rest = "<|im_start|>system\nBe brief.<|im_end|>\n", "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n"
        assert text == system + rest + "<|im_start|>assistant\n"
        assert tokenizer.apply_chat_template(messages[1:], tokenize=False) == rest


@pytest.mark.parametrize("tools", [(), CALCULATOR])
def test_an_example_is_what_the_agent_will_render(tools: list[dict[str, object]]) -> None:
    """It has the ids of an episode. The loss covers only calls and right answers, each with its <|im_end|>."""
    tokenizer = TOOLS if tools else PLAIN
    chat, messages = Chat(tokenizer), [ChatMessage(role="user", content=PROBLEM.prompt)]
    prompt = chat.prompt(messages, tools)
    call, wrong, right = (tokenizer.encode(f"{text}<|im_end|>") for text in (CALL, r"\boxed{20}", ANSWER))

    def check(parts: list[tuple[list[int], bool]], example: object) -> None:
        ids, mask = [token for part, _ in parts for token in part], [said for part, said in parts for _ in part]
        assert example == type(example)(ids, mask)  # type: ignore[call-arg]

    check([(prompt, False), (right, True)], one_turn(tokenizer, PROBLEM, tools))
    again = chat.continuation(messages, wrong, [{"role": "user", "content": FEEDBACK}], tools)
    assert again
    check([(prompt + wrong + again, False), (right, True)], two_turn(tokenizer, PROBLEM, "20", FEEDBACK, tools))
    assert str(tokenizer.decode(prompt)).startswith("<|im_start|>system\nTools: calculator<|im_end|>\n") == bool(tools)
    if tools:
        (parsed,) = AnswerReader(chat).read(prompt, call, tools).calls
        assert (parsed.name, parsed.arguments) == ("calculator", '{"expression": "12 + 7"}')
        between = chat.continuation(messages, call, [{"role": "tool", "content": "19"}], tools)
        assert between
        assert tokenizer.decode(between) == "\n<|im_start|>tool\n19<|im_end|>\n<|im_start|>assistant\n"
        check([(prompt, False), (call, True), (between, False), (right, True)], with_call(tokenizer, PROBLEM))


def test_an_episode_with_a_call(verifier: Verifier) -> None:
    """The agent of the demo runs the call, and its tokens are those of the example that was taught."""
    toolbox = partial(open_toolbox, [ToolChoice(type="calculator")], ToolContext(Sandboxes()))
    chat = Chat(TOOLS)
    agent = OpenAIAgent(AgentContext(chat, GCONFIG, 256, open_toolbox=toolbox))
    (row,) = play(ScriptedEngine(chat, lambda turn, _: [CALL, r"\boxed{3}"][turn]), agent, verifier, group_size=1)
    assert [(call.name, call.output, call.status) for call in row.calls] == [("calculator", "19", "answered")]
    assert row.ungraded == [0]


NUMBERS = st.integers(-999, 9999)


@given(a=NUMBERS, operator=st.sampled_from("+-*"), b=NUMBERS, seed=st.integers())
def test_taught_results_are_right_and_wrong_answers_wrong(a: int, operator: str, b: int, seed: int) -> None:
    """The examples contain the solution in place of the calculator's output, without asking it."""
    solution = str(answer(a, operator, b))
    assert asyncio.run(calculator(expression(render(a, operator, b)))) == solution
    assert wrong_answer(solution, ["-4", "7", "19"], random.Random(seed)) != solution


@pytest.mark.parametrize(
    ("two_turn_share", "tool_share", "sizes", "weights"),
    [
        (0.25, 0.125, [40, 16, 8], [48 / 40, 1, 48 / 8]),  # calls and direct answers are two ways to solve a problem
        (0.25, 0.0, [48, 16], [1, 1]),
        (0.0, 0.0, [64], [1]),
    ],
)
def test_shares_and_weights_of_a_batch(
    two_turn_share: float, tool_share: float, sizes: list[int], weights: list[float]
) -> None:
    """A batch has 64 rows: direct answers, answers after a wrong one, and calls."""
    knobs = WarmStart(two_turn_share=two_turn_share, tool_share=tool_share)
    batch = next(batches([(Lesson(TRAIN, FEEDBACK, tools=tool_share > 0), PROBLEMS)], TOOLS, knobs, 1))
    assert ([len(rows.token_ids) for rows in batch], [rows.weight for rows in batch]) == (sizes, weights)
    begins = "<|im_start|>system\nTools" if tool_share else "<|im_start|>user\n"
    assert all(str(TOOLS.decode(rows.token_ids[0])).startswith(begins) for rows in batch)


def test_held_out_problems_are_refused_and_never_taught(tmp_path: Path) -> None:
    """Problems used for training cannot measure the policy."""
    held_out = TRAIN.model_copy(update={"split": "held-out"})
    with pytest.raises(ValueError, match="held-out"):
        make_policy(TINY, [Lesson(held_out)], 1, tmp_path)
    assert not {p.prompt for p in generate(TRAIN)} & {p.prompt for p in generate(held_out)}


def test_teaching_lowers_the_loss_and_ends_at_the_target(
    taught: tuple[Path, dict[str, float], list[float]], tmp_path: Path
) -> None:
    """Training stops early at the target accuracy, so that PPO has something left to teach."""
    _, metrics, losses = taught
    assert len(losses) == metrics["steps"] == TINY.steps
    assert losses[-1] == metrics["loss"] < 0.8 * losses[0]
    knobs = TINY.model_copy(update={"target_accuracy": 1e-9, "steps": 100})
    assert make_policy(knobs, [Lesson(TRAIN, FEEDBACK)], 1, tmp_path)["steps"] < 50


def test_loss_and_accuracy_by_hand() -> None:
    """A model with probability 1/4 for each of 4 tokens has loss log 4; a two-token answer is right once in 16."""

    def model(input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 4))

    ids, mask = torch.tensor([[0, 1, 2, 3], [0, 1, 3, 0]]), torch.tensor([[0, 0, 1, 1], [0, 0, 1, 0]], dtype=torch.bool)
    two_ways = [Rows(ids[:1], mask[:1], weight=2.0), Rows(ids[1:], mask[1:], weight=2.0)]
    for rows, expected in (([Rows(ids, mask)], (1 / 16 + 1 / 4) / 2), (two_ways, 1 / 16 + 1 / 4)):
        loss, right = _loss(cast(Qwen3ForCausalLM, model), rows)
        assert (loss.item(), right.item()) == pytest.approx((math.log(4), expected))


def test_same_seed_same_weights_other_seed_others(taught: tuple[Path, object, object], tmp_path: Path) -> None:
    """A warm start is reproducible, whatever the state of torch's global generator."""
    torch.manual_seed(99)
    make_policy(TINY, [Lesson(TRAIN, FEEDBACK)], 1, tmp_path / "again")
    make_policy(TINY, [Lesson(TRAIN, FEEDBACK)], 2, tmp_path / "other")
    folders = taught[0], tmp_path / "again", tmp_path / "other"
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1] != weights[2]


def test_saved_model_is_untied_and_knows_where_to_stop(taught: tuple[Path, dict[str, float], object]) -> None:
    """The server reloads only untied embeddings correctly, and stops at the end of a turn."""
    folder, metrics, _ = taught
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert (model.config.max_position_embeddings, model.num_parameters()) == (512, metrics["parameters"])


def test_the_tokenizer_of_a_warm_start_is_known_before_it(policy_folder: Path) -> None:
    """A scripted episode plays with it: it needs neither problems nor weights."""
    tokenizer, _, _ = policy_tokenizer(load("smoke"))
    made = AutoTokenizer.from_pretrained(policy_folder)
    assert (tokenizer.get_vocab(), tokenizer.chat_template) == (made.get_vocab(), made.chat_template)
