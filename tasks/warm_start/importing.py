"""Import a policy from elsewhere: a transformers folder, a committed checkpoint, or a hub name."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from storage.errors import DamagedError, UnavailableError
from storage.objects.store import Store
from storage.versions import model_files
from storage.versions.checkpoints import open_checkpoint
from storage.versions.weights import load_model
from tasks.warm_start.policy_sizes import checkpoint_of
from tasks.warm_start.soundness import PolicyError, check_digits, check_modalities, check_vocabulary, check_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
