"""The train state: everything that training changes, and how it is stored between updates."""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.train import PPO, Optimizer
from tasks.train.critic import Critic
from tasks.train.logprobs import hidden_states, predicting
from tasks.train.mesh import ALONE, Mesh
from tasks.train.optimizer_state import (
    CRITIC,
    OPTIMIZER,
    REFERENCE,
    make_adamw,
    moments,
    open_tensors,
    read_counts,
    restore_moments,
    write_counts,
)
from tasks.train.policy import load_policy, save_policy
from tasks.train.reference import Reference
from tasks.train.rows import Places, Rows
from tasks.train.sharding import like, within
from tasks.train.tensor_files import StoredTensors, save_tensors


@dataclass(slots=True)
class TrainState:
    """The policy, its optimizer, critic and reference policy, the RNG and the counts."""

    model: PreTrainedModel
    critic: Critic | None
    reference: Reference | None
    adamw: torch.optim.AdamW  # optimizer of the policy and of a value head on it
    mesh: Mesh
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
        return self.critic.read(within(model, lambda: predicting(hidden_states(model, rows, with_last=True), places)))

    @property
    def modules(self) -> list[nn.Module]:
        """The models in training, and the critic's head."""
        return [self.model, *(self.critic.modules if self.critic else [])]


def load_train_state(
    model: Path, state: Path | None, first: Path | None, seed: int, ppo: PPO, optimizer: Optimizer, mesh: Mesh = ALONE
) -> TrainState:
    """Read what `save_train_state` wrote.

    Args:
        model: folder of the policy.
        state: folder of the rest of the state; None: start a new state, with an RNG seeded by `seed`.
        first: folder of policy version 0, from which a reference policy or a critic of its own starts. None: `model`.
        seed: seed of a new RNG.
        ppo: the algorithm's knobs.
        optimizer: the optimizer's knobs.
        mesh: the ranks that share the models.

    Raises:
        ValueError: a folder holds the wrong files, or `first` is missing.
    """
    if state is not None and first is None and ppo.kl.kl_ctl and ppo.kl.reference == "fixed":
        raise ValueError("a fixed reference policy (ppo.kl) needs policy version 0: give its folder as `first`")
    policy = load_policy(model, ppo, mesh)
    critic = Critic(ppo.critic, policy, first or model, ppo, optimizer, mesh) if ppo.critic else None
    parameters = [(optimizer.lr, list(policy.parameters()))]
    if critic and critic.own is None:
        parameters.append((critic.knobs.lr or optimizer.lr, critic.parameters()))
    train_state = TrainState(
        model=policy,
        critic=critic,
        reference=Reference(first or model, ppo, mesh) if ppo.kl.kl_ctl else None,
        adamw=make_adamw(parameters, optimizer),
        mesh=mesh,
        generator=torch.Generator().manual_seed(seed),
        steps=0,
        kl_ctl=ppo.kl.kl_ctl,
    )
    if state is not None:
        _restore(train_state, state)
    return train_state


def save_train_state(train_state: TrainState, model: Path, state: Path) -> None:
    """Write weights and model configuration (no tokenizer) to `model`, and the rest of the state to `state`.

    On a mesh each rank writes its share; the folders of all ranks together hold the files.
    """
    mesh = train_state.mesh
    save_policy(train_state.model, model, mesh)
    policy = moments(dict(train_state.model.named_parameters()), train_state.adamw)
    save_tensors(state, OPTIMIZER, {**policy, "rng": train_state.generator.get_state()}, mesh)
    counts: dict[str, object] = {"steps": train_state.steps, "kl_ctl": train_state.kl_ctl}
    if critic := train_state.critic:
        named = dict(critic.named_parameters())
        weights = {f"weight/{name}": parameter for name, parameter in named.items()}
        save_tensors(state, CRITIC, weights | moments(named, critic.adamw or train_state.adamw), mesh)
        counts["value_norm"] = critic.norm.sums
    if train_state.reference and train_state.reference.moves:
        save_tensors(state, REFERENCE, dict(train_state.reference.model.named_parameters()), mesh)
    if mesh.rank == 0:
        write_counts(state, counts)


def _restore(train_state: TrainState, state: Path) -> None:
    stored = open_tensors(state, OPTIMIZER)
    train_state.generator.set_state(stored.read("rng"))
    restore_moments(dict(train_state.model.named_parameters()), train_state.adamw, stored)
    counts = read_counts(state)
    train_state.steps, train_state.kl_ctl = int(counts["steps"]), float(counts["kl_ctl"])
    if critic := train_state.critic:
        stored, named = open_tensors(state, CRITIC), dict(critic.named_parameters())
        _overwrite(named, stored, "weight/")
        restore_moments(named, critic.adamw or train_state.adamw, stored)
        critic.norm.sums = [float(value) for value in counts["value_norm"]]
    if train_state.reference and train_state.reference.moves:
        _overwrite(dict(train_state.reference.model.named_parameters()), open_tensors(state, REFERENCE))


@torch.no_grad()
def _overwrite(named: dict[str, nn.Parameter], stored: StoredTensors, prefix: str = "") -> None:
    for name, parameter in named.items():
        path = prefix + name
        if path not in stored.names or stored.shape(path) != [*parameter.shape]:
            raise ValueError(
                f"{stored.path} belongs to another model (see {name}): give the folder that was saved with this model"
            )
        parameter.copy_(like(parameter, functools.partial(stored.rows, path)))
