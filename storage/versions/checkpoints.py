"""Checkpoints: versions with two folders and a canary.

model/          a transformers folder: config.json, model.safetensors, tokenizer files
state/          optimizer and RNG, safetensors and JSON (absent from version 0, but for a fork)
canary.json     token ids and the trainer's logprobs of them, which prove what a server serves

Those of earlier programs may also have serving/ and delta/, a copy of the weights in bfloat16, which nothing reads.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from storage.errors import DamagedError
from storage.objects.store import Store
from storage.version_names import PolicyVersion
from storage.versions import aliases, model_files
from storage.versions.drafts import Draft, Provenance
from storage.versions.fetch import Fetching, fetch, fetch_all, fetch_folder
from storage.versions.manifests import Manifest, read, refuse_collected


@dataclass(frozen=True, slots=True)
class Canary:
    """A fixed token sequence and the trainer's logprobs of it at temperature 1.

    Example: Canary(token_ids=[3, 1, 2], logprobs=[-4.1, -3.9])
    """

    token_ids: list[int]  # N
    logprobs: list[float]  # N - 1: of each of token_ids[1:], given the tokens before it


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed policy version as verified local files."""

    version: PolicyVersion
    number: int  # policy version: updates committed before it
    model: Path  # in float32
    state: Path | None  # None if the checkpoint has no state, or if the caller did not ask for it
    canary: Canary
    manifest: Manifest


def commit(
    store: Store,
    version: str,
    model: Path,
    state: Path | None,
    canary: Canary,
    provenance: Provenance,
    parents: Sequence[str],
    metrics: dict[str, Any],
    cache: Path | None = None,
) -> Manifest:
    """Commit the folders as the checkpoint `version`; with `cache`, move the files into it afterwards."""
    with Draft(store, version, "checkpoint") as draft:
        draft.add_folder(model, "model")
        if state:
            draft.add_folder(state, "state")
        add_canary(draft, canary)
        manifest = draft.commit(provenance, parents, metrics)
        if cache:
            draft.hand_over(cache)
        return manifest


def add_canary(draft: Draft, canary: Canary) -> None:
    """Add the canary of a checkpoint's weights to its draft."""
    path = draft.scratch / "canary.json"
    path.write_text(json.dumps(asdict(canary)))
    draft.add(path, "canary.json")


def resolve_policy(store: Store, reference: str) -> PolicyVersion:
    """Return the checkpoint that an alias, a version or a URI in this store means; check that gc kept its data.

    Raises:
        StorageError: there is no such version, it is not a checkpoint, or gc has deleted its data.
    """
    version = aliases.resolve_version(store, reference)
    _read_manifest(store, version)
    refuse_collected(store, version)
    return PolicyVersion(version)


def _read_manifest(store: Store, version: str) -> Manifest:
    manifest = read(store, version)
    if manifest.kind != "checkpoint":
        raise DamagedError(f"{store.uri(version)} is a {manifest.kind} version, not a checkpoint")
    return manifest


def open_checkpoint(
    store: Store, version: str, cache: Path, *, state: bool = False, fetching: Fetching = fetch_all
) -> Checkpoint:
    """Fetch and verify a checkpoint.

    Args:
        store: the store of the version.
        version: its name.
        cache: the folder that keeps objects of a remote root.
        state: fetch the optimizer's state, too, which is most of the data.
        fetching: fetches the files of a folder; processes that share a cache may deal them out.

    Raises:
        StorageError: the version is not committed or not a checkpoint; or a file is missing, damaged, not named by the
            manifest, or could run code (`storage.versions.model_files`).
    """
    manifest = _read_manifest(store, version)
    if "canary.json" not in {file.name for file in manifest.files} or "config.json" not in manifest.names_in("model"):
        raise DamagedError(f"{store.uri(version)} has no model/config.json or no canary.json: it is incomplete")
    model = fetch_folder(store, manifest, "model", cache, fetching=fetching)
    model_files.check(model, [path.relative_to(model).as_posix() for path in model.rglob("*")])
    has_state = state and manifest.names_in("state")
    return Checkpoint(
        version=PolicyVersion(version),
        number=PolicyVersion(version).number,
        model=model,
        state=fetch_folder(store, manifest, "state", cache, fetching=fetching) if has_state else None,
        canary=Canary(**json.loads(fetch(store, manifest, "canary.json", cache).read_text())),
        manifest=manifest,
    )
