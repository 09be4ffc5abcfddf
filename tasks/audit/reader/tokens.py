"""Prepare the tokens of a trajectory for a page: texts, spans, sequences, colours and advantages.

A long trajectory is shown one part at a time. Colours have seven steps; each step also has its own underline, and its
numbers are in the legend.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby, pairwise
from pathlib import Path
from threading import Lock
from typing import Literal, TypeVar

import numpy as np

from configs.score import Reward
from configs.score import Score as ScoreSettings
from configs.train import PPO
from storage.objects.store import Store
from storage.records import Score, Trajectory
from storage.versions.manifests import Manifest
from storage.visible import visible
from tasks.audit.data_sets import DataSet
from tasks.audit.decoding import NO_TOKEN, Decoder, find_decoder
from tasks.audit.reader.library import Library
from tasks.train.advantages import Observed, estimate
from tasks.train.returns import settled
from tasks.train.samples import Sample, Scorers, build_samples, with_known_returns, within_staleness

T = TypeVar("T")

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
        parts = (
            [f"policy version{'s' if len(versions) > 1 else ''} {', '.join(map(str, versions))}"] if versions else []
        )
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


def spans(row: Trajectory, part: int, text: Callable[[int], str], advantages: Mapping[int, float]) -> list[Span]:
    """Return the spans of one page.

    Args:
        row: the trajectory.
        part: number of the page, from 0.
        text: returns the text of a token id.
        advantages: advantages by position.
    """
    on_page = range(part * PART, min(len(row.token_ids), (part + 1) * PART))
    result = []
    for title, positions in groupby(on_page, lambda position: _title(row, position)):
        tokens = [_token(row, position, text, advantages) for position in positions]
        result.append(Span(title, tokens))
    return result


def _token(row: Trajectory, position: int, text: Callable[[int], str], advantages: Mapping[int, float]) -> Token:
    number, sampled = row.token_ids[position], bool(_at(row.action_mask, position))
    logprob, version = _at(row.logprobs, position), _at(row.versions, position)
    return Token(position, number, text(number), sampled, logprob, version, advantages.get(position))


def _at(values: Sequence[T], position: int) -> T | None:
    return values[position] if position < len(values) else None


def _title(row: Trajectory, position: int) -> str:
    """Return the title of the span of a token: a turn, the prompt, or the text after a turn."""
    for number, turn in enumerate(row.turns, 1):
        if turn.start <= position < turn.end:
            return f"Turn {number}"
    starts = sorted({0, *row.sequence_starts})
    sequence = bisect_right(starts, position)
    begin = starts[sequence - 1]
    before = [number for number, turn in enumerate(row.turns, 1) if begin <= turn.start and turn.end <= position]
    title = f"After turn {before[-1]}" if before else "Prompt"
    return f"{title}, sequence {sequence} of {len(starts)}" if len(starts) > 1 else title


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
    starts, found = sorted({0, *row.sequence_starts}), dict[int, Beginning]()
    if len(starts) < 2:
        return {}
    first: dict[int, int] = {}
    for number, turn in enumerate(row.turns):
        first.setdefault(_start(starts, turn.start), number)
    for start, number in first.items():
        follows = row.follows[number] if number < len(row.follows) else number - 1
        kind = _kind(row, starts, start, follows)
        found[number] = Beginning(starts.index(start) + 1, len(starts), kind, follows)
    return found


def _start(starts: list[int], place: int) -> int:
    return max((start for start in starts if start <= place), default=0)


def _kind(
    row: Trajectory, starts: list[int], start: int, follows: int
) -> Literal["conversation", "branch", "rewritten"]:
    if not 0 <= follows < len(row.turns):
        return "conversation"
    before = row.turns[follows]
    history = row.token_ids[_start(starts, before.start) : before.end]
    return "branch" if row.token_ids[start : start + len(history)] == history else "rewritten"


LOGPROB_EDGES = (-0.01, -0.1, -0.5, -1.0, -2.0, -4.0)
"""In nats; a logprob below the first n edges is in step n, so likely tokens are in step 0."""


@dataclass(frozen=True, slots=True)
class ColourStep:
    """One entry of the legend.

    Example: ColourStep(css="p6", says="below -4 (probability below 1.8%)")
    """

    css: str
    says: str


def logprob_step(logprob: float | None) -> str:
    """Return the CSS class of a sampled token for its logprob.

    >>> logprob_step(0.0), logprob_step(-0.3), logprob_step(-9.0), logprob_step(math.nan)
    ('p0', 'p2', 'p6', 'broken')
    """
    if logprob is None or math.isnan(logprob) or logprob > 0:
        return "broken"
    return f"p{sum(logprob < edge for edge in LOGPROB_EDGES)}"


def logprob_legend() -> list[ColourStep]:
    """Return all steps, likely tokens first."""
    edges = [f"{edge:g} ({math.exp(edge):.2g})" for edge in LOGPROB_EDGES]
    between = [f"{upper} to {lower}" for upper, lower in pairwise(edges)]
    says = [f"above {edges[0]}", *between, f"below {edges[-1]}"]
    return [ColourStep(f"p{number}", text) for number, text in enumerate(says)]


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


def advantage_legend(largest: float) -> list[ColourStep]:
    """Return all steps, the most negative first; the edges are at 1/6, 1/2 and 5/6 of the largest advantage."""
    edges = [number * largest / 6 for number in (-5, -3, -1, 1, 3, 5)]
    between = [f"{lower:.3g} to {upper:.3g}" for lower, upper in pairwise(edges)]
    says = [f"below {edges[0]:.3g}", *between, f"above {edges[-1]:.3g}"]
    return [ColourStep(css, text) for css, text in zip(_ADVANTAGE_STEPS, says, strict=True)]


_LOADING = Lock()  # two threads must not import transformers at the same time


def import_tokenizers() -> None:
    """Import the tokenizers' library early. It takes seconds, and the first page with tokens should not wait for it."""
    with _LOADING:
        from transformers import AutoTokenizer  # noqa: F401


@lru_cache(maxsize=8)
def find_vocabulary(store: Store, cache: Path, run: str, policy: str) -> tuple[Decoder | None, str]:
    """Return the tokenizer of a run, or None and the reason."""
    with _LOADING:
        return find_decoder(store, run, [policy], cache)


def texts_of(decoder: Decoder | None, ids: Iterable[int]) -> dict[int, str]:
    """Return the texts of single tokens by their ids, all empty without a tokenizer."""
    distinct = list(dict.fromkeys(ids))
    if decoder is None:
        return dict.fromkeys(distinct, "")
    known = [[number if 0 <= number < NO_TOKEN else NO_TOKEN] for number in distinct]
    return dict(zip(distinct, decoder.texts(known, special=True), strict=True))


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

    ppo: PPO = field(default_factory=PPO)
    reward: Reward = field(default_factory=Reward)
    scorers: Scorers = field(default_factory=lambda: ScoreSettings().by_source)
    oldest: int = 0  # largest staleness that it trains on


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
        whole = self._needs_whole_set(_knobs(data_set.manifest).ppo, number)
        computed = self._cached(number, None if whole else row.problem_id)
        if row.trajectory_id not in computed.by_id:
            raise NoAdvantageError(
                f"This trajectory was left out of the training. Possible reasons: its status ({row.status}), its fault "
                f"({row.fault or 'none'}), it has no sampled tokens, its policy was too old, or the context cut it and "
                "its number of turns is unknown."
            )
        return computed

    def _needs_whole_set(self, ppo: PPO, number: int) -> bool:
        """Return whether advantages are normalised over the whole data set, and the data set is small enough for it."""
        if ppo.advantage.normalisation != "batch":
            return False
        query = "select count(*), coalesce(sum(sampled), 0) from episodes where data_set = ?"
        rows, tokens = self._library.database.one(query, number)
        return bool(rows <= MOST_ROWS and tokens <= MOST_TOKENS)

    def _compute(self, number: int, problem_id: str | None) -> Advantages:
        """Compute the advantages of a group, or of the whole data set if `problem_id` is None."""
        training = _knobs(self._data_sets[number].manifest)
        if training.ppo.critic is not None:
            estimator = training.ppo.advantage.type
            raise NoAdvantageError(f"The estimator {estimator} needs a critic's values, which are not stored.")
        knobs = training.ppo.advantage
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
        return Advantages(by_id, largest, _describe(training.ppo, len(samples), problem_id is None))

    def _samples(self, number: int, problem_id: str | None, training: _Training) -> list[Sample]:
        """Return the samples that the update trained on."""
        database, ppo = self._library.database, training.ppo
        query = "select row from episodes where data_set = ? and (? is null or problem_id = ?) order by row"
        rows = database.integers(query, number, problem_id, problem_id).tolist()
        scores = database.all(
            """select trajectory_id, turn, verdict, coalesce(success, 0), extracted, solution, verdict_reason,
                scored_reward
            from turns where verdict is not null and list_contains(?, row)""",
            rows,
        )
        samples = build_samples(
            self._library.trajectories(rows),
            [Score(*columns) for columns in scores],
            training.reward if problem_id is None else self._with_least(number, problem_id, training.reward),
            scorers=training.scorers,
            credit=ppo.advantage.credit,
            mask_truncated=ppo.mask_truncated,
        )
        return with_known_returns(within_staleness(samples, self._data_sets[number].iteration, training.oldest))

    def _with_least(self, number: int, problem_id: str, reward: Reward) -> Reward:
        """Return the knobs of the reward, with the least of what the problem's scorer gave in the whole data set."""
        database = self._library.database
        query = "select any_value(scorer) from turns where data_set = ? and problem_id = ?"
        (scorer,) = database.one(query, number, problem_id)
        query = """select min(scored_reward) from turns semi join
            (select row from episodes where status in ('completed', 'truncated')) using (row)
            where data_set = ? and scorer = ? and verdict <> 'none'"""
        return settled(reward, scorer or "", [database.number(query, number, scorer)])


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
        says = f"The configuration in the manifest does not fit this version of the project: {error}."
        raise NoAdvantageError(says) from error


def _describe(ppo: PPO, samples: int, whole: bool) -> str:
    scope = "data set" if whole else "group"
    text = (
        f"Computed by this version's estimator {ppo.advantage.type} "
        f"from the {samples:,} trajectories of the {scope} that were trained on"
    )
    if ppo.advantage.normalisation == "batch" and not whole:
        text += "; not normalised here, because the data set over which the update normalised them is too large"
    elif ppo.advantage.normalisation != "none":
        text += f"; normalised over the {scope}"
    if ppo.kl.in_reward:
        text += "; without the KL penalty, which needs the reference policy"
    return text + "."
