"""Tensors in safetensors files: STEM.safetensors, or several files that STEM.safetensors.index.json lists.

Several ranks write several files: each tensor is gathered once and written by one rank, so that no rank holds more
than its share of the tensors and one more.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tasks.train.mesh import ALONE, Mesh, deal_out
from tasks.train.sharding import whole


class StoredTensors:
    """The tensors of a folder's files with one stem, read one by one from mapped memory.

    Raises:
        FileNotFoundError: there are no such files.
    """

    def __init__(self, folder: Path, stem: str) -> None:
        self.path = folder / f"{stem}.safetensors"
        index = folder / f"{stem}.safetensors.index.json"
        if index.is_file():
            self._files = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
            self._open: dict[Path, Any] = {path: safe_open(path, "pt") for path in set(self._files.values())}
        else:
            self._open = {self.path: safe_open(self.path, "pt")}
            self._files = dict.fromkeys(self._open[self.path].keys(), self.path)

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> list[int]:
        return [*self._slice(name).get_shape()]

    def read(self, name: str) -> Tensor:
        """Return a whole tensor, copied out of the mapped memory."""
        value: Tensor = self._open[self._files[name]].get_tensor(name)
        return value.clone()

    def rows(self, name: str, start: int, end: int) -> Tensor:
        """Return the rows start:end of a tensor with 1 dimension or more, copied out of the mapped memory."""
        if start == end:  # safetensors refuses empty ranges
            return self.rows(name, 0, 1)[:0]
        value: Tensor = self._slice(name)[start:end]
        return value.clone()

    def _slice(self, name: str) -> Any:
        return self._open[self._files[name]].get_slice(name)


def save_tensors(folder: Path, stem: str, tensors: Mapping[str, Tensor], mesh: Mesh = ALONE) -> None:
    """Write tensors into one file; on a mesh, write this rank's share, and the first rank writes the index."""
    folder.mkdir(parents=True, exist_ok=True)
    if mesh.size == 1:
        save_file({name: value.detach().cpu() for name, value in tensors.items()}, folder / f"{stem}.safetensors")
        return
    sizes = [value.numel() * value.element_size() for value in tensors.values()]
    owners, own = dict(zip(tensors, deal_out(sizes, mesh.size), strict=True)), {}
    for name, value in tensors.items():
        gathered = whole(value.detach())  # by all ranks, but only the owner keeps it
        if owners[name] == mesh.rank:
            own[name] = gathered.cpu().contiguous()
        del gathered  # before the next one is gathered
    files = [f"{stem}-{rank + 1:05d}-of-{mesh.size:05d}.safetensors" for rank in range(mesh.size)]
    if own:
        save_file(own, folder / files[mesh.rank], {"format": "pt"})
    if mesh.rank == 0:
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": {name: files[owners[name]] for name in tensors}}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
