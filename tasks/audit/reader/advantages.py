"""Advantages of a trajectory's tokens, from stored rows and scores, by the code that updates compute them with.

Updates made by an older version of this project may have computed others: the algorithm has changed since.

Left out is what needs a model: `gae` has no values without its critic, and a KL penalty in the reward no reference.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from configs.schema import PPO, Reward
from storage.records import Score, Trajectory
from storage.versions.manifests import Manifest
from tasks.audit.reader.library import Library
from tasks.audit.selection import DataSet

if TYPE_CHECKING:
    from tasks.train.samples import Sample

MOST_ROWS, MOST_TOKENS = 4096, 2_000_000
"""Of a data set that is normalised as a whole; sampled tokens."""
_KEPT = 4


class NoAdvantageError(Exception):
    """There are none, or they cannot be computed; the message says why."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """Of one trajectory, in units of the shaped reward, or of standard deviations where they were normalised.

    Example: Advantages(by_position={18: 0.5, 19: 0.5}, largest=0.9, says="…")
    """

    by_position: dict[int, float] = field(default_factory=dict)
    largest: float = 0.0  # of all that were computed together, without its sign
    says: str = ""  # how they came about


@dataclass(frozen=True, slots=True)
class _Computed:
    """Of all samples of one group or data set."""

    by_id: dict[str, dict[int, float]]
    largest: float
    says: str


class Advantage:
    """Computes advantages and keeps the last few groups."""

    def __init__(self, library: Library, data_sets: Sequence[DataSet]) -> None:
        self._library, self._data_sets = library, data_sets
        self._compute = lru_cache(_KEPT)(self._computed)

    def of(self, row: Trajectory, number: int) -> Advantages:
        """The advantages of `row`, which is of data set `number`.

        Raises:
            NoAdvantageError: says why there are none.
        """
        data_set = self._data_sets[number]
        if data_set.is_evaluation:
            raise NoAdvantageError("This is an evaluation: nobody trains on it.")
        ppo, _, _ = _knobs(data_set.manifest)
        computed = self._compute(number, None if self._whole(ppo, number) else row.problem_id)
        if row.trajectory_id not in computed.by_id:
            raise NoAdvantageError(
                f"This trajectory was left out of the training: its status is {row.status}, it has no sampled tokens, "
                "they were sampled by too old a policy, or the context cut it at a turn that nobody counted."
            )
        return Advantages(computed.by_id[row.trajectory_id], computed.largest, computed.says)

    def _whole(self, ppo: PPO, number: int) -> bool:
        """Whether the whole data set is needed, and not too much."""
        if ppo.advantage.normalisation != "batch":
            return False
        query = "select count(*), coalesce(sum(sampled), 0) from episodes where data_set = ?"
        rows, tokens = self._library.database.one(query, number)
        return bool(rows <= MOST_ROWS and tokens <= MOST_TOKENS)

    def _computed(self, number: int, problem_id: str | None) -> _Computed:
        """Of a group, or of a whole data set where `problem_id` is None."""
        from tasks.train.advantages import Observed, estimate

        ppo, reward, oldest = _knobs(self._data_sets[number].manifest)
        if ppo.critic is not None:
            raise NoAdvantageError(f"The estimator {ppo.advantage.type} needs a critic's values, which are not stored.")
        knobs = ppo.advantage
        if problem_id is not None and knobs.normalisation == "batch":
            knobs = knobs.model_copy(update={"normalisation": "none"})
        try:
            samples = self._samples(number, problem_id, reward, oldest, ppo.mask_truncated)
            observed = [Observed(np.zeros(len(sample.actions))) for sample in samples]
            estimated = estimate(samples, observed, knobs).advantages if samples else []
        except ValueError as error:
            raise NoAdvantageError(f"They cannot be computed: {error}.") from error
        by_id = {
            sample.trajectory_id: dict(zip(sample.actions.tolist(), values.tolist(), strict=True))
            for sample, values in zip(samples, estimated, strict=True)
        }
        largest = max((float(np.abs(values).max()) for values in estimated if len(values)), default=0.0)
        return _Computed(by_id, largest, _says(ppo, len(samples), problem_id is None))

    def _samples(
        self, number: int, problem_id: str | None, reward: Reward, oldest: int, mask_truncated: bool
    ) -> "list[Sample]":
        """What the update trained on."""
        from tasks.train.samples import build_samples, known, within_staleness

        rows = self._rows(number, problem_id)
        trajectories, scores = self._library.trajectories(rows), self._scores(rows)
        samples = build_samples(trajectories, scores, reward, mask_truncated=mask_truncated)
        return known(within_staleness(samples, self._data_sets[number].iteration, oldest))

    def _rows(self, number: int, problem_id: str | None) -> list[int]:
        query = "select row from episodes where data_set = ? and (? is null or problem_id = ?) order by row"
        return [row for (row,) in self._library.database.all(query, number, problem_id, problem_id)]

    def _scores(self, rows: Sequence[int]) -> list[Score]:
        found = self._library.database.all(
            """select trajectory_id, turn, verdict, success, extracted, solution, judge_reason
            from turns where verdict is not null and list_contains(?, row)""",
            list(rows),
        )
        return [Score(*columns) for columns in found]


def _knobs(manifest: Manifest | None) -> tuple[PPO, Reward, int]:
    """How the data set's run trains, and the oldest policy that it trains on, in versions."""
    if manifest is None:
        return PPO(), Reward(), 0
    try:
        ppo, reward = PPO.model_validate(manifest.knob("ppo")), Reward.model_validate(manifest.knob("reward"))
        return ppo, reward, int(manifest.number("rollout.max_head_offpolicyness"))
    except ValueError as error:
        raise NoAdvantageError(f"The configuration in the manifest is of another time: {error}.") from error


def _says(ppo: PPO, samples: int, whole: bool) -> str:
    knobs = ppo.advantage
    of = "data set" if whole else "group"
    text = (
        f"Computed by this version's estimator {knobs.type} "
        f"from the {samples:,} trajectories of the {of} that were trained on"
    )
    if knobs.normalisation == "batch" and not whole:
        text += "; the update normalised them over its whole data set, too large to be read here: these are not"
    elif knobs.normalisation != "none":
        text += f"; normalised over the {of}"
    if ppo.kl.in_reward:
        text += "; without the KL penalty, which needs the reference policy"
    return text + "."
