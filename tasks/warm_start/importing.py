"""Import a policy from elsewhere: a transformers folder, a committed checkpoint, or a hub name.

Before it is copied, its weights and tokenizer are checked: can they be trained and played? Before it is committed, the
configured agent is made with it (`try_out`).
"""

import asyncio
import errno
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from configs import Config
from storage.errors import DamagedError, UnavailableError
from storage.objects.store import Store
from storage.versions import contents, model_files
from storage.versions.checkpoints import open_checkpoint
from storage.versions.model_files import INDEX
from storage.versions.weights import load_model, not_finite
from tasks.agents import AGENTS
from tasks.agents.chat import Chat
from tasks.agents.interface import AgentContext
from tasks.inference.api import GenerationConfig
from tasks.warm_start.policy_sizes import checkpoint_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
_UNWANTED = ["*/*.json", "*/*.safetensors", "*/*.txt", "*/*.model", "consolidated*"]
"""Patterns for the files of a hub repository: no pickles, no code, and from its folders only chat templates."""
_MACHINE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE}
"""Numbers of errors that this machine causes, not the policy."""
_LONGEST = 400  # characters of another library's message that are quoted


def import_policy(path: str, folder: Path, cache: Path, store: Store) -> str | None:
    """Copy model (float32, safetensors) and tokenizer of `path` to `folder`.

    No code of the policy is run, and the copy refers to none, even if the original does (`auto_map`).

    Returns:
        the version of the checkpoint, if `path` is a checkpoint of `store`; it becomes a parent of the policy.

    Raises:
        PolicyError: `path` holds no usable policy, or weights in another format than safetensors.
        UnavailableError: the hub cannot be reached.
        OSError: this machine cannot do it, for example because its disk is full.
    """
    try:
        source, version = _locate(path, cache, store)
        _copy(source, folder)
    except (MemoryError, UnavailableError):
        raise
    except Exception as error:  # transformers and tokenizers raise whatever their parsers raise
        if number := _machine_error_number(error):
            raise OSError(number, f"policy.path={path!r} cannot be copied to {folder}: {_one_line(error)}") from error
        raise PolicyError(
            f"policy.path={path!r} holds no usable policy: {_one_line(error)}. Give a folder with config.json, "
            "model.safetensors and a tokenizer, a committed checkpoint's URI, or a hub name"
        ) from error
    return version


def _copy(source: Path, folder: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    model_files.check(source)
    check_weights(source)
    with _with_path(source / "config.json"):
        check_modalities(AutoConfig.from_pretrained(source, trust_remote_code=False, local_files_only=True))
        model = load_model(source)
    with _with_path(source / "tokenizer.json"):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, local_files_only=True)
    check_vocabulary(source, tokenizer, model.config.vocab_size)
    check_digits(source, tokenizer)
    _allow_sampling(model)
    for values in (model.config.__dict__, tokenizer.init_kwargs):
        values.pop("auto_map", None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model_files.check(folder, [path.name for path in folder.iterdir()])


def _allow_sampling(model: "PreTrainedModel") -> None:
    """Set `do_sample` if it is missing: many policies set only a temperature, and transformers refuses to save that."""
    assert model.generation_config is not None
    try:
        model.generation_config.validate(strict=True)
    except ValueError:
        model.generation_config.do_sample = True


@contextmanager
def _with_path(path: Path) -> Iterator[None]:
    """Add `path` to errors of other libraries, which rarely name the file that they read."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        if str(path.parent) in str(error) or _machine_error_number(error):
            raise
        raise ValueError(f"{path}: {_one_line(error)}") from error


def _machine_error_number(error: Exception) -> int | None:
    """Return the number of an error that this machine causes, else None. Safetensors has it only in its text."""
    if isinstance(error, OSError):
        number = error.errno
    else:
        match = re.search(r"\(os error (\d+)\)", str(error)) if isinstance(error, SafetensorError) else None
        number = int(match[1]) if match else None
    return number if number in _MACHINE_ERRORS else None


def _one_line(error: Exception) -> str:
    """Format an error as one line, with its type unless it is a ValueError with a text."""
    text = " ".join(str(error).split())[:_LONGEST].rstrip(".")
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


def _locate(path: str, cache: Path, store: Store) -> tuple[Path, str | None]:
    """Return the policy's local folder, and the checkpoint's version if `path` is a checkpoint of `store`.

    If `path` is neither a folder nor a checkpoint, it is a name on the hub, and the policy is downloaded.
    """
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        return folder, None
    if place := checkpoint_of(path):
        root, version = place
        in_store = path.rstrip("/") == store.uri(version)
        checkpoint = open_checkpoint(store if in_store else Store(root), version, cache)
        return checkpoint.model, version if in_store else None
    if folder.is_dir():
        raise DamagedError(f"{folder} has no config.json")
    if path.startswith((".", "/", "~")):
        raise DamagedError(f"{folder} is not a folder")
    return _download(path), None


def _download(name: str) -> Path:
    """Download a repository of the hub, unless a copy is there already; return the folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except (HFValidationError, RepositoryNotFoundError, MemoryError):
        raise
    except Exception as error:  # errors of the network come in the classes of several libraries
        if _machine_error_number(error):
            raise
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        raise UnavailableError(
            f"policy.path={name!r} is not a folder here, and it cannot be downloaded from the hub: {_one_line(cause)}. "
            "Check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or give a folder"
        ) from error


_FLOATS = ("F64", "F32", "F16", "BF16")
_DIGITS = "12345 + 67890"
_NAMED = 3  # tensors that a message names


class PolicyError(ValueError):
    """A policy from elsewhere cannot be used; the message names it, the file, what is wrong and the remedy."""


def check_weights(folder: Path) -> None:
    """Check every tensor of a model.

    Raises:
        ValueError: a file is missing, truncated or not safetensors; or weights are quantised, NaN or infinite.
    """
    for path in _files(folder):
        if not path.is_file():
            raise ValueError(f"{path} is missing: copy all files of the model")
        if problems := contents.safetensors(path):
            raise ValueError(f"{path} {problems[0]}: it was copied in part, or is no such file; copy it again")
        _check_tensors(path)


def _files(folder: Path) -> list[Path]:
    """List the files that transformers would load."""
    if (folder / "model.safetensors").is_file() or not (folder / INDEX).is_file():
        return [folder / "model.safetensors"]
    shards = json.loads((folder / INDEX).read_bytes())["weight_map"].values()
    return [folder / name for name in sorted(set(shards))]


def _check_tensors(path: Path) -> None:
    with safe_open(path, framework="np") as file:
        types = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - no mapping
    if quantised := [name for name, kind in types.items() if name.endswith("weight") and kind not in _FLOATS]:
        raise ValueError(
            f"{path}: {_short(quantised)} in {types[quantised[0]]}, which cannot be trained; give weights in one of "
            f"{', '.join(_FLOATS)}"
        )
    try:
        broken = not_finite(path)
    except (SafetensorError, RuntimeError, TypeError) as error:
        raise ValueError(f"{path}: its tensors cannot be read: {error}") from error
    if broken:
        raise ValueError(f"{path}: {_short(broken)} with NaN or infinities; give an earlier checkpoint")


def check_modalities(config: "PreTrainedConfig") -> None:
    """Raise ValueError for a model that reads more than text; its configuration has several parts."""
    if config.get_text_config() is not config:
        raise ValueError(
            f"{config.model_type} is a model of several modalities, which cannot be trained here: give a model that "
            "reads text alone"
        )


def check_vocabulary(folder: Path, tokenizer: "PreTrainedTokenizerBase", vocabulary: int) -> None:
    """Check that a tokenizer fits a model with `vocabulary` tokens.

    Added tokens may have larger ids: some text models share a tokenizer with image models and do not know the image
    placeholders. A prompt with such an id is refused when it is played.

    Raises:
        ValueError: other tokens have larger ids, or the tokenizer is the empty one that transformers makes up if it
            finds none.
    """
    ids, added = tokenizer.get_vocab(), tokenizer.get_added_vocab()
    beyond = [token for token, number in ids.items() if number >= vocabulary and token not in added]
    if ids.keys() <= set(tokenizer.all_special_tokens):
        raise ValueError(f"{folder} has no tokenizer: copy tokenizer.json and tokenizer_config.json, too")
    if beyond:
        raise ValueError(
            f"the tokenizer in {folder} has {len(beyond)} tokens, such as {beyond[0]!r}, beyond the {vocabulary} of "
            "the model (vocab_size in config.json): give the model's own tokenizer"
        )


def check_digits(folder: Path, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise ValueError if digits change in encoding and decoding: the policy would read and answer other numbers."""
    decoded = str(tokenizer.decode(tokenizer.encode(_DIGITS, add_special_tokens=False)))
    if [letter for letter in decoded if letter.isdigit()] != [letter for letter in _DIGITS if letter.isdigit()]:
        raise ValueError(
            f"the tokenizer in {folder} makes {decoded[:80]!r} of {_DIGITS!r}: give the model's own tokenizer, whole"
        )


def _short(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def try_out(folder: Path, config: Config) -> Chat:
    """Load the tokenizer, render toy conversations with its chat template, and make the agent; return the chat.

    The agent is made inside an event loop, as in a rollout.

    Raises:
        PolicyError: the template fails, no token ends a turn, or the policy's context is shorter than
            `inference.max_model_len`.
        ValueError: the agent cannot be made.
    """
    where = f"policy.path={config.policy.path!r}" if config.policy.path else "the policy of the warm start"
    _check_context(where, folder, config.inference.max_model_len)
    chat = _chat(where, folder)
    if not chat.stop_token_ids:
        raise PolicyError(f"{where}: nothing ends a turn: set eos_token in tokenizer_config.json")
    gconfig = GenerationConfig(max_new_tokens=config.sampling.max_new_tokens)
    asyncio.run(_make_agent(config, AgentContext(chat, gconfig, config.inference.max_model_len)))
    return chat


async def _make_agent(config: Config, context: AgentContext) -> None:
    AGENTS.make(config.agent.type, context, config.agent.args)


def _chat(where: str, folder: Path) -> Chat:
    from transformers import AutoTokenizer

    from tasks.agents.chat import engine_ends, open_chat

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    tokenizer.name_or_path = where  # errors then name what the user gave, not the scratch folder
    try:
        return open_chat(tokenizer, ends=engine_ends(folder))
    except ValueError as error:
        raise PolicyError(str(error)) from error


def _check_context(where: str, folder: Path, asked: int) -> None:
    """Check the context length; leave models with scaled positions (`rope_scaling`) to the server's check.

    Their context is longer than `max_position_embeddings`.
    """
    values = json.loads((folder / "config.json").read_bytes())
    positions = values.get("max_position_embeddings")
    scaled = '"factor"' in json.dumps([values.get(key) for key in ("rope_scaling", "rope_parameters")])
    if isinstance(positions, int) and not scaled and positions < asked:
        raise PolicyError(
            f"{where}: its context is {positions} tokens (max_position_embeddings in config.json), "
            f"inference.max_model_len={asked} asks for more: set it to {positions} at most"
        )
