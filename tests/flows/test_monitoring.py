"""The dashboard, the alerts and the page of `flows/monitoring`, with Prometheus' own checks and a real run."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from storage import layout
from storage.telemetry.metrics import REGISTRY, publish, serve
from tasks.inference.engine import Engine
from tests.support.otlp_receiver import receiver
from tests.support.paths import ROOT
from tests.support.s3_server import free_port

DASHBOARD, ALERTS = ROOT / "flows/monitoring/dashboard.json", ROOT / "flows/monitoring/alerts.yaml"
_METRIC = re.compile(r"\b(?:math_mt_ppo_\w+|vllm:\w+)")


def expressions() -> list[str]:
    """Return the expressions of the dashboard and of the alerts."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    shown = [target["expr"] for panel in panels for target in panel["targets"]]
    return [*shown, *(rule["expr"] for rule in rules)]


def names() -> set[str]:
    """Return the names of samples that this process has."""
    ends = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "summary": ["_sum", "_count"]}
    return {family.name + end for family in REGISTRY.collect() for end in ends.get(family.type, [""])}


def test_dashboard_and_alerts_name_metrics_that_exist(engine: Engine) -> None:
    """A metric that is renamed would leave an empty panel, or an alert that never fires."""
    assert engine.servers  # whose metrics are among this process's
    existing = names()
    used = {name for expression in expressions() for name in _METRIC.findall(expression)}
    assert used - existing == set()
    own = {name for name in existing if name.startswith("math_mt_ppo_")}
    subjects, shown = ({re.sub("(_bucket|_sum|_count)$", "", name) for name in some} for some in (own, used))
    assert subjects <= shown, "every subject has a panel"


def test_two_servers_share_a_metric_and_a_dead_one_is_left_out(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prometheus refuses a page that declares a metric twice; a server that does not answer fails no scrape."""
    (replica,) = engine._replicas
    monkeypatch.setattr(engine, "_replicas", [replica, replace(replica, url="unix:///nonexistent/vllm"), replica])
    publish(None, "demo")
    with urlopen(str(serve(0)), timeout=20) as answer:
        page = answer.read().decode()
    declared = re.findall(r"^# TYPE (\S+)", page, re.MULTILINE)
    assert len(set(declared)) == len(declared)
    assert re.findall(r'vllm:num_requests_running{.*replica="(\d)".*} 0.0', page) == ["0", "2"]


@pytest.fixture(scope="module")
def promtool() -> str:
    """Return the path of Prometheus' program that checks what Prometheus reads."""
    if found := shutil.which("promtool"):
        return found
    reason = "no promtool: apt-get install prometheus"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def test_alerts_fire_when_they_should(promtool: str, tmp_path: Path) -> None:
    """Prometheus' own test of rules: what fires after which series, and what does not."""
    series = {
        # Episodes finish for 10 minutes, then none for 20; a worker plays all the time.
        'math_mt_ppo_episodes_total{run="a",instance="i",kind="trajectories",status="completed"}': "0+8x10 80x20",
        'math_mt_ppo_episodes_in_flight{run="a",instance="i"}': "0x30",
        'math_mt_ppo_episodes_in_flight{run="a",instance="i",worker="w"}': "4x30",
        # This run trains for 30 minutes: no episode runs.
        'math_mt_ppo_episodes_total{run="b",instance="i",kind="trajectories",status="completed"}': "80x30",
        'math_mt_ppo_episodes_in_flight{run="b",instance="i"}': "0x30",
        # One of 8 episodes fails by the set-up's fault; of another run half, by the policy's.
        'math_mt_ppo_faults_total{run="a",instance="i",kind="trajectories",fault="set-up"}': "0+1x10 10x20",
        'math_mt_ppo_episodes_total{run="c",instance="i",kind="trajectories",status="completed"}': "0+8x30",
        'math_mt_ppo_faults_total{run="c",instance="i",kind="trajectories",fault="policy"}': "0+4x30",
        # Two leases; one is renewed every minute.
        'math_mt_ppo_lease_renewed_timestamp_seconds{run="a",instance="i",lease="a"}': "0+60x30",
        'math_mt_ppo_lease_renewed_timestamp_seconds{run="b",instance="i",lease="b"}': "0+60x5 300x25",
    }

    def at(minute: int, alert: str, *runs: tuple[str, dict[str, str]]) -> dict[str, Any]:
        expected = [{"exp_labels": {"run": run, "instance": "i", **labels}} for run, labels in runs]
        return {"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": expected}

    critical, warning = {"severity": "critical"}, {"severity": "warning"}
    test = {
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "interval": "1m",
        "alert_rule_test": [
            at(9, "NoEpisodes"),
            at(20, "NoEpisodes"),
            at(25, "NoEpisodes", ("a", critical)),
            at(9, "SetUpFails", ("a", warning)),
            at(5, "LeaseNotRenewed"),
            at(7, "LeaseNotRenewed", ("b", critical | {"lease": "b"})),
        ],
    }
    # Annotations are sentences for people; only the labels are compared.
    rules = yaml.safe_load(ALERTS.read_text())
    for rule in rules["groups"][0]["rules"]:
        del rule["annotations"]
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(rules))
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": ["alerts.yaml"], "tests": [test]}))
    ran = subprocess.run([promtool, "test", "rules", "test.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    subprocess.run([promtool, "check", "rules", str(ALERTS)], check=True, capture_output=True)


def test_prometheus_understands_the_page_and_every_expression(promtool: str, tmp_path: Path) -> None:
    publish(None, "demo")
    with urlopen(str(serve(0)), timeout=20) as answer:
        checked = subprocess.run([promtool, "check", "metrics"], input=answer.read(), capture_output=True)
    assert checked.returncode in (0, 3), checked.stderr  # 3: it is read, but has names that are not usual
    filled = [each.replace("$__rate_interval", "10s").replace("$run", ".*") for each in expressions()]
    rules = [{"record": f"expression:{number}", "expr": each} for number, each in enumerate(filled)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    ran = subprocess.run([promtool, "check", "rules", "rules.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.long
def test_a_run_shows_its_numbers_and_spans(tmp_path: Path) -> None:
    """Episodes, tokens, verdicts, the lease and vLLM's own metrics are there, and no text of a problem is.

    An iteration is a trace with its stages, requests and commits.
    """
    folder, port, page = tmp_path, free_port(), ""
    with receiver() as received:
        command = [
            *(sys.executable, "-m", "flows.math_mt_ppo", "smoke", f"storage.root={folder}/var"),
            *(f"storage.cache={folder}/cache", f"monitoring.prometheus={port}"),
        ]
        environment = os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": received.url}
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            while process.poll() is None:
                with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                    read = answer.read().decode()
                    page = read if "vllm:" in read else page  # the last one with a server
                time.sleep(0.5)
            assert process.returncode == 0, (folder / "log").read_text()[-2000:]
        finally:
            process.kill()
            process.wait()
    samples = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    counted = {name: sum(v for key, v in samples.items() if key[0] == name) for name, _ in samples}
    assert counted["math_mt_ppo_episodes_total"] >= 32
    assert counted["math_mt_ppo_generated_tokens_total"] > 100
    assert counted["math_mt_ppo_verdicts_total"] > 32
    assert counted["math_mt_ppo_lease_renewed_timestamp_seconds"] > 0
    assert counted["vllm:generation_tokens_total"] > 100
    assert all(("run", "smoke") in labels for _, labels in samples)
    assert all(("replica", "0") in labels for name, labels in samples if name.startswith("vllm:"))
    assert not re.search(r"What is|boxed|assistant", page)

    paths = {"/".join(received.path(span)) for span in received.spans}
    stages = {f"iteration/{stage}" for stage in ("rollout", "score", "train", "evaluate")}
    assert stages | {f"{stage}/commit" for stage in stages} <= paths
    assert {"iteration/rollout/generate", "iteration/evaluate/generate"} <= paths
    assert [span.attributes["iteration"] for span in received.named("iteration")] == [0, 1]
    versions = [{"run": "smoke", "version": layout.checkpoint("smoke", number)} for number in (1, 2)]
    assert [span.attributes for span in received.named("train")] == versions
    assert not re.search(rb"What is|boxed|assistant", received.received)
