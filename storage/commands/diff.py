"""`diff`: shows how configuration and metrics of two versions differ."""

import argparse
from typing import Any

from configs import flatten
from storage.commands.output import Output, short, table
from storage.objects.store import Store
from storage.versions import aliases, manifests


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("left", metavar="VERSION")
    parser.add_argument("right", metavar="VERSION")


def run(store: Store, arguments: argparse.Namespace) -> Output:
    """Show only differences. A knob that one version does not have counts with its default."""
    left, right = (
        manifests.read(store, aliases.resolve_version(store, name)) for name in (arguments.left, arguments.right)
    )
    config, metrics = _changed(left.settings, right.settings), _changed(left.metrics, right.metrics)
    columns = ["", left.version, right.version]
    parts: list[Any] = [f"code: {left.code_version} -> {right.code_version}"]
    for name, rows in (("setting", config), ("metric", metrics)):
        if rows:
            parts.append(table([name, *columns[1:]], [(key, short(a), short(b)) for key, a, b in rows]))
    if not config:
        parts.append("the same configuration")
    data = {name: {key: [a, b] for key, a, b in rows} for name, rows in (("config", config), ("metrics", metrics))}
    return Output(data, parts)


def _changed(left: dict[str, Any], right: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    a, b = dict(flatten(left)), dict(flatten(right))
    return [(key, a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)]
