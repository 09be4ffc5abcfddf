"""One optimizer step on a minibatch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from configs.train import Optimizer
from tasks.train.batches import MicroBatch, Minibatch
from tasks.train.kl import kl_estimate
from tasks.train.losses import ValueLoss, behaviour_weights, policy_loss, value_loss
from tasks.train.mesh import Mesh
from tasks.train.passes import action_logprobs, hidden_states, predicting, refuse_broken
from tasks.train.samples import Sample
from tasks.train.sharding import reduce_gradients, whole, within
from tasks.train.train_state import Critic, TrainState

OfTokens = dict[str, Tensor]
"""The numbers of training passes for their A action tokens, by name: tensors [A] of float64.

`samples` (the index of the token's sample), `behaviour`, `proximal`, `weight`, `logp`, `entropy`, and those of
`PolicyLoss`; with a reference policy `reference`, with a critic `value_loss` and `value_clipped`.
"""


def gathered(passes: Sequence[OfTokens], mesh: Mesh) -> OfTokens:
    """Join the results of a minibatch's passes, of all ranks."""
    own = [torch.cat([columns[name] for columns in passes]) for name in passes[0]]
    return dict(zip(passes[0], mesh.gather(torch.stack(own)), strict=True))


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one minibatch."""

    result: OfTokens
    grad_norm: float  # of the policy and a value head on it, before clipping
    early_stopped: bool  # the policy was not changed
    tokens: int  # in the sequences that were trained on
    computed_tokens: int  # in the forward passes without padding: fewer if sequences share their beginnings
    padded_tokens: int  # in the forward passes, with padding


class Stepper:
    """Optimizer steps on a train state.

    Args:
        train_state: the state that the steps change.
        optimizer: learning rate and gradient clipping.
        temperature: the temperature at which the tokens were sampled.
    """

    def __init__(self, train_state: TrainState, optimizer: Optimizer, temperature: float) -> None:
        self._train_state, self._knobs, self._temperature = train_state, optimizer, temperature
        self._ppo, self._mesh = train_state.ppo, train_state.mesh

    def take(self, minibatch: Minibatch, samples: Sequence[Sample]) -> Step:
        """Take one step of the policy and one of the critic; an early stop skips the policy and a value head on it.

        Gradients are summed over the micro-batches and the ranks. Each token's loss is divided by N, the number of
        action tokens in the whole minibatch, so padding, the cut into micro-batches, the number of ranks and the order
        of rows do not matter.

        Args:
            minibatch: this rank's micro-batches, of which all ranks have equally many.
            samples: all samples, of which error messages name some.

        Raises:
            ValueError: a loss or gradient is not finite; nothing was changed.
        """
        train_state, critic = self._train_state, self._train_state.critic
        for adamw in train_state.optimizers:
            adamw.zero_grad(set_to_none=True)
        counts = self._mesh.total(torch.tensor([_counts(batch) for batch in minibatch]).sum(0)).tolist()
        actions, tokens, computed, padded = map(int, counts)
        result = gathered([*self._passes(minibatch, actions)], self._mesh)
        # Checked first: a ratio that overflows must not end the run.
        limit = self._ppo.early_stop_imp_ratio
        too_far = limit is not None and result["ratio"].mean().item() > limit
        stopped = bool(self._mesh.total(torch.tensor(int(too_far))))
        if not stopped:
            _refuse_not_finite("losses", samples, result, result["loss"])
        if critic:
            _refuse_not_finite("value losses", samples, result, result["value_loss"])
        own = critic.parameters() if critic and critic.own is not None else []
        head = critic.parameters() if critic and critic.own is None else []
        shared = [*train_state.model.parameters(), *head]
        norm, own_norm = (self._mesh.as_first(_norm(parameters)) for parameters in (shared, own))
        for checked in (own_norm,) if stopped else (norm, own_norm):
            _refuse_not_finite("gradients", samples, result, checked.cpu().expand_as(result["loss"]))
        train_state.steps += 1
        if not stopped:
            self._apply(train_state.adamw, shared, norm)
        if critic and critic.adamw:
            self._apply(critic.adamw, own, own_norm)
        return Step(result, norm.item(), stopped, tokens, computed, padded)

    def _apply(self, adamw: torch.optim.AdamW, parameters: Sequence[nn.Parameter], norm: Tensor) -> None:
        clip_grads_with_norm_(parameters, self._knobs.max_grad_norm, norm)
        for group in adamw.param_groups:
            group["lr"] = group["full_lr"] * warmup(self._knobs, self._train_state.steps)
        adamw.step()

    def _passes(self, minibatch: Minibatch, actions: int) -> Iterator[OfTokens]:
        """Add the gradients of this rank's micro-batches; after the last one they are those of all ranks."""
        for batch in minibatch:
            reduce_gradients(self._train_state.modules, last=batch is minibatch[-1])
            yield self._accumulate(batch, actions)
        if self._mesh.size > 1 and self._mesh.devices is None:
            groups = [group for adamw in self._train_state.optimizers for group in adamw.param_groups]
            gradients = (parameter.grad for group in groups for parameter in group["params"])
            self._mesh.add_up(gradient for gradient in gradients if gradient is not None)

    def _accumulate(self, batch: MicroBatch, actions: int) -> OfTokens:
        """Add the gradients of the micro-batch's loss. `actions` is the number of action tokens in the minibatch."""
        critic, ppo, model = self._train_state.critic, self._ppo, self._train_state.model
        read = partial(action_logprobs, model, batch.rows, batch.places, self._temperature)
        with self._train_state.precision():
            states, logp, entropy = within(model, lambda: read(entropy_gradient=ppo.entropy_coefficient > 0))
        # None: the weights have not changed since the update began, so this pass gives the proximal logprobs.
        proximal = logp.detach() if batch.proximal is None else batch.proximal
        weight = torch.ones_like(proximal)
        if ppo.objective == "decoupled" and len(proximal):
            knobs = ppo.behaviour_weight
            limits = knobs.cap, knobs.mode, knobs.level, knobs.floor
            weight = behaviour_weights(proximal, batch.behaviour, batch.sequences, *limits)
        clips = ppo.eps_clip, ppo.eps_clip_higher, ppo.c_clip
        of_policy = policy_loss(logp, proximal, weight, batch.advantages, *clips)
        loss = of_policy.loss
        if ppo.kl.in_loss:
            assert batch.reference is not None
            loss = loss + ppo.kl.kl_ctl * kl_estimate(logp, batch.reference, ppo.kl.chosen_estimator)
        if ppo.entropy_coefficient:
            loss = loss - ppo.entropy_coefficient * entropy
        total, of_value = loss.sum(), None
        if critic is not None and critic.own is None:
            of_value = _value_loss(critic, states, batch)
            total = total + critic.knobs.value_loss_coefficient * of_value.loss.sum()
        (total / actions).backward()
        if critic is not None and critic.own is not None:  # after the policy's backward pass, which frees its memory
            own = critic.own
            with self._train_state.precision():
                states = within(own, lambda: predicting(hidden_states(own, batch.rows), batch.places))
            of_value = _value_loss(critic, states, batch)
            (of_value.loss.sum() / actions).backward()
        given = {"samples": batch.samples, "behaviour": batch.behaviour, "proximal": proximal, "weight": weight}
        columns = of_policy._asdict() | given | {"logp": logp, "entropy": entropy, "loss": loss}
        if batch.reference is not None:
            columns["reference"] = batch.reference
        if of_value:
            columns |= {"value_loss": of_value.loss, "value_clipped": of_value.clipped}
        return {name: values.detach().double() for name, values in columns.items()}


def warmup(knobs: Optimizer, step: int) -> float:
    """Return the fraction of the full learning rate at `step`, counted from 1: it rises linearly."""
    return min(1.0, step / max(1, knobs.warmup_steps))


def _value_loss(critic: Critic, states: Float[Tensor, "actions width"], batch: MicroBatch) -> ValueLoss:
    assert batch.values is not None
    assert batch.returns is not None
    return value_loss(critic.read(states), batch.values, batch.returns, critic.knobs.value_eps_clip)


def _counts(batch: MicroBatch) -> list[int]:
    """Return the numbers of a micro-batch's action tokens, tokens, tokens without and with padding."""
    return [len(batch.behaviour), sum(batch.lengths), batch.computed, batch.rows.tokens.numel() if batch.lengths else 0]


def _norm(parameters: Sequence[nn.Parameter]) -> Float[Tensor, ""]:
    return whole(get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None]))


def _refuse_not_finite(quantity: str, samples: Sequence[Sample], result: OfTokens, values: Tensor) -> None:
    """Raise ValueError if a value [A] of an action token is NaN or infinite."""
    indices = result["samples"][~torch.isfinite(values)].int().tolist()
    refuse_broken(quantity, samples, indices, "the step was not taken")
