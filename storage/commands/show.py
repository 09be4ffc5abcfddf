"""`show`: shows one version: its files, parents, metrics and configuration."""

import argparse

from configs import flatten
from storage import layout
from storage.commands.output import Output, short, size, table
from storage.objects.store import Store
from storage.versions import aliases, manifests


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("version", metavar="VERSION")
    parser.add_argument("--config", action="store_true", help="show the resolved configuration, too")


def run(store: Store, arguments: argparse.Namespace) -> Output:
    """Show the manifest as tables."""
    manifest = manifests.read(store, aliases.resolve_version(store, arguments.version))
    collected = store.exists(layout.tombstone(manifest.version))
    head = [
        ("version", store.uri(manifest.version)),
        ("kind", manifest.kind),
        ("created", f"{manifest.created_at:%Y-%m-%d %H:%M:%S} UTC"),
        ("code", manifest.code_version),
        ("flow run", manifest.prefect_run_id),
        ("fencing token", manifest.fence),
        ("data", "collected by gc" if collected else f"{len(manifest.files)} objects, {size(manifest.bytes)}"),
        *(("parent", parent.version) for parent in manifest.parents),
    ]
    parts = [table(["", ""], head)]
    if manifest.files:
        files = [(file.name, size(file.bytes), file.rows, file.sha256[:16]) for file in manifest.files]
        parts.append(table(["file", "size", "rows", "sha256"], files))
    if manifest.metrics:
        parts.append(table(["metric", "value"], [(key, short(value)) for key, value in flatten(manifest.metrics)]))
    if arguments.config:
        parts.append(table(["setting", "value"], flatten(manifest.config)))
    data = manifest.model_dump(mode="json") | {"collected": collected}
    return Output(data if arguments.config else {k: v for k, v in data.items() if k != "config"}, parts)
