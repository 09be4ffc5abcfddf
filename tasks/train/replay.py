"""Make committed checkpoints again from their parents and data sets, and compare: a proof of what they are.

An update follows from the policy before it, its train state, stored rows and the configuration in its manifest. On a
CPU of the same kind it gives the same bits. Elsewhere, or with another number of ranks, sums are rounded otherwise:
then the difference is told as a share of the way that the update moved the weights.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import torch
from torch import Tensor

from configs.loader import read_stored
from configs.models import Role
from configs.schema import Config
from configs.train import Parallel
from storage import layout
from storage.objects.store import Store
from storage.version_names import PolicyVersion
from storage.versions.checkpoints import Checkpoint, open_checkpoint
from storage.versions.drafts import code_version
from storage.versions.manifests import Manifest, committed, read
from tasks.own_code import own_code
from tasks.train.orders import read_order
from tasks.train.sharding import StoredTensors
from tasks.train.version_trainer import VersionTrainer

TOLERANCE = 0.05
"""Largest share of an update's way by which weights that were made again may differ; bfloat16 on a GPU: 0.017."""
_RANGE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)@([0-9]{1,6})\.\.([0-9]{1,6})")


@dataclass(frozen=True, slots=True)
class Replayed:
    """The comparison of one checkpoint with what its update makes now."""

    version: str
    verdict: str
    same: bool
    share: float | None  # norm of the difference of the weights, divided by that of the update; None: not compared
    code: str  # what made it, if it was another version of the program, or files of the user's that have changed


def replay(store: Store, asked: str, cache: str, progress: Callable[[str], None]) -> list[Replayed]:
    """Make the checkpoints K+1 to N of `RUN@K..N` again, each from the stored one before it, if it has a train state.

    Raises:
        ValueError: `asked` is no such range, or an update cannot be made again.
        StorageError: a version is missing or damaged, or its data were collected by gc.
    """
    if not (given := _RANGE.fullmatch(asked)) or int(given[2]) >= int(given[3]):
        raise ValueError(f"--replay={asked}: give RUN@K..N with K below N, such as demo@10..20")
    results, trainer, settings = list[Replayed](), None, None
    versions = [layout.checkpoint(given[1], number) for number in range(int(given[2]) + 1, int(given[3]) + 1)]
    if unknown := next((version for version in versions if not committed(store, version)), None):
        raise ValueError(
            f"--replay={asked}: there is no {unknown}; `python -m storage ls --kind checkpoint` lists them"
        )
    for version in versions:
        manifest = read(store, version)
        if trainer is None or manifest.settings != settings:
            settings = manifest.settings
            trainer = VersionTrainer(_here(read_stored(settings, version), store, cache))
        progress(f"{version}: making it again")
        results.append(_compared(store, version, manifest, trainer, Path(cache)))
    return results


def _here(config: Config, store: Store, cache: str) -> Config:
    """Return a stored configuration for this store and one process."""
    storage = config.storage.model_copy(update={"root": store.root, "cache": cache})
    return config.model_copy(
        update={"storage": storage, "train": config.train.model_copy(update={"parallel": Parallel()})}
    )


def _compared(
    store: Store, version: PolicyVersion, manifest: Manifest, trainer: VersionTrainer, cache: Path
) -> Replayed:
    order, own = read_order(store, version, cache), own_code(read_stored(manifest.settings, version))
    others = {manifest.code_version} - {code_version()}
    models = {f"models.{role}" for role in get_args(Role)}  # nobody is asked
    code = {name: digest for name, digest in manifest.code.items() if name not in models}
    others |= {name for name in own.keys() | code.keys() if own.get(name) != code.get(name)}
    other = ", ".join(sorted(others))
    with TemporaryDirectory(prefix="replay-") as folder:
        model, state = Path(folder) / "model", Path(folder) / "state"
        trainer.make_again(order, model, state)
        if any(store.exists(layout.tombstone(each)) for each in (version, order.policy)):
            return Replayed(version, "made again; gc has deleted what to compare with", True, None, other)
        has_state = not store.exists(layout.tombstone(version, state=True))
        stored = open_checkpoint(store, version, cache, state=has_state)
        before = open_checkpoint(store, order.policy, cache)
        pairs = [*_pairs(_weights(stored), _stem(stored), model)]
        equal = all(torch.equal(one, other) for _, one, other in pairs)
        for stem in ("optimizer", "critic", "reference") if stored.state else ():
            if any(state.glob(f"{stem}.safetensors*")):
                assert stored.state
                equal &= all(torch.equal(one, other) for _, one, other in _pairs(stored.state, stem, state))
        off = _norm(one - other for _, one, other in pairs)
    way = _norm(one - other for _, one, other in _pairs(_weights(stored), _stem(stored), _weights(before)))
    share = off / way if way else off
    verdict = "the same bits" if equal else "the same up to rounding" if share <= TOLERANCE else "ANOTHER POLICY"
    return Replayed(version, verdict, equal or share <= TOLERANCE, share, other)


def _weights(checkpoint: Checkpoint) -> Path:
    return checkpoint.adapter or checkpoint.model


def _stem(checkpoint: Checkpoint) -> str:
    return "adapter_model" if checkpoint.adapter else "model"


def _pairs(folder: Path, stem: str, other: Path) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the tensors of two folders by name.

    Raises:
        ValueError: the folders have tensors of other names.
    """
    one, two = StoredTensors(folder, stem), StoredTensors(other, stem)
    if one.names != two.names:
        raise ValueError(f"other tensors than before: {sorted(one.names ^ two.names)[:3]}")
    for name in sorted(one.names):
        yield name, one.read(name), two.read(name)


def _norm(tensors: Iterator[Tensor]) -> float:
    return float(sum(float((tensor.double() ** 2).sum()) for tensor in tensors) ** 0.5)
