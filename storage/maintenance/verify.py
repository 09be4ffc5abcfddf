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
    broken = [Finding(node.version, layout.manifest(node.version), node.problem) for node in nodes if node.problem]
    report = Report(broken + _overtaken(nodes), versions=len(wanted))
    for number, node in enumerate(wanted, 1):
        if progress:
            progress(f"{number}/{len(wanted)} {node.version}")
        if node.kind:  # its manifest could be read
            with TemporaryDirectory(prefix="verify-") as folder:
                _VersionCheck(store, manifests.read(store, node.version), Path(folder), deep, report).run()
    return report


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

    def __init__(self, store: Store, manifest: Manifest, folder: Path, deep: bool, report: Report) -> None:
        self._store, self._manifest, self._folder = store, manifest, folder
        self._deep, self._report = deep, report

    def run(self) -> None:
        manifest, findings = self._manifest, self._report.findings
        self._add(layout.manifest(manifest.version), *_manifest_problems(manifest))
        if self._store.exists(layout.tombstone(manifest.version)):
            self._report.collected += 1
            return
        before = len(findings)
        rows = contents.Rows(manifest.kind) if manifest.kind in contents.SCHEMAS and self._deep else None
        for file in manifest.files:
            self._report.objects += 1
            self._report.bytes += file.bytes
            self._add(file.path, *self._object_problems(file, rows))
        try:
            for key in strays(self._store, manifest):
                self._add(key, "is in the data folder of this version, but its manifest does not name it")
        except (DamagedError, OSError) as error:  # such as for a nonce that cannot be a part of a key
            self._add(layout.manifest(manifest.version), str(error))
        if self._deep and manifest.kind == "checkpoint" and len(findings) == before:
            self._check_weights()
            self._check_deltas()

    def _object_problems(self, file: File, rows: contents.Rows | None) -> list[str]:
        try:
            path = fetch_file(self._store, file, self._folder)
        except (DamagedError, OSError) as error:
            if isinstance(error, OSError) and error.errno in _DISK_FULL:
                raise
            return [str(error)]
        problems = self._content_problems(self._manifest.kind, file, path, rows)
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

    def _check_weights(self) -> None:
        from storage.versions.weights import canary_difference

        version = self._manifest.version
        where = f"{version}/{self._manifest.nonce}/model"
        try:
            tolerance = self._manifest.number("inference.canary_tolerance")
            difference = canary_difference(checkpoints.open_checkpoint(self._store, version, self._folder))
        except (UnavailableError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - a checkpoint that cannot be loaded is a finding, whatever the error
            self._add(where, f"cannot be loaded: {error!r}")
        else:
            if not difference <= tolerance:  # also NaN
                self._add(where, f"its logprobs of the canary differ by {difference:.3g}, more than {tolerance:g}")

    def _check_deltas(self) -> None:
        """Make the copy for servers from deltas, if gc has left what that needs."""
        copy = ServingCopy(self._store, self._manifest, self._folder)
        for name in sorted(copy.weights):
            if delta := copy.delta(name):
                try:
                    restore(copy, name)
                except DamagedError as error:
                    self._add(delta.path, str(error))

    def _add(self, key: str, *problems: str) -> None:
        self._report.findings += [Finding(self._manifest.version, key, problem) for problem in problems]


def _not_finite(path: Path) -> list[str]:
    from safetensors import SafetensorError

    from storage.versions.weights import not_finite

    try:
        return [f"tensor {name} is not finite" for name in not_finite(path)]
    except (SafetensorError, RuntimeError, TypeError) as error:  # such as a number format that torch lacks
        return [f"its tensors cannot be read: {error}"]


def _manifest_problems(manifest: Manifest) -> Iterator[str]:
    """Yield the problems of an undamaged manifest, each as a sentence without its subject, the manifest."""
    if not KINDS[manifest.kind].is_place(manifest.version):
        yield f"says that {manifest.version} is a {manifest.kind} version, but these are elsewhere"
    names = Counter(file.name for file in manifest.files)
    for name, count in names.items():
        if count > 1:
            yield f"names {name} {count} times"
    for file in manifest.files:  # the key of an object is <version>/<attempt>/<name>
        if "/" in file.path.removeprefix(f"{manifest.version}/").removesuffix(f"/{file.name}"):
            yield f"has {file.path} as the object of {file.name}"
    if manifest.kind == "checkpoint":
        for name in sorted({"model/config.json", "canary.json"} - names.keys()):
            yield f"names no {name}"
        if not any(re.fullmatch(r"model/[^/]+\.safetensors", name) for name in names):
            yield "names no model/*.safetensors"
        for name in sorted(filter(model_files.PICKLE.fullmatch, names)):
            yield f"names {name}, a pickle: loading it would run code"
