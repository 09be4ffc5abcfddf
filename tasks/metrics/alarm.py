"""The alarm of a run that pays for something else than success: its return rises while its success falls."""

from collections.abc import Sequence

from tasks.metrics.rows import Row

_RECENT, _LEAST = 12, 8
"""Number of newest iterations that are looked at, and least number of them."""
_LEVEL = 0.01
"""Both trends have a smaller p value (Kendall's tau)."""


def paid_for_something_else(rows: Sequence[Row]) -> str:
    """Return the alarm that the newest of some merged rows raises, or an empty text.

    The return is that of the scores, success that of any turn while playing. Where success is what is paid, both rise
    and fall together.
    """
    recent = [row for row in rows if "return/mean" in row and "success/any_turn" in row][-_RECENT:]
    returns, successes = ([row[name] for row in recent] for name in ("return/mean", "success/any_turn"))
    if len(recent) < _LEAST or returns[-1] <= returns[0] or successes[-1] >= successes[0]:
        return ""
    from scipy.stats import kendalltau  # takes a second to import

    rise, fall = (kendalltau(range(len(recent)), values) for values in (returns, successes))
    if not (rise.statistic > 0 > fall.statistic and max(rise.pvalue, fall.pvalue) < _LEVEL):
        return ""
    return (
        f"the return rises ({returns[0]:.3f} -> {returns[-1]:.3f}) while success falls ({successes[0]:.3f} -> "
        f"{successes[-1]:.3f}). What pays besides right answers? See tasks/score/paid.md"
    )
