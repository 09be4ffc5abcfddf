"""The memory of a rank, measured by what it is for, and beside it what `tasks.train.memory` computes.

Counts the bytes of all tensors that are alive after each operation of an update, in the first rank. "Gathered" is what
FSDP makes while it gathers weights and divides gradients; logits are tensors with a column for each token of the
vocabulary; what is left of a pass are activations. It wraps methods that torch does not document.
"""

import json
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from configs.score import Reward
from configs.train import PPO, Optimizer
from tasks.train.memory import ModelSizes, memory_of
from tasks.train.mesh import Mesh
from tasks.train.step import Stepper
from tasks.train.train_state import TrainState
from tasks.train.trainer import Trainer
from tests.benchmarks.result import Row
from tests.support.rank_processes import run_ranks
from tests.support.train_helpers import random_rows

_MB = 1e6
PARTS = ("weights", "gradients", "moments", "gathered", "activations", "logits", "total")
_KNOBS = {
    "device": "cpu",
    "threads": 1,
    "ppo_n_minibatches": 1,
    "micro_batch_tokens": 2048,
}
_OF_FSDP = ("unshard", "wait_for_unshard", "post_backward")


class LiveTensors(TorchDispatchMode):
    """Knows the storages of all tensors on the CPU that operations return, and how many bytes are alive.

    Args:
        vocabulary: the width of logits.

    Attributes:
        most: the largest number of bytes of each part, and of all together as `total`. Parts have their peaks at
            different times, so the total is less than their sum.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most: dict[str, int] = {}
        self._vocabulary, self._gathering = vocabulary, False
        self._alive: dict[int, tuple[weakref.ref[Any], str]] = {}

    def add(self, tensor: Tensor, part: str) -> None:
        """Say what a tensor is for."""
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        key = storage._cdata
        self._alive[key] = (weakref.ref(storage, lambda _: self._alive.pop(key, None)), part)

    def add_new(self, tensor: Tensor) -> None:
        """Guess what the result of an operation is for, unless its storage is known."""
        known = self._alive.get(tensor.untyped_storage()._cdata)
        if tensor.device.type == "cpu" and (known is None or known[0]() is None):
            is_logits = tensor.ndim > 0 and tensor.shape[-1] == self._vocabulary
            self.add(tensor, "gathered" if self._gathering else "logits" if is_logits else "activations")

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Count what is made in the block as gathered."""
        before, self._gathering = self._gathering, True
        try:
            yield
        finally:
            self._gathering = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # its own operations on local tensors come next
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, Tensor):
                self.add_new(result)
        self._measure()
        return results

    def _measure(self) -> None:
        bytes_of: Counter[str] = Counter()
        for reference, part in [*self._alive.values()]:
            storage = reference()
            bytes_of[part] += storage.nbytes() if storage is not None else 0
        for part, number in (*bytes_of.items(), ("total", bytes_of.total())):
            self.most[part] = max(number, self.most.get(part, 0))


def memory_row(model: Path, shard: int, data: Mapping[str, int], out: Path) -> Row:
    """Train with `shard` ranks, and compare the bytes of the first one with the computed ones.

    Args:
        model: a model's folder.
        shard: the number of ranks.
        data: arguments of `random_rows`.
        out: a file for what the first rank measures; beside it its log.
    """
    run_ranks(shard, _measure, model, shard, data, out, log=out.with_suffix(".log"))
    found = json.loads(out.read_text())
    sizes = ModelSizes.of(json.loads((model / "config.json").read_text()))
    computed, measured = memory_of(sizes, _ppo(shard), found["tokens"]), found["most"]
    parts = (f"{part} {measured.get(part, 0) / _MB:.0f} ({getattr(computed, part) / _MB:.0f})" for part in PARTS)
    return Row(
        f"memory of a rank, {shard} shards: computed / measured",
        f"{computed.total / measured['total']:.2f}",
        detail=f"MB (computed): {', '.join(parts)}; {found['tokens']} tokens in a pass",
    )


def _ppo(shard: int) -> PPO:
    return PPO.model_validate(_KNOBS | {"parallel": {"shard": shard}})


def _measure(model: Path, shard: int, data: Mapping[str, int], out: Path) -> None:
    """Take two updates in this rank, the second one with all tensors counted."""
    ppo = _ppo(shard)
    mesh = Mesh.of(ppo.parallel, "cpu", 60, ["a"] * shard)
    trainer = Trainer(ppo, Optimizer(lr=1e-5, eps=1e-8), Reward(), mesh=mesh)
    trainer.load(model, None, seed=1)
    trainer.update(*random_rows(**data), version=2)
    state = trainer._train_state
    alive, tokens = LiveTensors(state.model.config.vocab_size), list[int]()
    for parameter in state.model.parameters():
        parameter.grad = None
        alive.add(parameter, "weights")
    for values in state.adamw.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            alive.add(values[key], "moments")
    with _watched(state, alive, tokens), alive:
        trainer.update(*random_rows(**data), version=2)
    if mesh.rank == 0:
        out.write_text(json.dumps({"most": alive.most, "tokens": max(tokens)}))


@contextmanager
def _watched(state: TrainState, alive: LiveTensors, tokens: list[int]) -> Iterator[None]:
    """Tell `alive` what FSDP makes and which tensors are gradients; note the tokens of each pass."""

    def gathers(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: FSDPParamGroup, *arguments: Any, **keywords: Any) -> Any:
            for parameter in group.fsdp_params:
                if hasattr(parameter, "_unsharded_param") and (whole := parameter._unsharded_param.grad) is not None:
                    alive.add(whole, "gathered")
            with alive.gathering():
                return method(group, *arguments, **keywords)

        return call

    def accumulates(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(stepper: Stepper, batch: Any, actions: int) -> Any:
            tokens.append(batch.rows.tokens.numel())
            result = method(stepper, batch, actions)
            for parameter in state.model.parameters():
                if parameter.grad is not None:
                    alive.add(parameter.grad, "gradients")
            return result

        return call

    with ExitStack() as stack:
        for name in _OF_FSDP:
            stack.enter_context(mock.patch.object(FSDPParamGroup, name, gathers(getattr(FSDPParamGroup, name))))
        stack.enter_context(mock.patch.object(Stepper, "_accumulate", accumulates(Stepper._accumulate)))
        yield
