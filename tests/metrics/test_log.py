import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from shutil import rmtree
from unittest.mock import patch

import duckdb
import pytest

from storage import layout
from storage.errors import DamagedError
from storage.objects.store import Store
from storage.version_names import EvaluationVersion
from storage.versions import manifests
from tasks.evaluate.summary import stage_rows
from tasks.metrics.log import PER_FILE, catch_up, read_iteration, read_rows, record
from tasks.metrics.rows import Row, by_iteration, row_of, spent
from tasks.metrics.show import curve, names_of, plot, shown, table_of
from tasks.tracking.points import points
from tasks.watch.page import State
from tests.support.metrics_run import CONFIG, EVALUATED, SCORES, UPDATE, commit, commit_iteration, commit_run


def log_of(store: Store, versions: Sequence[str]) -> None:
    for version in versions:
        record(store, version)


def test_a_row_has_the_names_of_the_field(tmp_path: Path) -> None:
    """Each stage's row has hand-computed numbers; a part of a reward never hides another number."""
    store = Store(f"{tmp_path}")
    versions = commit_run(store)
    evaluation, rollout, score, train = filter(None, (row_of(manifests.read(store, version)) for version in versions))
    assert (rollout["iteration"], rollout["stage"], rollout["version"]) == (0, "rollout", "runs/r/trajectories/000000")
    assert (rollout["length/mean"], rollout["calls/mean"], rollout["episodes/failed"]) == (20, 2.0, 1)
    assert (rollout["success/turn_1"], rollout["success/turn_2"], rollout["success/any_turn"]) == (0.25, 0.5, 0.5)
    assert (score["reward/mean"], score["reward/format"], score["parts/reward/mean"]) == (0.4, 1.0, 0.2)
    assert (train["iteration"], train["policy/kl"], train["grad_norm"], train["time/train"]) == (0, 0.01, 1.5, 3.0)
    assert [evaluation[f"eval/held-out/first_turn{end}"] for end in ("", "_low", "_high")] == [0.5, 0.4, 0.6]
    assert "eval/held-out/fix_rate" not in evaluation
    older = {"policy/kl_proximal": 0.01, "optimizer/grad_norm": 1.5, "success/turn_1": 0.5}
    older |= {"seconds/prepare": 1.0, "seconds/update": 2.0}
    manifest = manifests.read(store, layout.checkpoint("r", 1)).model_copy(update={"metrics": older})
    train.pop("time/iteration")
    assert (row_of(manifest) or {}).items() >= (train | {"trained/turn_1": 0.5}).items()
    assert by_iteration([train, rollout, score])[0].keys() > {"policy/kl", "tokens/generated", "reward/mean"}


def test_duckdb_and_pandas_read_the_log_in_one_line(tmp_path: Path) -> None:
    """The line that the page shows works, over more than one file, and in the order of the iterations."""
    store = Store(f"{tmp_path}")
    log_of(store, commit_run(store, PER_FILE + 1))
    names = sorted(path.name for path in (tmp_path / "runs/r/metrics").iterdir())
    assert names == ["000000.jsonl", "000100.jsonl", "evaluation-000000-held-out-greedy-1f0c-scores-5c0e.jsonl"]
    found = duckdb.sql(f"from read_json('{tmp_path}/runs/r/metrics/*.jsonl', union_by_name=true)")
    assert found
    frame = found.df()
    assert frame["reward/mean"].count() == frame["policy/kl"].count() == PER_FILE + 1
    assert list(curve(read_rows(store, "r"), "policy/kl")) == list(range(PER_FILE + 1))


@pytest.mark.parametrize("recorded", range(5))
def test_what_a_killed_flow_did_not_log_is_caught_up(tmp_path: Path, recorded: int) -> None:
    """Wherever a flow run ended, the next one writes the rest once; without any log all of it (an older program)."""
    store = Store(f"{tmp_path}")
    versions = commit_run(store)
    made = read_rows(store, "r")  # of a run without a log, from its manifests; this writes nothing
    assert not (tmp_path / "runs/r/metrics").exists()
    log_of(store, versions[:recorded])
    with patch.object(store, "write", wraps=store.write) as written:
        catch_up(store, "r")
    assert written.call_count == (recorded < 4) + (recorded < 1)  # each file once
    rows = read_rows(store, "r")
    assert [row["version"] for row in rows] == versions
    assert rows == made
    catch_up(store, "r")
    record(store, versions[-1])
    assert read_rows(store, "r") == rows


def test_a_damaged_log_is_named(tmp_path: Path) -> None:
    """A reader is told which file it is, and that it can be deleted; the next flow run makes it again."""
    store = Store(f"{tmp_path}")
    log_of(store, commit_run(store))
    written, (file,) = read_rows(store, "r"), tmp_path.glob("runs/r/metrics/0*.jsonl")
    row = {name: written[-1][name] for name in ("run", "iteration", "stage", "version", "at")}
    changes: list[Row] = [{"version": "r/7"}, {"stage": "x"}, {"grad_norm": "0.5"}, {"lr": None}]
    changes += [{"at": 7}, {"at": "noon"}, {"at": "2027-01-01"}]
    lines = [b"{}\n", b'{"iteration": 1', b"[]", b"7", b"\xff", b"[" * 100_000]
    for line in (*lines, *(json.dumps(row | change).encode() for change in changes)):
        file.write_bytes(line)
        for reader in (partial(read_rows, store, "r"), partial(State, store, "r"), partial(catch_up, store, "r")):
            with pytest.raises(DamagedError, match=r"000000.jsonl is damaged(.|\n)*delete"):
                reader()
    rmtree(file.parent)
    catch_up(store, "r")
    assert read_rows(store, "r") == written


def test_runs_are_printed_and_overlaid(tmp_path: Path) -> None:
    """The table has a row for each metric and run; the plot shows each, in a file or as SVG."""
    store = Store(f"{tmp_path}")
    log_of(store, commit_run(store, 30))
    runs = {"r": read_rows(store, "r"), "other": read_rows(store, "r")[:4]}
    names = shown(runs)
    assert names[0] == "eval/held-out/first_turn"
    assert {"reward/mean", "reward/format", "policy/kl"} <= set(names) <= set(names_of(runs))
    table = table_of(runs, names, 5)
    assert [column.header.__str__() for column in table.columns] == ["metric", "run", "0", "7", "14", "22", "29"]
    assert table.row_count == 2 * len(names)
    plot(runs, names, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    json.dumps(runs, allow_nan=False)


def test_evaluations_of_one_policy_are_one_point_of_each_curve(tmp_path: Path) -> None:
    """A policy may be evaluated on several sets, also by a flow that holds no lease while another writes the run."""
    store = Store(f"{tmp_path}")
    log_of(store, commit_run(store))
    other = EvaluationVersion("runs/r/evaluations/000000/math/greedy-1f0c")
    commit(store, other, "evaluation", {"episodes": 4})
    scores = commit(store, layout.evaluation_scores(other, "5c0e"), "scores", EVALUATED | {"set": "math"})
    log_of(store, [scores, *commit_iteration(store, 1)])
    rows = read_rows(store, "r")
    assert curve(rows, "eval/held-out/first_turn") == curve(rows, "eval/math/first_turn") == {0: 0.5}
    assert list(curve(rows, "policy/kl")) == [0, 1]


def test_scores_of_another_verifier_after_the_update_change_no_curve(tmp_path: Path) -> None:
    """Those that the update was trained on count, also where the rows are made from manifests."""
    store = Store(f"{tmp_path}")
    commit_run(store)
    commit(store, layout.scores("r", 0, "6d1f"), "scores", {"reward": 0.9, "turns": 6})
    assert curve(read_rows(store, "r"), "reward/mean") == {0: 0.4}


def test_an_iteration_that_nothing_is_logged_of_has_no_numbers(tmp_path: Path) -> None:
    """An update may still be stored, and that of iteration 100 begins a file of the log."""
    store = Store(f"{tmp_path}")
    record(store, commit_iteration(store, 0)[0])
    assert read_iteration(store, "r", 0)["tokens/generated"] == 80
    assert read_iteration(store, "r", 1) == read_iteration(store, "r", PER_FILE) == {}


@pytest.mark.parametrize("logged", [True, False])
def test_the_rest_of_an_iteration_is_a_number_where_it_is_known(tmp_path: Path, logged: bool) -> None:
    """It is what no stage worked of 6 s; unknown, and so not 0, of older programs' updates, where stages overlap, and
    where an iteration took less than its stages, since another flow run had played it.
    """
    store, stream = Store(f"{tmp_path}"), CONFIG | {"run": CONFIG["run"] | {"overlap": True}}
    older, continued = ({**UPDATE, "time/iteration": seconds} for seconds in (None, 3.5))
    versions = [*commit_run(store), *commit_iteration(store, 1, UPDATE, stream), *commit_iteration(store, 2, older)]
    versions += commit_iteration(store, 3, continued)
    versions.append(commit(store, layout.scores("r", 0, "6d1f"), "scores", SCORES | {"seconds": 0.5}))
    log_of(store, versions if logged else [])
    rows = read_rows(store, "r")
    assert curve(rows, "time/rest") == pytest.approx({0: 0.9})
    numbers = [point.numbers for point in points(store, rows, 1, last=True)]
    assert ["time/rest" in of_one for of_one in numbers] == [True, False, False, False]
    lines = {line["stage"]: line for line in stage_rows({"stages": spent(by_iteration(rows).values())})}
    assert (list(lines), lines["rest"]["seconds an iteration"]) == (["rollout", "score", "train", "rest"], "0.90")
