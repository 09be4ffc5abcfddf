"""The audit as a whole on small stores: all data are read, and damage is reported as a case, never as a traceback."""

from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from storage import layout
from storage.logs.leases import Lease
from storage.objects.store import Store
from storage.records import PROBLEM_SCHEMA, Problem, Score, Trajectory, to_table
from storage.version_names import PolicyVersion
from storage.versions.drafts import Draft, Provenance
from storage.versions.manifests import Manifest
from tasks.audit.report.page import render
from tasks.audit.report.plots import plots
from tasks.audit.results import from_dict
from tasks.audit.run import Audited, audit, commit_audit, read_audit
from tasks.score.verifier import Verifier
from tasks.tables.db import open_trajectory_db
from tasks.tables.sets import parse_since, select
from tests.support.audit_play import checks_of, only
from tests.support.chain_helpers import commit_rows, rewrite
from tests.support.planted_faults import flip_byte
from tests.support.train_helpers import make_scores, make_trajectory

SET = layout.trajectories("r", 0)
ROWS = [make_trajectory(f"t{number}", [[7, 8], [9]]) for number in range(4)]
VERDICTS = [score for row in ROWS for score in make_scores(row.trajectory_id, 0.0, 1.0)]


def commit(
    store: Store, rows: list[Trajectory] = ROWS, scores: list[Score] | None = VERDICTS, iteration: int = 0
) -> str:
    version = layout.trajectories("r", iteration)
    commit_rows(store, version, "trajectories", rows, [])
    if scores is not None:
        commit_rows(store, layout.scores("r", iteration, "5c0e"), "scores", scores, [version])
    return version


def audited(store: Store, verifier: Verifier, *targets: str) -> AbstractContextManager[Audited]:
    return audit(store, select(store, targets), only(), Path(store.path("cache")), verifier)


def keep(store: Store, found: Audited) -> Manifest:
    return commit_audit(store, select(store, ["r"]), found, Provenance(config={}), Path(store.path("cache")), "reader")


def test_a_run_is_audited_and_kept(any_store: Store, verifier: Verifier, tmp_path: Path) -> None:
    """Verdict, numbers, report and cases are one version; the same findings in the same data give the same version."""
    store, cache = any_store, tmp_path / "cache"
    commit(store)
    data_sets = select(store, ["r"])
    with audit(store, data_sets, only(), cache, verifier) as found:
        first, again = (commit_audit(store, data_sets, found, Provenance(config={}), cache, "reader") for _ in range(2))
        flagged = found.database.number("select count(*) from cases")
    assert first == again
    assert [parent.version for parent in first.parents] == [SET, layout.scores("r", 0, "5c0e")]
    result, folder = read_audit(store, first.version, cache)
    assert result == found.result
    assert result.sets[0].success == [0.0, 1.0]
    assert (result.sets[0].trajectories, result.sets[0].fixed, result.sets[0].any_turn) == (4, 1.0, 1.0)
    assert flagged == pq.read_metadata(folder / "cases.parquet").num_rows > 0
    assert f"reader {first.version}" in (folder / "report.html").read_text()


def test_an_empty_data_set_has_nothing_to_look_at(store: Store, verifier: Verifier) -> None:
    """Only integrity is checked in an empty data set; all other checks are skipped with a reason."""
    commit(store, [], [])
    checks = checks_of(store, verifier, "r")
    assert checks["damaged_objects"].verdict == "pass"
    others = checks.keys() - {"damaged_objects", "wrong_schema", "broken_parents"}
    said = {(checks[name].verdict, checks[name].says) for name in others}
    assert said == {("skipped", "there is no row to check")}
    with audited(store, verifier, "r") as found:
        assert found.result.verdict == "skipped"


def test_without_scores(store: Store, verifier: Verifier) -> None:
    """Without scores every turn is a case, and checks that need verdicts say how to get them.

    A check can be reduced to a warning, given another threshold, or ignored.
    """
    commit(store, scores=None)
    checks = checks_of(store, verifier, "r")
    assert (checks["unscored_turns"].verdict, checks["unscored_turns"].cases) == ("fail", 8)
    assert checks["zero_variance"].verdict == "skipped"
    assert "python -m flows.score" in checks["zero_variance"].says
    for knob, verdict in (({"severity": "warn"}, "warn"), ({"threshold": 8}, "pass"), ({"severity": "ignore"}, None)):
        check = checks_of(store, verifier, "r", settings=only("unscored_turns", **knob)).get("unscored_turns")
        assert (check.verdict if check else None) == verdict


def test_a_corrupted_shard_is_left_out_and_named(store: Store, verifier: Verifier) -> None:
    """The other shard is still audited, and the older audit does not hide the damage."""
    commit(store)
    with audited(store, verifier, "r") as found:
        before = keep(store, found)
    shard = flip_byte(store, SET, "part-00001.parquet")
    with audited(store, verifier, "r") as found:
        after = keep(store, found)
        checks = {check.name: check for check in found.result.checks}
    assert before.version != after.version
    assert checks["damaged_objects"].verdict == "fail"
    assert [case.id for case in checks["damaged_objects"].examples] == [shard]
    assert checks["duplicate_ids"].of == 2
    assert checks["orphan_scores"].cases == 0, "scores of lost rows are no separate fault"


def test_collected_scores_are_not_missing(store: Store, verifier: Verifier) -> None:
    """Scores that gc deleted, or that a running run will make, are not missing; those of an idle run are.

    Data that gc deleted are no damage.
    """
    commit(store)
    commit(store, iteration=1, scores=None)
    store.write(layout.tombstone(layout.scores("r", 0, "5c0e")), b"{}")
    assert checks_of(store, verifier, "r")["unscored_turns"].cases == 8, "the 8 turns of iteration 1 have no scores"
    with Lease(store, "r", 60, "stop", "a flow run"):
        assert checks_of(store, verifier, "r")["unscored_turns"].cases == 0
    store.write(layout.tombstone(SET), b"{}")
    check = checks_of(store, verifier, "r")["damaged_objects"]
    assert check.verdict == "pass"
    assert "1 data sets were collected by gc" in check.says


@pytest.mark.slow
def test_only_neighbours_are_compared(store: Store, verifier: Verifier) -> None:
    """Only adjacent iterations are compared, as a gap may hold learning."""
    for iteration, success in ((0, 0.0), (1, 1.0), (3, 0.0)):
        rows = [make_trajectory(f"{iteration}/{n}", [[7, 8]], problem=f"p{n // 2}") for n in range(80)]
        scores = [score for row in rows for score in make_scores(row.trajectory_id, success)]
        commit(store, rows, scores, iteration)
    for targets, steps in ((["r"], 1), ([layout.trajectories("r", 0), layout.trajectories("r", 3)], 0)):
        check = checks_of(store, verifier, *targets, settings=only("success_drift"))["success_drift"]
        assert (check.of, check.verdict) == (steps, "warn" if steps else "pass")
        assert [case.id for case in check.examples] == [layout.trajectories("r", 1)][:steps]


def test_a_policy_among_the_parents_is_no_stranger(store: Store, verifier: Verifier) -> None:
    """A data set has several policies if new weights arrived during the rollout; only other policies are cases."""
    policies = [layout.checkpoint("r", 0), layout.checkpoint("r", 1)]
    for policy in policies:
        with Draft(store, policy, "checkpoint") as draft:
            draft.commit(Provenance(config={}), [])
    names = [*policies, layout.checkpoint("other", 0), policies[0]]
    rows = [replace(row, policy=policy) for row, policy in zip(ROWS, names, strict=True)]
    commit_rows(store, SET, "trajectories", rows, policies[::-1])
    assert [case.id for case in checks_of(store, verifier, "r")["broken_parents"].examples] == ["t2"]


def test_data_sets_are_selected_by_name_and_time(store: Store) -> None:
    """A run, a version or its URI select data sets, no name all; `--since` compares their commit times."""
    commit(store)
    for targets in (["r"], ["runs/r"], [SET], [store.uri(SET)], []):
        assert [data_set.version for data_set in select(store, targets)] == [SET]
    now = datetime.now(UTC)
    assert select(store, ["r"], now - timedelta(hours=1))
    assert not select(store, ["r"], now + timedelta(hours=1))
    assert parse_since("2w", now) == now - timedelta(days=14)
    assert parse_since("2026-11-01") == datetime(2026, 11, 1, tzinfo=UTC)
    with pytest.raises(ValueError, match="7d"):
        parse_since("last week")


def test_a_path_is_no_pattern(tmp_path: Path) -> None:
    """DuckDB would read the files of a folder that a name with brackets matches."""
    for name in ("a", "[a]"):
        (tmp_path / name).mkdir()
        pq.write_table(to_table([Problem(name, "?", [])], PROBLEM_SCHEMA), tmp_path / name / "rows.parquet")
    with open_trajectory_db(1) as database:
        database.add_view("problems", PROBLEM_SCHEMA, [(0, tmp_path / "[a]/rows.parquet")])
        assert database.all("select problem_id from problems") == [("[a]",)]


def test_only_committed_scores_count(store: Store, verifier: Verifier) -> None:
    """Failed attempts are ignored; of two verifiers' scores the newer ones count."""
    commit(store)
    newer = layout.scores("r", 0, "6d1f")
    commit_rows(store, newer, "scores", make_scores("t0", 1.0, 1.0), [SET])
    with Draft(store, layout.scores("r", 0, "7e"), "scores"):
        pass
    assert select(store, ["r"])[0].scores == [layout.scores("r", 0, "5c0e"), newer]
    assert checks_of(store, verifier, "r")["unscored_turns"].cases == 6


SAME = ("verdict_failures", "unparsable", "verdicts_disagree", "broken_answers", "zero_variance", "success_drift")
"""Checks of verdicts."""


def test_calls_of_tools_change_no_number(store: Store, verifier: Verifier, tmp_path: Path) -> None:
    """Nothing counts a turn that answers nothing as wrong, as unparsable or as a first turn."""
    other = Store(str(tmp_path / "other"))
    commit(store)
    rows = [replace(make_trajectory(row.trajectory_id, [[6], [7, 8], [6], [9]]), ungraded=[0, 2]) for row in ROWS]
    scores = [replace(score, turn=2 * score.turn + 1) for score in VERDICTS]
    calls = [replace(score, turn=score.turn - 1, verdict="none", success=0.0, reward=0.0) for score in scores]
    commit(other, rows, [*calls, *scores])
    names, seen = ("success", "any_turn", "fixed", "broken", "unparsable", "zero_variance", "rewards"), list[Any]()
    with audited(store, verifier, "r") as plain, audited(other, verifier, "r") as called:
        for found in (plain, called):
            measured = {check.name: check.value for check in found.result.checks if check.name in SAME}
            numbers = [getattr(found.result.sets[0], name) for name in names]
            seen.append((measured, numbers, found.database.all("select first, best from episodes")))
    assert seen[0] == seen[1]


def test_rewards_and_their_parts_are_reported(store: Store, verifier: Verifier) -> None:
    """Means of the reward and its parts, a histogram and a plot; a part of the environment's if the scorer has none."""
    rows = [replace(row, reward_parts=[{"heard": 0.5}, {"heard": 1.5}]) for row in ROWS]
    scores = [replace(score, reward=score.success + 0.25, parts={"format": 0.25}) for score in VERDICTS[:6]]
    commit(store, rows, scores + VERDICTS[6:])
    with audited(store, verifier, "r") as found:
        (numbers,) = found.result.sets
        assert numbers.rewards == {"return": 1.375, "reward": 0.6875, "part heard": 1.0, "part format": 0.25}
        assert "Reward of a turn" in {histogram.title for histogram in found.result.histograms}
        assert from_dict(asdict(found.result)).sets == [numbers]
        assert "Reward of a turn" in {plot.title for plot in plots([numbers], found.result.histograms)}
        assert "part format" in render(found.result, {}, "reader")


def test_games_without_gold_are_no_leak_and_no_contamination(store: Store, verifier: Verifier) -> None:
    """They have one prompt and differ by metadata; the evaluation's only game that is also trained on is named."""
    games = [Problem(f"g{n}", "Find the exit.", [], metadata=f'{{"seed": {n}}}') for n in range(8)]
    rows = [replace(row, **asdict(game)) for row, game in zip(ROWS, games, strict=False)]
    rows = [replace(row, turns=[replace(row.turns[0], feedback="Out: the answer is 3."), row.turns[1]]) for row in rows]
    commit(store, rows)
    scores = layout.scores("r", 0, "5c0e")
    rewrite(store, scores, lambda values: values["config"].update({"score": {"type": "environment"}}))
    held_out, policy = layout.problems("a1"), PolicyVersion(layout.checkpoint("r", 0))
    commit_rows(store, held_out, "problems", games[3:], [])
    played = layout.evaluation(policy, "held-out", "greedy-0123456789ab")
    commit_rows(store, played, "evaluation", [], [held_out])
    found = checks_of(store, verifier, "r")
    assert (found["contamination"].cases, found["contamination"].of) == (1, 4)
    assert "is g3 of problems/a1" in found["contamination"].examples[0].detail
    assert [found[name].cases for name in ("leaked_answers", "unmatched_gold", "verdicts_disagree")] == [0, 0, 0]


def test_other_scorers_answers_are_no_mathematics(store: Store, verifier: Verifier) -> None:
    """Code has no gold answer that math-verify could match, and the second checker is no judge of it.

    The scorer is that of the scores, since data may be scored again.
    """
    rows = [replace(row, source="code", solutions=["print(1)"][: number % 2]) for number, row in enumerate(ROWS)]
    commit(store, rows)
    code: dict[str, Any] = {"score": {"type": {"default": "math-verify", "code": "code"}}}
    for knobs, expected in (({}, (1, 2)), (code, (0, 0))):  # the empty one matches nothing
        rewrite(store, layout.scores("r", 0, "5c0e"), lambda values, knobs=knobs: values["config"].update(knobs))  # type: ignore[misc]
        check = checks_of(store, verifier, "r", settings=only("unmatched_gold"))["unmatched_gold"]
        assert (check.cases, check.of) == expected
