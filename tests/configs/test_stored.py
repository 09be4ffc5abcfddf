"""Configurations of older programs are converted to the present schema; records of newer ones ask for an upgrade."""

import json
from typing import Any

import pytest

from configs import ConfigError, flatten, load, read_stored, up_to_date
from configs.stored import _ABSENT as ABSENT
from configs.stored import CHANGES, _put, formerly, lost
from storage import layout
from storage.errors import StorageError
from storage.logs import catalog
from storage.logs.leases import Lease
from storage.logs.log import Log
from storage.logs.nights import Nights
from storage.objects.store import Store
from storage.versions import aliases, manifests
from storage.versions.drafts import Draft, Provenance, shards
from storage.versions.manifests import File
from tests.storage.test_nights import NIGHT
from tests.support.begun import start
from tests.support.chain_helpers import rewrite
from tests.support.paths import ROOT

FIRST = json.loads((ROOT / "tests/kept_stores/first-configurations.json").read_text())
"""The configuration `smoke` as the first programs stored it, by commit."""


@pytest.mark.parametrize("commit", FIRST)
def test_first_configurations_are_read(commit: str) -> None:
    """Knobs were added, renamed and lost since; what nobody can choose any more is named."""
    read = read_stored(FIRST[commit], "a run")
    before = [f"{each.knob}={json.dumps(each.was)}" for each in CHANGES if not each.is_gone]
    taught = "{hidden_size: 64, layers: 1, steps: 20, target_accuracy: 0.45, two_turn_share: 0.25}"
    changed = ["inference.canary_tolerance=1e-4", f"policy={{warm_start: {taught}}}"]
    assert read == load("smoke", ["train.micro_batch_tokens=16384", *changed, *before])
    assert set(formerly(FIRST[commit])) == {each.knob for each in CHANGES if each.is_gone and each.was is not ABSENT}
    assert "reward.failed: 'least' -> 'leave-out'" in lost(FIRST[commit])


def test_what_a_program_does_today_is_not_lost() -> None:
    """Neither in a configuration of today, nor in one that chose today's behaviour while there was a choice."""
    present = dump()
    assert lost(present) == []
    chosen = without(present, "release")
    for each in CHANGES:
        if each.now is not ABSENT:
            _put(chosen, each.knob, each.now)
    assert lost(chosen) == []
    _put(chosen, "algorithm.advantage.credit", "order")
    assert lost(chosen) == ["algorithm.advantage.credit: 'order' -> 'causes'"]
    assert up_to_date(chosen) == present


def test_every_algorithm_had_the_bounds_that_it_began_with() -> None:
    """A stored configuration from before there was a bound had none; an algorithm without one gets none."""
    begun = [up_to_date(dump() | {"algorithm": {"type": name}})["algorithm"] for name in ("opd", "my:Own", "rloo")]
    assert [stored.get("c_clip", "has none") for stored in begun] == [None, None, "has none"]


def test_k1_in_the_loss_is_refused_but_still_read() -> None:
    """Its mean gradient is 0. What a run stored is read all the same: it may be audited and proven."""
    kl = ["algorithm.kl.kl_ctl=0.1", "algorithm.kl.place=loss"]
    with pytest.raises(
        ConfigError, match=r"algorithm\.kl\.estimator=k1 has no gradient .* use k2 or k3, .* policy\.fork"
    ):
        load("smoke", [*kl, "algorithm.kl.estimator=k1"])
    values = dump(*kl, "algorithm.kl.estimator=k2")
    values["algorithm"]["kl"]["estimator"] = "k1"
    assert read_stored(values, "a run").algorithm.kl.estimator == "k1"
    assert load("smoke", [*kl[:1], "algorithm.kl.estimator=k1"]).algorithm.kl.in_reward


@pytest.mark.parametrize(
    ("stored", "key", "value"),
    [
        ({"cluster": {"start_timeout_s": 7.0}}, "cluster.startup_timeout_s", 7.0),
        ({"ppo": {"minibatches": 7}}, "train.minibatches", 7),
        ({"ppo": {"behaviour_weight_cap": 3.0}}, "algorithm.behaviour_weight.cap", 3.0),
        ({"ppo": {"kl": {"place": "none", "kl_ctl": 0.1}}}, "algorithm.kl.kl_ctl", 0.0),
        ({"ppo": {"use_decoupled_loss": True, "recompute_logprob": True}}, "algorithm.objective", "decoupled"),
        # Ratios to the logprobs of sampling.
        ({"ppo": {"use_decoupled_loss": False}}, "algorithm.objective", "behaviour"),
        ({"ppo": {"use_decoupled_loss": True, "recompute_logprob": False}}, "algorithm.objective", "behaviour"),
    ],
)
def test_a_renamed_knob_keeps_its_value(stored: dict[str, Any], key: str, value: Any) -> None:
    assert dict(flatten(up_to_date(stored)))[key] == value


def test_former_limits_are_forgotten_and_former_numbers_are_not() -> None:
    """A limit changes no result. With another horizon or memory a run would go on otherwise."""
    rows = {"kind": "jsonl", "path": "x", "preset": "gsm8k"}
    overrides = [f"problems.held_out={json.dumps(rows)}", f"evaluation.sets={json.dumps({'own': rows})}"]
    values = dump(*overrides)
    begun = json.loads(json.dumps(values))
    begun["run"]["lease_s"] = 2.0
    begun["storage"] |= {"patience_s": 5.0, "whole_copy_every": 20}
    begun["problems"]["held_out"]["max_line_mb"] = begun["evaluation"]["sets"]["own"]["max_line_mb"] = 5
    begun["ppo"] = begun.pop("algorithm")
    begun["ppo"]["kl"]["horizon"] = 10_000.0
    assert (up_to_date(begun), lost(begun)) == (values, [])
    begun["ppo"]["kl"]["horizon"] = 100.0
    assert (up_to_date(begun), lost(begun)) == (values, ["algorithm.kl.horizon: 100.0 -> 10000"])


def dump(*overrides: str) -> dict[str, Any]:
    return load("smoke", overrides).model_dump(mode="json")


def without(values: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Return `values` as a program stored them that did not know these knobs or sections."""
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
        ([], ["algorithm.kl", "audit"]),
        ([], ["problems.train.operators", "problems.held_out.seed", "optimizer.betas", "policy.warm_start"]),
        (["algorithm.advantage.type=gae", "algorithm.critic={}"], ["algorithm.critic.value_eps_clip"]),
        (["evaluation.sets={own: {kind: arithmetic}}"], ["evaluation.sets.own.high"]),
        (
            ["problems.held_out={kind: jsonl, path: x, preset: gsm8k}"],
            ["problems.held_out.fields", "problems.held_out.count"],
        ),
    ],
)
def test_missing_knobs_get_their_defaults(overrides: list[str], lacking: list[str]) -> None:
    """Missing knobs are added in all sections: empty ones, those of several forms, and those that the user names."""
    values = dump(*overrides)
    assert up_to_date(without(values, *lacking)) == values


def test_a_run_of_a_newer_program_is_refused(plain: list[str]) -> None:
    rewrite(start(*plain).store, layout.run("smoke"), lambda values: values["config"]["run"].update(stream=False))
    with pytest.raises(ConfigError, match="another configuration:\n  run.stream: False -> None"):
        start(*plain)


def test_a_record_of_a_newer_program_says_so(plain: list[str]) -> None:
    """A manifest with an unknown field or kind asks for an upgrade, and is not reported as damaged."""
    store = start(*plain).store
    rewrite(store, layout.run("smoke"), lambda values: values.update(kind="dream", signed_by="ada"))
    unknown = "manifest.json has kind='dream', signed_by='ada', which this code does not know: upgrade"
    with pytest.raises(StorageError, match=unknown):
        manifests.read(store, layout.run("smoke"))


@pytest.mark.parametrize("entry", [{"began": NIGHT.model_dump() | {"moon": 1}}, {"dreamt": {"number": 1}}])
def test_a_night_of_a_newer_program_says_so(entry: dict[str, Any], store: Store) -> None:
    """A night with an unknown field or event asks for an upgrade, and is not reported as a lost entry."""
    Log(store, layout.retraining("nightly")).put(0, entry)
    with pytest.raises(StorageError, match="has (began.moon=1|dreamt=.*), which this code does not know"):
        Nights(store, "nightly").read()


def test_a_shard_of_a_newer_program_says_so(store: Store) -> None:
    """A writer that continues a killed rollout stops at a shard it cannot read, and does not play its groups again."""
    version = layout.trajectories("smoke", 0)
    file = File(name="a", path=f"{version}/0a/a", bytes=1, rows=1, sha256="0a").model_dump() | {"codec": "new"}
    Log(store, layout.journal(version)).put(0, {"attempt": "0a", "file": file, "notes": []})
    with pytest.raises(StorageError, match="00000000.json has 0.file.codec='new', which .* upgrade"):
        shards(store, version)


def test_unknown_fields_in_aliases_leases_and_the_catalog_are_ignored(store: Store) -> None:
    """New fields in these logs do not change the meaning of the known ones, so this program reads the entries."""
    with Draft(store, "problems/0a", "problems") as draft:
        draft.commit(Provenance(config={}), [])
    move = aliases.move(store, "champion", "problems/0a", None)
    for log in (layout.alias("champion"), layout.CATALOG):
        newest = Log(store, log).last()
        assert newest
        Log(store, log).put(newest[0] + 1, newest[1] | {"moon": 1})
    assert [entry.version for entry in aliases.history(store, "champion")] == [move.version, move.version]
    assert [entry.version for entry in catalog.read_all(store)] == ["problems/0a", "problems/0a"]
    with Lease(store, "smoke"):
        pass
    entry = Log(store, layout.lease("smoke")).read(0)
    Log(store, layout.lease("smoke")).put(1, entry | {"moon": 1})
    store.write(layout.beat("smoke", 1), store.read(layout.beat("smoke", 0)))  # released, too
    with Lease(store, "smoke", ttl_s=0.5) as lease:
        assert lease.token == 2
