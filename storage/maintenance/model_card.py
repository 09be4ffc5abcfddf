"""The model card of a checkpoint: README.md in Markdown, with the metadata that the hub reads.

It may be published. So of paths it has only the last part, and neither the store's root nor the configuration.
"""

import hashlib
import html
import shlex
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from configs import flatten
from storage import layout
from storage.errors import DamagedError
from storage.logs import catalog
from storage.objects.store import Store
from storage.version_names import PolicyVersion, ScoresVersion, select, version_of
from storage.versions import manifests
from storage.versions.lineage import ancestors
from storage.versions.manifests import Manifest
from storage.visible import visible

_TEMPLATE = Path(__file__).with_suffix(".md")
_IN_TABLES = str.maketrans({mark: f"&#{ord(mark)};" for mark in "|[`*\\"} | {"\n": " "})


def model_card(store: Store, manifest: Manifest) -> str:
    """Return the card of a checkpoint.

    Raises:
        DamagedError: its lineage is damaged.
    """
    policy, nodes = PolicyVersion(manifest.version), ancestors(store, manifest.version)
    if problems := [f"{node.version}: {node.problem}" for node in nodes if node.problem]:
        raise DamagedError(f"{policy} has a damaged lineage: {problems[0]}; `python -m storage verify` says more")
    evaluations = [
        (scores.evaluation, dict(flatten(found.metrics)))
        for scores in select(ScoresVersion, dict.fromkeys(entry.version for entry in catalog.read_all(store)))
        if scores.evaluation and scores.evaluation.policy == policy and (found := manifests.find(store, scores))
    ]
    environment = Environment(trim_blocks=True, finalize=_shown)
    environment.filters["public"] = _public
    return environment.from_string(_TEMPLATE.read_text()).render(
        policy=policy,
        path=(manifest.settings.get("policy") or {}).get("path"),
        at=manifest.created_at,
        code=manifest.code_version,
        digest=hashlib.sha256(manifests.read_bytes(store, policy)).hexdigest(),
        lineage=[(layout.series_of(node.version), node) for node in nodes],
        sets=[manifests.read(store, node.version) for node in nodes if node.kind == "problems"],
        evaluations=evaluations,
        files=[file for file in manifest.files if file.name.startswith("model/")],
        quoted=shlex.quote(policy),
    )


def _public(text: str) -> str:
    """Return a version's name in a URI, the last part of another URI or absolute path, and other texts as they are."""
    if not text.startswith(("/", "~")) and "://" not in text:  # such as a name of the hub
        return text
    return version_of(f"runs{text.rpartition('/runs')[2]}") or text.rstrip("/").rpartition("/")[2]


def _shown(value: Any) -> str:
    """Return a text that shows as it is: it cannot be markup, begin another cell or hide anything."""
    if isinstance(value, Markup):
        return value
    return html.escape(visible(str(value)), quote=False).translate(_IN_TABLES)
