"""Prepare the tokens of a trajectory for a page: texts, spans, sequences, colours and advantages.

A page shows one part of a long trajectory. Colours have seven steps; each step also has its own underline, and its
numbers are in the legend.
"""

import math
import sys
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice, pairwise, zip_longest
from typing import TYPE_CHECKING

import numpy as np

from configs.algorithms import Algorithm as AlgorithmKnobs
from configs.algorithms import read_algorithm
from configs.score import Reward
from configs.score import Score as ScoreSettings
from configs.stored import lost
from storage.records import Score, Trajectory
from storage.visible import visible
from tasks.audit.decoding import NO_TOKEN, Decoder
from tasks.audit.reader.library import Library
from tasks.tables.sets import DataSet
from tasks.train.advantages import Observed
from tasks.train.returns import settled
from tasks.train.samples import build_samples, within_staleness

if TYPE_CHECKING:
    from tasks.train.algorithms.algorithm import Algorithm

PART = 2000
"""Tokens on one page."""


@dataclass(frozen=True, slots=True)
class Token:
    r"""One token of a trajectory; values that a row lacks, because it is damaged or imported without them, are None.

    Example: Token(position=18, id=108, text="\\boxed", sampled=True, logprob=-0.002, version=61, advantage=0.5)
    """

    position: int
    id: int
    text: str
    sampled: bool
    logprob: float | None
    version: int | None
    advantage: float | None  # or the weight in the cross-entropy, which observations may have, too

    @property
    def shown(self) -> str:
        """The visible text with a sign for line breaks, or the id if the token has no text."""
        return visible(self.text).replace("\n", "↵\n") or f"⟨{self.id}⟩"

    @property
    def about(self) -> str:
        """The values of the token in one line, for a tooltip."""
        numbers = (("logprob", self.logprob if self.sampled else None), ("advantage", self.advantage))
        values = [f"{name} {number:.4g}" for name, number in numbers if number is not None]
        known = "unknown" if self.version is None else self.version
        version = f"policy version {known}" if self.sampled else "not sampled"
        return ", ".join([f"position {self.position}", f"id {self.id}", *values, version])


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of a prompt, turn or feedback, or those of them that are on this page.

    Example: Span(title="Turn 1", tokens=[…])
    """

    title: str
    tokens: list[Token]

    @property
    def sampled(self) -> bool:
        return any(token.sampled for token in self.tokens)

    def mean(self, colour: str) -> str:
        """Describe the mean logprob or advantage of the sampled tokens; empty without any."""
        known = [number for each in self.tokens if each.sampled and (number := getattr(each, colour)) is not None]
        return f", mean {colour} {sum(known) / len(known):.3g}" if known else ""

    def changes(self) -> Iterator[tuple[Token, bool]]:
        """Yield each token, and whether another policy version begins with it."""
        before: int | None = None
        for token in self.tokens:
            yield token, token.sampled and token.version != before
            before = token.version if token.sampled else before


def spans(row: Trajectory, part: slice, decoder: Decoder | None, advantages: Mapping[int, float]) -> list[Span]:
    """Return the spans of one page.

    Args:
        row: the trajectory; a damaged one may lack values at its end.
        part: the positions on the page.
        decoder: decodes the tokens; None: they have no text.
        advantages: advantages by position.
    """
    shown = row.token_ids[part]
    columns = zip_longest(row.token_ids, row.action_mask, row.logprobs, row.versions)
    texts = [""] * len(shown)
    if decoder:
        texts = decoder.texts([[n if 0 <= n < NO_TOKEN else NO_TOKEN] for n in shown], special=True)
    tokens = list[Token]()
    of_part = zip(texts, islice(columns, part.start, part.start + len(shown)), strict=True)
    for position, (text, (number, sampled, logprob, version)) in enumerate(of_part, part.start):
        values = logprob, None if version == -1 else version, advantages.get(position)
        tokens.append(Token(position, number, text, bool(sampled), *values))
    return [Span(title, list(same)) for title, same in groupby(tokens, lambda token: _title(row, token.position))]


def _title(row: Trajectory, position: int) -> str:
    """Return the title of the span of a token: a turn, the prompt, or the text after a turn."""
    for number, turn in enumerate(row.turns, 1):
        if turn.start <= position < turn.end:
            return f"Turn {number}"
    starts = sorted({0, *row.sequence_starts})
    begin = max(start for start in starts if start <= position)
    before = [number for number, turn in enumerate(row.turns, 1) if begin <= turn.start and turn.end <= position]
    title = f"After turn {before[-1]}" if before else "Prompt"
    return f"{title}, sequence {starts.index(begin) + 1} of {len(starts)}" if len(starts) > 1 else title


@dataclass(frozen=True, slots=True)
class Scale:
    """The colours of numbers: step n is for numbers from edge n - 1 up to edge n.

    >>> LOGPROBS.step(-0.3), LOGPROBS.step(0.5), LOGPROBS.step(-math.inf), LOGPROBS.step(math.nan)
    ('p2', 'broken', 'p6', 'broken')
    >>> advantages_up_to(1.0).step(0.4), advantages_up_to(0.0).step(0.0), advantages_up_to(1.0).step(-math.inf)
    ('a1', 'zero', 'broken')
    """

    steps: Sequence[str]  # CSS classes, of the lowest numbers first
    edges: Sequence[float]  # one less than the steps
    texts: Sequence[str]  # of the edges
    least: float  # a smaller number is broken
    most: float  # and so is a larger one

    def step(self, number: float | None) -> str:
        """Return the CSS class of a number; empty without one."""
        if number is None:
            return ""
        return self.steps[bisect(self.edges, number)] if self.least <= number <= self.most else "broken"

    def legend(self) -> list[tuple[str, str]]:
        """Return all steps, the lowest first: CSS class and range of values, such as ("p6", "below -4 (0.018)")."""
        between = [f"{one} to {other}" for one, other in pairwise(self.texts)]
        return list(zip(self.steps, [f"below {self.texts[0]}", *between, f"above {self.texts[-1]}"], strict=True))


_NATS = (-4.0, -2.0, -1.0, -0.5, -0.1, -0.01)
LOGPROBS = Scale(
    steps=[f"p{n}" for n in range(6, -1, -1)],
    edges=_NATS,
    texts=[f"{edge:g} ({math.exp(edge):.2g})" for edge in _NATS],
    least=-math.inf,
    most=0.0,
)
"""The colours of sampled tokens by their logprobs; the texts of the edges have the probabilities."""


def advantages_up_to(largest: float) -> Scale:
    """Return the scale with edges at 1/6, 1/2 and 5/6 of the largest advantage."""
    edges = [n * (largest or 1.0) / 6 for n in (-5, -3, -1, 1, 3, 5)]
    steps, finite = ("n3", "n2", "n1", "zero", "a1", "a2", "a3"), sys.float_info.max
    return Scale(steps, edges, [f"{edge:.3g}" for edge in edges], -finite, finite)


@dataclass(frozen=True, slots=True)
class Advantages:
    """The advantages of a trajectory, in units of the shaped reward.

    Example: Advantages(by_position={18: 0.5, 19: 0.5}, largest=0.9, says="…")
    """

    by_position: Mapping[int, float] = field(default_factory=dict)
    largest: float = 0.0  # largest absolute advantage in its group
    says: str = ""  # how they were computed


def compute_advantages(library: Library, data_set: DataSet, row: Trajectory) -> Advantages:
    """Compute the advantages of a trajectory from the stored rows and scores of its group, with the code of updates.

    Updates of an older version of this project may have computed other advantages, because the algorithm has changed.
    What needs more than the group is left out: the normalisation over a batch, which only divides by a number, a
    critic's values, and a KL penalty in the reward, which needs the reference policy.

    Raises:
        ValueError: the trajectory has none, or they cannot be computed.
    """
    if data_set.is_evaluation:
        raise ValueError("this is an evaluation, which is never trained on")
    manifest = data_set.manifest
    assert manifest, "rows are read only of data sets with a manifest"
    knobs, reward = read_algorithm(manifest.knob("algorithm")), Reward.model_validate(manifest.knob("reward"))
    scorers = ScoreSettings.model_validate(manifest.knob("score"))
    algorithm = _algorithm(knobs.undivided, int(manifest.number("sampling.max_new_tokens")))
    rows, scores, reward = _group(library, data_set, row.problem_id, reward)
    masked = bool(manifest.knob("train.mask_truncated"))
    built = build_samples(rows, scores, reward, scorers=scorers, mask_truncated=masked)
    samples = within_staleness(built, data_set.iteration, int(manifest.number("rollout.max_head_offpolicyness")))
    assigned = algorithm.assign(samples, [Observed(np.zeros(len(sample.actions))) for sample in samples])
    by_id = {sample.trajectory_id: index for index, sample in enumerate(samples)}
    if row.trajectory_id not in by_id:
        raise ValueError(
            f"this trajectory was left out of the training: by its status ({row.status}) or fault, because its policy "
            "was too old or a grader failed on it, or because it has no sampled tokens"
        )
    index, in_policy_loss = by_id[row.trajectory_id], "rl" in assigned.weights
    numbers = assigned.advantages if in_policy_loss else assigned.weights["ce"]
    of_tokens = dict(zip(samples[index].actions.tolist(), numbers[index].tolist(), strict=True))
    if assigned.observations:
        positions, weights = assigned.observations[index]
        of_tokens |= dict(zip(positions.tolist(), weights.tolist(), strict=True))
    says = "" if in_policy_loss else "Weights in the cross-entropy. "
    says += f"Computed by this version's algorithm {knobs.type} from the {len(samples):,} trajectories of the group "
    says += "that were trained on. The update may differ in what needs its batch or the reference policy: division by "
    says += "the root mean square, normalisation, a KL penalty in the reward"
    if former := lost(manifest.config):
        says += f". Its run had other rules: {', '.join(former)}"
    largest = max((float(abs(each).max()) for each in numbers if len(each)), default=0.0)
    return Advantages(of_tokens, largest, says + ".")


def _algorithm(knobs: AlgorithmKnobs, max_new_tokens: int) -> "Algorithm":
    """Make the algorithm; code of the user's is never imported because a data set names it.

    Raises:
        ValueError: it needs what is not stored.
    """
    if knobs.own:
        raise ValueError(f"they are computed by {knobs.type}, which is no part of this program")
    if knobs.critic is not None or knobs.taught:
        needed = "a critic's values" if knobs.critic else "the teacher's logprobs"
        raise ValueError(f"the algorithm {knobs.type} needs {needed}, which are not stored")
    from tasks.train.algorithms import make_algorithm  # torch, which takes seconds

    return make_algorithm(knobs, max_new_tokens)


def _group(
    library: Library, data_set: DataSet, problem_id: str, reward: Reward
) -> tuple[list[Trajectory], list[Score], Reward]:
    """Return the trajectories and scores of a group, and the reward with the least one of the whole data set."""
    database, rows = library.database, library.group(data_set.version, problem_id)
    scores = database.all("select * exclude (row) from stored_scores where list_contains(?, row)", rows)
    (scorer,) = database.one("select any_value(scorer) from turns where list_contains(?, row)", rows)
    query = "select max(least) from least_rewards where data_set = ? and scorer = ?"
    least = database.number(query, data_set.number, scorer)
    return library.trajectories(rows), [Score(*columns) for columns in scores], settled(reward, scorer or "", [least])
