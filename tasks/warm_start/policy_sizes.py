"""The sizes of the policy that a configuration names, found without its weights and without torch."""

import json
from pathlib import Path
from typing import Any

from configs import Config
from configs.policy import HEAD_SIZE, WarmStart
from configs.problems import ArithmeticSource
from storage.errors import UnavailableError
from storage.objects.store import Store
from storage.versions import model_files
from storage.versions.fetch import fetch
from storage.versions.manifests import read
from tasks.agents.math_multi_turn import WRONG_FEEDBACK
from tasks.problems.arithmetic import generate
from tasks.train.memory import PUBLIC, ModelSizes

_NAME = "config.json"


def policy_sizes(config: Config) -> ModelSizes:
    """Return the sizes of the policy.

    Raises:
        ValueError: the policy is of a kind that `ModelSizes` does not know, or it has no readable config.json.
        StorageError: the policy is a checkpoint that cannot be read, or the hub cannot be reached.
    """
    path = config.policy.path
    if path is None:
        return _of_warm_start(config)
    if path in PUBLIC and not Path(path).is_dir():
        return PUBLIC[path]
    file = _find(path, Path(config.storage.cache))
    for problem in model_files.problems(file):
        raise ValueError(f"{file} {problem}")
    try:
        return ModelSizes.of(json.loads(file.read_bytes()))
    except ValueError as error:
        raise ValueError(f"policy.path={path!r}: {error}") from None


def tiny_sizes(knobs: WarmStart, vocabulary: int) -> dict[str, Any]:
    """Return the sizes of a warm start's policy, a Qwen3, under their names in a config.json.

    Embeddings are untied, because vLLM's CPU backend does not update a tied output layer when weights are reloaded.
    """
    heads = knobs.hidden_size // HEAD_SIZE
    return {
        "vocab_size": vocabulary,
        "hidden_size": knobs.hidden_size,
        "intermediate_size": 3 * knobs.hidden_size,
        "num_hidden_layers": knobs.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": HEAD_SIZE,
        "tie_word_embeddings": False,
    }


def lesson(config: Config) -> tuple[ArithmeticSource, str]:
    """Return what a warm start teaches: a source of problems, and the feedback after a wrong answer."""
    assert config.policy.warm_start is not None
    taught = config.policy.warm_start.teaches or config.problems.train
    assert taught.kind == "arithmetic"  # the schema refuses other kinds
    return taught, str(config.agent.args.get("wrong_feedback", WRONG_FEEDBACK))


def checkpoint_of(path: str) -> tuple[str, str] | None:
    """Split the URI of a checkpoint into its store's root and its version; return None for another path.

    >>> checkpoint_of("s3://bucket/x/runs/demo/checkpoints/000100")
    ('s3://bucket/x', 'runs/demo/checkpoints/000100')
    """
    root, separator, rest = path.rstrip("/").partition("/runs/")
    return (root, f"runs/{rest}") if separator and "/checkpoints/" in rest else None


def _of_warm_start(config: Config) -> ModelSizes:
    from tasks.warm_start.tokenizer import build_tokenizer, taught_texts

    knobs = config.policy.warm_start
    assert knobs is not None
    source, feedback = lesson(config)
    tokenizer = build_tokenizer(taught_texts(generate(source), feedback), calculator=bool(knobs.tool_share))
    return ModelSizes.of({"model_type": "qwen3", **tiny_sizes(knobs, len(tokenizer))})


def _find(path: str, cache: Path) -> Path:
    """Return a local copy of a policy's config.json: from its folder, its checkpoint, or the hub."""
    file = Path(path).expanduser() / _NAME
    if file.is_file():
        return file
    if place := checkpoint_of(path):
        store = Store(place[0])
        return fetch(store, read(store, place[1]), f"model/{_NAME}", cache)
    if file.parent.is_dir() or path.startswith((".", "/", "~")):
        raise ValueError(f"policy.path={path!r}: there is no {file}: give the folder of a transformers model")
    return _from_hub(path)


def _from_hub(name: str) -> Path:
    """Return config.json of a hub's repository; it is downloaded if it is not in the hub's cache."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    if isinstance(cached := try_to_load_from_cache(name, _NAME), str):
        return Path(cached)
    try:
        return Path(hf_hub_download(name, _NAME))
    except Exception as error:  # errors of the network come in the classes of several libraries
        raise UnavailableError(
            f"policy.path={name!r} is neither a folder nor in the hub's cache here, and its {_NAME} cannot be "
            f"downloaded ({type(error).__name__}): check the name and the network, or give a folder with a {_NAME}"
        ) from error
