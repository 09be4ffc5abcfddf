"""From a filter to SQL on the table `listing` (see `tasks.audit.reader.library`)."""

from typing import Any

from tasks.audit.reader.filters import Filter

ORDERS = {
    "stored": "place",
    "longest": "tokens desc, place",
    "shortest": "tokens, place",
    "slowest": "latency desc nulls last, place",
    "best": "reward desc nulls last, place",
    "worst": "reward nulls last, place",
}
"""By the names in `filters.ORDERS`."""

_Part = tuple[str, list[Any]]  # a condition and its parameters


def where(wanted: Filter) -> tuple[str, list[Any]]:
    """The filter as an SQL condition and its parameters."""
    conditions, parameters = ["true"], list[Any]()
    for condition, values in (*_of_episode(wanted), *_of_turns(wanted), *_of_text(wanted), *_of_check(wanted)):
        conditions.append(condition)
        parameters += values
    return " and ".join(f"({condition})" for condition in conditions), parameters


def _of_episode(wanted: Filter) -> list[_Part]:
    sets = "data_set in (select data_set from data_sets where contains(lower(version), lower(?)))"
    simple = (
        (wanted.status, "status = ?"),
        (wanted.problem, "trim(problem_id) = trim(?)"),
        (wanted.turns, "turns = ?"),
        (wanted.begin, "iteration >= ?"),
        (wanted.end, "iteration <= ?"),
        (wanted.data_set, sets),
    )
    return [(condition, [value]) for value, condition in simple if value not in (None, "")]


def _of_turns(wanted: Filter) -> list[_Part]:
    """One turn in the right place has the verdict and the reward."""
    asked: list[_Part] = []
    if wanted.verdict == "unscored":
        asked.append(("verdict is null", []))
    elif wanted.verdict == "disagree":
        asked.append(("verdict <> said", []))
    elif wanted.verdict:
        asked.append(("coalesce(verdict, said) = ?", [wanted.verdict]))
    bounds = ((wanted.least, ">="), (wanted.most, "<="))
    asked += [(f"coalesce(success, reward) {sign} ?", [value]) for value, sign in bounds if value is not None]
    if not asked:
        return []
    places = {"any": "true", "first": "turn = 0", "last": '"last"'}
    asked.append((places[wanted.turn], []) if wanted.turn in places else ("turn = ?", [int(wanted.turn) - 1]))
    condition = " and ".join(condition for condition, _ in asked)
    return [(f"row in (select row from turns where {condition})", [value for _, values in asked for value in values])]


def _of_text(wanted: Filter) -> list[_Part]:
    if not wanted.text:
        return []
    found = "contains(lower({}), lower(?))"
    places = {
        "prompt": f"prompt in (select number from prompts where {found.format('text')})",
        "answers": f"row in (select row from turns where {found.format('text')})",
        "feedback": f"row in (select row from turns where {found.format('feedback')})",
    }
    chosen = list(places.values()) if wanted.inside == "anywhere" else [places[wanted.inside]]
    return [(" or ".join(chosen), [wanted.text] * len(chosen))]


def _of_check(wanted: Filter) -> list[_Part]:
    """The trajectories, and all trajectories of the groups, problems and data sets, that a check points at."""
    if not wanted.check:
        return []
    joined = """row in (select l.row from listing l join data_sets d using (data_set) join cases c on c.id = {}
        where c.check_name = ? and c.unit in {} and c.data_set in ('', d.version))"""
    ways = (
        ("l.trajectory_id", "('trajectory', 'turn')"),
        ("l.problem_id", "('group', 'problem')"),
        ("d.version", "('data set')"),
    )
    return [(" or ".join(joined.format(*way) for way in ways), [wanted.check] * len(ways))]
