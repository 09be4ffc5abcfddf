"""Supervised conversations, encoded as the agent will encode them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from storage.records import Problem
from tasks.problems.arithmetic import expression

Message = dict[str, Any]
Tools = Sequence[dict[str, Any]]
CALCULATOR: Tools = [{"type": "function", "function": {"name": "calculator"}}]


@dataclass(frozen=True, slots=True)
class Example:
    r"""One conversation of T tokens that ends with the right answer.

    Example: `<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n\boxed{2}<|im_end|>`, with
    the mask true on `\boxed`, `{`, `2`, `}` and `<|im_end|>`.
    """

    token_ids: list[int]  # T
    loss_mask: list[bool]  # T, true on what is taught: the right answer, a call before it, and their <|im_end|>


def one_turn(tokenizer: PreTrainedTokenizerBase, problem: Problem, tools: Tools = ()) -> Example:
    """Encode the prompt, which offers `tools`, and the right answer."""
    return _example(tokenizer, [_user(problem.prompt), _answer(problem.solutions[0])], [1], tools)


def two_turn(
    tokenizer: PreTrainedTokenizerBase, problem: Problem, wrong: str, feedback: str, tools: Tools = ()
) -> Example:
    """Encode the prompt, a wrong answer, the feedback and the right answer. Only the right answer is in the loss."""
    messages = [_user(problem.prompt), _answer(wrong), _user(feedback), _answer(problem.solutions[0])]
    return _example(tokenizer, messages, [3], tools)


def with_call(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> Example:
    """Encode the prompt, a call of the calculator, its result and the right answer. The result is not in the loss."""
    solution = problem.solutions[0]
    messages = [_user(problem.prompt), _call(expression(problem.prompt)), _result(solution), _answer(solution)]
    return _example(tokenizer, messages, [1, 3], CALCULATOR)


def wrong_answer(solution: str, solutions: Sequence[str], rng: random.Random) -> str:
    """Draw a wrong answer: half the time a number within 3 of the solution, else another problem's solution.

    A policy makes mistakes of both kinds.
    """
    near = [str(int(solution) + offset) for offset in range(-3, 4)]
    candidates = near if rng.random() < 0.5 else solutions
    return rng.choice([answer for answer in candidates if answer != solution])


def _example(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], taught: Sequence[int], tools: Tools
) -> Example:
    """Encode a conversation; the messages with the indices `taught` are in the loss."""
    ids, end = _render(tokenizer, messages, tools, add_generation_prompt=False), 0
    mask = [False] * len(ids)
    for place in taught:
        start = len(_render(tokenizer, messages[:place], tools, add_generation_prompt=True))
        end = ids.index(tokenizer.eos_token_id, start) + 1
        mask[start:end] = [True] * (end - start)
    return Example(ids[:end], mask[:end])  # a policy does not sample what the template writes after a turn's end


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: Tools, *, add_generation_prompt: bool
) -> list[int]:
    ids = tokenizer.apply_chat_template(
        messages,
        tools=list(tools) or None,
        add_generation_prompt=add_generation_prompt,
        return_dict=False,
    )
    return cast(list[int], ids)


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _answer(number: str) -> Message:
    return {"role": "assistant", "content": rf"\boxed{{{number}}}"}


def _call(text: str) -> Message:
    function = {"name": "calculator", "arguments": {"expression": text}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def _result(text: str) -> Message:
    return {"role": "tool", "content": text}
