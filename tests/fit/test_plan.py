"""Training from stored data: which rows each update trains on, and what is refused."""

import json
import shutil
import socket
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import ConfigError, load
from flows.run.workspace import Workspace
from flows.stages.fit import _check_tokens, _refuse_another_plan, _versions, with_versions
from flows.stages.warm_start import _check_teacher
from storage import layout
from storage.logs import catalog
from storage.maintenance import gc
from storage.maintenance.verify import verify
from storage.records import Score, Trajectory
from storage.versions import checkpoints
from storage.versions.drafts import Draft, Provenance
from storage.versions.lineage import scores_of
from storage.versions.manifests import Manifest
from tasks.audit.__main__ import main as audit_main
from tasks.audit.database import open_database
from tasks.fit.plan import _batches, _choose, plan_updates, select_data
from tasks.provenance.questions import training_data
from tasks.score.scoring import scorer_fingerprint
from tasks.tables.sets import Intake, TargetError
from tasks.train.advantages import Observed, against_group
from tasks.train.algorithms import check_algorithm
from tasks.train.algorithms.algorithm import Algorithm, Assignment
from tasks.train.components import LossInputs, LossOutputs
from tasks.train.orders import Part, UpdateOrder, read_order
from tasks.train.policy import load_policy, make_canary
from tasks.train.replay import replay
from tasks.train.samples import Sample
from tasks.train.train_state import load_train_state
from tasks.train.trainer import Trainer
from tasks.train.version_trainer import VersionTrainer
from tests.support.programs import call_program
from tests.support.training_run import TrainingRun

RFT, FRESH = ["algorithm.type=rft", "fit.data=[smoke]"], ["rollout.max_head_offpolicyness=99"]


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=30)


@given(SIZES, st.integers(1, 20), st.integers(1, 3), st.integers(0, 2**64 - 1))
def test_every_epoch_has_each_row_once_and_groups_whole(
    sizes: Sequence[int], most: int, epochs: int, seed: int
) -> None:
    """Groups of any sizes, spread over files: each update but the last of an epoch is about as large as asked."""
    groups = np.repeat(np.arange(len(sizes)), sizes)
    rows = (groups % 7) << 32 | np.arange(len(groups))
    config = load("smoke", [f"fit.epochs={epochs}", f"fit.episodes_per_update={most}", f"run.seed={seed}"])
    batches = _batches(rows, groups, 7, config)
    assert sorted(np.concatenate(batches)) == sorted([*range(len(rows))] * epochs)
    for batch in batches:
        of_batch = groups[batch]
        assert all((of_batch == group).sum() == sizes[group] for group in set(of_batch.tolist()))
        assert len(batch) < most + max(sizes)
    again = _batches(rows, groups, 7, config)
    assert all(np.array_equal(one, other) for one, other in zip(batches, again, strict=True))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, policy_folder: Path) -> TrainingRun:
    """Return a run with two data sets of 16 trajectories, in groups of four."""
    return TrainingRun(tmp_path_factory.mktemp("run"), 2, policy_folder, FRESH)


def planned(run: TrainingRun, *overrides: str) -> list[tuple[Part, ...]]:
    config = run.config(*RFT, *overrides)
    return plan_updates(run.store, config, select_data(run.store, config), run.folder / "cache")


def test_rows_are_chosen_by_sql(run: TrainingRun) -> None:
    """Without a condition all 32 rows are trained on, in two updates; only those that end well with one."""
    updates = planned(run, "fit.episodes_per_update=16")
    assert [sum(len(rows) for part in parts for rows in (part.rows or {}).values()) for parts in updates] == [16, 16]
    (parts,) = planned(run, "fit.where=best = 1 and data_set = 1")
    assert [part.trajectories for part in parts] == [layout.trajectories("smoke", 1)]
    assert 0 < len((parts[0].rows or {})["part-00000.parquet"]) < 16


def commit_update(run: TrainingRun, number: int, parts: Sequence[Part]) -> Manifest:
    """Train on chosen rows and commit the checkpoint."""
    config = run.config(*RFT, "fit.where=best = 1", "run.iterations=2")
    return run.train(VersionTrainer(config), number - 1, parts=parts, config=config)


def test_an_update_on_chosen_rows_can_be_proven(run: TrainingRun) -> None:
    """The checkpoint says which rows they were, is made again from them, and provenance counts these alone.

    So it is after gc has deleted the checkpoint's data.
    """
    (parts,) = planned(run, "fit.where=best = 1")
    made = commit_update(run, 1, parts)
    assert layout.SELECTION in {file.name for file in made.files}
    assert "staleness/mean" not in made.metrics
    assert read_order(run.store, run.policy(1), run.folder / "cache").parts == list(parts)
    (found,) = replay(run.store, "smoke@0..1", f"{run.folder}/cache", print)
    assert found.verdict == "the same bits"
    commit_update(run, 2, parts)
    (collected,) = gc.collect(run.store, gc.Rules(keep_last=1))
    assert [manifest.version for manifest in collected.versions] == [run.policy(1)]
    verdicts = [each.verdict for each in replay(run.store, "smoke@0..2", f"{run.folder}/cache", print)]
    assert verdicts == ["made again; gc has deleted what to compare with"] * 2
    counts = training_data(run.store, run.policy(2), run.folder / "cache")
    chosen = sum(len(rows) for part in parts for rows in (part.rows or {}).values())
    assert (counts.trained, counts.trajectories) == (2 * chosen, 2 * 32)
    report = verify(run.store, [run.policy(2)], deep=True)
    assert (report.findings, report.collected) == ([], 1)


OTHER_TOKENIZER = r"its tokenizer is another one: token \d+ is 'seven' to the policy and '7'"


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("tokenizer.json", '"7"', '"seven"', OTHER_TOKENIZER),
        ("chat_template.jinja", "assistant", "helper", "its chat template is another one"),
    ],
)
def test_tokens_that_mean_something_else_are_refused(
    run: TrainingRun, tmp_path: Path, policy_folder: Path, file: str, old: str, new: str, message: str
) -> None:
    """A data set is no food for a policy with another tokenizer or template; a teacher may have another template."""
    shutil.copytree(policy_folder, tmp_path / "other")
    path = tmp_path / "other" / file
    path.write_text(path.read_text().replace(old, new))
    version = layout.checkpoint(f"other-{path.stem}", 0)
    canary = make_canary(load_policy(tmp_path / "other", run.config().train))
    checkpoints.commit(run.store, version, tmp_path / "other", None, canary, Provenance(config={}), [], {})
    workspace, data_sets = Workspace(run.config(*RFT)), select_data(run.store, run.config(*RFT))
    with pytest.raises(ValueError, match=rf"the data sets of smoke cannot be trained on by this policy: {message}"):
        _check_tokens(workspace, version, data_sets)
    teacher = Workspace(run.config("algorithm.type=opd", "models.teacher.checkpoint=smoke@0"))
    refused = pytest.raises(ValueError, match=rf"checkpoint=smoke@0 cannot teach this policy: {message}")
    with refused if file == "tokenizer.json" else nullcontext():
        _check_teacher(teacher, tmp_path / "other")
    with pytest.raises(ValueError, match=r"teacher\.checkpoint=smoke@7: there is no .*smoke/checkpoints/000007"):
        _check_teacher(Workspace(run.config("algorithm.type=opd", "models.teacher.checkpoint=smoke@7")), policy_folder)


class Clipped(Algorithm):
    """An algorithm of a user's with the loss of the base class, which reads the logprobs of sampling."""

    def assign(self, samples: Sequence[Sample], observed: Sequence[Observed]) -> Assignment:
        return self.share(against_group(samples, observed))


class Aged(Clipped):
    uses = ("versions",)


class Unclear(Clipped):
    uses = ("logprob",)


class Plain(Clipped):
    """One that reads none of what data may lack."""

    uses = ()

    def loss(self, inputs: LossInputs) -> LossOutputs:
        return LossOutputs(-inputs.advantages * inputs.logp)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["fit.where=bset > 0.5"], r'fit\.where=.bset > 0\.5.: .*"?bset"?'),
        (["fit.where=best > 7"], "chooses none of the trajectories"),
        (["fit.data=[smoek]"], r"'smoek' is neither a run nor a version of trajectories; .* smoke"),
        (["fit.data=[]"], "name runs or versions of trajectories with --data"),
        (["score.type=code"], r"another scorer than this .*: score\.type=math-verify, not code"),
        (["algorithm.type=ppo", "sampling.temperature=0.5"], "was sampled at the temperature 1"),
        ([f"algorithm.type={__name__}:Clipped", "sampling.temperature=0.5"], "was sampled at the temperature 1"),
        ([f"algorithm.type={__name__}:Unclear"], r"Unclear declares that it uses logprob: give a tuple with words of"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(run: TrainingRun, overrides: list[str], message: str) -> None:
    with pytest.raises((ValueError, TargetError), match=message):
        planned(run, *overrides)


def test_algorithms_for_fresh_episodes_are_refused(run: TrainingRun) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.type=gspo trains on what the policy itself has just played"):
        with_versions(run.config("algorithm.type=gspo"), ["smoke"])


def test_a_wrong_condition_is_refused_before_anything_is_committed(run: TrainingRun) -> None:
    """The run's name is still free for the command with the mistake mended."""
    with pytest.raises(ValueError, match=r"fit\.where="):
        with_versions(run.config("algorithm.type=rft", "fit.where=true limit 3", "run.name=new"), ["smoke"])


CONDITIONS = {
    "true); copy episodes to '{folder}/out.csv'; select (1": "syntax error",
    "true; copy episodes to '{folder}/out.csv'": "more than one statement",
    "true union select true": "not an expression",
    "row in (from read_csv('{folder}/in.csv') select a)": "has a query in it",
    "len(list_transform([1], lambda x: (from read_csv('{server}') select 1))) = 1": "has a query in it",
}


def test_a_condition_reaches_neither_files_nor_the_network(tmp_path: Path) -> None:
    """A condition in another person's configuration can do nothing else that DuckDB could do.

    The database is closed to the outside, too: to what the parser might let through one day.
    """
    (tmp_path / "in.csv").write_text("a\n1\n")
    with socket.create_server(("127.0.0.1", 0)) as server, open_database([], Intake(), load("smoke").audit) as database:
        server.settimeout(0.05)
        for where, message in CONDITIONS.items():
            condition = where.format(folder=tmp_path, server=f"http://127.0.0.1:{server.getsockname()[1]}/in.csv")
            with pytest.raises(ValueError, match=message):
                _choose(database, condition)
        _choose(database, 'best > 0.5 or problem_id = \'"class":"SUBQUERY"\' -- a text is no query')
        for query in (f"copy episodes to '{tmp_path}/out.csv'", f"from glob('{tmp_path}/*')", "install httpfs"):
            with pytest.raises(duckdb.PermissionException):
                database.connection.execute(query)
        with pytest.raises(duckdb.InvalidInputException, match="locked"):
            database.connection.execute("set enable_external_access = true")
        with pytest.raises(TimeoutError):
            server.accept()
    assert [path.name for path in tmp_path.iterdir()] == ["in.csv"]


def test_a_run_that_began_keeps_its_versions(run: TrainingRun) -> None:
    """A run's name stands for the data sets that it had; other data than it began with are not left out in silence."""
    first, second = (layout.trajectories("smoke", number) for number in range(2))
    new = with_versions(run.config("algorithm.type=rft", "run.name=other"), ["smoke"])
    assert new.fit.data == [first, second]
    assert _versions(run.store, ["smoke"], [first]) == [first]
    assert _versions(run.store, ["smoke", first], [first]) == [first]
    assert _versions(run.store, ["smoke", second], [first]) == [first, second]
    assert _versions(run.store, [second], [first]) == [second]


def score_again(run: TrainingRun, scorer: str, *overrides: str) -> str:
    """Commit other scores of the first data set, and return their version."""
    data_set, version = layout.trajectories("smoke", 0), layout.scores("smoke", 0, scorer)
    with Draft(run.store, version, "scores") as draft:
        draft.commit(Provenance(config=run.config(*overrides).model_dump(mode="json")), [data_set])
    return version


def test_only_scores_of_the_configurations_scorer_count(tmp_path: Path, policy_folder: Path) -> None:
    """Whichever the data set's own run was trained on, and whichever are newest."""
    run = TrainingRun(tmp_path, 2, policy_folder, FRESH)
    run.train(VersionTrainer(run.config()), 0)
    first = layout.trajectories("smoke", 0)
    (own,) = scores_of(catalog.read_all(run.store))[first]
    args = "score.args={environment: {success_above: 0.7}}"
    other = score_again(run, "0001", "score.type=environment", args)

    def chosen(*overrides: str) -> str:
        (data_set,) = select_data(run.store, run.config(*RFT, *overrides, f"fit.data=[{first}]"))
        return data_set.scores[-1]

    assert chosen() == own
    assert chosen("score.type=environment", args) == other
    with pytest.raises(ValueError, match=r"score\.args=\{'environment': \{'success_above': 0\.7\}\}, not \{\}"):
        chosen("score.type=environment")
    assert chosen("score.type=environment", f"fit.scores=[{other}]") == other
    score_again(run, "0002", "score.timeout_s=9", "score.type={default: math-verify}")
    assert chosen() == own  # the same scorer, but no checkpoint was trained on what it said then
    begun = with_versions(run.config(*RFT, "run.name=begun"), [first])
    with Draft(run.store, layout.run("begun"), "run") as draft:
        draft.commit(Provenance(config=begun.model_dump(mode="json")), [])
    present = score_again(run, scorer_fingerprint(run.config().score))
    assert chosen() == present
    assert with_versions(run.config(*RFT, "run.name=begun"), [first]).fit.scores == begun.fit.scores == [own]


def test_a_run_that_continues_keeps_its_plan(tmp_path: Path, policy_folder: Path) -> None:
    """Rows that would be trained on twice, or never, are refused."""
    run = TrainingRun(tmp_path, 2, policy_folder, FRESH)
    workspace = Workspace(run.config())
    updates = planned(run, "fit.episodes_per_update=16")
    _refuse_another_plan(workspace, updates)
    commit_update(run, 1, updates[0])
    _refuse_another_plan(workspace, updates)
    for other in (updates[::-1], []):
        with pytest.raises(ValueError, match=r"checkpoints/000001 was made of other rows than the plan has for it now"):
            _refuse_another_plan(workspace, other)


def own_data(
    run: TrainingRun, folder: Path, policy: Path, rows: Sequence[dict[str, Any]], *overrides: str
) -> tuple[Trainer, tuple[list[Trajectory], list[Score]]]:
    """Import a user's messages as a data set called by their number; return a trainer, and what an update trains on."""
    name = f"own-{len(rows)}"
    (folder / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = ["import", str(folder / "own.jsonl"), "--format=messages", f"--name={name}", f"--tokenizer={policy}"]
    call_program(audit_main, "--root", run.root, *given)
    config = run.config(*overrides, f"fit.data=[{name}]", "score.type=environment")
    (parts,) = plan_updates(run.store, config, select_data(run.store, config), run.folder / "cache")
    made, scores, _ = VersionTrainer(config)._data(UpdateOrder(run.policy(1), run.policy(0), parts), [], print)
    return Trainer(load_train_state(config, policy)), (made, scores)


def message(asked: str, reward: float) -> dict[str, Any]:
    said = [{"role": "user", "content": asked}, {"role": "assistant", "content": "3"}]
    return {"messages": said, "reward": reward}


ALL = "algorithm.type=rft", "algorithm.distinct=false"


def test_supervised_data_of_ones_own(run: TrainingRun, tmp_path: Path, policy_folder: Path) -> None:
    """Messages are imported with the policy's tokenizer, and their answers are learnt."""
    rows = [message("1 + 2", 1) | {"id": str(n)} for n in range(4)]
    trainer, data = own_data(run, tmp_path, policy_folder, rows, *ALL)
    losses = [trainer.update(*data, number, chosen=True)["policy/loss"] for number in range(3)]
    assert losses[0] > losses[1] > losses[2]
    given = "fit.data=[own-4]", "score.type=environment"
    own = f"{__name__}:Clipped", f"{__name__}:Aged"
    for of_type, lacking in (("ppo", "logprobs"), (own[0], "logprobs"), (own[1], "policy v")):
        with pytest.raises(ValueError, match=rf"lacks {lacking}.*, which algorithm\.type={of_type} needs"):
            select_data(run.store, run.config(f"algorithm.type={of_type}", *given))
    plain = run.config(f"algorithm.type={__name__}:Plain", *given, "sampling.temperature=0.5")
    assert len(select_data(run.store, plain)) == 1
    check_algorithm(plain.algorithm)


def test_thumbs_without_a_pair(run: TrainingRun, tmp_path: Path, policy_folder: Path) -> None:
    """One answer to each question, of which some are good: `kto` makes these likelier, and the others less likely."""
    rows = [message(f"{n} + 2", thumb) for n, thumb in enumerate((1, 0, -1, 1, 0))]
    kto = "algorithm.type=kto", "train.minibatches=1"
    trainer, data = own_data(run, tmp_path, policy_folder, rows, *kto)
    found = [trainer.update(*data, number, chosen=True) for number in range(4)]
    assert [each["kto/good"] for each in found] == [0.4] * 4
    assert found[0]["policy/loss"] == 0.5 > found[1]["policy/loss"] > found[3]["policy/loss"]
