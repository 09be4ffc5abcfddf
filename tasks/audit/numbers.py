"""Compute the numbers of each data set (rates, lengths, staleness, logprobs) and histograms over all of them."""

from collections.abc import Mapping
from itertools import pairwise

from tasks.audit.database import AuditDatabase
from tasks.audit.results import Histogram, SetNumbers

_BINS = 20
_TOLERANCE = 1e-6  # of a step: shares such as 1/3 are rounded


def set_numbers(database: AuditDatabase, drifts: Mapping[str, float]) -> list[SetNumbers]:
    """Return the numbers of each readable data set; `drifts` maps a version to its logprob drift, if it is known."""
    found = database.records("select * exclude (data_set) from set_numbers order by data_set")
    return [SetNumbers(**columns, drift=drifts.get(columns["version"])) for columns in found]


def histograms(database: AuditDatabase) -> list[Histogram]:
    """Return histograms of turn lengths, success rates of groups, rewards, and staleness of episodes' oldest tokens."""
    drawn = (_histogram(database, *each) for each in _HISTOGRAMS)
    return [each for each in drawn if each]


_HISTOGRAMS = (
    ("Length of a turn", "tokens", 'select "end" - "start" from turns'),
    (
        "Success of a group, first turn",
        "share of its episodes",
        "select avg(success) from turns where answer = 0 and success is not null group by data_set, problem_id",
    ),
    (
        "Reward of a turn",
        "reward, if not all are 0 or 1",
        """select coalesce(scored_reward, reward) as given from turns where answer is not null and exists (
            select * from turns where answer is not null and coalesce(scored_reward, reward) not in (0, 1))""",
    ),
    (
        "Staleness of an episode's oldest token",
        "versions",
        "select behind from staleness",
    ),
)
"""Title, unit, and a query of the values."""


def _histogram(database: AuditDatabase, title: str, unit: str, query: str) -> Histogram | None:
    """Count the values in bins of equal width, whole numbers if the values are whole. Return None without values."""
    values = f"(select v from ({query}) as t(v) where v is not null)"
    low, high, whole = database.one(f"select min(v), max(v), bool_and(v = floor(v)) from {values}")
    if low is None:
        return None
    low, high = float(low), float(high)
    if not whole and (step := _common_step(database, values)):  # a bin for each value, with the value in its middle
        low, high = low - step / 2, high + step / 2
        width, bins = step, round((high - low) / step)
    elif whole and high > 1:
        width = max(1.0, -(-(high - low + 1) // _BINS))
        bins = int((high - low) / width) + 1
    else:
        width, bins = ((high - low) / _BINS, _BINS) if high > low else (1.0, 1)
    counted = database.all(
        f"select least(floor((v - {low}) / {width}), {bins - 1})::integer, count(*) from {values} group by 1"
    )
    counts = dict(counted)
    return Histogram(title, unit, [low + width * i for i in range(bins + 1)], [counts.get(i, 0) for i in range(bins)])


def _common_step(database: AuditDatabase, rows: str) -> float | None:
    """Return the step of which all distances between the values are multiples; None if they would need too many bins.

    Success rates of groups of 16 are multiples of 1/16: bins of another width would leave gaps.
    """
    values = [v for (v,) in database.all(f"select distinct v from {rows} order by v limit {_BINS + 2}")]
    if not 1 < len(values) <= _BINS + 1:
        return None
    step = min(after - before for before, after in pairwise(values))
    multiples = [(value - values[0]) / step for value in values]
    fits = all(abs(multiple - round(multiple)) < _TOLERANCE for multiple in multiples) and multiples[-1] < _BINS + 1
    return float(step) if fits else None
