"""Exports a checkpoint as a transformers folder with a model card.

The card is README.md in Markdown, with the metadata that the hub reads. It may be published. So of paths it has only
the last part, and neither the store's root nor the configuration.
"""

import html
import shlex
import shutil
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from configs import flatten
from storage import layout
from storage.errors import DamagedError, StorageError
from storage.logs import catalog
from storage.objects.store import Store, sha256
from storage.processes.folder import TemporaryFolder
from storage.version_names import PolicyVersion, ScoresVersion, select
from storage.versions import checkpoints, lineage, manifests
from storage.visible import visible

_IN_TABLES = str.maketrans({mark: f"&#{ord(mark)};" for mark in "|[`*\\"} | {"\n": " "})


def export(store: Store, policy: PolicyVersion, folder: Path, *, merge: bool = False) -> None:
    """Write the model and tokenizer of a checkpoint, as they are stored, and README.md to a new or empty folder.

    Of a checkpoint with an adapter it is the adapter, as peft reads it; or, with `merge`, the model with the adapter in
    its weights. The folder appears whole, after the stored files were compared with the hashes in the manifest.

    Raises:
        StorageError: the folder has something in it, or the checkpoint is damaged or was collected; or there is nothing
            to merge.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise StorageError(f"{folder} exists: give a new or an empty folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryFolder(str(folder.parent)) as scratch:
        checkpoint, made = checkpoints.open_checkpoint(store, policy, scratch / "cache"), scratch / "model"
        if merge and not checkpoint.adapter:
            raise StorageError(f"{policy} has no adapter: leave out --merge")
        if merge:
            from storage.versions.weights import save_merged

            save_merged(checkpoint, made)
        else:
            stored = checkpoint.adapter if checkpoint.base and checkpoint.adapter else checkpoint.model
            shutil.copytree(stored, made, copy_function=shutil.copyfile)
        (made / "README.md").write_text(model_card(store, checkpoint.manifest, made))
        made.rename(folder)


def model_card(store: Store, manifest: manifests.Manifest, folder: Path) -> str:
    """Return the card of a checkpoint that lies in a folder.

    Raises:
        DamagedError: its lineage is damaged.
    """
    policy, nodes = PolicyVersion(manifest.version), lineage.climb_down(store, [manifest.version])
    if problems := [f"{node.version}: {node.problem}" for node in nodes if node.problem]:
        raise DamagedError(f"{policy} has a damaged lineage: {problems[0]}; `python -m storage verify` says more")
    evaluations = [
        (scores.evaluation, dict(flatten(found.metrics)))
        for scores in select(ScoresVersion, dict.fromkeys(entry.version for entry in catalog.read_all(store)))
        if scores.evaluation and scores.evaluation.policy == policy and (found := manifests.find(store, scores))
    ]
    environment = Environment(trim_blocks=True, finalize=_shown)
    environment.filters["public"] = _public
    return environment.from_string(Path(__file__).with_name("model_card.md").read_text()).render(
        policy=policy,
        path=(manifest.settings.get("policy") or {}).get("path"),
        at=manifest.created_at,
        code=manifest.code_version,
        digest=manifests.as_parent(store, policy).sha256,
        lineage=[(layout.series_of(node.version), node) for node in nodes],
        sets=[manifests.read(store, node.version) for node in nodes if node.kind == "problems"],
        evaluations=evaluations,
        files=[(sha256(path), path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()],
        base=manifest.base and not (folder / "config.json").exists() and manifest.base.version,
        quoted=shlex.quote(policy),
    )


def _public(text: str) -> str:
    """Return a version's name in a URI, the last part of another URI or absolute path, and other texts as they are."""
    if not text.startswith(("/", "~")) and "://" not in text:  # such as a name of the hub
        return text
    version = layout.split_uri(text)[1]
    return version if PolicyVersion.is_place(version) else text.rstrip("/").rpartition("/")[2]


def _shown(value: Any) -> str:
    """Return a text that shows as it is: it cannot be markup, begin another cell or hide anything."""
    if isinstance(value, Markup):
        return value
    return html.escape(visible(str(value)), quote=False).translate(_IN_TABLES)
