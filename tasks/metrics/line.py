"""The line about an iteration for the terminal and for logs, and the alarm of a run that pays for another thing."""

import re
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from statistics import median

from tasks.metrics.rows import Row

_RECENT = 10
"""Iterations from whose median duration the time left is expected."""

_PARTS = (
    ("reward", "reward/mean", "+.3f"),
    ("return", "return/mean", "+.3f"),
    ("first", "success/turn_1", ".3f"),
    ("any", "success/any_turn", ".3f"),
    ("length", "length/mean", ".1f"),
    ("calls", "calls/mean", ".2f"),
    ("entropy", "policy/entropy", ".3f"),
    ("kl", "policy/kl", ".1e"),
    ("clip", "policy/clip_fraction", ".1%"),
    ("grad", "grad_norm", ".3g"),
    ("stale", "staleness/mean", ".1f"),
)
_STAGES = "time/rollout", "time/score", "time/train"


def iteration_line(row: Row, total: int, left_s: float | None) -> str:
    """Describe an iteration by its merged row; numbers that it lacks are left out, and calls if there were none.

    Args:
        row: see `by_iteration`.
        total: iterations of the run.
        left_s: expected seconds until its end; None: not known.

    >>> row = {"iteration": 11, "reward/mean": 0.231, "success/turn_1": 0.486, "policy/kl": 0.00014, "calls/mean": 0}
    >>> iteration_line(row | {"time/rollout": 1.02, "time/score": 0.1, "time/train": 0.31}, 100, 132)
    'iter 12/100  reward +0.231  first 0.486  kl 1.4e-04  1.0+0.1+0.3 s  left 2:12'
    """
    parts = [f"iter {row['iteration'] + 1}/{total}", *(f"{label} {value}" for label, value in cells(row).items())]
    parts.append("+".join(f"{row[name]:.1f}" for name in _STAGES if name in row) + " s")
    if "tokens/per_second" in row:
        parts.append(f"{row['tokens/per_second']:,.0f} tok/s")
    if left_s is not None:
        parts.append(f"left {duration(left_s)}")
    return "  ".join(parts)


def cells(row: Row) -> dict[str, str]:
    """Format the main numbers of an iteration by label, without calls and returns that say nothing.

    Of a mixture also the success of each member's episodes, in any turn, and its share of the gradient.

    >>> cells({"calls/mean": 0, "source/game/success/any_turn": 0.5, "source/game/gradient_share": 0.48})
    {'game': '0.500', 'game gradient': '0.480'}
    """
    shown = {label: f"{row[name]:{form}}" for label, name, form in _PARTS if name in row}
    if not row.get("calls/mean"):
        shown.pop("calls", None)
    if row.get("return/mean") == row.get("success/any_turn"):
        shown.pop("return", None)
    ends = re.compile(r"source/(.*?)(?:/success/any_turn|/(gradient)_share)")
    found = {name: match for name in row if (match := ends.fullmatch(name))}
    return shown | {" ".join(filter(None, match.groups())): f"{row[name]:.3f}" for name, match in found.items()}


def seconds_left(begun: datetime, rows: Sequence[Row], iterations: int) -> float | None:
    """Expect how long `iterations` will take, from the durations of the newest ones that one flow run has done.

    Args:
        begun: when the flow run began; what is older does not count, so that no night in which a run stood still does.
        rows: merged rows of iterations.
        iterations: how many are left.
    """
    ended = [datetime.fromisoformat(row["at"]) for row in rows if row["stage"] == "train"]
    times = [begun, *(at for at in ended if at > begun)]
    durations = [(after - before).total_seconds() for before, after in pairwise(times)]
    return median(durations[-_RECENT:]) * iterations if durations else None


def duration(seconds: float) -> str:
    """Format seconds as minutes or hours.

    >>> duration(132), duration(7384)
    ('2:12', '2:03:04')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


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
