"""Copies a run to another root, with everything that it needs there to be continued, verified and audited.

These are the versions of the run, those that their manifests name (such as problem sets and exclusions), and everything
that these were made from, of whatever run. Other objects of the run (its report) and the aliases that point at it come
along. Objects keep their keys, and manifests their bytes, so lineage and hashes stay valid. Left out are the shards of
a killed rollout, which is played again.

A version is committed there as by its writer (`storage.versions.drafts`): data objects, entry of the catalog, manifest.
Before that, each data object is read back and compared with its sha256. So a copy that was killed is finished by the
next one, and one that is repeated adds what is new.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from storage import layout
from storage.errors import ConflictError, DamagedError, StorageError, first_few
from storage.logs import catalog
from storage.logs.leases import Lease
from storage.objects.store import Store, in_parallel
from storage.processes.folder import TemporaryFolder
from storage.version_names import RunVersion, version_of
from storage.versions import aliases, manifests
from storage.versions.fetch import fetch_file
from storage.versions.lineage import climb_down
from storage.versions.manifests import File, Manifest

_FILES_AT_ONCE = 4
_NAME = re.compile(rf'"((?:{"|".join(layout.AREAS)})/[^"]+)"')
_OF_A_VERSION = re.compile(r".*/(journal/\d{8}\.json|collected\.json|\.[^/]+\.tmp)")
"""Keys of a version besides its manifest and data; temporary files count as such."""


@dataclass(frozen=True, slots=True)
class Copied:
    """The work of one `copy_run`."""

    versions: list[str]  # copied now
    bytes: int
    there: int  # versions that the other root had already
    aliases: dict[str, bool]  # those that point at the run; False: elsewhere there, which was left alone


def copy_run(source: Store, target: Store, run: str, progress: Callable[[str], None] = lambda _: None) -> Copied:
    """Copy `run` to `target`, under the lease that it has there.

    Raises:
        StorageError: there is no such run, or both roots are the same.
        DamagedError: the run cannot be copied whole, or an object did not arrive whole.
        ConflictError: `target` has a run of this name that went another way, or that is being written.
    """
    if source.uri("x") == target.uri("x"):
        raise StorageError(f"{source.root} and {target.root} are the same root: give another one")
    moves = {name: aliases.current(source, name, length) for name, length in aliases.names(source).items()}
    needed = _needed(source, run)  # after the aliases, so that it has what they point at
    there = in_parallel(lambda manifest: manifests.find(target, manifest.version), needed)
    for manifest, found in zip(needed, there, strict=True):
        if found not in (None, manifest):
            raise _another(target, manifest.version)
    _refuse_continued(source, target, run, {manifest.version for manifest in needed})
    new = [manifest for manifest, found in zip(needed, there, strict=True) if not found]
    with _leased(target, run, max(manifest.fence or 0 for manifest in needed)) as lease:
        for manifest in new:
            progress(f"{manifest.version}: {len(manifest.files)} objects, {manifest.bytes:,} bytes")
            _copy_version(source, target, manifest, lease)
        for key in _others(source, run):
            _copy_object(source, target, key)
        pointing = {name: move for name, move in moves.items() if move and layout.run_of(move.version) == run}
        pointed = {name: _point(target, name, move) for name, move in pointing.items()}
    versions, size = [manifest.version for manifest in new], sum(manifest.bytes for manifest in new)
    return Copied(versions, size, len(needed) - len(new), pointed)


def _needed(source: Store, run: str) -> list[Manifest]:
    """Return the manifests of everything that the copy of a run needs, oldest first."""
    folder = RunVersion(layout.run(run)).removesuffix("/run")  # its check refuses names that are none
    found = [version for item in source.walk(folder) if (version := layout.manifest_of(item.path))]
    if not found:
        raise StorageError(f"there is no run {run!r} in {source.root}: `python -m storage ls --kind run` lists them")
    own = in_parallel(partial(manifests.read, source), found)
    texts = [json.dumps([manifest.metrics, manifest.config], ensure_ascii=False) for manifest in own]
    named = sorted({name for text in texts for name in _NAME.findall(text) if version_of(name)})
    nodes = climb_down(source, [*found, *(name for name in named if manifests.committed(source, name))])
    if problems := [f"{node.version}: {node.problem}" for node in nodes if node.problem]:
        raise DamagedError(f"run {run!r} cannot be copied whole: {first_few(problems)}")
    whole = in_parallel(partial(manifests.read, source), [node.version for node in nodes])
    return sorted(whole, key=lambda manifest: manifest.created_at)


def _refuse_continued(source: Store, target: Store, run: str, needed: set[str]) -> None:
    """Raise ConflictError if the target has versions of the run that the source lacks: its report is newer, too."""
    found = {version for item in target.walk(f"runs/{run}") if (version := layout.manifest_of(item.path))}
    if newer := sorted(version for version in found - needed if not layout.is_written_without_lease(version)):
        raise ConflictError(
            f"run {run!r} went on in {target.root}: it has {first_few(newer)}, which {source.root} lacks. Copy the run "
            "into a new root"
        )


def _another(target: Store, version: str) -> ConflictError:
    return ConflictError(
        f"{target.uri(version)} is another version of this name, from which nothing that is copied was made: "
        "copy the run into a new root"
    )


@contextmanager
def _leased(target: Store, run: str, least: int) -> Iterator[Lease]:
    """Hold the lease of the run, with a token of `least` at least: tokens go up from those in the copied manifests."""
    while True:
        with Lease(target, run, label="cp") as lease:
            if lease.token >= least:
                yield lease
                return


def _copy_version(source: Store, target: Store, manifest: Manifest, lease: Lease) -> None:
    tombstone = layout.tombstone(manifest.version)
    if source.exists(tombstone):  # its data are gone there as here
        _copy_object(source, target, tombstone)
    else:
        in_parallel(partial(_copy_file, source, target), manifest.files, _FILES_AT_ONCE)
    catalog.enter(target, manifest.version, manifest.kind, manifest.parent_names, manifest.nonce)
    lease.check()
    if not target.create(layout.manifest(manifest.version), manifests.read_bytes(source, manifest.version)):
        raise _another(target, manifest.version)


def _copy_file(source: Store, target: Store, file: File) -> None:
    """Copy a data object, unless an earlier copy has done so, and read it back."""
    scratch = TemporaryFolder()
    try:
        here, there = scratch.path / "here", scratch.path / "there"
        try:
            fetch_file(target, file, there)
        except DamagedError:  # it is not there yet, or was damaged
            target.put(file.path, fetch_file(source, file, here))
            fetch_file(target, file, there)
    finally:
        scratch.remove()


def _others(source: Store, run: str) -> list[str]:
    """Return the keys of a run's objects that belong to no version, such as its report."""
    keys = [item.path for item in source.walk(f"runs/{run}")]
    of_versions = (layout.data_of, layout.manifest_of, _OF_A_VERSION.fullmatch)
    return [key for key in keys if not any(belongs(key) for belongs in of_versions)]


def _copy_object(source: Store, target: Store, key: str) -> None:
    """Copy a small object that no manifest names, or replace it, and read it back."""
    target.write(key, data := source.read(key))
    if target.read(key) != data:
        raise DamagedError(f"{target.uri(key)} is not as it was written: it is damaged, or another process writes it")


def _point(target: Store, name: str, move: aliases.Move) -> bool:
    """Point an alias as it does at the source; return False if it points elsewhere, which is left to the user."""
    if name == layout.latest(layout.run_of(move.version) or ""):
        aliases.advance(target, name, move.version, move.by)
    if not (newest := aliases.current(target, name)):
        newest = aliases.move(target, name, move.version, None, move.reason, move.by)
    return newest.version == move.version
