"""The trainer: one PPO update from stored rows, and everything needed to go on from it."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from configs.schema import PPO, Optimizer, Reward
from storage.records import Score, Trajectory
from storage.versions.checkpoints import Canary
from tasks.train.batches import Columns, draw_minibatches, make_minibatch
from tasks.train.kl import adapt_kl_coefficient
from tasks.train.mean_kl import mean_kl
from tasks.train.metrics import sample_metrics, step_metrics
from tasks.train.optimizer_state import median_sqrt_v
from tasks.train.policy import load_policy, make_canary
from tasks.train.prepare import Draws, Preparation
from tasks.train.samples import Sample, build_samples, known, within_staleness
from tasks.train.step import Step, Stepper
from tasks.train.train_state import TrainState, load_train_state, save_train_state

logger = logging.getLogger(__name__)

NO_UPDATE = (
    "trajectories",
    "trajectories/too_old",
    "trajectories/unknown_return",
    "tokens/all",
    "seconds/prepare",
    "seconds/update",
)
"""Metrics, all 0, of an update that had nothing to train on."""


_WHY = {
    "too_old": "older than rollout.max_head_offpolicyness allows",
    "unknown_return": "the context had no room for their next turns, and their agent does not say for how many "
    "(Trajectory.unplayed_turns); a critic could estimate the rest",
}
"""Reasons for which an update leaves trajectories out."""


class Trainer:
    """Holds a policy and its optimizer between updates. `load` comes first.

    After an error in `update` some minibatches may have been applied: load again. On one CPU with the same number
    of threads, the same state and the same rows give the same weights bit for bit, in any process.

    Args:
        ppo: the algorithm.
        optimizer: AdamW.
        reward: how verdicts become rewards.
        temperature: the one the trajectories were sampled at.
        max_head_offpolicyness: trajectories with older tokens are left out; None keeps all.
    """

    def __init__(
        self,
        ppo: PPO,
        optimizer: Optimizer,
        reward: Reward,
        temperature: float = 1.0,
        max_head_offpolicyness: int | None = None,
    ) -> None:
        self._ppo, self._knobs, self._reward, self._temperature = ppo, optimizer, reward, temperature
        self._oldest = max_head_offpolicyness
        self._loaded: TrainState | None = None
        self.holds: str | None = None
        """The committed version whose weights are loaded; the caller names it, an update makes it None."""

    @property
    def needs_first(self) -> bool:
        """Whether `load` needs policy version 0: for a reference policy or a critic of its own."""
        return self._ppo.kl.kl_ctl > 0 or (self._ppo.critic is not None and self._ppo.critic.model == "own")

    def load(self, model: Path, state: Path | None, seed: int, first: Path | None = None) -> None:
        """Loads the weights in `model`, and the state `save` wrote; None starts afresh with an RNG of `seed`.

        `first` is the folder of policy version 0, where `needs_first`; None: `model`. Sets the process's number
        of torch threads.

        Raises:
            ValueError: a folder is not what it should be.
        """
        torch.set_num_threads(self._ppo.threads)
        self._loaded = load_train_state(model, state, first, seed, self._ppo, self._knobs)

    def save(self, model: Path, state: Path) -> None:
        """Writes the weights, with their configuration but no tokenizer, into `model` and the rest into `state`."""
        save_train_state(self._train_state, model, state)

    def canary(self) -> Canary:
        """The canary of the present weights, at temperature 1.

        Not in the precision of training but in float32, like that of version 0: between canaries of two precisions
        rounding would look like an update.
        """
        return make_canary(self._train_state.model, self._ppo.logprob_chunk_tokens)

    def update(
        self,
        trajectories: Sequence[Trajectory],
        scores: Iterable[Score],
        version: int,
        progress: Callable[[str], None] | None = None,
    ) -> dict[str, float]:
        """One update: what is needed of all models first, then an optimizer step for each minibatch of each epoch.

        Args:
            trajectories: of one data set; those that cannot be trained on are left out.
            scores: one for each turn of those that can.
            version: policy version of the weights before the update.
            progress: is told in words when a part is done.

        Returns:
            the metrics (see `tasks.train.metrics`).

        Raises:
            ValueError: nothing to train on, broken rows, or a number that is not finite (before the step that it
                would have entered); the message names the trajectories.
        """
        self.holds = None
        torch.set_num_threads(self._ppo.threads)
        say = progress or (lambda _: None)
        samples, left_out = self._samples(trajectories, scores, version)
        for reason, number in left_out.items():
            if number:
                say(f"{number} trajectories left out: {_WHY[reason]}")
        if not samples:
            return dict.fromkeys(NO_UPDATE, 0.0) | _counted(left_out)
        train_state, start = self._train_state, time.perf_counter()
        draws = [
            draw_minibatches(samples, self._ppo.ppo_n_minibatches, train_state.generator)
            for _ in range(self._ppo.epochs)
        ]
        stepper = self._stepper
        prepared = Preparation(train_state, self._ppo, self._temperature, stepper.precision()).prepare(samples, draws)
        for line in prepared.done:
            say(line)
        middle = time.perf_counter()
        steps = self._train(samples, prepared.columns, draws, say)
        seconds = time.perf_counter() - middle
        self._follow(prepared.trajectory_kl, len(samples))
        root = self._look_at_steps()
        metrics = sample_metrics(samples, version) | step_metrics(steps, self._ppo) | prepared.metrics
        return metrics | {
            **_counted(left_out),
            "optimizer/lr": stepper.learning_rate(train_state.steps),
            "optimizer/median_sqrt_v": root,
            "tokens/per_second": sum(step.tokens for step in steps) / seconds,
            "seconds/prepare": middle - start,
            "seconds/update": seconds,
        }

    def distance(self, other: Path, trajectories: Iterable[Trajectory], scores: Iterable[Score]) -> float | None:
        """Nats a token between the loaded policy and the one in the folder `other`, at the tokens of `trajectories`.

        None where none of them was played.
        """
        samples = build_samples(trajectories, scores, self._reward)
        if not samples:
            return None
        model, ppo = load_policy(other, self._ppo), self._ppo
        return mean_kl(self._train_state.model, model, samples, ppo, self._temperature, self._stepper.precision())

    @property
    def _train_state(self) -> TrainState:
        if self._loaded is None:
            raise ValueError("the trainer holds no policy yet: call load first")
        return self._loaded

    @property
    def _stepper(self) -> Stepper:
        return Stepper(self._train_state, self._ppo, self._knobs, self._temperature)

    def _samples(
        self, trajectories: Sequence[Trajectory], scores: Iterable[Score], version: int
    ) -> tuple[list[Sample], dict[str, int]]:
        """What can be trained on, and how many trajectories cannot, by reason.

        Nothing where the options left nothing, which is no error: a policy may have become too good for its filter.
        """
        found = build_samples(trajectories, scores, self._reward, mask_truncated=self._ppo.mask_truncated)
        recent = found if self._oldest is None else within_staleness(found, version, self._oldest)
        samples = recent if self._ppo.critic else known(recent)
        left_out = {"too_old": len(found) - len(recent), "unknown_return": len(recent) - len(samples)}
        if not any(sample.in_loss.any() for sample in samples):
            self._nothing_left(trajectories, left_out["too_old"], version)
            return [], left_out
        if all(not sample.successes.any() for sample in samples):
            logger.warning(
                "ALARM: every reward is minimal: not one of %d trajectories has a right turn. "
                "Look at their texts: is it the answer's format, the judge, or are the problems too hard?",
                len(samples),
            )
        return samples, left_out

    def _nothing_left(self, trajectories: Sequence[Trajectory], too_old: int, version: int) -> None:
        """Raises ValueError, unless options left the trajectories out; then raises the alarm only."""
        if too_old:
            raise ValueError(
                f"{too_old} of {len(trajectories)} trajectories were sampled more than rollout.max_head_offpolicyness="
                f"{self._oldest} versions before {version}, and no other can be trained on: collect them again"
            )
        if all(row.status == "failed" for row in trajectories):
            raise ValueError(
                f"none of {len(trajectories)} trajectories can be trained on: all failed, see their reasons"
            )
        logger.warning(
            "ALARM: nothing to train on: all of %d trajectories are rejected, masked, or were cut by the context at a "
            "turn that nobody counted, and the policy stays as it is. See rollout.success_rate_lb and success_rate_ub, "
            "rollout.max_resampling_rounds, ppo.mask_truncated and inference.max_model_len",
            len(trajectories),
        )

    def _train(
        self, samples: Sequence[Sample], columns: Sequence[Columns], draws: Draws, say: Callable[[str], None]
    ) -> list[Step]:
        steps: list[Step] = []
        stepper, total = self._stepper, sum(map(len, draws))
        for indices in (indices for minibatches in draws for indices in minibatches):
            budget, device = self._ppo.micro_batch_tokens, self._train_state.device
            minibatch = make_minibatch(samples, columns, indices, budget, device)
            if not minibatch:
                continue  # all of its turns were cut by the token limit, and are masked
            step = stepper.take(minibatch)
            steps.append(step)
            stopped = ", left out: its ratio is too far from 1" if step.early_stopped else ""
            say(f"minibatch {len(steps)} of {total}: gradient norm {step.grad_norm:.3g}{stopped}")
        return steps

    def _look_at_steps(self) -> float:
        """The median of AdamW's sqrt(v), with an alarm where eps rather than the gradients decides the steps."""
        median, eps = median_sqrt_v(self._train_state.adamw), self._knobs.eps
        if self._train_state.adamw.state and median < eps:
            logger.warning(
                "ALARM: optimizer.eps=%g is above the median of AdamW's sqrt(v), %.2g: it shortens the steps of most "
                "parameters to less than half. Set optimizer.eps=1e-8",
                eps,
                median,
            )
        return median

    def _follow(self, trajectory_kl: float | None, trajectories: int) -> None:
        """What moves once an update: an adaptive KL coefficient and an averaged reference policy."""
        train_state, kl = self._train_state, self._ppo.kl
        if kl.adaptive and trajectory_kl is not None:
            train_state.kl_ctl = adapt_kl_coefficient(
                train_state.kl_ctl, trajectory_kl, trajectories, kl.target, kl.horizon
            )
        if train_state.reference:
            train_state.reference.follow(train_state.model)


def _counted(left_out: Mapping[str, int]) -> dict[str, float]:
    return {f"trajectories/{reason}": float(number) for reason, number in left_out.items()}
