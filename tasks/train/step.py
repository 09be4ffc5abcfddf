"""One optimizer step on a minibatch."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedModel

from configs.schema import PPO, Optimizer
from tasks.train.batches import MicroBatch, Minibatch
from tasks.train.critic import Critic
from tasks.train.kl import kl_estimate
from tasks.train.logprobs import hidden_states, predicting, read_out, targets_of
from tasks.train.losses import PolicyLoss, ValueLoss, behaviour_weights, policy_loss, value_loss
from tasks.train.samples import name_some
from tasks.train.train_state import TrainState


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of the training pass over one micro-batch, without gradient. All tensors are [A]."""

    batch: MicroBatch
    logp: Tensor
    proximal: Tensor
    weight: Tensor
    entropy: Tensor
    policy: PolicyLoss
    value: ValueLoss | None


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one minibatch."""

    outcomes: list[StepResult]
    grad_norm: float  # of the policy and a value head on it, before clipping
    early_stopped: bool  # the policy was not changed

    @property
    def tokens(self) -> int:
        """The number of tokens in the sequences that were trained on."""
        return sum(sum(outcome.batch.lengths) for outcome in self.outcomes)

    @property
    def computed_tokens(self) -> int:
        """The number of tokens in the forward passes without padding: fewer if sequences share their beginnings."""
        return sum(outcome.batch.computed for outcome in self.outcomes)

    @property
    def padded_tokens(self) -> int:
        """The number of tokens in the forward passes, with padding."""
        return sum(outcome.batch.rows.tokens.numel() for outcome in self.outcomes)


class Stepper:
    """Optimizer steps on a train state.

    Args:
        train_state: the state that the steps change.
        ppo: the loss.
        optimizer: learning rate and gradient clipping.
        temperature: the temperature at which the tokens were sampled.
    """

    def __init__(self, train_state: TrainState, ppo: PPO, optimizer: Optimizer, temperature: float) -> None:
        self._train_state, self._ppo, self._knobs, self._temperature = train_state, ppo, optimizer, temperature

    def take(self, minibatch: Minibatch) -> Step:
        """Take one step of the policy and one of the critic; an early stop skips the policy and a value head on it.

        Gradients are summed over the micro-batches. Each token's share is 1 / N, where N is the number of action tokens
        in the whole minibatch, so padding, the cut into micro-batches and the order of rows do not matter.

        Raises:
            ValueError: a loss or gradient is not finite; nothing was changed.
        """
        train_state, critic = self._train_state, self._train_state.critic
        for adamw in self._adamws():
            adamw.zero_grad(set_to_none=True)
        actions = sum(len(batch.behaviour) for batch in minibatch)
        outcomes = [self._accumulate(batch, actions) for batch in minibatch]
        stopped = self._too_far(outcomes)  # checked first: a ratio that overflows must not end the run
        if not stopped:
            _refuse_not_finite("losses", [(outcome.batch, outcome.policy.loss) for outcome in outcomes])
        _refuse_not_finite("value losses", [(o.batch, o.value.loss) for o in outcomes if o.value])
        own = critic.parameters() if critic and critic.own is not None else []
        head = critic.parameters() if critic and critic.own is None else []
        shared = [*train_state.model.parameters(), *head]
        norm, own_norm = _norm(shared), _norm(own)
        for checked in (own_norm,) if stopped else (norm, own_norm):
            _refuse_not_finite("gradients", [(batch, checked.expand(len(batch.behaviour))) for batch in minibatch])
        train_state.steps += 1
        if not stopped:
            self._apply(train_state.adamw, shared, norm)
        if critic and critic.adamw:
            self._apply(critic.adamw, own, own_norm)
        return Step(outcomes, norm.item(), stopped)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate, which rises linearly to its full value at step `warmup_steps`, counted from 1."""
        return self._knobs.lr * self._warmup(step)

    def precision(self) -> AbstractContextManager[object]:
        """Return the context in which the models run: autocast if `ppo.autocast` asks for it."""
        enabled = self._ppo.autocast == "bfloat16"
        return torch.autocast(self._train_state.device.type, torch.bfloat16, enabled=enabled)

    def _warmup(self, step: int) -> float:
        """Return the share of the full learning rate at `step`."""
        return min(1.0, step / max(1, self._knobs.warmup_steps))

    def _adamws(self) -> list[torch.optim.AdamW]:
        critic = self._train_state.critic
        return [self._train_state.adamw, *([critic.adamw] if critic and critic.adamw else [])]

    def _apply(self, adamw: torch.optim.AdamW, parameters: Sequence[nn.Parameter], norm: Tensor) -> None:
        clip_grads_with_norm_(parameters, self._knobs.max_grad_norm, norm)
        for group in adamw.param_groups:
            group["lr"] = group["full_lr"] * self._warmup(self._train_state.steps)
        adamw.step()

    def _too_far(self, outcomes: Sequence[StepResult]) -> bool:
        """Return whether the mean ratio of the minibatch is above `early_stop_imp_ratio`."""
        limit = self._ppo.early_stop_imp_ratio
        return limit is not None and torch.cat([outcome.policy.ratio for outcome in outcomes]).mean().item() > limit

    def _accumulate(self, batch: MicroBatch, actions: int) -> StepResult:
        """Add the micro-batch's share of the gradients. `actions` is the number of action tokens in the minibatch."""
        critic = self._train_state.critic
        states = self._states(self._train_state.model, batch)
        logp, entropy = self._read_out(states, batch)
        # None: the weights have not changed since the update began, so this pass gives the proximal logprobs.
        proximal = logp.detach() if batch.proximal is None else batch.proximal
        weight, ppo = self._weight(proximal, batch), self._ppo
        policy_part = policy_loss(
            logp, proximal, weight, batch.advantages, ppo.eps_clip, ppo.eps_clip_higher, ppo.c_clip
        )
        loss = self._with_kl_and_entropy(policy_part.loss, logp, entropy, batch)
        total, value_part = loss.sum(), None
        if critic is not None and critic.own is None:
            value_part = self._value_loss(critic, states, batch)
            total = total + critic.knobs.value_loss_coefficient * value_part.loss.sum()
        (total / actions).backward()
        if critic is not None and critic.own is not None:  # after the policy's backward pass, which frees its memory
            value_part = self._value_loss(critic, self._states(critic.own, batch), batch)
            (value_part.loss.sum() / actions).backward()
        return StepResult(
            batch=batch,
            logp=logp.detach(),
            proximal=proximal,
            weight=weight,
            entropy=entropy.detach(),
            policy=policy_part._replace(loss=loss.detach()),
            value=value_part and value_part._replace(loss=value_part.loss.detach()),
        )

    def _states(self, model: PreTrainedModel, batch: MicroBatch) -> Tensor:
        """Compute the hidden states [A, H] that predict the action tokens."""
        with self.precision():
            return predicting(hidden_states(model, batch.rows), batch.places)

    def _read_out(self, states: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Compute logprobs [A] and entropies [A]. The entropies have a gradient only if there is an entropy bonus."""
        head, bonus = self._train_state.model.get_output_embeddings(), self._ppo.entropy_coefficient > 0
        targets, chunk = targets_of(batch.rows, batch.places), self._ppo.logprob_chunk_tokens
        return read_out(head, states, targets, self._temperature, chunk, entropy_gradient=bonus)

    def _with_kl_and_entropy(self, loss: Tensor, logp: Tensor, entropy: Tensor, batch: MicroBatch) -> Tensor:
        """Add KL penalty and entropy bonus to the policy loss [A]."""
        kl, bonus = self._ppo.kl, self._ppo.entropy_coefficient
        if kl.in_loss:
            assert batch.reference is not None
            loss = loss + kl.kl_ctl * kl_estimate(logp, batch.reference, kl.chosen_estimator)
        return loss - bonus * entropy if bonus else loss

    def _weight(self, proximal: Tensor, batch: MicroBatch) -> Tensor:
        if not self._ppo.use_decoupled_loss or not len(proximal):
            return torch.ones_like(proximal)
        knobs = self._ppo.behaviour_weight
        return behaviour_weights(proximal, batch.behaviour, batch.sequences, knobs.cap, knobs.mode, knobs.level)

    def _value_loss(self, critic: Critic, states: Tensor, batch: MicroBatch) -> ValueLoss:
        assert batch.values is not None
        assert batch.returns is not None
        return value_loss(critic.read(states), batch.values, batch.returns, critic.knobs.value_eps_clip)


def _norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    return get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])


def _refuse_not_finite(quantity: str, values: Sequence[tuple[MicroBatch, Tensor]]) -> None:
    """Raise ValueError if a value [A] of an action token is NaN or infinite; the message names its trajectories."""
    if not values or torch.stack([torch.isfinite(value).all() for _, value in values]).all():
        return
    rows = [(batch, set(batch.sequences[~torch.isfinite(value)].tolist())) for batch, value in values]
    ids = sorted(batch.trajectory_ids[row] for batch, bad in rows for row in bad)
    raise ValueError(
        f"NaN or infinite {quantity} with the trajectories {name_some(ids)}: the step was not taken. "
        "Check their logprobs, or continue from the last checkpoint with a lower optimizer.lr"
    )
