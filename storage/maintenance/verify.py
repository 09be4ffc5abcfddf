"""Verifies versions: data objects against their manifests, and manifests against the hashes that their children name.

It reads every object once, one at a time. Objects of a remote root are downloaded to a temporary folder, which is
emptied after each version.
"""

import errno
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from storage import layout
from storage.errors import DamagedError, UnavailableError
from storage.objects.store import Store
from storage.version_names import KINDS
from storage.versions import checkpoints, contents, manifests, model_files
from storage.versions.fetch import fetch_file, strays
from storage.versions.lineage import Node, climb_down
from storage.versions.manifests import File, Manifest
from storage.versions.serving_copies import DELTA, SERVING, ServingCopy, restore

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem with an object of a version.

    Example: Finding("runs/demo/scores/000003/1f0c", "runs/demo/scores/000003/1f0c/9e…/part-00000.parquet", "has …")
    """

    version: str
    object: str  # its key
    problem: str


@dataclass(slots=True)
class Report:
    """The findings of `verify`, and how much it checked."""

    findings: list[Finding] = field(default_factory=list)
    versions: int = 0
    objects: int = 0  # data objects
    bytes: int = 0
    collected: int = 0  # versions, among `versions`, whose data gc deleted


def verify(
    store: Store,
    versions: Sequence[str],
    *,
    deep: bool = False,
    ancestors: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Check `versions` and, with `ancestors`, all their ancestors. Damage is reported, never raised.

    Args:
        store: the store of the versions.
        versions: the versions to check.
        deep: read every page and row of the data, and load the weights.
        ancestors: if False, check only that the manifests of the parents exist and have the hashes that children name.
        progress: called with the name of each version before it is checked.

    Raises:
        UnavailableError: the store does not answer.
    """
    nodes = climb_down(store, versions, None if ancestors else 1)
    wanted = [node for node in nodes if ancestors or node.depth == 0]
    report = Report(_broken(nodes) + _overtaken(nodes), versions=len(wanted))
    for number, node in enumerate(wanted, 1):
        if progress:
            progress(f"{number}/{len(wanted)} {node.version}")
        if node.kind:
            with TemporaryDirectory(prefix="verify-") as folder:
                _VersionCheck(store, node.version, Path(folder), deep, report).run()
    return report


def _broken(nodes: list[Node]) -> list[Finding]:
    return [Finding(node.version, layout.manifest(node.version), node.problem) for node in nodes if node.problem]


def _overtaken(nodes: list[Node]) -> list[Finding]:
    """Return versions whose writer had lost the lease of the run to the writer of a parent."""
    fences = {node.version: node.fence for node in nodes}
    return [
        Finding(
            node.version,
            layout.manifest(node.version),
            f"its fencing token is {node.fence}, but its parent {parent} has {fences[parent]}: its writer had lost the "
            "run to another writer",
        )
        for node in nodes
        for parent in node.parents
        if layout.run_of(parent) == layout.run_of(node.version)
        and node.fence is not None
        and (fences.get(parent) or 0) > node.fence
    ]


class _VersionCheck:
    """The check of one version."""

    def __init__(self, store: Store, version: str, folder: Path, deep: bool, report: Report) -> None:
        self._store, self._version, self._folder = store, version, folder
        self._deep, self._report = deep, report

    def run(self) -> None:
        try:
            manifest = manifests.read(self._store, self._version)
        except (DamagedError, OSError) as error:  # damaged since `climb_down` read it
            self._add(layout.manifest(self._version), str(error))
        else:
            self._check_manifest(manifest)

    def _check_manifest(self, manifest: Manifest) -> None:
        for problem in _manifest_problems(manifest):
            self._add(layout.manifest(self._version), problem)
        if self._store.exists(layout.tombstone(self._version)):
            self._report.collected += 1
        else:
            self._check_objects(manifest)

    def _check_objects(self, manifest: Manifest) -> None:
        before = len(self._report.findings)
        rows = contents.Rows(manifest.kind) if manifest.kind in contents.SCHEMAS and self._deep else None
        for file in manifest.files:
            self._report.objects += 1
            self._report.bytes += file.bytes
            for problem in self._object_problems(manifest, file, rows):
                self._add(file.path, problem)
        self._check_strays(manifest)
        if self._deep and manifest.kind == "checkpoint" and len(self._report.findings) == before:
            self._check_weights(manifest)
            self._check_deltas(manifest)

    def _check_strays(self, manifest: Manifest) -> None:
        try:
            keys = strays(self._store, manifest)
        except (DamagedError, OSError) as error:  # such as for a nonce that cannot be a part of a key
            self._add(layout.manifest(self._version), str(error))
        else:
            for key in keys:
                self._add(key, "is in the data folder of this version, but its manifest does not name it")

    def _object_problems(self, manifest: Manifest, file: File, rows: contents.Rows | None) -> list[str]:
        try:
            path = fetch_file(self._store, file, self._folder)
        except (DamagedError, OSError) as error:
            if isinstance(error, OSError) and error.errno in _DISK_FULL:
                raise
            return [str(error)]
        problems = self._content_problems(manifest.kind, file, path, rows)
        if not self._store.is_local and not (self._deep and file.name.startswith("model/")):
            path.unlink()
        return problems

    def _content_problems(self, kind: str, file: File, path: Path, rows: contents.Rows | None) -> list[str]:
        if kind in contents.SCHEMAS and file.name.endswith(".parquet"):
            return contents.parquet(path, kind, file.rows) or (rows.problems(path) if rows else [])
        if kind == "checkpoint" and file.name.endswith(".safetensors"):
            return contents.safetensors(path) or (_not_finite(path) if self._deep else [])
        if kind == "checkpoint" and file.name.startswith(f"{DELTA}/") and file.name.endswith(".arrow"):
            return contents.delta(path)
        if kind == "checkpoint" and file.name.startswith(("model/", f"{SERVING}/", f"{DELTA}/")):
            return model_files.problems(path)
        return contents.canary(path) if kind == "checkpoint" and file.name == "canary.json" else []

    def _check_weights(self, manifest: Manifest) -> None:
        from storage.versions.weights import canary_difference

        where = f"{self._version}/{manifest.nonce}/model"
        try:
            tolerance = manifest.number("inference.canary_tolerance")
            difference = canary_difference(checkpoints.open_checkpoint(self._store, self._version, self._folder))
        except (UnavailableError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - a checkpoint that cannot be loaded is a finding, whatever the error
            self._add(where, f"cannot be loaded: {error!r}")
        else:
            if not difference <= tolerance:  # also NaN
                self._add(where, f"its logprobs of the canary differ by {difference:.3g}, more than {tolerance:g}")

    def _check_deltas(self, manifest: Manifest) -> None:
        """Make the copy for servers from deltas, if gc has left what that needs."""
        copy = ServingCopy(self._store, manifest, self._folder)
        for name in sorted(copy.weights):
            if delta := copy.delta(name):
                try:
                    restore(copy, name)
                except DamagedError as error:
                    self._add(delta.path, str(error))

    def _add(self, key: str, problem: str) -> None:
        self._report.findings.append(Finding(self._version, key, problem))


def _not_finite(path: Path) -> list[str]:
    from safetensors import SafetensorError

    from storage.versions.weights import not_finite

    try:
        return [f"tensor {name} is not finite" for name in not_finite(path)]
    except (SafetensorError, RuntimeError, TypeError) as error:  # such as a number format that torch lacks
        return [f"its tensors cannot be read: {error}"]


def _manifest_problems(manifest: Manifest) -> list[str]:
    """Return the problems of an undamaged manifest, each as a sentence without its subject, the manifest."""
    problems = []
    if not KINDS[manifest.kind].is_place(manifest.version):
        problems.append(f"says that {manifest.version} is a {manifest.kind} version, but these are elsewhere")
    names = Counter(file.name for file in manifest.files)
    problems += [f"names {name} {count} times" for name, count in names.items() if count > 1]
    problems += [
        f"has {file.path} as the object of {file.name}" for file in manifest.files if not _has_right_key(manifest, file)
    ]
    return problems + (list(_checkpoint_problems(set(names))) if manifest.kind == "checkpoint" else [])


def _has_right_key(manifest: Manifest, file: File) -> bool:
    """Return whether the key of the object is <version>/<attempt>/<name>."""
    attempt = file.path.removeprefix(f"{manifest.version}/").removesuffix(f"/{file.name}")
    return "/" not in attempt


def _checkpoint_problems(names: set[str]) -> Iterator[str]:
    for name in sorted({"model/config.json", "canary.json"} - names):
        yield f"names no {name}"
    if not any(re.fullmatch(r"model/[^/]+\.safetensors", name) for name in names):
        yield "names no model/*.safetensors"
    for name in sorted(names):
        if model_files.PICKLE.fullmatch(name):
            yield f"names {name}, a pickle: loading it would run code"
