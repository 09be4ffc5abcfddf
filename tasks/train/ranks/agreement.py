"""Messages between the ranks as JSON, and the check at the start that the ranks fit together."""

import json
import os
import platform
import socket
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from transformers.utils.import_utils import is_flash_attn_2_available

from configs import Config, differences
from storage import layout
from storage.objects.store import Store
from storage.versions import manifests
from storage.versions.drafts import code_version
from tasks.train.mesh import gather_parts

_LIBRARIES = ("torch", "transformers", "numpy", "safetensors", "pyarrow")
_OWN_KNOBS = ("trainer.", "ppo.parallel", "ppo.device", "storage.root")
"""Knobs that a rank uses before it has the flow's configuration, which holds for all others."""


def broadcast(value: Any) -> Any:
    """Return the first rank's value, on every rank."""
    data = bytearray(json.dumps(value).encode()) if dist.get_rank() == 0 else bytearray()
    length = torch.tensor(len(data))
    dist.broadcast(length, 0)
    text = torch.frombuffer(data, dtype=torch.uint8).clone() if data else torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(text, 0)
    return json.loads(text.numpy().tobytes())


def exchange(value: Any) -> list[Any]:
    """Return the values of all ranks, in their order, on every rank."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return [json.loads(part.numpy().tobytes()) for part in gather_parts(data[None])]


def agree(own: Config, device: str) -> Config:
    """Return the flow's configuration, with this rank's cache; check that all ranks fit together.

    Raises:
        ValueError: ranks have different code, libraries, devices or knobs, or do not see the run in their store; the
            message names them. All ranks raise it.
    """
    flow: dict[str, Any] = broadcast(own.model_dump(mode="json"))
    storage = flow["storage"] | {"cache": own.storage.cache}
    config = Config.model_validate(flow | {"storage": storage})
    _refuse_different(exchange(_about(device)))
    changed = [line for line in differences(flow, own.model_dump(mode="json")) if line.startswith(_OWN_KNOBS)]
    _refuse("started with another configuration than the flow's", exchange("; ".join(changed)))
    _refuse("without the flow's store", exchange(_unseen(config)))
    return config


def _about(device: str) -> dict[str, str]:
    return {
        "code": code_version(),
        "the device": device,
        "Python": platform.python_version(),
        "FlashAttention 2": "installed" if is_flash_attn_2_available() else "missing",  # decides how work is dealt out
        **{library: version(library) for library in _LIBRARIES},
    }


def _refuse_different(abouts: Sequence[Mapping[str, str]]) -> None:
    for name, expected in abouts[0].items():
        for rank, about in enumerate(abouts):
            if about[name] != expected:
                raise ValueError(
                    f"rank {rank} has {name} {about[name]}, rank 0 has {name} {expected}: install the same everywhere"
                )


def _unseen(config: Config) -> str:
    """Return why this rank cannot work with the store; empty if it sees the run there."""
    version = layout.run(config.run.name)
    try:
        seen = manifests.committed(Store.of(config.storage).with_patience(30), version)
    except Exception as error:  # noqa: BLE001 # all ranks must hear of it, or they would wait for this one
        return f"{type(error).__name__}: {error}"
    return "" if seen else f"{config.storage.root} has no {version}: give a store that every host reaches"


def _refuse(what: str, problems: Sequence[str]) -> None:
    """Raise ValueError if a rank has a problem."""
    named = exchange(f"{socket.gethostname()}, process {os.getpid()}")
    lines = [f"rank {rank} ({named[rank]}): {problem}" for rank, problem in enumerate(problems) if problem]
    if lines:
        raise ValueError(f"ranks {what}: {'; '.join(lines)}")
