"""The warm start: tokenizer, examples and the supervised training."""

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from configs.policy import WarmStart
from configs.problems import ArithmeticSource
from storage.records import Problem
from tasks.problems.arithmetic import generate
from tasks.warm_start.teach import Rows, _loss, make_policy, one_turn, two_turn, wrong_answer
from tasks.warm_start.tokenizer import CHARACTERS, build_tokenizer

FEEDBACK = "Your answer is wrong. Try again."
PROBLEM = Problem("12+7", "What is 12 + 7?", ["19"])
TRAIN = ArithmeticSource(kind="arithmetic", low=0, high=5)
TINY = WarmStart(hidden_size=32, layers=1, steps=30, target_accuracy=1.0)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer([PROBLEM.prompt, r"\boxed", FEEDBACK])


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float], list[float]]:
    """A folder with a warm-started policy, its metrics, and the losses passed to `progress`."""
    folder, losses = tmp_path_factory.mktemp("policy"), list[float]()
    metrics = make_policy(TINY, TRAIN, FEEDBACK, 1, folder, progress=lambda step, loss, accuracy: losses.append(loss))
    return folder, metrics, losses


@given(st.text(st.sampled_from(CHARACTERS)))
def test_any_ascii_text_survives_the_round_trip(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    """Words that the generator never uses are spelled in characters, not lost."""
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_are_single_tokens_and_words_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    """The demo's token limits depend on these lengths."""
    assert tokenizer.tokenize("What is 12 + 7?") == ["What", " is", " ", "1", "2", " ", "+", " ", "7", "?"]
    assert tokenizer.tokenize(r"\boxed{-3}") == [r"\boxed", "{", "-", "3", "}"]
    assert tokenizer.tokenize("Whatever") == list("Whatever")


def test_same_texts_in_any_order_give_the_same_ids() -> None:
    """A rebuilt tokenizer fits the old weights."""
    texts = [PROBLEM.prompt, FEEDBACK, r"\boxed"]
    assert build_tokenizer(texts).get_vocab() == build_tokenizer(reversed(texts)).get_vocab()


def test_template_is_chatml_without_an_injected_system_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    """The template gives exactly this text to an agent."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1 + 1?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert str(tokenizer.apply_chat_template(messages[1:], tokenize=False)).startswith("<|im_start|>user\n")


def test_one_turn_mask_by_hand(tokenizer: PreTrainedTokenizerFast) -> None:
    """The loss covers only the answer and its <|im_end|>, and nothing follows them."""
    example = one_turn(tokenizer, PROBLEM)
    assert tokenizer.decode(example.token_ids) == (
        "<|im_start|>user\nWhat is 12 + 7?<|im_end|>\n<|im_start|>assistant\n\\boxed{19}<|im_end|>"
    )
    assert example.loss_mask == [False] * 18 + [True] * 6  # \boxed { 1 9 } <|im_end|>


def test_two_turn_mask_by_hand(tokenizer: PreTrainedTokenizerFast) -> None:
    """The wrong first answer is context, not target, and the ids equal those of an agent that appends."""
    example = two_turn(tokenizer, PROBLEM, "20", FEEDBACK)
    question = tokenizer.encode("<|im_start|>user\nWhat is 12 + 7?<|im_end|>\n<|im_start|>assistant\n")
    sampled = tokenizer.encode(r"\boxed{20}<|im_end|>")
    appended = tokenizer.encode(f"\n<|im_start|>user\n{FEEDBACK}<|im_end|>\n<|im_start|>assistant\n")
    right = tokenizer.encode(r"\boxed{19}<|im_end|>")
    assert example.token_ids == question + sampled + appended + right
    assert example.loss_mask == [False] * (len(example.token_ids) - 6) + [True] * 6


@given(number=st.integers(-20, 40), seed=st.integers())
def test_wrong_answers_are_wrong(number: int, seed: int) -> None:
    """A generated wrong answer never equals the right one."""
    assert wrong_answer(str(number), ["-4", "7", "19"], random.Random(seed)) != str(number)


def test_held_out_problems_are_refused_and_never_taught(tmp_path: Path) -> None:
    """Problems used for training cannot measure the policy."""
    held_out = TRAIN.model_copy(update={"split": "held-out"})
    with pytest.raises(ValueError, match="held-out"):
        make_policy(TINY, held_out, FEEDBACK, 1, tmp_path)
    assert not {p.prompt for p in generate(TRAIN)} & {p.prompt for p in generate(held_out)}


def test_teaching_lowers_the_loss(taught: tuple[Path, dict[str, float], list[float]]) -> None:
    """The steps lower the loss, and the metrics report the last step."""
    _, metrics, losses = taught
    assert len(losses) == metrics["steps"] == TINY.steps
    assert losses[-1] < 0.8 * losses[0]
    assert metrics["loss"] == losses[-1]
    assert metrics["seconds"] > 0


def test_teaching_ends_at_the_target(tmp_path: Path) -> None:
    """Training stops early at the target accuracy, so that PPO has something left to teach."""
    knobs = TINY.model_copy(update={"target_accuracy": 1e-9, "steps": 100})
    assert make_policy(knobs, TRAIN, FEEDBACK, 1, tmp_path)["steps"] < 50


def test_loss_and_accuracy_by_hand() -> None:
    """A model with probability 1/4 for each of 4 tokens has loss log 4; a two-token answer is right once in 16."""

    def model(input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 4))

    ids, mask = torch.tensor([[0, 1, 2, 3], [0, 1, 3, 0]]), torch.tensor([[0, 0, 1, 1], [0, 0, 1, 0]], dtype=torch.bool)
    loss, right = _loss(cast(Qwen3ForCausalLM, model), [Rows(ids, mask)])
    assert loss.item() == pytest.approx(math.log(4))
    assert right.item() == pytest.approx((1 / 16 + 1 / 4) / 2)
    direct, called = Rows(ids[:1], mask[:1], weight=2.0), Rows(ids[1:], mask[1:], weight=2.0)
    loss, right = _loss(cast(Qwen3ForCausalLM, model), [direct, called])  # two ways to solve a problem
    assert loss.item() == pytest.approx(math.log(4))
    assert right.item() == pytest.approx(1 / 16 + 1 / 4)


def test_same_seed_same_weights_other_seed_others(taught: tuple[Path, object, object], tmp_path: Path) -> None:
    """A warm start is reproducible, whatever the state of torch's global generator."""
    torch.manual_seed(99)
    make_policy(TINY, TRAIN, FEEDBACK, 1, tmp_path / "again")
    make_policy(TINY, TRAIN, FEEDBACK, 2, tmp_path / "other")
    weights = [
        (folder / "model.safetensors").read_bytes() for folder in (taught[0], tmp_path / "again", tmp_path / "other")
    ]
    assert weights[0] == weights[1] != weights[2]


def test_saved_model_is_untied_and_knows_where_to_stop(taught: tuple[Path, dict[str, float], object]) -> None:
    """The server reloads only untied embeddings correctly, and stops at the end of a turn."""
    folder, metrics, _ = taught
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert model.config.max_position_embeddings == 512
    assert model.num_parameters() == metrics["parameters"]
