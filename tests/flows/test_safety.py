"""Files and values from outside cannot run code, leave their folders or open servers, and secrets are not written."""

import ast
import json
import logging
import os
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from configs import ConfigError, load
from flows.math_mt_ppo import math_mt_ppo
from storage import layout
from storage.errors import StorageError, UnavailableError
from storage.objects.s3 import S3Backend
from storage.objects.store import Store
from storage.version_names import PolicyVersion
from storage.versions import checkpoints, manifests
from storage.versions.checkpoints import Canary
from storage.versions.drafts import Provenance
from storage.versions.fetch import fetch
from storage.versions.model_files import INDEX
from tasks.audit.decoding import open_decoder
from tasks.warm_start.importing import import_policy
from tests.support.chain_helpers import commit_text, rewrite
from tests.support.paths import ROOT

PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}

REQUIRED = {"trust_remote_code": "False", "allow_pickle": "False", "use_safetensors": "True"}


def sources() -> list[Path]:
    return sorted(path for layer in ("configs", "storage", "tasks", "flows") for path in (ROOT / layer).rglob("*.py"))


def test_nothing_unpickles() -> None:
    """The code uses no module that loads pickles, no torch.load, and no code of a downloaded model."""
    for node in [node for path in sources() for node in ast.walk(ast.parse(path.read_text()))]:
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & PICKLES
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in PICKLES
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in ("torch.load", "np.load", "numpy.load", "pd.read_pickle")
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert all(given[name] == value for name, value in REQUIRED.items() if name in given)
            if ast.unparse(node.func).endswith(".from_pretrained"):  # without these, transformers asks on the terminal
                assert (given["trust_remote_code"], given["local_files_only"]) == ("False", "True")


@pytest.fixture
def folder(policy_folder: Path, tmp_path: Path) -> Path:
    """Return a folder with a policy, to be changed."""
    return Path(shutil.copytree(policy_folder, tmp_path / "model"))


def test_pickled_weights_are_refused(folder: Path, tmp_path: Path, store: Store) -> None:
    """A folder with only pytorch_model.bin is refused, nothing in it runs, and the error names the remedy."""
    (folder / "model.safetensors").unlink()
    ran = tmp_path / "ran"
    (folder / "pytorch_model.bin").write_bytes(f"cos\nsystem\n(S'touch {ran}'\ntR.".encode())
    with pytest.raises(ValueError, match=r"holds no usable policy.*model\.safetensors"):
        import_policy(str(folder), tmp_path / "out", tmp_path / "cache", store)
    assert not ran.exists()


UNSAFE: list[tuple[str, dict[str, Any], str]] = [
    ("config.json", {"experts_implementation": "deepgemm"}, "config.json says experts_implementation='deepgemm'"),
    ("config.json", {"attn_implementation": "flash_attention_2"}, "remove the key, or give one of eager, sdpa"),
    ("config.json", {"quantization_config": {"quant_method": "unheard-of"}}, "quantised weights cannot be trained"),
    ("config.json", {"transformers_weights": "other.safetensors"}, "says transformers_weights='other.safetensors'"),
    ("config.json", {"speculators_config": {"verifier": {"name_or_path": "a/b"}}}, "says speculators_config="),
    ("tokenizer_config.json", {"fast_tokenizer_files": ["../tokenizer.9.json"]}, "names fast_tokenizer_files outside"),
    ("adapter_config.json", {"base_model_name_or_path": "a/b"}, "is an adapter: merge it"),
    (INDEX, {"metadata": {}, "weight_map": {"a": "../a.safetensors"}}, r"index.json names '../a.safetensors'"),
]


def commit(store: Store, folder: Path) -> PolicyVersion:
    version = layout.checkpoint("r", 0)
    checkpoints.commit(store, version, folder, None, Canary([1, 2], [-0.5]), Provenance(config={}), [], {})
    return version


@pytest.mark.parametrize(("name", "fields", "says"), UNSAFE, ids=[next(iter(case[1])) for case in UNSAFE])
def test_files_that_would_fetch_or_run_something_are_refused(
    name: str, fields: dict[str, Any], says: str, folder: Path, tmp_path: Path, store: Store
) -> None:
    """They are refused on import. In a committed checkpoint they are refused before anything gets the folder."""
    path = folder / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | fields))
    (folder / "other.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=says) as error:
        import_policy(str(folder), tmp_path / "out", tmp_path / "cache", store)
    assert "holds no usable policy" in str(error.value)
    assert not (tmp_path / "out").exists()
    (folder / "other.safetensors").unlink()
    version = commit(store, folder)
    for reader in (checkpoints.open_checkpoint, open_decoder):
        with pytest.raises(StorageError, match=says):
            reader(store, version, tmp_path / "cache")


@pytest.mark.parametrize("name", ["modeling.py", "consolidated.safetensors"])
def test_a_checkpoint_with_other_files_than_a_model_needs_is_not_opened(
    name: str, folder: Path, tmp_path: Path, store: Store
) -> None:
    """Pickles, code, and weights that servers prefer are refused even if the manifest names them."""
    (folder / name).write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(StorageError, match=f"holds {name}"):
        checkpoints.open_checkpoint(store, commit(store, folder), tmp_path / "cache")


def test_code_next_to_weights_is_neither_run_nor_kept(folder: Path, tmp_path: Path, store: Store) -> None:
    """There is no question on the terminal either. Models that transformers knows may still name their old code."""
    ran = tmp_path / "ran"
    for name in ("modeling.py", "tokenization.py", "custom_generate/generate.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"from pathlib import Path\nPath({str(ran)!r}).touch()\n")
    maps = {
        "config.json": {"AutoConfig": "modeling.C", "AutoModelForCausalLM": "modeling.M"},
        "tokenizer_config.json": {"AutoTokenizer": ["tokenization.T", "tokenization.T"]},
    }
    for name, auto_map in maps.items():
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | {"auto_map": auto_map, "use_kernels": True}))
    import_policy(str(folder), tmp_path / "out", tmp_path / "cache", store)
    assert not ran.exists()
    assert not list((tmp_path / "out").rglob("*.py"))
    assert not [path for path in (tmp_path / "out").glob("*.json") if "auto_map" in path.read_text()]


def test_a_policy_of_the_hub_is_checked_before_it_is_loaded(
    policy_folder: Path, tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is downloaded as a whole before any of it is loaded. In this test it is in the cache of downloads."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--somebody--tiny"
    snapshot = repository / "snapshots" / ("0" * 40)
    shutil.copytree(policy_folder, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    assert import_policy("somebody/tiny", tmp_path / "out", tmp_path / "cache", store) is None
    assert (tmp_path / "out" / "model.safetensors").exists()
    path = snapshot / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"_attn_implementation": "somebody/kernel"}))
    with pytest.raises(ValueError, match="somebody/tiny.*says _attn_implementation"):
        import_policy("somebody/tiny", tmp_path / "again", tmp_path / "cache", store)


VALUES = ["../../outside", "/etc/passwd", "a/../../b", "a\nb"]


@pytest.mark.parametrize(
    ("field", "value"), [*product(("name", "path"), VALUES), ("path", "runs/secret/scores/000000/a/0123456789ab/data")]
)
def test_manifests_cannot_name_other_objects(store: Store, tmp_path: Path, field: str, value: str) -> None:
    """A foreign manifest with a valid seal cannot make the code read or write outside of root, cache and version."""
    version = commit_text(store, layout.scores("r", 0, "5c0e"))
    rewrite(store, version, lambda values: values["files"][0].update({field: value}))
    with pytest.raises(StorageError, match="manifest.json (is not a manifest|names objects of other versions)"):
        fetch(store, manifests.read(store, version), "data", tmp_path / "cache")


ROOT_KNOB = "storage.root='{}'"
URIS = [
    "s3://key:topsecret@bucket/x.jsonl", "zip://x.jsonl::https://me:topsecret@host/x.zip",
    "https://host/x.jsonl?X-Amz-Signature=topsecret", "https://host/x.jsonl?page=2&access_token=topsecret",
    "https://host/x.jsonl?sv=2&sig=topsecret", "https://topsecret@host/x.jsonl",
    "sftp://me:topsecret@host/x.jsonl", "https://host/x.jsonl#token=topsecret",
    "https://[host/x.jsonl?password=topsecret",
]  # fmt: skip
OVERRIDES = [
    "policy={{path: '{}'}}",
    "problems.train={{kind: jsonl, path: '{}'}}",
    "inference.urls=['{}']",
    "environment={{type: math-verify, args: {{searches: '{}'}}}}",
]


@pytest.mark.parametrize(("uri", "override"), [(uri, ROOT_KNOB) for uri in URIS] + [(URIS[2], o) for o in OVERRIDES])
def test_credentials_in_a_uri_are_refused(uri: str, override: str) -> None:
    """They would be written into every manifest. The error does not repeat them."""
    with pytest.raises(ConfigError, match="credentials in a URI") as error:
        load("smoke", ["policy={path: x}", override.format(uri)])
    assert "topsecret" not in str(error.value)


@pytest.mark.parametrize(
    "uri",
    [
        "https://host/x.jsonl?max_tokens=512&tokenizer=q&monkey=1", "data/train-?[0-9].jsonl", "sftp://reader@host/x",
        "https://[::1]/x",
    ],
)  # fmt: skip
def test_other_uris_are_accepted(uri: str) -> None:
    load("smoke", ["policy={path: x}", f"problems.train={{kind: jsonl, preset: gsm8k, path: '{uri}'}}"])


@pytest.mark.parametrize(
    "value", ["${oc.env:HOME}", "a ${oc.env:HOME,b}", "${oc.decode:${oc.env:HOME}}", "${${x}:HOME}"]
)
def test_the_environment_cannot_be_read_by_a_configuration(value: str, tmp_path: Path) -> None:
    """Its values would be written into every manifest. References to knobs and an escaped `${` are allowed."""
    text = Path("configs/smoke.yaml").read_text()
    (tmp_path / "own.yaml").write_text(text.replace("name: smoke", f"name: smoke, when_held: '{value}'"))
    for name, overrides in ((str(tmp_path / "own.yaml"), []), ("smoke", [f"run.when_held={value}"])):
        with pytest.raises(ConfigError, match=r"run\.when_held=.*would be stored in every manifest"):
            load(name, overrides)
    (tmp_path / "own.yaml").write_text(text + r'storage: {root: "${run.name}/var", cache: "\\${oc.env:HOME}"}')
    storage = load(tmp_path / "own.yaml").storage
    assert (storage.root, storage.cache) == ("smoke/var", "${oc.env:HOME}")


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("--trust-remote-code", "run code"), ("--hf-overrides.auto_map", "run code"),
        ("--load-format=pt", "load pickles"), ("--distributed-executor-backend=my.own.Executor", "run code"),
        ("--host", "open the server"), ("--uds=/tmp/x", "open the server"),
        ("--api-key=topsecret", "open the server"), ("--model", "the pipeline chooses"),
        ("--tensor-parallel-size=2", "set inference.tensor_parallel"),
        ("--tensor_parallel", "set inference.tensor_parallel"), ("-pp", "set inference.pipeline_parallel"),
        ("-dp", "set inference.replicas"),
    ],
)  # fmt: skip
def test_arguments_that_open_vllm_are_refused(argument: str, reason: str) -> None:
    """Abbreviations and other spellings that vLLM accepts are refused, too. Values such as keys are not repeated."""
    with pytest.raises(ConfigError, match=reason) as error:
        load("smoke", [f"inference.extra_args=['--max-num-seqs', '64', '{argument}', 'x']"])
    assert "topsecret" not in str(error.value)


def everything_written(folder: Path) -> bytes:
    return b"\n".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def test_secrets_are_written_nowhere(
    bucket: str,
    overrides: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a run on S3 no key is in logs, output, Prefect's database and artifacts, the cache or any object.

    No version was found by listing the store.
    """
    listed, call = list[str](), S3Backend._call

    def record(self: S3Backend, method: str, path: str, **arguments: Any) -> Any:
        listed.extend([arguments["Prefix"]] if method == "list_objects_v2" else [])
        return call(self, method, path, **arguments)

    monkeypatch.setattr(S3Backend, "_call", record)
    secrets = [os.environ[name] for name in ("AWS_SECRET_ACCESS_KEY", "VLLM_API_KEY")]
    with caplog.at_level(logging.INFO):
        math_mt_ppo("smoke", [*overrides, f"storage.root=s3://{bucket}/x", "run.iterations=1"])
    # A few small files, and once what failed attempts left, to collect it.
    assert set(listed) == {"x/runs/smoke/metrics/", "x/runs/smoke/"}
    output = capfd.readouterr()
    store = Store(f"s3://{bucket}/x")
    objects = b"\n".join(store.read(found.path) for found in store.walk())
    assert b"smoke" in objects
    prefect = everything_written(Path(os.environ["PREFECT_HOME"]))
    assert b"math-mt-ppo" in prefect
    logged = (caplog.text + output.out + output.err).encode()
    for place in (logged, objects, prefect, everything_written(tmp_path)):
        assert not [secret for secret in secrets if secret.encode() in place]


def test_refused_credentials_are_not_repeated(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the source of the credentials, not their values."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "topsecret")
    with pytest.raises(UnavailableError, match="ordinary AWS chain") as error:
        Store(f"s3://{bucket}/x").read("a")
    assert "topsecret" not in repr(error.value) + repr(error.value.__cause__)
