"""Data objects of a version as local files, never without a look at size and hash."""

import re
import uuid
from collections.abc import Collection, Iterable
from pathlib import Path

from storage import layout
from storage.errors import DamagedError, StorageError
from storage.objects import cache
from storage.objects.keys import check_key
from storage.objects.store import Store, sha256
from storage.versions.manifests import File, Manifest

_PASSED_OVER = re.compile(r"\..+\.[0-9a-f]{8}\.(part|tmp)|\.nfs[0-9a-f]+")
"""Names of files that nobody loads: what a killed download or upload left, and what NFS keeps of a file that was
deleted while a process had it open."""
_NAMED = 3  # files that a message spells out


def fetch(store: Store, manifest: Manifest, name: str, folder: Path) -> Path:
    """A local copy of the file `name` of a version, its size and hash checked.

    On a local root the object itself is returned, so nothing is copied; treat it as read-only.

    Raises:
        StorageError: the object is missing or is not what the manifest says.
    """
    file = next((file for file in manifest.files if file.name == name), None)
    if file is None:
        raise DamagedError(f"{manifest.version} has no file {name!r}; it has {[f.name for f in manifest.files]}")
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


def fetch_folder(store: Store, manifest: Manifest, area: str, cache: Path, leave_out: Collection[str] = ()) -> Path:
    """A local folder that holds the files `<area>/…` of a version, checked, and nothing else.

    Libraries load a folder by looking for names of their own: a file more would be loaded, too, and no hash would
    tell. This looks at the folder when the files are checked, and so protects as they do: who changes it while it is
    being loaded is not found.

    Args:
        store: where the version lies.
        manifest: of the version.
        area: the folder's name in the version, such as `model`.
        cache: where objects of a remote root are kept.
        leave_out: endings of files that are not needed; they may be absent.

    Raises:
        StorageError: an object is missing or damaged, or a file lies there that the manifest does not name.
    """
    files = [file for file in manifest.files if file.name.startswith(f"{area}/")]
    attempts = {file.path.removesuffix(f"/{file.name}") for file in files}
    if len(attempts) != 1:
        raise DamagedError(f"{store.uri(manifest.version)}: its files of {area}/ are none, or not in one folder")
    for file in files:
        if not file.name.endswith(tuple(leave_out)):
            fetch_file(store, file, cache)
    (attempt,) = attempts
    folder = (Path(store.path(attempt)) if store.is_local else cache / attempt) / area
    if found := strays_in(folder, (file.name.removeprefix(f"{area}/") for file in files)):
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        raise DamagedError(
            f"{store.uri(manifest.version)}: its manifest does not name {', '.join(found[:_NAMED])}{more} in {folder}, "
            "and what loads the folder would load that, too. Move it elsewhere, or delete it"
        )
    return folder


def strays_in(folder: Path, names: Iterable[str]) -> list[str]:
    """Names of what lies in `folder` but is none of the files `names`; a link to a folder counts as a file."""
    known = set(names)
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    relative = sorted(path.relative_to(folder).as_posix() for path in found if not _PASSED_OVER.fullmatch(path.name))
    return [name for name in relative if name not in known]


def strays(store: Store, manifest: Manifest) -> list[str]:
    """Keys of objects among the data of a version that its manifest does not name. Of a remote root, it lists.

    What killed attempts left lies in folders of their own and is none of them; `gc` deletes both when they are old.
    """
    folder, named = f"{manifest.version}/{manifest.nonce}", {file.path for file in manifest.files}
    if store.is_local:
        inside = (key.removeprefix(f"{folder}/") for key in named)
        return [f"{folder}/{name}" for name in strays_in(Path(store.path(folder)), inside)]
    return sorted(found.path for found in store.walk(folder) if found.path not in named)


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
    if store.exists(layout.tombstone(version)):
        return DamagedError(
            f"{store.uri(version)} was collected by gc: its manifest and lineage are kept, its data gone"
        )
    return DamagedError(f"{store.uri(file.path)} is missing though its manifest names it")


def check(store: Store, file: File, path: Path) -> None:
    """Compare the local copy `path` of an object with what the manifest says.

    Raises:
        StorageError: it is missing, of another size or of another hash.
    """
    if not path.is_file():  # a pipe or a device would be read for ever
        raise missing(store, file)
    _compare(store, file, path.stat().st_size, sha256(path))


def _compare(store: Store, file: File, size: int, digest: str) -> None:
    if size != file.bytes:
        raise DamagedError(f"{store.uri(file.path)} has {size} bytes, its manifest says {file.bytes}: it is damaged")
    if digest != file.sha256:
        raise DamagedError(f"{store.uri(file.path)} does not match the sha256 in its manifest: it is damaged")
