"""Verification finds every kind of damage, and none in a healthy store. Lineage lists ancestors and descendants."""

import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from safetensors.numpy import save_file

from storage import layout
from storage.errors import UnavailableError
from storage.logs import catalog
from storage.logs.catalog import CatalogEntry
from storage.maintenance import gc as garbage
from storage.maintenance.gc import Rules
from storage.maintenance.verify import Report, verify
from storage.objects.store import Store
from storage.versions import checkpoints, manifests
from storage.versions.drafts import Draft
from storage.versions.lineage import climb_down, descendants, scores_of
from storage.versions.manifests import MANIFEST_VERSION
from tasks.train.policy import make_canary
from tests.support import chain_helpers as chains
from tests.support.chain_helpers import (
    CHAIN,
    FIRST,
    PROBLEMS,
    RUN,
    SCORES,
    SECOND,
    SHARD,
    TRAJECTORIES,
    WEIGHTS,
    commit_chain,
    key,
    replace_file,
    rewrite,
    rewrite_shard,
    rewrite_tensors,
)
from tests.support.train_helpers import tiny_model

PICKLE = "model/pytorch_model.bin"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, checkpoints.Canary]:
    """Return the folder of a real tiny model, the folder of a train state, and the model's canary."""
    model = tiny_model()
    folder, state = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("state")
    model.save_pretrained(folder)
    save_file({"exp_avg/a": np.zeros((3, 4), np.float32)}, state / "optimizer.safetensors")
    return folder, state, make_canary(model)


@pytest.fixture
def any_chain(any_store: Store, policy: tuple[Path, Path, checkpoints.Canary]) -> Store:
    """Return each kind of store with a healthy chain of versions."""
    return commit_chain(any_store, *policy)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, policy: tuple[Path, Path, checkpoints.Canary]) -> Path:
    return Path(commit_chain(Store(str(tmp_path_factory.mktemp("chain"))), *policy).root)


@pytest.fixture
def chain(template: Path, tmp_path: Path) -> Store:
    """Return a local store with a healthy chain of versions."""
    return Store(str(shutil.copytree(template, tmp_path / "root")))


def has(report: Report, key: str, problem: str) -> bool:
    return any(finding.object == key and problem in finding.problem for finding in report.findings)


@pytest.mark.parametrize("deep", [False, True])
def test_a_healthy_chain_has_no_findings(any_chain: Store, deep: bool, tmp_path: Path) -> None:
    """Each version is checked and reported once, and the temporary folder is empty afterwards."""
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
        (tmp_path / "temporary").mkdir()
        report = verify(any_chain, [SECOND, SCORES], deep=deep, progress=lines.append)
    sizes = [any_chain.size(path) for path in chains.objects(any_chain) if not path.endswith("manifest.json")]
    assert report == Report([], versions=len(CHAIN), objects=len(sizes), bytes=sum(sizes))
    assert sorted(line.split()[1] for line in lines) == sorted(CHAIN)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_any_damage_to_any_object_is_found(chain: Store) -> None:
    """Flipped bits, truncated, empty and missing objects are found, and the finding names the object."""
    draw = random.Random(0)
    for path in chains.objects(chain):
        whole = chain.read(path)
        flips = (flipped(whole, bit) for bit in (0, draw.randrange(8 * len(whole)), 8 * len(whole) - 1))
        version = max((version for version in CHAIN if path.startswith(f"{version}/")), key=len)
        for damaged in (*flips, whole[: len(whole) // 2], b""):
            chain.write(path, damaged)
            assert has(verify(chain, [version], ancestors=False), path, ""), path
        chain.delete(path)
        assert has(verify(chain, [SECOND]), path, ""), path  # from the newest version
        chain.write(path, whole)
    assert verify(chain, [SECOND]).findings == []


def test_an_object_that_no_manifest_names_is_found(any_chain: Store) -> None:
    """Libraries load whole folders, so an extra object there is a finding. Killed attempts write to other folders."""
    with Draft(any_chain, SECOND, "checkpoint") as killed:
        killed.add(Path(__file__), "model/test.py")
    stray = f"{SECOND}/{manifests.read(any_chain, SECOND).nonce}/model/chat_template.jinja"
    any_chain.write(stray, b"{{ messages }}")
    findings = verify(any_chain, [SECOND]).findings
    assert [(finding.version, finding.object) for finding in findings] == [(SECOND, stray)]
    assert "its manifest does not name it" in findings[0].problem
    collected = [item.path for plan in garbage.collect(any_chain, Rules(older_than_s=0)) for item in plan.leftovers]
    assert sorted(collected) == sorted([stray, killed.files[0].path])
    assert verify(any_chain, [SECOND]).findings == []


def flipped(data: bytes, bit: int) -> bytes:
    byte = data[bit // 8] ^ (1 << bit % 8)
    return data[: bit // 8] + bytes([byte]) + data[bit // 8 + 1 :]


def replace_trajectories(store: Store) -> None:
    """Commit other trajectories under the same name, after the scores were made from the first ones."""
    store.delete(layout.manifest(TRAJECTORIES))
    chains.commit_rows(store, TRAJECTORIES, "trajectories", chains.ROWS, [FIRST, PROBLEMS])


@dataclass(frozen=True)
class Case:
    """A damage, and what the finding says of an object: the file `name` of a version, or its manifest."""

    damage: Callable[[Store], object]
    version: str
    problem: str
    name: str | None = None

    def key(self, store: Store) -> str:
        manifest = layout.manifest(self.version)
        return f"{self.version}/{manifests.read(store, self.version).nonce}/{self.name}" if self.name else manifest


def misstated(version: str, problem: str, /, **claims: Any) -> Case:
    """Make the manifest state other values for the version."""
    return Case(lambda store: rewrite(store, version, lambda values: values.update(claims)), version, problem)


def misstated_file(version: str, file: str, claims: dict[str, Any], problem: str, name: str | None = None) -> Case:
    """Make the manifest state other values for a file."""

    def damage(store: Store) -> None:
        rewrite(store, version, lambda values: chains.file_of(values, file).update(claims))

    return Case(damage, version, problem, name)


def replaced(version: str, name: str, content: bytes | Callable[[bytes], bytes], problem: str) -> Case:
    def damage(store: Store) -> None:
        old = store.read(key(store, version, name))
        replace_file(store, version, name, content if isinstance(content, bytes) else content(old))

    return Case(damage, version, problem, name)


def rewritten(version: str, change: Callable[[pa.Table], pa.Table], problem: str) -> Case:
    return Case(lambda store: rewrite_shard(store, version, change), version, problem, SHARD)


def in_column(column: str, change: Callable[[list[Any]], list[Any]], problem: str, shard: str = SHARD) -> Case:
    """Change the values in a column of the first shard of the trajectories; `shard` is where that is found."""

    def changed(rows: pa.Table) -> pa.Table:
        index, field = rows.column_names.index(column), rows.schema.field(column)
        return rows.set_column(index, field, pa.array(change(rows[column].to_pylist()), field.type))

    return replace(rewritten(TRAJECTORIES, changed, problem), name=shard)


def in_norm(change: Callable[[Any], object], problem: str, name: str) -> Case:
    """Change a tensor of the weights."""
    return Case(lambda store: rewrite_tensors(store, lambda named: change(named[NORM])), SECOND, problem, name)


NORM = "model.norm.weight"
OF_ANOTHER_ROW = "trajectory_id of a row are those of another row (rows 0)"
DAMAGES: dict[str, Case] = {
    "rows": misstated_file(TRAJECTORIES, SHARD, {"rows": 7}, "has 2 rows, its manifest says 7", SHARD),
    "kind": misstated(TRAJECTORIES, "but these are elsewhere", kind="evaluation"),
    "place": misstated(SCORES, "moved by hand", version="runs/other/scores/000000/5c0e"),
    "an attempt that climbs": misstated(SECOND, "climbs out of the root", nonce="../../.."),
    "a parent swapped": Case(replace_trajectories, TRAJECTORIES, f"is not what {SECOND} was made from"),
    "a parent lost": Case(lambda store: store.delete(layout.manifest(RUN)), RUN, "was never committed"),
    "future manifest": misstated(SCORES, f"has format {MANIFEST_VERSION + 1}", manifest_version=MANIFEST_VERSION + 1),
    "future schema": rewritten(
        SCORES, lambda rows: rows.replace_schema_metadata({"schema_version": "99"}), "schema_version 99"
    ),
    "pickle": misstated_file(SECOND, "state/optimizer.safetensors", {"name": PICKLE}, f"names {PICKLE}, a pickle"),
    "no canary": misstated_file(SECOND, "canary.json", {"name": "canary.txt"}, "names no canary.json"),
    "canary": replaced(SECOND, "canary.json", b"{}", "is not a canary"),
    "safetensors too long": replaced(SECOND, WEIGHTS, lambda old: old + b"0", "not fully covered"),
    "a kernel of somebody's": replaced(
        SECOND,
        "model/config.json",
        b'{"_attn_implementation": "org/kernel"}',
        "says _attn_implementation='org/kernel': remove the key, or give one of eager, sdpa",
    ),
    "no Parquet": replaced(SCORES, SHARD, b"PAR1, or not", "cannot be read as Parquet"),
    "another type": rewritten(
        PROBLEMS,
        lambda rows: rows.set_column(0, "problem_id", pc.binary_length(rows["problem_id"])),
        "columns of other types problem_id int32",
    ),
    "a column less": rewritten(
        TRAJECTORIES, lambda rows: rows.drop_columns(["sequence_starts"]), "lacks the columns sequence_starts"
    ),
}


DEEP: dict[str, Case] = {
    "page": replaced(SCORES, SHARD, lambda old: flipped(old, 8 * 30), "cannot be read"),
    "lengths": in_column("logprobs", lambda rows: [rows[0][:-1], *rows[1:]], "differ in length (rows 0)"),
    "spans": in_column(
        "turns",
        lambda rows: [[turn | {"end": 99} for turn in turns] for turns in rows],
        "turns lie outside of their row's tokens (rows 0, 1)",
    ),
    "ids in two shards": in_column("trajectory_id", lambda _: ["t1", "t2"], OF_ANOTHER_ROW, "part-00001.parquet"),
    "NaN": in_norm(lambda norm: norm.fill(np.nan), f"tensor {NORM} is not finite", WEIGHTS),
    "other weights": in_norm(lambda norm: norm.fill(2), "its logprobs of the canary differ by", "model"),
}


@pytest.mark.parametrize("name", [*DAMAGES, *DEEP])
def test_damage_that_no_hash_shows_is_found(chain: Store, name: str) -> None:
    """Wrong manifests whose digest is right, and unusable objects whose hash is right, are found.

    With `deep` these are also rows that contradict each other, and weights that do not match the canary.
    """
    case = (DAMAGES | DEEP)[name]
    case.damage(chain)
    report = verify(chain, [SECOND])
    if name in DEEP:
        assert not has(report, case.key(chain), "")
        report = verify(chain, [SECOND], deep=True)
    assert has(report, case.key(chain), case.problem), report.findings


def test_the_run_sets_the_tolerance_of_the_canary(chain: Store) -> None:
    """Weights that were in half precision may differ more from their canary, if the run's configuration allows it."""
    case = in_norm(lambda norm: norm.__imul__(1.01), "more than 0.0001", "model")
    case.damage(chain)
    assert has(verify(chain, [SECOND], deep=True), case.key(chain), case.problem)
    rewrite(chain, SECOND, lambda values: values["config"].update(inference={"canary_tolerance": 10.0}))
    assert verify(chain, [SECOND], deep=True).findings == []


def test_the_first_formats_are_healthy(chain: Store) -> None:
    """Manifests of format 1 have neither digest nor fencing token, files of schema 1 no column `sequence_starts`."""
    values = manifests.read(chain, SECOND).model_dump(mode="json", exclude={"fence"})
    chain.write(layout.manifest(SECOND), json.dumps(values | {"manifest_version": 1}).encode())
    assert verify(chain, [SECOND]).findings == []

    def older(rows: pa.Table) -> pa.Table:
        return rows.drop_columns(["sequence_starts"]).replace_schema_metadata({"schema_version": "1"})

    for shard in (SHARD, "part-00001.parquet"):
        rewrite_shard(chain, TRAJECTORIES, older, shard)
    assert verify(chain, [TRAJECTORIES], deep=True).findings == []


def test_without_ancestors_only_the_manifests_of_parents_are_checked(chain: Store) -> None:
    """With `ancestors=False`, missing data of a parent are no finding, but a replaced manifest of a parent is."""
    chain.delete(key(chain, SCORES, SHARD))
    assert verify(chain, [SECOND], ancestors=False).findings == []
    replace_trajectories(chain)
    assert has(verify(chain, [SCORES], ancestors=False), layout.manifest(TRAJECTORIES), "is not what")


def test_what_cannot_be_read(chain: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that cannot be a key, and a name below an object, are findings; a pipe, which never ends, is not read.

    If the store does not answer, `verify` raises the error. It says nothing about versions that it cannot read.
    """
    for name in ("runs/r/checkpoints/000009", "../outside", f"{SECOND}/manifest.json"):
        assert has(verify(chain, [name]), f"{name}/manifest.json", "")
    for path in (key(chain, SECOND, "canary.json"), layout.manifest(SECOND)):
        Path(chain.path(path)).unlink()
        os.mkfifo(chain.path(path))
        assert has(verify(chain, [SECOND]), path, "")

    def fail(key: str) -> bytes:
        raise UnavailableError("no answer")

    monkeypatch.setattr(chain, "read", fail)
    with pytest.raises(UnavailableError):
        verify(chain, [SECOND])


def test_ancestors_are_listed_once_and_nearest_first(chain: Store) -> None:
    """The first checkpoint is a parent of both the second and its trajectories; it is listed once, at depth 1."""
    nodes = climb_down(chain, [SECOND])
    assert [node.version for node in nodes][:4] == [SECOND, FIRST, TRAJECTORIES, SCORES]
    assert {node.version: node.depth for node in nodes} == {
        SECOND: 0, FIRST: 1, TRAJECTORIES: 1, SCORES: 1, RUN: 2, PROBLEMS: 2,
    }  # fmt: skip
    assert {node.problem for node in nodes} == {""}
    assert (nodes[3].kind, nodes[3].rows, nodes[3].parents) == ("scores", 6, [TRAJECTORIES])


def test_a_damaged_version_hides_no_other(chain: Store) -> None:
    """It is reported; its ancestors are listed if other versions name them, too, and it itself by the catalog."""
    chain.write(layout.manifest(SCORES), b"damaged")
    nodes = {node.version: node for node in climb_down(chain, [SECOND])}
    assert set(nodes) == set(CHAIN)
    assert "damaged" in nodes[SCORES].problem
    assert (nodes[SCORES].kind, nodes[TRAJECTORIES].problem) == ("", "")
    assert ["damaged" in node.problem for node in descendants(chain, TRAJECTORIES)] == [True, False]


def test_only_committed_descendants_are_listed(chain: Store) -> None:
    """Descendants are listed nearest first and once each, without killed attempts and aliases."""
    catalog.enter(chain, "runs/r/scores/000000/dead", "scores", [TRAJECTORIES], "died")
    catalog.enter(chain, SCORES, "scores", [TRAJECTORIES], "died")
    catalog.enter(chain, "champion", "alias", [TRAJECTORIES], "")
    assert [(node.version, node.depth) for node in descendants(chain, TRAJECTORIES)] == [(SCORES, 1), (SECOND, 1)]
    assert [node.depth for node in descendants(chain, PROBLEMS)] == [1, 2, 2]
    assert descendants(chain, SECOND) == []


def test_readers_use_the_scores_that_were_trained_on() -> None:
    """Of several scores of a data set those of an update are last, whichever scorer came later."""
    data = "runs/r/trajectories/000000"
    names = [f"runs/r/scores/000000/{scorer}" for scorer in ("aa", "bb", "cc")]
    scores = [CatalogEntry(number, "scores", name, [data]) for number, name in enumerate(names)]
    update = CatalogEntry(3, "checkpoint", "runs/r/checkpoints/000001", ["runs/r/checkpoints/000000", data, names[0]])
    assert scores_of(scores)[data] == names
    assert scores_of([*scores, update])[data] == [names[1], names[2], names[0]]
