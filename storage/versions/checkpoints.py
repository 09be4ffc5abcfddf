"""Checkpoints: versions with folders and a canary.

model/          a transformers folder: config.json, model.safetensors, tokenizer files
adapter/        with `policy.lora`: the adapter's weights and adapter_config.json, as peft reads them. Policy version 0
                has model/, too. Later versions have none: their manifests name version 0 as their base
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
from storage.versions import aliases, drafts, model_files
from storage.versions.fetch import Fetching, fetch, fetch_all, fetch_folder
from storage.versions.manifests import Manifest, as_parent, read, refuse_collected


@dataclass(frozen=True, slots=True)
class Canary:
    """A fixed token sequence and the trainer's logprobs of it at temperature 1.

    Example: Canary(token_ids=[3, 1, 2], logprobs=[-4.1, -3.9])
    """

    token_ids: list[int]  # N
    logprobs: list[float]  # N - 1: of each of token_ids[1:], given the tokens before it


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A policy version as local files: a committed one, verified, or one that was made just now."""

    version: PolicyVersion
    number: int  # policy version: updates committed before it
    model: Path  # weights in float32; if the version is an adapter, those of its base
    state: Path | None  # None if the checkpoint has no state, or if the caller did not ask for it
    canary: Canary
    attempt: str  # the nonce of the draft that it was, or will be, committed from
    committed: Manifest | None  # None if it is not committed yet
    adapter: Path | None = None  # what is added to `model`
    base: Manifest | None = None  # of the version that has `model`, if it is another one

    @property
    def manifest(self) -> Manifest:
        """The manifest of a committed version."""
        assert self.committed
        return self.committed

    @property
    def of_model(self) -> Manifest:
        """The manifest that names the files of `model`."""
        return self.base or self.manifest

    @property
    def base_number(self) -> int:
        """The policy version whose weights `model` has."""
        return PolicyVersion(self.base.version).number if self.base else self.number


def commit(
    store: Store,
    version: str,
    model: Path,
    state: Path | None,
    canary: Canary,
    provenance: drafts.Provenance,
    parents: Sequence[str],
    metrics: dict[str, Any],
    adapter: Path | None = None,
) -> Manifest:
    """Commit the folders as the checkpoint `version`."""
    with drafts.Draft(store, version, "checkpoint") as draft:
        for folder, name in ((model, "model"), (adapter, "adapter"), (state, "state")):
            if folder:
                draft.add_folder(folder, name)
        add_canary(draft, canary)
        return draft.commit(provenance, parents, metrics)


def add_canary(draft: drafts.Draft, canary: Canary) -> None:
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


def manifest_of_model(store: Store, manifest: Manifest) -> Manifest:
    """Return the manifest of the version that has a checkpoint's model/: its own, or that of an adapter's base.

    Raises:
        DamagedError: the base is missing, or is not the one that the adapter was trained on.
    """
    if not (base := manifest.base):
        return manifest
    if (digest := as_parent(store, base.version).sha256) != base.sha256:
        raise DamagedError(
            f"{store.uri(manifest.version)} is an adapter of {base.version} with the sha256 {base.sha256}, but that "
            f"version now has {digest}: on other weights it would be another policy. Restore that version"
        )
    return read(store, base.version)


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
    manifest, adapter = _read_manifest(store, version), None
    of_model = manifest_of_model(store, manifest)
    if "canary.json" not in {file.name for file in manifest.files} or "config.json" not in of_model.names_in("model"):
        raise DamagedError(f"{store.uri(version)} has no model/config.json or no canary.json: it is incomplete")
    model = fetch_folder(store, of_model, "model", cache, fetching=fetching)
    model_files.check(model, [path.relative_to(model).as_posix() for path in model.rglob("*")])
    if manifest.base or manifest.names_in("adapter"):
        adapter = fetch_folder(store, manifest, "adapter", cache, fetching=fetching)
        model_files.read_adapter(adapter)
    has_state = state and manifest.names_in("state")
    return Checkpoint(
        version=PolicyVersion(version),
        number=PolicyVersion(version).number,
        model=model,
        state=fetch_folder(store, manifest, "state", cache, fetching=fetching) if has_state else None,
        canary=Canary(**json.loads(fetch(store, manifest, "canary.json", cache).read_text())),
        attempt=manifest.nonce,
        committed=manifest,
        adapter=adapter,
        base=of_model if manifest.base else None,
    )
