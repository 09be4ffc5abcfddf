"""The training pass against a bare forward-backward loop over padded batches."""

import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from configs import Config
from storage.records import Score, Trajectory, to_score
from tests.benchmarks.fixtures import Lab
from tests.benchmarks.result import Row, spread

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from tasks.train.batches import Batching, Minibatch

WARM_UP, ROUNDS = 1, 8


def measure(lab: Lab) -> list[Row]:
    """Time updates on a rollout of the demo, and after each the bare loop over the same sequences, padded."""
    import torch

    from tasks.train.batches import batching_for
    from tasks.train.policy import load_policy
    from tasks.train.train_state import load_train_state
    from tasks.train.trainer import Trainer

    config = lab.config()
    trajectories, scores = play(lab, config)
    trainer = Trainer(load_train_state(config, lab.policy.model))
    model = load_policy(lab.policy.model, config.train)
    adamw = torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr)
    drawn = _minibatches(config, trajectories, scores, replace(batching_for(model, config.train), trees=False))
    rounds = []
    for _ in range(WARM_UP + ROUNDS):
        start = time.perf_counter()
        metrics = trainer.update(trajectories, scores, version=0)
        metrics["seconds/all"] = time.perf_counter() - start
        rounds.append((metrics, _bare(model, adamw, next(drawn), config.optimizer.max_grad_norm)))
    budget = batching_for(model, config.train).budget
    return [_row(rounds[WARM_UP:], budget)]


def _row(rounds: list[tuple[dict[str, float], float]], budget: int) -> Row:
    ratios = [seconds / metrics["time/update"] for metrics, seconds in rounds]
    tokens = rounds[0][0]["tokens/trained"]
    names = ("time/update", "time/prepare", "seconds/all")
    training, proximal, whole = (median(metrics[name] for metrics, _ in rounds) for name in names)
    bare = median(seconds for _, seconds in rounds)
    return Row(
        benchmark="training pass / bare loop",
        measured=spread(ratios, "{:.2f}".format),
        detail=f"{tokens / training:.0f} tokens/s, bare {tokens / bare:.0f}; {tokens:.0f} tokens in micro-batches of "
        f"{budget}; whole update {whole:.2f} s, of which training pass {training:.2f} and proximal logprobs "
        f"{proximal:.2f}; {len(rounds)} rounds",
    )


def play(lab: Lab, config: Config) -> tuple[list[Trajectory], list[Score]]:
    """Play and score an iteration of the demo."""
    from prefect.logging import disable_run_logger

    from flows.run.resources import open_workers
    from flows.run.workspace import Workspace
    from flows.stages.problems import import_problems
    from flows.stages.rollout import rollout
    from flows.stages.score import score
    from storage.versions import datasets

    workspace = Workspace(config)
    with disable_run_logger(), open_workers(workspace) as workers:
        problems, _ = import_problems.fn(workspace)
        trajectories = rollout.fn(workspace, workers, 0, lab.policy.version, problems)
        scores = score.fn(workspace, workers, 0, trajectories)
    rows = datasets.rows(lab.store, scores, workspace.cache)
    return list(datasets.trajectories(lab.store, trajectories, workspace.cache)), [to_score(row) for row in rows]


def _minibatches(
    config: Config, trajectories: list[Trajectory], scores: list[Score], batching: "Batching"
) -> "Iterator[list[Minibatch]]":
    """Draw the minibatches that the trainer draws in each update, with a generator of the same seed."""
    import numpy as np
    import torch

    from tasks.train.batches import Columns, draw_minibatches, make_minibatch
    from tasks.train.samples import build_samples

    samples = build_samples(trajectories, scores, config.reward)
    columns = [Columns(np.zeros(len(sample.actions)), {"rl": np.ones(len(sample.actions))}) for sample in samples]
    generator = torch.Generator().manual_seed(config.run.seed)
    while True:
        draw = draw_minibatches(samples, config.train.minibatches, generator)
        yield [make_minibatch(samples, columns, indices, batching) for indices in draw]


def _bare(
    model: "PreTrainedModel", adamw: "torch.optim.AdamW", minibatches: "list[Minibatch]", max_grad_norm: float
) -> float:
    """Return the seconds of forward, backward and optimizer step for cross-entropy on the sampled tokens."""
    import torch
    from torch.nn.functional import cross_entropy

    from tasks.train.batches import Places

    def labels(tokens: torch.Tensor, places: Places) -> torch.Tensor:
        empty = torch.full_like(tokens, -100)
        empty[places.rows, places.columns] = tokens[places.rows, places.columns]
        return empty[:, 1:]

    work = [[(batch.rows.tokens, labels(batch.rows.tokens, batch.places)) for batch in part] for part in minibatches]
    start = time.perf_counter()
    for minibatch in work:
        adamw.zero_grad()
        for tokens, wanted in minibatch:
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
            cross_entropy(logits.transpose(1, 2), wanted, reduction="sum").backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        adamw.step()
    return time.perf_counter() - start
