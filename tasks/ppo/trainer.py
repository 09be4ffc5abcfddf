"""The trainer: one PPO update from stored rows, and everything needed to go on from it."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedModel

from configs.schema import PPO, Optimizer, Reward
from storage.checkpoints import Canary
from storage.records import Score, Trajectory
from tasks.ppo.advantages import turn_advantages
from tasks.ppo.batches import MicroBatch, Minibatch, make_minibatches
from tasks.ppo.logprobs import action_logprobs
from tasks.ppo.losses import decoupled_ppo_loss
from tasks.ppo.metrics import Outcome, padding_share, sample_metrics, token_metrics
from tasks.ppo.policy import load_policy, make_canary, save_policy
from tasks.ppo.samples import build_samples, name_some
from tasks.ppo.state import make_adamw, read_state, write_state


@dataclass(slots=True)
class _Training:
    model: PreTrainedModel
    adamw: torch.optim.AdamW
    generator: torch.Generator  # its own, so that nobody else's draws change the minibatches
    steps: int  # optimizer steps so far


class Trainer:
    """Holds a policy and its optimizer between updates. `load` comes first.

    After an error in `update` some minibatches may have been applied: load again. On one CPU with the same number
    of threads, the same state and the same rows give the same weights bit for bit, in any process.

    Args:
        temperature: the one the trajectories were sampled at.
    """

    def __init__(self, ppo: PPO, optimizer: Optimizer, reward: Reward, temperature: float = 1.0) -> None:
        self._ppo, self._knobs, self._reward, self._temperature = ppo, optimizer, reward, temperature
        self._loaded: _Training | None = None
        self.holds: str | None = None
        """The committed version whose weights are loaded; the caller names it, an update makes it None."""

    def load(self, model: Path, state: Path | None, seed: int) -> None:
        """Loads the weights in `model`, and the state `save` wrote; None starts afresh with an RNG of `seed`.

        Sets the process's number of torch threads.

        Raises:
            ValueError: a folder is not what it should be.
        """
        torch.set_num_threads(self._ppo.threads)
        policy = load_policy(model, self._ppo)
        adamw = make_adamw(policy, self._knobs)
        generator = torch.Generator().manual_seed(seed)
        steps = 0 if state is None else read_state(state, policy, adamw, generator)
        self._loaded = _Training(policy, adamw, generator, steps)

    def save(self, model: Path, state: Path) -> None:
        """Writes the weights, with their configuration but no tokenizer, into `model` and the rest into `state`."""
        training = self._training
        save_policy(training.model, model)
        write_state(state, training.model, training.adamw, training.generator, training.steps)

    def canary(self) -> Canary:
        """What the present weights think of a fixed sequence, at temperature 1, in the precision of training."""
        with self._precision():
            return make_canary(self._training.model, self._ppo.logprob_chunk_tokens)

    def update(
        self,
        trajectories: Sequence[Trajectory],
        scores: Iterable[Score],
        version: int,
        progress: Callable[[str], None] | None = None,
    ) -> dict[str, float]:
        """One pass over the rows: proximal logprobs, then an optimizer step for each minibatch.

        Args:
            trajectories: of one data set; those that cannot be trained on are left out.
            scores: one for each turn of those that can.
            version: policy version of the weights before the update.
            progress: is told in words when a part is done.

        Returns:
            the metrics (see `tasks.ppo.metrics`).

        Raises:
            ValueError: nothing to train on, broken rows, or a loss or gradient that is not finite (before its
                step); the message names the trajectories.
        """
        self.holds = None
        torch.set_num_threads(self._ppo.threads)
        say = progress or (lambda _: None)
        samples = build_samples(trajectories, scores, self._reward)
        if not samples:
            raise ValueError(f"none of {len(trajectories)} trajectories can be trained on: see their status and reason")
        advantages = turn_advantages(samples, self._ppo.advantage)
        training = self._training
        minibatches = make_minibatches(samples, advantages, self._ppo, training.generator, training.model.device)
        start = time.perf_counter()
        if self._ppo.use_decoupled_loss:
            minibatches = self._with_proximal(minibatches)
            say(f"proximal logprobs of {len(samples)} trajectories in {time.perf_counter() - start:.1f} s")
        middle = time.perf_counter()
        outcomes, norms = self._train(minibatches, say)
        seconds = time.perf_counter() - middle
        metrics = sample_metrics(samples, version) | token_metrics(outcomes, self._ppo.use_decoupled_loss)
        return metrics | {
            "optimizer/grad_norm": sum(norms) / len(norms),
            "optimizer/lr": self._learning_rate(training.steps),
            "tokens/padding_share": padding_share(samples, minibatches),
            "tokens/per_second": metrics["tokens/all"] / seconds,
            "seconds/proximal": middle - start,
            "seconds/update": seconds,
        }

    @property
    def _training(self) -> _Training:
        if self._loaded is None:
            raise ValueError("the trainer holds no policy yet: call load first")
        return self._loaded

    def _precision(self) -> torch.autocast:
        device = self._training.model.device.type
        return torch.autocast(device, torch.bfloat16, enabled=self._ppo.autocast == "bfloat16")

    def _logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        model, chunk = self._training.model, self._ppo.logprob_chunk_tokens
        with self._precision():
            return action_logprobs(model, batch.tokens, batch.rows, batch.columns, self._temperature, chunk)

    @torch.no_grad()
    def _with_proximal(self, minibatches: list[Minibatch]) -> list[Minibatch]:
        """The same micro-batches, so the ratio is exactly 1 before the first step."""
        done = [[replace(batch, proximal=self._logprobs(batch)[0]) for batch in part] for part in minibatches]
        for part in done:
            _refuse_not_finite("proximal logprobs", [(batch, batch.proximal) for batch in part])
        return done

    def _train(self, minibatches: list[Minibatch], say: Callable[[str], None]) -> tuple[list[Outcome], list[float]]:
        outcomes, norms = [], []
        for number, minibatch in enumerate(minibatches, 1):
            step, norm = self._step(minibatch)
            outcomes += step
            norms.append(norm)
            say(f"minibatch {number} of {len(minibatches)}: gradient norm {norm:.3g}")
        return outcomes, norms

    def _step(self, minibatch: Minibatch) -> tuple[list[Outcome], float]:
        """One optimizer step; returns what to report and the norm of the gradient before clipping."""
        training = self._training
        training.adamw.zero_grad(set_to_none=True)
        actions = sum(len(batch.rows) for batch in minibatch)
        outcomes = [self._accumulate(batch, actions) for batch in minibatch]
        _refuse_not_finite("losses", [(outcome.batch, outcome.tokens.loss) for outcome in outcomes])
        parameters = list(training.model.parameters())
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        _refuse_not_finite("gradients", [(batch, norm.expand(len(batch.rows))) for batch in minibatch])
        clip_grads_with_norm_(parameters, self._knobs.max_grad_norm, norm)
        training.steps += 1
        for options in training.adamw.param_groups:
            options["lr"] = self._learning_rate(training.steps)
        training.adamw.step()
        return outcomes, norm.item()

    def _accumulate(self, batch: MicroBatch, actions: int) -> Outcome:
        """Adds the micro-batch's share of the gradient; `actions` counts the action tokens of the minibatch."""
        logp, entropy = self._logprobs(batch)
        tokens = decoupled_ppo_loss(
            logp, batch.proximal, batch.behaviour, batch.advantages, self._ppo.eps_clip, self._ppo.behaviour_weight_cap
        )
        (tokens.loss.sum() / actions).backward()
        return Outcome(batch, logp.detach(), entropy, tokens._replace(loss=tokens.loss.detach()))

    def _learning_rate(self, step: int) -> float:
        """Rises linearly to its full value at step `warmup_steps`, counted from 1."""
        return self._knobs.lr * min(1.0, step / max(1, self._knobs.warmup_steps))


def _refuse_not_finite(what: str, values: Sequence[tuple[MicroBatch, Tensor]]) -> None:
    """Raises ValueError where a value [A] of an action token is NaN or infinite, naming its trajectories."""
    if torch.stack([torch.isfinite(value).all() for _, value in values]).all():
        return
    rows = [(batch, set(batch.rows[~torch.isfinite(value)].tolist())) for batch, value in values]
    ids = sorted(batch.trajectory_ids[row] for batch, bad in rows for row in bad)
    raise ValueError(
        f"NaN or infinite {what} with the trajectories {name_some(ids)}: the step was not taken. "
        "Look at their logprobs, or go on from the last checkpoint with a lower optimizer.lr"
    )
