"""A copy of a model's folder with weights in bfloat16, half as large, for servers that serve in this number format."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from storage.versions.model_files import INDEX


def write_serving_copy(model: Path, copy: Path) -> None:
    """Copy a transformers folder with float32 weights; several ranks copy their own files of it.

    A server rounds float32 weights in the same way, so it serves the same numbers from both.
    """
    for path in sorted(path for path in model.rglob("*") if path.is_file()):
        target = copy / path.relative_to(model)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            rounded = {name: value.bfloat16() for name, value in load_file(path).items()}
            save_file(rounded, target, {"format": "pt"})
        elif path.name == "config.json":
            target.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "bfloat16"}, indent=2) + "\n")
        elif path.name == INDEX:
            index = json.loads(path.read_text())
            index["metadata"]["total_size"] //= torch.float32.itemsize // torch.bfloat16.itemsize
            target.write_text(json.dumps(index, indent=2) + "\n")
        else:
            shutil.copyfile(path, target)
