"""`python -m storage cp`: a copied run has all that it needs at the other root."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage import layout
from storage.errors import StorageError
from storage.logs import catalog
from storage.logs.leases import Lease
from storage.maintenance import copying, gc
from storage.maintenance.copying import copy_run
from storage.maintenance.verify import check_logs, verify
from storage.objects.local import LocalBackend
from storage.objects.store import Store
from storage.versions import aliases, manifests
from storage.versions.lineage import scores_of
from tests.support.chain_helpers import ROWS, commit_rows, commit_text
from tests.support.kept import unpack_kept

RUN, REPORT = "nightly-0001", "runs/nightly-0001/report/summary.json"
FIRST, SECOND = layout.checkpoint(RUN, 0), layout.checkpoint(RUN, 1)
TRAINED_ON, HELD_OUT = layout.problems("c729965febab1153"), layout.problems("7dd65586e05eadf6")
BEGAN_WITH = [layout.run("half"), layout.checkpoint("half", 0)]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the root of a kept store. `RUN` is a night that began with a policy of the run `half`."""
    store = unpack_kept("2027-01", tmp_path_factory.mktemp("kept"))
    store.write(REPORT, b"{}")
    return Path(store.root)


@pytest.fixture
def source(kept: Path, tmp_path: Path) -> Store:
    return Store(str(shutil.copytree(kept, tmp_path / "source")))


def versions_of(store: Store, run: str) -> list[str]:
    return [version for item in store.walk(f"runs/{run}") if (version := layout.manifest_of(item.path))]


def assert_whole(target: Store, versions: list[str]) -> None:
    """Assert that the versions are all that is there, and that no object, hash, parent, log or alias has a problem."""
    logs = check_logs(target)
    assert sorted(logs.versions) == sorted(versions)
    assert [*logs.findings, *verify(target, logs.versions).findings] == []


@pytest.mark.parametrize("place", ["local", pytest.param("s3", marks=pytest.mark.long)])
def test_a_copied_run_has_all_that_it_needs(
    place: str, source: Store, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """It has its problem sets and the policy of another run, aliases and report; so has a copy of the copy."""
    root = f"s3://{request.getfixturevalue('bucket')}/root" if place == "s3" else str(tmp_path / "target")
    target = Store(root)
    needed = [*versions_of(source, RUN), *BEGAN_WITH, TRAINED_ON, HELD_OUT]
    copied = copy_run(source, target, RUN)
    assert sorted(manifest.version for manifest in copied) == sorted(needed)
    back = Store(str(tmp_path / "back"))
    copy_run(target, back, RUN)
    for copy in (target, back):
        assert_whole(copy, needed)
        assert copy.read(REPORT) == b"{}"
        moves = [aliases.current(store, "champion") for store in (source, copy)]
        assert [(move.version, move.reason) for move in moves if move] == [(SECOND, "night 1: better")] * 2


def test_a_repeated_copy_adds_what_is_new(source: Store, tmp_path: Path) -> None:
    """Nothing is copied twice, and an alias that points elsewhere by now is left alone."""
    target, new = Store(str(tmp_path / "target")), layout.trajectories(RUN, 1)
    copy_run(source, target, RUN)
    commit_rows(source, new, "trajectories", ROWS, [SECOND, TRAINED_ON])
    aliases.move(target, "champion", FIRST, 0)
    assert [manifest.version for manifest in copy_run(source, target, RUN)] == [new]
    champion = aliases.current(target, "champion")
    assert champion
    assert champion.version == FIRST


def test_what_a_run_names_comes_along(source: Store, tmp_path: Path) -> None:
    """A run that was not evaluated yet needs its held-out set, too, and one that is taught its teacher.

    A fit needs its data and their scores, which are no ancestors of anything yet, and the run that holds an imported
    data set's tokenizer.
    """
    for version in versions_of(source, "killed"):
        if "evaluations" in version:
            source.delete(layout.manifest(version))
    played, imported = layout.trajectories(RUN, 0), layout.trajectories("imported", 0)
    commit_rows(source, imported, "trajectories", ROWS, [TRAINED_ON])
    commit_text(source, layout.run("imported"))
    commit_text(source, layout.run("fitted"), config={"fit": {"data": [played, imported]}})
    commit_text(source, layout.run("taught"), config={"models": {"teacher": {"checkpoint": f"{RUN}@1"}}})
    (scores,) = scores_of(catalog.read_all(source))[played]
    of_fit = {played, scores, imported, layout.run("imported")}
    needed: dict[str, set[str]] = {"killed": {HELD_OUT}, "fitted": of_fit, "taught": {SECOND}}
    for run, versions in needed.items():
        copied = copy_run(source, Store(str(tmp_path / run)), run)
        assert versions <= {manifest.version for manifest in copied}


def test_gc_at_the_target_leaves_a_copy_alone(source: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It collects before each commit; the copy leases its run, and also brings versions of other runs."""
    target, enter = Store(str(tmp_path / "target")), catalog.enter

    def collect_first(*arguments: Any) -> None:
        gc.collect(Store(target.root), gc.Rules(older_than_s=-1))
        enter(*arguments)

    monkeypatch.setattr(catalog, "enter", collect_first)
    assert_whole(target, [manifest.version for manifest in copy_run(source, target, RUN)])


def test_another_copy_may_bring_a_version_first(source: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so while this copy waits for the lease of a run that both of them need."""
    target, needed = Store(str(tmp_path / "target")), copying._needed(source, RUN)

    def overtaken(store: Store, run: str, **options: Any) -> Lease:
        for manifest in needed:
            if run == layout.run_of(manifest.version) != RUN and not manifests.committed(store, manifest.version):
                copying._copy_version(source, store, manifest)
        return Lease(store, run, **options)

    monkeypatch.setattr(copying, "Lease", overtaken)
    copy_run(source, target, RUN)
    entered = [entry.version for entry in catalog.read_all(target)]
    assert set(BEGAN_WITH) <= set(entered)
    assert len(entered) == len(set(entered))


def test_links_and_pipes_are_not_followed(source: Store, tmp_path: Path) -> None:
    """A link in the source must not carry a file of whoever copies to those who read the copy; a pipe ends nothing."""
    target, secret = Store(str(tmp_path / "target")), tmp_path / "etc" / "shadow"
    secret.parent.mkdir()
    secret.write_text("root:$y$j9T")
    Path(source.path(f"runs/{RUN}/metrics")).mkdir(exist_ok=True)
    os.mkfifo(source.path(f"runs/{RUN}/metrics/pipe"))
    for name, to in (("logs", secret.parent), ("metrics/x.jsonl", secret), ("report/page.html", secret)):
        link = Path(source.path(f"runs/{RUN}/{name}"))
        link.symlink_to(to)
        with pytest.raises(StorageError, match=rf"{name}.* is a link out of runs/{RUN}: cp does not"):
            copy_run(source, target, RUN)
        link.unlink()
    shutil.move(source.path(f"runs/{RUN}"), tmp_path / "other disk")
    Path(source.path(f"runs/{RUN}")).symlink_to(tmp_path / "other disk")
    copy_run(source, target, RUN)
    assert target.exists(REPORT)
    assert not [item for item in target.walk() if b"root:$y$j9T" in target.read(item.path)]


def test_an_object_that_arrives_damaged_is_not_committed(
    source: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every object is read back before the manifest; the next copy replaces it."""
    target, lost = Store(str(tmp_path / "target")), "model/model.safetensors"
    upload = LocalBackend.upload

    def truncated(backend: LocalBackend, path: str, file: Path) -> None:
        backend.write(path, file.read_bytes()[:-1]) if path.endswith(lost) else upload(backend, path, file)

    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, "upload", truncated)
        with pytest.raises(StorageError, match=rf"target/runs/half/.*{lost} has .* bytes"):
            copy_run(source, target, RUN)
    assert not manifests.committed(target, BEGAN_WITH[1])
    copy_run(source, target, RUN)
    assert verify(target, [SECOND]).findings == []


def _take(_: Store, target: Store) -> None:
    commit_rows(target, HELD_OUT, "problems", [], [])


def _go_on(source: Store, target: Store) -> None:
    copy_run(source, target, RUN)
    commit_rows(target, layout.trajectories(RUN, 1), "trajectories", ROWS, [SECOND])


def _damage(source: Store, _: Store) -> None:
    source.write(layout.manifest(BEGAN_WITH[1]), b"{")


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (_take, f"target has {HELD_OUT}, from which .* into a new root"),
        (_go_on, f"target has {layout.trajectories(RUN, 1)}, from which .* went on"),
        (_damage, f"cannot be copied whole: {BEGAN_WITH[1]}"),
        (lambda _, target: Lease(target, RUN, label="a flow run")._acquire(), "is being written by a flow run"),
    ],
)
def test_copies_that_would_mix_or_lose_something_are_refused(
    before: Callable[[Store, Store], Any], message: str, source: Store, tmp_path: Path
) -> None:
    """The error names the version or the writer, and nothing of the run is written."""
    target = Store(str(tmp_path / "target"))
    before(source, target)
    there = versions_of(target, RUN)
    with pytest.raises(StorageError, match=message):
        copy_run(source, target, RUN)
    assert versions_of(target, RUN) == there


def test_mistyped_runs_are_refused(source: Store) -> None:
    for run, message in (
        ("nobody", "there is no run 'nobody' in .*ls --kind run"),
        ("../half", "is not where run versions are"),
    ):
        with pytest.raises(StorageError, match=message):
            copy_run(source, Store("elsewhere"), run)
    assert copy_run(source, Store(f"{source.root}/"), RUN) == []
