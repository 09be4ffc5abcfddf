"""The page about one trajectory: its conversation and its tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import Response

from storage.objects.store import Store
from storage.records import Trajectory
from tasks.audit.conversations import StoredConversation, read_conversations
from tasks.audit.reader.advantages import AdvantageComputer, Advantages, NoAdvantageError
from tasks.audit.reader.colours import advantage_legend, advantage_step, logprob_legend, logprob_step
from tasks.audit.reader.filters import Filter, parse
from tasks.audit.reader.library import Library, ListItem
from tasks.audit.reader.pages import LINES, PageError, Pages, plain
from tasks.audit.reader.sequences import beginnings
from tasks.audit.reader.tokens import PART, Token, parts, spans
from tasks.audit.reader.vocabulary import Vocabularies
from tasks.audit.selection import DataSet


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The position of a trajectory in the list from which it was opened, and its neighbours."""

    wanted: Filter
    place: int  # position from 1 on; 0 if it is not in the list
    total: int
    before: ListItem | None = None
    after: ListItem | None = None

    @property
    def page(self) -> int:
        """The page of the list with this trajectory, from 1 on."""
        return max(0, self.place - 1) // LINES + 1


class TrajectoryPages:
    """The views of this page and of its texts.

    Args:
        library: the data.
        pages: the templates.
        store: the store of the tokenizers.
        data_sets: the data sets in the order of their numbers.
        cache: local folder for files of a remote store.
    """

    def __init__(self, library: Library, pages: Pages, store: Store, data_sets: Sequence[DataSet], cache: Path) -> None:
        self._library, self._pages, self._data_sets = library, pages, data_sets
        self._advantage_computer = AdvantageComputer(library, data_sets)
        self._vocabularies = Vocabularies(store, cache)

    def trajectory(self, given: Mapping[str, str]) -> Response:
        """Show one trajectory with a part of its tokens."""
        row, same = self._row(given)
        conversation, trajectory = self._read(row)
        return self._pages.html(
            "trajectory.html",
            row=row,
            entry=self._library.entries([row])[0],
            same=self._library.entries([other for other in same[:20] if other != row]),
            trajectory=trajectory,
            conversation=conversation,
            turns=list(zip(conversation.turns, trajectory.turns, strict=True)),
            beginnings=beginnings(trajectory),
            cases=self._cases(conversation),
            neighbours=self._neighbours(given, row),
            **self._tokens(given, trajectory, row),
        )

    def text(self, given: Mapping[str, str]) -> Response:
        """Show one whole text as plain text; the parameter `of` names it."""
        row, _ = self._row(given)
        conversation, _ = self._read(row)
        texts: dict[str, str] = {"prompt": conversation.prompt, "gold": "\n".join(conversation.solutions)}
        for turn in conversation.turns:
            texts[f"answer-{turn.turn + 1}"] = turn.text
            texts[f"feedback-{turn.turn + 1}"] = turn.feedback
            texts[f"extracted-{turn.turn + 1}"] = turn.extracted or ""
            for number, call in enumerate(turn.calls, 1):
                texts[f"arguments-{turn.turn + 1}-{number}"] = call.arguments
                texts[f"output-{turn.turn + 1}-{number}"] = call.output
        if (name := given.get("of", "")) not in texts:
            raise PageError(404, "No such text", f"There is no text {name[:100]!r}: choose one of {', '.join(texts)}.")
        return plain(texts[name])

    def _read(self, row: int) -> tuple[StoredConversation, Trajectory]:
        (conversation,) = read_conversations(self._library.database, [row])
        (trajectory,) = self._library.trajectories([row])
        return conversation, trajectory

    def _row(self, given: Mapping[str, str]) -> tuple[int, list[int]]:
        """The row that is meant, and all rows with its id."""
        name, number = given.get("id", ""), given.get("row", "")
        same = self._library.rows_with_id(name)
        if not number and same:
            return same[0], same
        if number.isascii() and number.isdigit() and len(number) < 19:
            found = self._library.entries([int(number)])
            if found and name in ("", found[0].trajectory_id):
                return int(number), self._library.rows_with_id(found[0].trajectory_id)
        raise PageError(404, "No such trajectory", f"There is no trajectory {(name or number)[:200]!r} here.")

    def _number(self, row: int) -> int:
        """Return the number of the row's data set."""
        return int(self._library.database.number("select data_set from listing where row = ?", row))

    def _cases(self, conversation: StoredConversation) -> list[tuple[str, str]]:
        """Return the cases of an audit for the trajectory: check and detail."""
        found = self._library.database.all(
            """select check_name, detail from cases
            where unit in ('trajectory', 'turn', 'call') and id = ? and data_set in ('', ?) order by all limit 100""",
            conversation.trajectory_id,
            conversation.data_set,
        )
        return [(check, detail) for check, detail in found]

    def _neighbours(self, given: Mapping[str, str], row: int) -> Neighbours:
        wanted, _ = parse(given)
        rows = self._library.find(wanted)
        places = np.flatnonzero(rows == row)
        if not len(places):
            return Neighbours(wanted, 0, len(rows))
        place = int(places[0])
        around = [rows[other] if 0 <= other < len(rows) else None for other in (place - 1, place + 1)]
        before, after = (self._library.entries([int(each)])[0] if each is not None else None for each in around)
        return Neighbours(wanted, place + 1, len(rows), before, after)

    def _tokens(self, given: Mapping[str, str], trajectory: Trajectory, row: int) -> dict[str, Any]:
        """Return the values of the template for the tokens."""
        number = self._number(row)
        part = _part(given, parts(trajectory))
        texts, no_tokenizer = self._vocabularies.texts_for(self._data_sets[number])
        shown = texts(trajectory.token_ids[(part - 1) * PART : part * PART])
        by_advantage = given.get("colour") == "advantage"
        advantages, why_not = self._advantages(trajectory, number) if by_advantage else (Advantages(), "")
        return {
            "part": part,
            "parts": parts(trajectory),
            "spans": spans(trajectory, part - 1, shown.__getitem__, advantages.by_position),
            "no_tokenizer": no_tokenizer,
            "colour": "advantage" if by_advantage else "logprob",
            "advantages": advantages,
            "why_not": why_not,
            "legend": advantage_legend(advantages.largest) if by_advantage else logprob_legend(),
            "step": _by_advantage(advantages.largest) if by_advantage else _by_logprob,
        }

    def _advantages(self, trajectory: Trajectory, number: int) -> tuple[Advantages, str]:
        try:
            return self._advantage_computer.compute(trajectory, number), ""
        except NoAdvantageError as error:
            return Advantages(), str(error)


def _part(given: Mapping[str, str], most: int) -> int:
    text = given.get("part", "1")
    if not (text.isascii() and text.isdigit() and 0 < int(text[:9]) <= most):
        raise PageError(404, "No such part", f"The tokens have {most} parts: there is no part {text[:40]!r}.")
    return int(text)


def _by_logprob(token: Token) -> str:
    return logprob_step(token.logprob) if token.sampled else ""


def _by_advantage(largest: float) -> Callable[[Token], str]:
    return lambda token: advantage_step(token.advantage, largest) if token.sampled else ""
