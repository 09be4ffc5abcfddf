"""Compute the advantages of a trajectory's tokens from stored rows and scores, with the code that updates use.

Updates of an older version of this project may have computed other advantages, because the algorithm has changed.

Parts that need a model are left out: `gae` needs the values of its critic, and a KL penalty in the reward needs the
reference policy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from configs.score import Reward
from configs.score import Score as ScoreSettings
from configs.train import PPO
from storage.records import Score, Trajectory
from storage.versions.manifests import Manifest
from tasks.audit.reader.library import Library
from tasks.audit.selection import DataSet
from tasks.train.advantages import Observed, estimate
from tasks.train.reward_shaping import settled
from tasks.train.samples import Sample, Scorers, build_samples, with_known_returns, within_staleness

MOST_ROWS, MOST_TOKENS = 4096, 2_000_000
"""The largest data set, in rows and sampled tokens, that is normalised as a whole."""
_CACHED_GROUPS = 4


class NoAdvantageError(Exception):
    """A trajectory has no advantages, or they cannot be computed; the message says why."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """The advantages of one trajectory, in units of the shaped reward, or in standard deviations if normalised.

    Example: Advantages(by_position={18: 0.5, 19: 0.5}, largest=0.9, says="…")
    """

    by_position: dict[int, float] = field(default_factory=dict)
    largest: float = 0.0  # largest absolute advantage of all that were computed together
    says: str = ""  # how they were computed


@dataclass(frozen=True, slots=True)
class _GroupAdvantages:
    """The advantages of all samples of one group or data set."""

    by_id: dict[str, dict[int, float]]
    largest: float
    says: str


class AdvantageComputer:
    """Computes advantages, and caches those of the last few groups."""

    def __init__(self, library: Library, data_sets: Sequence[DataSet]) -> None:
        self._library, self._data_sets = library, data_sets
        self._cached = lru_cache(_CACHED_GROUPS)(self._compute)

    def compute(self, row: Trajectory, number: int) -> Advantages:
        """Return the advantages of `row`, a trajectory of data set `number`.

        Raises:
            NoAdvantageError: the trajectory has none, or they cannot be computed.
        """
        data_set = self._data_sets[number]
        if data_set.is_evaluation:
            raise NoAdvantageError("This is an evaluation, which is never trained on.")
        ppo = _knobs(data_set.manifest).ppo
        computed = self._cached(number, None if self._needs_whole_set(ppo, number) else row.problem_id)
        if row.trajectory_id not in computed.by_id:
            raise NoAdvantageError(
                f"This trajectory was left out of the training. Possible reasons: its status ({row.status}), its fault "
                f"({row.fault or 'none'}), it has no sampled tokens, its policy was too old, or the context cut it and "
                "its number of turns is unknown."
            )
        return Advantages(computed.by_id[row.trajectory_id], computed.largest, computed.says)

    def _needs_whole_set(self, ppo: PPO, number: int) -> bool:
        """Return whether advantages are normalised over the whole data set, and the data set is small enough for it."""
        if ppo.advantage.normalisation != "batch":
            return False
        query = "select count(*), coalesce(sum(sampled), 0) from episodes where data_set = ?"
        rows, tokens = self._library.database.one(query, number)
        return bool(rows <= MOST_ROWS and tokens <= MOST_TOKENS)

    def _compute(self, number: int, problem_id: str | None) -> _GroupAdvantages:
        """Compute the advantages of a group, or of the whole data set if `problem_id` is None."""
        training = _knobs(self._data_sets[number].manifest)
        ppo = training.ppo
        if ppo.critic is not None:
            raise NoAdvantageError(f"The estimator {ppo.advantage.type} needs a critic's values, which are not stored.")
        knobs = ppo.advantage
        if problem_id is not None and knobs.normalisation == "batch":
            knobs = knobs.model_copy(update={"normalisation": "none"})
        try:
            samples = self._samples(number, problem_id, training)
            observed = [Observed(np.zeros(len(sample.actions))) for sample in samples]
            estimated = estimate(samples, observed, knobs).advantages if samples else []
        except ValueError as error:
            raise NoAdvantageError(f"The advantages cannot be computed: {error}.") from error
        by_id = {
            sample.trajectory_id: dict(zip(sample.actions.tolist(), values.tolist(), strict=True))
            for sample, values in zip(samples, estimated, strict=True)
        }
        largest = max((float(np.abs(values).max()) for values in estimated if len(values)), default=0.0)
        return _GroupAdvantages(by_id, largest, _describe(ppo, len(samples), problem_id is None))

    def _samples(self, number: int, problem_id: str | None, training: "_Training") -> list[Sample]:
        """Return the samples that the update trained on."""
        rows, ppo = self._rows(number, problem_id), training.ppo
        trajectories, scores = self._library.trajectories(rows), self._scores(rows)
        samples = build_samples(
            trajectories,
            scores,
            training.reward if problem_id is None else self._with_least(number, problem_id, training),
            scorers=training.scorers,
            credit=ppo.advantage.credit,
            mask_truncated=ppo.mask_truncated,
        )
        return with_known_returns(within_staleness(samples, self._data_sets[number].iteration, training.oldest))

    def _with_least(self, number: int, problem_id: str, training: "_Training") -> Reward:
        """Return the knobs of the reward, with the least of what the problem's scorer gave in the whole data set."""
        database = self._library.database
        query = "select any_value(scorer) from turns where data_set = ? and problem_id = ?"
        (scorer,) = database.one(query, number, problem_id)
        query = """select min(scored_reward) from turns semi join
            (select row from episodes where status in ('completed', 'truncated')) using (row)
            where data_set = ? and scorer = ? and verdict <> 'none'"""
        return settled(training.reward, scorer or "", [database.number(query, number, scorer)])

    def _rows(self, number: int, problem_id: str | None) -> list[int]:
        query = "select row from episodes where data_set = ? and (? is null or problem_id = ?) order by row"
        return [row for (row,) in self._library.database.all(query, number, problem_id, problem_id)]

    def _scores(self, rows: Sequence[int]) -> list[Score]:
        scores = self._library.database.all(
            """select trajectory_id, turn, verdict, coalesce(success, 0), extracted, solution, verdict_reason,
                scored_reward
            from turns where verdict is not null and list_contains(?, row)""",
            list(rows),
        )
        return [Score(*columns) for columns in scores]


@dataclass(frozen=True, slots=True)
class _Training:
    """The knobs of a run's training."""

    ppo: PPO = field(default_factory=PPO)
    reward: Reward = field(default_factory=Reward)
    scorers: Scorers = field(default_factory=lambda: ScoreSettings().by_source)
    oldest: int = 0  # largest staleness that it trains on


def _knobs(manifest: Manifest | None) -> _Training:
    if manifest is None:
        return _Training()
    try:
        return _Training(
            PPO.model_validate(manifest.knob("ppo")),
            Reward.model_validate(manifest.knob("reward")),
            ScoreSettings.model_validate(manifest.knob("score")).by_source,
            int(manifest.number("rollout.max_head_offpolicyness")),
        )
    except ValueError as error:
        raise NoAdvantageError(
            f"The configuration in the manifest does not fit this version of the project: {error}."
        ) from error


def _describe(ppo: PPO, samples: int, whole: bool) -> str:
    knobs = ppo.advantage
    scope = "data set" if whole else "group"
    text = (
        f"Computed by this version's estimator {knobs.type} "
        f"from the {samples:,} trajectories of the {scope} that were trained on"
    )
    if knobs.normalisation == "batch" and not whole:
        text += "; not normalised here, because the data set over which the update normalised them is too large"
    elif knobs.normalisation != "none":
        text += f"; normalised over the {scope}"
    if ppo.kl.in_reward:
        text += "; without the KL penalty, which needs the reference policy"
    return text + "."
