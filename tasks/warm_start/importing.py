"""A policy from elsewhere: a transformers folder, a committed checkpoint, or a hub name."""

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
from tasks.warm_start.soundness import PolicyError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
_UNWANTED = ["*/*.json", "*/*.safetensors", "*/*.txt", "*/*.model", "consolidated*"]
"""Patterns for the files of a hub repository: no pickles, no code, and nothing in folders but chat templates."""
_MACHINES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE}
"""Numbers of errors that are this machine's and not the policy's."""
_LONGEST = 400  # characters of another library's message


def import_policy(path: str, folder: Path, cache: Path, store: Store) -> str | None:
    """Write model (float32, safetensors) and tokenizer of `path` into `folder`.

    No code that lies there is run, and `folder` names none, whatever the original says (`auto_map`).

    Returns:
        the checkpoint's version where it is one of `store`, and so a parent of the policy.

    Raises:
        PolicyError: nothing usable there, or weights in another format than safetensors.
        UnavailableError: the hub cannot be asked.
        OSError: this machine lacks something, such as room on its disk.
    """
    try:
        source, version = _locate(path, cache, store)
        _copy(source, folder)
    except (MemoryError, UnavailableError):
        raise
    except Exception as error:  # transformers and tokenizers raise whatever their parsers raise
        if number := _machines(error):
            raise OSError(number, f"policy.path={path!r} cannot be copied to {folder}: {_told(error)}") from error
        raise PolicyError(
            f"policy.path={path!r} holds no usable policy: {_told(error)}. Give a folder with config.json, "
            "model.safetensors and a tokenizer, a committed checkpoint's URI, or a hub name"
        ) from error
    return version


def _copy(source: Path, folder: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    from storage.versions.weights import load_model
    from tasks.warm_start.soundness import check_digits, check_modalities, check_vocabulary, check_weights

    model_files.check(source)
    check_weights(source)
    with _naming(source / "config.json"):
        check_modalities(AutoConfig.from_pretrained(source, trust_remote_code=False, local_files_only=True))
        model = load_model(source)
    with _naming(source / "tokenizer.json"):
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
    """Many policies name a temperature without `do_sample`, and transformers would not write that."""
    assert model.generation_config is not None
    try:
        model.generation_config.validate(strict=True)
    except ValueError:
        model.generation_config.do_sample = True


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors of other libraries mostly do not say which file they were reading."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        if str(path.parent) in str(error) or _machines(error):
            raise
        raise ValueError(f"{path}: {_told(error)}") from error


def _machines(error: Exception) -> int | None:
    """The number of an error that no other policy would mend; safetensors tells it in its text alone."""
    if isinstance(error, OSError):
        number = error.errno
    else:
        found = re.search(r"\(os error (\d+)\)", str(error)) if isinstance(error, SafetensorError) else None
        number = int(found[1]) if found else None
    return number if number in _MACHINES else None


def _told(error: Exception) -> str:
    """An error on one line, with its type where the text alone may mean nothing."""
    text = " ".join(str(error).split())[:_LONGEST].rstrip(".")
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


def _locate(path: str, cache: Path, store: Store) -> tuple[Path, str | None]:
    """A local folder, and the checkpoint's version where `path` is one that lies in `store`.

    What is neither a folder nor a checkpoint is a name on the hub, which is downloaded.
    """
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        return folder, None
    root, separator, rest = path.rstrip("/").partition("/runs/")
    if separator and "/checkpoints/" in rest:
        version = f"runs/{rest}"
        here = path.rstrip("/") == store.uri(version)
        return open_checkpoint(store if here else Store(root), version, cache).model, version if here else None
    if folder.is_dir():
        raise DamagedError(f"{folder} has no config.json")
    if path.startswith((".", "/", "~")):
        raise DamagedError(f"{folder} is not a folder")
    return _download(path), None


def _download(name: str) -> Path:
    """The folder of a repository on the hub, or of a copy that was downloaded before."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except (HFValidationError, RepositoryNotFoundError, MemoryError):
        raise
    except Exception as error:  # of the network, in classes of several libraries
        if _machines(error):
            raise
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        raise UnavailableError(
            f"policy.path={name!r} is not a folder here, and the hub cannot be asked for it: {_told(cause)}. Check "
            "the network, HF_ENDPOINT and HF_HUB_OFFLINE, or give a folder"
        ) from error
