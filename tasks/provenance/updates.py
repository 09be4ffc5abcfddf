"""The checkpoints of a store and the inputs of the update that made each, read from their manifests."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from pydantic import ValidationError

from configs.problems import ArithmeticSource
from storage import layout
from storage.errors import DamagedError
from storage.logs.catalog import CatalogEntry
from storage.objects.store import Store
from storage.version_names import ExclusionsVersion, PolicyVersion, ScoresVersion, TrajectoriesVersion, select
from storage.versions import manifests
from storage.versions.manifests import Manifest

_READERS = 16


@dataclass(frozen=True, slots=True)
class Update:
    """A checkpoint and the update that made it.

    Example: Update(checkpoint="runs/demo/checkpoints/000004", run="demo", number=4,
    before=["runs/demo/checkpoints/000003"], data_sets=["runs/demo/trajectories/000003"], scores=[…], exclusions=[])
    """

    checkpoint: str
    run: str
    number: int  # policy version: updates of the run up to this checkpoint
    before: Sequence[str]  # the checkpoint that the update started from, in this run or in another
    data_sets: Sequence[str]  # trajectories; empty for policy version 0
    scores: Sequence[str]
    exclusions: Sequence[str]  # versions that the update honoured
    oldest: int = 0  # policy version; trajectories with an older token were left out
    cut_too: bool = True  # also trained on trajectories whose return only a critic can estimate
    unfinished_too: bool = False  # also trained on trajectories that failed by the policy's fault
    idle: bool = False  # no trajectory was left to train on, and the weights did not change
    origin: str = ""  # of a policy without an earlier checkpoint in the store: where it came from
    taught: ArithmeticSource | None = field(default=None)  # the generator of the problems that a warm start taught
    problem: str = ""  # why the manifest cannot be read; then only the catalog's entry is known


def read_updates(store: Store, entries: Iterable[CatalogEntry]) -> dict[str, Update]:
    """Return all committed checkpoints by version.

    Args:
        store: the store of the checkpoints.
        entries: all entries of its catalog.

    Raises:
        UnavailableError: the store does not answer.
    """
    attempts = {entry.version: entry.parents for entry in entries if entry.kind == "checkpoint"}
    with ThreadPoolExecutor(_READERS) as readers:
        updates = readers.map(lambda attempt: _read(store, *attempt), attempts.items())
        return {update.checkpoint: update for update in updates if update}


def descended(updates: Mapping[str, Update], versions: Iterable[str]) -> set[str]:
    """Return `versions` and all checkpoints that descend from one of them, through any number of runs."""
    children: dict[str, list[str]] = {}
    for update in updates.values():
        for parent in update.before:
            children.setdefault(parent, []).append(update.checkpoint)
    reached, pending = set[str](), list(versions)
    while pending:
        version = pending.pop()
        if version not in reached:
            reached.add(version)
            pending += children.get(version, [])
    return reached


def ancestry(updates: Mapping[str, Update], version: str) -> list[str]:
    """Return `version` and all checkpoints it descends from, nearest first, including those missing in `updates`."""
    lineage = {version: None}
    for checkpoint in (pending := [version]):
        for parent in updates[checkpoint].before if checkpoint in updates else ():
            if parent not in lineage:
                lineage[parent] = None
                pending.append(parent)
    return list(lineage)


def _read(store: Store, version: str, attempted_parents: Sequence[str]) -> Update | None:
    """Read the manifest of a checkpoint; None if it was never committed."""
    try:
        manifest = manifests.find(store, version)
        return None if manifest is None else _from_manifest(manifest)
    except DamagedError as error:
        return Update(*_identity(version), *_parents_by_kind(attempted_parents), problem=str(error))


def _from_manifest(manifest: Manifest) -> Update:
    """Build the update from the manifest; raise DamagedError if its configuration cannot be read."""
    parents, (version, run, number) = _parents_by_kind(manifest.parent_names), _identity(manifest.version)
    lag, begins = int(manifest.number("rollout.max_head_offpolicyness")), not parents[0] and not parents[1]
    return Update(
        *(version, run, number),
        *parents,
        oldest=number - 1 - lag,
        cut_too=manifest.knob("ppo.critic") is not None or "trajectories/unknown_return" not in manifest.metrics,
        unfinished_too=manifest.knob("reward.unfinished") == "least",
        idle=manifest.metrics.get("trajectories") == 0,
        origin=_origin(manifest) if begins else "",
        taught=_taught(manifest) if begins else None,
    )


def _identity(version: str) -> tuple[str, str, int]:
    """Return the version, its run and its policy version."""
    return version, layout.run_of(version) or "", layout.number_of(version) or 0


def _parents_by_kind(
    versions: Sequence[str],
) -> tuple[list[PolicyVersion], list[TrajectoriesVersion], list[ScoresVersion], list[ExclusionsVersion]]:
    """Return the checkpoints, trajectories, scores and exclusions among `versions`."""
    return (
        select(PolicyVersion, versions),
        select(TrajectoriesVersion, versions),
        select(ScoresVersion, versions),
        select(ExclusionsVersion, versions),
    )


def _origin(manifest: Manifest) -> str:
    return "warm start" if manifest.knob("policy.warm_start") else str(manifest.knob("policy.path") or "unknown")


def _taught(manifest: Manifest) -> ArithmeticSource | None:
    if not manifest.knob("policy.warm_start"):
        return None
    taught = manifest.knob("policy.warm_start.teaches") or manifest.knob("problems.train")
    try:
        return ArithmeticSource.model_validate(taught)
    except ValidationError as error:
        raise DamagedError(
            f"the manifest of {manifest.version} does not say which problems its warm start taught: {error}"
        ) from None
