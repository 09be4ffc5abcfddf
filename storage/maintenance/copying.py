"""Copies a run to another root, with everything that it needs there to be continued, verified and audited.

These are the versions of the run, those that their manifests name (such as problem sets and exclusions), and everything
that these were made from, of whatever run; of a `flows.fit` also the scores and the runs of its data sets. Besides,
metrics, report, logs, and the aliases that point at the run.
Objects keep their keys, and manifests their bytes, so lineage and hashes stay valid. Left out are the shards of a
killed rollout, which is played again.

A version is committed there as by its writer (`storage.versions.drafts`): data objects, entry of the catalog, manifest.
Before that, each data object is read back and compared with its sha256. So a copy that was killed is finished by the
next one, and one that is repeated adds what is new.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from storage import layout, visible
from storage.errors import ConflictError, DamagedError, StorageError, first_few
from storage.logs import catalog
from storage.logs.leases import Lease
from storage.maintenance.verify import PrintLine
from storage.objects.store import Store, in_parallel
from storage.processes.folder import TemporaryFolder
from storage.versions import aliases, fetch, lineage, manifests


def copy_run(source: Store, target: Store, run: str, progress: PrintLine = lambda _: None) -> list[manifests.Manifest]:
    """Copy `run` to `target`, under the lease that it has there; return the manifests of what `target` lacked.

    Raises:
        StorageError: there is no such run, or a link in it leads to what those who read the copy may not read.
        DamagedError: the run cannot be copied whole, or an object did not arrive whole.
        ConflictError: `target` has a run of this name that went another way, or that is being written.
    """
    moves = aliases.newest(source)
    needed = _needed(source, run)  # after the aliases, so that it has what they point at
    with Lease(target, run, label="cp") as lease:
        there = in_parallel(lambda manifest: manifests.find(target, manifest.version), needed)
        pairs = [*zip(needed, there, strict=True)]
        written = (version for version in _versions(target, run) if not layout.is_written_without_lease(version))
        further = set(written).difference(manifest.version for manifest in needed)
        _refuse(target, [*sorted(further), *(own.version for own, other in pairs if other not in (None, own))])
        home = Path(source.path(f"runs/{run}")).resolve()  # it may be a link to another disk
        for folder in ("metrics", "report", "logs"):  # which are no versions: no hash is known, and they are replaced
            for item in source.walk(f"runs/{run}/{folder}"):
                if not Path(source.path(item.path)).resolve().is_relative_to(home):
                    raise StorageError(f"{source.uri(item.path)} is a link out of runs/{run}: cp does not follow it")
                target.write(item.path, source.read(item.path))
        new = [manifest for manifest, found in pairs if not found]
        for number, manifest in enumerate(new, 1):
            progress(visible.Fleeting(f"{number}/{len(new)} {manifest.version}"))
            lease.check()
            owner = layout.run_of(manifest.version)
            with nullcontext() if owner in (None, run) else Lease(target, owner, label="cp", when_held="wait"):
                if manifests.find(target, manifest.version) != manifest:  # else another cp has brought it meanwhile
                    _copy_version(source, target, manifest)
        for name, move in moves.items():
            if name == layout.latest(run):
                aliases.advance(target, name, move.version, move.by)
            elif layout.run_of(move.version) == run and not aliases.current(target, name):
                aliases.move(target, name, move.version, None, move.reason, move.by)
    return new


def _versions(store: Store, run: str) -> list[str]:
    folder = layout.run(run).removesuffix("/run")  # refuses names that are none
    return [version for item in store.walk(folder) if (version := layout.manifest_of(item.path))]


def _needed(source: Store, run: str) -> list[manifests.Manifest]:
    """Return the manifests of everything that the copy of a run needs, oldest first."""
    if not (own := _versions(source, run)):
        raise StorageError(f"there is no run {run!r} in {source.root}: `python -m storage ls --kind run` lists them")
    named = {name for manifest in in_parallel(partial(manifests.read, source), own) for name in manifest.named}
    begun = manifests.find(source, layout.run(run))
    if data := begun and begun.knob("fit.data"):
        scores = lineage.scores_of(catalog.read_all(source))
        named.update(version for data_set in data for version in scores.get(data_set, ()))
        named.update(layout.run(name) for name in map(layout.run_of, data) if name)  # those imported have the tokenizer
    nodes = lineage.climb_down(source, [*own, *(name for name in sorted(named) if manifests.committed(source, name))])
    if problems := [f"{node.version}: {node.problem}" for node in nodes if node.problem]:
        raise DamagedError(f"run {run!r} cannot be copied whole: {first_few(problems)}")
    whole = in_parallel(partial(manifests.read, source), [node.version for node in nodes])
    return sorted(whole, key=lambda manifest: manifest.created_at)


def _refuse(target: Store, versions: Sequence[str]) -> None:
    """Raise ConflictError if the target has these versions, which are not the ones that are copied."""
    if versions:
        raise ConflictError(
            f"{target.root} has {first_few(versions)}, from which nothing that is copied was made: the run went on "
            "there, or its names are taken. Copy the run into a new root"
        )


def _copy_version(source: Store, target: Store, manifest: manifests.Manifest) -> None:
    for tombstone in (layout.tombstone(manifest.version, state=state) for state in (False, True)):
        if source.exists(tombstone):  # these data are gone there as here
            target.write(tombstone, b"")
    files = manifests.left(source, manifest)
    in_parallel(partial(_copy_file, source, target), files, threads=4)
    catalog.enter(target, manifest.version, manifest.kind, manifest.parent_names, manifest.nonce)
    manifests.refuse_lost(target, manifest.version, files)
    if not target.create(layout.manifest(manifest.version), manifests.read_bytes(source, manifest.version)):
        _refuse(target, [manifest.version])


def _copy_file(source: Store, target: Store, file: manifests.File) -> None:
    """Copy a data object, and read it back."""
    with TemporaryFolder() as folder:
        target.put(file.path, fetch.fetch_file(source, file, folder / "here"))
        fetch.fetch_file(target, file, folder / "there")
