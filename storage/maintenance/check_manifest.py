"""What cannot be right in a manifest that is, byte for byte, the one that was committed."""

import re
from collections import Counter
from collections.abc import Iterator

from storage.version_names import KINDS
from storage.versions.manifests import File, Manifest
from storage.versions.model_files import PICKLE


def check_manifest(manifest: Manifest) -> list[str]:
    """What is wrong with it, each as a sentence without its subject, which is the manifest."""
    found = []
    if not KINDS[manifest.kind].is_place(manifest.version):
        found.append(f"says that {manifest.version} is a {manifest.kind} version, but that is not their place")
    names = Counter(file.name for file in manifest.files)
    found += [f"names {name} {count} times" for name, count in names.items() if count > 1]
    found += [f"says that {file.path} is {file.name}" for file in manifest.files if not _fits(manifest, file)]
    return found + (list(_of_checkpoint(set(names))) if manifest.kind == "checkpoint" else [])


def _fits(manifest: Manifest, file: File) -> bool:
    """Whether the object lies at <version>/<attempt>/<name>."""
    attempt = file.path.removeprefix(f"{manifest.version}/").removesuffix(f"/{file.name}")
    return "/" not in attempt


def _of_checkpoint(names: set[str]) -> Iterator[str]:
    for name in sorted({"model/config.json", "canary.json"} - names):
        yield f"names no {name}"
    if not any(re.fullmatch(r"model/[^/]+\.safetensors", name) for name in names):
        yield "names no model/*.safetensors"
    for name in sorted(names):
        if PICKLE.fullmatch(name):
            yield f"names {name}, a pickle: to load it would be to run code"
