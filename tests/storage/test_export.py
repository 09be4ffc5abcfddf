"""`python -m storage export`: a folder that transformers loads, with a card that says what it is and how to check."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

from storage import layout
from storage.__main__ import main
from storage.errors import StorageError
from storage.maintenance.export import export, model_card
from storage.objects.store import Store
from storage.version_names import PolicyVersion
from storage.versions import manifests
from storage.versions.drafts import Draft, Provenance
from storage.versions.weights import load_model
from tests.support.kept import unpack_kept
from tests.support.programs import call_program

CHAMPION = PolicyVersion(layout.checkpoint("nightly-0001", 1))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(unpack_kept("2027-01", tmp_path_factory.mktemp("kept")).root)


def blocks(card: str) -> list[str]:
    """Return the commands of a card."""
    return re.findall(r"```bash\n(.*?)```", card, re.DOTALL)


def test_a_champion_is_exported(kept: Path, tmp_path: Path) -> None:
    """Transformers loads the folder. The card has lineage, data, intervals and commands, which find no fault."""
    folder = tmp_path / "new" / "champion"
    call_program(main, "--root", str(kept), "export", "champion", str(folder))
    assert load_model(folder).config.vocab_size >= len(AutoTokenizer.from_pretrained(folder))
    card = (folder / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "transformers"
    for row in (
        "| runs/nightly-0001/trajectories | trajectories | 1 | 16 |",
        "| runs/half/checkpoints | checkpoint | 1 |",
        "| problems/c729965febab1153 | 8 |",
        "| 4 | first turn | 0.25 | 0.04559 to 0.6994 |",
    ):
        assert row in card
    assert str(kept) not in card
    files, lineage = blocks(card)
    checked = subprocess.run(["bash", "-c", files], cwd=folder, capture_output=True, text=True, check=True)
    assert checked.stdout.count(": OK") == len(list(folder.iterdir())) - 1
    call_program(main, *lineage.replace("ROOT", str(kept)).split()[3:])
    (folder / "config.json").write_text("{}")
    assert subprocess.run(["bash", "-c", files], cwd=folder, capture_output=True, check=False).returncode == 1


def test_names_in_a_card_are_only_text(store: Store, tmp_path: Path) -> None:
    """A name cannot become markup or a command, and paths of the machine stay out."""
    version = layout.checkpoint("$(a)|<b>`c`[d](e)", 2)
    problems = {"problems": 1, "source": {"kind": "jsonl", "path": "/home/zoe/secret/train.jsonl"}}
    with Draft(store, layout.problems("0f"), "problems") as draft:
        draft.commit(Provenance(config={}), [], problems)
    with Draft(store, version, "checkpoint") as draft:
        config = {"policy": {"path": "/home/zoe/store/runs/b/checkpoints/000003", "warm_start": None}}
        draft.commit(Provenance(config=config), [layout.problems("0f")])
    card = model_card(store, manifests.read(store, version), tmp_path)
    assert "| runs/$(a)&#124;&lt;b&gt;&#96;c&#96;&#91;d](e)/checkpoints | checkpoint | 1 |" in card
    assert f"verify '{version}' --deep" in blocks(card)[1]
    assert "path=train.jsonl" in card
    assert "zoe" not in card
    assert "The run began with runs/b/checkpoints/000003." in card
    assert "| none | | | | | |" in card  # it was not evaluated


def test_what_cannot_be_exported_leaves_nothing_behind(kept: Path, tmp_path: Path) -> None:
    """Nothing is replaced, and a damaged checkpoint does not become a folder."""
    store, folder = Store(str(shutil.copytree(kept, tmp_path / "store"))), tmp_path / "out" / "folder"
    weights = next(file for file in manifests.read(store, CHAMPION).files if file.name == "model/model.safetensors")
    store.write(weights.path, b"damaged")
    with pytest.raises(StorageError, match=r"model.safetensors has 7 bytes"):
        export(store, CHAMPION, folder)
    assert list(folder.parent.iterdir()) == []
    (folder / "mine").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"folder exists: give a new or an empty folder"):
        export(Store(str(kept)), CHAMPION, folder)
