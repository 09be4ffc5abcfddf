"""Write the audit in a few lines of Markdown and as table rows, for Prefect's artifacts and the terminal."""

import re

from storage.visible import visible
from tasks.audit.report import wording
from tasks.audit.report.drawing import for_any_background
from tasks.audit.report.plots import plots
from tasks.audit.results import AuditResult, CheckResult

_MOST = 500  # characters of one text
_PLOTS = 6
_MARKUP = re.compile(r"[\\`*_\[\]<>#&!|~$@]|:(?=//)|(?<=www)\.|^[-+=]|(?<=\d)[.)](?=\s)", re.IGNORECASE)
"""Punctuation with a meaning in Markdown, or that turns an address into a link."""


def summary(result: AuditResult) -> str:
    """Return the verdict, the amount of data and the alarms as Markdown; text from data is escaped."""
    parts = [
        f"# {plain(wording.headline(result))}",
        f"Audited: {plain(wording.audited_data(result))}. Store: {code(result.store)}",
    ]
    alarms = wording.alarms(result)
    parts += ["\n".join(_alarm(check) for check in alarms)] if alarms else ["No check raised an alarm."]
    if skipped := [check for check in result.checks if check.verdict == "skipped"]:
        parts += ["Skipped:", "\n".join(f"- {plain(check.title)}: {plain(check.says)}" for check in skipped)]
    return "\n\n".join(parts) + "\n"


def pictures(result: AuditResult) -> str:
    """Return the first plots as images embedded in Markdown, so that nothing has to be loaded to show it."""
    drawn = plots(result.sets, result.histograms)[:_PLOTS]
    titled = ((plain(plot.title), for_any_background(plot.svg)) for plot in drawn)
    return "\n\n".join(f"## {title}\n\n![{title}]({address})" for title, address in titled)


def check_rows(result: AuditResult) -> list[dict[str, str]]:
    """Return all checks as rows of a table, alarms first; each cell is one line of plain text."""
    return [_row(check) for check in wording.ordered(result)]


def plain(text: str) -> str:
    r"""Escape text so that Markdown shows it unchanged, on one line.

    >>> print(plain("[a](b)\n# <i>"))
    \[a\](b) \# \<i\>
    """
    return _MARKUP.sub(r"\\\g<0>", _line(text))


def code(text: str) -> str:
    """Return text as a code span, on one line.

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
