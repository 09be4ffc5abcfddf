"""The train state: everything that training changes, and how it is stored between updates."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.schema import PPO, Optimizer
from tasks.train.critic import Critic
from tasks.train.logprobs import hidden_states, predicting
from tasks.train.optimizer_state import (
    CRITIC,
    OPTIMIZER,
    REFERENCE,
    load_tensors,
    make_adamw,
    moments,
    read_counts,
    restore_moments,
    save_tensors,
    write_counts,
)
from tasks.train.policy import load_policy, save_policy
from tasks.train.reference import Reference
from tasks.train.rows import Places, Rows


@dataclass(slots=True)
class TrainState:
    """The policy, its optimizer, critic and reference policy, the RNG and the counts."""

    model: PreTrainedModel
    critic: Critic | None
    reference: Reference | None
    adamw: torch.optim.AdamW  # optimizer of the policy and of a value head on it
    generator: torch.Generator  # used for minibatches only, so no other random draw can change them
    steps: int  # minibatches so far, including those that `early_stop_imp_ratio` skipped
    kl_ctl: float

    @property
    def device(self) -> torch.device:
        return self.model.device

    def values(self, rows: Rows, places: Places) -> Tensor:
        """Compute the critic's normalised values [A] of the states before the given places.

        A place may be the one after the last token of a sequence.
        """
        assert self.critic is not None
        model = self.critic.own or self.model
        return self.critic.read(predicting(hidden_states(model, rows, with_last=True), places))


def load_train_state(
    model: Path, state: Path | None, first: Path | None, seed: int, ppo: PPO, optimizer: Optimizer
) -> TrainState:
    """Read what `save_train_state` wrote.

    Args:
        model: folder of the policy.
        state: folder of the rest of the state; None: start a new state, with an RNG seeded by `seed`.
        first: folder of policy version 0, from which a reference policy or a critic of its own starts. None: `model`.
        seed: seed of a new RNG.
        ppo: the algorithm's knobs.
        optimizer: the optimizer's knobs.

    Raises:
        ValueError: a folder holds the wrong files, or `first` is missing.
    """
    if state is not None and first is None and ppo.kl.kl_ctl and ppo.kl.reference == "fixed":
        raise ValueError("a fixed reference policy (ppo.kl) needs policy version 0: give its folder as `first`")
    policy = load_policy(model, ppo)
    critic = Critic(ppo.critic, policy, first or model, ppo, optimizer) if ppo.critic else None
    parameters = [(optimizer.lr, list(policy.parameters()))]
    if critic and critic.own is None:
        parameters.append((critic.knobs.lr or optimizer.lr, critic.parameters()))
    train_state = TrainState(
        model=policy,
        critic=critic,
        reference=Reference(first or model, ppo) if ppo.kl.kl_ctl else None,
        adamw=make_adamw(parameters, optimizer),
        generator=torch.Generator().manual_seed(seed),
        steps=0,
        kl_ctl=ppo.kl.kl_ctl,
    )
    if state is not None:
        _restore(train_state, state)
    return train_state


def save_train_state(train_state: TrainState, model: Path, state: Path) -> None:
    """Write weights and model configuration (no tokenizer) to `model`, and the rest of the state to `state`."""
    save_policy(train_state.model, model)
    policy = moments(dict(train_state.model.named_parameters()), train_state.adamw)
    save_tensors(state / OPTIMIZER, {**policy, "rng": train_state.generator.get_state()})
    counts: dict[str, object] = {"steps": train_state.steps, "kl_ctl": train_state.kl_ctl}
    if critic := train_state.critic:
        named = dict(critic.named_parameters())
        weights = {f"weight/{name}": parameter.detach().cpu() for name, parameter in named.items()}
        save_tensors(state / CRITIC, weights | moments(named, critic.adamw or train_state.adamw))
        counts["value_norm"] = critic.norm.sums
    if train_state.reference and train_state.reference.moves:
        save_tensors(state / REFERENCE, _weights(train_state.reference.model))
    write_counts(state, counts)


def _restore(train_state: TrainState, state: Path) -> None:
    tensors = load_tensors(state / OPTIMIZER)
    train_state.generator.set_state(tensors.pop("rng"))
    restore_moments(dict(train_state.model.named_parameters()), train_state.adamw, tensors, state / OPTIMIZER)
    counts = read_counts(state)
    train_state.steps, train_state.kl_ctl = int(counts["steps"]), float(counts["kl_ctl"])
    if critic := train_state.critic:
        tensors, named = load_tensors(state / CRITIC), dict(critic.named_parameters())
        weights = {name: tensors.pop(f"weight/{name}", None) for name in named}
        _overwrite(named, weights, state / CRITIC)
        restore_moments(named, critic.adamw or train_state.adamw, tensors, state / CRITIC)
        critic.norm.sums = [float(value) for value in counts["value_norm"]]
    if train_state.reference and train_state.reference.moves:
        _overwrite(
            dict(train_state.reference.model.named_parameters()), load_tensors(state / REFERENCE), state / REFERENCE
        )


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


@torch.no_grad()
def _overwrite(named: dict[str, nn.Parameter], values: Mapping[str, Tensor | None], path: Path) -> None:
    for name, parameter in named.items():
        value = values.get(name)
        if value is None or value.shape != parameter.shape:
            raise ValueError(
                f"{path} belongs to another model (see {name}): give the folder that was saved with this model"
            )
        parameter.copy_(value)
