"""The commit protocol: a version with a manifest is whole, a version without one does not exist, one writer wins."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from botocore.exceptions import ClientError

from configs.storage import Storage
from storage import layout
from storage.errors import StorageError, UnavailableError
from storage.objects.store import Store
from storage.records import (
    CASE_SCHEMA,
    CURRICULUM_SCHEMA,
    SCHEMA_VERSION,
    SCORE_SCHEMA,
    TRAJECTORY_SCHEMA,
    Score,
    to_score,
    to_table,
)
from storage.versions import checkpoints, datasets, manifests
from storage.versions.checkpoints import Canary
from storage.versions.drafts import Draft, Provenance
from storage.versions.fetch import RECENT_S, fetch_all, fetch_file, trim_to_limit

PROVENANCE = Provenance(config={"run": {"name": "test"}})


class Remote(Store):
    """A folder that is used as a bucket is: what is read is downloaded into the cache first."""

    is_local = False


def score(number: int) -> Score:
    return Score(f"t/{number}", 0, "correct", 1.0, "19", "19", "", 1.0)


def commit_scores(store: Store, version: str, count: int = 5, rows_per_shard: int = 2) -> manifests.Manifest:
    with Draft(store, version, "scores") as draft:
        datasets.write_rows(draft, SCORE_SCHEMA, [score(i) for i in range(count)], rows_per_shard)
        return draft.commit(PROVENANCE, [], {"turns": count})


def test_rows_come_back_as_written(any_store: Store, tmp_path: Path) -> None:
    """Every kind of store keeps the shards, the order and the values of rows."""
    manifest = commit_scores(any_store, "runs/r/scores/000000/x")
    assert [file.rows for file in manifest.files] == [2, 2, 1]
    rows = list(datasets.rows(any_store, manifest.version, tmp_path / "cache"))
    assert [to_score(row) for row in rows] == [score(i) for i in range(5)]
    with pytest.raises(StorageError, match="is a scores version"):
        checkpoints.open_checkpoint(any_store, manifest.version, tmp_path)


@pytest.mark.parametrize("left", [None, b"on"])
def test_a_commit_looks_at_its_objects(any_store: Store, left: bytes | None, tmp_path: Path) -> None:
    """What was deleted or cut since it was written is not committed: the version would be broken for ever.

    A version without a manifest does not exist.
    """
    with Draft(any_store, "runs/r/scores/000000/x", "scores") as draft:
        datasets.write_rows(draft, SCORE_SCHEMA, [score(0)], 1)
        (file,) = draft.files
        any_store.write(file.path, left) if left else any_store.delete(file.path)
        with pytest.raises(
            StorageError, match=r"was not committed: runs/r/scores/000000/x/.*part.* was deleted or cut"
        ):
            draft.commit(PROVENANCE, [])
    with pytest.raises(StorageError, match="never committed"):
        list(datasets.rows(any_store, draft.version, tmp_path))


def test_the_first_commit_wins(any_store: Store) -> None:
    """If two writers commit one version, the second gets the manifest of the first.

    A create is retried if its answer was lost. The retry succeeds if the stored bytes are the writer's own.
    """
    assert [any_store.create("the/object", data) for data in (b"mine", b"mine", b"other")] == [True, True, False]
    first = commit_scores(any_store, "runs/r/scores/000000/x", count=3)
    second = commit_scores(any_store, "runs/r/scores/000000/x", count=4)
    assert second == first
    assert json.loads(any_store.read(layout.manifest(first.version)))["metrics"] == {"turns": 3}


def test_a_file_is_downloaded_once_by_those_who_share_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it, and check their copy; one that was damaged meanwhile is downloaded again."""
    store, got, original = Remote(f"{tmp_path}/store"), list[str](), Store.get
    files = commit_scores(store, "runs/r/scores/000000/x", count=6).files

    def get(self: Store, key: str, path: Path) -> str:
        got.append(key)
        time.sleep(0.05)
        return original(self, key, path)

    monkeypatch.setattr(Store, "get", get)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: fetch_all(store, files, tmp_path / "cache"), range(4)))
    assert sorted(got) == sorted(file.path for file in files)
    (tmp_path / "cache" / files[0].path).write_bytes(b"damaged")
    fetch_all(store, files, tmp_path / "cache")
    assert got[len(files) :] == [files[0].path]


@pytest.mark.parametrize("key", ["../outside", "/etc/passwd", "", "runs/../../outside"])
def test_keys_cannot_climb_out(store: Store, key: str) -> None:
    """No key reaches a file outside of the root."""
    with pytest.raises(StorageError, match="climbs out"):
        store.put(key, Path(__file__))


def test_the_size_of_data_is_compared_before_they_are_read(store: Store, tmp_path: Path) -> None:
    """To hash a hole of a terabyte would take an hour. `verify` has a test of other damage."""
    manifest = commit_scores(store, "runs/r/scores/000000/x")
    os.truncate(store.path(manifest.files[0].path), 2**40)
    with pytest.raises(StorageError, match="has 1099511627776 bytes, its manifest says"):
        list(datasets.rows(store, manifest.version, tmp_path))


def test_a_newer_schema_is_refused(store: Store, tmp_path: Path) -> None:
    """Reading data of a newer schema raises an error, because this program would misread them."""
    table = to_table([score(0)], SCORE_SCHEMA).replace_schema_metadata({"schema_version": "99"})
    pq.write_table(table, tmp_path / "future.parquet")
    with Draft(store, "runs/r/scores/000000/x", "scores") as draft:
        draft.add(tmp_path / "future.parquet", "part-00000.parquet", rows=1)
        draft.commit(PROVENANCE, [])
    with pytest.raises(StorageError, match="schema 99"):
        list(datasets.rows(store, draft.version, tmp_path))


def commit_checkpoint(store: Store, folder: Path) -> str:
    """Commit policy version 7 of a run; its model folder has placeholder weights and no tokenizer."""
    model, state = folder / "model", folder / "state"
    for place, name in ((model, "config.json"), (model, "model.safetensors"), (state, "optimizer.safetensors")):
        place.mkdir(exist_ok=True)
        (place / name).write_text("{}" if name.endswith(".json") else name)
    version = layout.checkpoint("r", 7)
    checkpoints.commit(store, version, model, state, Canary([1, 2], [-0.5]), PROVENANCE, [], {})
    return version


@pytest.mark.parametrize("name", ["model/additional_chat_templates/other.jinja", "state/critic.safetensors"])
@pytest.mark.parametrize("kind", [Store, Remote])
def test_a_checkpoint_with_a_file_that_its_manifest_does_not_name_is_not_opened(
    kind: type[Store], name: str, tmp_path: Path
) -> None:
    """Libraries load templates and weights by the folder, so an added file or link could change what is served."""
    store = kind(f"{tmp_path}/store")
    version, cache = commit_checkpoint(store, tmp_path), tmp_path / "cache"
    stray = checkpoints.open_checkpoint(store, version, cache, state=True).model.parent / name
    stray.parent.mkdir(exist_ok=True)
    for make in (Path.touch, lambda path: path.symlink_to(tmp_path / "model")):
        make(stray)
        with pytest.raises(StorageError, match=rf"does not name {name.partition('/')[2]} in .*delete it"):
            checkpoints.open_checkpoint(store, version, cache, state=True)
        stray.unlink()
    for leftover in (".model.safetensors.0123abcd.part", ".nfs00000000018a4c1200000007"):  # no library loads them
        (stray.parent / leftover).touch()
    checkpoints.open_checkpoint(store, version, cache, state=True)


def test_committed_weights_are_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer moves weights into the cache of a remote root, where the next rollout finds them.

    Nothing is listed: listing a large bucket is slow, and some users may not list.
    """
    monkeypatch.setattr(Store, "walk", lambda *_: pytest.fail("the store was listed"))
    store, cache = Remote(f"{tmp_path}/store"), tmp_path / "cache"
    with Draft(store, layout.checkpoint("r", 7), "checkpoint") as draft:
        (draft.scratch / "weights").write_text("weights")
        weights = draft.add(draft.scratch / "weights", "model/model.safetensors")
        draft.hand_over(cache)
    store.delete(weights.path)
    assert fetch_file(store, weights, cache).read_text() == "weights"
    (cache / weights.path).write_text("WEIGHTS")  # damaged in the cache, so it is fetched again
    with pytest.raises(StorageError, match="is missing"):
        fetch_file(store, weights, cache)


def test_the_cache_deletes_the_files_that_were_unused_for_longest(tmp_path: Path) -> None:
    """It stops when the cache is small enough. It keeps files used recently, versions in use and logs."""
    store, long_ago = Remote(f"{tmp_path}/store"), time.time() - 2 * RECENT_S
    paths = [tmp_path / name for name in ("runs/new", "runs/middle", "problems/old", "logs/oldest")]
    for age, path in enumerate(paths):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(100))
        os.utime(path, (long_ago - age, long_ago - age))

    def left(most: int, *keep: str) -> list[str]:
        settings = Storage(root=store.root, cache=str(tmp_path), cache_gib=most / 2**30)
        trim_to_limit(store, settings, keep)
        return [path.name for path in paths if path.exists()]

    assert left(150) == ["new", "oldest"]
    assert left(1, "runs") == ["new", "oldest"]
    os.utime(paths[0])
    assert left(1) == ["new", "oldest"]
    os.utime(paths[0], (long_ago, long_ago))
    assert left(1) == ["oldest"]


@pytest.mark.parametrize("root", ["/dev/null", "/dev/null/below", "/proc/nothing"])
def test_a_root_that_cannot_be_a_folder_is_reported(root: str) -> None:
    """The error says what is wrong with the path and what to do."""
    with pytest.raises(StorageError, match="cannot be made .*: check the store's root and its permissions"):
        Store(root).write("x", b"")


def test_schema_types_are_stable() -> None:
    """Columns that other programs query keep their types; if a type must change, raise SCHEMA_VERSION."""
    types = {field.name: str(field.type) for field in TRAJECTORY_SCHEMA}
    assert list(types)[:5] == ["trajectory_id", "run", "iteration", "problem_id", "sample"]
    assert (types["token_ids"], types["logprobs"]) == ("list<item: int32>", "list<item: float>")
    assert (types["iteration"], types["seed"], types["started_at"]) == ("int32", "int64", "double")
    assert types["reward_parts"] == "list<item: map<string, float>>"
    assert types["turns"] == (
        "list<item: struct<start: int32, end: int32, text: string, verdict: string, reward: float, "
        "finish_reason: string, feedback: string, latency_s: float, seed: int64>>"
    )
    assert not any(field.nullable for field in TRAJECTORY_SCHEMA)
    assert to_table([], TRAJECTORY_SCHEMA).schema.metadata[b"schema_version"] == str(SCHEMA_VERSION).encode()
    assert (str(CASE_SCHEMA.field("number").type), str(CURRICULUM_SCHEMA.field("weight").type)) == ("int64", "double")


@pytest.mark.parametrize("code", ["RequestExpired", "InvalidToken", "TokenRefreshRequired", "ExpiredToken"])
def test_every_word_for_expired_keys_is_told_alike(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the object, what S3 said and the remedy."""

    def refuse(*_: object, **__: object) -> None:
        answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": 400}}
        raise OSError(22, "None") from ClientError(answer, "PutObject")  # s3fs shortens S3's text

    monkeypatch.setattr("s3fs.S3FileSystem.call_s3", refuse)
    with pytest.raises(UnavailableError, match=rf"s3://bucket/root/a: [^\[]*\({code}\).*renew them"):  # no [Errno 22]
        Store("s3://bucket/root", patience_s=1).create("a", b"data")
