"""The train state: everything that training changes, and how it is stored between updates.

The critic estimates the values of action tokens, by a head on the policy or by a model of its own.

Beside the policy's weights these files are stored. With them training continues bit for bit.

    optimizer.safetensors   AdamW's moments of the policy, or of its adapter, as KEY/PARAMETER, and the generator's
                            state as `rng`
    critic.safetensors      with a critic: its weights as `weight/PARAMETER` and their moments as KEY/PARAMETER
    reference.safetensors   with a moving reference policy: its weights
    state.json              steps, the KL coefficient and the value normaliser's sums; at the beginning of a fork
                            also the parts of the state that begin anew (`anew`)

Several ranks write each of the first three as several files with an index (`sharding.save_tensors`). Nothing is
pickled.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs import Config
from configs.algorithms import Algorithm as AlgorithmKnobs
from configs.policy import LoRA
from configs.train import Train
from storage.versions import model_files
from storage.versions.weights import switched_off
from tasks.train.algorithms import make_algorithm
from tasks.train.algorithms.algorithm import Algorithm
from tasks.train.batches import Batching, Places, Rows, batching_for
from tasks.train.experts import replay_routing
from tasks.train.mesh import ALONE, Mesh
from tasks.train.optimizer import MOMENTS, factor, make_adamw
from tasks.train.passes import TokenScorer, hidden_states, logprob_scorer, predicting
from tasks.train.policy import load_policy, save_adapter, save_policy, trained
from tasks.train.sharding import StoredTensors, like, save_tensors, shard, within

_OPTIMIZER, _CRITIC, _REFERENCE, _COUNTS, _ANEW = "optimizer", "critic", "reference", "state.json", "anew"
BETA = 0.99995
"""Decay of the exponential mean and standard deviation of returns in each update."""
HORIZON = 10_000.0
"""Number of trajectories over which an adaptive coefficient follows."""
EMA_DECAY = 0.99
"""Weight of the old average of a moving reference in each update."""
_SMALLEST_VARIANCE = 1e-2  # keeps returns that hardly vary from being scaled up
Number = TypeVar("Number", Tensor, float)


class ValueNorm:
    """The running mean and standard deviation of returns, in float64.

    `m <- beta m + (1 - beta) batch mean`, and the same for the squares, divided by the sum of the weights (debiased).
    Source: PPO in AReaL (arXiv 2505.24298).
    """

    def __init__(self, beta: float = BETA) -> None:
        self._beta = beta
        self.sums = [0.0, 0.0, 0.0]
        """Sums of the weights, of the weighted values and of the weighted squares."""

    def update(self, returns: Float[Tensor, " actions"]) -> None:
        """Add a batch of returns to the statistics."""
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
        policy: the policy in training, whose hidden states a value head reads.
        version_0: folder of policy version 0; a model of its own starts from these weights.
        config: the run's configuration, with a critic. A model of its own gets an AdamW of its own.
        mesh: the ranks that share it.
    """

    def __init__(self, policy: PreTrainedModel, version_0: Path, config: Config, mesh: Mesh) -> None:
        self.own: PreTrainedModel | None = None
        self.adamw: torch.optim.AdamW | None = None
        """The optimizer of a model of its own; None for a head on the policy, which the policy's optimizer steps."""
        self.norm = ValueNorm()
        self.head = nn.Linear(policy.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.head.to(policy.device)
        shard(self.head, mesh)
        if config.algorithm.critic and config.algorithm.critic.model == "own":
            self.own = load_policy(version_0, config.train, mesh)
            self.adamw = make_adamw({"critic": self.parameters()}, config.optimizer)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters of the critic alone, without the output layer of a language model."""
        if self.own is not None:
            for name, parameter in self.own.base_model.named_parameters():
                yield f"model.{name}", parameter
        for name, parameter in self.head.named_parameters():
            yield f"head.{name}", parameter

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.named_parameters()]

    def read(self, states: Float[Tensor, "*tokens width"]) -> Float[Tensor, "*tokens"]:
        """Compute values in normalised units from hidden states, in float32."""
        with torch.autocast(states.device.type, enabled=False):
            values: Tensor = self.head(states.float()).squeeze(-1)
        return values


@dataclass(slots=True)
class TrainState:
    """The policy, its optimizer, critic and reference policy, the RNG and the counts; and what they are trained by."""

    config: Config
    mesh: Mesh
    model: PreTrainedModel
    critic: Critic | None
    reference: PreTrainedModel | None  # policy version 0, or the moving average of all versions, which starts from it.
    # None with an adapter: `reference_scorer` switches it off
    adamw: torch.optim.AdamW  # optimizer of the policy and of a value head on it
    generator: torch.Generator  # used for minibatches only, so no other random draw can change them
    kl_ctl: float
    steps: int = 0  # minibatches so far, including those that `early_stop_imp_ratio` skipped
    lora: LoRA | None = None  # the knobs of the adapter, if only an adapter is trained
    teacher: PreTrainedModel | None = None
    algorithm: Algorithm = field(init=False)

    def __post_init__(self) -> None:
        self.reconfigure(self.config)

    def reconfigure(self, config: Config) -> None:
        """Take over from a configuration of the same run what may differ: `FROM_NEXT_UPDATE`, the number of updates."""
        self.config, self.algorithm = config, make_algorithm(config.algorithm, config.sampling.max_new_tokens)

    def values(self, rows: Rows, places: Places) -> Float[Tensor, " actions"]:
        """Compute the critic's normalised values of the states before the given places.

        A place may be the one after the last token of a sequence.
        """
        assert self.critic is not None
        model = self.critic.own or self.model
        return self.critic.read(within(model, lambda: predicting(hidden_states(model, rows, with_last=True), places)))

    def scorer(self, model: PreTrainedModel | None = None) -> TokenScorer:
        """Return the function that computes logprobs under a model, or under the policy, as they were sampled."""
        return logprob_scorer(model or self.model, self.config.sampling.temperature)

    def reference_scorer(self) -> TokenScorer | None:
        """Return the function that computes logprobs under the reference policy; None if there is none."""
        if self.reference or not (self.lora and self.algorithm.knobs.keeps_reference):
            return self.scorer(self.reference) if self.reference else None
        return switched_off(self.model)(self.scorer())  # in each of its calls the policy has no adapter

    def precision(self) -> AbstractContextManager[object]:
        """Return the context in which the models run: autocast if `train.autocast` asks for it.

        Without its cache, which would keep a bfloat16 copy of every layer's weights on each rank.
        """
        enabled = self.config.train.autocast == "bfloat16"
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)

    @property
    def batching(self) -> Batching:
        """The way in which passes of the models are cut."""
        return batching_for(self.model, self.config.train, self.mesh)

    def learning_rate(self, part: str, version: int) -> float:
        """Return the learning rate of a part (`policy`, `critic`) at the present step of a policy version's update."""
        knobs, critic = self.config.optimizer, self.config.algorithm.critic
        full = (part == "critic" and critic and critic.lr) or knobs.lr
        return full * factor(knobs, version, self.config.run.iterations, self.steps)

    @property
    def modules(self) -> list[nn.Module]:
        """The models in training, and the critic's head."""
        critic = self.critic
        return [self.model, *([critic.head] if critic else []), *([critic.own] if critic and critic.own else [])]


def load_train_state(
    config: Config,
    model: Path,
    state: Path | None = None,
    version_0: Path | None = None,
    adapter: Path | None = None,
    teacher: tuple[Path, Path | None] | None = None,
    mesh: Mesh = ALONE,
) -> TrainState:
    """Read what `save_weights` and `save_rest` wrote. Set the number of torch threads.

    Args:
        config: the run's configuration.
        model: folder of the policy.
        state: folder of the rest of the state; None: start a new state, with an RNG seeded by `run.seed`.
        version_0: folder of that policy version, from which a reference policy or a critic of its own starts. None:
            `model`.
        adapter: folder of the policy's adapter, which alone is trained then.
        teacher: folders of a model that the algorithm distils, and of its adapter, if it has one.
        mesh: the ranks that share the models.

    Raises:
        ValueError: a folder holds the wrong files.
        FileNotFoundError: the state was saved with other settings of `algorithm`.
    """
    knobs, train = config.algorithm, config.train
    torch.set_num_threads(train.threads)
    fixed_reference = knobs.keeps_reference and knobs.kl.reference == "fixed"
    assert version_0 or adapter or state is None or not fixed_reference, "the policy would be compared with itself"
    policy, begin = load_policy(model, train, mesh, adapter), version_0 or model
    if train.routing_replay:
        replay_routing(policy)
    critic = Critic(policy, begin, config, mesh) if knobs.critic else None
    parts: dict[str, Iterable[nn.Parameter]] = {"policy": trained(policy).values()}
    if critic and critic.own is None:
        parts["critic"] = critic.parameters()
    train_state = TrainState(
        config=config,
        mesh=mesh,
        model=policy,
        critic=critic,
        lora=model_files.read_adapter(adapter) if adapter else None,
        reference=_frozen(begin, train, mesh) if knobs.keeps_reference and not adapter else None,
        adamw=make_adamw(parts, config.optimizer),
        generator=torch.Generator().manual_seed(config.run.seed),
        kl_ctl=knobs.kl.kl_ctl,
        teacher=_frozen(teacher[0], train, mesh, teacher[1]) if teacher else None,
    )
    if state is not None:
        _restore(train_state, state)
    return train_state


def _frozen(folder: Path, train: Train, mesh: Mesh, adapter: Path | None = None) -> PreTrainedModel:
    """Load a model that is not trained."""
    return load_policy(folder, train, mesh, adapter).requires_grad_(False)


def save_weights(train_state: TrainState, model: Path) -> None:
    """Write weights and model configuration (no tokenizer) to `model`, or the adapter if only that is trained.

    On a mesh each rank writes some of the files; the folders of all ranks together hold them.
    """
    if train_state.lora:
        save_adapter(train_state.model, train_state.lora, model, train_state.mesh)
    else:
        save_policy(train_state.model, model, train_state.mesh)


def save_rest(train_state: TrainState, state: Path) -> None:
    """Write what `save_weights` does not, in the same way, to `state`."""
    mesh = train_state.mesh
    moments = _moments(trained(train_state.model), train_state.adamw)
    save_tensors(state, _OPTIMIZER, {**moments, "rng": train_state.generator.get_state()}, mesh)
    counts: dict[str, object] = {"steps": train_state.steps, "kl_ctl": train_state.kl_ctl}
    if critic := train_state.critic:
        named = dict(critic.named_parameters())
        weights = {f"weight/{name}": parameter for name, parameter in named.items()}
        save_tensors(state, _CRITIC, weights | _moments(named, critic.adamw or train_state.adamw), mesh)
        counts["value_norm"] = critic.norm.sums
    if train_state.reference and train_state.algorithm.knobs.kl.reference == "ema":
        save_tensors(state, _REFERENCE, dict(train_state.reference.named_parameters()), mesh)
    if mesh.rank == 0:
        (state / _COUNTS).write_text(json.dumps(counts) + "\n")


def adapt(state: Path, before: AlgorithmKnobs, now: AlgorithmKnobs, *, other_weights: bool = False) -> None:
    """Note in a stored state what begins anew, because another run with other settings continues it (`policy.fork`).

    A critic of another kind does, a moving reference policy where there was none, and the KL coefficient if any knob of
    its penalty differs; and the policy's moments and warm-up if that run trains other weights, such as a new adapter.

    Args:
        state: the folder, whose state.json is changed.
        before: the section `algorithm` of the run that saved it.
        now: that of the run that continues it.
        other_weights: the run does not train the parameters that the moments in the state belong to.
    """
    counts = json.loads((state / _COUNTS).read_text())
    anew, kinds = set(counts.get(_ANEW, ())), [knobs.critic and knobs.critic.model for knobs in (before, now)]
    if other_weights:
        anew.add(_OPTIMIZER)
    if _OPTIMIZER in anew:
        counts["steps"] = 0  # a new optimizer warms up anew
    if kinds[0] != kinds[1]:
        anew.add(_CRITIC)
    if not (before.kl.kl_ctl and before.kl.reference == "ema"):
        anew.add(_REFERENCE)
    if before.kl != now.kl:
        counts["kl_ctl"] = now.kl.kl_ctl
    (state / _COUNTS).write_text(json.dumps(counts | {_ANEW: sorted(anew)}) + "\n")


def _moments(named: Mapping[str, nn.Parameter], adamw: torch.optim.AdamW) -> dict[str, Tensor]:
    """Return AdamW's state of the `named` parameters, with names KEY/PARAMETER."""
    return {
        f"{key}/{name}": value
        for name, parameter in named.items()
        for key, value in adamw.state.get(parameter, {}).items()
    }


@torch.no_grad()
def _restore(train_state: TrainState, state: Path) -> None:
    stored, counts = StoredTensors(state, _OPTIMIZER), json.loads((state / _COUNTS).read_text())
    anew = counts.get(_ANEW, ())
    train_state.generator.set_state(stored.read("rng"))
    if _OPTIMIZER not in anew:
        _restore_moments(trained(train_state.model), train_state.adamw, stored)
    train_state.steps, train_state.kl_ctl = int(counts["steps"]), float(counts["kl_ctl"])
    if (critic := train_state.critic) and _CRITIC not in anew:
        stored, named = StoredTensors(state, _CRITIC), dict(critic.named_parameters())
        for name, parameter in named.items():
            parameter.copy_(like(parameter, partial(stored.rows, f"weight/{name}")))
        _restore_moments(named, critic.adamw or train_state.adamw, stored)
        critic.norm.sums = [float(value) for value in counts["value_norm"]]
    if train_state.reference and train_state.algorithm.knobs.kl.reference == "ema" and _REFERENCE not in anew:
        stored = StoredTensors(state, _REFERENCE)
        for name, parameter in train_state.reference.named_parameters():
            parameter.copy_(like(parameter, partial(stored.rows, name)))


def _restore_moments(named: Mapping[str, nn.Parameter], adamw: torch.optim.AdamW, stored: StoredTensors) -> None:
    """Put back what `_moments` returned; without any, no step was taken."""
    if not any(f"step/{name}" in stored.names for name in named):
        return
    for name, parameter in named.items():
        moments = {key: like(parameter, partial(stored.rows, f"{key}/{name}")) for key in MOMENTS}
        adamw.state[parameter] = {"step": stored.read(f"step/{name}").to(parameter.device), **moments}


@torch.no_grad()
def follow(train_state: TrainState, trajectory_kl: float | None, trajectories: int) -> None:
    """Change what an update changes once: an adaptive KL coefficient, and a moving reference policy.

    The reference becomes `decay * reference + (1 - decay) * policy`.
    """
    kl, reference = train_state.algorithm.knobs.kl, train_state.reference
    if kl.adaptive and trajectory_kl is not None:
        train_state.kl_ctl = adapt_kl_coefficient(train_state.kl_ctl, trajectory_kl, trajectories, kl.target)
    if reference and kl.reference == "ema":
        for averaged, present in zip(reference.parameters(), train_state.model.parameters(), strict=True):
            averaged.lerp_(present, 1 - EMA_DECAY)


def adapt_kl_coefficient(kl_ctl: float, kl: float, trajectories: int, target: float) -> float:
    """Return the coefficient after an update: `kl_ctl * (1 + clip(kl / target - 1, ±0.2) * trajectories / HORIZON)`.

    The factor is at least 0.1 and at most 10: with more trajectories in an update than five horizons it would otherwise
    become negative, and the penalty would pay for distance.
    Source: Ziegler et al. (arXiv 1909.08593, section 2.2).

    Args:
        kl_ctl: the present coefficient; a negative one, which earlier programs could store, counts as positive.
        kl: mean KL of a trajectory, in nats.
        trajectories: number of trajectories in the update.
        target: the desired KL, in nats.
    """
    error = max(-0.2, min(0.2, kl / target - 1))
    return abs(kl_ctl) * max(0.1, min(10.0, 1 + error * trajectories / HORIZON))
