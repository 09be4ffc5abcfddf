"""Copies for servers as deltas: who has the parent's copy fetches little, and everybody gets the same copy."""

import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from storage import layout
from storage.errors import DamagedError
from storage.maintenance import gc as garbage
from storage.maintenance.gc import Rules
from storage.maintenance.verify import verify
from storage.objects.store import Store
from storage.version_names import PolicyVersion
from storage.versions import checkpoints, manifests, serving_copies
from storage.versions.checkpoints import Canary
from storage.versions.drafts import Draft, Provenance
from storage.versions.model_files import INDEX
from storage.versions.serving_copies import ServingCopy, add_copy, write_delta

CANARY = Canary([1, 2], [-1.0])
NUMBERS = 40_000
RUN = Provenance(config={})


@dataclass
class Chain:
    """Checkpoints with copies in a store in memory, every fifth one whole, as a trainer with a cache writes them."""

    folder: Path
    whole_every: int = 5
    files: tuple[str, ...] = ("model.safetensors",)
    copies: list[dict[str, bytes]] = field(default_factory=list)
    """The files of each version's copy; that of version 0 is not in the store."""

    def __post_init__(self) -> None:
        self.store = Store(f"memory://{self.folder.name}-{id(self)}")
        self.rng = np.random.default_rng(0)
        self.weights = {name: self.rng.integers(2**16, size=NUMBERS, dtype=np.uint16) for name in self.files}
        self.add(with_copy=False)

    def version(self, number: int) -> PolicyVersion:
        return layout.checkpoint("r", number)

    def add(self, *, with_copy: bool = True, cache: str = "trainer") -> None:
        """Commit the next version, in which every hundredth number has changed."""
        number, model, copy = len(self.copies), self.folder / "model", self.folder / "copy"
        for name, values in self.weights.items():
            values[::100] ^= self.rng.integers(8, size=len(values[::100]), dtype=np.uint16)
            for folder, wide in ((model, 2), (copy, 1)):
                folder.mkdir(exist_ok=True)
                save_file({"weight": np.repeat(values, wide)}, folder / name)
        for folder in (model, copy):
            (folder / "config.json").write_text(json.dumps({"number": number, "copy": folder.name}))
            if len(self.files) > 1:
                (folder / INDEX).write_text(json.dumps({"weight_map": {name: name for name in self.files}}))
        self.copies.append({path.name: path.read_bytes() for path in copy.iterdir()})
        with Draft(self.store, self.version(number), "checkpoint") as draft:
            if with_copy:
                add_copy(draft, copy, self.copy_of(number - 1, cache), self.whole_every)
            draft.add_folder(model, "model")
            checkpoints.add_canary(draft, CANARY)
            draft.hand_over(self.folder / cache)
            draft.commit(RUN, [self.version(number - 1)] if number else [])

    def copy_of(self, number: int, cache: str) -> ServingCopy:
        return ServingCopy(self.store, manifests.read(self.store, self.version(number)), self.folder / cache)

    def names(self, number: int) -> list[str]:
        return sorted(file.name for file in manifests.read(self.store, self.version(number)).files)

    def serve(self, number: int, cache: str = "node") -> str:
        """Open a version for a server; check what it gets, and return from which folder."""
        opened = checkpoints.open_checkpoint(self.store, self.version(number), self.folder / cache, serving=True)
        found = {path.name: path.read_bytes() for path in opened.model.iterdir()}
        if opened.model.name == "serving":
            assert found == self.copies[number]
        else:
            assert json.loads(found["config.json"]) == {"number": number, "copy": "model"}
        return opened.model.name


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, int]]:
    """Return a function that returns the bytes fetched since its last call, by version and area."""
    bytes_of: dict[str, int] = {}
    get = Store.get

    def counted(store: Store, key: str, target: Path) -> str:
        digest = get(store, key, target)
        parts = key.split("/")
        place = f"{int(parts[3])} {parts[5]}"
        bytes_of[place] = bytes_of.get(place, 0) + target.stat().st_size
        return digest

    def taken() -> dict[str, int]:
        result = {place: count for place, count in bytes_of.items() if "canary" not in place}
        bytes_of.clear()
        return result

    monkeypatch.setattr(Store, "get", counted)
    return taken


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    made = Chain(tmp_path)
    for _ in range(7):
        made.add()
    return made


def test_every_so_many_th_is_whole_and_others_are_what_changed(chain: Chain) -> None:
    canary_and_model = ["canary.json", "model/config.json", "model/model.safetensors"]
    whole, delta = ["serving/config.json", "serving/model.safetensors"], ["delta/model.safetensors.arrow"]
    assert chain.names(0) == canary_and_model
    assert chain.names(1) == canary_and_model + whole
    assert chain.names(2) == sorted([*canary_and_model, *delta, "delta/config.json"])
    assert chain.names(5) == sorted(canary_and_model + whole + delta)
    assert verify(chain.store, [chain.version(7)], deep=False).findings == []


def test_a_node_that_follows_fetches_deltas(chain: Chain, fetched: Callable[[], dict[str, int]]) -> None:
    assert chain.serve(1) == "serving"
    assert fetched().keys() == {"1 serving"}
    for number in (2, 3, 4, 5):
        assert chain.serve(number) == "serving"
        sizes = fetched()
        assert sizes.pop(f"{number} delta") < 0.1 * 2 * NUMBERS
        assert sum(sizes.values()) < 100, "besides the delta only config.json"
    assert chain.serve(5) == "serving"
    assert fetched() == {}, "a second time nothing is fetched"


def test_a_node_that_joins_fetches_the_last_whole_copy_and_the_deltas_since(
    chain: Chain, fetched: Callable[[], dict[str, int]]
) -> None:
    assert chain.serve(7) == "serving"
    assert fetched().keys() == {"5 serving", "6 delta", "7 delta"}


def test_a_trainer_elsewhere_goes_on(chain: Chain, fetched: Callable[[], dict[str, int]]) -> None:
    """Its first delta needs the parent's copy, which it fetches as a node does."""
    chain.add(cache="another host")
    assert fetched().keys() == {"5 serving", "6 delta", "7 delta"}
    assert chain.serve(8) == "serving"


def test_long_chains_are_not_followed(tmp_path: Path, fetched: Callable[[], dict[str, int]]) -> None:
    """If deltas have more bytes than the model, the model is fetched."""
    chain = Chain(tmp_path, whole_every=1000)
    for number in range(40):
        if 30 <= number < 36:  # each changes half of the numbers
            half = NUMBERS // 2
            chain.weights["model.safetensors"][:half] ^= chain.rng.integers(2**16, size=half, dtype=np.uint16)
        chain.add()
    assert chain.serve(40) == "model"
    assert "40 model" in fetched()
    assert chain.serve(29, "another") == "serving"


def test_without_what_gc_deleted_the_model_serves(chain: Chain, caplog: pytest.LogCaptureFixture) -> None:
    """gc deletes by its rules; the copy of a kept version may then be lost, but not its weights."""
    with caplog.at_level(logging.WARNING):
        garbage.collect(chain.store, Rules(keep_last=1, older_than_s=0))
        assert chain.serve(7) == "model"
        assert "collected by gc" in caplog.text
    assert verify(chain.store, [chain.version(7)], deep=False).findings == []
    assert chain.serve(7, "trainer") == "serving", "whoever has it in the cache needs nothing"
    chain.add()
    assert chain.serve(8, "trainer") == "serving"
    chain.add(cache="another host")
    assert chain.names(9)[-3:] == ["model/config.json", "model/model.safetensors", "serving/model.safetensors"]
    assert chain.serve(9, "new node") == "serving", "where no delta could be made the copy is whole"


def test_a_damaged_copy_in_the_cache_is_replaced(chain: Chain, caplog: pytest.LogCaptureFixture) -> None:
    chain.serve(2)
    (file,) = (chain.folder / "node").glob("runs/r/checkpoints/000002/*/serving/model.safetensors")
    content = bytearray(file.read_bytes())
    content[1000] ^= 1
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert chain.serve(3) == "model"
    assert "makes another file than it says" in caplog.text
    assert not file.exists()
    assert chain.serve(4) == "serving"
    assert chain.serve(2) == "serving"


def test_a_file_that_does_not_belong_to_the_copy_is_refused(chain: Chain) -> None:
    chain.serve(3)
    (config,) = (chain.folder / "node").glob("runs/r/checkpoints/000003/*/serving/config.json")
    (config.parent / "extra.safetensors").write_bytes(b"")
    with pytest.raises(DamagedError, match="extra.safetensors"):
        chain.serve(3)


def test_a_trainer_proves_what_its_cache_has(chain: Chain) -> None:
    """It makes no delta from a damaged copy."""
    (kept,) = (chain.folder / "trainer").glob("runs/r/checkpoints/000007/*/serving/model.safetensors")
    content = bytearray(kept.read_bytes())
    content[-1] ^= 1
    kept.write_bytes(content)
    chain.add()
    assert [chain.serve(number) for number in (7, 8)] == ["serving", "serving"]


def test_verify_finds_a_delta_that_does_not_make_the_copy(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one of a program with an error: its own hash is right."""

    def of_another_base(base: Path, new: Path, delta: Path) -> None:
        other = base.with_name("other")
        other.write_bytes(base.read_bytes()[:-1] + b"?")
        write_delta(other, new, delta)
        other.unlink()

    monkeypatch.setattr(serving_copies, "write_delta", of_another_base)
    chain.add()
    findings = verify(chain.store, [chain.version(8)], deep=True).findings
    wrong = [finding.version for finding in findings if "makes another file than it says" in finding.problem]
    assert wrong == [chain.version(8)]


def test_processes_with_one_cache_fetch_each_object_once(chain: Chain, fetched: Callable[[], dict[str, int]]) -> None:
    """They open a version at the same time; threads do here, because locks of open files hold between them, too."""

    def opened(_: int) -> str:
        node = chain.folder / "node"
        return checkpoints.open_checkpoint(chain.store, chain.version(7), node, serving=True).model.name

    with ThreadPoolExecutor(4) as processes:
        assert list(processes.map(opened, range(4))) == ["serving"] * 4
    once = fetched()
    chain.serve(7, "another node")
    assert fetched() == once
