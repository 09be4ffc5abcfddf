"""Manifests: the commit records of versions. A version exists once it has a manifest. `drafts` writes manifests."""

import hashlib
import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from pydantic import AwareDatetime, BaseModel, ConfigDict

from configs import up_to_date
from storage import layout
from storage.errors import DamagedError, StorageError, first_few
from storage.objects.seal import newer, unseal
from storage.objects.store import Store, in_parallel
from storage.version_names import Kind as Kind

MANIFEST_VERSION = 2  # 2: fencing token, digest


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Parent(_Record):
    """A version from which this one was made, with the hash of its manifest."""

    version: layout.Key
    sha256: str


class File(_Record):
    """One data object; `path` is its key in the store, `name` its path in the version."""

    name: layout.Key
    path: layout.Key
    bytes: int
    rows: int | None
    sha256: str


class Manifest(_Record):
    """The commit record of one version.

    Example: {"manifest_version": 2, "kind": "scores", "version": "runs/demo/scores/000003/1f0c",
    "parents": [{"version": "runs/demo/trajectories/000003", "sha256": "9a…"}], "files": […], …}
    """

    manifest_version: int
    kind: Kind
    version: str  # key of the version's folder
    parents: list[Parent]
    files: list[File]
    config: dict[str, Any]  # resolved configuration, in the schema of the program that wrote it
    code_version: str
    prefect_run_id: str | None
    metrics: dict[str, Any]
    created_at: AwareDatetime
    nonce: str  # unique to the attempt
    code: dict[str, str] = {}  # sha256 of each file of the user's own code, and models beside the policy
    base: Parent | None = None  # of an adapter: the checkpoint whose weights it changes
    fence: int | None = None  # token of the run's lease; never smaller than a parent's, unless the run was copied

    @cached_property
    def settings(self) -> dict[str, Any]:
        """`config` in the schema of this program. Code that depends on a setting reads it from here."""
        return up_to_date(self.config)

    def knob(self, key: str) -> Any:
        """Return the value of a knob of `settings`, such as `inference.dtype`; None if there is no such knob."""
        value: Any = self.settings
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def number(self, key: str) -> float:
        """Return the value of a knob that is a number, such as `inference.canary_tolerance`.

        Raises:
            DamagedError: the value is not a number.
        """
        value = self.knob(key)
        if not isinstance(value, int | float):
            raise DamagedError(f"the configuration in the manifest of {self.version} has {key}={value!r}, not a number")
        return value

    @property
    def named(self) -> set[str]:
        """The versions that configuration and metrics name, such as a problem set, a teacher, data of `flows.fit`."""
        texts = re.findall(r'"([^"]*[/@][^"]*)"', json.dumps([self.config, self.metrics], ensure_ascii=False))
        return {version for text in texts if (version := layout.version_in(text))}

    @property
    def parent_names(self) -> list[str]:
        return [parent.version for parent in self.parents]

    def names_in(self, area: str) -> set[str]:
        """Return the names of the files `<area>/…`, without `<area>/`."""
        return {file.name.removeprefix(f"{area}/") for file in self.files if file.name.startswith(f"{area}/")}

    @property
    def rows(self) -> int:
        return sum(file.rows or 0 for file in self.files)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def committed(store: Store, version: str) -> bool:
    """Return whether `version` exists."""
    return store.exists(layout.manifest(version))


def left(store: Store, manifest: Manifest) -> list[File]:
    """Return the files of a version that gc has not deleted."""
    if store.exists(layout.tombstone(manifest.version)):
        return [file for file in manifest.files if file.name == layout.SELECTION]
    whole = not store.exists(layout.tombstone(manifest.version, state=True))
    return [file for file in manifest.files if whole or not file.name.startswith(layout.STATE)]


def refuse_lost(store: Store, version: str, files: Sequence[File]) -> None:
    """Raise DamagedError if a version cannot be committed, because some of its files are not stored any more."""
    sizes = in_parallel(lambda file: store.find_size(file.path), files)
    if gone := [file.path for file, size in zip(files, sizes, strict=True) if size != file.bytes]:
        raise DamagedError(
            f"{store.uri(version)} was not committed: {first_few(gone)} was deleted or cut since it was written. Find "
            "out what deletes in this store; then the same command makes it again"
        )


def bytes_left(store: Store, manifest: Manifest) -> int:
    """Return the bytes of a version's files that gc has not deleted."""
    return sum(file.bytes for file in left(store, manifest))


def refuse_collected(store: Store, version: str, *, state: bool = False) -> None:
    """Raise DamagedError if gc has deleted the data of `version`, or, if it is needed, only its `state`."""
    for part, lost in ((False, "its data are"), (state, "its train state is")):
        if store.exists(layout.tombstone(version, state=part)):
            raise DamagedError(
                f"{store.uri(version)} was collected by gc: its manifest and lineage stay, {lost} gone "
                "(storage.keep says which checkpoints a run keeps whole)"
            )


def find(store: Store, version: str) -> Manifest | None:
    """Read the manifest of `version`; None if it was never committed."""
    try:
        return parse(store, version, store.read(layout.manifest(version)))
    except FileNotFoundError:
        return None


def read(store: Store, version: str) -> Manifest:
    """Read the manifest of `version`.

    Raises:
        DamagedError: the version has no manifest, or the manifest is damaged or of another version.
    """
    return parse(store, version, read_bytes(store, version))


def as_parent(store: Store, version: str) -> Parent:
    """Return `version` as a parent, with the hash of its manifest.

    Raises:
        DamagedError: it was never committed, or its manifest is damaged.
    """
    data = read_bytes(store, version)
    parse(store, version, data)
    return Parent(version=version, sha256=hashlib.sha256(data).hexdigest())


def read_bytes(store: Store, version: str) -> bytes:
    """Read the stored bytes of the manifest of `version`, whose sha256 its children name.

    Raises:
        DamagedError: it was never committed.
    """
    try:
        return store.read(layout.manifest(version))
    except FileNotFoundError:
        raise DamagedError(f"{store.uri(version)} was never committed: it has no manifest.json") from None


def parse(store: Store, version: str, data: bytes) -> Manifest:
    """Parse `data`, the stored bytes of the manifest of `version`.

    Raises:
        DamagedError: the manifest is damaged, of a newer format, or of another version.
    """
    where = store.uri(layout.manifest(version))
    try:
        values = json.loads(data)
        format_ = values["manifest_version"]
        if format_ > MANIFEST_VERSION:
            raise DamagedError(f"{where} has format {format_}; this code knows {MANIFEST_VERSION}: upgrade")
        manifest = Manifest.model_validate(values if format_ == 1 else unseal(data, where))
    except StorageError:
        raise
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        if unknown := newer(error):
            raise DamagedError(f"{where} has {unknown}, which this code does not know: upgrade") from None
        raise DamagedError(f"{where} is not a manifest, or is damaged: {error}") from None
    if manifest.version != version:
        raise DamagedError(f"{where} says it is version {manifest.version!r}: it was copied or moved by hand")
    if foreign := [file.path for file in manifest.files if not file.path.startswith(f"{version}/")]:
        raise DamagedError(f"{where} names objects of other versions: {foreign[:3]}")
    return manifest
