"""The audit in a few lines, for Prefect's artifacts and the terminal."""

import base64
import re

from storage.visible import visible
from tasks.audit.report import wording
from tasks.audit.report.drawing import standalone
from tasks.audit.report.plots import plots
from tasks.audit.results import AuditResult, CheckResult

_MOST = 500  # characters of one text
_PLOTS = 6
_MARKUP = re.compile(r"[\\`*_\[\]<>#&!|~$@]|:(?=//)|(?<=www)\.|^[-+=]|(?<=\d)[.)](?=\s)", re.IGNORECASE)
"""Punctuation that means something in Markdown, or makes a link of an address."""


def summary(result: AuditResult) -> str:
    """Verdict, what was looked at, and what the alarms say; data are escaped, never interpreted."""
    parts = [
        f"# {plain(wording.headline(result))}",
        f"Looked at {plain(wording.looked_at(result))}. Store: {code(result.store)}",
    ]
    alarms = wording.alarms(result)
    parts += ["\n".join(_alarm(check) for check in alarms)] if alarms else ["No check raised an alarm."]
    if skipped := [check for check in result.checks if check.verdict == "skipped"]:
        parts += ["Skipped:", "\n".join(f"- {plain(check.title)}: {plain(check.says)}" for check in skipped)]
    return "\n\n".join(parts) + "\n"


def pictures(result: AuditResult) -> str:
    """The first plots as images within the Markdown, for who shows it asks nobody for anything either."""
    drawn = plots(result.sets, result.histograms)[:_PLOTS]
    return "\n\n".join(f"## {plain(plot.title)}\n\n![{plain(plot.title)}]({_data(plot.svg)})" for plot in drawn)


def _data(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(standalone(svg).encode()).decode()}"


def check_rows(result: AuditResult) -> list[dict[str, str]]:
    """All checks as rows of a table, alarms first; plain text on one line, in no markup."""
    return [_row(check) for check in wording.ordered(result)]


def plain(text: str) -> str:
    r"""Text that Markdown shows as it is, on one line.

    >>> print(plain("[a](b)\n# <i>"))
    \[a\](b) \# \<i\>
    """
    return _MARKUP.sub(r"\\\g<0>", _line(text))


def code(text: str) -> str:
    """Text as a code span, on one line.

    >>> print(code("a`b"), code("|"))
    `` a`b `` ` | `
    """
    line = _line(text)
    longest = max((len(run) for run in re.findall("`+", line)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {line} {fence}" if line else ""


def _line(text: str) -> str:
    return " ".join(visible(text, _MOST).split())


def _alarm(check: CheckResult) -> str:
    measured = f"{wording.value(check)}, threshold {wording.threshold(check)}"
    cases = f"; {wording.counted(check.cases, 'case')}" if check.cases else ""
    examples = f", such as {code(check.examples[0].id)}" if check.examples else ""
    found = f"{plain(check.says)} ({plain(measured)}{cases}{examples})"
    return f"- **{plain(check.verdict.upper())}** {plain(check.title)}: {found}"


def _row(check: CheckResult) -> dict[str, str]:
    skipped = check.value is None
    return {
        "verdict": check.verdict,
        "check": _line(check.title),
        "value": wording.value(check),
        "threshold": wording.threshold(check),
        "cases": wording.MISSING if skipped else f"{check.cases:,}",
        "of": wording.MISSING if skipped else wording.counted(check.of, check.unit),
        "found": _line(check.says),
    }
