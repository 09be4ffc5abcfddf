"""The result of an audit: a verdict for each check, its first cases, and the numbers of each data set.

Example: the check `failed` measures a share of 0.2 in the worst data set. Its threshold is 0.1 and its severity warn,
so its `CheckResult` has value=0.2, threshold=0.1 and verdict="warn"; `examples` has the first failed episodes.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter

from tasks.tables.sets import Case, Unit

Level = Literal["pass", "warn", "fail", "skipped"]
LEVELS: tuple[Level, ...] = ("fail", "warn", "pass", "skipped")
"""The verdicts of checks and of an audit, worst first; those of scorers are others."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The finding of one check."""

    name: str  # as in `audit.checks`, and for people, too
    about: str  # what the check measures, in a sentence
    verdict: Level
    severity: str  # the verdict if the value is above the threshold
    value: float | None  # compared with the threshold; None if the check was skipped
    threshold: float
    cases: int  # number of all cases; `examples` are the first of them
    of: int  # number of units that were checked
    unit: Unit
    says: str  # the finding, or why the check was skipped, in a sentence
    examples: list[Case] = field(default_factory=list)
    share_of: int = 0  # number of units of which `value` is a share, if these are those of one data set only


@dataclass(frozen=True, slots=True)
class SetNumbers:
    """The numbers of one data set; shares of its turns, episodes or groups are None if they cannot be computed."""

    version: str
    run: str
    iteration: int
    trajectories: int
    turns: int
    tokens: int  # sampled
    success: list[float | None]  # share of right turns, by turn number; calls of tools are not counted
    any_turn: float | None  # share of episodes with any right turn
    fixed: float | None  # share of wrong turns followed by a right one, among wrong turns with a next answer
    broken: float | None  # share of right turns followed by a wrong one, among right turns with a next answer
    answer_tokens: float | None  # mean length of a turn
    truncated: float | None
    failed: float | None
    unparsable: float | None
    zero_variance: float | None  # share of groups
    staleness: float | None  # mean over sampled tokens, in policy versions
    logprob: float | None  # mean behaviour logprob of a sampled token
    drift: float | None = None  # mean distance to the recomputed logprobs; None if they were not recomputed
    rewards: dict[str, float] = field(default_factory=dict)  # means: return, reward, parts; if not successes alone
    calls: dict[str, dict[str, int]] = field(default_factory=dict)  # number by tool and status
    with_calls: float | None = None  # share of episodes that call a tool; None if none does in the whole audit
    branched: float | None = None  # share of episodes with branches; None if none has any in the whole audit

    @property
    def failed_calls(self) -> float | None:
        """The share of failed calls among those with an output."""
        failed, answered = (sum(each.get(of, 0) for each in self.calls.values()) for of in ("failed", "answered"))
        return failed / (failed + answered) if failed + answered else None


@dataclass(frozen=True, slots=True)
class Histogram:
    """The number of values in each bin.

    Example: Histogram(title="Tokens of a turn", unit="tokens", edges=[0, 8, 16], counts=[31, 7])
    """

    title: str
    unit: str
    edges: list[float]  # one more than counts
    counts: list[int]


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The whole result of one audit; its JSON is the file `audit.json` of the audit's version."""

    store: str  # root
    verdict: Level  # the worst of the checks
    checks: list[CheckResult]
    sets: list[SetNumbers]
    histograms: list[Histogram]
    seconds: dict[str, float]  # by check and step


def worst(verdicts: list[Level]) -> Level:
    """Return the worst verdict; `skipped` if all checks were skipped.

    >>> worst(["pass", "skipped", "warn"])
    'warn'
    """
    return min(verdicts, key=LEVELS.index, default="skipped")


def from_dict(values: dict[str, Any]) -> AuditResult:
    """Build the result from the content of `audit.json`."""
    return TypeAdapter(AuditResult).validate_python(values)
