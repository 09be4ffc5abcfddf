"""Make committed checkpoints again from their parents and data sets, and compare: a proof of what they are.

An update follows from the policy before it, its train state, stored rows and the configuration in its manifest. On a
CPU of the same kind it gives the same bits. Elsewhere, or with another number of ranks, sums are rounded otherwise:
then each part of the files has a difference, shown as a share of the way that the update moved this part.

Parts are the weights, each kind of moments, the critic's weights, a moving reference policy, the generator's state, and
each number in state.json. Example: an update moved a policy by 0.3, and the one that was made again is 3e-6 away from
it: a share of 1e-5, which is rounding in float32.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from configs.loader import read_stored
from configs.models import Role
from configs.schema import Config
from configs.stored import lost
from configs.train import Parallel
from storage import layout
from storage.objects.store import Store
from storage.processes.folder import TemporaryFolder
from storage.version_names import PolicyVersion
from storage.versions.checkpoints import open_checkpoint
from storage.versions.drafts import code_version
from storage.versions.manifests import Manifest, committed, read
from tasks.registry import own_code
from tasks.train.orders import read_order
from tasks.train.sharding import StoredTensors
from tasks.train.version_trainer import VersionTrainer

TOLERANCES = {"none": 1e-4, "bfloat16": 0.3}
"""By `train.autocast`, the largest share of a part's way by which rounding may make it differ: ten times what other
micro-batches and vector instructions showed (9.1e-6 and 3.2e-2; float32 on a GPU: 4.9e-6). A first update with
`optimizer.eps=1e-8` showed 5.9e-5, one of a critic whose head is 0, in bfloat16, 0.21."""
NEIGHBOUR = 2e-7
"""Share of its own size by which a part may differ besides, since each of its float32 numbers is rounded once more: ten
times what was shown (2.1e-8). It counts where steps are tiny: a moving reference at a learning rate of 1e-6 differed by
2.5 % of its way."""
_COUNTED = {"rng", "step", "steps"}  # never rounded
_OF_TENSOR = 3
"""Within a part a single tensor may differ by so many times the share: measured were 2.7e-5 and 6.4e-2."""
Place = tuple[str, str]
"""The name of a part, and that of a tensor in it, or nothing."""
Tensors = dict[Place, Callable[[], Tensor]]
"""What reads each tensor."""
_RANGE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)@([0-9]{1,6})\.\.([0-9]{1,6})")


@dataclass(frozen=True, slots=True)
class Replayed:
    """The comparison of one checkpoint with what its update makes now."""

    version: str
    verdict: str
    same: bool
    share: float | None  # norm of the part's difference, divided by that of its way; None: there was nothing to compare
    part: str  # which differs most, such as "model" or "optimizer/exp_avg", perhaps with a tensor; empty: none differs
    code: str  # what made it: another version of the program, settings that this one lacks, changed files of the user's


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
        raise ValueError(f"--replay={asked}: there is no {unknown}; `python -m storage ls --kind checkpoint` has all")
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
    train = config.train.model_copy(update={"parallel": Parallel()})
    return config.model_copy(update={"storage": storage, "train": train})


def _compared(
    store: Store, version: PolicyVersion, manifest: Manifest, trainer: VersionTrainer, cache: Path
) -> Replayed:
    order, config = read_order(store, version, cache), read_stored(manifest.settings, version)
    own = own_code(config)
    others = {manifest.code_version, *lost(manifest.config)} - {code_version()}
    models = {f"models.{role}" for role in get_args(Role)}  # nobody is asked
    code = {name: digest for name, digest in manifest.code.items() if name not in models}
    others |= {name for name in own.keys() | code.keys() if own.get(name) != code.get(name)}
    other = ", ".join(sorted(others))
    with TemporaryFolder() as folder:
        before, made = folder / "before", folder / "made"
        trainer.make_again(order, before, made)
        if any(store.exists(layout.tombstone(each)) for each in (version, order.policy)):
            return Replayed(version, "made again; gc has deleted what to compare with", True, None, "", other)
        stored = open_checkpoint(store, version, cache, state=not store.exists(layout.tombstone(version, state=True)))
        found = [_tensors(stored.adapter or stored.model, stored.state)]
        found += [_tensors(each / "model", stored.state and each / "state") for each in (made, before)]
        judged = _judged(TOLERANCES[config.train.autocast], *found)
    bad, _, share, part = max((bad, not name, share, f"{part} {name}") for (part, name), (bad, share) in judged.items())
    verdict = "ANOTHER POLICY" if bad else "the same up to rounding" if share else "the same bits"
    return Replayed(version, verdict, not bad, share, part.strip() if share else "", other)


def _tensors(model: Path, state: Path | None) -> Tensors:
    """Return what a checkpoint's folders hold, the numbers in state.json included."""
    found = Tensors()
    for stem in ("model", "adapter_model", "optimizer", "critic", "reference"):
        folder = model if "model" in stem else state
        if folder and any(folder.glob(f"{stem}.safetensors*")):
            opened = StoredTensors(folder, stem)
            for name in opened.names:
                kind = f"/{name.partition('/')[0]}" if stem in ("optimizer", "critic") else ""
                found[stem + kind, name] = partial(opened.read, name)
    counts = json.loads((state / "state.json").read_text()) if state else {}
    number = partial(torch.tensor, dtype=torch.float64)
    return found | {(f"state.json/{name}", ""): partial(number, value) for name, value in counts.items()}


def _judged(tolerance: float, stored: Tensors, made: Tensors, before: Tensors) -> dict[Place, tuple[bool, float]]:
    """Return for each part and each tensor whether it is another one, and its difference as a share of its way.

    The way is the shorter one of both sides. A tensor that only one side has, or that has another shape or type there,
    makes the part another one.
    """
    squares = defaultdict[Place, Tensor](lambda: torch.zeros(4).double())
    for key in sorted(stored.keys() | made.keys()):
        one, other = (each[key]() if key in stored and key in made else None for each in (stored, made))
        norms = torch.full((4,), math.inf)
        if one is not None and other is not None and (one.shape, one.dtype) == (other.shape, other.dtype):
            start = before[key]().double() if key in before else torch.zeros(1)
            vectors = one.double() - other.double(), one.double() - start, other.double() - start, one.double()
            norms = torch.stack([(each**2).sum() for each in vectors])
        for place in {key, (key[0], "")}:
            squares[place] += norms
    return {place: _judge(place, tolerance, each, squares[place[0], ""]) for place, each in squares.items()}


def _judge(place: Place, tolerance: float, squares: Tensor, of_part: Tensor) -> tuple[bool, float]:
    """Judge a place by its squares and those of its whole part; the share is 1 if there is no difference to compute."""
    part, name = place
    off, *ways, size = *squares[:3].sqrt().tolist(), float(of_part[3].sqrt())
    way = min(ways)
    exact = not name and (not way or part.rpartition("/")[2] in _COUNTED)
    rounded = off < (_OF_TENSOR if name else 1) * tolerance * way + NEIGHBOUR * size  # NaN is no rounding
    return off != 0 and (exact or not rounded), off / (way or off) if 0 < off < math.inf else float(off != 0)
