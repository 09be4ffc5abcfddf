"""Fetches data objects of a version as local files, and checks their size and hash each time.

The cache is a folder that keeps objects of a remote root under their keys, so that each is fetched once.
`trim_to_limit` deletes the files that were unused for longest.
"""

import fcntl
import logging
import os
import re
import time
import uuid
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from configs.storage import Storage
from storage import layout
from storage.errors import DamagedError, first_few
from storage.objects.store import Store, sha256
from storage.version_names import PolicyVersion
from storage.versions.manifests import File, Manifest, refuse_collected

logger = logging.getLogger(__name__)
RECENT_S = 600.0
"""A file that was used within so many seconds may still be in use, so it stays."""
Fetching = Callable[[Store, Sequence[File], Path], None]
"""Fetches files into a folder and checks them, as `fetch_all` does."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Endings of files that hold weights."""
_IGNORED = re.compile(r"\..+\.[0-9a-f]{8}\.(part|tmp)|\.nfs[0-9a-f]+")
"""Names of files that no library loads: leftovers of killed downloads and uploads, and files that NFS keeps because
they were deleted while a process had them open."""
_LOCKS = 32  # number of files that lock the downloads into a folder: each is for many objects


def fetch(store: Store, manifest: Manifest, name: str, folder: Path) -> Path:
    """Return a local copy of the file `name` of a version, with its size and hash checked.

    On a local root this is the object itself, not a copy; treat it as read-only.

    Raises:
        DamagedError: the object is missing, or its size or hash differs from the manifest.
    """
    file = next((file for file in manifest.files if file.name == name), None)
    if file is None:
        raise DamagedError(f"{manifest.version} has no file {name!r}; it has {[f.name for f in manifest.files]}")
    return fetch_file(store, file, folder)


def fetch_file(store: Store, file: File, folder: Path) -> Path:
    """Fetch `file` as `fetch` does."""
    path = Path(store.path(file.path)) if store.is_local else folder / file.path
    if store.is_local:
        if not path.is_file():  # reading a pipe or a device may never end
            raise _missing(store, file)
        _check(store, file, path)
    elif path.is_file() and path.stat().st_size == file.bytes and sha256(path) == file.sha256:  # or it is damaged
        os.utime(path)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")  # so that the file appears as a whole
        try:
            _check(store, file, partial, store.get(file.path, partial))
            partial.replace(path)
        except FileNotFoundError:
            raise _missing(store, file) from None
        finally:
            partial.unlink(missing_ok=True)
    return path


def _missing(store: Store, file: File) -> DamagedError:
    version = file.path.removesuffix(f"/{file.name}").rsplit("/", 1)[0]
    refuse_collected(store, version, state=file.name.startswith(layout.STATE))
    remedy = "bring it back"
    if not PolicyVersion.is_place(version):  # a checkpoint is the state of its run: it cannot be made again
        remedy += (
            f". If nothing was made from this version (python -m storage lineage {version} --up), delete its "
            "manifest.json, and it is made again"
        )
    return DamagedError(f"{store.uri(file.path)} is missing though its manifest names it: {remedy}")


def _check(store: Store, file: File, fetched: Path, digest: str = "") -> None:
    """Check the size first: to read a file with a hole of a terabyte would take an hour."""
    if (size := fetched.stat().st_size) != file.bytes:
        raise DamagedError(f"{store.uri(file.path)} has {size} bytes, its manifest says {file.bytes}: it is damaged")
    if (digest or sha256(fetched)) != file.sha256:
        raise DamagedError(f"{store.uri(file.path)} does not match the sha256 in its manifest: it is damaged")


def fetch_all(store: Store, files: Iterable[File], folder: Path) -> None:
    """Fetch files one after the other as `fetch` does. Of processes that share a folder, one downloads each file."""
    if store.is_local:
        for file in files:
            fetch_file(store, file, folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        with (folder / f".turn-object-{zlib.crc32(file.path.encode()) % _LOCKS}").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the end of the process releases it, too
            fetch_file(store, file, folder)


def fetch_folder(
    store: Store,
    manifest: Manifest,
    area: str,
    cache: Path,
    leave_out: Collection[str] = (),
    fetching: Fetching = fetch_all,
) -> Path:
    """Return a local folder that holds the files `<area>/…` of a version, checked, and nothing else.

    Libraries load whatever files they know in a folder. So they would load an extra file, too, and no hash would show
    it. This function checks the folder once, when it checks the files. It does not detect changes made while a library
    loads the folder.

    Args:
        store: the store of the version.
        manifest: the manifest of the version.
        area: the name of the folder in the version, such as `model`.
        cache: the folder that keeps objects of a remote root.
        leave_out: endings of files that are not needed; they may be absent.
        fetching: fetches and checks all files; processes that share a cache may deal them out.

    Raises:
        DamagedError: an object is missing or damaged, or the folder has a file that the manifest does not name.
    """
    files = [file for file in manifest.files if file.name.startswith(f"{area}/")]
    attempts = {file.path.removesuffix(f"/{file.name}") for file in files}
    if len(attempts) != 1:
        raise DamagedError(f"{store.uri(manifest.version)} has no files of {area}/, or has them in several folders")
    fetching(store, [file for file in files if not file.name.endswith(tuple(leave_out))], cache)
    attempt = attempts.pop()
    local = (Path(store.path(attempt)) if store.is_local else cache / attempt) / area
    if extra := strays_in(local, manifest.names_in(area)):
        raise DamagedError(
            f"the manifest does not name {first_few(extra)} in {local}, and libraries would load that, too. "
            "Move it elsewhere, or delete it"
        )
    return local


def strays_in(folder: Path, names: Iterable[str]) -> list[str]:
    """Return the names of files in `folder` that are not in `names`; a link to a folder counts as a file."""
    files = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    found = {path.relative_to(folder).as_posix() for path in files if not _IGNORED.fullmatch(path.name)}
    return sorted(found.difference(names))


def strays(store: Store, manifest: Manifest) -> list[str]:
    """Return the keys of objects in the data folder of a version that its manifest does not name.

    The folder is listed for this. Leftovers of killed attempts are in other folders and do not count. `gc` deletes
    both when they are old.
    """
    folder, named = f"{manifest.version}/{manifest.nonce}", {file.path for file in manifest.files}
    found = (item.path for item in store.walk(folder) if item.path not in named)
    return sorted(key for key in found if not _IGNORED.fullmatch(key.rpartition("/")[2]))


def scratch_of(folder: Path, run: str) -> Path:
    """Make and return the folder of a cache for a run's files before they are stored."""
    scratch = folder / "scratch" / run
    scratch.mkdir(parents=True, exist_ok=True)
    return scratch


def trim_to_limit(store: Store, storage: Storage, keep: Iterable[str] = ()) -> None:
    """Delete the files unused for longest from the cache of a remote root, until it has `storage.cache_gib` at most.

    Files of the versions in `keep` stay, and do not count.
    """
    if store.is_local:
        return
    folder, held = Path(storage.cache), tuple(f"{Path(storage.cache) / version}/" for version in keep)
    try:
        files = [path for area in layout.AREAS for path in (folder / area).rglob("*") if path.is_file()]
        loose = [path for path in files if not str(path).startswith(held)]
        by_use = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in loose)
        excess = sum(size for _, size, _ in by_use) - storage.cache_gib * 2**30
        for used_at, size, path in by_use:
            if excess <= 0 or used_at > time.time() - RECENT_S:
                break
            path.unlink(missing_ok=True)
            excess -= size
    except OSError as error:  # it must not end the stage, whose work is done
        logger.warning("storage.cache=%s was not trimmed to storage.cache_gib: %s", storage.cache, error)
