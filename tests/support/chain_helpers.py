"""A small whole chain of versions, and functions that change it so that it contradicts itself."""

import hashlib
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import load, save, save_file

from storage import layout
from storage.logs.leases import Lease
from storage.objects.seal import seal, unseal
from storage.objects.store import Store
from storage.records import PROBLEM_SCHEMA, SCORE_SCHEMA, TRAJECTORY_SCHEMA, Problem
from storage.version_names import version_of
from storage.versions import checkpoints, datasets, manifests
from storage.versions.drafts import Draft, Provenance
from storage.versions.manifests import Manifest
from tests.support.train_helpers import make_scores, make_trajectory

PROBLEMS = layout.problems("0123456789abcdef")
RUN = layout.run("r")
FIRST, SECOND = layout.checkpoint("r", 0), layout.checkpoint("r", 1)
TRAJECTORIES = layout.trajectories("r", 0)
SCORES = layout.scores("r", 0, "5c0e")
CHAIN = [PROBLEMS, RUN, FIRST, TRAJECTORIES, SCORES, SECOND]
SHARD, WEIGHTS = "part-00000.parquet", "model/model.safetensors"
ROWS = [make_trajectory(f"t{number}", [[7, 8], [9]]) for number in range(3)]
PROVENANCE = Provenance(config={"run": {"name": "r"}})
VERDICTS = [score for row in ROWS for score in make_scores(row.trajectory_id, 0.0, 1.0)]


def commit_chain(store: Store, model: Path, state: Path, canary: checkpoints.Canary) -> Store:
    """Commit one whole iteration of a run; its last version is `SECOND`."""
    problems = [Problem(f"p{number}", "What is 1 + 1?", ["2"]) for number in range(3)]
    commit_rows(store, PROBLEMS, "problems", problems, [])
    with Draft(store, RUN, "run") as draft:
        draft.commit(PROVENANCE, [])
    checkpoints.commit(store, FIRST, model, None, canary, PROVENANCE, [RUN], {})
    commit_rows(store, TRAJECTORIES, "trajectories", ROWS, [FIRST, PROBLEMS])
    commit_rows(store, SCORES, "scores", VERDICTS, [TRAJECTORIES])
    checkpoints.commit(store, SECOND, model, state, canary, PROVENANCE, [FIRST, TRAJECTORIES, SCORES], {})
    return store


def commit_rows(
    store: Store,
    version: str,
    kind: manifests.Kind,
    rows: Sequence[Any],
    parents: Sequence[str],
    *,
    config: dict[str, Any] | None = None,
    shard: int = 2,
) -> Manifest:
    """Commit rows in shards of `shard`, by default with the configuration of `PROVENANCE`."""
    schema = {"problems": PROBLEM_SCHEMA, "scores": SCORE_SCHEMA}.get(kind, TRAJECTORY_SCHEMA)
    with Draft(store, version, kind) as draft:
        datasets.write_rows(draft, schema, rows, shard)
        return draft.commit(PROVENANCE if config is None else Provenance(config=config), parents)


def commit_text(
    store: Store,
    version: str,
    *parents: str,
    config: dict[str, Any] | None = None,
    fence: Lease | None = None,
    metrics: dict[str, Any] | None = None,
) -> str:
    """Commit a version whose data are a text; a checkpoint also has a canary, weights and a state."""
    known = version_of(version)
    assert known, version
    with Draft(store, version, known.kind) as draft:
        path = draft.scratch / "data"
        path.write_text(version)
        draft.add(path, "data")
        if known.kind == "checkpoint":
            path.write_text('{"token_ids": [1, 2], "logprobs": [-1.0]}')
            for name in ("canary.json", "model/config.json"):
                draft.add(path, name)
            save_file({"weight": np.zeros(3, dtype=np.float32)}, path)
            for name in ("model/model.safetensors", "state/optimizer.safetensors"):
                draft.add(path, name)
        draft.commit(Provenance(config=config or {}, fence=fence), parents, metrics)
    return version


def commit_run(store: Store, name: str, checkpoints: int, config: dict[str, Any] | None = None) -> list[str]:
    """Commit a run and return its checkpoints.

    The first is made from the run, each later one from the checkpoint before and a data set of trajectories.
    """
    run = commit_text(store, layout.run(name), config=config)
    versions = [commit_text(store, layout.checkpoint(name, 0), run, config=config)]
    for number in range(1, checkpoints):
        rows = commit_text(store, layout.trajectories(name, number - 1), versions[-1], config=config)
        versions.append(commit_text(store, layout.checkpoint(name, number), versions[-1], rows, config=config))
    return versions


def objects(store: Store) -> list[str]:
    """Return the keys of all objects of versions, without logs, leases and aliases."""
    return [item.path for item in store.walk() if not item.path.startswith(("catalog/", "leases/", "aliases/"))]


def key(store: Store, version: str, name: str) -> str:
    return next(file.path for file in manifests.read(store, version).files if file.name == name)


def rewrite(store: Store, version: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest and seal it again, so that it is valid but wrong."""
    values = unseal(store.read(layout.manifest(version)), "")
    change(values)
    store.write(layout.manifest(version), seal(values))


def replace_file(store: Store, version: str, name: str, data: bytes, **claims: Any) -> None:
    """Replace a file's bytes, and update its size and digest in the manifest."""
    store.write(key(store, version, name), data)
    claims |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    rewrite(store, version, lambda values: file_of(values, name).update(claims))


def file_of(values: dict[str, Any], name: str) -> dict[str, Any]:
    file = next(file for file in values["files"] if file["name"] == name)
    assert isinstance(file, dict)
    return file


def rewrite_shard(store: Store, version: str, change: Callable[[pa.Table], pa.Table], name: str = SHARD) -> None:
    """Replace a shard's table, and update the manifest."""
    table = change(pq.read_table(pa.BufferReader(store.read(key(store, version, name)))))
    with tempfile.NamedTemporaryFile() as file:
        datasets.write_parquet(table, Path(file.name))
        replace_file(store, version, name, Path(file.name).read_bytes(), rows=table.num_rows)


def rewrite_tensors(store: Store, change: Callable[[dict[str, Any]], object]) -> None:
    """Replace the weights of `SECOND`, and update the manifest."""
    tensors = {name: tensor.copy() for name, tensor in load(store.read(key(store, SECOND, WEIGHTS))).items()}
    change(tensors)
    replace_file(store, SECOND, WEIGHTS, save(tensors, {"format": "pt"}))


def nonces(folder: Path) -> dict[str, str]:
    """Return the nonce of every manifest below a folder; a version that is made again has another nonce."""
    return {str(path): json.loads(path.read_text())["nonce"] for path in folder.rglob("manifest.json")}
