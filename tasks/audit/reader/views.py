"""The reader's pages: the list, a group side by side, and a trajectory with its tokens; and the app that shows them.

Every page is a GET request without script, and its address says what it shows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
from fastapi import FastAPI, HTTPException, Request, Response

from storage.objects.store import Store
from storage.records import Trajectory
from storage.version_names import PolicyVersion, select
from tasks.audit.database import AuditDatabase, read_conversations
from tasks.audit.decoding import find_decoder
from tasks.audit.reader import tokens
from tasks.audit.reader.library import LABELS, NOTHING, Filter, Library, address, parse
from tasks.audit.reader.serving import Render, create_site
from tasks.audit.reader.tokens import Advantages, compute_advantages
from tasks.audit.run import CASES
from tasks.tables.sets import DataSet

LINES = 50
"""Trajectories on one page of the list."""
EPISODES_PER_PAGE = 24
"""Episodes on one page of a group."""
_MOST_DATA_SETS = 500  # that the form proposes

Given = Mapping[str, str]
"""The parameters in an address."""


@dataclass(frozen=True)
class Views:
    """The views: each makes a page from the parameters in the address of a request, in a thread."""

    library: Library
    render: Render
    store: Store  # of the tokenizers
    data_sets: Sequence[DataSet]  # in the order of their numbers
    cache: Path  # local folder for files of a remote store
    notes: Sequence[str]  # sentences about data that cannot be shown

    def listing(self, request: Request) -> Response:
        """Show all trajectories that match a filter, page by page."""
        given = request.query_params
        wanted, wrong = parse(given)
        rows = NOTHING if wrong else self.library.find(wanted)
        page = _Page(given, len(rows), LINES)
        return self.render(
            "list.html",
            400 if wrong else 200,
            wanted=wanted,
            wrong=wrong,
            given=given,
            entries=self.library.entries(rows[page.chosen].tolist()),
            page=page,
            all=len(self.library.find(Filter())),
            sets=len(self.data_sets),
            notes=self.notes,
            fields=Filter.model_fields,
            labels=LABELS,
            checks=self.library.checks,
            versions=[data_set.version for data_set in self.data_sets[:_MOST_DATA_SETS]],
        )

    def group(self, request: Request) -> Response:
        """Show the episodes of one problem in one data set, side by side."""
        given = request.query_params
        data_set, problem = given.get("data_set", ""), given.get("problem", "")
        rows = self.library.group(data_set, problem)
        if not rows:
            raise HTTPException(404, f"There is no problem {problem[:200]!r} in {data_set[:200]!r}.")
        page = _Page(given, len(rows), EPISODES_PER_PAGE)
        return self.render(
            "group.html",
            data_set=data_set,
            problem=problem,
            group=Filter(problem=problem, data_set=data_set),
            conversations=read_conversations(self.library.database, rows[page.chosen]),
            entries={entry["row"]: entry for entry in self.library.entries(rows[page.chosen])},
            page=page,
            address=lambda **more: urlencode({"data_set": data_set, "problem": problem, **more}),
        )

    def trajectory(self, request: Request) -> Response:
        """Show one trajectory with a part of its tokens."""
        given = request.query_params
        name = given.get("id", "")
        same = self.library.rows_with_id(name)
        if not same:
            raise HTTPException(404, f"There is no trajectory {name[:200]!r} here.")
        row = next((row for row in same if str(row) == given.get("row")), same[0])
        (conversation,) = read_conversations(self.library.database, [row])
        (trajectory,) = self.library.trajectories([row])
        return self.render(
            "trajectory.html",
            row=row,
            entry=self.library.entries([row])[0],
            trajectory=trajectory,
            conversation=conversation,
            turns=list(zip(conversation["turns"], trajectory.turns, strict=True)),
            cases=self.library.database.all("from cases_of_trajectory(?, ?)", name, conversation["data_set"]),
            neighbours=self._neighbours(given, row),
            **self._tokens(given, trajectory, row),
        )

    def _neighbours(self, given: Given, row: int) -> dict[str, Any]:
        """Return the position of a trajectory in the list from which it was opened, or 0, and its neighbours."""
        wanted, _ = parse(given)
        rows = self.library.find(wanted)
        position = next(iter((np.flatnonzero(rows == row) + 1).tolist()), 0)
        before = self.library.entries(rows[position - 2 : position - 1].tolist()) if position > 1 else []
        after = self.library.entries(rows[position : position + 1].tolist()) if position else []
        return {
            "wanted": wanted,
            "position": position,
            "page": max(0, position - 1) // LINES + 1,
            "total": len(rows),
            "before": next(iter(before), None),
            "after": next(iter(after), None),
        }

    def _tokens(self, given: Given, trajectory: Trajectory, row: int) -> dict[str, Any]:
        """Return the values of the template for the tokens."""
        page = _Page(given, len(trajectory.token_ids), tokens.PART, "part")
        data_set = self.data_sets[int(self.library.database.number("select data_set from listing where row = ?", row))]
        policies = select(PolicyVersion, data_set.manifest.parent_names) if data_set.manifest else []
        decoder, no_tokenizer = find_decoder(self.store, data_set.run, policies, self.cache)
        by_advantage = given.get("colour") == "advantage"
        advantages, why_not = Advantages(), ""
        if by_advantage:
            try:
                advantages = compute_advantages(self.library, data_set, trajectory)
            except ValueError as error:
                why_not = str(error)
        scale = tokens.advantages_up_to(advantages.largest) if by_advantage else tokens.LOGPROBS
        return {
            "part": page.number,
            "parts": page.count,
            "spans": tokens.spans(trajectory, page.chosen, decoder, advantages.by_position),
            "no_tokenizer": no_tokenizer,
            "colour": "advantage" if by_advantage else "logprob",
            "advantages": advantages,
            "why_not": why_not,
            "scale": scale,
        }


class _Page:
    """The page of a list of `total` lines that an address names by `name`: the last page for a number too large."""

    def __init__(self, given: Given, total: int, lines: int, name: str = "page") -> None:
        text = given.get(name, "")
        self.total, self.count = total, max(1, -(-total // lines))
        self.number = min(max(1, int(text[:9])), self.count) if text.isascii() and text.isdigit() else 1
        self.chosen = slice((self.number - 1) * lines, self.number * lines)


def create_app(
    store: Store,
    data_sets: Sequence[DataSet],
    database: AuditDatabase,
    cache: Path,
    audit: Path | None = None,
    notes: Sequence[str] = (),
) -> FastAPI:
    """Create the app for the data sets in `database`, and add the reader's tables to it.

    Args:
        store: the store of the tokenizers.
        data_sets: the data sets in the order of their numbers.
        database: the tables; it must stay open as long as the app runs.
        cache: local folder for files of a remote store.
        audit: folder with an audit's cases.parquet.
        notes: sentences about data that cannot be shown.
    """
    moved = "If files were moved or collected, start the reader again."
    app, render = create_site([], moved, root=store.root, address_of=address)
    library = Library(database, audit / CASES if audit else None)
    views = Views(library, render, store, data_sets, cache, notes)
    for path, view in (("/", views.listing), ("/group", views.group), ("/trajectory", views.trajectory)):
        app.add_api_route(path, view, methods=["GET", "HEAD"])
    return app
