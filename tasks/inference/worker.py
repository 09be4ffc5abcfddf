"""The part of vLLM's workers that is ours: it reloads a policy whole.

vLLM imports it inside of a server (`--worker-extension-cls tasks.inference.worker.PolicyWorker`) and adds the class to
the bases of its worker; `/collective_rpc` calls the methods by name.
"""

from typing import Any

from torch import nn


class PolicyWorker:
    """Methods that vLLM's worker gets in addition to its own."""

    model_runner: Any
    reload_weights: Any

    def is_policy_worker(self) -> str:
        """Answer at all: workers without this class do not."""
        return "yes"

    def reload_policy(self, weights_path: str) -> None:
        """Load the weights in the folder `weights_path` in place."""
        self.reload_weights(weights_path=weights_path)
        _pack_tied(self.model_runner.get_model())


def _pack_tied(model: nn.Module) -> None:
    """Pack tied embeddings once more, as vLLM does after loading.

    On a CPU each layer computes with a packed copy of its weight. A reload packs those layers anew for which it finds a
    tensor in the files, and an output layer that shares the weight of the embedding has none.
    """
    packed = [module for module in model.modules() if hasattr(module, "cpu_linear")]
    first: dict[int, nn.Module] = {}
    for module in packed:
        if first.setdefault(id(module.weight), module) is not module:
            module.quant_method.process_weights_after_loading(module)
