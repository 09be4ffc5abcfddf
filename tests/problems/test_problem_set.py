"""Problem sets: their fingerprint; new problems are found once, none is lost, and ids stay unique and unchanged."""

import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from storage.records import PROBLEM_SCHEMA, Problem, to_table
from tasks.problems.problem_set import fingerprint, key, new_problems, not_superseded, replayed, union

problems = st.lists(
    st.builds(
        Problem,
        problem_id=st.sampled_from(["a", "b", "a~2", "a~3", "a~2~2"]),
        prompt=st.sampled_from(["p", "q", "r", "s"]),
        solutions=st.lists(st.sampled_from(["1", "2"]), min_size=1, max_size=2),
    ),
    max_size=8,
)


def keys(*sets: list[Problem]) -> list[str]:
    return [key(problem) for problems in sets for problem in problems]


def numbered(count: int, first: int = 0) -> list[Problem]:
    return [Problem(f"{number:06d}", f"What is {number} + 1?", [str(number + 1)]) for number in range(first, count)]


def test_key_is_of_prompt_and_solutions() -> None:
    """A problem keeps its key under another id; another gold answer makes it another problem."""
    problem = Problem("1", "What is 12 + 7?", ["19", "19.0"], "arithmetic")
    assert key(problem) == key(Problem("2", "What is 12 + 7?", ["19.0", "19"], "gsm8k", '{"level": 1}'))
    assert key(problem) != key(replace(problem, solutions=["19"]))
    assert key(problem) != key(replace(problem, prompt="What is 12 + 7? "))
    assert key(Problem("", 'a","b', ["c"])) != key(Problem("", "a", ["b,c"]))


def test_key_and_fingerprint_are_pinned() -> None:
    """Another hash would make every problem of earlier nights new, and stored fingerprints incomparable."""
    problem = Problem("12+7", "What is 12 + 7?", ["19"], "arithmetic")
    assert (key(problem), fingerprint([problem])) == ("dfdf53743b062f4592538098f9659c75", "298bbd8358e27f99")
    code = Problem("1", "Sort.", [], "code", '{"input_output": {"inputs": ["1"], "outputs": ["1"]}}')
    assert key(code) == key(replace(code, metadata="{}"))


def test_games_with_one_prompt_are_other_problems() -> None:
    """A seed tells problems apart, and without solutions all metadata do, in any order of their keys."""
    games = [Problem(f"{n}", "Win.", [], metadata=json.dumps({"seed": n, "size": 5})) for n in range(3)]
    again = replace(games[1], problem_id="x", metadata='{"size": 5, "seed": 1}')
    assert union(games, [again]) == games
    assert not_superseded(games, [again]) == [games[0], games[2]]
    solved = [replace(game, solutions=["won"]) for game in games]
    assert len(union(solved)) == 3
    assert key(replace(solved[0], metadata='{"seed": 0, "size": 6}')) == key(solved[0])


@given(problems, problems)
def test_new_problems_and_seen_ones_are_all(found: list[Problem], seen: list[Problem]) -> None:
    """Every problem is either new or seen, none is new twice, the order stays, and a second call finds nothing."""
    fresh = new_problems(found, seen)
    assert set(keys(fresh, seen)) == set(keys(found, seen))
    assert not set(keys(fresh)) & set(keys(seen))
    assert keys(fresh) == list(dict.fromkeys(name for name in keys(found) if name not in keys(seen)))
    assert new_problems(fresh, seen) == fresh
    assert new_problems(found, [*seen, *fresh]) == []


def test_suffixes_of_ids() -> None:
    """Different problems with the same id get a numbered suffix, which never equals an existing id."""
    one, two, three = (Problem("a", prompt, ["1"]) for prompt in "pqr")
    named = Problem("a~2", "s", ["1"])
    assert [problem.problem_id for problem in union([one], [two], [three, one])] == ["a", "a~2", "a~3"]
    assert [problem.problem_id for problem in union([one, named], [two])] == ["a", "a~2", "a~3"]
    assert [problem.problem_id for problem in union([one, two], [named])] == ["a", "a~2", "a~2~2"]
    assert union([one], [replace(one, problem_id="b", source="x")]) == [one]


@given(problems, problems, problems)
def test_laws_of_the_union(one: list[Problem], two: list[Problem], three: list[Problem]) -> None:
    """A union holds each problem once under a unique id; a later set renames no earlier problem."""
    together = union(one, two)
    assert keys(together) == list(dict.fromkeys(keys(one, two)))
    ids = [problem.problem_id for problem in together]
    assert len(set(ids)) == len(ids)
    assert union(together) == union(together, one, two) == together
    assert union(one, two, three) == union(together, three)
    assert union(one, two, three)[: len(together)] == together
    assert union() == []


@given(st.integers(0, 40), st.floats(0, 0.99), st.integers(0, 40), st.integers(0, 5))
def test_share_of_the_replayed(count: int, share: float, common: int, seed: int) -> None:
    """Replayed problems have the asked share of the whole, or are all old ones; none is among the new ones."""
    fresh, old = numbered(count), numbered(count + 60, max(0, count - common))
    chosen = replayed(fresh, share, [*old, *old[:5]], seed)
    assert not set(keys(chosen)) & set(keys(fresh))
    assert len(set(keys(chosen))) == len(chosen)
    exact = count * share / (1 - share)
    assert len(chosen) == 60 if exact > 60 else abs(len(chosen) - exact) <= 0.5


texts = st.text(st.characters(codec="utf-8"), max_size=5)
problem_rows = st.builds(
    Problem,
    problem_id=texts,
    prompt=texts,
    solutions=st.lists(texts, min_size=1, max_size=3),
    source=texts,
    metadata=st.dictionaries(texts, st.integers(), max_size=3).map(json.dumps),
)


@settings(deadline=None)  # the first Arrow table takes a second
@given(st.lists(problem_rows, max_size=4))
def test_fingerprint_survives_storage(problems: list[Problem]) -> None:
    """A set read back from Parquet, with metadata keys in another order, has the same fingerprint."""
    table = to_table(problems, PROBLEM_SCHEMA)
    back = [Problem(**row) for row in table.to_pylist()]
    turned = [replace(p, metadata=json.dumps(dict(reversed(json.loads(p.metadata).items())))) for p in back]
    assert fingerprint(turned) == fingerprint(problems)
