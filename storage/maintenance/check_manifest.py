"""Checks of the content of a manifest whose own digest is right."""

import re
from collections import Counter
from collections.abc import Iterator

from storage.version_names import KINDS
from storage.versions.manifests import File, Manifest
from storage.versions.model_files import PICKLE


def check_manifest(manifest: Manifest) -> list[str]:
    """Return the problems of a manifest, each as a sentence without its subject, the manifest."""
    problems = []
    if not KINDS[manifest.kind].is_place(manifest.version):
        problems.append(f"says that {manifest.version} is a {manifest.kind} version, but these are elsewhere")
    names = Counter(file.name for file in manifest.files)
    problems += [f"names {name} {count} times" for name, count in names.items() if count > 1]
    problems += [
        f"has {file.path} as the object of {file.name}" for file in manifest.files if not _has_right_key(manifest, file)
    ]
    return problems + (list(_checkpoint_problems(set(names))) if manifest.kind == "checkpoint" else [])


def _has_right_key(manifest: Manifest, file: File) -> bool:
    """Return whether the key of the object is <version>/<attempt>/<name>."""
    attempt = file.path.removeprefix(f"{manifest.version}/").removesuffix(f"/{file.name}")
    return "/" not in attempt


def _checkpoint_problems(names: set[str]) -> Iterator[str]:
    for name in sorted({"model/config.json", "canary.json"} - names):
        yield f"names no {name}"
    if not any(re.fullmatch(r"model/[^/]+\.safetensors", name) for name in names):
        yield "names no model/*.safetensors"
    for name in sorted(names):
        if PICKLE.fullmatch(name):
            yield f"names {name}, a pickle: loading it would run code"
