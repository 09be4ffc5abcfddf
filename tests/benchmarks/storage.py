"""The store on a real S3 server against plain s3fs and pyarrow with the same bytes, and its memory and requests.

The server runs on the same cores and uses most of them, which slows down both sides of a pair equally. Memory is
measured in a new process, which runs this file with the path of a file as its argument.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import s3fs

from storage import layout
from storage.objects.store import Store
from storage.records import TRAJECTORY_SCHEMA
from storage.versions import manifests
from storage.versions.datasets import shards, write_parquet
from storage.versions.drafts import Draft, Provenance
from storage.versions.fetch import fetch
from tests.benchmarks.fixtures import Lab
from tests.benchmarks.result import Row, peak_memory_mb, spread
from tests.support.fault_proxy import FaultProxy
from tests.support.s3_server import KEY, SECRET, Rgw, available

GOAL = 0.8
PAIRS = 5
PLAIN = "bench/plain/model.safetensors"
CHECKPOINT_BYTES = 10**9
SHARD_ROWS, SHARDS = 23_000, 4
"""Rows of a shard and number of shards: together about 100 MB of Parquet."""
VERSIONS = 10_000
PROVENANCE = Provenance(config={})


def measure(lab: Lab) -> list[Row]:
    """Make all storage measurements. If no server can be started, return one row with the reason."""
    if reason := available():
        return [Row("storage on S3", "not measured", detail=reason)]
    with bucket(lab) as endpoint:
        return [*_checkpoint(lab), *_data_set(lab), *_requests(lab, endpoint)]


@contextmanager
def bucket(lab: Lab) -> Iterator[str]:
    """Start a server with the bucket `bench`; yield its endpoint."""
    with Rgw(lab.scratch / "s3") as server:
        os.environ |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        os.environ |= {"AWS_ENDPOINT_URL": server.endpoint, "AWS_DEFAULT_REGION": "us-east-1"}
        s3fs.S3FileSystem.clear_instance_cache()
        _plain().call_s3("create_bucket", Bucket="bench")
        yield server.endpoint


def _plain() -> s3fs.S3FileSystem:
    return s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)


def _checkpoint(lab: Lab) -> list[Row]:
    """Measure commit and read of a checkpoint with 1 GB of random weights, which do not compress."""
    source = lab.scratch / "model.safetensors"
    with source.open("wb") as file:
        generator = np.random.default_rng(0)
        for _ in range(CHECKPOINT_BYTES // 10**8):
            file.write(generator.bytes(10**8))
    store, plain = Store("s3://bench/checkpoints"), _plain()
    target, cache = lab.scratch / "read.safetensors", lab.scratch / "read-cache"
    written, read = [], []
    for pair in range(PAIRS):
        version = f"runs/r/scores/{pair:06d}/a"
        plainly, ours = partial(plain.put_file, str(source), PLAIN), partial(_commit, store, version, [source])
        written.append(_pair(pair, plainly, ours))
        plainly = partial(_and_delete, target, plain.get_file, PLAIN, str(target))
        ours = partial(_and_delete, cache, _fetch, store, version, cache)
        read.append(_pair(pair, plainly, ours))
        for stored in manifests.read(store, version).files:
            store.delete(stored.path)
    peak = _peak(lab, source)
    source.unlink()
    return [
        _row("commit of a 1 GB checkpoint / plain s3fs put", written, CHECKPOINT_BYTES),
        _row("verified read of it / plain s3fs get", read, CHECKPOINT_BYTES),
        peak,
    ]


def _data_set(lab: Lab) -> list[Row]:
    """Measure commit and read of about 100 MB of trajectories. Both sides use Arrow tables in memory."""
    tables = [_table(seed) for seed in range(SHARDS)]
    store, plain, folder = Store("s3://bench/data"), _plain(), lab.scratch / "data"
    folder.mkdir()
    written, read, size = [], [], 0
    for pair in range(PAIRS):
        version = f"runs/r/trajectories/{pair:06d}"
        plainly, ours = partial(_plain_write, plain, tables, folder), partial(_write, store, version, tables)
        written.append(_pair(pair, plainly, ours))
        size = manifests.read(store, version).bytes
        ours = partial(_and_delete, folder / "cache", _read, store, version, folder / "cache")
        read.append(_pair(pair, partial(_plain_read, plain, folder), ours))
    return [
        _row(f"commit of a {size / 1e6:.0f} MB data set / pyarrow and s3fs put", written, size),
        _row("verified read of it / s3fs get and pyarrow", read, size),
    ]


def _requests(lab: Lab, endpoint: str) -> list[Row]:
    """Count requests with a proxy that passes everything on."""
    store = Store("s3://bench/many")
    with ThreadPoolExecutor(16) as writers:
        list(writers.map(lambda number: _small_version(store, number), range(VERSIONS)))
    with FaultProxy(endpoint, share=0.0, seed=0, hang_s=0.0) as proxy:
        os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
        counted = Store("s3://bench/many")
        parents = [f"runs/r/scores/{number:06d}/a" for number in range(3)]
        with Draft(counted, f"runs/r/scores/{VERSIONS:06d}/a", "scores") as draft:
            draft.commit(PROVENANCE, parents)
        first = sum(proxy.requests.values())
        with Draft(counted, f"runs/r/scores/{VERSIONS + 1:06d}/a", "scores") as draft:
            draft.commit(PROVENANCE, parents)
        again = sum(proxy.requests.values()) - first
        before = sum(proxy.requests.values())
        started = time.monotonic()
        listing = _ls()
        seconds, requests = time.monotonic() - started, sum(proxy.requests.values()) - before
    os.environ["AWS_ENDPOINT_URL"] = endpoint
    assert len(listing) == 10, listing
    return [
        Row(
            "requests to commit a manifest with 3 parents",
            f"{again}",
            "9 or less",
            again < 10,
            f"{first} the first time in a process, in a store of {VERSIONS:,} versions",
        ),
        Row(
            f"requests of `ls` in a store of {VERSIONS:,} versions",
            f"{requests}",
            "49 or less",
            requests < 50,
            f"the last ten, in {seconds:.2f} s",
        ),
    ]


def _ls() -> list[Any]:
    """Return the data that `python -m storage --root s3://bench/many ls` prints."""
    import argparse

    from storage.commands.versions import ls
    from storage.logs.catalog import check_not_empty

    store = Store("s3://bench/many")
    check_not_empty(store)
    data = ls(store, argparse.Namespace(last=10, run=None, kind=None)).data
    assert isinstance(data, list)
    return data


def _small_version(store: Store, number: int) -> None:
    """Write the smallest possible version, with `number` as its place in the catalog."""
    from storage.logs.log import Log
    from storage.objects.seal import seal

    version = f"runs/r/scores/{number:06d}/a"
    entry = {"kind": "scores", "version": version, "parents": [], "attempt": "a"}
    Log(store, layout.CATALOG).put(number, entry)
    manifest = manifests.Manifest(
        manifest_version=manifests.MANIFEST_VERSION,
        kind="scores",
        version=version,
        parents=[],
        files=[],
        config={},
        code_version="",
        prefect_run_id=None,
        metrics={},
        created_at="2026-01-01T00:00:00Z",  # type: ignore[arg-type]  # pydantic parses it
        nonce=f"{number:012x}",
    )
    store.create(layout.manifest(version), seal(json.loads(manifest.model_dump_json())))


def _table(seed: int) -> pa.Table:
    """Make trajectories of 200 tokens with random ids and logprobs, which compress as badly as real ones."""
    generator, rows, tokens = np.random.default_rng(seed), SHARD_ROWS, 200
    offsets = np.arange(0, rows * tokens + 1, tokens, dtype=np.int32)
    lists: dict[str, Any] = {
        "token_ids": generator.integers(0, 32_000, rows * tokens, dtype=np.int32),
        "action_mask": generator.random(rows * tokens) < 0.6,
        "logprobs": -generator.exponential(1.0, rows * tokens).astype(np.float32),
        "versions": np.full(rows * tokens, 3, dtype=np.int32),
    }
    columns: dict[str, Any] = {}
    for column in TRAJECTORY_SCHEMA:
        if column.name in lists:
            make: Any = pa.ListArray.from_arrays  # the stubs know only some types of values
            columns[column.name] = make(pa.array(offsets), pa.array(lists[column.name]))
        elif pa.types.is_list(column.type):
            columns[column.name] = pa.array([[]] * rows, column.type)
        elif pa.types.is_string(column.type):
            columns[column.name] = pa.array([f"{column.name} {seed}/{row // 16}" for row in range(rows)])
        else:
            columns[column.name] = pa.array([0] * rows, column.type)
    return pa.table(columns).cast(TRAJECTORY_SCHEMA)


def _write(store: Store, version: str, tables: list[pa.Table]) -> None:
    with Draft(store, version, "trajectories") as draft:
        for number, table in enumerate(tables):
            path = draft.scratch / f"part-{number:05d}.parquet"
            write_parquet(table, path)
            draft.add(path, path.name, table.num_rows)
        draft.commit(PROVENANCE, [])


def _read(store: Store, version: str, cache: Path) -> int:
    _, paths = shards(store, version, cache)
    return sum(pq.read_table(path, page_checksum_verification=True).num_rows for path in paths)


def _plain_write(plain: s3fs.S3FileSystem, tables: list[pa.Table], folder: Path) -> None:
    for number, table in enumerate(tables):
        path = folder / f"plain-{number}.parquet"
        write_parquet(table, path)  # the same settings give the same bytes
        plain.put_file(str(path), f"bench/plain/{path.name}")


def _plain_read(plain: s3fs.S3FileSystem, folder: Path) -> int:
    rows = 0
    for number in range(SHARDS):
        path = folder / f"got-{number}.parquet"
        plain.get_file(f"bench/plain/plain-{number}.parquet", str(path))
        rows += pq.read_table(path).num_rows
        path.unlink()
    return rows


def _commit(store: Store, version: str, paths: list[Path]) -> None:
    with Draft(store, version, "scores") as draft:
        for path in paths:
            draft.add(path, path.name)
        draft.commit(PROVENANCE, [])


def _fetch(store: Store, version: str, cache: Path) -> None:
    manifest = manifests.read(store, version)
    for file in manifest.files:
        fetch(store, manifest, file.name, cache)


def _pair(number: int, theirs: Callable[[], object], ours: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of both sides; they take turns to go first."""
    first, second = (ours, theirs) if number % 2 else (theirs, ours)
    seconds = [_seconds(first), _seconds(second)]
    return (seconds[1], seconds[0]) if number % 2 else (seconds[0], seconds[1])


def _and_delete(target: Path, read: Callable[..., object], *arguments: object) -> None:
    """Read into a new file or folder and delete it, because 1 GB of dirty pages would slow down the next reader."""
    read(*arguments)
    shutil.rmtree(target) if target.is_dir() else target.unlink()


def _seconds(work: Callable[[], object]) -> float:
    start = time.monotonic()
    work()
    return time.monotonic() - start


def _row(name: str, pairs: list[tuple[float, float]], size: int) -> Row:
    ratios = [theirs / ours for theirs, ours in pairs]
    middle = sorted(ratios)[len(ratios) // 2]
    speeds = [sorted(size / 1e6 / seconds for seconds in side)[len(pairs) // 2] for side in zip(*pairs, strict=True)]
    detail = f"{speeds[1]:.0f} MB/s with hash and manifest, plain {speeds[0]:.0f} MB/s; {len(pairs)} pairs"
    return Row(name, spread(ratios, "{:.2f}".format), f"{GOAL} or more", middle >= GOAL, detail)


def _peak(lab: Lab, source: Path) -> Row:
    """Measure the memory of a process that commits and reads back a file, of a tenth of the size and of full size."""
    small = lab.scratch / "small.safetensors"
    with source.open("rb") as file:
        small.write_bytes(file.read(CHECKPOINT_BYTES // 10))
    low, high = (float(lab.run_module("storage", str(path))) for path in (small, source))
    growth = "1 GB and 100 MB, written and read back by a process of its own"
    return Row(
        "peak memory, 1 GB / 100 MB",
        f"{high / low:.2f}",
        "1.2 or less",
        high / low <= 1.2,
        f"{high:.0f} and {low:.0f} MB: {growth}",
    )


def main(path: Path) -> None:
    """Commit and read `path`; print the peak memory of this process in MB as the last line of output."""
    store, version = Store("s3://bench/memory"), f"runs/r/scores/{path.stat().st_size % 10**6:06d}/a"
    _commit(store, version, [path])
    _fetch(store, version, path.parent / "memory-cache")
    print(json.dumps(peak_memory_mb()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
