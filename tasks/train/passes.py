"""Logprobs of action tokens, and passes over the samples without gradient.

Logprobs are computed without the logits of all tokens in memory at once. A pass computes one number (logprob, value)
for each action token.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from storage.errors import first_few
from tasks.train.batches import Batching, Places, Rows, arrange, cut, find_places, pieces
from tasks.train.experts import give_experts
from tasks.train.samples import Logprobs, Tokens
from tasks.train.sharding import within

CHUNK_TOKENS = 4096
"""Number of action tokens whose logits over the whole vocabulary are in memory at one time."""
_FROZEN_TOKENS = 128
"""Number of them for a frozen output layer on a CPU: logits of so few tokens stay in the processor's cache."""
TokenScorer = Callable[[Rows, Places], Float[Tensor, " actions"]]
"""A function of tokens and A places in them; it returns one number for each place."""


def action_logprobs(
    model: PreTrainedModel, rows: Rows, places: Places, temperature: float, *, entropy_gradient: bool = False
) -> tuple[Float[Tensor, "actions width"], Float[Tensor, " actions"], Float[Tensor, " actions"]]:
    """Compute each action token's logprob under the model, and the entropy of the model's distribution there.

    The logprobs equal `log_softmax(model(tokens).logits / temperature)` at the action tokens, in float32.

    Args:
        model: a model with an output layer on top of `base_model`.
        rows: the tokens [B, T].
        places: A action tokens in them.
        temperature: divides the logits, as in sampling.
        entropy_gradient: whether the entropies have a gradient.

    Returns:
        the hidden states [A, H] that predict the tokens, logprobs [A] float32, and entropies [A] float32 in nats.
    """
    states, targets = predicting(hidden_states(model, rows), places), rows.tokens[places.rows, places.columns]
    head = model.get_output_embeddings()
    return states, *read_out(head, states, targets, temperature, entropy_gradient=entropy_gradient)


def logprob_scorer(model: PreTrainedModel, temperature: float) -> TokenScorer:
    """Return the function that computes the logprobs of tokens under a model, which ranks may share."""
    return lambda rows, places: within(model, lambda: action_logprobs(model, rows, places, temperature)[1])


def hidden_states(
    model: PreTrainedModel, rows: Rows, *, with_last: bool = False
) -> Float[Tensor, "rows columns width"]:
    """Compute the last hidden states [B, T - 1, H] of tokens [B, T]; `with_last` also of the last column: [B, T, H].

    A padded batch may be wider than the model's context: `with_last` leaves out the columns beyond it.

    Padded tokens need no attention mask: the padding is to the right of all tokens, and causal attention only reads to
    the left. Trees have a mask.
    """
    context = None if rows.positions is not None else getattr(model.config, "max_position_embeddings", None)
    end = context if with_last else -1
    give_experts(model, None if rows.experts is None else rows.experts[:, :end])
    outputs = model.base_model(
        input_ids=rows.tokens[:, :end],
        position_ids=None if rows.positions is None else rows.positions[:, :end],
        attention_mask=None if rows.mask is None else rows.mask[:, :, :end, :end],
        use_cache=False,
    )
    states: Tensor = outputs.last_hidden_state
    return states


def predicting(hidden: Float[Tensor, "rows columns width"], places: Places) -> Float[Tensor, "actions width"]:
    """Select the states [A, H] that predict the tokens at the places: those of the tokens before them."""
    return hidden.flatten(0, 1).index_select(0, places.rows * hidden.shape[1] + places.before)


def read_out(
    head: nn.Module,
    states: Float[Tensor, "actions width"],
    targets: Int[Tensor, " actions"],
    temperature: float,
    *,
    entropy_gradient: bool = False,
) -> tuple[Float[Tensor, " actions"], Float[Tensor, " actions"]]:
    """Compute logprobs [A] of `targets` [A] and entropies [A] from hidden states [A, H], `CHUNK_TOKENS` at a time.

    The backward pass recomputes each chunk's logits, so memory never holds the logits of more than one chunk; that of
    a frozen output layer under autocast on a CPU needs none (`_OfFrozenHead`). Changes that a model makes to its logits
    after the output layer (soft-capping, scaling) are not applied; the canary shows the difference.
    """

    def read(states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = output_logits(head, states)  # [A, V]
        if temperature != 1:
            logits = logits.div_(temperature)  # in place: new memory costs more than the division
        logprobs = logits.log_softmax(-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            probabilities = logprobs.exp()
            grad = torch.is_grad_enabled()
            entropy = -(probabilities * logprobs if grad else probabilities.mul_(logprobs)).sum(-1)
        return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy

    frozen = type(head) is nn.Linear and not head.weight.requires_grad and not entropy_gradient
    if frozen and states.device.type == "cpu" and _rounds(head, states):
        both: tuple[Tensor, Tensor] = _OfFrozenHead.apply(states, head, targets, temperature)  # type: ignore[no-untyped-call]
        return both
    if len(targets) <= CHUNK_TOKENS:
        return read(states, targets)
    chunks = zip(states.split(CHUNK_TOKENS), targets.split(CHUNK_TOKENS), strict=True)
    parts = [checkpoint(read, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return torch.cat([logp for logp, _ in parts]), torch.cat([entropy for _, entropy in parts])


class _OfFrozenHead(torch.autograd.Function):
    """Logprobs [A] and entropies [A] of an output layer without gradient, such as that of an adapter's base.

    A logprob's gradient by its state is `(W[target] - p W) / temperature`, where p are the probabilities of all tokens.
    The forward pass computes it while it has p, in bfloat16, so neither pass keeps or recomputes logits.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, head: nn.Linear, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        weight, found, learns = head.weight.detach(), list[tuple[Tensor, ...]](), ctx.needs_input_grad[0]
        factor = weight.bfloat16() if learns else weight
        # New memory for each chunk would cost more than the numbers.
        buffer = torch.empty(min(_FROZEN_TOKENS, len(states)), len(weight))
        for state, target in zip(states.split(_FROZEN_TOKENS), targets.split(_FROZEN_TOKENS), strict=True):
            logits = output_logits(head, state).div_(temperature)
            logits.sub_(logits.amax(-1, keepdim=True))
            chosen, probabilities = logits.gather(-1, target[:, None]), torch.exp(logits, out=buffer[: len(target)])
            total = probabilities.sum(-1, keepdim=True)
            gradient = state.new_empty(0)
            if learns:
                mean = (probabilities.bfloat16() @ factor).float().div_(total)
                gradient = weight.index_select(0, target).sub_(mean).div_(temperature)
            entropy = total.log() - probabilities.mul_(logits).sum(-1, keepdim=True) / total
            found.append((chosen - total.log(), entropy, gradient))
        logprobs, entropies, gradients = (torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.save_for_backward(gradients)
        ctx.format = states.dtype
        ctx.mark_non_differentiable(entropies)
        return logprobs.squeeze(-1), entropies.squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.saved_tensors[0].mul(gradient[:, None]).to(ctx.format), None, None, None


def _rounds(head: nn.Module, states: Tensor) -> bool:
    return torch.is_autocast_enabled(states.device.type) and getattr(head, "rounds_factors", False)


def output_logits(head: nn.Module, states: Float[Tensor, "actions width"]) -> Float[Tensor, "actions vocabulary"]:
    """Compute logits [A, V] from hidden states [A, H], in the format of the head's weights also under autocast.

    In training these are float32: large logits in bfloat16 have errors of 0.03. `float32_logits` rounds factors.
    """
    rounded = _rounds(head, states)
    with torch.autocast(states.device.type, enabled=False):
        weight: Tensor = head.weight  # type: ignore[assignment]
        if rounded:
            return float32_logits(states.float(), weight)
        logits: Tensor = head(states.to(weight.dtype)).float()
    return logits


def float32_logits(states: Float[Tensor, "actions width"], weight: Float[Tensor, "vocabulary width"]) -> Tensor:
    """Compute `states weight^T` in float32 from rounded factors: to 10 bits on a GPU (TF32), to bfloat16's 7 on a CPU.

    For hidden states that have the errors of bfloat16, as do the weights of the server. With AMX a CPU is twice as fast
    as in float32; one that does not multiply in bfloat16 does not round.
    """
    logits: Tensor = _OfRoundedFactors.apply(states, weight)  # type: ignore[no-untyped-call]
    return logits


class _OfRoundedFactors(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(states, weight)
        with _rounding(states.device):
            return states @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        states, weight = ctx.saved_tensors
        of_states, of_weight = ctx.needs_input_grad  # the weight of an adapter's base has none
        with _rounding(states.device):
            return gradient @ weight if of_states else None, gradient.t() @ states if of_weight else None


@contextmanager
def _rounding(device: torch.device) -> Iterator[None]:
    """Allow rounded factors here only: elsewhere it would round positions in rotations, and the canary."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if device.type == "cpu" else "high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@torch.no_grad()
def score_action_tokens(
    scorer: TokenScorer, samples: Sequence[Tokens], indices: Iterable[int], batching: Batching
) -> dict[int, Logprobs]:
    """Compute the numbers of all A action tokens of each sample at `indices`; return an array [A] for each index.

    Each rank computes those of its passes, and gets those of all.
    """
    scores = {index: np.zeros(len(samples[index].actions), np.float32) for index in indices}
    for segments in cut(samples, pieces(samples, scores), batching):
        scored = [piece for segment in segments for piece in segment.pieces]
        positions = [samples[piece.sample].actions[piece.actions] - piece.start for piece in scored]
        numbers = scorer(arrange(segments, batching), find_places(segments, positions, batching)).cpu().numpy()
        ends = np.cumsum([0, *map(len, positions)])
        for piece, start, end in zip(scored, ends, ends[1:], strict=False):
            scores[piece.sample][piece.actions] = numbers[start:end]
    if batching.mesh.size == 1 or not scores:
        return scores
    # A number is 0 in the ranks that did not compute it: adding 0 changes no number.
    joined = batching.mesh.total(torch.from_numpy(np.concatenate([*scores.values()]))).numpy()
    ends = np.cumsum([len(of_sample) for of_sample in scores.values()])
    return dict(zip(scores, np.split(joined, ends[:-1]), strict=True))


def refuse_broken(
    quantity: str,
    samples: Sequence[Tokens],
    indices: Iterable[int],
    consequence: str = "nothing was trained",
    by: str = "",
) -> None:
    """Raise ValueError if a sample has NaN or infinite numbers; `indices` are those of all such samples.

    `by` is what the numbers come from, if not from models and rows.
    """
    ids = sorted({samples[index].trajectory_id for index in indices})
    if ids and by:
        raise ValueError(f"{by} gave NaN or infinite {quantity} to the trajectories {first_few(ids, 5)}: {consequence}")
    if ids:
        raise ValueError(
            f"NaN or infinite {quantity} with the trajectories {first_few(ids, 5)}: {consequence}. Check these rows. "
            "The run continues with a lower optimizer.lr, or without them: write their ids to a file, exclude them by "
            "`python -m tasks.provenance exclude --ids FILE --reason …`, and name what it prints in problems.exclusions"
        )


def broken(arrays: Iterable[tuple[int, np.ndarray]]) -> list[int]:
    """List the indices of the arrays that hold NaN or an infinity."""
    return [index for index, array in arrays if not np.isfinite(array).all()]


def mean_kl(
    policy: PreTrainedModel, other: PreTrainedModel, samples: Sequence[Tokens], temperature: float, batching: Batching
) -> float:
    """Compute the mean KL(policy ‖ other) of the next-token distributions at the action tokens, in nats.

    Each KL is a sum over the whole vocabulary, so it is also right if neither policy sampled the tokens.

    Args:
        policy: one policy.
        other: another one with the same vocabulary, which the same ranks share.
        samples: 1 or more.
        temperature: divides the logits of both policies.
        batching: how passes are cut.
    """

    def vocabulary_logprobs(model: PreTrainedModel, states: Tensor) -> Tensor:
        return (output_logits(model.get_output_embeddings(), states) / temperature).log_softmax(-1)

    def divergences_of(rows: Rows, places: Places) -> Tensor:
        states = [predicting(hidden_states(model, rows), places) for model in (policy, other)]
        kls = []
        for chunk in zip(*(of_model.split(CHUNK_TOKENS) for of_model in states), strict=True):
            p, q = map(vocabulary_logprobs, (policy, other), chunk)
            kls.append((p.exp() * (p - q)).sum(-1))
        return torch.cat(kls)

    def scorer(rows: Rows, places: Places) -> Tensor:
        return within(policy, lambda: within(other, lambda: divergences_of(rows, places)))

    divergences = score_action_tokens(scorer, samples, range(len(samples)), batching)
    return float(np.concatenate([*divergences.values()]).mean(dtype=np.float64))
