"""A policy from elsewhere: a transformers folder, a committed checkpoint, or a hub name."""

from pathlib import Path

from storage.checkpoints import open_checkpoint
from storage.store import StorageError, Store


def import_policy(path: str, folder: Path, cache: Path, store: Store) -> str | None:
    """Write model (float32, safetensors) and tokenizer of `path` into `folder`.

    Returns:
        the checkpoint's version where it is one of `store`, and so a parent of the policy.

    Raises:
        ValueError: nothing usable there, or weights in another format than safetensors.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, version = _locate(path, cache, store)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype="float32", use_safetensors=True, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"policy.path={path!r} holds no usable policy: give a folder with config.json, model.safetensors and a "
            f"tokenizer, a committed checkpoint's URI, or a hub name ({str(error).splitlines()[0]})"
        ) from error
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return version


def _locate(path: str, cache: Path, store: Store) -> tuple[str, str | None]:
    """A local folder where `path` is one or a checkpoint of a store; anything else is transformers' to resolve.

    Beside it the checkpoint's version, where it lies in `store`.
    """
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        return str(folder), None
    root, separator, rest = path.rstrip("/").partition("/runs/")
    if separator and "/checkpoints/" in rest:
        version = f"runs/{rest}"
        here = path.rstrip("/") == store.uri(version)
        try:
            model = open_checkpoint(store if here else Store(root), version, cache).model
            return str(model), version if here else None
        except StorageError as error:
            raise ValueError(f"policy.path={path!r}: {error}") from error
    if path.startswith((".", "/", "~")) and not folder.is_dir():
        raise ValueError(f"policy.path={path!r} is not a folder")
    return str(folder) if folder.is_dir() else path, None
