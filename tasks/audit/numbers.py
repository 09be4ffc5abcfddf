"""Compute the numbers of each data set (rates, lengths, staleness, logprobs) and histograms over all of them."""

from collections.abc import Mapping
from itertools import pairwise

from tasks.audit.checks.learning import GROUPS
from tasks.audit.database import AuditDatabase
from tasks.audit.results import Histogram, SetNumbers

_BINS = 20
_TOLERANCE = 1e-6  # of a step: shares such as 1/3 are rounded


def set_numbers(database: AuditDatabase, drifts: Mapping[str, float]) -> list[SetNumbers]:
    """Return the numbers of each readable data set; `drifts` maps a version to its logprob drift, if it is known."""
    return [SetNumbers(**columns, drift=drifts.get(columns["version"])) for columns in database.records(_NUMBERS)]


# Where all rewards are successes without parts, there is nothing to say about them.
_NUMBERS = f"""
    with episode_numbers as (
        select data_set, count(*) as trajectories, sum(turns)::bigint as turns, avg(best) as any_turn,
            avg((status = 'truncated')::integer) as truncated, avg((status = 'failed')::integer) as failed,
            if((select max(calls) from episodes) > 0, avg((calls > 0)::integer), null) as with_calls,
            if((select max(branches) from episodes) > 0, avg((branches > 0)::integer), null) as branched
        from episodes group by data_set
    ), turn_numbers as (
        select data_set, avg("end" - "start") as answer_tokens,
            avg((verdict = 'unparsable')::integer) filter (verdict <> 'none') as unparsable
        from turns group by data_set
    ), revision_numbers as (
        select data_set, avg(success) filter (was = 0) as fixed, avg(1 - success) filter (was > 0) as broken
        from revisions group by data_set
    ), group_numbers as (
        select data_set, avg(same::integer) as zero_variance from ({GROUPS}) group by data_set
    ), token_numbers as (
        select data_set, coalesce(sum(count), 0)::bigint as tokens, sum(stale) / nullif(sum(count), 0) as staleness,
            sum(logprob) filter (isfinite(logprob)) / nullif(sum(count) filter (isfinite(logprob)), 0) as logprob
        from (
            select data_set, len(known) as count, list_sum(logprobs) as logprob,
                len(known) * d.iteration - coalesce(list_sum(known), 0) as stale
            from (
                select data_set, logprobs, list_filter(versions, lambda v: v >= 0) as known from trajectories
            ) join data_sets d using (data_set)
        ) group by data_set
    ), success_numbers as (
        select data_set, list(rate order by answer) as success from (
            select data_set, answer, avg(success) as rate from turns where answer is not null group by data_set, answer
        ) group by data_set
    ), reward_numbers as (
        select data_set, map_from_entries(list((name, mean) order by name desc)) as rewards from (
            select data_set, 'reward' as name, avg(coalesce(scored_reward, reward)) as mean
            from turns where answer is not null
            group by data_set having bool_or(scored_reward <> success) or bool_or(cardinality(parts) > 0)
            union all
            select data_set, 'part ' || part.key, avg(part.value) from (
                select data_set, unnest(map_entries(parts)) as part from turns
            ) group by data_set, part.key
        ) group by data_set
    ), call_numbers as (
        select data_set, map_from_entries(list((name, statuses) order by name)) as calls from (
            select data_set, name, map_from_entries(list((status, count) order by status)) as statuses from (
                select data_set, name, status, count(*) as count from calls group by all
            ) group by data_set, name
        ) group by data_set
    )
    select version, run, iteration, trajectories, turns, coalesce(tokens, 0) as tokens,
        coalesce(success, []) as success, any_turn, fixed, broken, answer_tokens, truncated, failed, unparsable,
        zero_variance, staleness, logprob, coalesce(rewards, map {{}}) as rewards, coalesce(calls, map {{}}) as calls,
        with_calls, branched
    from episode_numbers join data_sets using (data_set) left join turn_numbers using (data_set)
    left join revision_numbers using (data_set) left join group_numbers using (data_set)
    left join token_numbers using (data_set) left join success_numbers using (data_set)
    left join reward_numbers using (data_set) left join call_numbers using (data_set) order by data_set"""


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
        """select d.iteration - list_min(list_filter(versions, lambda v: v >= 0))
        from trajectories join data_sets d using (data_set) where not d.evaluation""",
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
