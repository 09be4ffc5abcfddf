"""Metrics of an update: flat names, plain floats. A metric without observations is left out.

Turns count from 1 in the names (`trained/turn_1`), without those that answer nothing, such as calls of tools. Token
metrics are means over action tokens.

`time/read`: seconds in which the rows of an update were read from the store;
`time/prepare`: seconds from the beginning of an update to its first step, samples and advantages included;
`time/update`: those of the steps. The computation of metrics after them is in none.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from tasks.tables.words import by_turn, without_variance
from tasks.train.components import kl_estimate, sequence_means
from tasks.train.samples import Floats, Ints, Sample
from tasks.train.step import OfTokens, Step

Metrics = dict[str, float]
BINS = 30
"""Bins of a histogram."""


def sample_metrics(samples: Sequence[Sample], version: int | None, most: float | None = None) -> Metrics:
    """Compute the metrics that depend on the data alone, not on the weights.

    `trained/turn_k`: the share of right turns.
    `success/fix_rate`: among the wrong turns that another turn follows, the fraction with a right next turn.
    `success/break_rate`: among the right turns that another turn follows, the fraction with a wrong next turn.
    `length/correct`, `length/wrong`: an episode is correct if its last graded turn is right.
    `share/zero_variance`: fraction of the groups (turns of one problem at one position) whose returns are all equal.
    `reward/turn_k`: what turns were paid, 0 for an answer that a later one replaced (`score.tries`).
    `trained/return`: what episodes earned, with their endings, as training shapes rewards, but not discounted.
    `reward/clipped_share`: fraction of the turns whose reward is `most` or its negative, if it was limited.
    `staleness/*`: `version`, the policy version before the update, minus the policy version that sampled a token. None:
    the policies that sampled are not those of the run.
    """
    returns = (((each.problem_id, position), value) for each in samples for position, value in each.by_position)
    turns = [_graded(sample) for sample in samples]
    answers = [sample.successes[own] for sample, own in zip(samples, turns, strict=True)]
    now, after = (np.concatenate([a[part] for a in answers]) > 0.5 for part in (slice(-1), slice(1, None)))
    lengths = np.array([len(sample.token_ids) for sample in samples])
    correct = np.array([of_sample[-1:].sum() > 0.5 for of_sample in answers])
    observed = {
        "success/fix_rate": after[~now],
        "success/break_rate": ~after[now],
        "length/correct": lengths[correct],
        "length/wrong": lengths[~correct],
    }
    if most is not None:
        observed["reward/clipped_share"] = np.abs(np.concatenate([sample.rewards for sample in samples])) >= most
    versions = np.concatenate([sample.versions for sample in samples])
    newest_first = {"min": versions.max(), "mean": versions.mean(), "max": versions.min()}
    return {
        **_by_turn("trained", answers),
        **_by_turn("reward", [sample.rewards[own] for sample, own in zip(samples, turns, strict=True)]),
        **{name: float(values.mean()) for name, values in observed.items() if values.size},
        "share/truncated": float(np.mean([sample.truncated for sample in samples])),
        "share/zero_variance": float(np.mean([*without_variance(returns).values()])),
        **({} if version is None else {f"staleness/{name}": float(version - of) for name, of in newest_first.items()}),
        "tokens/trained": float(sum(len(sample.token_ids) for sample in samples)),
        "tokens/action": float(len(versions)),
        "tokens/masked": float(sum((~sample.in_loss).sum() for sample in samples)),
        "trained/return": float(np.mean([sample.earned for sample in samples])),
        "reward/all_minimal": float(not any(sample.successes.any() for sample in samples)),
        "trajectories": float(len(samples)),
    }


def value_metrics(values: Floats, returns: Floats) -> Metrics:
    """Compute how well the critic predicted the returns [A] before the update: 1: perfectly, 0: like their mean."""
    variance = float(returns.var())
    return {"value/explained_variance": 1 - float((returns - values).var()) / variance} if variance else {}


def step_metrics(steps: Sequence[Step], *, recomputed: bool) -> Metrics:
    """Compute how the models changed at the tokens in the loss, from the training passes.

    Means are over action tokens. What an algorithm's loss returns in `LossOutputs.metrics` is `policy/NAME`.
    `policy/kl_behaviour`, `policy/kl`: Schulman's k3 estimate of KL(other ‖ policy).
    `policy/kl_reference`: the same estimate of KL(policy ‖ reference).
    `policy/loss`: the minimised loss of a minibatch without the critic's, in the mean over minibatches.
    `policy/first_clip_fraction`: the fraction of the first minibatch that was clipped, if ratios are to the engine's
    logprobs. Where nothing is stale its weights are those that sampled, so it is rounding that was clipped.
    `weight/effective_share`: the effective sample size `(sum w)² / sum w²` divided by the number of tokens.
    `weight/masked_share`: the fraction of the tokens whose weight is 0, because it was above a cap that masks or below
    the floor.
    `tokens/shared_share`: the fraction of the tokens that were not computed, because another sequence begins with them.
    `tokens/observed`: the number of observations with cross-entropy, and `policy/observed_loss` its mean.
    `proximal/*_difference`: the mismatch between the logprobs of trainer and engine. It covers all tokens if proximal
    logprobs are recomputed, else the tokens of the first minibatch, whose weights are still those that sampled.
    `sequence_difference` is the mean size of a trajectory's mean mismatch, the noise of ratios of sequences.

    Args:
        steps: 1 or more.
        recomputed: whether the proximal logprobs were.
    """
    results = [_of_actions(step.result) for step in steps]
    of = {name: torch.cat([result[name] for result in results]) for name in results[0]}
    if not len(of["logp"]):
        return _sizes(steps)
    first = results[0] if len(results[0]["logp"]) else of
    seen, now = (of, "proximal") if recomputed else (first, "logp")
    mismatch = seen["behaviour"] - seen[now]
    metrics = {
        "policy/loss": torch.stack([step.result["loss"].sum() for step in steps]).mean(),
        "policy/entropy": of["entropy"].mean(),
        "policy/kl_behaviour": _k3(of["behaviour"], of["logp"]),
        "proximal/mean_difference": mismatch.abs().mean(),
        "proximal/max_difference": mismatch.abs().max(),
        "proximal/sequence_difference": sequence_means(mismatch, seen["samples"].long()).abs().mean(),
    }
    if "clipped" in first and not recomputed:
        metrics["policy/first_clip_fraction"] = first["clipped"].mean()
    if recomputed:
        metrics["policy/kl"] = _k3(of["proximal"], of["logp"])
    if "weight" in of:
        weight = of["weight"]
        sum_of_squares = (weight**2).sum().clamp(min=1e-300)  # all weights may be masked
        metrics["weight/mean"], metrics["weight/max"] = weight.mean(), weight.max()
        metrics["weight/effective_share"] = weight.sum() ** 2 / sum_of_squares / len(weight)
        metrics["weight/masked_share"] = (weight == 0).double().mean()
    if "reference" in of:
        metrics["policy/kl_reference"] = _k3(of["logp"], of["reference"])
    metrics |= {_NAMES.get(name, f"policy/{name}"): of[name].mean() for name in sorted(of.keys() - _GIVEN)}
    return {name: value.item() for name, value in metrics.items()} | _sizes(steps)


_GIVEN = {"samples", "sampled", "behaviour", "proximal", "reference", "logp", "entropy", "loss", "gradient", "weight"}
"""Columns with metrics of their own."""
_NAMES = {
    "clipped": "policy/clip_fraction",
    "dual_clipped": "policy/dual_clip_fraction",
    "value_loss": "value/loss",
    "value_clipped": "value/clip_fraction",
}
"""The names of metrics, the means of columns, where they are not `policy/COLUMN`."""


def _of_actions(result: OfTokens) -> OfTokens:
    """Return the numbers of the tokens that the policy sampled."""
    sampled = result["sampled"] > 0
    return result if sampled.all() else {name: values[sampled] for name, values in result.items()}


def _sizes(steps: Sequence[Step]) -> Metrics:
    """Compute the metrics of whole steps, and of observations."""
    computed = sum(step.computed_tokens for step in steps)
    observed = torch.cat([step.result["logp"][step.result["sampled"] == 0] for step in steps])
    metrics = {"tokens/observed": float(len(observed)), "policy/observed_loss": -observed.mean().item()}
    return (metrics if len(observed) else {}) | {
        "tokens/padding_share": 1 - computed / sum(step.padded_tokens for step in steps),
        "tokens/shared_share": 1 - computed / sum(step.tokens for step in steps),
        "policy/early_stopped": float(np.mean([step.early_stopped for step in steps])),
        "grad_norm": float(np.mean([step.grad_norm for step in steps])),
    }


def gradient_shares(samples: Sequence[Sample], steps: Sequence[Step]) -> Metrics:
    """Compute the share of each source of problems in the absolute gradient by the tokens' logprobs."""
    names = np.array([sample.source for sample in samples])
    if len(found := np.unique(names)) < 2:
        return {}
    indices, sizes = (torch.cat([step.result[key] for step in steps]).cpu().numpy() for key in ("samples", "gradient"))
    of_samples = np.bincount(indices.astype(np.int64), np.abs(sizes), len(samples))
    total = float(of_samples.sum())
    return {f"source/{name}/gradient_share": float(of_samples[names == name].sum()) / total for name in found if total}


def histograms(
    samples: Sequence[Sample], advantages: Sequence[Floats], version: int | None, steps: Sequence[Step]
) -> Any:
    """Count how lengths of trajectories, and staleness, advantages and ratios of tokens, are distributed.

    A ratio too large for a float is left out.

    Returns:
        by name the edges of `BINS` bins and the counts in them: {"length": {"edges": […], "counts": […]}, …}
    """
    observed = {
        "length": np.array([len(sample.token_ids) for sample in samples]),
        "advantage": np.concatenate(advantages),
    }
    if version is not None:
        observed["staleness"] = version - np.concatenate([sample.versions for sample in samples])
    if "ratio" in steps[0].result:
        observed["ratio"] = torch.cat([_of_actions(step.result)["ratio"] for step in steps]).cpu().numpy()
    binned = {name: np.histogram(values[np.isfinite(values)], BINS) for name, values in observed.items()}
    return {name: {"edges": edges.tolist(), "counts": counts.tolist()} for name, (counts, edges) in binned.items()}


def _by_turn(name: str, episodes: Sequence[Floats]) -> Metrics:
    """Compute the means of the numbers of graded turns, over the episodes that reached each turn."""
    numbers = by_turn(of_episode.tolist() for of_episode in episodes)
    return {f"{name}/turn_{number}": float(np.mean(values)) for number, values in enumerate(numbers, 1)}


def _graded(sample: Sample) -> Ints:
    """Return the indices of the graded turns, as the agent got them."""
    if sample.causes.is_chain:
        return np.flatnonzero(sample.graded)
    turns = np.argsort(sample.causes.position, kind="stable")
    return turns[sample.graded[turns]]


def _k3(at: Float64[Tensor, " actions"], other: Float64[Tensor, " actions"]) -> Float64[Tensor, ""]:
    """Compute the mean k3 estimate of KL(at ‖ other), at tokens that are taken as sampled by `at`."""
    return kl_estimate(at, other, "k3").mean()
