import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.problems import ProblemSampling
from storage.records import Problem
from tasks.problems.curriculum import FLOOR, plan_curriculum, standings
from tasks.problems.problem_set import key
from tasks.rollout.plan import draw, drawable, in_order

STRICT = ProblemSampling(prefer="middle", retire_at=0.95, leave_out_suspects=True)
PROBLEMS = [Problem(name, f"What\nis {name}?", [name, f"0{name}"]) for name in ("1", "2", "3", "4", "5")]


PAST = {key(PROBLEMS[0]): (32, 0), key(PROBLEMS[1]): (32, 8), key(PROBLEMS[2]): (32, 32), key(PROBLEMS[3]): (8, 3)}


def test_standing_and_weight_of_each() -> None:
    """Problems are matched by content, since ids may change; the weight is 4 p (1 - p).

    A problem with too few episodes has the weight of a problem that is solved half the time.
    """
    rows = plan_curriculum(PROBLEMS, PAST, STRICT)
    assert [row.standing for row in rows] == ["suspect", "middle", "retired", "unknown", "unknown"]
    assert [row.weight for row in rows] == pytest.approx([0, 0.75, FLOOR, 1, 1])
    assert [(row.episodes, row.success_rate) for row in rows] == [(32, 0), (32, 0.25), (32, 1), (8, 0.375), (0, 0)]
    assert standings(rows) == {"suspect": 1, "middle": 1, "retired": 1, "unknown": 2}
    assert [(row.problem_id, row.problem_key) for row in rows] == [(each.problem_id, key(each)) for each in PROBLEMS]


@pytest.mark.parametrize(
    ("sampling", "weights"),
    [
        (ProblemSampling(prefer="middle"), [FLOOR, 0.75, FLOOR, 1, 1]),
        (ProblemSampling(retire_at=0.9), [1, 1, FLOOR, 1, 1]),
        (ProblemSampling(leave_out_suspects=True), [0, 1, 1, 1, 1]),
    ],
)
def test_problems_that_are_kept_have_a_weight(sampling: ProblemSampling, weights: list[float]) -> None:
    """Kept problems that are always or never solved have a small weight; `prefer: all` gives them the full one.

    A retired problem keeps the small one: a policy that forgets it must meet it again.
    """
    assert [row.weight for row in plan_curriculum(PROBLEMS, PAST, sampling)] == pytest.approx(weights)


def test_leaving_out_everything_is_an_error() -> None:
    """A curriculum that leaves out every problem is refused, with the reason; one of retired problems is drawn."""
    with pytest.raises(ValueError, match=r"all 1 problems: none was ever solved. Set problems.sampling.leave_out_susp"):
        plan_curriculum(PROBLEMS[:1], PAST, STRICT)
    with pytest.raises(ValueError, match="all problems have weight 0"):
        drawable(PROBLEMS, dict.fromkeys("12345", 0.0))
    assert [row.weight for row in plan_curriculum(PROBLEMS[2:3], PAST, STRICT)] == [FLOOR]


WEIGHTS = st.lists(st.sampled_from([0.0, FLOOR, 0.3, 1.0]), min_size=1, max_size=30).filter(any)


def draw_all(
    problems: list[Problem], count: int, iteration: int, seed: int, weights: dict[str, float]
) -> tuple[list[Problem], list[Problem]]:
    """Draw as a run with these weights does; return the iteration's problems and all spare ones."""
    left, chances = drawable(problems, weights)
    return draw(left, count, iteration, seed, chances), list(in_order(left, count, iteration, seed, chances))[count:]


@given(WEIGHTS, st.integers(1, 15), st.integers(0, 9), st.integers(0, 5))
def test_weighted_draws(weights: list[float], count: int, iteration: int, seed: int) -> None:
    """A draw has distinct problems, none of weight 0, and is repeatable; the spares are all the others.

    Where too few problems are left, the draw has all of them.
    """
    problems = [Problem(str(i), "", ["0"]) for i in range(len(weights))]
    chances = {p.problem_id: weight for p, weight in zip(problems, weights, strict=True)}
    drawn, rest = draw_all(problems, count, iteration, seed, chances)
    live = {name for name, weight in chances.items() if weight > 0}
    ids = [problem.problem_id for problem in (*drawn, *rest)]
    assert len(drawn) == min(count, len(live))
    assert sorted(ids) == sorted(live)
    turned = dict(reversed(chances.items()))
    assert draw_all(problems, count, iteration, seed, turned) == (drawn, rest)


def test_chances_follow_the_weights() -> None:
    """Over 6,000 iterations first problems follow the weights, second ones the weights without replacement."""
    weights, times = {"1": 0.05, "2": 0.25, "3": 0.7, "4": 1.0, "5": 0.0}, 6000
    total = sum(weights.values())
    pairs = [tuple(p.problem_id for p in draw_all(PROBLEMS, 2, i, 1, weights)[0]) for i in range(times)]
    alone = [draw_all(PROBLEMS, 1, i, 1, weights)[0][0].problem_id for i in range(100)]
    assert alone == [first for first, _ in pairs[:100]]
    firsts, both = Counter(first for first, _ in pairs), Counter(pairs)
    for name, weight in weights.items():
        assert within(firsts[name], times, weight / total)
        for other in weights.keys() - {name}:
            assert within(both[name, other], times, weight / total * weights[other] / (total - weight))


def within(found: int, times: int, chance: float) -> bool:
    """Return whether a binomial count is within four standard deviations of its mean."""
    return abs(found - times * chance) <= 4 * math.sqrt(times * chance * (1 - chance))
