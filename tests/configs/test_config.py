"""Every configuration file loads, and values that cannot work are refused with key, value and remedy."""

import inspect
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import Config, ConfigError, differences, load, schema, to_yaml
from configs.__main__ import entries, main
from configs.loader import available
from configs.policy import LoRA
from flows.run.configuration import resolve


@pytest.mark.parametrize("name", available())
def test_every_file_resolves(name: str) -> None:
    """Every configuration of the package resolves, and is read back equal from YAML."""
    config = resolve(name)
    assert load_text(to_yaml(config)) == config


def load_text(text: str) -> Config:
    return Config.model_validate(yaml.safe_load(text))


def test_an_override_of_a_section_or_a_beginning_replaces_the_others() -> None:
    """A mapping inherits no keys from the file's section. Of `policy.path` and `fork` the last one given counts."""
    config = load("demo", ["problems.train={kind: jsonl, path: x, preset: gsm8k}", "run.seed=9"])
    assert (config.problems.trained[0].source.kind, config.run.seed) == ("jsonl", 9)
    policy = load("demo", ["policy.lora={rank: 3}", "policy.path=p", "policy.fork=demo@7", "run.name=other"]).policy
    assert (policy.path, policy.fork, policy.lora) == (None, "demo@7", LoRA(rank=3))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.eps_clp=0.3", "did you mean 'eps_clip'"),
        ("rollout.group_size=1", "rollout.group_size=1 leaves algorithm.type=ppo nothing to compare"),
        ("sampling.temperature=0", "greedy"),
        ("sampling.top_p=0.9", "allow_biased_sampling"),
        ("retrain.gate.episodes=sampled", "set evaluation.samples"),
        ("sampling.max_new_tokens=4096", "max_model_len"),
        ("agent.type=math-multiturn", "did you mean 'math-multi-turn'"),
        ("agent.args={num_turns: '2'}", "num_turns='2': is a text; without quotes it is 2"),
        ("cluster.judges=1", "nodes without room for a rollout worker grade"),
        ("cluster.silence_s=10", "has no effect in one process"),
        ("agent.type=no_such_package:Agent", "no module 'no_such_package'; is its folder on PYTHONPATH"),
        ("algorithm.advantage={type: gae}", "set algorithm.critic={}"),
        ("algorithm.critic={}", "uses no critic"),
        ("algorithm={advantage: {type: gae, scale_by_std: true}, critic: {}}", "no effect with advantage.type=gae"),
        ("algorithm.advantage.gae_lambda=0.9", "no effect with advantage.type=group"),
        ("algorithm.behaviour_weight={cap: 0.4, floor: 0.5}", "floor=0.5 is not below cap=0.4"),
        ("algorithm.advantage={normalisation: none, bound: 3}", "no effect with advantage.normalisation=none"),
        ("reward.overlong_penalty=2", "without overlong_tokens"),
        ("rollout={generation_size: 8, group_size: 16}", "below rollout.group_size=16"),
        ("reward.overlong_tokens=12", "must be below sampling.max_new_tokens=12"),
        ("run.overlap=true", "set rollout.max_head_offpolicyness=1"),
        ("algorithm.use_decoupled_loss=false", "no knob any more: algorithm.objective says it: decoupled, recomputed"),
        ("agent.type=tasks.agents.math_multi_turn:NoAgent", "did you mean 'NullAgent'"),
        ("agent.type=[" + "x," * 400 + "]", r"agent\.type=\['x', 'x', .*more characters: Input should be"),
        ("inference.urls=['file:///etc/passwd']", r"inference\.urls\.0='file:///etc/passwd': String should match"),
        ("storage.root=''", r"storage\.root='': .* should have at least 1"),
        ("problems.train={kind: arithmetic, high: 100000000000000000000}", "2[0-9]{40} possible problems are more"),
        ("rollout={success_rate_lb: 0.9, success_rate_ub: 0.1}", "every group would be rejected"),
        ("cluster.workers_per_node=2 inference.urls=['http://a:1']", r"names only 1 server\(s\)"),
        ("cluster.address=auto inference.urls=['http://a:1']", "leave one of the two out"),
        ("rollout.max_head_offpolicyness=1 algorithm.objective=recomputed", "right on-policy only"),
    ],
)
def test_refused_with_a_remedy(override: str, message: str) -> None:
    """Each mistake is refused when the configuration is resolved, with a message that names it."""
    with pytest.raises(ConfigError, match=message) as refused:
        resolve("demo", re.split(r" (?=[a-z_.]+=)", override))
    assert len(str(refused.value)) < 1500


@pytest.mark.parametrize(
    "override",
    [
        "run.seed=18446744073709551615",
        "run.seed=-9223372036854775808",
        "score.timeout_s=9e8",
        "policy={warm_start: {hidden_size: 64, layers: 1}}",
        "inference={urls: ['HTTP://[::1]:80/x', 'unix:///run/vllm'], gpu_memory_utilization: 0}",
    ],
)
def test_values_that_can_work_are_accepted(override: str) -> None:
    """No bound refuses a value with which a stored run may have begun."""
    load("demo", [override])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("agent.args={limits: [1, {deep: [.inf]}]}", r"agent\.args\.limits\.1\.deep\.0=inf is not a finite number"),
        ("agent.args.x=!!binary aGk=", r"agent\.args\.x=b'hi': bytes cannot be stored"),
        ("agent.args.x=!!omap [a: 1]", r"agent\.args\.x\.0=\('a', 1\): tuple cannot be stored"),
        ("agent.args={x: {1: a}}", r"agent\.args\.x\.1: a key must be text"),
        ("agent.args.\udcff=1", r"'agent\.args\.\\udcff': a key must be text"),
        ("agent.args.x=\udcff", "cannot be applied"),
        ("agent.args.x=" + "[" * 3000 + "]" * 3000, "cannot be applied: more than 50 lists"),
        ("agent.args={x: &a [1, *a]}", "recursive aliases"),
        ("agent.args={x: '${no.such}'}", "no.such"),
    ],
)
def test_values_that_cannot_be_stored_are_refused(override: str, message: str) -> None:
    """JSON would store null or another value than the given one, so the run could never be continued."""
    with pytest.raises(ConfigError, match=message):
        load("demo", [override])


def test_values_from_files_and_from_python_are_checked_like_overrides(tmp_path: Path) -> None:
    values = load("demo").model_dump()
    values["agent"]["args"]["limits"] = [1.0, float("inf")]
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=r"own.yaml:\n  agent\.args\.limits\.1=inf is not a finite number"):
        load(path)
    values["agent"]["args"] = {"text": "\ud800"}
    with pytest.raises(ValueError, match=r"agent\.args\.text='\\ud800' holds half a surrogate pair"):
        Config.model_validate(values)


ODD_TEXTS = (
    """1e5 .inf .nan null ~ yes 0x1f 1_000 1:30 2020-01-01 << = - ? # ${run.seed} \\${x} \\\\${x} $${ ${ a${b}c\\"""
)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(
    [*ODD_TEXTS.split(), "- a", "a: b", "\x85", "\u2028", "\ufeff", "\r\n", "\t"]
)
NUMBERS = st.integers() | st.integers(2**63, 2**200) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40)
@given(
    arguments=st.dictionaries(TEXTS, VALUES, max_size=3), seed=st.integers(-(2**63), 2**64 - 1), bias=st.floats(-9, 9)
)
def test_accepted_values_are_read_back_equal(
    arguments: dict[str, Any], seed: int, bias: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A configuration with any arguments of an agent is read back equal from `--print-config` and from a manifest."""
    values = load("demo").model_dump() | {"agent": {"args": arguments}, "reward": {"bias": bias}}
    values["run"]["seed"] = seed
    config = Config.model_validate(values)
    path = tmp_path_factory.getbasetemp() / "printed.yaml"
    path.write_bytes(to_yaml(config).encode())
    assert load(path) == config
    stored = config.model_dump(mode="json")
    for text in (config.model_dump_json(), json.dumps(stored, ensure_ascii=False, allow_nan=False)):
        assert json.loads(text.encode()) == stored
        assert Config.model_validate(json.loads(text)) == config


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "cannot be read: it is a folder, a pipe or a device, not a regular file"),
        (lambda path: path.symlink_to("nowhere"), "no configuration"),
        (lambda path: path.write_bytes(b"a: \xff"), "cannot be read: .*utf-8"),
        (lambda path: path.write_text("run: {name: ["), "own.yaml is not valid YAML"),
        (lambda path: path.write_text("a: " + "[" * 100_000), "more than 50 lists, .* lie in each other"),
        (lambda path: path.write_text("a: " + "${" * 100_000 + "b" + "}" * 100_000), "more than 50 lists, "),
        (lambda path: path.write_text("3"), "is not valid YAML"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(make: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    """Reading a pipe or a device would never end."""
    path = tmp_path / "own.yaml"
    make(path)
    with pytest.raises(ConfigError, match=message):
        load(path)
    with pytest.raises(ConfigError, match="did you mean 'smoke'"):
        load("smok")


def test_differences_name_keys_and_values() -> None:
    """A continued run with a changed configuration prints the key, old value and new value of each difference."""
    old, new = load("demo"), load("demo", ["algorithm.eps_clip=0.3", "agent.args.num_turns=4"])
    lines = differences(old.model_dump(mode="json"), new.model_dump(mode="json"))
    assert lines == ["agent.args.num_turns: 2 -> 4", "algorithm.eps_clip: 0.2 -> 0.3"]


def test_every_knob_is_on_the_page(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m configs` shows each knob with its type, default and sentence, and none without a sentence."""
    assert [title for title, sentence in entries(Config) if not sentence and ".kind:" not in title] == []
    names = {title.partition(":")[0] for title, _ in entries(Config)}
    assert {"problems.train.weight", "agent.tools.type"} <= names
    assert "problems.train.agent.type" not in names  # it is the section `agent`
    monkeypatch.setattr(sys, "argv", ["configs", "algorithm.kl.place"])
    main()
    assert capsys.readouterr().out.splitlines() == [
        'algorithm.kl.place: reward | loss = "reward"',
        "    Subtract the penalty from the rewards of the tokens, or add it to the loss.",
        "",
    ]
    monkeypatch.setattr(sys, "argv", ["configs", "algorithm.sort"])
    with pytest.raises(SystemExit):
        main()
    assert "no knob's name begins with 'algorithm.sort'" in capsys.readouterr().err


def test_every_rule_is_applied() -> None:
    """A rule that somebody wrote, and did not list, would hold nothing."""
    functions = [value for _, value in inspect.getmembers(schema, inspect.isfunction)]
    assert {each for each in functions if each.__module__ == schema.__name__} == set(schema.RULES)
