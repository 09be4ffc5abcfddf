"""Makes the tiny policies of this package: Qwen3 models, taught by supervised steps on conversations like an agent's.

    python -m tests.experiments.teach demo FOLDER     make `math-mt-ppo/demo` anew: one or two minutes on two cores

The policies in `configs/policies` were made so. Another processor rounds differently, so its weights differ.
"""

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from configs.problems import ArithmeticSource
from storage.records import Problem
from tasks.agents.math_multi_turn import WRONG_FEEDBACK
from tasks.problems.generated import generate
from tests.support.tiny_tokenizer import build_tokenizer, taught_texts

LR = 1e-3
MAX_POSITIONS, HEAD_SIZE = 512, 32
RISING_STEPS = 20  # steps in which the learning rate rises from zero
SMOOTHING = 0.05  # weight of a new step in the running accuracy: about the last 20 steps count
BATCH_SIZE = 64
MISTAKES = 4  # two-turn examples of one problem, each with its own wrong answer

Message = dict[str, Any]
Tools = Sequence[dict[str, Any]]
CALCULATOR: Tools = [{"type": "function", "function": {"name": "calculator"}}]


@dataclass(frozen=True, slots=True)
class WarmStart:
    """How a policy is taught.

    `target_accuracy` is the mean probability of a whole right answer at which teaching stops. In `two_turn_share` of
    the examples a second turn corrects a wrong first answer. In `tool_share` of the examples of a lesson with tools a
    call of the calculator gives the answer, whatever the problem: the policy learns how a call looks, but not when it
    pays.
    """

    hidden_size: int = 128
    layers: int = 3
    steps: int = 1000
    target_accuracy: float = 0.45
    two_turn_share: float = 0.25
    tool_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Lesson:
    """What is taught, in the way that an agent will ask."""

    source: ArithmeticSource
    feedback: str = WRONG_FEEDBACK  # after a wrong answer
    tools: bool = False  # whether the agent offers a calculator


SMALL = ArithmeticSource(kind="arithmetic")
DIGITS, LARGE = SMALL.model_copy(update={"high": 9}), ArithmeticSource(kind="arithmetic", low=100, high=999, count=8000)
RECIPES = {
    "smoke": (WarmStart(hidden_size=64, layers=1, steps=20), [Lesson(DIGITS)]),
    "demo": (WarmStart(), [Lesson(SMALL)]),
    # The nights of `make retrain-demo` can improve it clearly.
    "retrain": (WarmStart(target_accuracy=0.3), [Lesson(SMALL)]),
    "demo-tools": (
        WarmStart(steps=1500, target_accuracy=0.26, two_turn_share=0.0, tool_share=0.3),
        [Lesson(LARGE, tools=True)],
    ),
    "demo-mix": (
        WarmStart(steps=2000, target_accuracy=0.4, tool_share=0.3),
        [Lesson(SMALL), Lesson(LARGE, tools=True)],
    ),
}
"""How each policy in `configs/policies` was taught, with seed 1 and two threads."""


Example = tuple[list[int], list[bool]]
"""The tokens of a conversation that ends with the right answer, and what of them is taught.

Taught are the right answer, a call before it, and their `<|im_end|>`: the tokens from `\\boxed` on in
`<|im_start|>user\\nWhat is 1 + 1?<|im_end|>\\n<|im_start|>assistant\\n\\boxed{2}<|im_end|>`.
"""


class Rows(NamedTuple):
    """Encoded examples of one kind."""

    token_ids: Int[Tensor, "rows tokens"]  # padded at the right
    loss_mask: Bool[Tensor, "rows tokens"]
    weight: float = 1.0  # of a row in the accuracy


def make_policy(
    warm_start: WarmStart, lessons: Sequence[Lesson], seed: int, folder: Path, threads: int = 2
) -> dict[str, float]:
    """Make a tokenizer and a Qwen3, teach it the problems of the lessons and save both in `folder`.

    Their sources are train splits. transformers and vLLM can load the folder. The same arguments on the same machine
    give the same weights. Set the process's number of torch threads to `threads`.

    Returns:
        the number of `steps`, the `loss` (nats per token) of the last step, and the running `accuracy` on the taught
        problems.
    """
    assert all(lesson.source.split == "train" for lesson in lessons)  # else nothing would be left to evaluate on
    torch.set_num_threads(threads)
    taught = [(lesson, generate(lesson.source)) for lesson in lessons]
    texts = [text for lesson, problems in taught for text in taught_texts(problems, lesson.feedback)]
    tokenizer = build_tokenizer(texts, calculator=bool(warm_start.tool_share))
    heads = warm_start.hidden_size // HEAD_SIZE
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=warm_start.hidden_size,
        intermediate_size=3 * warm_start.hidden_size,
        num_hidden_layers=warm_start.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=HEAD_SIZE,
        tie_word_embeddings=False,  # vLLM's CPU backend does not update a tied output layer when weights are reloaded
        max_position_embeddings=MAX_POSITIONS,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    metrics = _teach(model, batches(taught, tokenizer, warm_start, seed), warm_start)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return metrics


def _teach(model: Qwen3ForCausalLM, data: Iterator[list[Rows]], knobs: WarmStart) -> dict[str, float]:
    """Train until the running accuracy on the taught problems reaches the target, or for `steps` steps.

    Seeds learn at very different speeds: after a fixed number of steps one would be at 15 % and another at 60 %. The
    accuracy is measured on the taught problems only, never on a held-out problem.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    step, loss_value, accuracy = 0, float("nan"), 0.0
    model.train()
    while step < knobs.steps and accuracy < knobs.target_accuracy:
        step += 1
        optimizer.param_groups[0]["lr"] = LR * min(1.0, step / RISING_STEPS)
        loss, right = _loss(model, next(data))
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss_value, accuracy = loss.item(), accuracy + SMOOTHING * (right.item() - accuracy)
    return {"steps": float(step), "loss": loss_value, "accuracy": accuracy}


def _loss(model: Qwen3ForCausalLM, batch: list[Rows]) -> tuple[Tensor, Tensor]:
    """Compute the mean cross-entropy of the taught tokens, and the mean probability of a whole right answer.

    The latter is the expected accuracy of sampling at temperature 1. Padding is at the right, so causal attention does
    not read it.
    """
    answer_losses, right, tokens = [], [], 0
    for ids, mask, weight in batch:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]  # [B, T-1, V]
        taught = mask[:, 1:]
        token_losses = cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        answer_losses.append((token_losses * taught).sum(dim=1))  # [B], nats
        right.append(weight * (-answer_losses[-1].detach()).exp())
        tokens += int(taught.sum())
    return torch.cat(answer_losses).sum() / tokens, torch.cat(right).mean()


def batches(
    taught: Sequence[tuple[Lesson, Sequence[Problem]]], tokenizer: PreTrainedTokenizerBase, knobs: WarmStart, seed: int
) -> Iterator[list[Rows]]:
    """Draw batches without end, in equal parts from all lessons, given with their problems.

    The kinds of rows are separate tensors: in one tensor half of the batch would be padding.
    """
    rng, size = random.Random(seed), max(1, BATCH_SIZE // len(taught))
    pools = [pool for lesson, problems in taught for pool in _pools(lesson, problems, tokenizer, knobs, size, rng)]
    generator = torch.Generator().manual_seed(seed)
    while True:
        drawn = [(pool, torch.randint(len(pool.token_ids), (size,), generator=generator)) for size, pool in pools]
        yield [Rows(pool.token_ids[rows], pool.loss_mask[rows], pool.weight) for pool, rows in drawn]


def _pools(
    lesson: Lesson,
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    knobs: WarmStart,
    rows: int,
    rng: random.Random,
) -> list[tuple[int, Rows]]:
    """Return the rows of a lesson by kind, and how many of each are in a batch, together `rows`.

    The kinds are one-turn rows, and shares of two-turn rows and of rows with a call. A problem is solved with a call or
    without one: the probabilities of these two kinds add up, so their weights do not depend on their shares.
    """
    tools, feedback = CALCULATOR if lesson.tools else (), lesson.feedback
    answers = sorted({problem.solutions[0] for problem in problems})
    corrected = round(knobs.two_turn_share * rows)
    solved = rows - corrected
    called = min(solved, round(knobs.tool_share * rows)) if lesson.tools else 0
    direct = solved - called
    pairs = [(problem.prompt, problem.solutions[0]) for problem in problems]
    talks = [_talk(prompt, _boxed(right)) for prompt, right in pairs]
    kinds = [(direct, solved / max(1, direct), [_example(tokenizer, talk, [1], tools) for talk in talks])]
    if corrected:
        talks = [
            _talk(prompt, _boxed(wrong_answer(right, answers, rng)), feedback, _boxed(right))
            for prompt, right in pairs
            for _ in range(MISTAKES)
        ]
        kinds.append((corrected, 1.0, [_example(tokenizer, talk, [3], tools) for talk in talks]))
    if called:
        kinds.append((called, solved / called, [with_call(tokenizer, problem) for problem in problems]))
    return [(size, _rows(examples, weight, tokenizer.pad_token_id)) for size, weight, examples in kinds if size]


def _rows(examples: Sequence[Example], weight: float, pad_id: int) -> Rows:
    ids, masks = ([torch.tensor(column) for column in columns] for columns in zip(*examples, strict=True))
    padded = pad_sequence(ids, batch_first=True, padding_value=pad_id)
    return Rows(padded, pad_sequence(masks, batch_first=True), weight)


def with_call(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> Example:
    """Encode the prompt, a call of the calculator, its result and the right answer. The result is not in the loss."""
    solution = problem.solutions[0]
    function = {
        "name": "calculator",
        "arguments": {"expression": problem.prompt.removeprefix("What is ").removesuffix("?")},
    }
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    result, answer = {"role": "tool", "content": solution}, {"role": "assistant", "content": _boxed(solution)}
    messages = [*_talk(problem.prompt), call, result, answer]
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
    """Encode a conversation; of its messages, `taught` has the indices of those in the loss."""

    def render(shown: list[Message], *, answer_follows: bool) -> list[int]:
        ids = tokenizer.apply_chat_template(
            shown, tools=list(tools) or None, add_generation_prompt=answer_follows, return_dict=False
        )
        return cast(list[int], ids)

    ids, end = render(messages, answer_follows=False), 0
    mask = [False] * len(ids)
    for index in taught:
        start = len(render(messages[:index], answer_follows=True))
        end = ids.index(tokenizer.eos_token_id, start) + 1
        mask[start:end] = [True] * (end - start)
    return ids[:end], mask[:end]  # a policy does not sample what the template writes after a turn's end


def _talk(*texts: str) -> list[Message]:
    """Make messages of the user and the policy in turns."""
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


def _boxed(number: str) -> str:
    return rf"\boxed{{{number}}}"


if __name__ == "__main__":
    print(make_policy(*RECIPES[sys.argv[1]], 1, Path(sys.argv[2])))
