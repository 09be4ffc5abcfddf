"""Mixtures: whose turn it is, what each member draws, and how their problems become one set."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import ConfigError, load
from configs.problems import GuessSource, NamedSource, StoredSource
from flows.run import check
from flows.run.configuration import resolve
from flows.stages import problems as problems_task
from flows.stages import rollout as rollout_task
from flows.stages.problems import import_sets
from storage import layout
from storage.records import CurriculumEntry, Problem
from storage.versions import datasets, manifests
from tasks.problems import ProblemError
from tasks.problems.generated import generate
from tasks.problems.mixture import Turns, load_source, of_member
from tasks.problems.problem_set import key
from tasks.rollout.plan import Pool, draw_from
from tests.support.begun import begin

WEIGHTS = st.lists(st.one_of(st.integers(1, 9), st.sampled_from([0.1, 0.25, 1e-3, 2.5])), min_size=1, max_size=6)
SUMS = "{name: sums, weight: 2, source: {kind: arithmetic, high: 9}}"
GAME = (
    "{name: game, source: {kind: guess-number, count: 6}, held_out: {kind: guess-number, split: held-out, count: 3}, "
    "environment: {type: guess-number}, score: environment, agent: {type: openai}}"
)


def pool(name: str, size: int, share: float = 1.0, unplayable: Sequence[str] = ()) -> Pool:
    problems = of_member(name, [Problem(str(number), f"{name} {number}?", ["1"]) for number in range(size)])
    return Pool(problems, None, {each.problem_id for each in problems} - {*unplayable}, name, share)


def drawn(pools: Sequence[Pool], count: int, iterations: int, seed: int = 1) -> list[list[str]]:
    """Return the ids of the problems of each iteration."""
    return [[each.problem_id for each in draw_from(pools, count, n, seed)[0]] for n in range(iterations)]


@given(WEIGHTS, st.integers(1, 300))
def test_shares_are_exact_within_one_at_any_moment(weights: list[float], end: int) -> None:
    """After each turn each member had its share of the turns, within less than one; so none starves."""
    counts, whole = [0] * len(weights), sum(weights)
    for done, member in enumerate(Turns(weights).until(end)[:end], 1):
        counts[member] += 1
        assert all(abs(had - done * weight / whole) < 1 for had, weight in zip(counts, weights, strict=True))


@given(WEIGHTS, st.integers(1, 200), st.integers(1, 200))
def test_turns_depend_on_the_weights_alone(weights: list[float], first: int, later: int) -> None:
    """Whatever was asked before, in proportion or not: a run that continues has the turns of one that never stopped."""
    turns = Turns(weights)
    turns.until(first)
    assert turns.until(later)[:later] == Turns([2 * weight for weight in weights]).until(later)[:later]


MEMBERS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 5)), min_size=1, max_size=4)


@given(MEMBERS, st.integers(1, 12), st.integers(0, 5))
def test_each_member_goes_through_its_problems(members: list[tuple[int, int]], count: int, seed: int) -> None:
    """A member draws all of its problems before one repeats, in an order that does not depend on the other members."""
    pools = [pool(f"m{number}", size, share) for number, (size, share) in enumerate(members)]
    iterations = drawn(pools, count, 30, seed)
    assert iterations == drawn(pools, count, 30, seed)
    assert all(len(set(ids)) == len(ids) <= count for ids in iterations)

    def own(member: str, iterations: list[list[str]]) -> list[str]:
        return [name for ids in iterations for name in ids if name.startswith(f"{member}/")]

    for each, (size, _) in zip(pools, members, strict=True):
        first = own(each.name, iterations)[:size]
        assert len(set(first)) == len(first)
    larger = [pools[0], *(pool(each.name, 40, each.share) for each in pools[1:])]
    assert own("m0", iterations) == own("m0", drawn(larger, count, 30, seed))


def test_what_may_not_be_played_is_replaced_within_its_member() -> None:
    """The other problems of the draw stay the same, and so do the shares."""
    before = drawn([pool("a", 20), pool("b", 20)], 6, 1)[0]
    after = drawn([pool("a", 20, unplayable=before[:1]), pool("b", 20)], 6, 1)[0]
    assert before[0].startswith("a/")
    assert before[0] not in after
    assert set(before[1:]) < set(after)
    assert Counter(name[0] for name in after) == {"a": 3, "b": 3}


def test_the_problems_of_a_member_have_its_name() -> None:
    """Their source is the member's name, which also makes ids unique; content and fingerprint of content stay."""
    named = load("smoke", [f"problems.train=[{SUMS}, {GAME}]"]).problems.trained[0]
    loaded = load_source(named, 0, lambda _: "needs", lambda _: [])
    first = loaded.problems[0]
    assert (first.problem_id, first.source, loaded.bad) == ("sums/1-4", "sums", [])
    assert key(first) == key(replace(first, source="arithmetic", problem_id="1-4"))
    stored = NamedSource(StoredSource(kind="stored", version="problems/01"), "old")
    loaded = load_source(stored, 0, lambda _: "needs", lambda _: [Problem("1", "2?", ["3"], "x")])
    assert loaded.problems == [Problem("old/1", "2?", ["3"], "old")]


def test_errors_of_a_source_name_the_member() -> None:
    """The scorer of a member decides what it needs, and not that of the source that a row names."""
    where = "problems.train[1] (game): "
    game = NamedSource(GuessSource(kind="guess-number"), "game", where)
    with pytest.raises(ProblemError, match=r"problems.train\[1\] \(game\): games have no solutions"):
        load_source(game, 0, lambda source: "needs" if source == "game" else "ignores", lambda _: [])


def test_games_of_both_splits_differ() -> None:
    """They have one prompt; the seed decides which game it is."""
    source = GuessSource(kind="guess-number", count=20)
    train, held_out = map(generate, (source, source.model_copy(update={"split": "held-out"})))
    assert len({key(each) for each in [*train, *held_out]}) == 40


@pytest.fixture
def overrides(plain: list[str], policy_folder: Path) -> list[str]:
    """Return overrides for a mixture and an imported policy."""
    return [*plain, f"policy={{path: {policy_folder}}}", f"problems.train=[{SUMS}, {GAME}]"]


def test_a_run_imports_and_draws_a_mixture(overrides: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """Both sets hold the problems of all members; the run's own held-out problems keep their source."""
    workspace, (train, held_out), _ = begin(*overrides)
    counts = [Counter(each.source for each in workspace.read_problems(version)) for version in (train, held_out)]
    assert counts == [{"sums": 155, "game": 6}, {"game": 3, "arithmetic": 8}]
    assert "161 problems, 155 of sums, 6 of game, " in caplog.text
    assert list(manifests.read(workspace.store, train).metrics["source"]["mixture"]) == ["sums", "game"]
    assert list(manifests.read(workspace.store, held_out).metrics["source"]["mixture"]) == ["game", ""]
    assert import_sets.fn(workspace) == {"held-out": held_out}
    draws = [rollout_task._draw(workspace, train, iteration)[0] for iteration in range(3)]
    assert [[each.source for each in each_draw].count("sums") for each_draw in draws] == [3, 2, 3]
    assert [len(each_draw) for each_draw in draws] == [4, 4, 4]


def test_members_may_not_share_ids(overrides: list[str], tmp_path: Path) -> None:
    """The run's own held-out problems have no prefix, so a file of several may be named like a member."""
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "game.jsonl").write_text('{"q": "1?", "a": "2", "n": "game4"}\n')
    own = f"{{kind: jsonl, path: {folder}/*.jsonl, fields: {{prompt: q, solutions: a, id: n}}}}"
    with pytest.raises(ProblemError, match=r"share ids \(game/game4\)"):
        begin(*overrides, f"problems.held_out={own}")


def test_a_member_without_room_is_named(overrides: list[str]) -> None:
    """The others have room; nothing of it would be left to play, so the remedy is named."""
    long = GAME.replace("{type: openai}", "{type: math-multi-turn, args: {system_prompt: %s}}" % ("long " * 40))
    with pytest.raises(ProblemError, match=r"^problems.train\[1\] \(game\): 6 of 6 problems \(game/game1.*raise inf"):
        begin(*overrides, f"problems.train=[{SUMS}, {long}]")


def test_the_curriculum_works_within_each_member(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Games that are never won are left out, but games have their share of the draws."""
    games = generate(GuessSource(kind="guess-number", count=5))
    monkeypatch.setattr(problems_task, "results", lambda *_, **__: ({key(each): (64, 0) for each in games}, []))
    suspects = "problems.sampling={leave_out_suspects: true}"
    workspace, (version, _), _ = begin(*overrides, suspects)
    assert "(game): curriculum from 0 runs: 5 suspect, 1 unknown" in caplog.text
    assert "(sums): curriculum from 0 runs: 155 unknown" in caplog.text
    rows = datasets.rows(workspace.store, layout.curriculum("smoke"), workspace.cache)
    assert Counter(CurriculumEntry(**row).standing for row in rows) == {"unknown": 156, "suspect": 5}
    drawn = [each.problem_id for each in rollout_task._draw(workspace, version, 0)[0] if each.source == "game"]
    assert drawn == ["game/game7"]
    with pytest.raises(ValueError, match=r"problems.train\[1\] \(game\): problems.sampling leaves out all 5 problems"):
        begin(*overrides, "run.name=other", suspects, "problems.train.1.source.count=5")


def test_each_member_is_tried_before_a_run_begins(overrides: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`--check` tells an episode of each; what fails, or does not exist, names the member."""
    assert check.check(resolve("smoke", overrides)) == "the configuration plays"
    story = capsys.readouterr().out
    assert "the episode of problem 'sums/1-4' ends" in story
    assert "the episode of problem 'game/game1' ends" in story
    with pytest.raises(ConfigError, match=r"\(game\): agent.type='opnai' is not registered, did you mean 'openai'\?"):
        resolve("smoke", ["policy={path: p}", f"problems.train=[{SUMS}, {GAME.replace('openai', 'opnai')}]"])
    broken = GAME.replace("{type: guess-number}", "{type: 'tests.rollout.test_scripted:Maze', args: {broken: reset}}")
    with pytest.raises(ConfigError, match=r"^problems.train\[1\] \(game\): an episode of problem 'game/\w+' ends"):
        begin(*overrides, f"problems.train=[{SUMS}, {broken}]")
