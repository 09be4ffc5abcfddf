"""Find the problem that a user means by an id, a key or a part of the prompt.

Ids may be row numbers, which different sets give to different problems. So two problems are the same if their content
is the same.
"""

import re
from dataclasses import dataclass

from configs.safety import check_plain
from storage.visible import visible
from tasks.provenance.played_trajectories import PlayedTrajectories

_KEY = re.compile(r"[0-9a-f]{32}")
_MOST_CANDIDATES = 10
_MOST_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class FoundProblem:
    """A problem, identified by its content, with all ids that it has.

    Example: FoundProblem(key="9f3a…", problem_ids=["12+7"], prompt="What is 12 + 7?", solutions=["19"])
    """

    key: str  # see tasks.problems.problem_set
    problem_ids: list[str]
    prompt: str
    solutions: list[str]


def find_problem(played: PlayedTrajectories, text: str, *, by_prompt: bool = False) -> FoundProblem:
    """Return the one problem that `text` means: an id or a key, or, with `by_prompt`, a part of the prompt in any case.

    Raises:
        ValueError: `text` means no problem, or several (the message lists them), or cannot be stored.
    """
    check_plain({"PROBLEM": text})
    if by_prompt:
        keys = _keys(played, "prompt = ?", text) or _keys(played, "contains(lower(prompt), lower(?))", text)
    else:
        keys = _keys(played, "key = ?", text) if _KEY.fullmatch(text) else []
        keys = keys or _keys(played, "problem_id = ?", text)
    if not keys:
        raise ValueError(_not_found(played, text, by_prompt))
    if len(keys) > 1:
        raise ValueError(_ambiguous(played, text, keys))
    return describe_problems(played, keys)[0]


def describe_problems(played: PlayedTrajectories, keys: list[str]) -> list[FoundProblem]:
    """Return the problems with these keys, ordered by prompt."""
    rows = played.database.all(
        """select key, (select list(distinct problem_id order by problem_id) from problem_ids i where i.key = c.key),
        min(prompt), min(solutions) from problem_contents c where list_contains(?, key) group by key
        order by 3, key""",
        keys,
    )
    return [FoundProblem(*row) for row in rows]


_SEARCHED = """(select key, problem_id, prompt
    from problem_ids join sets using (version) join problem_contents using (key) where searched)"""


def _keys(played: PlayedTrajectories, condition: str, text: str) -> list[str]:
    return [key for (key,) in played.database.all(f"select distinct key from {_SEARCHED} where {condition}", text)]


def _not_found(played: PlayedTrajectories, text: str, by_prompt: bool) -> str:
    known = int(played.database.number(f"select count(distinct key) from {_SEARCHED}"))
    if by_prompt:
        return f"none of the {known} known problems has {text!r} in its prompt: check the text or choose another part"
    similar = played.database.all(
        f"select problem_id from {_SEARCHED} group by 1 order by levenshtein(problem_id, ?), 1 limit 3", text
    )
    hint = f", such as {', '.join(repr(name) for (name,) in similar)}" if similar else ""
    return f"no problem has the id or key {text!r}; there are {known}{hint}. --prompt searches for a part of the prompt"


def _ambiguous(played: PlayedTrajectories, text: str, keys: list[str]) -> str:
    lines = [
        f"\n  {problem.key}  {visible(', '.join(problem.problem_ids[:3]))}: "
        f"{visible(' '.join(problem.prompt.split()), _MOST_CHARACTERS)}"
        f" -> {visible('; '.join(problem.solutions), _MOST_CHARACTERS)}"
        for problem in describe_problems(played, keys)[:_MOST_CANDIDATES]
    ]
    more = f"\n  and {len(keys) - _MOST_CANDIDATES} more" if len(keys) > _MOST_CANDIDATES else ""
    return f"{text!r} means {len(keys)} different problems: give the key of one{''.join(lines)}{more}"
