"""Finds the policy that a configuration names, its sizes and its tokenizer, without its weights and without torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs import Config
from configs.policy import Policy
from storage import layout
from storage.objects.store import Store
from storage.versions import model_files
from storage.versions.checkpoints import manifest_of_model
from storage.versions.fetch import WEIGHTS, fetch_folder
from storage.versions.manifests import read
from tasks.agents.chat import engine_ends, load_tokenizer
from tasks.inference.location import CONFIG, TOKENIZER_FILES, locate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_SIZES = (
    "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "vocab_size", "num_key_value_heads",
    "tie_word_embeddings",
)  # fmt: skip
_PUBLIC = {
    "Qwen/Qwen2.5-1.5B-Instruct": (1536, 28, 8960, 12, 151936, 2, True),
    "Qwen/Qwen2.5-7B-Instruct": (3584, 28, 18944, 28, 152064, 4, False),
    "Qwen/Qwen2.5-32B-Instruct": (5120, 64, 27648, 40, 152064, 8, False),
    "Qwen/Qwen2.5-72B-Instruct": (8192, 80, 29568, 64, 152064, 8, False),
}
"""The sizes of some public models by their hub names, so that they need no network."""


def policy_values(config: Config) -> dict[str, Any]:
    """Return the values of the policy's config.json.

    Raises:
        ValueError: it has no readable config.json.
        StorageError: the policy is a checkpoint that cannot be read, or the hub cannot be reached.
    """
    if (path := config.policy.path) in _PUBLIC and not Path(path).is_dir():
        return {"model_type": "qwen2", **dict(zip(_SIZES, _PUBLIC[path], strict=True))}
    file = _open_without_weights(config, [CONFIG]) / CONFIG
    for problem in model_files.problems(file):
        raise ValueError(f"{file} {problem}")
    values: dict[str, Any] = json.loads(file.read_bytes())
    return values


def _open_without_weights(config: Config, wanted: Sequence[str]) -> Path:
    """Return a folder of the policy that has all but its weights; of a hub name what matches `wanted`."""
    found = locate(policy_place(config), wanted)
    if isinstance(found, Path):
        return found
    store = Store(found[0])
    manifest = manifest_of_model(store, read(store, found[1]))
    return fetch_folder(store, manifest, "model", Path(config.storage.cache), leave_out=WEIGHTS)


def policy_place(config: Config) -> str:
    """Return `policy.path`, or the URI of the checkpoint of `policy.fork`; raise ValueError if there is neither."""
    if config.policy.path:
        return config.policy.path
    if not config.policy.fork:
        remedy = "give policy.path=math-mt-ppo/demo, or end a night that began with it by --give-up"
        raise ValueError(f"policy.warm_start: no policy is taught any more; {remedy}")
    return Store(config.storage.root).uri(layout.checkpoint_of(config.policy.fork))


def policy_tokenizer(config: Config) -> "tuple[PreTrainedTokenizerBase, int | None, tuple[int, ...]]":
    """Return the policy's tokenizer, the number of ids that the policy knows, and the tokens at which the engine stops.

    These are what `Chat` takes.

    Raises:
        UnavailableError: store or hub cannot be reached.
        Exception: see `load_tokenizer`.
    """
    found = _open_without_weights(config, TOKENIZER_FILES)
    vocabulary = json.loads((found / CONFIG).read_bytes()).get("vocab_size")
    return named(load_tokenizer(found), config.policy), vocabulary, engine_ends(found)


def named(tokenizer: "PreTrainedTokenizerBase", policy: Policy) -> "PreTrainedTokenizerBase":
    """Give a tokenizer the name by which errors call it: that of what the user gave."""
    tokenizer.name_or_path = f"policy.path={policy.path!r}" if policy.path else f"policy.fork={policy.fork!r}"
    return tokenizer
