"""Compute the numbers of each data set (rates, lengths, staleness, logprobs) and histograms over all of them."""

import itertools
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from tasks.audit.checks.zero_variance import GROUPS
from tasks.audit.database import AuditDatabase
from tasks.audit.results import Histogram, SetNumbers

_BINS = 20
_TOLERANCE = 1e-6  # of a step: shares such as 1/3 are rounded


def set_numbers(database: AuditDatabase, drifts: Mapping[str, float]) -> list[SetNumbers]:
    """Return the numbers of each readable data set; `drifts` maps a version to its logprob drift, if it is known."""
    success = defaultdict[int, list[float | None]](list)
    for number, _, rate in database.all(_SUCCESS):
        success[number].append(rate)
    rewards = defaultdict[int, dict[str, float]](dict)
    for number, name, mean in database.all(_REWARDS):
        rewards[number][name] = mean
    calls = defaultdict[int, dict[str, dict[str, int]]](dict)
    for number, name, status, count in database.all(_CALLS):
        calls[number].setdefault(name, {})[status] = count
    zero_variance = f"select data_set, avg(same::integer) from ({GROUPS}) group by 1"
    by_turns, by_tokens, by_groups = (_by_set(database, query) for query in (_TURNS, _TOKENS, zero_variance))
    numbers = []
    for number, version, run, iteration, *episodes in database.all(_EPISODES):
        trajectories, turns, any_turn, truncated, failed, with_calls, branched = episodes
        fixed, broken, length, unparsable = by_turns.get(number, (None,) * 4)
        tokens, staleness, logprob = by_tokens.get(number, (0, None, None))
        numbers.append(
            SetNumbers(
                version=version,
                run=run,
                iteration=iteration,
                trajectories=trajectories,
                turns=int(turns or 0),
                tokens=int(tokens or 0),
                success=success[number],
                any_turn=any_turn,
                fixed=fixed,
                broken=broken,
                answer_tokens=length,
                truncated=truncated,
                failed=failed,
                unparsable=unparsable,
                zero_variance=by_groups.get(number, (None,))[0],
                staleness=staleness,
                logprob=logprob,
                drift=drifts.get(version),
                rewards=rewards[number],
                calls=calls[number],
                with_calls=with_calls,
                branched=branched,
            )
        )
    return numbers


def histograms(database: AuditDatabase) -> list[Histogram]:
    """Return histograms of turn lengths, success rates of groups, rewards, and staleness of episodes' oldest tokens."""
    lengths = _histogram(database, "Length of a turn", "tokens", 'select "end" - "start" from turns')
    rates = _histogram(
        database,
        "Success of a group, first turn",
        "share of its episodes",
        "select avg(success) from turns where answer = 0 and success is not null group by data_set, problem_id",
    )
    staleness = _histogram(
        database,
        "Staleness of an episode's oldest token",
        "versions",
        """select d.iteration - list_min(list_filter(versions, lambda v: v >= 0))
        from trajectories join data_sets d using (data_set) where not d.evaluation""",
    )
    graded = "from turns where answer is not null"
    rewards = _histogram(
        database,
        "Reward of a turn",
        "reward, if not all are 0 or 1",
        f"select coalesce(scored_reward, reward) as given {graded} and exists ({_OTHER_REWARDS})",
    )
    return [each for each in (lengths, rates, rewards, staleness) if each]


def _by_set(database: AuditDatabase, query: str) -> dict[int, tuple[Any, ...]]:
    return {row[0]: row[1:] for row in database.all(query)}


def _histogram(database: AuditDatabase, title: str, unit: str, query: str) -> Histogram | None:
    """Count the values in bins of equal width, whole numbers if the values are whole. Return None without values."""
    low, high, whole = database.one(
        f"select min(v), max(v), bool_and(v = floor(v)) from ({query}) as t(v) where v is not null"
    )
    if low is None:
        return None
    low, high = float(low), float(high)
    if not whole and (step := _common_step(database, query)):  # a bin for each value, with the value in its middle
        low, high = low - step / 2, high + step / 2
        return _count_bins(database, title, unit, query, low, step, round((high - low) / step))
    whole_bins = whole and high > 1
    width = max(1.0, -(-(high - low + 1) // _BINS)) if whole_bins else (high - low) / _BINS or 1.0
    bins = int((high - low) / width) + 1 if whole_bins or high == low else _BINS
    return _count_bins(database, title, unit, query, low, width, bins)


def _common_step(database: AuditDatabase, query: str) -> float | None:
    """Return the step of which all distances between the values are multiples; None if they would need too many bins.

    Success rates of groups of 16 are multiples of 1/16: bins of another width would leave gaps.
    """
    values = [v for (v,) in database.all(f"select distinct v from ({query}) as t(v) order by v limit {_BINS + 2}")]
    if not 1 < len(values) <= _BINS + 1:
        return None
    step = min(after - before for before, after in itertools.pairwise(values))
    multiples = [(value - values[0]) / step for value in values]
    fits = all(abs(multiple - round(multiple)) < _TOLERANCE for multiple in multiples) and multiples[-1] < _BINS + 1
    return float(step) if fits else None


def _count_bins(
    database: AuditDatabase, title: str, unit: str, query: str, low: float, width: float, bins: int
) -> Histogram:
    counts = dict(
        database.all(
            f"select least(floor((v - {low}) / {width}), {bins - 1})::integer, count(*) "
            f"from ({query}) as t(v) where v is not null group by 1"
        )
    )
    return Histogram(title, unit, [low + width * i for i in range(bins + 1)], [counts.get(i, 0) for i in range(bins)])


_SUCCESS = "select data_set, answer, avg(success) from turns where answer is not null group by 1, 2 order by 1, 2"

_OTHER_REWARDS = "select * from turns where answer is not null and coalesce(scored_reward, reward) not in (0, 1)"

# Where all rewards are successes without parts, there is nothing to say about them.
_REWARDS = """
    select data_set, 'reward', avg(coalesce(scored_reward, reward)) from turns where answer is not null
    group by 1 having bool_or(scored_reward <> success) or bool_or(cardinality(parts) > 0)
    union all
    select data_set, 'part ' || part.key, avg(part.value) from (
        select data_set, unnest(map_entries(parts)) as part from turns
    ) group by 1, 2
    order by 1, 2 desc"""

_CALLS = "select data_set, name, status, count(*) from calls group by all order by all"

_EPISODES = """
    select data_set, version, d.run, d.iteration, count(*), sum(turns), avg(best),
        avg((status = 'truncated')::integer), avg((status = 'failed')::integer),
        if((select max(calls) from episodes) > 0, avg((calls > 0)::integer), null),
        if((select max(branches) from episodes) > 0, avg((branches > 0)::integer), null)
    from episodes join data_sets d using (data_set) group by all order by data_set"""

_TURNS = """
    select data_set, fixed, broken, tokens, unparsable from (
        select data_set, avg("end" - "start") as tokens,
            avg((verdict = 'unparsable')::integer) filter (verdict <> 'none') as unparsable
        from turns group by 1
    ) left join (
        select data_set, avg(success) filter (was = 0) as fixed, avg(1 - success) filter (was > 0) as broken
        from revisions group by 1
    ) using (data_set)"""

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
