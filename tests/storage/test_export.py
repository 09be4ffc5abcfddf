"""`python -m storage export`: a folder that transformers loads, with a card that says what it is and how to check."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from storage import layout
from storage.__main__ import main
from storage.errors import StorageError
from storage.maintenance.export import export, model_card, send
from storage.objects.store import Store
from storage.version_names import PolicyVersion
from storage.versions import manifests
from storage.versions.drafts import Draft, Provenance
from storage.versions.weights import load_model
from tests.support.kept import unpack_kept
from tests.support.paths import ROOT
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


def test_without_a_token_the_folder_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error says what is missing, and the command that sends the folder."""
    monkeypatch.setattr("huggingface_hub.utils._headers.get_token", lambda: None)
    for repository, told in (("owner/name", "Token is required"), ("owner/../name", "Repo id")):
        with pytest.raises(StorageError, match=rf"{repository} was not written .*{told}.*`hf upload {repository}"):
            send(tmp_path, repository, "message")


class Hub(ThreadingHTTPServer):
    """Answers as the hub does when a folder is uploaded to a repository with one old file of weights."""

    def __init__(self, status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.url, self.status = f"http://127.0.0.1:{self.server_port}", status
        self.tokens, self.repository = set[str | None](), dict[str, Any]()
        self.weights, self.commit = b"", list[dict[str, Any]]()

    def answer(self, method: str, path: str, body: bytes) -> Any:
        if path == "/api/repos/create":
            self.repository = json.loads(body)
            return {"url": f"{self.url}/me/policy"}
        if path.endswith("/preupload/main"):
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = ["lfs" if name.endswith(".safetensors") else "regular" for name in names]
            return {
                "files": [
                    {"path": name, "uploadMode": mode, "shouldIgnore": False}
                    for name, mode in zip(names, modes, strict=True)
                ]
            }
        if path.endswith("/objects/batch"):
            upload = {"upload": {"href": f"{self.url}/lfs"}}
            objects = [file | {"actions": upload} for file in json.loads(body)["objects"]]
            return {"transfer": "basic", "objects": objects}
        if path == "/lfs":
            self.weights = body
        if path.endswith("/commit/main"):
            self.commit = [json.loads(line) for line in body.splitlines()]
            return {"commitUrl": f"{self.url}/me/policy/commit/0f", "commitOid": "0f" * 20}
        if "/tree/" in path:
            return [{"type": "file", "path": "old.safetensors", "size": 1, "oid": "0f"}]
        return {}


class _Request(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.startswith("/api/repos"):
            self.server.tokens.add(self.headers.get("Authorization"))
        answer = json.dumps(self.server.answer(self.command, self.path, body)).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_POST = do_PUT = do_GET  # noqa: N815 - names of the base class

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.long
@pytest.mark.parametrize("status", [200, 403])
def test_a_folder_is_sent_to_the_hub(status: int, kept: Path, tmp_path: Path) -> None:
    """One commit in a private repository has the folder, without the weights that were there; a refusal is told."""
    settings = {"HF_TOKEN": "hf_secret", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path)}
    command = ["-m", "storage", "--root", str(kept), "export", "champion", str(tmp_path / "out"), "--hub", "me/policy"]
    with Hub(status) as hub, ThreadPoolExecutor(1) as pool:
        pool.submit(hub.serve_forever, 0.01)
        try:
            environment = os.environ | settings | {"HF_ENDPOINT": hub.url}
            done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, cwd=ROOT)
        finally:
            hub.shutdown()
    assert (hub.tokens, hub.repository["visibility"]) == ({"Bearer hf_secret"}, "private")
    assert "hf_secret" not in done.stdout + done.stderr
    if status == 403:
        assert done.returncode == 1
        assert re.search(r"error: me/policy was not written \(.*403.*`hf upload me/policy .* sends it", done.stderr)
        return
    assert done.returncode == 0, done.stderr
    assert f"sent: {hub.url}/me/policy/commit/0f" in done.stdout
    assert hub.weights == (tmp_path / "out" / "model.safetensors").read_bytes()
    values = [line["value"] for line in hub.commit]
    card = next(value["content"] for value in values if value.get("path") == "README.md")
    assert base64.b64decode(card) == (tmp_path / "out" / "README.md").read_bytes()
    assert {"key": "deletedFile", "value": {"path": "old.safetensors"}} in hub.commit
