"""One optimizer step on a minibatch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from tasks.train.batches import Columns, MicroBatch, Minibatch
from tasks.train.components import Component, LossInputs, Normaliser, checked
from tasks.train.mesh import Mesh
from tasks.train.passes import action_logprobs, hidden_states, predicting, refuse_broken
from tasks.train.samples import Sample
from tasks.train.sharding import reduce_gradients, whole, within
from tasks.train.train_state import Critic, TrainState

OfTokens = dict[str, Tensor]
"""The numbers of training passes for their A tokens in the loss, by name: tensors [A] of float64.

`samples` (the index of the token's sample), `sampled`, `behaviour`, `proximal`, `logp`, `entropy`, `loss` (the token's
part of the minibatch's loss, of all components but the critic's), `gradient` (of the minibatch's loss by the token's
logprob) and the metrics of the components' `LossOutputs`, which are 0 where a token does not
have the component; with a reference policy `reference`, with a critic `value_loss`.
"""


def gathered(passes: Sequence[OfTokens], mesh: Mesh) -> OfTokens:
    """Join the results of a minibatch's passes, of all ranks."""
    own = [torch.cat([columns[name] for columns in passes]) for name in passes[0]]
    return dict(zip(passes[0], mesh.gather(torch.stack(own)), strict=True))


Terms = Mapping[str, Component]
"""The components in a minibatch, whose normalisers are numbers, those of the whole minibatch."""
_OF_LARGEST = 1e-3
"""If the gradient is not finite, the trajectories with this share of the largest gradient of a token are named."""


def terms_of(
    components: Mapping[str, Component], samples: Sequence[Sample], columns: Sequence[Columns], indices: Sequence[int]
) -> Terms:
    """Replace the normaliser of each component by its number for the samples at `indices`."""

    def normaliser(name: str, per: Normaliser) -> float:
        if isinstance(per, float | int):
            return float(per)
        counts = [np.count_nonzero(columns[index].weights[name][samples[index].in_loss]) for index in indices]
        if name == "ce":
            counts = [n + len(columns[index].observations) for n, index in zip(counts, indices, strict=True)]
        return float(max(1, sum(counts) if per == "tokens" else np.count_nonzero(counts)))

    return {name: replace(each, per=normaliser(name, each.per)) for name, each in components.items()}


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one minibatch."""

    result: OfTokens
    grad_norm: float  # of the policy and a value head on it, before clipping
    early_stopped: bool  # the policy was not changed
    tokens: int  # in the sequences that were trained on
    computed_tokens: int  # in the forward passes without padding: fewer if sequences share their beginnings
    padded_tokens: int  # in the forward passes, with padding


def take_step(state: TrainState, minibatch: Minibatch, samples: Sequence[Sample], terms: Terms, version: int) -> Step:
    """Take one step of the policy and one of the critic; an early stop skips the policy and a value head on it.

    Gradients are summed over the micro-batches and the ranks. The normalisers in `terms` are those of the whole
    minibatch, so padding, the cut into micro-batches, the number of ranks and the order of rows do not matter.

    Args:
        state: the state that the step changes.
        minibatch: this rank's micro-batches, of which all ranks have equally many.
        samples: all samples, of which error messages name some.
        terms: the components of the loss.
        version: policy version before the update, which decides the learning rates.

    Raises:
        ValueError: a loss or gradient is not finite; nothing was changed.
    """
    critic, mesh = state.critic, state.mesh
    state.adamw.zero_grad(set_to_none=True)
    if critic and critic.adamw:
        critic.adamw.zero_grad(set_to_none=True)
    counts = [
        [sum(batch.lengths), batch.computed, batch.rows.tokens.numel() if batch.lengths else 0] for batch in minibatch
    ]
    tokens, computed, padded = mesh.total(torch.tensor(counts).sum(0)).tolist()
    passes = list[OfTokens]()
    for batch in minibatch:
        reduce_gradients(state.modules, last=batch is minibatch[-1])
        passes.append(_accumulate(state, batch, terms))
    result = gathered(passes, mesh)
    # Checked first: a ratio that overflows must not end the run.
    limit = state.algorithm.early_stop
    too_far = limit is not None and result["ratio"].mean().item() > limit
    stopped = bool(state.mesh.total(torch.tensor(int(too_far))))
    if not stopped:
        _refuse_not_finite("losses", samples, result, result["loss"])
    if critic:
        _refuse_not_finite("value losses", samples, result, result["value_loss"])
    own = critic.parameters() if critic and critic.own is not None else []
    head = critic.parameters() if critic and critic.own is None else []
    shared = [*state.model.parameters(), *head]
    gradients = ([each.grad for each in parameters if each.grad is not None] for parameters in (shared, own))
    norm, own_norm = (state.mesh.as_first(whole(get_total_norm(each))) for each in gradients)
    size = result["gradient"].abs().nan_to_num(torch.inf)
    for each in (own_norm,) if stopped else (norm, own_norm):
        _refuse_not_finite("gradients", samples, result, each.cpu().where(size >= _OF_LARGEST * size.max(), 0.0))
    state.steps += 1
    if not stopped:
        _apply(state, state.adamw, shared, norm, version)
    if critic and critic.adamw:
        _apply(state, critic.adamw, own, own_norm, version)
    return Step(result, norm.item(), stopped, tokens, computed, padded)


def _apply(
    state: TrainState, adamw: torch.optim.AdamW, parameters: Sequence[nn.Parameter], norm: Tensor, version: int
) -> None:
    clip_grads_with_norm_(parameters, state.config.optimizer.max_grad_norm, norm)
    for group in adamw.param_groups:
        group["lr"] = state.learning_rate(group["part"], version)
    adamw.step()


def _accumulate(state: TrainState, batch: MicroBatch, terms: Terms) -> OfTokens:
    """Add the gradients of the micro-batch's loss."""
    critic, model = state.critic, state.model
    read = partial(action_logprobs, model, batch.rows, batch.places, state.config.sampling.temperature)
    with state.precision():
        states, logp, entropy = within(model, lambda: read(entropy_gradient=state.algorithm.entropy_gradient))
    # None: the weights have not changed since the update began, so this pass gives the proximal logprobs.
    proximal = logp.detach() if batch.proximal is None else batch.proximal
    given = batch.behaviour, proximal, batch.advantages, batch.sequences, batch.reference
    inputs = LossInputs(logp, entropy, *given)
    columns = {"samples": batch.samples, "sampled": batch.sampled, "behaviour": batch.behaviour}
    columns |= {"proximal": proximal, "logp": logp, "entropy": entropy, "loss": torch.zeros_like(logp)}
    if batch.reference is not None:
        columns["reference"] = batch.reference
    total, last = logp.new_zeros(()), "value" if critic and critic.own is not None else None
    for name, term in terms.items():
        if name != last:
            if name == "value":
                inputs = _with_values(critic, inputs, states, batch)
            total = total + _add(columns, name, term, inputs, batch.weights[name])
    logp.retain_grad()
    total.backward()
    columns["gradient"] = torch.zeros_like(logp) if logp.grad is None else logp.grad
    if critic and critic.own is not None:  # after the policy's backward pass, which frees its memory
        own = critic.own
        with state.precision():
            states = within(own, lambda: predicting(hidden_states(own, batch.rows), batch.places))
        inputs = _with_values(critic, inputs, states, batch)
        _add(columns, "value", terms["value"], inputs, batch.weights["value"]).backward()
    return {name: values.detach().double() for name, values in columns.items()}


def _add(columns: OfTokens, name: str, term: Component, inputs: LossInputs, weights: Tensor) -> Tensor:
    """Add the numbers of a component to `columns`, and return its part of the minibatch's loss."""
    has_it = weights != 0
    given = inputs if has_it.all() else inputs.of(has_it)
    outputs = checked(term.loss(given), given, name)
    loss = term.coefficient * _spread(weights[has_it] * outputs.loss, has_it)
    if name == "value":
        columns["value_loss"] = _spread(outputs.loss, has_it)
    else:
        columns["loss"] = columns["loss"] + loss.detach() / term.per
    columns |= {key: _spread(values, has_it) for key, values in outputs.metrics.items()}
    total: Tensor = loss.sum() / term.per
    return total


def _with_values(
    critic: Critic | None, inputs: LossInputs, states: Float[Tensor, "actions width"], batch: MicroBatch
) -> LossInputs:
    assert critic
    return inputs._replace(values=critic.read(states), old_values=batch.values, returns=batch.returns)


def _spread(values: Tensor, has_it: Bool[Tensor, " tokens"]) -> Shaped[Tensor, " tokens"]:
    """Put values of some tokens in their places among all; the others have 0."""
    if len(values) == len(has_it):
        return values
    return torch.zeros(has_it.shape, dtype=torch.float32, device=has_it.device).masked_scatter(has_it, values.float())


def _refuse_not_finite(quantity: str, samples: Sequence[Sample], result: OfTokens, values: Tensor) -> None:
    """Raise ValueError if a value [A] of an action token is NaN or infinite."""
    indices = result["samples"][~torch.isfinite(values)].int().tolist()
    refuse_broken(quantity, samples, indices, "the step was not taken")
