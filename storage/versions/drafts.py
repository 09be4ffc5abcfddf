"""The commit protocol: data objects first, the manifest last.

Example: a `Draft` of version V = runs/demo/scores/000003/1f0c4a7b gets the nonce 9e41c0d2a7b3. These objects appear:

1. V/9e41c0d2a7b3/part-00000.parquet    `add` uploads each data object into the folder of this attempt
2. catalog/00000042.json                `commit` appends the attempt to the catalog (at its end; here 42 entries exist)
3. V/manifest.json                      `commit` checks the lease and creates it with put-if-absent: the version exists

Of two writers of one version the first wins. The second gets the winner's manifest. If the second holds the lease of
the run, nobody else should write: it gets ConflictError. A killed attempt leaves objects that no manifest names. `gc`
deletes them when nobody holds the lease of the run; where no such lease is needed, after a week.

The finished shards of a `JournaledDraft` outlive their writer: a killed rollout is continued, not repeated. After step
1 each shard is entered into the journal, the numbered log V/journal. A writer that continues the version takes over
the shards in it with an entry of its own. If the writer before is still alive, it then finds the next number taken and
stops. So no two writers mix their shards, and no episode is stored twice.
"""

import functools
import json
import logging
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import compress
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from storage import layout, version_names
from storage.errors import ConflictError, DamagedError, StorageError
from storage.logs import catalog, leases
from storage.logs.log import Log
from storage.objects.seal import newer, seal
from storage.objects.store import Store, in_parallel, sha256
from storage.processes.folder import TemporaryFolder
from storage.telemetry.spans import making, span
from storage.versions.fetch import fetch_file
from storage.versions.manifests import MANIFEST_VERSION, File, Manifest, as_parent, committed, read, refuse_lost

logger = logging.getLogger(__name__)
_AT_ONCE = 8
"""Number of files of a folder that are written and hashed at the same time."""


class Provenance(BaseModel):
    """The origin of a version: the resolved configuration, the user's code, the flow run, and the writer's lease."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    config: dict[str, Any]
    code: dict[str, str] = {}  # see `Manifest`
    prefect_run_id: str | None = None
    fence: leases.Lease | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    """A finished shard and the notes that its writer stores with it (`JournaledDraft`)."""

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

    def __init__(self, store: Store, version: str, kind: version_names.Kind, nonce: str | None = None) -> None:
        self.store, self.version, self.kind = store, version, kind
        self.nonce = nonce or new_nonce()
        self.files: list[File] = []
        self._sources: dict[str, Path] = {}
        self.awaits: Callable[[], object] = lambda: None
        """Waits for the commit of what this is made from, such as the policy that sampled it; called before a commit,
        and before shards can outlive this process."""
        self.adopted: list[File] = []
        """Files among `files` that are shards taken over from earlier attempts (`JournaledDraft`)."""
        self.notes: list[Any] = []
        """The notes of the adopted shards, in order."""
        self._folder = TemporaryFolder()
        self.scratch = self._folder.path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.remove()

    def add(self, path: Path, name: str, rows: int | None = None) -> File:
        """Hash and upload the local file `path` as `name`."""
        self.files.append(file := self._upload(path, name, rows))
        return file

    def _upload(self, path: Path, name: str, rows: int | None) -> File:
        key = f"{self.version}/{self.nonce}/{name}"
        with ThreadPoolExecutor(1) as hashing:  # during the upload, which mostly waits
            digest = hashing.submit(sha256, path)
            self.store.put(key, path)
        self._sources[name] = path
        return File(name=name, path=key, bytes=path.stat().st_size, rows=rows, sha256=digest.result())

    def accept(self, files: Iterable[File], nonce: str | None = None) -> None:
        """Take over files that other processes have added, sorted by name: under this nonce, or under their own one."""
        self.nonce = nonce or self.nonce
        self.files += sorted(files, key=lambda file: file.name)

    def add_shard(self, path: Path, name: str, rows: int, notes: list[Any]) -> File:
        """`add` a shard of a data set. A draft with a journal also stores `notes` (`JournaledDraft`)."""
        self.accept_shards([Shard(self._upload(path, name, rows), notes)])
        return self.files[-1]

    def accept_shards(self, shards: Sequence[Shard]) -> None:
        """`accept` the shards that other processes have written. A draft with a journal also stores their notes."""
        self.accept(shard.file for shard in shards)

    def discard(self) -> None:
        """Forbid later attempts to take over what was added. Does nothing here: only a journal allows it."""

    def add_folder(self, folder: Path, prefix: str) -> None:
        """`add` every file of `folder` as `<prefix>/<name>`, several at the same time."""
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        names = [f"{prefix}/{path.relative_to(folder).as_posix()}" for path in paths]
        self.files += in_parallel(lambda each: self._upload(*each, None), zip(paths, names, strict=True), _AT_ONCE)

    def hand_over(self, folder: Path) -> None:
        """Keep the added files in the cache `folder` of a remote root, too, so that they need not be fetched again."""
        for file in [] if self.store.is_local else self.files:
            source, target = self._sources.get(file.name), folder / file.path
            if source and source.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(source, target)
                except OSError:  # another file system
                    shutil.copyfile(source, target)

    def commit(
        self,
        provenance: Provenance,
        parents: Sequence[str],
        metrics: dict[str, Any] | None = None,
        base: str | None = None,
    ) -> Manifest:
        """Commit the version and return its manifest, which another writer may have created first.

        `base` is the checkpoint that an adapter changes.

        Raises:
            DamagedError: a parent was never committed, or its manifest is damaged; or something that was added is gone.
            ConflictError: this writer has lost the lease of the run; or, while it held the lease, another writer
                committed this version.
        """
        self.awaits()
        fence = None if layout.is_written_without_lease(self.version) else provenance.fence
        with span("commit", version=self.version, kind=self.kind, run=layout.run_of(self.version) or ""):
            manifest = Manifest(
                manifest_version=MANIFEST_VERSION,
                kind=self.kind,
                version=self.version,
                parents=[as_parent(self.store, parent) for parent in parents],
                files=self.files,
                code_version=code_version(),
                config=provenance.config,
                code=provenance.code,
                base=as_parent(self.store, base) if base else None,
                prefect_run_id=provenance.prefect_run_id,
                metrics=metrics or {},
                created_at=datetime.now(UTC),
                nonce=self.nonce,
                fence=fence.token if fence else None,
            )
            catalog.enter(self.store, self.version, self.kind, parents, self.nonce)
            if fence:
                fence.check()
            known = {file.path for file in self.adopted}  # which were read before
            refuse_lost(self.store, self.version, [file for file in self.files if file.path not in known])
            # Without code of the user's or a base, programs that do not know these fields still read the manifest.
            absent = {name for name in ("code", "base") if not getattr(manifest, name)}
            stored = manifest.model_dump_json(exclude=absent)
            created = self.store.create(layout.manifest(self.version), seal(json.loads(stored)))
            if not created and fence:
                raise ConflictError(
                    f"{self.store.uri(self.version)} was committed by another writer while this one held the run's "
                    "lease: this flow run stops; start it again to continue from the committed version"
                )
            return manifest if created else read(self.store, self.version)


@functools.cache
def code_version() -> str:
    """Return the git commit of the source tree (with `-dirty` if files were changed); `unknown` outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parents[2]), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return "unknown"
    return result.stdout.strip() or "unknown"


class JournaledDraft(Draft):
    """A draft that begins with the shards of earlier attempts, in `adopted`, and with their `notes`.

    Example: a writer with nonce 9e41… finishes two shards and is killed; a writer with nonce 77c2… continues. The
    entries of the journal are then

    0  {"attempt": "9e41…", "adopted": []}
    1  {"attempt": "9e41…", "shards": [{"file": {"name": "part-00000.parquet", …}, "notes": […]}]}
    2  {"attempt": "9e41…", "shards": [{"file": {"name": "part-00001.parquet", …}, "notes": […]}]}
    3  {"attempt": "77c2…", "adopted": ["<version>/9e41…/part-00000.parquet", "<version>/9e41…/part-00001.parquet"]}

    Earlier programs wrote `file` and `notes` of a single shard into the entry itself.

    Args:
        store: the store of the version.
        version: the version to write.
        kind: its kind.
        fence: the lease of the run, checked before each entry.
    """

    def __init__(self, store: Store, version: str, kind: version_names.Kind, fence: leases.Lease | None = None) -> None:
        super().__init__(store, version, kind)
        self._fence = fence
        self._log = Log(store, layout.journal(version))
        self._claim()

    def accept_shards(self, shards: Sequence[Shard]) -> None:
        """Take over shards that this or other processes have added, with one entry for all of them."""
        super().accept_shards(shards)
        self._enter({"shards": [{"file": shard.file.model_dump(), "notes": shard.notes} for shard in shards]})

    def discard(self) -> None:
        """Forbid later attempts to take over these shards, because their rows must be made again."""
        self._enter({"adopted": []})

    def _claim(self) -> None:
        """Take over all readable shards with one entry at the journal's end that lists them; retry if it grew."""
        while True:
            self._next = self._log.length()
            finished = list(shards(self.store, self.version, self._next).values())
            adopted = list(compress(finished, in_parallel(self._is_whole, finished)))
            if self._put({"adopted": [shard.file.path for shard in adopted]}):
                break
        self.adopted = [shard.file for shard in adopted]
        self.notes = [note for shard in adopted for note in shard.notes]
        self.files = list(self.adopted)

    def _is_whole(self, shard: Shard) -> bool:
        try:
            fetch_file(self.store, shard.file, self.scratch)
        except DamagedError as error:  # damaged, or collected by gc as a leftover
            logger.warning("%s; its rows are made again", error)
            return False
        return True

    def _enter(self, values: dict[str, Any]) -> None:
        self.awaits()
        if not self._put(values):
            raise ConflictError(
                f"{self.store.uri(self.version)}: another writer has taken over this version; two flow runs work on "
                "one run name. This one stops; nothing is lost"
            )

    def _put(self, values: dict[str, Any]) -> bool:
        if self._fence:
            self._fence.check()
        entered = self._log.put(self._next, {"attempt": self.nonce, **values})
        self._next += entered
        return entered


_JOURNALED = ("trajectories", "evaluation", "annotations")
"""The kinds of versions that take so long to make that they have a journal."""


@contextmanager
def stage(
    store: Store,
    version: version_names.Version,
    lease: leases.Lease | None = None,
    awaits: Callable[[], object] | None = None,
) -> Iterator[Draft | None]:
    """Make a version in this block, unless it is committed: then the block gets None in place of a draft.

    Example: with stage(store, layout.exclusions(digest)) as draft:
                 if draft:
                     write_rows(draft, EXCLUSION_SCHEMA, rows, 50_000)
                     draft.commit(provenance, parents, metrics)

    The block is traced. What takes long to make has a journal, if the writer holds the `lease` of its run: without the
    lease, two writers at once would take over each other's shards. `awaits` is that of the draft.
    """
    if committed(store, version):
        yield None
        return
    kind = version.kind
    has_journal = kind in _JOURNALED and lease and lease.run == version.run
    made = JournaledDraft(store, version, kind, lease) if has_journal else Draft(store, version, kind)
    made.awaits = awaits or made.awaits
    with made as draft, making(version):
        yield draft


def shards(store: Store, version: str, length: int | None = None) -> dict[str, Shard]:
    """Return the finished shards of an uncommitted version by path: those of its last writer and those it took over."""
    log, finished = Log(store, layout.journal(version)), dict[str, Shard]()
    numbers = range(log.length() if length is None else length)
    for content in in_parallel(lambda number: _read(log, number), numbers):
        if isinstance(content, dict):
            finished |= content
        else:
            finished = {path: finished[path] for path in content if path in finished}
    return finished


_PATHS, _SHARDS = TypeAdapter(list[str]), TypeAdapter(list[Shard])


def _read(log: Log, number: int) -> dict[str, Shard] | list[str]:
    """Return the shards of an entry by path, or the paths of the shards that its writer took over.

    A damaged entry may have rejected earlier shards, so none of them is used: it counts as one that took over nothing.

    Raises:
        StorageError: a newer program wrote the entry. Its shards are not lost, so they must not be made again.
    """
    try:
        entry = log.read(number)
        if "adopted" in entry:
            return _PATHS.validate_python(entry["adopted"])
        return {shard.file.path: shard for shard in _SHARDS.validate_python(entry.get("shards", [entry]))}
    except (DamagedError, ValidationError) as error:
        if unknown := newer(error):
            raise StorageError(f"{log.uri(number)} has {unknown}, which this code does not know: upgrade") from None
        logger.warning("%s; what was entered before %s is made again", error, log.uri(number))
        return []
