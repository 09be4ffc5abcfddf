"""What the files of a transformers folder may not say, and which files may not be among them.

Libraries ask before they run code that lies beside weights (`auto_map`, `custom_generate/`), and are told no. What is
refused here works without a question: it fetches and runs code, reads files that no hash covers, or has a server load
other weights than the trainer.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from storage.errors import DamagedError

INDEX = "model.safetensors.index.json"
_ATTENTION = (None, "eager", "sdpa")
_EXPERTS = (None, "eager", "batched_mm", "grouped_mm")
_ALLOWED: dict[str, tuple[Any, ...]] = {
    # Other ones come from the hub as compiled code; with an underscore they win over the trainer's own choice.
    "attn_implementation": _ATTENTION,
    "_attn_implementation": _ATTENTION,
    "experts_implementation": _EXPERTS,
    "_experts_implementation": _EXPERTS,
    # Policies are trained, and proven to be served, in the numbers that their files hold.
    "quantization_config": (None, {}),
    "compression_config": (None, {}),
    # The server would load another model, or transformers another file.
    "speculators_config": (None,),
    "transformers_weights": (None,),
}
"""By key of config.json, at any depth: the values that it may have."""
PICKLE = re.compile(r".+\.(bin|pt|pth|pkl|pickle|ckpt|npy|npz|joblib)")
_CODE = re.compile(r".+\.(py|pyc|so)")
_ADAPTER = "adapter_config.json"


def check(folder: Path, names: Iterable[str] = ()) -> None:
    """Refuse a folder that holds a forbidden file, or a file with a forbidden value.

    Args:
        folder: of a transformers model.
        names: the files that would be loaded from it, where that is known; some may be absent from `folder`.

    Raises:
        StorageError: says which file, what is wrong with it, and what to do.
    """
    for path in sorted(folder.glob("*.json")):
        for problem in problems(path):
            raise DamagedError(f"{path} {problem}")
    for problem in name_problems(names, _shards(folder)):
        raise DamagedError(f"{folder} holds {problem}")
    if (folder / _ADAPTER).exists():
        raise DamagedError(f"{folder / _ADAPTER} is an adapter: merge it into the weights, and give these alone")


def problems(path: Path) -> list[str]:
    """What is wrong inside of one file of the folder; each a sentence without its subject, the file."""
    if path.name not in ("config.json", "tokenizer_config.json", "generation_config.json", INDEX):
        return []
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        return [f"is no JSON: {error}"]
    if not isinstance(values, dict):
        return ["is no JSON object"]
    if path.name == "config.json":
        return [f"says {key}={value!r}: {_remedy(key)}" for key, value in _refused(values)]
    if path.name == INDEX:
        return _index_problems(values)
    named = values.get("fast_tokenizer_files") or []
    return ["names fast_tokenizer_files outside of its folder: remove the key"] if _outside(named) else []


def name_problems(names: Iterable[str], shards: set[str] | None = None) -> Iterator[str]:
    """What is wrong with the names of a model's files; `shards` are those of its index, None where it has none."""
    for name in sorted(names):
        if PICKLE.fullmatch(name):
            yield f"{name}, a pickle: to load it would be to run code"
        elif _CODE.fullmatch(name):
            yield f"{name}, which is code"
        elif name.endswith(".safetensors") and name not in (shards or {"model.safetensors"}):
            yield f"{name}, weights that the trainer would not load and a server would: delete them"


def _refused(values: Any) -> Iterator[tuple[str, Any]]:
    """Keys, at any depth, with a value that they may not have."""
    if isinstance(values, dict):
        for key, value in values.items():
            if key in _ALLOWED and value not in _ALLOWED[key]:
                yield key, value
            else:
                yield from _refused(value)
    elif isinstance(values, list):
        for value in values:
            yield from _refused(value)


def _remedy(key: str) -> str:
    if key in ("quantization_config", "compression_config"):
        return "quantised weights cannot be trained; give a model whose weights are not"
    allowed = ", ".join(map(str, filter(None, _ALLOWED[key])))
    return "remove the key" + (f", or give one of {allowed}" if allowed else "")


def _index_problems(values: dict[str, Any]) -> list[str]:
    shards = values.get("weight_map")
    if not isinstance(shards, dict) or not shards:
        return ["has no weight_map"]
    outside = _outside(list(shards.values()))
    return [f"names {outside[0]!r}: weights must lie beside it, as *.safetensors"] if outside else []


def _outside(names: Any) -> list[Any]:
    """Of names that should be plain ones of safetensors or JSON files, those that are none."""
    plain, listed = re.compile(r"[^/\\]+\.(safetensors|json)"), names if isinstance(names, list) else [names]
    return [name for name in listed if not isinstance(name, str) or not plain.fullmatch(name)]


def _shards(folder: Path) -> set[str] | None:
    index = folder / INDEX
    return set(json.loads(index.read_bytes())["weight_map"].values()) if index.exists() else None
