"""Data objects of a version as local files, never without a look at size and hash."""

import uuid
from pathlib import Path

from storage import cache, layout
from storage.manifests import File, Manifest
from storage.store import StorageError, Store, check_key, sha256


def fetch(store: Store, manifest: Manifest, name: str, folder: Path) -> Path:
    """A local copy of the file `name` of a version, its size and hash checked.

    On a local root the object itself is returned, so nothing is copied; treat it as read-only.

    Raises:
        StorageError: the object is missing or is not what the manifest says.
    """
    file = next((file for file in manifest.files if file.name == name), None)
    if file is None:
        raise StorageError(f"{manifest.version} has no file {name!r}; it has {[f.name for f in manifest.files]}")
    return fetch_file(store, file, folder)


def fetch_file(store: Store, file: File, folder: Path) -> Path:
    """See `fetch`."""
    if store.is_local:
        path = Path(store.path(file.path))
        check(store, file, path)
        return path
    path = folder / check_key(file.path)
    if _is_whole(file, path):  # a copy in the cache may have been damaged since
        cache.touch(path)
    else:
        _download(store, file, path)
    return path


def _download(store: Store, file: File, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        digest = store.get(file.path, partial)
        _compare(store, file, partial.stat().st_size, digest)
        partial.replace(path)
    except FileNotFoundError:
        raise missing(store, file) from None
    finally:
        partial.unlink(missing_ok=True)


def _is_whole(file: File, path: Path) -> bool:
    return path.exists() and path.stat().st_size == file.bytes and sha256(path) == file.sha256


def missing(store: Store, file: File) -> StorageError:
    """What to say of a data object that is not there."""
    version = file.path.removesuffix(f"/{file.name}").rsplit("/", 1)[0]
    if store.exists(layout.collected(version)):
        return StorageError(
            f"{store.uri(version)} was collected by gc: its manifest and lineage are kept, its data gone"
        )
    return StorageError(f"{store.uri(file.path)} is missing though its manifest names it")


def check(store: Store, file: File, path: Path) -> None:
    """Compare the local copy `path` of an object with what the manifest says.

    Raises:
        StorageError: it is missing, of another size or of another hash.
    """
    if not path.exists():
        raise missing(store, file)
    _compare(store, file, path.stat().st_size, sha256(path))


def _compare(store: Store, file: File, size: int, digest: str) -> None:
    if size != file.bytes:
        raise StorageError(f"{store.uri(file.path)} has {size} bytes, its manifest says {file.bytes}: it is damaged")
    if digest != file.sha256:
        raise StorageError(f"{store.uri(file.path)} does not match the sha256 in its manifest: it is damaged")
