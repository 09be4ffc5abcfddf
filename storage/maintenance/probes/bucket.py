"""Probes of S3: uploads in parts, and settings of the bucket that would harm the pipeline."""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from storage.maintenance.probes.place import Place, Probe, Wrong
from storage.objects.s3 import PART_BYTES, S3Backend
from storage.objects.store import Upload, sha256

_BYTES = 5 * PART_BYTES // 2  # more than two parts, because a small file is sent in one request
_ARCHIVES = ("GLACIER", "DEEP_ARCHIVE")


def _parts(place: Place) -> str:
    key = place.key("parts")
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        source, target = Path(folder) / "source", Path(folder) / "target"
        digest = _write_random(source)
        place.store.put(key, source)
        if (size := place.store.size(key)) != _BYTES:
            raise Wrong(f"{_BYTES} bytes were sent in parts, {size} were stored")
        place.store.get(key, target)
        if sha256(target) != digest:
            raise Wrong("an object that was sent in parts is read with other bytes")
    return f"{_BYTES / 2**20:.0f} MiB were sent in parts and read back unchanged"


def _write_random(path: Path) -> str:
    """Write `_BYTES` random bytes to a file; return its sha256."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for _ in range(_BYTES // 2**20):
            data = os.urandom(2**20)
            digest.update(data)
            file.write(data)
    return digest.hexdigest()


def _unfinished(place: Place) -> str:
    key = place.key("unfinished")
    begun = _backend(place).begin_upload(place.store.path(key))
    upload = Upload(key, begun.id, begun.begun)
    try:
        listed = [item.id for item in place.store.uploads(place.folder)]
    finally:
        place.store.abort_upload(upload)
    if upload.id not in listed:
        raise Wrong("an unfinished upload is not listed")
    if upload.id in [item.id for item in place.store.uploads(place.folder)]:
        raise Wrong("an upload that was aborted is still listed")
    return "can be listed and aborted"


def _versioning(place: Place) -> str:
    state = _settings(place, "get_bucket_versioning").get("Status")
    return "on: what gc deletes stays as an old version and still costs storage" if state == "Enabled" else "off"


def _lifecycle(place: Place) -> str:
    rules = _settings(place, "get_bucket_lifecycle_configuration").get("Rules", [])
    prefix = place.store.path("x").removesuffix("x").partition("/")[2]
    harmful = [harm for rule in rules if _concerns(rule, prefix) for harm in _harms(rule)]
    if harmful:
        raise Wrong("; ".join(harmful))
    return f"{len(rules)} rules, none of which affects committed versions" if rules else "no rules"


def _concerns(rule: dict[str, Any], prefix: str) -> bool:
    """Return whether a lifecycle rule applies to objects of this store, which have no tags."""
    limits = rule.get("Filter") or {}
    limits = limits.get("And", limits)
    target = limits.get("Prefix", rule.get("Prefix", ""))
    tagged = "Tag" in limits or limits.get("Tags")
    return rule.get("Status") == "Enabled" and not tagged and (target.startswith(prefix) or prefix.startswith(target))


def _harms(rule: dict[str, Any]) -> Iterator[str]:
    name = rule.get("ID", "a rule")
    expiry = rule.get("Expiration", {})
    if "Days" in expiry or "Date" in expiry:
        when = f"after {expiry['Days']} days" if "Days" in expiry else f"at {expiry['Date']}"
        yield f"{name} deletes objects {when}"
    for transition in rule.get("Transitions", []):
        if transition.get("StorageClass") in _ARCHIVES:
            yield f"{name} moves objects to {transition['StorageClass']}, where they cannot be read"


def _lock(place: Place) -> str:
    lock = _settings(place, "get_object_lock_configuration").get("ObjectLockConfiguration", {})
    retention = lock.get("Rule", {}).get("DefaultRetention", {})
    if retention:
        terms = ", ".join(f"{name} {value}" for name, value in sorted(retention.items()))
        raise Wrong(f"new objects are locked: {terms}")
    return "on, but new objects are not locked" if lock.get("ObjectLockEnabled") == "Enabled" else "off"


def _settings(place: Place, method: str) -> dict[str, Any]:
    """Read a setting of the bucket without retries, because servers without this setting may answer with an error."""
    return _backend(place).another(patience_s=0).settings(method, place.store.path("x"))


def _backend(place: Place) -> S3Backend:
    assert isinstance(place.store.backend, S3Backend)
    return place.store.backend


PROBES = [
    Probe("parts", _parts, "checkpoints cannot be stored"),
    Probe("unfinished uploads", _unfinished, "parts of killed uploads cost storage for ever: `gc` cannot abort them"),
    Probe("versioning", _versioning, "", refused=None),
    Probe("lifecycle", _lifecycle, "the bucket deletes or archives committed versions", refused=None),
    Probe("object lock", _lock, "`gc --delete` fails", refused=None),
]
