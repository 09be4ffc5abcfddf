"""The pages about many trajectories: the list, a group side by side, and the checks of an audit."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from fastapi import Response

from tasks.audit.conversations import read_conversations
from tasks.audit.reader import filters
from tasks.audit.reader.filters import Filter, parse
from tasks.audit.reader.library import NOTHING, Library
from tasks.audit.reader.pages import LINES, PageError, Pages, pager
from tasks.audit.record import RESULT
from tasks.audit.report.wording import ordered
from tasks.audit.results import AuditResult, from_dict
from tasks.audit.selection import DataSet

EPISODES_PER_PAGE = 24
"""Episodes on one page of a group."""
_MOST_TURNS = 20  # that the form proposes
_MOST_DATA_SETS = 500  # that the form proposes


class Lists:
    """The views of these pages.

    Args:
        library: the data.
        pages: the templates.
        data_sets: the data sets in the order of their numbers.
        audit: folder of an audit.
        notes: sentences about data that cannot be shown.
    """

    def __init__(
        self, library: Library, pages: Pages, data_sets: Sequence[DataSet], audit: Path | None, notes: Sequence[str]
    ) -> None:
        self._library, self._pages, self._notes = library, pages, notes
        self._versions = [data_set.version for data_set in data_sets]
        self._result = _read(audit) if audit else None
        self._found = [name for (name,) in library.database.all("select distinct check_name from cases order by 1")]

    @cached_property
    def _counts(self) -> dict[str, int]:
        """The number of trajectories in the cases of each check."""
        return {name: self._library.count(Filter(check=name)) for name in self._found}

    def listing(self, given: Mapping[str, str]) -> Response:
        """Show all trajectories that match a filter, page by page."""
        wanted, wrong = parse(given)
        if wanted.check and wanted.check not in self._found:
            wrong["check"] = f"{wanted.check[:40]!r} found nothing or did not run"
        page = _page_number(given, wrong)
        rows = NOTHING if wrong else self._library.find(wanted)
        pages = max(1, -(-len(rows) // LINES))
        page = min(page, pages)
        return self._pages.html(
            "list.html",
            400 if wrong else 200,
            wanted=wanted,
            entries=self._library.entries(rows[(page - 1) * LINES : page * LINES].tolist()),
            total=len(rows),
            all=len(self._library.find(Filter())),
            sets=len(self._versions),
            notes=self._notes,
            first=(page - 1) * LINES + 1,
            **_pages(page, pages),
            **self._form(given, wanted, wrong),
        )

    def _form(self, given: Mapping[str, str], wanted: Filter, wrong: Mapping[str, str]) -> dict[str, Any]:
        """Return the values of the form: all given parameters, including wrong ones."""
        numbers = range(1, min(self._library.most_turns, _MOST_TURNS) + 1)
        return {
            "given": {each.name: given.get(each.name, "") for each in fields(Filter)},
            "wrong": wrong,
            "choices": filters,
            "turns": [*filters.TURNS.items(), *((number, f"turn {number}") for number in numbers)],
            "calls": self._library.calls,
            "checks": [(name, name.replace("_", " ")) for name in self._found],
            "versions": self._versions[:_MOST_DATA_SETS],
            "more": any(given.get(name) for name in filters.MORE),
            "filtered": bool(wanted.chosen() or wrong),
        }

    def group(self, given: Mapping[str, str]) -> Response:
        """Show the episodes of one problem in one data set, side by side."""
        data_set, problem = given.get("data_set", ""), given.get("problem", "")
        rows = self._library.group(data_set, problem)
        if not rows:
            raise PageError(404, "No such group", f"There is no problem {problem[:200]!r} in {data_set[:200]!r}.")
        pages = -(-len(rows) // EPISODES_PER_PAGE)
        page = min(_page_number(given, {}), pages)
        chosen = rows[(page - 1) * EPISODES_PER_PAGE : page * EPISODES_PER_PAGE]
        conversations = read_conversations(self._library.database, chosen)
        return self._pages.html(
            "group.html",
            data_set=data_set,
            problem=problem,
            group=Filter(problem=problem, data_set=data_set),
            conversations=conversations,
            entries={entry.row: entry for entry in self._library.entries(chosen)},
            answers=self._answers(data_set, problem),
            total=len(rows),
            **_pages(page, pages),
            address=lambda **more: urlencode({"data_set": data_set, "problem": problem, **more}),
        )

    def _answers(self, data_set: str, problem: str) -> dict[int, list[tuple[str | None, str, int]]]:
        """Return for each turn the distinct answers with verdict and count, the most frequent first."""
        answers: dict[int, list[tuple[str | None, str, int]]] = {}
        for turn, *answer in self._library.database.all(
            """select turn, extracted, coalesce(verdict, environment_verdict), count(*)
            from turns join data_sets using (data_set)
            where version = ? and problem_id = ? group by all order by turn, count(*) desc, extracted""",
            data_set,
            problem,
        ):
            answers.setdefault(turn, []).append((answer[0], answer[1], answer[2]))
        return answers

    def audit(self, _: Mapping[str, str]) -> Response:
        """Show the checks of the audit, with a link to the trajectories in the cases of each."""
        if self._result is None:
            raise PageError(404, "No audit", "The reader was started without an audit.")
        return self._pages.html(
            "audit.html",
            result=self._result,
            checks=ordered(self._result),
            found=self._counts,
        )


def _read(audit: Path) -> AuditResult:
    return from_dict(json.loads((audit / RESULT).read_text(encoding="utf-8")))


def _pages(page: int, pages: int) -> dict[str, Any]:
    return {"page": page, "pages": pages, "pager": pager(page, pages)}


def _page_number(given: Mapping[str, str], wrong: dict[str, str]) -> int:
    text = given.get("page", "").strip() or "1"
    if text.isascii() and text.isdigit() and int(text[:9]) > 0:
        return int(text[:9])
    wrong["page"] = f"{text[:40]!r} is not a page: give a number from 1 on"
    return 1
