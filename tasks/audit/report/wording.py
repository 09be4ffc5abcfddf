"""Write numbers and verdicts for people, with the same words on the page, in the terminal and in artifacts.

Prefect's artifacts and the terminal get an audit in a few lines of Markdown and as table rows.
"""

import math
import re
from collections import Counter
from typing import get_args

from configs.audit import Checks
from storage.errors import counted
from storage.records import CallStatus
from storage.visible import visible
from tasks.audit.results import LEVELS, AuditResult, CheckResult

MISSING = "\u2013"  # an en dash

COLOURWAYS = {
    **{"fail": "bad", "warn": "warn", "pass": "ok", "skipped": "plain"},
    **{"correct": "ok", "wrong": "bad", "none": "plain"},
    **{"answered": "ok", "failed": "bad"},
}
"""The style sheet's classes for verdicts of the audit and of the verifier, and for calls; all others are "warn"."""

CALLS: tuple[CallStatus, ...] = get_args(CallStatus)
"""What can become of a call of a tool."""

_ONE = {"fail": "fails", "warn": "warns", "pass": "passes", "skipped": "skipped"}

_MEASURES = {"logprob_drift": " nats a token", "success_drift": " standard errors", "length_and_reward": ""}
"""Checks whose value is neither a number of cases nor a share."""


def share(value: float | None) -> str:
    """Write a share in per cent; it is "0%" or "100%" only if it is exactly that.

    >>> share(0.1234), share(0.00012), share(1.0)
    ('12.3%', '0.012%', '100%')
    """
    if value is None:
        return MISSING
    if not math.isfinite(value) or value in (0, 1):
        return f"{100 * value:.0f}%"
    edge = min(abs(value), abs(1 - value)) * 100
    decimals = 1 if edge >= 1 else 1 + math.ceil(-math.log10(edge))
    return f"{100 * value:.{decimals}f}%"


def decimal(value: float | None) -> str:
    """Write a number with three digits, or all digits of a whole number.

    >>> decimal(12.3456), decimal(20480.0), decimal(-0.00012)
    ('12.3', '20,480', '-0.00012')
    """
    if value is None:
        return MISSING
    whole = math.isfinite(value) and (abs(value) >= 1000 or value == int(value))
    return f"{value:,.0f}" if whole else f"{value:.3g}"


def value(check: CheckResult) -> str:
    """Write the value of a check with its unit, or `MISSING` if the check was skipped.

    The share of the worst of several data sets is followed by the number of its units.
    """
    if check.value is None or _is_share(check):
        is_of_others = check.value and check.share_of not in (0, check.of)
        return share(check.value) + (f" of {counted(check.share_of, check.unit)}" if is_of_others else "")
    return decimal(check.value) + _MEASURES.get(check.name, "")


def threshold(check: CheckResult) -> str:
    if _is_share(check):
        return f"{100 * check.threshold:g}%"
    return decimal(check.threshold) + _MEASURES.get(check.name, "")


def _is_share(check: CheckResult) -> bool:
    """Return whether the value is a share: its default threshold is between 0 and 1; a user may set another one."""
    knob = Checks.model_fields.get(check.name)
    declared = knob.default.threshold if knob else check.threshold
    return 0 < declared < 1 and check.name not in _MEASURES


def headline(result: AuditResult) -> str:
    """Write the verdict in words, such as `FAIL: 2 checks fail, 3 warn, 27 pass, 2 skipped`."""
    counts = Counter(check.verdict for check in ordered(result))  # worst first
    parts = [f"{count} {_ONE[verdict] if count == 1 else verdict}" for verdict, count in counts.items()]
    if parts:
        parts[0] = parts[0].replace(" ", " check " if parts[0].startswith("1 ") else " checks ", 1)
    return f"{result.verdict.upper()}: {', '.join(parts) or 'no checks'}"


def audited_data(result: AuditResult) -> str:
    """Write how much data was audited, such as `40 data sets of 1 run, 20,480 trajectories, 39,012 turns, …`."""
    parts = [f"{counted(len(result.sets), 'data set')} of {counted(len({each.run for each in result.sets}), 'run')}"]
    for name, unit in (("trajectories", "trajectory"), ("turns", "turn"), ("tokens", "sampled token")):
        parts.append(counted(sum(getattr(each, name) for each in result.sets), unit))
    return ", ".join(parts)


def ordered(result: AuditResult) -> list[CheckResult]:
    """Return all checks, alarms first."""
    return sorted(result.checks, key=lambda check: LEVELS.index(check.verdict))


def alarms(result: AuditResult) -> list[CheckResult]:
    """Return the checks that fail or warn; those that fail come first."""
    return [check for check in ordered(result) if check.verdict in ("fail", "warn")]


_MOST = 500  # characters of one text


def summary(result: AuditResult) -> str:
    """Return the verdict, the amount of data and the alarms as Markdown; text from data is escaped."""
    rows = [row for row in check_rows(result) if row["verdict"] in ("fail", "warn")]
    line = "- **{}** {}: {} ({}, threshold {}, cases {})"
    names = ("verdict", "check", "found", "value", "threshold", "cases")
    found = "\n".join(line.format(*(plain(row[name]) for name in names)) for row in rows)
    audited = f"Audited: {plain(audited_data(result))}. Store: {plain(result.store)}"
    return f"# {plain(headline(result))}\n\n{audited}\n\n{found or 'No check raised an alarm.'}\n"


def check_rows(result: AuditResult) -> list[dict[str, str]]:
    """Return all checks as rows of a table, alarms first; each cell is one line of plain text."""
    return [
        {
            "verdict": check.verdict,
            "check": _line(check.name),
            "value": value(check),
            "threshold": threshold(check),
            "cases": MISSING if check.value is None else f"{check.cases:,}",
            "of": MISSING if check.value is None else counted(check.of, check.unit),
            "found": _line(check.says),
        }
        for check in ordered(result)
    ]


def plain(text: str) -> str:
    r"""Escape text so that Markdown shows it unchanged, on one line.

    >>> print(plain("[a](b)\n# <i>"))
    &#91;a&#93;&#40;b&#41; &#35; &#60;i&#62;
    """
    return re.sub(r"[^\w\s]|_", lambda found: f"&#{ord(found[0])};", _line(text))


def _line(text: str) -> str:
    return " ".join(visible(text, _MOST).split())
