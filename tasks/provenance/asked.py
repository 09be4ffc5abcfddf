"""Which problem is meant. Ids may be row numbers, which different sets give to different problems: content decides."""

import re
from dataclasses import dataclass

from configs.plain import check_plain
from storage.visible import visible
from tasks.provenance.plays import Plays

_KEY = re.compile(r"[0-9a-f]{32}")
_TOLD = 10
_SHORT = 60


@dataclass(frozen=True, slots=True)
class FoundProblem:
    """A problem by its content, under all ids that it has.

    Example: FoundProblem(key="9f3a…", problem_ids=["12+7"], prompt="What is 12 + 7?", solutions=["19"])
    """

    key: str  # see tasks.problems.difference
    problem_ids: list[str]
    prompt: str
    solutions: list[str]


def find_problem(plays: Plays, text: str, *, by_prompt: bool = False) -> FoundProblem:
    """The one problem that `text` means: an id or a key; or, `by_prompt`, a part of the prompt, whatever its case.

    Raises:
        ValueError: none is meant, or several are; says which. Or `text` is none that could be stored.
    """
    check_plain({"PROBLEM": text})
    if by_prompt:
        keys = _keys(plays, "prompt = ?", text) or _keys(plays, "contains(lower(prompt), lower(?))", text)
    else:
        keys = _keys(plays, "key = ?", text) if _KEY.fullmatch(text) else []
        keys = keys or _keys(plays, "problem_id = ?", text)
    if not keys:
        raise ValueError(_nothing(plays, text, by_prompt))
    if len(keys) > 1:
        raise ValueError(_several(plays, text, keys))
    return describe(plays, keys)[0]


def describe(plays: Plays, keys: list[str]) -> list[FoundProblem]:
    """The problems with these keys, ordered by prompt."""
    rows = plays.database.all(
        """select key, (select list(distinct problem_id order by problem_id) from named n where n.key = a.key),
        min(prompt), min(solutions) from asked a where list_contains(?, key) group by key order by 3, key""",
        keys,
    )
    return [FoundProblem(*row) for row in rows]


_MET = "(select key, problem_id, prompt from named join sets using (version) join asked using (key) where searched)"


def _keys(plays: Plays, condition: str, text: str) -> list[str]:
    return [key for (key,) in plays.database.all(f"select distinct key from {_MET} where {condition}", text)]


def _nothing(plays: Plays, text: str, by_prompt: bool) -> str:
    known = int(plays.database.number(f"select count(distinct key) from {_MET}"))
    if by_prompt:
        return f"none of the {known} problems that were met has {text!r} in its prompt"
    near = plays.database.all(
        f"select problem_id from {_MET} group by 1 order by levenshtein(problem_id, ?), 1 limit 3", text
    )
    hint = f", such as {', '.join(repr(name) for (name,) in near)}" if near else ""
    return f"no problem has the id or key {text!r}; there are {known}{hint}. --prompt looks for a part of the prompt"


def _several(plays: Plays, text: str, keys: list[str]) -> str:
    lines = [
        f"\n  {each.key}  {visible(', '.join(each.problem_ids[:3]))}: {visible(' '.join(each.prompt.split()), _SHORT)}"
        f" -> {visible('; '.join(each.solutions), _SHORT)}"
        for each in describe(plays, keys)[:_TOLD]
    ]
    more = f"\n  and {len(keys) - _TOLD} more" if len(keys) > _TOLD else ""
    return f"{text!r} means {len(keys)} different problems: give the key of one{''.join(lines)}{more}"
