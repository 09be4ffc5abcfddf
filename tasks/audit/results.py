"""What an audit comes to: a verdict for each check, the numbers of each data set, and the cases behind both."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["pass", "warn", "fail", "skipped"]

Unit = Literal["trajectory", "turn", "group", "problem", "data set", "object"]
"""What a case is: the id of a trajectory (also for a turn, whose number is in the detail), of a problem, a version, or
the key of an object."""


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that a check points at.

    Example: Case(unit="turn", id="demo/000003/12+7/0", data_set="runs/demo/trajectories/000003", detail="turn 1: …")
    """

    unit: Unit
    id: str
    data_set: str  # version; empty where the case belongs to no single one
    detail: str  # what is wrong with it, in words


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check found."""

    name: str  # as in `audit.checks`
    title: str  # for people
    about: str  # what an alarm means, in a sentence
    verdict: Verdict
    severity: str  # what an alarm would have meant
    value: float | None  # compared with the threshold; None where skipped
    threshold: float
    cases: int  # how many there are; those of `examples` are the first
    of: int  # what was looked at, in the check's unit
    unit: Unit
    says: str  # the finding, or why it was skipped, in a sentence
    examples: list[Case] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SetNumbers:
    """What one data set looks like; shares are of its turns or episodes, None where they cannot be known."""

    version: str
    run: str
    iteration: int
    trajectories: int
    turns: int
    tokens: int  # sampled
    success: list[float | None]  # of the turns with that number, by turn
    any_turn: float | None  # episodes with any right turn
    fixed: float | None  # wrong turns that were followed by a right one
    broken: float | None  # right turns that were followed by a wrong one
    answer_tokens: float | None  # mean length of a turn
    truncated: float | None
    failed: float | None
    unparsable: float | None
    zero_variance: float | None  # groups
    staleness: float | None  # mean over sampled tokens, in versions
    logprob: float | None  # mean behaviour logprob of a sampled token
    drift: float | None = None  # mean distance to the recomputed logprobs, where looked at


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts between edges.

    Example: Histogram(title="Tokens of a turn", unit="tokens", edges=[0, 8, 16], counts=[31, 7])
    """

    title: str
    unit: str
    edges: list[float]  # one more than counts
    counts: list[int]


@dataclass(frozen=True, slots=True)
class AuditResult:
    """All of one audit; as JSON it is `audit.json` of its version."""

    store: str  # root
    verdict: Verdict  # the worst of the checks
    checks: list[CheckResult]
    sets: list[SetNumbers]
    histograms: list[Histogram]
    seconds: dict[str, float]  # by check and step

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


_BADNESS: tuple[Verdict, ...] = ("skipped", "pass", "warn", "fail")


def worst(verdicts: list[Verdict]) -> Verdict:
    """The verdict of several together; of checks that were all skipped, `skipped`.

    >>> worst(["pass", "skipped", "warn"])
    'warn'
    """
    return max(verdicts, key=_BADNESS.index, default="skipped")


def from_dict(values: dict[str, Any]) -> AuditResult:
    """The inverse of `as_dict`."""
    checks = [
        CheckResult(**{**check, "examples": [Case(**case) for case in check["examples"]]}) for check in values["checks"]
    ]
    sets = [SetNumbers(**each) for each in values["sets"]]
    histograms = [Histogram(**each) for each in values["histograms"]]
    return AuditResult(**{**values, "checks": checks, "sets": sets, "histograms": histograms})
