"""Checks of a transformers folder: values that its files may not have, and files that it may not contain.

Libraries ask before they run code from a model's folder (`auto_map`, `custom_generate/`), and this pipeline says no.
This module refuses what libraries do without asking: fetch and run other code, read files that no hash covers, or load
other weights in a server than in the trainer.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from configs.policy import LoRA
from storage.errors import DamagedError, first_few

INDEX = "model.safetensors.index.json"
_ATTENTION = (None, "eager", "sdpa")
_EXPERTS = (None, "eager", "batched_mm", "grouped_mm")
_ALLOWED: dict[str, tuple[Any, ...]] = {
    # Other implementations come from the hub as compiled code. Keys with an underscore override the trainer's choice.
    "attn_implementation": _ATTENTION,
    "_attn_implementation": _ATTENTION,
    "experts_implementation": _EXPERTS,
    "_experts_implementation": _EXPERTS,
    # The trainer uses, and the canary proves, the numbers in the files, so the files may not be quantised.
    "quantization_config": (None, {}),
    "compression_config": (None, {}),
    # The server would load another model, or transformers would load another file.
    "speculators_config": (None,),
    "transformers_weights": (None,),
}
"""The allowed values of some keys of config.json, at any depth."""
PICKLE = re.compile(r".+\.(bin|pt|pth|pkl|pickle|ckpt|npy|npz|joblib)")
_CODE = re.compile(r".+\.(py|pyc|so)")
_ADAPTER = "adapter_config.json"
ADAPTER_FILES = (_ADAPTER, "adapter_model.safetensors")
"""The files of an adapter, as peft and vLLM read them."""


def check_files(folder: Path) -> Path:
    """Return a folder that a user names; raise DamagedError if it holds a pipe or a device, links followed.

    Hidden files and folders, such as those of git, are read by nothing.
    """
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not (hidden or path.is_file() or path.is_dir()) and path.exists():
            raise DamagedError(f"{path} is a pipe, a socket or a device: reading it might never end; remove it")
    return folder


def check(folder: Path, names: Iterable[str] = ()) -> None:
    """Refuse a folder with a forbidden file, or with a forbidden value in a file.

    Args:
        folder: a transformers model.
        names: the files that a library would load from it, if known; some may be absent from `folder`.

    Raises:
        DamagedError: the message names the file, what is wrong with it, and what to do.
    """
    for path in sorted(folder.glob("*.json")):
        for problem in problems(path):
            raise DamagedError(f"{path} {problem}")
    index = folder / INDEX
    shards = set(json.loads(index.read_bytes())["weight_map"].values()) if index.exists() else None
    for problem in name_problems(names, shards):
        raise DamagedError(f"{folder} holds {problem}")
    if (folder / _ADAPTER).exists():
        raise DamagedError(f"{folder / _ADAPTER} is an adapter: merge it into the weights and give only the weights")


def adapter_config(lora: LoRA) -> dict[str, Any]:
    """Return the content of an adapter's adapter_config.json. It names no base: the manifest does, with a hash."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "bias": "none",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": lora.targets,
    }


def read_adapter(folder: Path) -> LoRA:
    """Return the knobs of an adapter in a folder.

    Raises:
        DamagedError: the folder holds something else, or its adapter_config.json says what this pipeline does not
            write. Libraries would follow it: to another base, other weights, or another kind of adapter.
    """
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if others := sorted(set(names).symmetric_difference(ADAPTER_FILES)):
        raise DamagedError(f"{folder} holds {first_few(names)}: {first_few(others)} should not be there, or is missing")
    path = folder / _ADAPTER
    try:
        values = json.loads(path.read_bytes())
        lora = LoRA(rank=values["r"], alpha=values["lora_alpha"], targets=values["target_modules"])
    except (ValueError, TypeError, KeyError, RecursionError, ValidationError) as error:
        raise DamagedError(f"{path} is not the configuration of an adapter of this pipeline: {error!r}") from None
    expected = adapter_config(lora)
    if wrong := [key for key in sorted({*values, *expected}) if values.get(key, ...) != expected.get(key, ...)]:
        raise DamagedError(f"{path} says {wrong[0]}={values.get(wrong[0])!r}: this pipeline does not write that")
    return lora


def problems(path: Path) -> list[str]:
    """Return what is wrong with the content of one file; each problem is a sentence without its subject, the file."""
    if path.name not in ("config.json", "tokenizer_config.json", "generation_config.json", INDEX):
        return []
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        return [f"is not JSON: {error}"]
    if not isinstance(values, dict):
        return ["is not a JSON object"]
    if path.name == "config.json":
        return [f"says {key}={value!r}: {_remedy(key)}" for key, value in _refused(values)]
    if path.name == INDEX:
        shards = values.get("weight_map")
        if not isinstance(shards, dict) or not shards:
            return ["has no weight_map"]
        outside = _outside(list(shards.values()))
        return [f"names {outside[0]!r}: weights must be *.safetensors in the same folder"] if outside else []
    named = values.get("fast_tokenizer_files") or []
    return ["names fast_tokenizer_files outside of its folder: remove the key"] if _outside(named) else []


def name_problems(names: Iterable[str], shards: set[str] | None = None) -> Iterator[str]:
    """Yield problems with the names of a model's files; `shards` are the files in its index, None without an index."""
    for name in sorted(names):
        if PICKLE.fullmatch(name):
            yield f"{name}, a pickle: loading it would run code"
        elif _CODE.fullmatch(name):
            yield f"{name}, which is code"
        elif name.endswith(".safetensors") and name not in (shards or {"model.safetensors"}):
            yield f"{name}, weights that a server would load but the trainer would not: delete them"


def _refused(values: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys, at any depth, that have a forbidden value, with the value."""
    pairs = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in pairs:
        if key in _ALLOWED and value not in _ALLOWED[key]:
            yield key, value
        else:
            yield from _refused(value)


def _remedy(key: str) -> str:
    if key in ("quantization_config", "compression_config"):
        return "quantised weights cannot be trained; give a model that is not quantised"
    allowed = ", ".join(map(str, filter(None, _ALLOWED[key])))
    return "remove the key" + (f", or give one of {allowed}" if allowed else "")


def _outside(names: Any) -> list[Any]:
    """Return the names that are not plain names of safetensors or JSON files, such as paths to other folders."""
    plain, listed = re.compile(r"[^/\\]+\.(safetensors|json)"), names if isinstance(names, list) else [names]
    return [name for name in listed if not isinstance(name, str) or not plain.fullmatch(name)]
