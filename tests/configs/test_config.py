"""Every configuration file loads, and values that cannot work are refused with key, value and remedy."""

import inspect
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import Config, ConfigError, available, differences, load, schema, to_yaml
from configs.__main__ import entries, main
from tasks.agents.problem_checks import lacking_room
from tasks.run import workspace as run_workspace
from tasks.run.configuration import resolve
from tasks.run.workspace import Workspace
from tests.support.paths import ROOT


@pytest.mark.parametrize("name", available())
def test_every_file_resolves(name: str) -> None:
    """Every configuration of the package resolves, is read back equal from YAML, and has room for all turns."""
    config = resolve(name)
    assert load_text(to_yaml(config)) == config
    assert lacking_room(config) is None


def load_text(text: str) -> Config:
    return Config.model_validate(yaml.safe_load(text))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["agent.args.num_turns=10"], None),  # 10 x 12 tokens
        (["agent.args.num_turns=11"], "11 turns of 12 tokens do not fit into inference.max_model_len=128"),
        (["agent.args={}", "sampling.max_new_tokens=30"], "5 turns of 30 tokens do not fit"),
        (["agent={type: math-single-step}", "sampling.max_new_tokens=120"], None),
    ],
)
def test_turns_that_may_not_fit_cause_a_warning_at_the_start(
    overrides: list[str],
    message: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Turns without room in the context count as wrong answers, so a run warns before it plays any."""
    monkeypatch.setattr(run_workspace, "get_run_logger", lambda: logging.getLogger("test"))
    config = resolve("demo", [f"storage.root={tmp_path}/var", f"storage.cache={tmp_path}/cache", *overrides])
    run_workspace.start_run.fn(Workspace(config))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == (message is not None)
    assert (message or "") in "".join(warnings)


def test_overrides_reach_their_knobs() -> None:
    """Dotted overrides, as given on the command line and in deployments, set their knobs."""
    config = resolve("demo", ["agent.args.num_turns=3", "ppo.eps_clip=0.3", "optimizer.lr=1e-5"])
    assert config.agent.args["num_turns"] == 3
    assert config.ppo.eps_clip == 0.3
    assert config.optimizer.lr == 1e-5


def test_a_mapping_replaces_its_section() -> None:
    """An override with another kind of source or policy inherits no keys from the section in the file."""
    config = load("demo", ["policy={path: p}", "problems.train={kind: jsonl, path: x, preset: gsm8k}"])
    assert config.policy.warm_start is None
    assert config.problems.train.kind == "jsonl"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ppo.eps_clp=0.3", "did you mean 'eps_clip'"),
        ("agnt.type=null", "did you mean 'agent'"),
        ("problems.train.hgh=3", "did you mean 'high'"),
        ("ppo.eps_clip=abc", "ppo.eps_clip='abc'"),
        ("rollout.group_size=2.5", "rollout.group_size=2.5"),
        ("run.name=../elsewhere", "run.name"),
        ("run.iterations", "not key=value"),
        ("rollout.group_size=1", "group baseline"),
        ("ppo.ppo_n_minibatches=99", "ppo.ppo_n_minibatches=99"),
        ("sampling.temperature=0", "greedy"),
        ("sampling.temperature=0.009", "sampling.temperature: 0.009 is not a temperature that vLLM samples with"),
        ("sampling.temperature=.nan", "sampling.temperature: nan is not a temperature"),
        ("sampling.temperature=-1", "use 0 \\(greedy\\) or 0.01 to 2"),
        ("evaluation={samples: 4, temperature: 2.1}", "evaluation.temperature: 2.1 is not a temperature"),
        ("evaluation={samples: 4, temperature: 0}", "greater than 0"),
        ("sampling.top_p=0.9", "allow_biased_sampling"),
        ("retrain.gate.episodes=sampled", "set evaluation.samples"),
        ("sampling.max_new_tokens=4096", "max_model_len"),
        ("policy.path=somewhere", "exactly one"),
        ("problems.train.kind=parquets", "parquets"),
        ("agent.type=math-multiturn", "did you mean 'math-multi-turn'"),
        ("agent.args.num_turn=3", "did you mean 'num_turns'"),
        ("agent.args.num_turns=three", "num_turns='three'"),
        ("agent.args={num_turns: '2'}", "num_turns='2': is a text; without quotes it is 2"),
        ("agent.args.num_turns=0", "num_turns=0"),
        ("rollout.processes=2", "rollout.processes=2: it is no knob any more: set cluster.workers_per_node"),
        ("cluster.judges=1", "nodes without room for a rollout worker grade"),
        ("cluster.silence_s=10", "has no effect in one process"),
        ("cluster.workers_per_node=0", "greater than 0"),
        ("environment.args.tolerance=1", "takes no such argument"),
        ("agent.type=no_such_package:Agent", "no_such_package"),
        ("ppo.advantage={type: grup}", "did you mean 'group'"),
        ("ppo.advantage={type: gae}", "set ppo.critic={}"),
        ("ppo.critic={}", "uses no critic"),
        ("ppo={advantage: {type: gae, scale_by_std: true}, critic: {}}", "no effect with advantage.type=gae"),
        ("ppo.kl={kl_ctl: 0.1, place: loss, adaptive: true}", "adaptive=True has no effect with place=loss"),
        ("ppo.kl={estimator: k4}", "'k1', 'k2' or 'k3'"),
        ("ppo.kl.place=loss", "place='loss' has no effect without kl_ctl"),
        ("ppo.kl={kl_ctl: 0.1, target: 3}", "without adaptive=true"),
        ("ppo={advantage: {type: gae}, critic: {model: own, value_loss_coefficient: 1}}", "optimizer of its own"),
        ("ppo.advantage.gae_lambda=0.9", "no effect with advantage.type=group"),
        ("ppo.behaviour_weight={cap: null, mode: mask}", "no effect without a cap"),
        ("ppo.behaviour_weight={cap: 0.4, floor: 0.5}", "floor=0.5 is not below cap=0.4"),
        ("ppo.advantage={normalisation: none, bound: 3}", "no effect with advantage.normalisation=none"),
        (
            "ppo={objective: behaviour, behaviour_weight: {level: sequence}}",
            "w is 1 with objective=behaviour",
        ),
        ("reward.overlong_penalty=2", "without overlong_tokens"),
        ("reward.scaling=0", "reward.scaling=0"),
        ("optimizer.betas=[2, 3]", "optimizer.betas"),
        ("ppo.c_clip=0.9", "ppo.c_clip=0.9"),
        ("ppo={objective: recomputed, behaviour_weight: {cap: 2}}", "cap=2.0 has no effect in behaviour_weight"),
        ("rollout={generation_size: 8, group_size: 16}", "below rollout.group_size=16"),
        ("rollout={success_rate_lb: 0.9, success_rate_ub: 0.1}", "every group would be rejected"),
        ("reward.overlong_tokens=12", "must be below sampling.max_new_tokens=12"),
        ("run.overlap=true", "set rollout.max_head_offpolicyness=1"),
        ("rollout.policy_lag=2", "rollout.policy_lag=2: it is no knob any more: it is always 0"),
        ("run.lease_s=5", "it is no knob any more: .* dead after 60 s without a sign of life"),
        (
            "problems.train={kind: jsonl, path: x, preset: gsm8k, max_line_mb: 1}",
            "a line of more than 16 MB is an error",
        ),
        ("ppo.use_decoupled_loss=false", "no knob any more: ppo.objective says it: decoupled, recomputed or behaviour"),
        (
            "policy.warm_start.tool_share=0.2",
            r"tools does not offer: set agent\.tools=\[calculator\], or tool_share to 0",
        ),
        ("agent={type: openai, tools: [calculator]}", r"agent\.tools: .* set policy\.warm_start\.tool_share=0\.3"),
        ("policy.warm_start.tool_share=0.8", r"two_turn_share=0\.25 and tool_share=0\.8 are more than 1 together"),
        ("agent.type=tasks.agents.math_multi_turn:NoAgent", "did you mean 'NullAgent'"),
    ],
)
def test_refused_with_a_remedy(override: str, message: str) -> None:
    """Each mistake is refused when the configuration is resolved, with a message that names it."""
    with pytest.raises(ConfigError, match=message):
        resolve("demo", [override])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster.workers_per_node=2", "inference.urls=['http://a:1']"], r"names only 1 server\(s\)"),
        (["cluster.address=auto", "inference.urls=['http://a:1']"], "leave one of the two out"),
        (["cluster.workers_per_node=2", "storage.root=memory://x"], "several processes need a folder"),
    ],
)
def test_plays_apart_that_cannot_work_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load("smoke", overrides)


SOURCE = "problems.train={kind: arithmetic, "


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.warm_start.hidden_size=100", "multiple of 32"),
        ("policy.warm_start.hidden_size=1000000000", "less than or equal to 65536"),
        ("policy.warm_start.layers=1000000000", "less than or equal to 1000"),
        ("run.seed=18446744073709551616", r"run\.seed: 18446744073709551616 does not fit into 64 bits"),
        ("run.seed=-9223372036854775809", r"run\.seed: -9223372036854775809 does not fit into 64 bits"),
        ("score.timeout_s=1e300", r"score\.timeout_s=1e\+300"),
        ("score.timeout_s=1e-7", r"score\.timeout_s=1e-07"),
        ("score.workers=1000000000", r"score\.workers=1000000000"),
        ("inference.replicas=1000000000", "inference: replicas is above 10,000"),
        ("inference.threads=1000000000", "inference: threads is above 10,000"),
        ("audit.memory_gib=1e300", r"audit\.memory_gib=1e\+300"),
        ("ppo.threads=1000000000", r"ppo\.threads=1000000000"),
        (SOURCE + "operators: []}", "problems.train.arithmetic.operators=.*at least 1 item"),
        (SOURCE + "high: 100000000000000000000}", "problems.* 2[0-9]{40} possible problems are more"),
        ("inference.gpu_memory_utilization=0", "inference: gpu_memory_utilization=0 .* use 0.9 or so"),
        (
            "inference.urls=['file:///etc/passwd']",
            "file:///etc/passwd' is not the address of a server: .*http://.* unix:///",
        ),
        ("inference.urls=['http://']", "'http://' is not the address of a server"),
        ("inference.urls=['unix://']", "'unix://' is not the address of a server"),
        ("inference.urls=['http://a:99999']", "'http://a:99999' is not the address of a server"),
        ("inference.urls=['127.0.0.1:8000']", "'127.0.0.1:8000' is not the address of a server"),
        ("storage.root=''", "storage.root: '' is not a place"),
        ("storage.cache=''", "storage.cache: '' is not a place"),
        ("rollout.group_size=-0x" + "f" * 5000, r"rollout\.group_size=a number of 20000 bits: Input should be greater"),
        ("agent.type=[" + "x," * 400 + "]", r"agent\.type=\['x', 'x', .*more characters: Input should be"),
        ("sampling.no={a: " + "x" * 50_000 + "}", "more characters: unknown key"),
    ],
)
def test_numbers_and_addresses_that_cannot_work_are_refused(override: str, message: str) -> None:
    """The error comes at the start and names the knob. Otherwise torch, vLLM or the kernel would fail hours later."""
    overrides = ["problems.held_out.split=train"] if override.startswith(SOURCE) else []
    with pytest.raises(ConfigError, match=message) as refused:
        load("demo", [override, *overrides])
    assert len(str(refused.value)) < 1500


@pytest.mark.parametrize(
    "override",
    [
        "run.seed=18446744073709551615",
        "run.seed=-9223372036854775808",
        "score.timeout_s=9e8",
        "policy.warm_start={hidden_size: 64, layers: 1}",
        "inference={urls: ['HTTP://[::1]:80/x', 'unix:///run/vllm'], gpu_memory_utilization: 0, replicas: 99999}",
    ],
)
def test_values_that_can_work_are_accepted(override: str) -> None:
    """No bound refuses a value with which a stored run may have begun."""
    config = load("demo", [override])
    assert load_text(to_yaml(config)) == config


MODULES = {
    "no_python": (
        "class Agent(:",
        r"importing 'no_python' raised SyntaxError: invalid syntax \(.*no_python.py, line 1\)",
    ),
    "raises": ("1 / 0", r"importing 'raises' raised ZeroDivisionError: division by zero \(.*raises.py, line 1\)"),
    "exits": ("import sys\nsys.exit(3)", r"importing 'exits' raised SystemExit: 3 \(.*exits.py, line 2\)"),
    "unknown_hint": (
        "class Agent:\n    def __init__(self, context, *, a: 'Unknown' = 1): ...",
        "arguments of its constructor cannot be read: NameError: name 'Unknown' is not defined",
    ),
    "no_signature": ("class Agent:\n    __signature__ = 1", "arguments of its constructor cannot be read: TypeError"),
    "strange_hint": (
        "class Odd: ...\nclass Agent:\n    def __init__(self, context, *, a: Odd): ...",
        "agent.args.a: a configuration has no values of its annotated type .*Odd'>; annotate it otherwise",
    ),
    "needs_more": ("import no_such_package", "no module 'no_such_package'; is its folder on PYTHONPATH"),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_file_of_the_user_that_cannot_be_used_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the import fails in any way, the configuration is refused with a message and without a traceback."""
    text, message = MODULES[name]
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for section in ("agent", "environment"):
        with pytest.raises(ConfigError, match=message.replace("agent.args", f"{section}.args")):
            resolve("demo", [f"{section}={{type: '{name}:Agent', args: {{a: 1}}}}"])


def test_ctrl_c_while_a_file_of_the_user_is_imported_is_not_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt is no error of the configuration."""
    (tmp_path / "interrupted.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        resolve("demo", ["agent.type=interrupted:Agent"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.overlap=true", "inference.swap=restart"], "inference.swap=restart loses them"),
        (["ppo.objective=recomputed"], "right on-policy only"),
    ],
)
def test_contradictions_with_stale_data_are_refused(overrides: list[str], message: str) -> None:
    """With stale data, options that are right on-policy only are refused, and options that exclude each other."""
    with pytest.raises(ConfigError, match=message):
        resolve("demo", ["rollout.max_head_offpolicyness=1", *overrides])


def test_unknown_file_names_the_nearest() -> None:
    """The error for an unknown configuration suggests the most similar name."""
    with pytest.raises(ConfigError, match="did you mean 'smoke'"):
        load("smok")


def test_malformed_yaml_is_named(tmp_path: Path) -> None:
    """A file that is not valid YAML gives a message that names the file."""
    path = tmp_path / "broken.yaml"
    path.write_text("run: {name: [")
    with pytest.raises(ConfigError, match="broken.yaml is not valid YAML"):
        load(path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("agent.args.limit=.inf", r"agent\.args\.limit=inf is not a finite number"),
        ("agent.args.limit=-.inf", r"agent\.args\.limit=-inf is not a finite number"),
        ("agent.args.limit=.nan", r"agent\.args\.limit=nan is not a finite number"),
        ("agent.args.limit=1e999", r"agent\.args\.limit=inf is not a finite number"),
        ("agent.args.limit=!!float nan", r"agent\.args\.limit=nan is not a finite number"),
        ("agent.args={limits: [1, {deep: [.inf]}]}", r"agent\.args\.limits\.1\.deep\.0=inf is not a finite number"),
        ("environment.args.limit=.inf", r"environment\.args\.limit=inf is not a finite number"),
        ("optimizer.lr=.inf", r"optimizer\.lr=inf is not a finite number"),
        ("optimizer.lr=1e999", r"optimizer\.lr=inf is not a finite number"),
        ("optimizer.lr='inf'", r"optimizer\.lr=inf is not a finite number"),
        ("reward.bias='nan'", r"reward\.bias=nan is not a finite number"),
        ("run.max_minutes=.inf", r"run\.max_minutes=inf is not a finite number"),
        ("audit.checks.loops={threshold: .inf}", r"audit\.checks\.loops\.threshold=inf is not a finite number"),
        ("agent.args.x=0x" + "f" * 5000, r"agent\.args\.x: a number of 20000 bits"),
        ("run.seed=0x" + "f" * 5000, r"run\.seed: a number of 20000 bits"),
        ("agent.args.x=1" + "0" * 5000, "cannot be applied: Exceeds the limit"),
        ("agent.args.x=!!binary aGk=", r"agent\.args\.x=b'hi': bytes cannot be stored"),
        ("agent.args.x=!!omap [a: 1]", r"agent\.args\.x\.0=\('a', 1\): tuple cannot be stored"),
        ("agent.args.x=!!set {a, b}", "cannot be applied"),
        ("agent.args.x=!!timestamp 2020-01-01", "cannot be applied"),
        ("agent.args={x: {1: a}}", r"agent\.args\.x\.1: a key must be text"),
        ("agent.args={x: {1.5: a}}", r"agent\.args\.x\.1\.5: a key must be text"),
        ("agent.args={x: {true: a}}", r"agent\.args\.x\.True: a key must be text"),
        ("agent.args.\udcff=1", r"'agent\.args\.\\udcff': a key must be text"),
        ("agent.args.x=\udcff", "cannot be applied"),
        ("agent.args.x=" + "[" * 60 + "]" * 60, "more than 50 nested mappings and lists"),
        ("agent.args.x=" + "[" * 3000 + "]" * 3000, "cannot be applied: maximum recursion"),
        ("agent.args={x: &a [1, *a]}", "recursive aliases"),
        ("agent.args={x: '${no.such}'}", "no.such"),
        ("agent.args.x=???", "cannot be applied: .*[Mm]issing"),
    ],
)
def test_values_that_cannot_be_stored_are_refused(override: str, message: str) -> None:
    """JSON would store null or another value than the given one, so the run could never be continued."""
    with pytest.raises(ConfigError, match=message):
        load("demo", [override])


def test_values_that_cannot_be_stored_are_refused_in_a_file_and_in_a_dictionary(tmp_path: Path) -> None:
    """Values from a YAML file and from Python are checked like overrides."""
    values = load("demo").model_dump()
    values["agent"]["args"]["limits"] = [1.0, float("inf")]
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=r"own.yaml:\n  agent\.args\.limits\.1=inf is not a finite number"):
        load(path)
    with pytest.raises(ValueError, match=r"agent\.args\.limits\.1=inf is not a finite number"):
        Config.model_validate(values)
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


def _many_aliases(path: Path) -> None:
    lists = [f"a{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 9)}]" for number in range(1, 12)]
    path.write_text("\n".join(["a0: &a0 [x]", *lists]))


def _bound_socket(path: Path) -> None:
    socket.socket(socket.AF_UNIX).bind(str(path))


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "cannot be read: it is a folder, a pipe or a device, not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "cannot be read: it is a folder, a pipe or a device"),
        (Path.mkdir, "cannot be read: it is a folder, a pipe or a device"),
        (_bound_socket, "cannot be read: .*No such device"),
        (lambda path: path.symlink_to("nowhere"), "no configuration"),
        (_sparse, "larger than 1,048,576 bytes"),
        (_many_aliases, "is not valid YAML: YAML node expansion exceeds"),
        (lambda path: path.write_bytes(b"a: \xff"), "is not valid YAML: .*utf-8"),
        (lambda path: path.write_text("a: \x00"), "is not valid YAML"),
        (lambda path: path.write_text("[" * 5000), "is not valid YAML"),
        (lambda path: path.write_text("3"), "is not valid YAML"),
    ],
)
def test_a_file_that_is_no_configuration_neither_hangs_nor_fills_memory(
    make: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    """Reading a pipe or a device would never end, and reading a huge file would fill the memory."""
    path = tmp_path / "own.yaml"
    make(path)
    with pytest.raises(ConfigError, match=message):
        load(path)


def test_differences_name_keys_and_values() -> None:
    """A continued run with a changed configuration prints the key, old value and new value of each difference."""
    old, new = load("demo"), load("demo", ["ppo.eps_clip=0.3", "agent.args.num_turns=4"])
    lines = differences(old.model_dump(mode="json"), new.model_dump(mode="json"))
    assert lines == ["agent.args.num_turns: 2 -> 4", "ppo.eps_clip: 0.2 -> 0.3"]


def test_every_knob_is_on_the_page(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m configs` shows each knob with its type, default and sentence, and none without a sentence."""
    found = list(entries(Config))
    assert [entry.title for entry in found if not entry.sentence and ".kind:" not in entry.title] == []
    monkeypatch.setattr(sys, "argv", ["configs", "ppo.kl.place"])
    main()
    assert capsys.readouterr().out.splitlines() == [
        'ppo.kl.place: reward | loss = "reward"',
        "    Subtract the penalty from the rewards of the tokens, or add it to the loss.",
        "",
        "1 knobs",
    ]


def test_every_rule_is_applied() -> None:
    """A rule that somebody wrote, and did not list, would hold nothing."""
    written = [
        value
        for name, value in vars(schema).items()
        if inspect.isfunction(value) and value.__module__ == schema.__name__
    ]
    assert written == schema.RULES


@pytest.mark.slow
def test_print_config_and_errors_on_the_command_line() -> None:
    """`--print-config` prints YAML. An unknown key ends the command with status 2 and a message, not a traceback."""
    command = [sys.executable, "-m", "flows.math_mt_ppo", "demo"]
    printed = subprocess.run([*command, "ppo.eps_clip=0.3", "--print-config"], capture_output=True, text=True, cwd=ROOT)
    assert load_text(printed.stdout).ppo.eps_clip == 0.3
    refused = subprocess.run([*command, "ppo.eps_clp=0.3"], capture_output=True, text=True, cwd=ROOT)
    assert refused.returncode == 2
    assert "did you mean 'eps_clip'" in refused.stderr
    assert "Traceback" not in refused.stderr
