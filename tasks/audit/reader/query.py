"""Translate a filter into SQL on the table `listing` (see `tasks.audit.reader.library`)."""

from typing import Any

from tasks.audit.reader.filters import Filter

ORDERS = {
    "stored": "place",
    "longest": "tokens desc, place",
    "shortest": "tokens, place",
    "slowest": "latency desc nulls last, place",
    "best": "reward desc nulls last, place",
    "worst": "reward nulls last, place",
    "calls": "calls desc, place",
}
"""The SQL for each name in `filters.ORDERS`."""

_Condition = tuple[str, list[Any]]  # SQL and its parameters


def where(wanted: Filter) -> tuple[str, list[Any]]:
    """Return the filter as an SQL condition and its parameters."""
    conditions, parameters = ["true"], list[Any]()
    for condition, values in (
        *_on_episode(wanted),
        *_on_turns(wanted),
        *_on_calls(wanted),
        *_on_text(wanted),
        *_on_check(wanted),
    ):
        conditions.append(condition)
        parameters += values
    return " and ".join(f"({condition})" for condition in conditions), parameters


def _on_episode(wanted: Filter) -> list[_Condition]:
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


def _on_turns(wanted: Filter) -> list[_Condition]:
    """Require one turn with the wanted number, verdict and reward."""
    on_turn: list[_Condition] = []
    if wanted.verdict == "unscored":
        on_turn.append(("verdict is null", []))
    elif wanted.verdict == "disagree":
        on_turn.append(("verdict <> environment_verdict and verdict <> 'none'", []))
    elif wanted.verdict:
        on_turn.append(("coalesce(verdict, environment_verdict) = ?", [wanted.verdict]))
    bounds = ((wanted.least, ">="), (wanted.most, "<="))
    on_turn += [(f"coalesce(scored_reward, reward) {sign} ?", [value]) for value, sign in bounds if value is not None]
    if not on_turn:
        return []
    places = {"any": "true", "first": "turn = 0", "last": '"last"'}
    on_turn.append((places[wanted.turn], []) if wanted.turn in places else ("turn = ?", [int(wanted.turn) - 1]))
    condition = " and ".join(condition for condition, _ in on_turn)
    return [(f"row in (select row from turns where {condition})", [value for _, values in on_turn for value in values])]


def _on_calls(wanted: Filter) -> list[_Condition]:
    if wanted.calls in ("", "some", "none"):
        return [(f"calls {'=' if wanted.calls == 'none' else '>'} 0", [])] if wanted.calls else []
    return [("row in (select row from calls where status = ?)", [wanted.calls])]


def _on_text(wanted: Filter) -> list[_Condition]:
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


def _on_check(wanted: Filter) -> list[_Condition]:
    """Require a case of the check for the trajectory, or for its group, problem or data set."""
    if not wanted.check:
        return []
    joined = """row in (select l.row from listing l join data_sets d using (data_set) join cases c on c.id = {}
        where c.check_name = ? and c.unit in {} and c.data_set in ('', d.version))"""
    ways = (
        ("l.trajectory_id", "('trajectory', 'turn', 'call')"),
        ("l.problem_id", "('group', 'problem')"),
        ("d.version", "('data set')"),
    )
    return [(" or ".join(joined.format(*way) for way in ways), [wanted.check] * len(ways))]
