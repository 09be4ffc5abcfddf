"""The commit protocol: data objects first, the manifest last. What has no manifest does not exist.

A version is drafted, its files are added under a folder of this attempt's own, and `commit`
creates `<version>/manifest.json` with put-if-absent. Of two writers one wins; the other gets the
winner's manifest. A killed attempt leaves objects that no manifest names.
"""

import hashlib
import subprocess
import tempfile
import uuid
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from storage.store import StorageError, Store, sha256

MANIFEST_VERSION = 1

Kind = Literal["run", "problems", "checkpoint", "trajectories", "scores", "evaluation"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Parent(_Record):
    """A version that this one was made from, and the hash of its manifest."""

    version: str
    sha256: str


class File(_Record):
    """One data object; `path` is a key under the store's root, `name` its place in the version."""

    name: str
    path: str
    bytes: int
    rows: int | None
    sha256: str


class Provenance(_Record):
    """What made a version: the resolved configuration and the flow run it happened in."""

    config: dict[str, Any]
    prefect_run_id: str | None = None


class Manifest(_Record):
    """The commit record of one version.

    Example: {"manifest_version": 1, "kind": "scores", "version": "runs/demo/scores/000003/1f0c",
    "parents": [{"version": "runs/demo/trajectories/000003", "sha256": "9a…"}], "files": […], …}
    """

    manifest_version: int
    kind: Kind
    version: str  # key of the version's folder
    parents: list[Parent]
    files: list[File]
    config: dict[str, Any]  # resolved configuration
    code_version: str
    prefect_run_id: str | None
    metrics: dict[str, Any]
    created_at: datetime
    nonce: str  # unique to the attempt

    @property
    def rows(self) -> int:
        return sum(file.rows or 0 for file in self.files)


def _key(version: str) -> str:
    return f"{version}/manifest.json"


def committed(store: Store, version: str) -> bool:
    """Whether `version` exists."""
    return store.exists(_key(version))


def read(store: Store, version: str) -> Manifest:
    """The manifest of `version`.

    Raises:
        StorageError: there is none, or it is not a manifest of this version.
    """
    return _parse(store, version, _read_bytes(store, version))


def as_parent(store: Store, version: str) -> Parent:
    """`version` as a parent, with its manifest's hash."""
    return Parent(version=version, sha256=hashlib.sha256(_read_bytes(store, version)).hexdigest())


def _read_bytes(store: Store, version: str) -> bytes:
    try:
        return store.read(_key(version))
    except FileNotFoundError:
        raise StorageError(f"{store.uri(version)} was never committed: it has no manifest.json") from None


def _parse(store: Store, version: str, data: bytes) -> Manifest:
    where = store.uri(_key(version))
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        raise StorageError(f"{where} is not a manifest: {error}") from None
    if manifest.version != version:
        raise StorageError(f"{where} says it is version {manifest.version!r}: it was copied or moved by hand")
    if manifest.manifest_version > MANIFEST_VERSION:
        raise StorageError(
            f"{where} has format {manifest.manifest_version}; this code knows {MANIFEST_VERSION}: upgrade"
        )
    return manifest


class Draft:
    """A version being written; nobody sees it before `commit`.

    Use as a context manager: `scratch` is a temporary folder for files on their way to the store.
    """

    def __init__(self, store: Store, version: str, kind: Kind) -> None:
        self.store, self.version, self.kind = store, version, kind
        self.nonce = uuid.uuid4().hex[:12]
        self._files: list[File] = []
        self._scratch = tempfile.TemporaryDirectory(prefix="draft-")
        self.scratch = Path(self._scratch.name)

    def __enter__(self) -> "Draft":
        return self

    def __exit__(self, *_: object) -> None:
        self._scratch.cleanup()

    def add(self, path: Path, name: str, rows: int | None = None) -> None:
        """Hash and upload the local file `path` as `name`."""
        key = f"{self.version}/{self.nonce}/{name}"
        file = File(name=name, path=key, bytes=path.stat().st_size, rows=rows, sha256=sha256(path))
        self.store.put(key, path)
        self._files.append(file)

    def add_folder(self, folder: Path, prefix: str) -> None:
        """`add` every file of `folder` as `<prefix>/<name>`."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.add(path, f"{prefix}/{path.relative_to(folder).as_posix()}")

    def commit(self, provenance: Provenance, parents: list[str], metrics: dict[str, Any] | None = None) -> Manifest:
        """Make the version exist; returns the manifest that stands, this attempt's or an earlier winner's."""
        manifest = Manifest(
            manifest_version=MANIFEST_VERSION,
            kind=self.kind,
            version=self.version,
            parents=[as_parent(self.store, parent) for parent in parents],
            files=self._files,
            config=provenance.config,
            code_version=code_version(),
            prefect_run_id=provenance.prefect_run_id,
            metrics=metrics or {},
            created_at=datetime.now(UTC),
            nonce=self.nonce,
        )
        created = self.store.create(_key(self.version), manifest.model_dump_json(indent=1).encode())
        return manifest if created else read(self.store, self.version)


def fetch(store: Store, manifest: Manifest, name: str, folder: Path) -> Path:
    """A local copy of the file `name` of a version, its size and hash checked.

    On a local root the object itself is returned, so nothing is copied; treat it as read-only.

    Raises:
        StorageError: the object is missing or is not what the manifest says.
    """
    file = next((file for file in manifest.files if file.name == name), None)
    if file is None:
        raise StorageError(f"{manifest.version} has no file {name!r}; it has {[f.name for f in manifest.files]}")
    path = Path(store.path(file.path)) if store.is_local else folder / file.path
    if not store.is_local and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _download(store, file, path)
    _check(store, file, path)
    return path


def _download(store: Store, file: File, path: Path) -> None:
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        store.fs.get_file(store.path(file.path), str(partial))
        partial.replace(path)
    except FileNotFoundError:
        raise StorageError(f"{store.uri(file.path)} is missing though its manifest names it") from None
    finally:
        partial.unlink(missing_ok=True)


def _check(store: Store, file: File, path: Path) -> None:
    if not path.exists():
        raise StorageError(f"{store.uri(file.path)} is missing though its manifest names it")
    size = path.stat().st_size
    if size != file.bytes:
        raise StorageError(f"{store.uri(file.path)} has {size} bytes, its manifest says {file.bytes}: it is damaged")
    if sha256(path) != file.sha256:
        raise StorageError(f"{store.uri(file.path)} does not match the sha256 in its manifest: it is damaged")


@cache
def code_version() -> str:
    """The commit of the source tree (`-dirty` where it was changed), or `unknown` outside of a checkout."""
    root = Path(__file__).parent.parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return "unknown"
    return result.stdout.strip() or "unknown"
