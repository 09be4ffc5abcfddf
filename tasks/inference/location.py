"""Finds a model: a folder here, a committed checkpoint, or a name on the hub. Says which one it is, by a hash."""

import hashlib
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import configs
from configs import Config
from configs.models import Role
from storage import layout
from storage.errors import UnavailableError
from storage.objects.store import Store, sha256
from storage.version_names import PolicyVersion
from storage.versions.checkpoints import open_checkpoint
from storage.versions.fetch import WEIGHTS
from storage.versions.model_files import check_files

CONFIG = "config.json"
POLICIES = Path(configs.__file__).parent / "policies"
"""The tiny policies of this package, each in a folder."""
_TINY = "math-mt-ppo/"
TOKENIZER_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
"""Patterns for the files of a hub repository, without weights."""
_INSIDE = re.compile(r"(.*runs/[^/]+/checkpoints/\d{6})/([0-9a-f]{12}(/|$)|manifest\.json$)")
_UNWANTED = ["*/*.json", "*/*.safetensors", "*/*.txt", "*/*.model", "consolidated*"]


def locate(path: str, wanted: Sequence[str], knob: str = "policy.path") -> Path | tuple[str, str]:
    """Find a model: return its folder or, if it is a checkpoint, the root of its store and its version.

    `math-mt-ppo/NAME` is one of this package's tiny policies. If `path` is neither a folder nor a checkpoint, it is a
    name on the hub, and the files that match `wanted` are downloaded: no pickles, no code, and from its folders only
    chat templates. `knob` is the one that has the path.

    Raises:
        ValueError: the folder holds no model, or a pipe or a device (`check_files`), or the policy's is a part of a
            checkpoint, or no repository of the hub can have that name.
        UnavailableError: the hub cannot be reached.
    """
    folder, inside = Path(path).expanduser(), _INSIDE.match(path)
    if path in {f"{_TINY}{each.name}" for each in POLICIES.iterdir()}:
        folder = POLICIES / path.removeprefix(_TINY)
    if (folder / CONFIG).is_file() and not (inside and knob == "policy.path"):
        return check_files(folder)
    if inside:
        raise ValueError(f"{path} lies inside of a checkpoint: give {inside[1]}, whose files are verified")
    root, version = layout.split_uri(path)
    if root and PolicyVersion.is_place(version):  # such as s3://bucket/x/runs/demo/checkpoints/000100
        return root, version
    if not (folder.is_dir() or path.startswith((".", "/", "~", _TINY))):
        folder = _download(path, wanted, knob)
    if not (folder / CONFIG).is_file():
        raise ValueError(f"there is no {folder / CONFIG}, which the folder of every transformers model has")
    return check_files(folder)


def _download(path: str, wanted: Sequence[str], knob: str) -> Path:
    """Return the folder of a name on the hub; see `locate`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=list(wanted), ignore_patterns=_UNWANTED))
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise ValueError(f"{path!r} is neither a folder here nor on the hub: {error}") from error
    except Exception as error:  # errors of the network come in the classes of several libraries
        raise UnavailableError(
            f"{knob}={path!r} is not a folder here, and it cannot be downloaded: {type(error).__name__}: "
            f"{error.__cause__ or error}. Check name, network, HF_ENDPOINT and HF_HUB_OFFLINE, or give a folder"
        ) from error


def folder_of(config: Config, role: Role) -> Path:
    """Return the folder with a model's files.

    Raises:
        ValueError: there is no such model, or it is a checkpoint with an adapter.
        StorageError: it cannot be read, or the hub cannot be reached.
    """
    return _found(config.models.served()[role].path or "", config.storage.cache, f"models.{role}.path")


@lru_cache
def _found(path: str, cache: str, knob: str) -> Path:
    """Find a model's folder, once in a process: a name on the hub may mean other files later."""
    try:
        found = locate(path, [*TOKENIZER_FILES, "*.safetensors"], knob)
    except ValueError as error:
        raise ValueError(f"{knob}={path!r}: {error}") from None
    if not isinstance(found, Path):
        checkpoint = open_checkpoint(Store(found[0]), found[1], Path(cache))
        if checkpoint.adapter:
            raise ValueError(f"{knob}={path!r} is an adapter: give the folder of `python -m storage export --merge`")
        found = checkpoint.model
    if not any(found.glob("*.safetensors")):
        raise ValueError(f"{knob}={path!r}: there are no *.safetensors in {found}")
    return found


def identities(config: Config) -> dict[Role, str]:
    """Return the identity of each served model: `sha256:…` over the names and hashes of its files, or `name:…`.

    Files are read once in a process; `identity_of` reads them again, when servers are proven.

    Raises:
        ValueError, StorageError: see `folder_of`.
    """
    named = {role: getattr(knobs, "name", None) for role, knobs in config.models.served().items()}
    return {role: f"name:{name}" if name else _known_identity(folder_of(config, role)) for role, name in named.items()}


def model_fingerprints(config: Config) -> dict[Role, str]:
    """Return what names each served model in scores and annotations: its identity, and how it is served.

    Number format, length of the context, further arguments of vLLM and fields of requests may change what it says.
    """
    prints = identities(config)
    for role, each in config.models.served().items():
        how = [each.dtype, each.max_model_len, each.extra_args, *filter(None, [getattr(each, "request", {})])]
        prints[role] += json.dumps(how, sort_keys=True)
    return prints


def identity_of(folder: Path) -> str:
    """Return the identity of the model in a folder, as its files are now."""
    suffixes = (*WEIGHTS, *(pattern.removeprefix("*") for pattern in TOKENIZER_FILES))
    files = sorted(path for path in folder.iterdir() if path.name.endswith(suffixes) and path.is_file())
    return f"sha256:{hashlib.sha256(json.dumps([(path.name, sha256(path)) for path in files]).encode()).hexdigest()}"


_known_identity = lru_cache(identity_of)
