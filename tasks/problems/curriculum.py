"""The curriculum: how often a run draws each problem, by the results of the runs before it."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from configs.problems import ProblemSampling
from storage.records import CurriculumEntry, Problem, Standing
from tasks.problems.problem_set import key

LEAST_EPISODES = 16
"""A problem with fewer episodes has no known success rate yet; it is drawn like a problem of the middle."""
LAST_EPISODES = 64
"""The success rate of a problem counts about so many of its newest episodes."""
FLOOR = 0.05
"""The least weight of a problem that is not left out. No problem is lost for ever, because the policy changes."""


def plan_curriculum(
    problems: Sequence[Problem], results: Mapping[str, tuple[int, int]], settings: ProblemSampling
) -> list[CurriculumEntry]:
    """Compute standing and weight of each problem, in their order.

    With `prefer: middle` the weight is 4 p (1 - p) of the success rate p, which is the variance of a success divided by
    its maximum, and at least `FLOOR`. A problem with too few episodes has weight 1, like p = 1/2. With `prefer: all`
    the weight is 1. A problem that is left out has weight 0.

    Args:
        problems: the problems that the run may draw.
        results: by the keys of problems, newest episodes in earlier runs, and how many were right in any turn.
        settings: `problems.sampling`.

    Raises:
        ValueError: every problem would be left out.
    """
    entries = []
    for problem in problems:
        episodes, solved = results.get(content := key(problem), (0, 0))
        rate = solved / episodes if episodes else 0.0
        standing, weight = _standing(episodes, rate, settings)
        entries.append(CurriculumEntry(problem.problem_id, content, episodes, rate, standing, weight))
    if entries and not any(entry.weight for entry in entries):
        remedy = "Set problems.sampling.leave_out_suspects=false, or add problems"
        raise ValueError(f"problems.sampling leaves out all {len(entries)} problems: none was ever solved. {remedy}")
    return entries


def _standing(episodes: int, rate: float, settings: ProblemSampling) -> tuple[Standing, float]:
    """Return the standing and the weight of a problem."""
    if episodes < LEAST_EPISODES:
        return "unknown", 1.0
    if settings.retire_at is not None and rate >= settings.retire_at:
        return "retired", FLOOR
    weight = 1.0 if settings.prefer == "all" else max(FLOOR, 4 * rate * (1 - rate))
    if rate == 0:
        return "suspect", 0.0 if settings.leave_out_suspects else weight
    return "middle", weight


def standings(entries: Iterable[CurriculumEntry]) -> dict[str, int]:
    """Count the problems of each standing."""
    return dict(Counter(entry.standing for entry in entries))
