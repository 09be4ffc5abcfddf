"""Import a policy from elsewhere: a transformers folder, a committed checkpoint, or a hub name.

Before the copy, weights and tokenizer are checked: can they be trained and played? Before the commit, the configured
agent is made with the policy (`try_out`).
"""

import asyncio
import json
from pathlib import Path

from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from configs import Config
from storage.errors import UnavailableError, first_few
from storage.objects.store import Store
from storage.versions import contents, model_files
from storage.versions.checkpoints import open_checkpoint
from storage.versions.model_files import INDEX
from storage.versions.weights import load_model, merge, not_finite
from tasks.agents import AGENTS
from tasks.agents.chat import Chat, engine_ends, refuse_empty
from tasks.agents.interface import AgentContext
from tasks.inference.api import GenerationConfig
from tasks.inference.location import TOKENIZER_FILES, locate
from tasks.problems.mixture import naming
from tasks.warm_start.policy_sizes import named

_FLOATS = ("F64", "F32", "F16", "BF16")
_DIGITS = "12345 + 67890"
_LONGEST = 400  # characters of another library's message that are quoted


class PolicyError(ValueError):
    """A policy from elsewhere cannot be used; the message names it, the file, what is wrong and the remedy."""


def import_policy(path: str, folder: Path, cache: Path, store: Store) -> str | None:
    """Copy model (float32, safetensors) and tokenizer of `path` to `folder`; merge a checkpoint's adapter into them.

    No code of the policy is run, and the copy refers to none, even if the original does (`auto_map`).

    Returns:
        the version of the checkpoint, if `path` is a checkpoint of `store`; it becomes a parent of the policy.

    Raises:
        PolicyError: `path` holds no usable policy, or weights in another format than safetensors.
        UnavailableError: the hub cannot be reached.
        OSError, SafetensorError: the copy cannot be written, for example because the disk is full.
    """
    try:
        found, version, adapter = locate(path, [*TOKENIZER_FILES, "*.safetensors"]), None, None
        if not isinstance(found, Path):
            root, name = found
            version = name if path.rstrip("/") == store.uri(name) else None
            checkpoint = open_checkpoint(store if version else Store(root), name, cache)
            found, adapter = checkpoint.model, checkpoint.adapter
        model, tokenizer = _load(found, adapter)
    except (MemoryError, UnavailableError):
        raise
    except Exception as error:  # transformers and tokenizers raise whatever their parsers raise
        what = " ".join(str(error).split())[:_LONGEST].rstrip(".") or type(error).__name__
        raise PolicyError(
            f"policy.path={path!r} holds no usable policy: {what}. Give a folder with config.json, "
            "model.safetensors and a tokenizer, a committed checkpoint's URI, or a hub name"
        ) from error
    for values in (model.config.__dict__, tokenizer.init_kwargs):
        values.pop("auto_map", None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model_files.check(folder, [path.name for path in folder.iterdir()])
    return version


def _load(folder: Path, adapter: Path | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Check a policy, and load its model and tokenizer."""
    model_files.check(folder)
    check_weights(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    if config.get_text_config() is not config:
        what = f"{config.model_type} is a model of several modalities"
        raise ValueError(f"config.json: {what}, which cannot be trained here: give a model that reads text alone")
    model = load_model(folder, adapter)
    if adapter:
        merge(model)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    check_tokenizer(folder, tokenizer, model.config.vocab_size)
    assert model.generation_config is not None
    try:
        model.generation_config.validate(strict=True)
    except ValueError:  # many policies set only a temperature, and transformers refuses to save that
        model.generation_config.do_sample = True
    return model, tokenizer


def check_weights(folder: Path) -> None:
    """Check every tensor of a model.

    Raises:
        ValueError: a file is missing, truncated or not safetensors; or weights are quantised, NaN or infinite.
    """
    files = ["model.safetensors"]  # those that transformers would load
    if not (folder / files[0]).is_file() and (folder / INDEX).is_file():
        files = sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
    for path in (folder / name for name in files):
        if not path.is_file():
            raise ValueError(f"{path} is missing: copy all files of the model")
        if problems := contents.safetensors(path):
            raise ValueError(f"{path} {problems[0]}: it was copied in part, or is no such file; copy it again")
        with safe_open(path, framework="np") as file:
            types = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - no mapping
        if quantised := [name for name, kind in types.items() if name.endswith("weight") and kind not in _FLOATS]:
            given, able = f"{first_few(quantised)} in {types[quantised[0]]}", ", ".join(_FLOATS)
            raise ValueError(f"{path}: {given}, which cannot be trained; give weights in one of {able}")
        if broken := not_finite(path):
            raise ValueError(f"{path}: {first_few(broken)} with NaN or infinities; give an earlier checkpoint")


def check_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
    """Check that a tokenizer fits a model with `vocabulary` tokens, and keeps digits.

    Added tokens may have larger ids: some text models share a tokenizer with image models and do not know the image
    placeholders. A prompt with such an id is refused when it is played.

    Raises:
        ValueError: other tokens have larger ids; it is empty; or digits change in encoding and decoding, so that the
            policy would read and answer other numbers.
    """
    refuse_empty(tokenizer, folder)
    ids, added = tokenizer.get_vocab(), tokenizer.get_added_vocab()
    if beyond := [token for token, number in ids.items() if number >= vocabulary and token not in added]:
        what = f"{len(beyond)} tokens, such as {beyond[0]!r}, beyond the {vocabulary} of the model"
        raise ValueError(
            f"the tokenizer in {folder} has {what} (vocab_size in config.json): give the model's own tokenizer"
        )
    decoded = str(tokenizer.decode(tokenizer.encode(_DIGITS, add_special_tokens=False)))
    if list(filter(str.isdigit, decoded)) != list(filter(str.isdigit, _DIGITS)):
        remedy = "give the model's own tokenizer, whole"
        raise ValueError(f"the tokenizer in {folder} makes {decoded[:80]!r} of {_DIGITS!r}: {remedy}")


def try_out(folder: Path, config: Config) -> Chat:
    """Load the tokenizer, render toy conversations with its chat template, and make the agent; return the chat.

    The agent is made inside an event loop, as in a rollout.

    Raises:
        PolicyError: the template fails, or no token ends a turn.
        ValueError: the agent cannot be made.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    named(tokenizer, config.policy)
    try:
        chat = Chat(tokenizer, ends=engine_ends(folder))
    except ValueError as error:
        raise PolicyError(str(error)) from error
    if not chat.stop_token_ids:
        raise PolicyError(f"{tokenizer.name_or_path}: nothing ends a turn: set eos_token in tokenizer_config.json")

    async def make_agent() -> None:
        gconfig = GenerationConfig(max_new_tokens=config.sampling.max_new_tokens)
        context = AgentContext(chat, gconfig, config.inference.max_model_len)
        for where, played in config.played:
            with naming(where):
                AGENTS.make(played.agent.type, context, played.agent.args)

    asyncio.run(make_agent())
    return chat
