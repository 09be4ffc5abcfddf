"""Exports a checkpoint as a transformers folder with a model card, and sends the folder to the hub."""

import shutil
from pathlib import Path

from storage.errors import StorageError, UnavailableError
from storage.maintenance.model_card import model_card
from storage.objects.store import Store
from storage.processes.folder import TemporaryFolder
from storage.version_names import PolicyVersion
from storage.versions.checkpoints import open_checkpoint

_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]


def export(store: Store, policy: PolicyVersion, folder: Path) -> None:
    """Write the model and tokenizer of a checkpoint, as they are stored, and README.md to a new or empty folder.

    The folder appears whole, after the stored files were compared with the hashes in the manifest.

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
        (made / "README.md").write_text(model_card(store, checkpoint.manifest))
        made.rename(folder)
    finally:
        scratch.remove()


def send(folder: Path, repository: str, message: str) -> str:
    """Send an exported folder to the hub as one commit; return the commit's URL. A new repository is private.

    Raises:
        UnavailableError: there is no token, or the hub cannot be reached, or refuses.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=True)  # the one in HF_TOKEN, or of `hf auth login`
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
