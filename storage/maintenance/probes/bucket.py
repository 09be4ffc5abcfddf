"""S3: uploads in parts, and settings of the bucket that work against the pipeline."""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from storage.maintenance.probes.place import Place, Probe, Wrong
from storage.objects.s3 import PART_BYTES, S3Backend
from storage.objects.store import Upload, sha256

_BYTES = 5 * PART_BYTES // 2  # more than two parts: less goes up in one
_ARCHIVES = ("GLACIER", "DEEP_ARCHIVE")


def _parts(place: Place) -> str:
    key = place.key("parts")
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        source, target = Path(folder) / "source", Path(folder) / "target"
        digest = _random(source)
        place.store.put(key, source)
        if (size := place.store.size(key)) != _BYTES:
            raise Wrong(f"{_BYTES} bytes were sent in parts, {size} are there")
        place.store.get(key, target)
        if sha256(target) != digest:
            raise Wrong("an object that was sent in parts comes back as another")
    return f"{_BYTES / 2**20:.0f} MiB went up in parts and came back the same"


def _random(path: Path) -> str:
    """Fill a file; returns its sha256."""
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
        listed = [found.id for found in place.store.uploads(place.folder)]
    finally:
        place.store.abort_upload(upload)
    if upload.id not in listed:
        raise Wrong("an upload under way is not listed")
    if upload.id in [found.id for found in place.store.uploads(place.folder)]:
        raise Wrong("an upload that was aborted is still listed")
    return "can be listed and aborted"


def _versioning(place: Place) -> str:
    state = _settings(place, "get_bucket_versioning").get("Status")
    return "on: what gc deletes stays as an old version, and costs" if state == "Enabled" else "off"


def _lifecycle(place: Place) -> str:
    rules = _settings(place, "get_bucket_lifecycle_configuration").get("Rules", [])
    prefix = place.store.path("x").removesuffix("x").partition("/")[2]
    harmful = [told for rule in rules if _concerns(rule, prefix) for told in _harm(rule)]
    if harmful:
        raise Wrong("; ".join(harmful))
    return f"{len(rules)} rules, none of them against what is committed" if rules else "no rules"


def _concerns(rule: dict[str, Any], prefix: str) -> bool:
    """Whether a rule is about objects like ours, which have no tags."""
    limits = rule.get("Filter") or {}
    limits = limits.get("And", limits)
    of = limits.get("Prefix", rule.get("Prefix", ""))
    tagged = "Tag" in limits or limits.get("Tags")
    return rule.get("Status") == "Enabled" and not tagged and (of.startswith(prefix) or prefix.startswith(of))


def _harm(rule: dict[str, Any]) -> Iterator[str]:
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
    kept = lock.get("Rule", {}).get("DefaultRetention", {})
    if kept:
        raise Wrong(f"new objects are locked: {', '.join(f'{name} {value}' for name, value in sorted(kept.items()))}")
    return "on, but new objects are not locked" if lock.get("ObjectLockEnabled") == "Enabled" else "off"


def _settings(place: Place, method: str) -> dict[str, Any]:
    """Asked once, since servers without such settings answer as if they were out of order."""
    return _backend(place).another(patience_s=0).settings(method, place.store.path("x"))


def _backend(place: Place) -> S3Backend:
    assert isinstance(place.store.backend, S3Backend)
    return place.store.backend


PROBES = [
    Probe("parts", _parts, "checkpoints cannot be stored"),
    Probe("unfinished uploads", _unfinished, "what killed uploads left costs for ever: `gc` cannot end it"),
    Probe("versioning", _versioning, "", refused=None),
    Probe("lifecycle", _lifecycle, "the bucket takes away what is committed", refused=None),
    Probe("object lock", _lock, "`gc --delete` fails", refused=None),
]
