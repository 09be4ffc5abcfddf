"""Policy version 0: a tiny Qwen3, taught arithmetic by supervised steps."""

from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from configs.policy import WarmStart
from configs.problems import ArithmeticSource
from tasks.problems.arithmetic import generate
from tasks.warm_start.batches import Rows, batches
from tasks.warm_start.policy_sizes import tiny_sizes
from tasks.warm_start.tokenizer import build_tokenizer, taught_texts

LR = 1e-3
MAX_POSITIONS = 512
RISING_STEPS = 20  # steps in which the learning rate rises from zero
SMOOTHING = 0.05  # weight of a new step in the running accuracy: about the last 20 steps count

Progress = Callable[[int, float, float], None]
"""A callback for each step. It gets the step's number, from 1, its loss in nats per token, and the running accuracy."""


def make_policy(
    warm_start: WarmStart,
    source: ArithmeticSource,
    feedback: str,
    seed: int,
    folder: Path,
    threads: int = 2,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Make a tokenizer and a Qwen3, teach it the problems of `source` and save both in `folder`.

    `source` is a train split; `feedback` is the feedback after a wrong answer. transformers and vLLM can load the
    folder. The same arguments on the same machine give the same weights. Set the process's number of torch threads to
    `threads`.

    Returns:
        the number of `steps`, the `loss` (nats per token) of the last step, the running `accuracy` on the taught
        problems, the `seconds` of teaching, and the number of `parameters`.

    Raises:
        ValueError: `source` is the held-out split.
    """
    if source.split != "train":
        raise ValueError(f"a policy taught on split={source.split!r} could not be evaluated on it: use 'train'")
    torch.set_num_threads(threads)
    problems = generate(source)
    tokenizer = build_tokenizer(taught_texts(problems, feedback), calculator=bool(warm_start.tool_share))
    model = _make_model(warm_start, tokenizer, seed)
    start = perf_counter()
    metrics = _teach(model, batches(problems, tokenizer, warm_start, feedback, seed), warm_start, progress)
    metrics |= {"seconds": perf_counter() - start, "parameters": float(model.num_parameters())}
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return metrics


def _make_model(knobs: WarmStart, tokenizer: PreTrainedTokenizerBase, seed: int) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        **tiny_sizes(knobs, len(tokenizer)),
        max_position_embeddings=MAX_POSITIONS,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def _teach(
    model: Qwen3ForCausalLM, data: Iterator[list[Rows]], knobs: WarmStart, progress: Progress | None
) -> dict[str, float]:
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
        if progress:
            progress(step, loss_value, accuracy)
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
