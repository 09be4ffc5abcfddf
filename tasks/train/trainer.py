"""The trainer: runs updates on stored rows, and saves the state from which training continues."""

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from storage.records import Score, Trajectory
from storage.versions.checkpoints import Canary
from storage.visible import Fleeting
from tasks.tables.words import is_trainable
from tasks.train.batches import Columns, draw_minibatches, make_minibatch
from tasks.train.metrics import gradient_shares, histograms, sample_metrics, step_metrics
from tasks.train.orders import Progress
from tasks.train.passes import broken, mean_kl, refuse_broken, score_action_tokens
from tasks.train.policy import load_policy, make_canary
from tasks.train.prepare import Epochs, Preparation
from tasks.train.returns import failed_by_graders
from tasks.train.samples import Sample, build_samples, check_sampled, within_staleness
from tasks.train.step import Step, take_step, terms_of
from tasks.train.train_state import TrainState, follow, save_rest, save_weights

logger = logging.getLogger(__name__)

NO_UPDATE = ("trajectories", "tokens/trained", "time/prepare", "time/update")
"""Names of the metrics, all 0, of an update that had nothing to train on."""


_REASONS = {
    "failed_verdict": "a grader failed on a turn",
    "too_old": "older than rollout.max_head_offpolicyness allows",
}
"""The reasons why an update leaves trajectories out, as the log says them."""
_ALARMING = 0.02
"""Share of trajectories without a verdict that is an alarm."""
_FAILED = "ALARM: graders failed on %d of %d trajectories, such as %s. Read some: does the policy make graders fail?"
_NOTHING_RIGHT = (
    "ALARM: not one of %d trajectories has a right turn. Read them: is format, verifier or difficulty wrong?"
)
_NOTHING = (
    "ALARM: nothing to train on: all of %d trajectories are rejected, masked or without a verdict. The policy is not "
    "changed. Check rollout.success_rate_lb and _ub, rollout.max_resampling_rounds and train.mask_truncated"
)
_NOTHING_CHOSEN = (
    "ALARM: nothing to train on: algorithm.type=%s chose no token of %d trajectories. The policy is not changed"
)


class Trainer:
    """Updates a train state, which stays in memory between updates.

    After an error in `update` some minibatches may have been applied, so the caller must load again. On one CPU with
    the same number of threads, the same state and the same rows give the same weights bit for bit, in any process. On a
    mesh each rank has a trainer, and all get the same calls.
    """

    def __init__(self, state: TrainState) -> None:
        self.state = state

    def save(self, model: Path, state: Path) -> None:
        """Write weights and model configuration (no tokenizer), or the adapter, to `model`, and the rest to `state`."""
        save_weights(self.state, model)
        save_rest(self.state, state)

    def canary(self) -> Canary:
        """Make the canary of the present weights, at temperature 1.

        It is computed in float32, like the canary of version 0, not in the precision of training: between canaries of
        two precisions, rounding would look like an update.
        """
        return make_canary(self.state.model)

    def update(
        self,
        rows: Sequence[Trajectory],
        scores: Iterable[Score],
        version: int,
        progress: Progress = lambda _: None,
        *,
        chosen: bool = False,
        taught: Mapping[str, Sequence[float]] | None = None,
    ) -> dict[str, Any]:
        """Run one update: first the preparation, then one optimizer step for each minibatch of each epoch.

        Args:
            rows: trajectories, in `flows.fit` of several data sets; those that cannot be trained on are left out.
            scores: one for each turn of the trainable trajectories.
            version: policy version of the weights before the update.
            progress: called with a line of text after each part.
            chosen: the rows were chosen from stored data sets, of whatever policies: none is too old.
            taught: by trajectory, the logprobs that a served teacher gave to its tokens.

        Returns:
            the metrics (see `tasks.train.metrics`).

        Raises:
            ValueError: nothing to train on, broken rows, or a number that is not finite (raised before the step that
                would have used it); the message names the trajectories.
        """
        state, knobs, on_gpu = self.state, self.state.config.train, torch.cuda.is_initialized()
        start = time.perf_counter()
        torch.set_num_threads(knobs.threads)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        samples, left_out = self._samples(rows, scores, version, chosen=chosen)
        for reason in filter(left_out.get, left_out):
            progress(f"{left_out[reason]} trajectories left out: {_REASONS[reason]}")
        counts = {f"trajectories/{reason}": float(number) for reason, number in left_out.items()}
        if not samples:
            return dict.fromkeys(NO_UPDATE, 0.0) | counts
        epochs = [draw_minibatches(samples, knobs.minibatches, state.generator) for _ in range(knobs.epochs)]
        columns, prepared = Preparation(state, samples, progress, taught or {}).prepare(epochs)
        middle = time.perf_counter()
        steps, of_steps = self._train(samples, columns, epochs, version, progress)
        if not steps:
            logger.warning(_NOTHING_CHOSEN, state.config.algorithm.type, len(samples))
            return dict.fromkeys(NO_UPDATE, 0.0) | counts
        seconds = time.perf_counter() - middle
        follow(state, prepared.get("kl/trajectory"), len(samples))
        return {
            **self._metrics(samples, columns, steps, None if chosen else version),
            **of_steps,
            **prepared,
            **counts,
            "lr": state.learning_rate("policy", version),
            "tokens/trained_per_second": sum(step.tokens for step in steps) / seconds,
            "time/prepare": middle - start,
            "time/update": seconds,
            **({"memory/peak_gib": torch.cuda.max_memory_allocated() / 2**30} if on_gpu else {}),
        }

    def distance(
        self, other: Path, trajectories: Iterable[Trajectory], scores: Iterable[Score], adapter: Path | None = None
    ) -> float | None:
        """Compute the mean KL in nats per token between the loaded policy and the one in the folder `other`.

        `adapter` is the folder of its adapter, if any. The tokens are the action tokens of `trajectories`. Return None
        if none of them is trainable.
        """
        if not (samples := self._built(trajectories, scores)):
            return None
        state = self.state
        loaded = load_policy(other, state.config.train, state.mesh, adapter)
        with state.precision():
            return mean_kl(state.model, loaded, samples, state.config.sampling.temperature, state.batching)

    def _samples(
        self, trajectories: Sequence[Trajectory], scores: Iterable[Score], version: int, *, chosen: bool
    ) -> tuple[list[Sample], dict[str, int]]:
        """Build the samples to train on, and count the trajectories that are left out, by reason.

        The samples are empty if the options left nothing. This is no error: a policy may have become too good for its
        filter, and among rows that were `chosen` from the store an update may have only failed ones.
        """
        config, scores = self.state.config, list(scores)
        oldest = config.rollout.max_head_offpolicyness
        trainable = self._built(trajectories, scores, replay=config.train.routing_replay)
        samples = trainable if chosen else within_staleness(trainable, version, oldest)
        check_sampled(samples, self.state.model.config, math.inf if chosen else version)
        failed, names = failed_by_graders(scores), [row.trajectory_id for row in trajectories if is_trainable(row)]
        named = [f"{name} ({failed[name]})" for name in names if name in failed]
        if len(named) > _ALARMING * len(names):
            logger.warning(_FAILED, len(named), len(names), named[0])
        left_out = {"too_old": len(trainable) - len(samples), "failed_verdict": len(named)}
        if not any(sample.in_loss.any() for sample in samples):
            if left_out["too_old"]:
                most = f"more than rollout.max_head_offpolicyness={oldest} versions before {version}"
                old = f"{left_out['too_old']} of {len(trajectories)} trajectories were sampled {most}"
                raise ValueError(f"{old}, and the others cannot be trained on: collect again")
            if not chosen and all(row.status == "failed" for row in trajectories):
                none = f"none of {len(trajectories)} trajectories can be trained on"
                raise ValueError(f"{none}: all failed, see their reasons")
            logger.warning(_NOTHING, len(trajectories))
            return [], left_out
        if not any(sample.successes.any() for sample in samples):
            logger.warning(_NOTHING_RIGHT, len(samples))
        if config.problems.members:
            samples = [replace(sample, member=sample.source) for sample in samples]
        return samples, left_out

    def _built(
        self, trajectories: Iterable[Trajectory], scores: Iterable[Score], *, replay: bool = False
    ) -> list[Sample]:
        config = self.state.config
        build = partial(build_samples, scorers=config.score, mask_truncated=config.train.mask_truncated)
        return build(trajectories, scores, config.reward, replay=replay)

    def _train(
        self, samples: Sequence[Sample], columns: Sequence[Columns], epochs: Epochs, version: int, report: Progress
    ) -> tuple[list[Step], dict[str, float]]:
        """Take a step for each minibatch that has anything in the loss; return them, and metrics of the algorithm."""
        state, steps, metrics = self.state, list[Step](), list[dict[str, float]]()
        components = {name: state.algorithm.component(name) for name in columns[0].weights}
        minibatches = [*chain.from_iterable(epochs)]
        for indices in minibatches:
            present = columns
            if state.algorithm.needs_current:
                present, of_minibatch = self._reweighed(samples, columns, indices)
                metrics.append(of_minibatch)
            minibatch = make_minibatch(samples, present, indices, state.batching)
            if not minibatch:
                continue  # nothing in it has a weight, or the token limit cut all of its turns and they are masked
            step = take_step(state, minibatch, samples, terms_of(components, samples, present, indices), version)
            steps.append(step)
            stopped = ", left out: its ratio is too far from 1" if step.early_stopped else ""
            line = f"minibatch {len(steps)} of {len(minibatches)}: gradient norm {step.grad_norm:.3g}{stopped}"
            report(line if stopped else Fleeting(line))
        names = sorted({name for each in metrics for name in each})
        return steps, {name: float(np.mean([each[name] for each in metrics if name in each])) for name in names}

    def _reweighed(
        self, samples: Sequence[Sample], columns: Sequence[Columns], indices: Sequence[int]
    ) -> tuple[list[Columns], dict[str, float]]:
        """Return the columns with the weights that the algorithm gives a minibatch by the present weights."""
        state, chosen = self.state, sorted(indices)
        with state.precision():
            current = score_action_tokens(state.scorer(), samples, chosen, state.batching)
        refuse_broken("logprobs", samples, broken(current.items()), "the step was not taken")
        reference = {index: values for index in chosen if (values := columns[index].reference) is not None}
        factors, metrics = state.algorithm.reweigh({i: samples[i] for i in chosen}, current, reference)
        present = list(columns)
        for index, of_sample in factors.items():
            weights = {name: values * of_sample for name, values in columns[index].weights.items()}
            present[index] = replace(columns[index], weights=weights)
        return present, metrics

    def _metrics(
        self, samples: Sequence[Sample], columns: Sequence[Columns], steps: Sequence[Step], version: int | None
    ) -> dict[str, Any]:
        """Measure data and steps; `version` is that before the update, or None if other policies than these sampled."""
        return {
            **sample_metrics(samples, version, self.state.config.reward.max_clip),
            **step_metrics(steps, recomputed=self.state.algorithm.recomputes),
            **gradient_shares(samples, steps),
            "histograms": histograms(samples, [column.advantages for column in columns], version, steps),
        }
