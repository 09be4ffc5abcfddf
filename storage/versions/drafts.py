"""The commit protocol: data objects first, the manifest last.

Example: a `Draft` of version V = runs/demo/scores/000003/1f0c4a7b gets the nonce 9e41c0d2a7b3. These objects appear:

1. V/9e41c0d2a7b3/part-00000.parquet    `add` uploads each data object into the folder of this attempt
2. catalog/00000042.json                `commit` appends the attempt to the catalog (at its end; here 42 entries exist)
3. V/manifest.json                      `commit` checks the lease and creates it with put-if-absent: the version exists

Of two writers of one version the first wins. The second gets the winner's manifest; if it holds the lease of the run,
where no other writer is expected, it gets ConflictError. A killed attempt leaves objects that no manifest names; `gc`
deletes them later. `journal` adds its own log, V/journal/<number>.json, with an entry after each shard of step 1.
"""

import functools
import json
import shutil
import subprocess
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from storage import layout
from storage.errors import ConflictError
from storage.logs import catalog
from storage.logs.fence import Fence
from storage.objects.seal import seal
from storage.objects.store import Store, sha256
from storage.processes.folder import TemporaryFolder
from storage.versions.manifests import MANIFEST_VERSION, File, Kind, Manifest, as_parent, read


class Provenance(BaseModel):
    """The origin of a version: the resolved configuration, the flow run, and the lease of the writer."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    config: dict[str, Any]
    prefect_run_id: str | None = None
    fence: Fence | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    """A finished shard and the notes that its writer stores with it (`storage.versions.journal`)."""

    file: File
    notes: list[Any]


def new_nonce() -> str:
    """Return the name of a folder for one attempt to make a version."""
    return uuid.uuid4().hex[:12]


class Draft:
    """A version being written. Readers do not see it before `commit`.

    Use it as a context manager. `scratch` is a temporary folder for files that will be uploaded. Other processes may
    add files to a draft: they make one with its `nonce`, and the owner, who commits, accepts their `files`.
    """

    def __init__(self, store: Store, version: str, kind: Kind, nonce: str | None = None) -> None:
        self.store, self.version, self.kind = store, version, kind
        self.nonce = new_nonce() if nonce is None else nonce
        self._files: list[File] = []
        self._sources: dict[str, Path] = {}
        self.adopted: list[File] = []
        """Files among `files` that are shards taken over from earlier attempts (`storage.versions.journal`)."""
        self.notes: list[Any] = []
        """The notes of the adopted shards, in order."""
        self._scratch = TemporaryFolder()
        self.scratch = self._scratch.path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._scratch.remove()

    @property
    def files(self) -> list[File]:
        """The files added so far."""
        return list(self._files)

    def add(self, path: Path, name: str, rows: int | None = None) -> File:
        """Hash and upload the local file `path` as `name`."""
        key = f"{self.version}/{self.nonce}/{name}"
        with ThreadPoolExecutor(1) as hashing:  # during the upload, which mostly waits
            digest = hashing.submit(sha256, path)
            self.store.put(key, path)
        file = File(name=name, path=key, bytes=path.stat().st_size, rows=rows, sha256=digest.result())
        self._files.append(file)
        self._sources[name] = path
        return file

    def accept(self, files: Iterable[File]) -> None:
        """Take over files that other processes have added under this nonce, sorted by name."""
        self._files += sorted(files, key=lambda file: file.name)

    def add_shard(self, path: Path, name: str, rows: int, notes: list[Any]) -> File:
        """`add` a shard of a data set. A draft with a journal also stores `notes` (`storage.versions.journal`)."""
        return self.add(path, name, rows)

    def accept_shards(self, shards: Sequence[Shard]) -> None:
        """`accept` the shards that other processes have written. A draft with a journal also stores their notes."""
        self.accept(shard.file for shard in shards)

    def discard(self) -> None:
        """Forbid later attempts to take over what was added. Does nothing here: only a journal allows it."""

    def add_folder(self, folder: Path, prefix: str) -> None:
        """`add` every file of `folder` as `<prefix>/<name>`."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.add(path, f"{prefix}/{path.relative_to(folder).as_posix()}")

    def hand_over(self, folder: Path) -> None:
        """Move the added files into the cache `folder` of a remote root, so that they need not be fetched again."""
        for file in [] if self.store.is_local else self._files:
            source, target = self._sources.get(file.name), folder / file.path
            if source and source.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(source, target)

    def commit(self, provenance: Provenance, parents: Sequence[str], metrics: dict[str, Any] | None = None) -> Manifest:
        """Commit the version and return its manifest, which another writer may have created first.

        Raises:
            DamagedError: a parent was never committed, or its manifest is damaged.
            ConflictError: this writer has lost the lease of the run; or, while it held the lease, another writer
                committed this version.
        """
        parent_records = [as_parent(self.store, parent) for parent in parents]
        manifest = Manifest(
            manifest_version=MANIFEST_VERSION,
            kind=self.kind,
            version=self.version,
            parents=parent_records,
            files=self._files,
            config=provenance.config,
            code_version=code_version(),
            prefect_run_id=provenance.prefect_run_id,
            metrics=metrics or {},
            created_at=datetime.now(UTC),
            nonce=self.nonce,
            fence=provenance.fence.token if provenance.fence else None,
        )
        catalog.enter(self.store, self.version, self.kind, parents, self.nonce)
        if provenance.fence:
            provenance.fence.check()
        created = self.store.create(layout.manifest(self.version), seal(json.loads(manifest.model_dump_json())))
        if not created and provenance.fence and layout.run_of(self.version):
            raise ConflictError(
                f"{self.store.uri(self.version)} was committed by another writer while this one held the run's lease: "
                "this flow run stops; start it again to continue from the committed version"
            )
        return manifest if created else read(self.store, self.version)


@functools.cache
def code_version() -> str:
    """Return the git commit of the source tree (with `-dirty` if files were changed); `unknown` outside a checkout."""
    root = Path(__file__).parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return "unknown"
    return result.stdout.strip() or "unknown"
