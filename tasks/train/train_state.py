"""The train state: everything that training changes, and how it is stored between updates.

The critic estimates the values of action tokens, by a head on the policy or by a model of its own.

Beside the policy's weights these files are stored. With them training continues bit for bit.

    optimizer.safetensors   the policy's AdamW moments as KEY/PARAMETER, and the generator's state as `rng`
    critic.safetensors      with a critic: its weights as `weight/PARAMETER` and their moments as KEY/PARAMETER
    reference.safetensors   with a moving reference policy: its weights
    state.json              steps, the KL coefficient and the value normaliser's sums

Several ranks write each of the first three as several files with an index (`sharding.save_tensors`). Nothing is
pickled.
"""

import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.train import PPO, Optimizer
from configs.train import Critic as CriticKnobs
from tasks.train.kl import Reference
from tasks.train.mesh import ALONE, Mesh
from tasks.train.passes import hidden_states, predicting
from tasks.train.policy import load_policy, save_policy
from tasks.train.rows import Places, Rows
from tasks.train.sharding import StoredTensors, like, local, save_tensors, shard, within

OPTIMIZER, CRITIC, REFERENCE = "optimizer", "critic", "reference"
COUNTS = "state.json"

Named = Mapping[str, nn.Parameter]

_KEYS = ("step/", "exp_avg/", "exp_avg_sq/")
_SAMPLED = 1_000_000  # parameters in `median_sqrt_v`
BETA = 0.99995
"""Decay of the exponential mean and standard deviation of returns in each update."""
_SMALLEST_VARIANCE = 1e-2  # keeps returns that hardly vary from being scaled up
Number = TypeVar("Number", Tensor, float)


class ValueNorm:
    """The running mean and standard deviation of returns, in float64.

    `exp`: `m <- beta m + (1 - beta) batch mean`, and the same for the squares, divided by the sum of the weights
    (debiased). `none`: mean 0 and standard deviation 1.
    Source: PPO in AReaL (arXiv 2505.24298).
    """

    def __init__(self, kind: str, beta: float = BETA) -> None:
        self._kind, self._beta = kind, beta
        self.sums = [0.0, 0.0, 0.0]
        """Sums of the weights, of the weighted values and of the weighted squares."""

    def update(self, returns: Tensor) -> None:
        """Add a batch of returns [A] to the statistics."""
        if self._kind == "none":
            return
        values = returns.double()
        batch = [1.0, values.mean().item(), (values**2).mean().item()]
        self.sums = [self._beta * old + (1 - self._beta) * new for old, new in zip(self.sums, batch, strict=True)]

    @property
    def mean(self) -> float:
        return self.sums[1] / self.sums[0] if self.sums[0] else 0.0

    @property
    def std(self) -> float:
        if not self.sums[0]:
            return 1.0
        return math.sqrt(max(_SMALLEST_VARIANCE, self.sums[2] / self.sums[0] - self.mean**2))

    def normalise(self, values: Number) -> Number:
        """Convert from units of returns to the normalised units that the critic learns."""
        return (values - self.mean) / self.std

    def denormalise(self, values: Number) -> Number:
        """Convert from the critic's normalised units to units of returns."""
        return values * self.std + self.mean


class Critic:
    """A linear head, initialised with zeros, on the last hidden states of the policy or of a model of its own.

    Args:
        knobs: the configuration's `ppo.critic`.
        policy: the policy in training, whose hidden states a value head reads.
        first: folder of policy version 0; a model of its own starts from these weights.
        ppo: how a model of its own is loaded (device, gradient checkpointing).
        optimizer: the policy's knobs; a model of its own gets another AdamW with these knobs.
        mesh: the ranks that share it.
    """

    def __init__(
        self,
        knobs: CriticKnobs,
        policy: PreTrainedModel,
        first: Path,
        ppo: PPO,
        optimizer: Optimizer,
        mesh: Mesh = ALONE,
    ) -> None:
        self.knobs = knobs
        self.own: PreTrainedModel | None = None
        self.adamw: torch.optim.AdamW | None = None
        """The optimizer of a model of its own; None for a head on the policy, which the policy's optimizer steps."""
        self.norm = ValueNorm(knobs.value_norm)
        self.head = nn.Linear(policy.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.head.to(policy.device)
        shard(self.head, mesh)
        if knobs.model == "own":
            self.own = load_policy(first, ppo, mesh)
            self.adamw = make_adamw([(knobs.lr or optimizer.lr, self.parameters())], optimizer)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters of the critic alone, without the output layer of a language model."""
        if self.own is not None:
            for name, parameter in self.own.base_model.named_parameters():
                yield f"model.{name}", parameter
        for name, parameter in self.head.named_parameters():
            yield f"head.{name}", parameter

    @property
    def modules(self) -> list[nn.Module]:
        """The head and the model of its own."""
        return [self.head, *([self.own] if self.own else [])]

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.named_parameters()]

    def read(self, states: Tensor) -> Tensor:
        """Compute values [...] in normalised units from hidden states [..., H], in float32."""
        with torch.autocast(states.device.type, enabled=False):
            values: Tensor = self.head(states.float()).squeeze(-1)
        return values


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


def make_adamw(parameters: Iterable[tuple[float, Iterable[nn.Parameter]]], knobs: Optimizer) -> torch.optim.AdamW:
    """Make AdamW for groups of parameters, each given with its learning rate after warm-up.

    Weight decay applies to matrices, not to norms and biases: their size does not cause overfitting, and a pull
    towards 0 would only change the model.
    """
    groups = [
        {"params": chosen, "full_lr": lr, "weight_decay": decay}
        for lr, with_lr in parameters
        for chosen, decay in _by_decay(with_lr, knobs.weight_decay)
        if chosen
    ]
    return torch.optim.AdamW(groups, lr=knobs.lr, betas=knobs.betas, eps=knobs.eps, fused=True)


def _by_decay(parameters: Iterable[nn.Parameter], decay: float) -> list[tuple[list[nn.Parameter], float]]:
    listed = list(parameters)
    return [([p for p in listed if p.ndim > 1], decay), ([p for p in listed if p.ndim < 2], 0.0)]


def median_sqrt_v(adamw: torch.optim.AdamW, mesh: Mesh = ALONE) -> float:
    """Compute the median of sqrt(v) over about a million of the parameters; v is AdamW's debiased second moment.

    AdamW divides by sqrt(v) + eps. If sqrt(v) is not well above eps, eps decides how large the steps are.
    """
    total = sum(state["exp_avg_sq"].numel() for state in adamw.state.values())
    stride = max(1, total // _SAMPLED)
    beta = adamw.param_groups[0]["betas"][1]
    parts = [
        local(state["exp_avg_sq"]).flatten()[::stride] / (1 - beta ** state["step"].item())
        for state in adamw.state.values()
    ]
    return float(mesh.gather(torch.cat(parts)[None])[0].sqrt().median()) if parts else 0.0


def moments(named: Named, adamw: torch.optim.AdamW) -> dict[str, Tensor]:
    """Return AdamW's state of the `named` parameters, with names KEY/PARAMETER."""
    return {
        f"{key}/{name}": value
        for name, parameter in named.items()
        if parameter in adamw.state
        for key, value in adamw.state[parameter].items()
    }


def restore_moments(named: Named, adamw: torch.optim.AdamW, stored: StoredTensors) -> None:
    """Put back what `moments` returned; other tensors of the files are ignored.

    Raises:
        ValueError: these are the moments of another model.
    """
    states = _by_parameter(path for path in stored.names if path.startswith(_KEYS))
    mismatched = {
        name
        for name, paths in states.items()
        if name not in named or stored.shape(paths["exp_avg"]) != [*named[name].shape]
    }
    if mismatched or (states and named.keys() - states.keys()):
        raise ValueError(
            f"the optimizer state in {stored.path} belongs to another model: give the folder that was saved with this "
            "model"
        )
    for name, parameter in named.items():
        if name in states:
            adamw.state[parameter] = {key: _read(stored, path, parameter) for key, path in states[name].items()}


def _read(stored: StoredTensors, path: str, parameter: nn.Parameter) -> Tensor:
    """Read a part of AdamW's state: the number of steps, or a tensor like the parameter."""
    if not stored.shape(path):
        return stored.read(path).to(parameter.device)
    return like(parameter, functools.partial(stored.rows, path))


def open_tensors(folder: Path, stem: str) -> StoredTensors:
    """Open the files of a train state.

    Raises:
        ValueError: they do not exist, since the state was saved with other settings.
    """
    try:
        return StoredTensors(folder, stem)
    except FileNotFoundError:
        raise ValueError(
            f"no {stem}.safetensors in {folder}: this state was saved with other settings of ppo. Load it with those "
            "settings, or begin another run from its model with policy.path"
        ) from None


def write_counts(folder: Path, counts: dict[str, Any]) -> None:
    (folder / COUNTS).write_text(json.dumps(counts) + "\n")


def read_counts(folder: Path) -> dict[str, Any]:
    counts = json.loads((folder / COUNTS).read_text())
    assert isinstance(counts, dict)
    return counts


def _by_parameter(paths: Iterable[str]) -> dict[str, dict[str, str]]:
    """Sort the names KEY/PARAMETER: the name of each parameter's keys."""
    states: dict[str, dict[str, str]] = {}
    for path in sorted(paths):
        key, name = path.split("/", 1)
        states.setdefault(name, {})[key] = path
    return states
