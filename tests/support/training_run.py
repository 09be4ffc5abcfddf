"""A run in a store, with a tiny random policy and random rows, for trainers that read versions."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from safetensors.torch import load_file
from torch import Tensor

from configs import Config, load
from storage import layout
from storage.objects.store import Store
from storage.version_names import PolicyVersion
from storage.versions import checkpoints, manifests
from storage.versions.drafts import Draft, Provenance
from storage.versions.manifests import Manifest
from storage.versions.weights import load_model, make_adapter
from tasks.train.orders import OrderedTrainer, Part, UpdateOrder
from tasks.train.policy import load_policy, make_canary
from tests.support.chain_helpers import commit_rows
from tests.support.train_helpers import random_rows, save_tiny

RUN, SCORER = "smoke", "5c0e"
OPTIONS = [
    "rollout.max_head_offpolicyness=99",
    "algorithm.kl.kl_ctl=0.1",
    "algorithm.kl.reference=ema",
    "algorithm.advantage.type=gae",
    "algorithm.critic.model=own",
]


class TrainingRun:
    """A run with policy version 0 and the data of some iterations.

    Args:
        folder: an empty folder for store and cache.
        iterations: the number of iterations with data.
        model: folder of policy version 0; None: a tiny random one.
        options: overrides of the configuration `smoke`.
        root: the store's root; None: in `folder`.
        data: arguments of `random_rows`.
    """

    def __init__(
        self,
        folder: Path,
        iterations: int,
        model: Path | None = None,
        options: Sequence[str] = OPTIONS,
        root: str | None = None,
        data: Mapping[str, int] | None = None,
    ) -> None:
        self._open(folder, options, root)
        config = self.config()
        with Draft(self.store, layout.run(RUN), "run") as draft:
            draft.commit(self._provenance, [])
        model = model or save_tiny(folder / "policy")
        canary = make_canary(load_policy(model, config.train))
        adapter = folder / "adapter" if config.policy.lora else None
        if config.policy.lora and adapter:
            make_adapter(load_model(model), config.policy.lora, config.run.seed, adapter)
        begun = self.policy(0), model, None, canary, self._provenance, [layout.run(RUN)], dict[str, Any]()
        checkpoints.commit(self.store, *begun, adapter=adapter)
        made: dict[str, Any] = {"config": self._provenance.config, "shard": 100}
        for iteration in range(iterations):
            rows, scores = random_rows(seed=iteration, newest=iteration, **data or {})
            (part,) = self.order(iteration).parts
            parents = [layout.run(RUN), self.policy(0)]
            commit_rows(self.store, part.trajectories, "trajectories", rows, parents, **made)
            commit_rows(self.store, part.scores, "scores", scores, [layout.run(RUN), part.trajectories], **made)

    @classmethod
    def reopened(cls, folder: Path, options: Sequence[str] = OPTIONS, root: str | None = None) -> Self:
        """Return the run that is in `folder`."""
        run = cls.__new__(cls)
        run._open(folder, options, root)
        return run

    def _open(self, folder: Path, options: Sequence[str], root: str | None = None) -> None:
        self.folder, self.root, self._options = folder, root or f"{folder}/store", options
        self.store = Store(self.root)
        self._provenance = Provenance(config=self.config().model_dump(mode="json"))

    def config(self, *overrides: str) -> Config:
        where = [f"storage.root={self.root}", f"storage.cache={self.folder}/cache"]
        return load("smoke", [*where, "train.threads=1", "train.device=cpu", *self._options, *overrides])

    def policy(self, number: int) -> PolicyVersion:
        return layout.checkpoint(RUN, number)

    def order(self, iteration: int) -> UpdateOrder:
        data = layout.trajectories(RUN, iteration), layout.scores(RUN, iteration, SCORER)
        return UpdateOrder(self.policy(iteration + 1), self.policy(iteration), [Part(*data)])

    def train(
        self,
        trainer: OrderedTrainer,
        iteration: int,
        told: list[str] | None = None,
        parts: Sequence[Part] = (),
        config: Config | None = None,
    ) -> Manifest:
        """Make and commit the next policy, as the task does.

        Args:
            trainer: makes it.
            iteration: the number of the policy before it.
            told: gets the lines of progress.
            parts: the rows to train on; none: those of the iteration.
            config: the trainer's configuration, if it is not the run's.
        """
        order, lines = self.order(iteration), [] if told is None else told
        if parts:
            order = replace(order, parts=parts)
        metrics, made = trainer.update(order, lines.append).metrics, trainer.write()
        with Draft(self.store, order.version, "checkpoint", made.nonce) as draft:
            draft.accept(made.files)
            parents = [order.policy, *(name for part in order.parts for name in (part.trajectories, part.scores))]
            base = self.policy(0) if self.config().policy.lora else None
            provenance = Provenance(config=config.model_dump(mode="json")) if config else self._provenance
            return draft.commit(provenance, parents, metrics, base)

    def tensors(self, number: int) -> dict[str, Tensor]:
        """Return all weights and moments of a checkpoint."""
        opened = checkpoints.open_checkpoint(self.store, self.policy(number), self.folder / "cache", state=True)
        assert opened.state
        found: dict[str, Tensor] = {}
        for path in [*(opened.adapter or opened.model).glob("*.safetensors"), *opened.state.glob("*.safetensors")]:
            found |= {f"{path.name.split('-')[0].split('.')[0]}/{k}": v for k, v in load_file(path).items()}
        return found

    def committed(self) -> list[int]:
        """Return the numbers of the policies."""
        return [number for number in range(1000) if manifests.committed(self.store, self.policy(number))]


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((value.double() - other[name].double()).abs().max().item() for name, value in one.items())
