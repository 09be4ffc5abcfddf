"""Verifies versions, and checks and repairs the store's logs: catalog, aliases, leases and nights.

`verify` compares data objects with their manifests, and manifests with the hashes that their children name. It reads
every object once, one at a time. Objects of a remote root are downloaded to a temporary folder, which is emptied after
each version.

Other code finds versions in the catalog and the end of a log by probing. There a deleted entry can hide the entries
after it. `check_logs` lists the store instead. So it finds the entries that a log has lost, and those that it never had
(in stores from before the catalog existed). `repair` replaces lost entries of the catalog. A writer of another log
fills a gap by itself.
"""

import re
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.inference import FLOAT32_TOLERANCE
from storage import layout, version_names, visible
from storage.errors import DamagedError, UnavailableError
from storage.logs import catalog, nights
from storage.logs.log import ALIAS, LOST, Log
from storage.objects.seal import seal
from storage.objects.store import Store, in_parallel
from storage.processes.folder import TemporaryFolder
from storage.versions import aliases, checkpoints, contents, fetch, lineage, manifests, model_files
from storage.versions.manifests import File, Manifest

PrintLine = Callable[[str], object]
"""Prints a line when a part of the work is done or begins."""


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
    progress: PrintLine = lambda _: None,
    *,
    deep: bool = False,
    ancestors: bool = True,
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
    nodes = lineage.climb_down(store, versions, None if ancestors else 1)
    wanted = [node for node in nodes if ancestors or node.depth == 0]
    broken = [Finding(node.version, layout.manifest(node.version), node.problem) for node in nodes if node.problem]
    report = Report(broken, versions=len(wanted))
    for number, node in enumerate(wanted, 1):
        progress(visible.Fleeting(f"{number}/{len(wanted)} {node.version}"))
        if node.kind:  # its manifest could be read
            with TemporaryFolder() as folder:
                _check(store, manifests.read(store, node.version), folder, deep, report)
    return report


def _check(store: Store, manifest: Manifest, folder: Path, deep: bool, report: Report) -> None:
    """Check one version and add what is wrong to `report`; `folder` is for copies of a remote root's objects."""

    def add(key: str, problems: Iterable[str]) -> None:
        report.findings += [Finding(manifest.version, key, problem) for problem in problems]

    left = manifests.left(store, manifest)
    add(layout.manifest(manifest.version), _manifest_problems(manifest))
    if collected := bool(manifest.files) and store.exists(layout.tombstone(manifest.version)):
        report.collected += 1
        if not left:
            return
    for key, problem in _problems_beside(store, manifest, collected):
        add(key, [problem])
    before = len(report.findings)
    rows = contents.RowChecker(manifest.kind) if manifest.kind in contents.SCHEMAS and deep else None
    for file in left:
        report.objects += 1
        report.bytes += file.bytes
        try:
            path = fetch.fetch_file(store, file, folder)
        except (DamagedError, OSError) as error:
            if file in manifests.left(store, manifest):  # else its run has deleted it meanwhile
                add(file.path, [str(error)])
            continue
        add(file.path, _content_problems(manifest.kind, file, path, rows, deep))
        if not store.is_local and not (deep and file.name.startswith(("model/", "adapter/"))):
            path.unlink()
    if deep and not collected and manifest.kind == "checkpoint" and len(report.findings) == before:
        add(f"{manifest.version}/{manifest.nonce}/model", _weight_problems(store, manifest, folder))


def _problems_beside(store: Store, manifest: Manifest, collected: bool) -> Iterator[tuple[str, str]]:
    """Yield keys and problems of the base of an adapter, and of objects that no manifest names."""
    try:
        if not collected:
            checkpoints.manifest_of_model(store, manifest)
        for key in fetch.strays(store, manifest):
            yield key, "is in the data folder of this version, but its manifest does not name it"
    except (DamagedError, OSError) as error:  # such as for a nonce that cannot be a part of a key
        yield layout.manifest(manifest.version), str(error)


def _content_problems(kind: str, file: File, path: Path, rows: contents.RowChecker | None, deep: bool) -> list[str]:
    if kind in contents.SCHEMAS and file.name.endswith(".parquet"):
        return contents.parquet(path, kind, file.rows) or (rows.problems(path) if rows else [])
    if kind != "checkpoint":
        return []
    if file.name.endswith(".safetensors"):
        return contents.safetensors(path) or (_not_finite(path) if deep else [])
    if file.name == "canary.json":
        return contents.canary(path)
    return model_files.problems(path)


def _weight_problems(store: Store, manifest: Manifest, folder: Path) -> list[str]:
    """Load the weights and compare them with the canary."""
    from storage.versions.weights import canary_difference

    try:
        tolerance = float(manifest.knob("inference.canary_tolerance") or FLOAT32_TOLERANCE)
        difference = canary_difference(checkpoints.open_checkpoint(store, manifest.version, folder))
    except (UnavailableError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - a checkpoint that cannot be loaded is a finding, whatever the error
        return [f"cannot be loaded: {error!r}"]
    if difference <= tolerance:
        return []
    return [f"its logprobs of the canary differ by {difference:.3g}, more than {tolerance:g}"]  # also NaN


def _not_finite(path: Path) -> list[str]:
    from safetensors import SafetensorError

    from storage.versions.weights import not_finite

    try:
        return [f"tensor {name} is not finite" for name in not_finite(path)]
    except (SafetensorError, RuntimeError, TypeError) as error:  # such as a number format that torch lacks
        return [f"its tensors cannot be read: {error}"]


def _manifest_problems(manifest: Manifest) -> Iterator[str]:
    """Yield the problems of an undamaged manifest, each as a sentence without its subject, the manifest."""
    if not version_names.KINDS[manifest.kind].is_place(manifest.version):
        yield f"says that {manifest.version} is a {manifest.kind} version, but these are elsewhere"
    names = Counter(file.name for file in manifest.files)
    for name, count in names.items():
        if count > 1:
            yield f"names {name} {count} times"
    for file in manifest.files:  # the key of an object is <version>/<attempt>/<name>
        if "/" in file.path.removeprefix(f"{manifest.version}/").removesuffix(f"/{file.name}"):
            yield f"has {file.path} as the object of {file.name}"
    if manifest.kind == "checkpoint":
        folder, configuration = ("adapter", "adapter_config.json") if manifest.base else ("model", "config.json")
        for name in sorted({f"{folder}/{configuration}", "canary.json"} - names.keys()):
            yield f"names no {name}"
        if not any(re.fullmatch(rf"{folder}/[^/]+\.safetensors", name) for name in names):
            yield f"names no {folder}/*.safetensors"
        for name in sorted(filter(model_files.PICKLE.fullmatch, names)):
            yield f"names {name}, a pickle: loading it would run code"


Values = dict[str, Any]
_LOGS = re.compile("|".join((layout.CATALOG, layout.lease("[^/]+"), layout.retraining("[^/]+"))))
"""Prefixes of all logs but those of aliases."""
_REPAIR = "`python -m storage repair`"
_MISSING = "is missing, and hides later entries"


@dataclass(slots=True)
class LogReport:
    """The versions of a store and the problems of its logs, found by listing it."""

    versions: list[str] = field(default_factory=list)  # versions with a manifest
    findings: list[Finding] = field(default_factory=list)
    absent: list[Manifest] = field(default_factory=list)  # versions that the catalog lacks, oldest first
    lost: list[int] = field(default_factory=list)  # numbers of the catalog's missing or damaged entries


def check_logs(store: Store) -> LogReport:
    """Check every log, and find all versions.

    Raises:
        UnavailableError: the store does not answer.
    """
    report, logs = LogReport(), defaultdict[str, list[int]](list)
    for item in store.walk():
        if (entry := layout.entry_of(item.path)) and (_LOGS.fullmatch(entry[0]) or aliases.name_of(entry[0])):
            logs[entry[0]].append(entry[1])
        elif version := layout.manifest_of(item.path):
            report.versions.append(version)
    entered = _entries(store, layout.CATALOG, logs.pop(layout.CATALOG, []), report)
    report.lost = [number for number, entry in enumerate(entered) if entry is None]
    _check_versions(store, entered, report)
    for log, numbers in logs.items():
        last = _entries(store, log, numbers, report)[-1]
        if aliases.name_of(log) and last and (problem := _target_problem(store, last)):
            report.findings.append(Finding(log, layout.manifest(last["version"]), problem))
        elif log.startswith(layout.retraining("")) and not any(finding.version == log for finding in report.findings):
            try:
                nights.Nights(store, log.removeprefix(layout.retraining(""))).read()
            except DamagedError as error:
                report.findings.append(Finding(log, log, str(error)))
    return report


def _entries(store: Store, prefix: str, numbers: Sequence[int], report: LogReport) -> list[Values | None]:
    """Read all entries of a log, including those newer than the listing. Report lost ones, and return None for them."""
    log = Log(store, prefix)

    def read(number: int) -> Values | str:
        try:
            return log.read(number)
        except FileNotFoundError:
            return _MISSING
        except DamagedError as error:
            return str(error)

    found = in_parallel(read, range(log.length(max(numbers, default=-1) + 1)))
    name = aliases.name_of(prefix)
    for number, problem in enumerate(found):
        if isinstance(problem, str):
            remedy = ""
            if prefix == layout.CATALOG:
                remedy = f"; {_REPAIR} replaces it"
            elif name and (problem == _MISSING or number == len(found) - 1):  # else a later move is read
                remedy = f"; {aliases.remedy(name)}"
            report.findings.append(Finding(prefix, log.key(number), f"{problem}{remedy}"))
    return [entry if isinstance(entry, dict) else None for entry in found]


def _check_versions(store: Store, entries: list[Values | None], report: LogReport) -> None:
    """Compare the catalog with the listed versions. Those with a damaged manifest are left to `verify`."""
    entered = {entry["version"] for entry in entries if entry and entry["kind"] not in (ALIAS, LOST)}
    listed = set(report.versions)
    # Links are not listed.
    report.versions += sorted(version for version in entered - listed if manifests.committed(store, version))

    def read(version: str) -> Manifest | None:
        try:
            return manifests.find(store, version)
        except DamagedError:
            return None

    found = [manifest for manifest in in_parallel(read, listed - entered) if manifest]
    report.absent = sorted(found, key=lambda manifest: manifest.created_at)
    problem = f"is not in the catalog, so ls, lineage and gc do not see it: {_REPAIR} enters it"
    report.findings += [Finding(manifest.version, layout.CATALOG, problem) for manifest in report.absent]


def _target_problem(store: Store, move: Values) -> str:
    """Return what is wrong with the version that an alias points at, or an empty text."""
    try:
        digest = manifests.as_parent(store, move["version"]).sha256
    except DamagedError as error:
        return f"the alias points there: {error}"
    return "" if digest == move["sha256"] else "was changed after the alias was pointed at it"


def repair(store: Store) -> tuple[list[str], list[str]]:
    """Put placeholders where the catalog has lost entries, and append the versions that it lacks.

    Returns:
        The keys of the replaced entries, and the versions that were added.
    """
    report, log = check_logs(store), Log(store, layout.CATALOG)
    filled = [log.key(number) for number in report.lost if _fill(store, log, number)]
    for manifest in report.absent:
        catalog.enter(store, manifest.version, manifest.kind, manifest.parent_names, manifest.nonce)
    return filled, [manifest.version for manifest in report.absent]


def _fill(store: Store, log: Log, number: int) -> bool:
    """Put a placeholder where an entry is missing or damaged; return False if another writer was faster."""
    data = seal({"kind": LOST, "version": "", "parents": [], "nonce": uuid.uuid4().hex})
    if store.create(log.key(number), data):
        return True
    try:
        log.read(number)
    except DamagedError:
        store.write(log.key(number), data)
        return True
    return False
