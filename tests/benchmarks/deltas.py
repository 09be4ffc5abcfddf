"""Copies for servers as deltas against whole copies: bytes, and the time in which a node gets the next one from S3.

The weights have the shapes of a quarter of Qwen2.5-1.5B (7 of 28 layers, a quarter of the vocabulary). AdamW moves
them with random gradients.
"""

import os
import shutil
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import s3fs

from storage import layout
from storage.objects.store import Store
from storage.versions import checkpoints, manifests
from storage.versions.checkpoints import Canary
from storage.versions.drafts import Draft, Provenance
from storage.versions.serving_copies import DELTA, SERVING, ServingCopy, add_copy, fetch_copy
from tests.benchmarks.fixtures import Lab
from tests.benchmarks.result import Row
from tests.support.s3_server import KEY, SECRET, Rgw, available

if TYPE_CHECKING:
    import torch

HIDDEN, INTERMEDIATE, LAYERS, VOCABULARY, KEYS = 1536, 8960, 7, 151_936 // 4, 256
STEPS_BEFORE = 5
RATES = (1e-6, 1e-5)
PAIRS = 5


def measure(lab: Lab) -> list[Row]:
    """Commit a copy and its successor on S3 for each learning rate, and fetch the successor in both ways."""
    if reason := available():
        return [Row("deltas", "not measured", detail=reason)]
    with Rgw(lab.scratch / "s3") as server:
        os.environ |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        os.environ |= {"AWS_ENDPOINT_URL": server.endpoint, "AWS_DEFAULT_REGION": "us-east-1"}
        s3fs.S3FileSystem().call_s3("create_bucket", Bucket="bench")
        return [row for rate in RATES for row in _measure(lab, Store(f"s3://bench/deltas-{rate:g}"), rate)]


def _measure(lab: Lab, store: Store, rate: float) -> list[Row]:
    weights = Weights(rate)
    weights.step(STEPS_BEFORE)
    for number in (0, 1, 2):
        weights.step(number)  # the parent has no copy, the copy of 1 is whole, that of 2 is both
        _commit(lab, store, number, weights)
    copies = {number: ServingCopy(store, manifests.read(store, _version(number)), lab.scratch) for number in (1, 2)}
    sizes = {
        area: sum(file.bytes for file in copies[2].manifest.files if file.name.startswith(f"{area}/"))
        for area in (SERVING, DELTA)
    }
    whole, delta = [], []
    for _ in range(PAIRS):
        whole.append(_fetch(lab, copies[2]))
        delta.append(_fetch(lab, copies[2], copies[1]))
    share, what = sizes[DELTA] / sizes[SERVING], f"AdamW, lr {rate:g}, 2 steps, {sizes[SERVING] / 1e6:.0f} MB"
    seconds = f"{median(delta):.2f} s and {median(whole):.2f} s from a server on the same cores"
    return [
        Row("delta / whole copy: bytes to fetch", f"{share:.3f}", what),
        Row("delta / whole copy: time to fetch", f"{median(delta) / median(whole):.2f}", detail=f"{what}: {seconds}"),
    ]


class Weights:
    """Random weights in float32 that AdamW moves."""

    def __init__(self, rate: float) -> None:
        import torch

        torch.manual_seed(0)
        shapes = {"embed": (VOCABULARY, HIDDEN)}
        for layer in range(LAYERS):
            shapes |= {f"{layer}.{name}": (HIDDEN, HIDDEN) for name in ("q", "o")}
            shapes |= {f"{layer}.{name}": (KEYS, HIDDEN) for name in ("k", "v")}
            shapes |= {f"{layer}.{name}": (INTERMEDIATE, HIDDEN) for name in ("gate", "up")}
            shapes[f"{layer}.down"] = (HIDDEN, INTERMEDIATE)
        self.tensors = {name: torch.nn.Parameter(torch.randn(shape) * 0.02) for name, shape in shapes.items()}
        self._optimizer = torch.optim.AdamW(self.tensors.values(), lr=rate, betas=(0.9, 0.95), weight_decay=0.05)

    def step(self, count: int) -> None:
        import torch

        for _ in range(count):
            for value in self.tensors.values():
                value.grad = torch.randn_like(value)
            self._optimizer.step()

    def rounded(self) -> "dict[str, torch.Tensor]":
        return {name: value.detach().bfloat16() for name, value in self.tensors.items()}


def _version(number: int) -> str:
    return layout.checkpoint("bench", number)


def _commit(lab: Lab, store: Store, number: int, weights: Weights) -> None:
    from safetensors.torch import save_file

    folder, cache = lab.scratch / "copy", lab.scratch / "cache"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    save_file(weights.rounded(), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text("{}")
    with Draft(store, _version(number), "checkpoint") as draft:
        if number:
            parent = ServingCopy(store, manifests.read(store, _version(number - 1)), cache)
            add_copy(draft, folder, parent, whole_every=2)
        checkpoints.add_canary(draft, Canary([1, 2], [-1.0]))
        draft.hand_over(cache)
        draft.commit(Provenance(config={}), [_version(number - 1)] if number else [])


def _fetch(lab: Lab, copy: ServingCopy, parent: ServingCopy | None = None) -> float:
    """Return the seconds in which a node gets a copy, if it has the parent's, or nothing."""
    node = lab.scratch / "node"
    shutil.rmtree(node, ignore_errors=True)
    if parent:
        fetch_copy(ServingCopy(parent.store, parent.manifest, node))
    start = time.perf_counter()
    folder = fetch_copy(ServingCopy(copy.store, copy.manifest, node))
    seconds = time.perf_counter() - start
    assert folder == node / Path(copy.manifest.version) / copy.manifest.nonce / SERVING
    return seconds
