"""Exports a checkpoint as a transformers folder with a model card, and sends the folder to the hub."""

import re
import shutil
from pathlib import Path

from storage.errors import DamagedError, StorageError, UnavailableError
from storage.maintenance.model_card import model_card
from storage.objects.store import Store, has_content
from storage.processes.folder import TemporaryFolder
from storage.version_names import PolicyVersion
from storage.versions.checkpoints import open_checkpoint

_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]


def export(store: Store, policy: PolicyVersion, folder: Path) -> None:
    """Write the model and tokenizer of a checkpoint, as they are stored, and README.md to a new or empty folder.

    The folder appears whole, after its files were compared with the hashes in the manifest.

    Raises:
        StorageError: the folder has something in it, or the checkpoint is damaged or was collected.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise StorageError(f"{folder} exists: give a new or an empty folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = TemporaryFolder(str(folder.parent))
    try:
        checkpoint, made = open_checkpoint(store, policy, scratch.path / "cache"), scratch.path / "model"
        shutil.copytree(checkpoint.model, made, copy_function=shutil.copyfile)
        for file in checkpoint.manifest.files:
            if file.name.startswith("model/") and not has_content(scratch.path / file.name, file.bytes, file.sha256):
                raise DamagedError(f"{file.name} was not copied whole: check the disk of {folder.parent}")
        (made / "README.md").write_text(model_card(store, checkpoint.manifest))
        made.rename(folder)
    finally:
        scratch.remove()


def hub_token(repository: str) -> str:
    """Return the token for the hub. Raises StorageError if there is none, or if there cannot be such a repository."""
    from huggingface_hub import get_token

    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise StorageError(f"{repository!r} is no repository of the hub: give OWNER/NAME")
    if not (token := get_token()):
        raise StorageError(
            "there is no token for the hub: set HF_TOKEN to one that may write, or log in (`hf auth login`)"
        )
    return token


def send(folder: Path, repository: str, token: str, message: str) -> str:
    """Send an exported folder to the hub as one commit; return the commit's URL. A new repository is private.

    Raises:
        UnavailableError: the hub cannot be reached, or refuses.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    try:
        api.create_repo(repository, private=True, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message=message, delete_patterns=_WEIGHTS
        )
    except Exception as error:  # the library raises its own errors and those of its HTTP client: no common base
        told = " ".join(str(error).split())
        raise UnavailableError(
            f"{repository} was not written ({type(error).__name__}: {told}). {folder} is whole: "
            f"`hf upload {repository} {folder}` sends it"
        ) from error
    return str(commit.commit_url)
