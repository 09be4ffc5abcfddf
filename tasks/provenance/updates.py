"""The checkpoints of a store, and what each was made from, as their manifests say."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from pydantic import ValidationError

from configs.schema import ArithmeticSource
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
    number: int  # updates of the run until it
    before: Sequence[str]  # checkpoints whose weights it goes on from: that of the run, or where the run began
    data_sets: Sequence[str]  # trajectories; none of policy version 0
    scores: Sequence[str]
    exclusions: Sequence[str]  # versions that it honoured
    oldest: int = 0  # policy version; what an older one sampled was left out
    cut_too: bool = True  # it trained also on trajectories whose returns only a critic can tell
    idle: bool = False  # nothing was left to train on, and the weights stayed
    origin: str = ""  # of a policy that no checkpoint of the store came before: where it came from
    taught: ArithmeticSource | None = field(default=None)  # what a warm start taught it
    problem: str = ""  # why its manifest cannot be read: then the catalog is all that is known of it


def read_updates(store: Store, entries: Iterable[CatalogEntry]) -> dict[str, Update]:
    """All committed checkpoints by version.

    Args:
        store: where they lie.
        entries: the catalog's.

    Raises:
        UnavailableError: the store does not answer.
    """
    attempts = {entry.version: entry.parents for entry in entries if entry.kind == "checkpoint"}
    with ThreadPoolExecutor(_READERS) as readers:
        found = readers.map(lambda attempt: _read(store, *attempt), attempts.items())
        return {update.checkpoint: update for update in found if update}


def descended(updates: Mapping[str, Update], versions: Iterable[str]) -> set[str]:
    """`versions` and all whose weights go back to one of them, through any number of runs."""
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
    """`version` and all that its weights go back to, nearest first; also those of which nothing is known."""
    found = {version: None}
    for each in (pending := [version]):
        for parent in updates[each].before if each in updates else ():
            if parent not in found:
                found[parent] = None
                pending.append(parent)
    return list(found)


def _read(store: Store, version: str, attempted: Sequence[str]) -> Update | None:
    """None for an attempt that died."""
    try:
        manifest = manifests.find(store, version)
        return None if manifest is None else _of(manifest)
    except DamagedError as error:
        return Update(*_place(version), *_parents(attempted), problem=str(error))


def _of(manifest: Manifest) -> Update:
    """Raises StorageError where the configuration in the manifest says what this program does not know."""
    parents = manifest.parent_names
    sorted_, (version, run, number) = _parents(parents), _place(manifest.version)
    lag, begins = int(manifest.number("rollout.max_head_offpolicyness")), not sorted_[0] and not sorted_[1]
    return Update(
        *(version, run, number),
        *sorted_,
        oldest=number - 1 - lag,
        cut_too=manifest.knob("ppo.critic") is not None or "trajectories/unknown_return" not in manifest.metrics,
        idle=manifest.metrics.get("trajectories") == 0,
        origin=_origin(manifest) if begins else "",
        taught=_taught(manifest) if begins else None,
    )


def _place(version: str) -> tuple[str, str, int]:
    return version, layout.run_of(version) or "", layout.number_of(version) or 0


def _parents(
    versions: Sequence[str],
) -> tuple[list[PolicyVersion], list[TrajectoriesVersion], list[ScoresVersion], list[ExclusionsVersion]]:
    """Checkpoints, trajectories, scores and exclusions among them."""
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
        raise DamagedError(f"what the warm start of {manifest.version} taught cannot be told: {error}") from None
