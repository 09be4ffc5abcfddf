"""The reader's pages: the list, a group side by side, a trajectory with its tokens, and the checks of an audit."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
from fastapi import Response
from fastapi.responses import PlainTextResponse

from storage.objects.store import Store
from storage.records import Trajectory
from storage.version_names import PolicyVersion, select
from storage.visible import visible
from tasks.audit.data_sets import DataSet
from tasks.audit.database import read_conversations
from tasks.audit.reader import library as filters
from tasks.audit.reader import tokens
from tasks.audit.reader.library import NOTHING, Filter, Library, parse
from tasks.audit.reader.tokens import AdvantageComputer, Advantages, NoAdvantageError, Token
from tasks.audit.record import RESULT
from tasks.audit.report.wording import ordered
from tasks.audit.results import from_dict

LINES = 50
"""Trajectories on one page of the list."""
EPISODES_PER_PAGE = 24
"""Episodes on one page of a group."""
LONGEST = 20_000
"""The most characters of one text on a page; a plain-text page shows the whole text."""
_MOST_TURNS = 20  # that the form proposes
_MOST_DATA_SETS = 500  # that the form proposes
_MORE = ("least", "most", "turns", "calls", "data_set", "begin", "end", "check", "order")
"""Parameters in the second part of the form, which is open if one of them is set."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; frame-ancestors 'none'; form-action 'self'; "
    "style-src 'self'; img-src 'self' data:",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}

Given = Mapping[str, str]
"""The parameters in an address."""


class PageError(Exception):
    """The requested page cannot be shown."""

    def __init__(self, status: int, title: str, says: str) -> None:
        super().__init__(says)
        self.status, self.title, self.says = status, title, says


@dataclass(frozen=True)
class Views:
    """The views: functions from the parameters of an address to a page."""

    library: Library
    render: Callable[..., Response]  # a page from the name of its template, its status and values
    store: Store  # of the tokenizers
    data_sets: Sequence[DataSet]  # in the order of their numbers
    cache: Path  # local folder for files of a remote store
    audit_folder: Path | None
    notes: Sequence[str]  # sentences about data that cannot be shown

    @cached_property
    def _advantage_computer(self) -> AdvantageComputer:
        return AdvantageComputer(self.library, self.data_sets)

    @cached_property
    def _counts(self) -> dict[str, int]:
        """The number of trajectories in the cases of each check."""
        names = self.library.database.all("select distinct check_name from cases order by 1")
        return {name: self.library.count(Filter(check=name)) for (name,) in names}

    def listing(self, given: Given) -> Response:
        """Show all trajectories that match a filter, page by page."""
        wanted, wrong = parse(given)
        if wanted.check and wanted.check not in self._counts:
            wrong["check"] = f"{wanted.check[:40]!r} found nothing or did not run"
        number = _page_number(given, wrong)
        rows = NOTHING if wrong else self.library.find(wanted)
        page = _Page(number, len(rows), LINES)
        numbers = range(1, min(self.library.most_turns, _MOST_TURNS) + 1)
        return self.render(
            "list.html",
            400 if wrong else 200,
            wanted=wanted,
            entries=self.library.entries(rows[page.chosen].tolist()),
            page=page,
            all=len(self.library.find(Filter())),
            sets=len(self.data_sets),
            notes=self.notes,
            given={each.name: given.get(each.name, "") for each in fields(Filter)},
            wrong=wrong,
            choices=filters,
            turns={**filters.TURNS, **{number: (f"turn {number}", "") for number in numbers}},
            calls=self.library.calls,
            checks={name: (name.replace("_", " "), "") for name in self._counts},
            versions=[data_set.version for data_set in self.data_sets[:_MOST_DATA_SETS]],
            more=any(given.get(name) for name in _MORE),
            filtered=bool(wanted.chosen() or wrong),
        )

    def group(self, given: Given) -> Response:
        """Show the episodes of one problem in one data set, side by side."""
        data_set, problem = given.get("data_set", ""), given.get("problem", "")
        rows = self.library.group(data_set, problem)
        if not rows:
            raise PageError(404, "No such group", f"There is no problem {problem[:200]!r} in {data_set[:200]!r}.")
        page = _Page(_page_number(given, {}), len(rows), EPISODES_PER_PAGE)
        answers: dict[int, list[tuple[Any, ...]]] = {}  # by turn, the most frequent first
        for turn, *answer_verdict_count in self.library.database.all(
            """select turn, extracted, coalesce(verdict, environment_verdict), count(*)
            from turns join data_sets using (data_set)
            where version = ? and problem_id = ? group by all order by turn, count(*) desc, extracted""",
            *(data_set, problem),
        ):
            answers.setdefault(turn, []).append(tuple(answer_verdict_count))
        return self.render(
            "group.html",
            data_set=data_set,
            problem=problem,
            group=Filter(problem=problem, data_set=data_set),
            conversations=read_conversations(self.library.database, rows[page.chosen]),
            entries={entry.row: entry for entry in self.library.entries(rows[page.chosen])},
            answers=answers,
            page=page,
            address=lambda **more: urlencode({"data_set": data_set, "problem": problem, **more}),
        )

    def audit(self, _: Given) -> Response:
        """Show the checks of the audit, with a link to the trajectories in the cases of each."""
        if self.audit_folder is None:
            raise PageError(404, "No audit", "The reader was started without an audit.")
        result = from_dict(json.loads((self.audit_folder / RESULT).read_text(encoding="utf-8")))
        return self.render("audit.html", result=result, checks=ordered(result), found=self._counts)

    def trajectory(self, given: Given) -> Response:
        """Show one trajectory with a part of its tokens."""
        row, same = self._row(given)
        (conversation,) = read_conversations(self.library.database, [row])
        (trajectory,) = self.library.trajectories([row])
        return self.render(
            "trajectory.html",
            row=row,
            entry=self.library.entries([row])[0],
            same=self.library.entries([other for other in same[:20] if other != row]),
            trajectory=trajectory,
            conversation=conversation,
            turns=list(zip(conversation.turns, trajectory.turns, strict=True)),
            beginnings=tokens.beginnings(trajectory),
            cases=self.library.database.all(
                """select check_name, detail from cases
                where unit in ('trajectory', 'turn', 'call') and id = ? and data_set in ('', ?)
                order by all limit 100""",
                *(conversation.trajectory_id, conversation.data_set),
            ),
            neighbours=self._neighbours(given, row),
            **self._tokens(given, trajectory, row),
        )

    def text(self, given: Given) -> Response:
        """Show one whole text as plain text; the parameter `of` names it."""
        (conversation,) = read_conversations(self.library.database, [self._row(given)[0]])
        texts: dict[str, str] = {"prompt": conversation.prompt, "gold": "\n".join(conversation.solutions)}
        for number, turn in enumerate(conversation.turns, 1):
            texts[f"answer-{number}"] = turn.text
            texts[f"feedback-{number}"] = turn.feedback
            texts[f"extracted-{number}"] = turn.extracted or ""
            for place, call in enumerate(turn.calls, 1):
                texts[f"arguments-{number}-{place}"] = call.arguments
                texts[f"output-{number}-{place}"] = call.output
        if (name := given.get("of", "")) not in texts:
            raise PageError(404, "No such text", f"There is no text {name[:100]!r}: choose one of {', '.join(texts)}.")
        return PlainTextResponse(visible(texts[name]), headers=HEADERS)

    def _row(self, given: Given) -> tuple[int, list[int]]:
        """Return the row that is meant, and all rows with its id."""
        name, number = given.get("id", ""), given.get("row", "")
        same = self.library.rows_with_id(name)
        if not number and same:
            return same[0], same
        if number.isascii() and number.isdigit() and len(number) < 19:
            found = self.library.entries([int(number)])
            if found and name in ("", found[0].trajectory_id):
                return int(number), self.library.rows_with_id(found[0].trajectory_id)
        raise PageError(404, "No such trajectory", f"There is no trajectory {(name or number)[:200]!r} here.")

    def _neighbours(self, given: Given, row: int) -> dict[str, Any]:
        """Return the place of a trajectory in the list from which it was opened, 0 if it is not there, and the next."""
        wanted, _ = parse(given)
        rows = self.library.find(wanted)
        place = next(iter((np.flatnonzero(rows == row) + 1).tolist()), 0)
        before = self.library.entries(rows[place - 2 : place - 1].tolist()) if place > 1 else []
        after = self.library.entries(rows[place : place + 1].tolist()) if place else []
        return {
            "wanted": wanted,
            "place": place,
            "page": max(0, place - 1) // LINES + 1,
            "total": len(rows),
            "before": next(iter(before), None),
            "after": next(iter(after), None),
        }

    def _tokens(self, given: Given, trajectory: Trajectory, row: int) -> dict[str, Any]:
        """Return the values of the template for the tokens."""
        number = int(self.library.database.number("select data_set from listing where row = ?", row))
        text, parts = given.get("part", "1"), tokens.parts(trajectory)
        if not _is_number(text) or int(text[:9]) > parts:
            raise PageError(404, "No such part", f"The tokens have {parts} parts: there is no part {text[:40]!r}.")
        data_set = self.data_sets[number]
        policies = select(PolicyVersion, data_set.manifest.parent_names) if data_set.manifest else []
        decoder, no_tokenizer = tokens.find_vocabulary(self.store, self.cache, data_set.run, next(iter(policies), ""))
        by_advantage = given.get("colour") == "advantage"
        advantages, why_not = Advantages(), ""
        if by_advantage:
            try:
                advantages = self._advantage_computer.compute(trajectory, number)
            except NoAdvantageError as error:
                why_not = str(error)

        def step(token: Token) -> str:
            if by_advantage:
                return tokens.advantage_step(token.advantage, advantages.largest)
            return tokens.logprob_step(token.logprob)

        by_position = advantages.by_id.get(trajectory.trajectory_id, {})
        return {
            "part": int(text),
            "parts": parts,
            "spans": tokens.spans(trajectory, int(text), decoder, by_position),
            "no_tokenizer": no_tokenizer,
            "colour": "advantage" if by_advantage else "logprob",
            "advantages": advantages,
            "why_not": why_not,
            "legend": tokens.advantage_legend(advantages.largest) if by_advantage else tokens.logprob_legend(),
            "step": step,
        }


class _Page:
    """One page of a list of `total` lines; a number that is too large means the last page."""

    def __init__(self, number: int, total: int, lines: int) -> None:
        self.total, self.count = total, max(1, -(-total // lines))
        self.number = min(number, self.count)
        self.chosen = slice((self.number - 1) * lines, self.number * lines)

    @property
    def links(self) -> list[int]:
        """The page numbers to link: the first, the last, and those near this page.

        >>> _Page(7, 20, 1).links
        [1, 5, 6, 7, 8, 9, 20]
        """
        near = range(max(1, self.number - 2), min(self.count, self.number + 2) + 1)
        return sorted({1, *near, self.count})


def _page_number(given: Given, wrong: dict[str, str]) -> int:
    text = given.get("page", "").strip() or "1"
    if _is_number(text):
        return int(text[:9])
    wrong["page"] = f"{text[:40]!r} is not a page: give a number from 1 on"
    return 1


def _is_number(text: str) -> bool:
    """Return whether a text is a whole number from 1 on."""
    return text.isascii() and text.isdigit() and int(text[:9]) > 0
