"""Whether the store's logs are whole, and the catalog made whole again.

Elsewhere versions are found by the catalog and never by listing. Here the store is listed, so that what the catalog
has lost, or never had (stores from before it was kept), is found all the same.
"""

import hashlib
import re
import uuid
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from storage import catalog, layout, manifests
from storage.logs import Log
from storage.seal import seal
from storage.store import StorageError, StorageUnavailableError, Store
from storage.verify import Finding

_READERS = 16
_ALIASES = layout.alias("")
_ENTRY = re.compile(rf"(?P<log>{layout.CATALOG}|{_ALIASES}.+|{layout.lease('[^/]+')})/(?P<number>\d{{8}})\.json")


@dataclass(slots=True)
class Survey:
    """What a listing of the store tells."""

    versions: list[str] = field(default_factory=list)  # those with a manifest
    findings: list[Finding] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)  # numbers of the catalog's entries that cannot be read
    unlisted: list[str] = field(default_factory=list)  # versions that the catalog does not have
    unnamed: list[str] = field(default_factory=list)  # aliases that the catalog does not have


def survey(store: Store) -> Survey:
    """Look at every log, and at which versions there are.

    Raises:
        StorageUnavailableError: the store does not answer.
    """
    found, logs = _listed(store)
    entered = set()
    for log, numbers in logs.items():
        entries = _entries(store, log, max(numbers) + 1, found)
        if log == layout.CATALOG:
            entered = {entry["version"] for entry in entries if entry}
        elif log.startswith(_ALIASES) and entries[-1]:
            _look_at_alias(store, log, entries[-1], found)
    found.unlisted = [version for version in found.versions if version not in entered]
    aliases = [log.removeprefix(_ALIASES) for log in logs if log.startswith(_ALIASES)]
    found.unnamed = [name for name in aliases if name not in entered]
    for name in (*found.unlisted, *found.unnamed):
        problem = "is not in the catalog, so ls, lineage and gc do not see it: `python -m storage mend` enters it"
        found.findings.append(Finding(name, layout.CATALOG, problem))
    return found


def mend(store: Store, tell: Callable[[str], None] = lambda _: None) -> tuple[list[int], list[str]]:
    """Make the catalog whole; aliases and leases are left as they are.

    Returns:
        Numbers of lost entries, in whose place empty ones stand now; versions and aliases that were entered.
    """
    found = survey(store)
    for number in found.lost:
        _replace(store, number)
        tell(f"replaced entry {number}")
    missing = [manifest for version in found.unlisted if (manifest := _readable(store, version))]
    missing.sort(key=lambda manifest: manifest.created_at)
    for manifest in missing:
        parents = [parent.version for parent in manifest.parents]
        catalog.enter(store, manifest.version, manifest.kind, parents, manifest.nonce)
        tell(f"entered {manifest.version}")
    for name in found.unnamed:
        catalog.enter(store, name, "alias", [], "")
        tell(f"entered alias {name}")
    return found.lost, [*(manifest.version for manifest in missing), *found.unnamed]


def _listed(store: Store) -> tuple[Survey, dict[str, list[int]]]:
    """The versions, and by log the numbers of its entries."""
    found, logs = Survey(), defaultdict[str, list[int]](list)
    for item in store.walk():
        if match := _ENTRY.fullmatch(item.path):
            logs[match["log"]].append(int(match["number"]))
        elif version := layout.manifest_of(item.path):
            found.versions.append(version)
    return found, logs


def _entries(store: Store, prefix: str, length: int, found: Survey) -> list[dict[str, Any] | None]:
    """All entries of a log; where one is None, it is among the findings."""
    log = Log(store, prefix)

    def read(number: int) -> dict[str, Any] | str:
        try:
            return log.read(number)
        except StorageUnavailableError:
            raise
        except FileNotFoundError:
            return "is missing: later entries are there"
        except StorageError as error:
            return str(error)

    with ThreadPoolExecutor(_READERS) as readers:
        entries = list(readers.map(read, range(length)))
    for number, entry in enumerate(entries):
        if isinstance(entry, str):
            problem = entry + _remedy(prefix, number, newest=number == length - 1)
            found.findings.append(Finding(prefix, log.key(number), problem))
            found.lost += [number] if prefix == layout.CATALOG else []
    return [None if isinstance(entry, str) else entry for entry in entries]


def _remedy(log: str, number: int, newest: bool) -> str:
    if log == layout.CATALOG:
        return "; `python -m storage mend` replaces it"
    if log.startswith(_ALIASES) and newest:
        name = log.removeprefix(_ALIASES)
        return f"; `python -m storage alias set {name} VERSION --expect {number}` points the alias somewhere again"
    return ""


def _look_at_alias(store: Store, log: str, entry: dict[str, Any], found: Survey) -> None:
    try:
        digest = hashlib.sha256(manifests.read_bytes(store, entry["version"])).hexdigest()
    except StorageUnavailableError:
        raise
    except StorageError as error:
        found.findings.append(Finding(log, layout.manifest(entry["version"]), f"the alias points there: {error}"))
    else:
        if digest != entry["sha256"]:
            problem = "was changed since the alias was pointed at it"
            found.findings.append(Finding(log, layout.manifest(entry["version"]), problem))


def _readable(store: Store, version: str) -> manifests.Manifest | None:
    """None for a damaged manifest, which `verify` tells of."""
    try:
        return manifests.find(store, version)
    except StorageUnavailableError:
        raise
    except StorageError:
        return None


def _replace(store: Store, number: int) -> None:
    log = Log(store, layout.CATALOG)
    nothing = seal({"kind": catalog.LOST, "version": "", "parents": [], "attempt": "", "nonce": uuid.uuid4().hex})
    if store.create(log.key(number), nothing):
        return
    try:
        log.read(number)  # another may have filled the gap
    except StorageUnavailableError:
        raise
    except StorageError:
        store.write(log.key(number), nothing)
