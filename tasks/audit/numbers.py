"""What data sets look like: rates, lengths, staleness and logprobs of each, and histograms over all."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from tasks.audit.checks.zero_variance import GROUPS
from tasks.audit.database import AuditDatabase
from tasks.audit.results import Histogram, SetNumbers

_BINS = 20


def set_numbers(database: AuditDatabase, drifts: Mapping[str, float]) -> list[SetNumbers]:
    """One for each data set that could be read, in their order; `drifts` by version, where it was looked at."""
    success = defaultdict[int, list[float | None]](list)
    for number, _, rate in database.all("select data_set, turn, avg(success) from turns group by 1, 2 order by 1, 2"):
        success[number].append(rate)
    alike = f"select data_set, avg(same::integer) from ({GROUPS}) group by 1"
    turns, tokens, groups = (_by_set(database, query) for query in (_TURNS, _TOKENS, alike))
    found = []
    for number, version, run, iteration, *episodes in database.all(_EPISODES):
        count, spoken, best, truncated, failed = episodes
        fixed, broken, length, unparsable = turns.get(number, (None,) * 4)
        sampled, stale, logprob = tokens.get(number, (0, None, None))
        found.append(
            SetNumbers(
                version=version,
                run=run,
                iteration=iteration,
                trajectories=count,
                turns=int(spoken or 0),
                tokens=int(sampled or 0),
                success=success[number],
                any_turn=best,
                fixed=fixed,
                broken=broken,
                answer_tokens=length,
                truncated=truncated,
                failed=failed,
                unparsable=unparsable,
                zero_variance=groups.get(number, (None,))[0],
                staleness=stale,
                logprob=logprob,
                drift=drifts.get(version),
            )
        )
    return found


def histograms(database: AuditDatabase) -> list[Histogram]:
    """Of the lengths of turns, of the success rates of groups, and of the staleness of tokens."""
    lengths = _histogram(database, "Length of a turn", "tokens", 'select "end" - "start" from turns')
    rates = _histogram(
        database,
        "Success of a group, first turn",
        "share of its episodes",
        "select avg(success) from turns where turn = 0 and success is not null group by data_set, problem_id",
    )
    stale = _histogram(
        database,
        "Staleness of an episode's oldest token",
        "versions",
        """select d.iteration - list_min(list_filter(versions, lambda v: v >= 0))
        from trajectories join data_sets d using (data_set) where not d.evaluation""",
    )
    return [each for each in (lengths, rates, stale) if each]


def _by_set(database: AuditDatabase, query: str) -> dict[int, tuple[Any, ...]]:
    return {row[0]: row[1:] for row in database.all(query)}


def _histogram(database: AuditDatabase, title: str, unit: str, query: str) -> Histogram | None:
    """Bins of equal width, of whole numbers where the values are such; None without values."""
    low, high, whole = database.one(
        f"select min(v), max(v), bool_and(v = floor(v)) from ({query}) as t(v) where v is not null"
    )
    if low is None:
        return None
    low, high = float(low), float(high)
    counting = whole and high > 1
    width = max(1.0, -(-(high - low + 1) // _BINS)) if counting else (high - low) / _BINS or 1.0
    bins = int((high - low) / width) + 1 if counting or high == low else _BINS
    counted = dict(
        database.all(
            f"select least(floor((v - {low}) / {width}), {bins - 1})::integer, count(*) "
            f"from ({query}) as t(v) where v is not null group by 1"
        )
    )
    return Histogram(title, unit, [low + width * i for i in range(bins + 1)], [counted.get(i, 0) for i in range(bins)])


_EPISODES = """
    select data_set, version, d.run, d.iteration, count(*), sum(turns), avg(best),
        avg((status = 'truncated')::integer), avg((status = 'failed')::integer)
    from episodes join data_sets d using (data_set) group by all order by data_set"""

_TURNS = """
    select data_set, avg(after) filter (success = 0 and after is not null),
        avg(1 - after) filter (success > 0 and after is not null), avg("end" - "start"),
        avg((verdict = 'unparsable')::integer) filter (verdict is not null)
    from (select *, lead(success) over (partition by row order by turn) as after from turns) group by 1"""

_TOKENS = """
    select data_set, sum(count), sum(stale) / nullif(sum(count), 0),
        sum(logprob) filter (isfinite(logprob)) / nullif(sum(count) filter (isfinite(logprob)), 0)
    from (
        select data_set, len(known) as count, list_sum(logprobs) as logprob,
            len(known) * d.iteration - coalesce(list_sum(known), 0) as stale
        from (
            select data_set, logprobs, list_filter(versions, lambda v: v >= 0) as known from trajectories
        ) join data_sets d using (data_set)
    ) group by 1"""
