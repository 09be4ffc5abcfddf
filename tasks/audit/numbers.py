"""Compute the numbers of each data set (rates, lengths, staleness, logprobs) and histograms over all of them."""

from collections.abc import Mapping

import numpy as np

from tasks.audit.database import AuditDatabase
from tasks.audit.results import Histogram, SetNumbers

_BINS = 20


def set_numbers(database: AuditDatabase, drifts: Mapping[str, float]) -> list[SetNumbers]:
    """Return the numbers of each readable data set; `drifts` maps a version to its logprob drift, if it is known."""
    found = database.records("select * exclude (data_set) from set_numbers order by data_set")
    return [SetNumbers(**columns, drift=drifts.get(columns["version"])) for columns in found]


def histograms(database: AuditDatabase) -> list[Histogram]:
    """Return histograms of turn lengths, success rates of groups, rewards, and staleness of episodes' oldest tokens.

    Bins have equal width: whole numbers if the values are whole.
    """
    drawn = []
    for title, unit, query in _HISTOGRAMS:
        rows = database.all(f"select v, count(*) from ({query}) as t(v) where isfinite(v::double) group by 1")
        if not rows:
            continue
        values, counts = np.array(rows, float).T
        low, high = values.min(), values.max()
        if (values == np.floor(values)).all() and high > 1:
            width = max(1.0, np.ceil((high - low + 1) / _BINS))
            edges = np.arange(low, high + width + 0.5, width)
        else:
            edges = np.linspace(low, high if high > low else low + 1, _BINS + 1 if high > low else 2)
        counted, _ = np.histogram(values, edges, weights=counts)
        drawn.append(Histogram(title, unit, edges.tolist(), counted.astype(int).tolist()))
    return drawn


_HISTOGRAMS = (
    ("Length of a turn", "tokens", 'select "end" - "start" from turns where "end" > "start"'),
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
    ("Staleness of an episode's oldest token", "versions", "select behind from staleness"),
)
"""Title, unit, and a query of the values."""
