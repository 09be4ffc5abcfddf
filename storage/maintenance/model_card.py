"""The model card of a checkpoint: README.md in Markdown, with the metadata that the hub reads.

It may be published. So of paths it has only the last part, and neither the store's root nor the configuration.
"""

import hashlib
import html
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from configs import flatten
from storage import layout
from storage.errors import DamagedError
from storage.logs import catalog
from storage.objects.store import Store
from storage.version_names import PolicyVersion, ScoresVersion, select, version_of
from storage.versions import manifests
from storage.versions.lineage import Node, ancestors
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
    sets = [manifests.read(store, node.version) for node in nodes if node.kind == "problems"]
    sources = [(made.version, made.rows, made.metrics.get("source") or {}) for made in sets]
    path = (manifest.settings.get("policy") or {}).get("path")
    estimates = [*_estimates(store, policy)]
    files = [file for file in manifest.files if file.name.startswith("model/")]
    return _TEMPLATE.read_text().format(
        title=_cell(f"{policy.run}, policy version {policy.number}"),
        version=_cell(policy),
        run=_cell(policy.run),
        number=policy.number,
        origin=_cell(_public(path)) if path else "a tiny policy, which its warm start taught",
        at=manifest.created_at,
        code=_cell(manifest.code_version),
        digest=hashlib.sha256(manifests.read_bytes(store, policy)).hexdigest(),
        lineage=_table(("versions", "kind", "number", "rows"), _lineage(nodes)),
        data=_table(("problem set", "problems", "source"), [(name, rows, _described(s)) for name, rows, s in sources]),
        evaluation=_table(("set", "protocol", "episodes", "measure", "value", "95 % interval"), estimates),
        sums="\n".join(f"{file.sha256}  {file.name.removeprefix('model/')}" for file in files),
        quoted=shlex.quote(policy),
    )


def _lineage(nodes: Sequence[Node]) -> Iterator[Sequence[Any]]:
    """Yield a row for each series of versions, such as the checkpoints of a run."""
    series: dict[str, list[Node]] = {}
    for node in nodes:
        series.setdefault(layout.series_of(node.version), []).append(node)
    for name, versions in series.items():
        yield name, versions[0].kind, len(versions), sum(node.rows for node in versions) or ""


def _estimates(store: Store, policy: PolicyVersion) -> Iterator[Sequence[Any]]:
    """Yield a row for each number with an interval in the evaluations of a checkpoint."""
    for scores in select(ScoresVersion, dict.fromkeys(entry.version for entry in catalog.read_all(store))):
        played = scores.evaluation
        if played and played.policy == policy and (found := manifests.find(store, scores)):
            numbers = dict(flatten(found.metrics))
            problems = f"{played.set_name or 'held-out'}, {numbers.get('problem_set', '')}".removesuffix(", ")
            episodes = numbers.get("episodes", numbers.get("sampled_episodes"))
            what = problems, played.rpartition("/")[2], episodes
            for measure in (key.removesuffix(".value") for key in numbers if key.endswith(".value")):
                value, low, high = (f"{numbers[f'{measure}.{name}']:.4g}" for name in ("value", "low", "high"))
                yield *what, measure.replace("_", " "), value, f"{low} to {high}"


def _public(text: str) -> str:
    """Return a version's name in a URI, the last part of another URI or absolute path, and other texts as they are."""
    if not text.startswith(("/", "~")) and "://" not in text:  # such as a name of the hub
        return text
    return version_of(f"runs{text.rpartition('/runs')[2]}") or text.rstrip("/").rpartition("/")[2]


def _described(source: dict[str, Any]) -> str:
    """Describe the source of problems: `kind=hub, name=openai/gsm8k, split=train`."""
    known = [(key, value) for key, value in flatten(source) if value not in (None, {}, [])]
    return ", ".join(f"{key}={_public(value) if isinstance(value, str) else value}" for key, value in known)


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Make a table in Markdown; `none` without rows."""
    lines = [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    return "\n".join([f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *lines]) if lines else "None."


def _cell(value: Any) -> str:
    """Return a text that shows as it is: it cannot be markup, begin another cell or hide anything."""
    return html.escape(visible(str(value)), quote=False).translate(_IN_TABLES)
