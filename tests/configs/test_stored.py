"""What older and newer programs have stored: old is brought up to date, and what is too new says so."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from configs import Config, ConfigError, differences, load, unknown, up_to_date
from configs.stored import changed, removed, renamed
from storage import layout
from storage.errors import StorageError
from storage.logs import catalog
from storage.logs.leases import Lease
from storage.logs.log import Log
from storage.logs.nights import Nights
from storage.objects.seal import seal, unseal
from storage.objects.store import Store
from storage.versions import aliases, manifests
from storage.versions.drafts import Draft, Provenance
from storage.versions.journal import shards
from storage.versions.manifests import File
from tasks.retrain.planning import continued
from tasks.run import opening as open_run
from tasks.run.workspace import Workspace
from tests.storage.test_nights import NIGHT
from tests.support.paths import ROOT

FIRST = json.loads((ROOT / "tests/kept_stores/first-configurations.json").read_text())
"""By commit the configuration `smoke` as the programs of the first commits stored it."""


@pytest.fixture(autouse=True)
def _logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_run, "get_run_logger", lambda: logging.getLogger("test"))


@pytest.mark.parametrize("commit", FIRST)
def test_first_configurations_mean_the_same(commit: str) -> None:
    """Runs that were begun with them go on, though knobs came, were renamed and lost a value since."""
    assert differences(FIRST[commit], load("smoke").model_dump(mode="json"))
    assert differences(up_to_date(FIRST[commit]), load("smoke").model_dump(mode="json")) == []


def test_a_renamed_knob_keeps_its_value() -> None:
    early = {"ppo": {"minibatches": 7, "behaviour_weight_cap": 3.0, "kl": {"place": "none", "kl_ctl": 0.1}}}
    ppo = up_to_date(early)["ppo"]
    assert (ppo["ppo_n_minibatches"], ppo["behaviour_weight"]["cap"], ppo["kl"]["kl_ctl"]) == (7, 3.0, 0.0)


def test_a_place_without_a_name_was_the_folder_one_was_in() -> None:
    storage = up_to_date({"storage": {"root": "", "cache": ""}})["storage"]
    assert (storage["root"], storage["cache"]) == (".", ".")


def dump(*overrides: str) -> dict[str, Any]:
    return load("smoke", overrides).model_dump(mode="json")


def without(values: dict[str, Any], *keys: str) -> dict[str, Any]:
    """As a program stored it that did not know these knobs, or sections."""
    values = json.loads(json.dumps(values))
    for key in keys:
        *path, name = key.split(".")
        section = values
        for part in path:
            section = section[part]
        del section[name]
    return values


@pytest.mark.parametrize(
    ("overrides", "lacking"),
    [
        ([], ["run.overlap"]),
        ([], ["ppo.kl", "reward", "audit"]),
        ([], ["problems.train.operators", "problems.held_out.seed", "optimizer.betas", "policy.warm_start.teaches"]),
        (["ppo.advantage.type=gae", "ppo.critic={}"], ["ppo.critic.value_norm"]),
        (["evaluation.sets={own: {kind: arithmetic}}"], ["evaluation.sets.own.high"]),
        (
            ["problems.held_out={kind: jsonl, path: x, preset: gsm8k}"],
            ["problems.held_out.fields", "problems.held_out.count"],
        ),
        (["policy={path: somewhere}"], ["policy.warm_start"]),
    ],
)
def test_what_a_program_did_not_know_is_the_default(overrides: list[str], lacking: list[str]) -> None:
    """In sections, in sections that are empty, in those of several forms and in those with names of the user's own."""
    values = dump(*overrides)
    assert up_to_date(without(values, *lacking)) == values


def test_migrations_go_in_order_and_leave_the_stored_alone() -> None:
    """Renamed twice, with another unit; removed where it did nothing, and kept where it did something."""
    migrations = [
        renamed("run.max_hours", "run.max_m", lambda hours: 60 * hours),
        renamed("run.max_m", "run.max_minutes"),
        removed("rollout.eager", without=False),
        removed("rollout.lazy", without=False),
        changed("problems.train", lambda source: source | {"kind": "arithmetic"}),
    ]
    values: dict[str, Any] = {
        "run": {"name": "x", "max_hours": 2},
        "rollout": {"eager": False, "lazy": True},
        "problems": {"train": {"kind": "sums"}},
    }
    stored = json.dumps(values)
    found = up_to_date(values, migrations)
    assert json.dumps(values) == stored
    assert found["run"]["max_minutes"] == 120
    assert ("max_hours" in found["run"], "eager" in found["rollout"], found["rollout"]["lazy"]) == (False, False, True)
    assert found["problems"]["train"]["high"] == 20
    assert up_to_date(found, migrations) == found


@pytest.mark.parametrize("values", [{}, {"ppo": None}, {"rollout": [1]}, {"ppo": {"kl": 3}, "evaluation": "x"}])
def test_nonsense_is_no_error(values: dict[str, Any]) -> None:
    """It stays, and differs: whoever asks for a part of it says what is wrong."""
    assert (
        up_to_date(values).items() >= {key: value for key, value in values.items() if key != "ppo" or not value}.items()
    )


def begin(tmp_path: Path, *overrides: str) -> Workspace:
    """A run that was begun, or goes on."""
    place = [f"storage.root={tmp_path}/var", f"storage.cache={tmp_path}/cache"]
    workspace = Workspace(load("smoke", [*place, *overrides]))
    open_run.start_run.fn(workspace)
    return workspace


def rewrite(tmp_path: Path, version: str, change: Any) -> bytes:
    """As another program would have written the configuration in a manifest; returns the manifest."""
    path = tmp_path / "var" / layout.manifest(version)
    values = unseal(path.read_bytes(), "")
    change(values)
    path.write_bytes(seal(values))
    return path.read_bytes()


def test_a_run_goes_on_under_a_program_with_more_knobs(tmp_path: Path) -> None:
    """An upgrade ends no run, and does not touch what is stored; what the knob is set to must be its default."""
    begin(tmp_path)
    old = rewrite(tmp_path, layout.run("smoke"), lambda values: values["config"]["run"].pop("overlap"))
    workspace = begin(tmp_path)
    assert workspace.store.read(layout.manifest(layout.run("smoke"))) == old
    with pytest.raises(ConfigError, match="run.overlap: False -> True"):
        begin(tmp_path, "run.overlap=true", "rollout.max_head_offpolicyness=1")


def test_a_run_of_a_newer_program_is_refused(tmp_path: Path) -> None:
    begin(tmp_path)
    rewrite(tmp_path, layout.run("smoke"), lambda values: values["config"]["run"].update(stream=False))
    with pytest.raises(ConfigError, match="knobs that this one does not know:\n  run.stream=False\nUpgrade this one"):
        begin(tmp_path)


def test_a_night_goes_on_under_a_program_with_more_knobs(tmp_path: Path) -> None:
    """So does its run; `--give-up` is not the only way out of it."""
    workspace = begin(tmp_path)
    config = workspace.config.model_dump(mode="json")
    night = NIGHT.model_copy(update={"run": "smoke", "config": without(config, "run.overlap", "retrain.gate.episodes")})
    assert continued(night, workspace.config) == workspace.config
    night.config["run"]["stream"] = True
    with pytest.raises(
        ConfigError, match="stored configuration of night 1:\n  run.stream=True: unknown key.*\n.*upgrade this one"
    ):
        continued(night, workspace.config)


def test_differences_of_versions_leave_out_new_knobs(tmp_path: Path) -> None:
    """`python -m storage diff` of a version from before a knob and one from after it tells what differs, no more."""
    from argparse import Namespace

    from storage.commands.diff import run

    store = Store(str(tmp_path))
    for version, config in (("problems/0a", without(dump(), "run.overlap")), ("problems/0b", dump("run.seed=2"))):
        with Draft(store, version, "problems") as draft:
            draft.commit(Provenance(config=config), [])
    found = run(store, Namespace(left="problems/0a", right="problems/0b")).data
    assert found["config"] == {"run.seed": [1, 2]}


def test_a_record_of_a_newer_program_says_so(tmp_path: Path) -> None:
    """A field or a kind that this program does not know is no damage."""
    store = begin(tmp_path).store
    rewrite(tmp_path, layout.run("smoke"), lambda values: values.update(signed_by="ada"))
    with pytest.raises(StorageError, match="manifest.json has signed_by='ada', which this code does not know: upgrade"):
        manifests.read(store, layout.run("smoke"))
    rewrite(tmp_path, layout.run("smoke"), lambda values: values.update(kind="dream", signed_by="ada"))
    with pytest.raises(StorageError, match="has kind='dream', signed_by='ada', which .* upgrade"):
        manifests.read(store, layout.run("smoke"))


@pytest.mark.parametrize("entry", [{"began": NIGHT.model_dump() | {"moon": 1}}, {"dreamt": {"number": 1}}])
def test_a_night_of_a_newer_program_says_so(entry: dict[str, Any], store: Store) -> None:
    """It has lost nothing."""
    Log(store, layout.retraining("nightly")).put(0, entry)
    with pytest.raises(StorageError, match="(has moon=1|says 'dreamt'), which this code does not know: upgrade"):
        Nights(store, "nightly").read()


def test_what_is_known_is_not_unknown() -> None:
    assert unknown(dump()) == []
    assert Config.model_validate(up_to_date(dump())) == load("smoke")


def test_a_shard_of_a_newer_program_says_so(store: Store) -> None:
    """Who goes on with a killed rollout must not play again what he cannot read."""
    version = layout.trajectories("smoke", 0)
    file = File(name="a", path=f"{version}/0a/a", bytes=1, rows=1, sha256="0a").model_dump() | {"codec": "new"}
    Log(store, layout.journal(version)).put(0, {"attempt": "0a", "file": file, "notes": []})
    with pytest.raises(StorageError, match="00000000.json has codec='new', which this code does not know: upgrade"):
        shards(store, version)


def test_more_fields_in_aliases_leases_and_the_catalog_are_let_be(store: Store) -> None:
    """They add something; what this program reads of them means the same."""
    with Draft(store, "problems/0a", "problems") as draft:
        draft.commit(Provenance(config={}), [])
    move = aliases.move(store, "champion", "problems/0a", None)
    for log in (layout.alias("champion"), layout.CATALOG):
        newest = Log(store, log).last()
        assert newest
        Log(store, log).put(newest[0] + 1, newest[1] | {"moon": 1})
    assert [each.version for each in aliases.history(store, "champion")] == [move.version, move.version]
    assert [entry.version for entry in catalog.read_all(store)] == ["problems/0a", "champion", "champion"]
    with Lease(store, "smoke"):
        pass
    entry = Log(store, layout.lease("smoke")).read(0)
    Log(store, layout.lease("smoke")).put(1, entry | {"moon": 1})
    with Lease(store, "smoke", ttl_s=0.5) as lease:
        assert lease.token == 2
