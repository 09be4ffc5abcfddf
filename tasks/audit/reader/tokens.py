"""Prepare the tokens of a trajectory for a page: texts, spans, sequences, colours and advantages.

A long trajectory is shown one part at a time. Colours have seven steps; each step also has its own underline, and its
numbers are in the legend.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby, islice, pairwise, zip_longest
from pathlib import Path
from threading import Lock
from typing import Literal

import numpy as np

from configs.score import Reward
from configs.score import Score as ScoreSettings
from configs.train import PPO
from storage.objects.store import Store
from storage.records import Score, Trajectory
from storage.visible import visible
from tasks.audit.data_sets import DataSet
from tasks.audit.decoding import NO_TOKEN, Decoder, find_decoder
from tasks.audit.reader.library import Library
from tasks.train.advantages import Observed, estimate
from tasks.train.returns import settled
from tasks.train.samples import Sample, Scorers, build_samples, with_known_returns, within_staleness

PART = 2000
"""Tokens on one page."""


@dataclass(frozen=True, slots=True)
class Token:
    r"""One token of a trajectory; values that a damaged row lacks are None.

    Example: Token(position=18, id=108, text="\\boxed", sampled=True, logprob=-0.002, version=61, advantage=0.5)
    """

    position: int
    id: int
    text: str
    sampled: bool
    logprob: float | None
    version: int | None
    advantage: float | None

    @property
    def shown(self) -> str:
        """The visible text with a sign for line breaks, or the id if the token has no text."""
        return visible(self.text).replace("\n", "↵\n") or f"⟨{self.id}⟩"

    @property
    def about(self) -> str:
        """The values of the token in one line, for a tooltip."""
        numbers = (("logprob", self.logprob), ("advantage", self.advantage))
        values = [f"{name} {number:.4g}" for name, number in numbers if self.sampled and number is not None]
        version = f"policy version {self.version}" if self.sampled else "not sampled"
        return ", ".join([f"position {self.position}", f"id {self.id}", *values, version])


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of a prompt, turn or feedback, or the part of them that is on this page.

    Example: Span(title="Turn 1", tokens=[…])
    """

    title: str
    tokens: list[Token]

    @property
    def sampled(self) -> bool:
        return any(token.sampled for token in self.tokens)

    def says(self, colour: str) -> str:
        """Describe the sampled tokens: their policy versions, and the mean logprob or the range of advantages."""
        sampled = [token for token in self.tokens if token.sampled]
        versions = sorted({token.version for token in sampled if token.version is not None})
        plural = "s" if len(versions) > 1 else ""
        parts = [f"policy version{plural} {', '.join(map(str, versions))}"] if versions else []
        logprobs = [token.logprob for token in sampled if token.logprob is not None]
        advantages = [token.advantage for token in sampled if token.advantage is not None]
        if colour == "logprob" and logprobs:
            parts.append(f"mean logprob {sum(logprobs) / len(logprobs):.3g}")
        if colour == "advantage" and advantages:
            low, high = min(advantages), max(advantages)
            parts.append(f"advantage {low:.3g}" if low == high else f"advantages {low:.3g} to {high:.3g}")
        return ", ".join(parts)

    def changes(self) -> Iterator[tuple[Token, bool]]:
        """Yield each token, and whether another policy version begins with it."""
        before: int | None = None
        for token in self.tokens:
            yield token, token.sampled and token.version != before
            before = token.version if token.sampled else before


def parts(row: Trajectory) -> int:
    """Return the number of pages for the tokens."""
    return max(1, -(-len(row.token_ids) // PART))


def spans(row: Trajectory, part: int, decoder: Decoder | None, advantages: Mapping[int, float]) -> list[Span]:
    """Return the spans of one page.

    Args:
        row: the trajectory; a damaged one may lack values at its end.
        part: number of the page, from 1 on.
        decoder: decodes the tokens; None: they have no text.
        advantages: advantages by position.
    """
    begin, end = (part - 1) * PART, min(len(row.token_ids), part * PART)
    columns = zip_longest(row.token_ids, row.action_mask, row.logprobs, row.versions)
    texts = [""] * (end - begin)
    if decoder:
        ids = [[number if 0 <= number < NO_TOKEN else NO_TOKEN] for number in row.token_ids[begin:end]]
        texts = decoder.texts(ids, special=True)
    tokens = [
        Token(position, number, text, bool(sampled), logprob, version, advantages.get(position))
        for position, text, (number, sampled, logprob, version) in zip(
            range(begin, end), texts, islice(columns, begin, end), strict=True
        )
    ]
    return [Span(title, list(same)) for title, same in groupby(tokens, lambda token: _title(row, token.position))]


def _title(row: Trajectory, position: int) -> str:
    """Return the title of the span of a token: a turn, the prompt, or the text after a turn."""
    for number, turn in enumerate(row.turns, 1):
        if turn.start <= position < turn.end:
            return f"Turn {number}"
    starts = sorted({0, *row.sequence_starts})
    begin = _begin(starts, position)
    before = [number for number, turn in enumerate(row.turns, 1) if begin <= turn.start and turn.end <= position]
    title = f"After turn {before[-1]}" if before else "Prompt"
    return f"{title}, sequence {starts.index(begin) + 1} of {len(starts)}" if len(starts) > 1 else title


def _begin(starts: list[int], position: int) -> int:
    """Return the start of the sequence with this position."""
    return max((start for start in starts if start <= position), default=0)


@dataclass(frozen=True, slots=True)
class Beginning:
    """The begin of a sequence that is not the episode's only one.

    conversation: its first turn follows none. branch: it repeats the tokens up to another turn, from which it goes on.
    rewritten: its first turn follows another one, but the tokens before it are others.

    Example: Beginning(sequence=2, of=3, kind="branch", follows=0)
    """

    sequence: int  # from 1 on
    of: int
    kind: Literal["conversation", "branch", "rewritten"]
    follows: int  # the turn that its first turn follows; -1: none


def beginnings(row: Trajectory) -> dict[int, Beginning]:
    """Return the beginnings of sequences, by the number of their first turn; none if the row is one conversation."""
    starts = sorted({0, *row.sequence_starts})
    first: dict[int, int] = {}
    for number, turn in enumerate(row.turns):
        first.setdefault(_begin(starts, turn.start), number)
    found: dict[int, Beginning] = {}
    for start, number in first.items() if len(starts) > 1 else ():
        follows = row.follows[number] if number < len(row.follows) else number - 1
        kind: Literal["conversation", "branch", "rewritten"] = "conversation"
        if 0 <= follows < len(row.turns):
            before = row.turns[follows]
            history = row.token_ids[_begin(starts, before.start) : before.end]
            kind = "branch" if row.token_ids[start : start + len(history)] == history else "rewritten"
        found[number] = Beginning(starts.index(start) + 1, len(starts), kind, follows)
    return found


LOGPROB_EDGES = (-0.01, -0.1, -0.5, -1.0, -2.0, -4.0)
"""In nats; a logprob below the first n edges is in step n, so likely tokens are in step 0."""


Legend = list[tuple[str, str]]
"""The steps of a colour: CSS class and range of values, such as ("p6", "below -4 (0.018)")."""


def logprob_step(logprob: float | None) -> str:
    """Return the CSS class of a sampled token for its logprob.

    >>> logprob_step(0.0), logprob_step(-0.3), logprob_step(-9.0), logprob_step(math.nan)
    ('p0', 'p2', 'p6', 'broken')
    """
    if logprob is None or math.isnan(logprob) or logprob > 0:
        return "broken"
    return f"p{sum(logprob < edge for edge in LOGPROB_EDGES)}"


def logprob_legend() -> Legend:
    """Return all steps, likely tokens first."""
    edges = [f"{edge:g} ({math.exp(edge):.2g})" for edge in LOGPROB_EDGES]
    return _legend([f"p{number}" for number in range(len(edges) + 1)], edges, "above", "below")


def _legend(steps: Sequence[str], edges: list[str], first: str, last: str) -> Legend:
    between = [f"{one} to {other}" for one, other in pairwise(edges)]
    return list(zip(steps, [f"{first} {edges[0]}", *between, f"{last} {edges[-1]}"], strict=True))


_ADVANTAGE_STEPS = ("n3", "n2", "n1", "zero", "a1", "a2", "a3")


def advantage_step(advantage: float | None, largest: float) -> str:
    """Return the CSS class of a token for its advantage relative to the largest one; empty without an advantage.

    >>> advantage_step(-1.0, 1.0), advantage_step(0.4, 1.0), advantage_step(0.0, 0.0), advantage_step(None, 1.0)
    ('n3', 'a1', 'zero', '')
    """
    if advantage is None:
        return ""
    if not math.isfinite(advantage):
        return "broken"
    return _ADVANTAGE_STEPS[3 + (round(3 * advantage / largest) if largest else 0)]


def advantage_legend(largest: float) -> Legend:
    """Return all steps, the most negative first; the edges are at 1/6, 1/2 and 5/6 of the largest advantage."""
    return _legend(_ADVANTAGE_STEPS, [f"{n * largest / 6:.3g}" for n in (-5, -3, -1, 1, 3, 5)], "below", "above")


_LOADING = Lock()  # two threads must not import modules of transformers at the same time


@lru_cache(maxsize=8)
def find_vocabulary(store: Store, cache: Path, run: str, policy: str) -> tuple[Decoder | None, str]:
    """Return the tokenizer of a run, or None and the reason."""
    with _LOADING:
        return find_decoder(store, run, [policy], cache)


MOST_ROWS, MOST_TOKENS = 4096, 2_000_000
"""The largest data set, in rows and sampled tokens, that is normalised as a whole."""
_CACHED_GROUPS = 4


class NoAdvantageError(Exception):
    """A trajectory has no advantages, or they cannot be computed; the message says why."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """The advantages of a group or a data set, in units of the shaped reward, or normalised in standard deviations.

    Example: Advantages(by_id={"demo/000003/12+7/0": {18: 0.5, 19: 0.5}}, largest=0.9, says="…")
    """

    by_id: dict[str, dict[int, float]] = field(default_factory=dict)  # by trajectory and position
    largest: float = 0.0  # largest absolute advantage
    says: str = ""  # how they were computed


@dataclass(frozen=True, slots=True)
class _Training:
    """The knobs of a run's training."""

    ppo: PPO
    reward: Reward
    scorers: Scorers
    oldest: int  # largest staleness that it trains on


class AdvantageComputer:
    """Computes the advantages of tokens from stored rows and scores, with the code that updates use.

    Updates of an older version of this project may have computed other advantages, because the algorithm has changed.
    Parts that need a model are left out: `gae` needs the values of its critic, and a KL penalty in the reward needs the
    reference policy. The advantages of the last few groups are cached.
    """

    def __init__(self, library: Library, data_sets: Sequence[DataSet]) -> None:
        self._library, self._data_sets = library, data_sets
        self._cached = lru_cache(_CACHED_GROUPS)(self._compute)

    def compute(self, row: Trajectory, number: int) -> Advantages:
        """Return the advantages of `row`, a trajectory of data set `number`, and of all that belong to them.

        Raises:
            NoAdvantageError: the trajectory has none, or they cannot be computed.
        """
        data_set = self._data_sets[number]
        if data_set.is_evaluation:
            raise NoAdvantageError("This is an evaluation, which is never trained on.")
        whole = False
        if _knobs(data_set).ppo.advantage.normalisation == "batch":
            query = "select count(*), coalesce(sum(sampled), 0) from episodes where data_set = ?"
            rows, tokens = self._library.database.one(query, number)
            whole = rows <= MOST_ROWS and tokens <= MOST_TOKENS
        computed = self._cached(number, None if whole else row.problem_id)
        if row.trajectory_id not in computed.by_id:
            raise NoAdvantageError(
                f"This trajectory was left out of the training. Possible reasons: its status ({row.status}), its fault "
                f"({row.fault or 'none'}), it has no sampled tokens, its policy was too old, or the context cut it and "
                "its number of turns is unknown."
            )
        return computed

    def _compute(self, number: int, problem_id: str | None) -> Advantages:
        """Compute the advantages of a group, or of the whole data set if `problem_id` is None."""
        training = _knobs(self._data_sets[number])
        ppo, knobs = training.ppo, training.ppo.advantage
        if ppo.critic is not None:
            raise NoAdvantageError(f"The estimator {knobs.type} needs a critic's values, which are not stored.")
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
        largest = max((abs(value) for values in by_id.values() for value in values.values()), default=0.0)
        scope = "data set" if problem_id is None else "group"
        says = (
            f"Computed by this version's estimator {knobs.type} "
            f"from the {len(samples):,} trajectories of the {scope} that were trained on"
        )
        if knobs.normalisation != ppo.advantage.normalisation:
            says += "; not normalised here, because the data set over which the update normalised them is too large"
        elif knobs.normalisation != "none":
            says += f"; normalised over the {scope}"
        if ppo.kl.in_reward:
            says += "; without the KL penalty, which needs the reference policy"
        return Advantages(by_id, largest, says + ".")

    def _samples(self, number: int, problem_id: str | None, training: _Training) -> list[Sample]:
        """Return the samples that the update trained on."""
        database, ppo, reward = self._library.database, training.ppo, training.reward
        query = "select row from episodes where data_set = ? and (? is null or problem_id = ?) order by row"
        rows = database.integers(query, number, problem_id, problem_id).tolist()
        scores = database.all(
            """select trajectory_id, turn, verdict, coalesce(success, 0), extracted, solution, verdict_reason,
                scored_reward
            from turns where verdict is not null and list_contains(?, row)""",
            rows,
        )
        if problem_id is not None:  # the least reward is that of the whole data set
            query = "select any_value(scorer) from turns where data_set = ? and problem_id = ?"
            (scorer,) = database.one(query, number, problem_id)
            query = """select min(scored_reward) from turns semi join
                (select row from episodes where status in ('completed', 'truncated')) using (row)
                where data_set = ? and scorer = ? and verdict <> 'none'"""
            reward = settled(reward, scorer or "", [database.number(query, number, scorer)])
        samples = build_samples(
            self._library.trajectories(rows),
            [Score(*columns) for columns in scores],
            reward,
            scorers=training.scorers,
            credit=ppo.advantage.credit,
            mask_truncated=ppo.mask_truncated,
        )
        return with_known_returns(within_staleness(samples, self._data_sets[number].iteration, training.oldest))


def _knobs(data_set: DataSet) -> _Training:
    manifest = data_set.manifest
    assert manifest, "rows are read only of data sets with a manifest"
    try:
        return _Training(
            PPO.model_validate(manifest.knob("ppo")),
            Reward.model_validate(manifest.knob("reward")),
            ScoreSettings.model_validate(manifest.knob("score")).by_source,
            int(manifest.number("rollout.max_head_offpolicyness")),
        )
    except ValueError as error:
        says = f"The configuration in the manifest does not fit this version of the project: {error}."
        raise NoAdvantageError(says) from error
