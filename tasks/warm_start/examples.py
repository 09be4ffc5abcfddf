"""Supervised conversations, encoded as the agent will encode them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from transformers import PreTrainedTokenizerBase

from storage.records import Problem

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Example:
    r"""One conversation of T tokens that ends with the right answer.

    Example: `<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n\boxed{2}<|im_end|>`, with
    the mask true on `\boxed`, `{`, `2`, `}` and `<|im_end|>`.
    """

    token_ids: list[int]  # T
    loss_mask: list[bool]  # T, true on the right answer and the <|im_end|> after it


def one_turn(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> Example:
    """Encode the prompt and the right answer."""
    return _example(tokenizer, [_user(problem.prompt), _answer(problem.solutions[0])])


def two_turn(tokenizer: PreTrainedTokenizerBase, problem: Problem, wrong: str, feedback: str) -> Example:
    """Encode the prompt, a wrong answer, the feedback and the right answer. Only the right answer is in the loss."""
    return _example(
        tokenizer,
        [_user(problem.prompt), _answer(wrong), _user(feedback), _answer(problem.solutions[0])],
    )


def wrong_answer(solution: str, solutions: Sequence[str], rng: random.Random) -> str:
    """Draw a wrong answer: half the time a number within 3 of the solution, else another problem's solution.

    A policy makes mistakes of both kinds.
    """
    near = [str(int(solution) + offset) for offset in range(-3, 4)]
    candidates = near if rng.random() < 0.5 else solutions
    return rng.choice([answer for answer in candidates if answer != solution])


def _example(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> Example:
    context = _render(tokenizer, messages[:-1], add_generation_prompt=True)
    ids = _render(tokenizer, messages, add_generation_prompt=False)
    while ids[-1] != tokenizer.eos_token_id:  # a policy does not sample what the template writes after a turn's end
        ids.pop()
    return Example(ids, [position >= len(context) for position in range(len(ids))])


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[Message], add_generation_prompt: bool) -> list[int]:
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, return_dict=False)
    return cast(list[int], ids)


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _answer(number: str) -> Message:
    return {"role": "assistant", "content": rf"\boxed{{{number}}}"}
