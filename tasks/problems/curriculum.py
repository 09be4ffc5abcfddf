"""The curriculum: how often a run draws each problem, by the results of the runs before it."""

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import get_args

from configs.problems import ProblemSampling
from storage.records import CurriculumEntry, Problem, ProblemHistory, Standing
from tasks.problems.difference import key

LEAST_EPISODES = 16
"""A problem with fewer episodes has no known success rate yet; it is drawn like a problem of the middle."""
LAST_EPISODES = 64
"""The success rate of a problem counts about so many of its newest episodes."""
FLOOR = 0.05
"""The least weight of a problem that is not left out. No problem is lost for ever, because the policy changes."""

Counts = tuple[int, int]
"""The number of episodes, and the number of those with any turn right."""


def plan_curriculum(
    problems: Sequence[Problem], history: Sequence[ProblemHistory], settings: ProblemSampling
) -> list[CurriculumEntry]:
    """Compute standing and weight of each problem, in their order.

    The success rate p is over about the newest `LAST_EPISODES` episodes: whole rows of the history, the newest first,
    until there are enough. With `prefer: middle` the weight is 4 p (1 - p), which is the variance of a success divided
    by its maximum, and at least `FLOOR`. A problem with too few episodes has weight 1, like p = 1/2. With
    `prefer: all` the weight is 1. A problem that is left out has weight 0.

    Args:
        problems: the problems that the run may draw.
        history: the history of the runs before it, oldest first; problems are matched by content, not by id.
        settings: `problems.sampling`.

    Raises:
        ValueError: every problem would be left out.
    """
    counts = _newest(history, LAST_EPISODES)
    rows = []
    for problem in problems:
        content = key(problem)
        rows.append(_entry(problem.problem_id, content, counts.get(content, (0, 0)), settings))
    if rows and not any(row.weight for row in rows):
        raise ValueError(_nothing_left(rows, settings))
    return rows


def _newest(history: Sequence[ProblemHistory], enough: int) -> dict[str, Counts]:
    """Count by problem key over the newest rows, until there are `enough` episodes."""
    counts: dict[str, Counts] = {}
    for row in reversed(history):
        episodes, solved = counts.get(row.problem_key, (0, 0))
        if episodes < enough:
            counts[row.problem_key] = (episodes + row.episodes, solved + row.any_turn)
    return counts


def _entry(name: str, content: str, counts: Counts, settings: ProblemSampling) -> CurriculumEntry:
    episodes, solved = counts
    rate = solved / episodes if episodes else 0.0
    standing = _standing(episodes, rate, settings)
    return CurriculumEntry(name, content, episodes, rate, standing, _weight(standing, rate, settings))


def _standing(episodes: int, rate: float, settings: ProblemSampling) -> Standing:
    if episodes < LEAST_EPISODES:
        return "unknown"
    if settings.retire_at is not None and rate >= settings.retire_at:
        return "retired"
    return "suspect" if rate == 0 else "middle"


def _weight(standing: Standing, rate: float, settings: ProblemSampling) -> float:
    if standing == "retired" or (standing == "suspect" and settings.leave_out_suspects):
        return 0.0
    if standing == "unknown" or settings.prefer == "all":
        return 1.0
    return max(FLOOR, 4 * rate * (1 - rate))


def _nothing_left(rows: Sequence[CurriculumEntry], settings: ProblemSampling) -> str:
    retired = sum(row.standing == "retired" for row in rows)
    return (
        f"problems.sampling leaves out all {len(rows)} problems: {retired} are solved at least as often as "
        f"retire_at={settings.retire_at}, {len(rows) - retired} were never solved. Raise or unset "
        "problems.sampling.retire_at, set problems.sampling.leave_out_suspects=false, or add problems"
    )


def suspects(rows: Iterable[CurriculumEntry]) -> list[CurriculumEntry]:
    """List the problems that were never solved, those with the most episodes first: their gold answers may be wrong."""
    unsolved = [row for row in rows if row.standing == "suspect"]
    return sorted(unsolved, key=lambda row: (-row.episodes, row.problem_id))


def standing_rows(rows: Sequence[CurriculumEntry]) -> list[dict[str, str]]:
    """Make a table: for each standing the numbers of problems and episodes, and the mean success rate of a problem."""
    table = []
    for standing in get_args(Standing):
        with_standing = [row for row in rows if row.standing == standing]
        rates = [row.success_rate for row in with_standing if row.episodes]
        table.append(
            {
                "standing": standing,
                "problems": str(len(with_standing)),
                "episodes": str(sum(row.episodes for row in with_standing)),
                "mean rate": f"{fmean(rates):.3f}" if rates else "",
            }
        )
    return table


def suspect_rows(rows: Iterable[CurriculumEntry], problems: Iterable[Problem]) -> list[dict[str, str]]:
    """Make a table of the suspects with their prompts, each on one line, and their gold answers."""
    by_id = {problem.problem_id: problem for problem in problems}
    return [
        {
            "problem": row.problem_id,
            "prompt": " ".join(by_id[row.problem_id].prompt.split()),
            "gold answers": "; ".join(by_id[row.problem_id].solutions),
            "episodes": str(row.episodes),
        }
        for row in suspects(rows)
    ]
