"""A policy from elsewhere: a transformers folder, a committed checkpoint, or a hub name."""

from pathlib import Path

from storage.checkpoints import open_checkpoint
from storage.store import StorageError, Store


def import_policy(path: str, folder: Path, cache: Path) -> None:
    """Write model (float32, safetensors) and tokenizer of `path` into `folder`.

    Raises:
        ValueError: nothing usable there, or weights in another format than safetensors.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = _locate(path, cache)
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


def _locate(path: str, cache: Path) -> str:
    """A local folder where `path` is one or a checkpoint of a store; anything else is transformers' to resolve."""
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        return str(folder)
    root, separator, rest = path.rstrip("/").partition("/runs/")
    if separator and "/checkpoints/" in rest:
        try:
            return str(open_checkpoint(Store(root), f"runs/{rest}", cache).model)
        except StorageError as error:
            raise ValueError(f"policy.path={path!r}: {error}") from error
    if path.startswith((".", "/", "~")) and not folder.is_dir():
        raise ValueError(f"policy.path={path!r} is not a folder")
    return str(folder) if folder.is_dir() else path
