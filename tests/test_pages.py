"""Every command line on a page is run by a test or listed below with the reason why not; all links have targets."""

import ast
import re
import shlex
import tarfile
from pathlib import Path

import pytest

import storage.__main__
import tasks.provenance.__main__
from tests.support.paths import ROOT

PAGES = [
    page
    for page in sorted(ROOT.rglob("*.md"))
    if page.relative_to(ROOT).parts[0] in ("flows", "tasks", "storage", "configs", "tests") or page.parent == ROOT
]
_COMMAND = re.compile(r"(make|python|prefect|source|export|ray|kubectl|RAY_AUTH_MODE=\S+|PYTHONPATH=\S+|apt-get) .*")
_LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)(?:#[^)]*)?\)")

PROGRAMS = {"storage": storage.__main__.main, "tasks.provenance": tasks.provenance.__main__.main}
"""The programs that `test_a_command_line_works_as_its_page_says` runs on a kept store."""
RUN_BY = {
    "python -m flows.math_mt_ppo demo run.iterations=2": "flows/test_arguments.py::test_a_flow_takes_them_in_any_order",
    "python -m flows.math_mt_ppo demo --print-config": "flows/test_arguments.py::test_a_flow_takes_them_in_any_order",
    "python -m flows.math_mt_ppo demo run.name=three agent.args.num_turns=3 ppo.eps_clip=0.3 --print-config": (
        "flows/test_arguments.py::test_a_flow_takes_them_in_any_order"
    ),
    "python -m tests.simulation --workers 1000 --episodes 1000000 --slots 256 --cpu --call-cpu-s 0.0006": (
        "simulation/test_simulation.py::test_the_command_line"
    ),
    "python -m flows.math_mt_ppo gsm8k-7b --plan": "train/test_memory.py::test_the_command_line_prints_the_plan",
    "python -m flows.math_mt_ppo demo run.name=two ppo.parallel.shard=2 ppo.threads=1": (
        "flows/test_interrupts.py::test_an_interrupt_within_a_stage_resumes"
    ),
    "python -m flows.rollout demo --iteration 0": "flows/test_flows.py::test_stages_alone_make_the_same_run",
    "python -m flows.evaluate demo --policy demo/latest --against runs/demo/checkpoints/000000": (
        "evaluate/test_evaluate.py::test_two_policies_on_two_sets"
    ),
    "python -m flows.history demo": "evaluate/test_evaluate.py::test_a_run_draws_by_what_became_of_problems_before",
    "python -m flows.audit_trajectories demo": "audit/test_flow.py::test_a_real_run_is_clean_until_it_is_damaged",
    "python -m flows.audit_trajectories ./var/runs/demo/trajectories/000001": (
        "audit/test_flow.py::test_a_real_run_is_clean_until_it_is_damaged"
    ),
    "python -m flows.audit_trajectories --since 7d --fail-on warn audit.checks.truncated.threshold=0.1": (
        "flows/test_arguments.py::test_a_flow_takes_them_in_any_order"
    ),
    "python -m tasks.audit read demo": "audit/test_reader.py::test_it_serves_until_a_signal_ends_it",
    "python -m tasks.audit read audits/…": "audit/test_browser.py::test_the_cases_of_an_audit_are_read",
    "python -m flows.math_mt_ppo demo run.name=demo2 'problems.exclusions=[exclusions/…]'": (
        "problems/test_exclusions.py::test_a_run_goes_on_without_what_was_excluded"
    ),
    'PYTHONPATH=. python -m flows.math_mt_ppo smoke run.name=polite agent=\'{type: "my_agents:PoliteAgent", '
    'args: {greeting: "Sorry. Try again."}}\'': "flows/test_flows.py::test_an_agent_of_ones_own",
    "PYTHONPATH=. python -m flows.math_mt_ppo demo-tools run.name=mine agent='{type: openai, tools: [calculator], "
    'args: {entry: "my_solver:solve"}}\'': "agents/test_page.py::test_the_function_is_an_agent",
    "python -m flows.retrain retrain": "retrain/test_retrain.py::test_nights_in_order",
    "python -m flows.retrain retrain --explain": "retrain/test_retrain.py::test_the_command_line",
    "python -m flows.retrain retrain --nights": "retrain/test_retrain.py::test_nights_in_order",
    "python -m flows.retrain retrain --roll-back": "retrain/test_retrain.py::test_a_roll_back_is_remembered",
    "python -m flows.retrain retrain --retry 3": "retrain/test_retrain.py::test_what_did_harm_is_set_aside",
    "python -m flows.retrain retrain --give-up": "retrain/test_retrain.py::test_a_hopeless_night_is_given_up",
    "python -m storage --root s3://bucket/x lineage smoke/latest": "storage/test_commands.py::test_lineage_both_ways",
    "python -m storage --root s3://bucket/x doctor": "storage/test_doctor.py::test_a_healthy_place",
    "ray get-auth-token --generate": "cluster/test_two_hosts.py::test_a_host_that_is_cut_off_commits_nothing",
    "export RAY_AUTH_MODE=token RAY_enable_metrics_collection=0 AUTOSCALER_METRIC_PORT=-1": (
        "cluster/test_two_hosts.py::test_a_host_that_is_cut_off_commits_nothing"
    ),
    "ray start --head --port=6379": "cluster/test_two_hosts.py::test_a_host_that_is_cut_off_commits_nothing",
    "ray start --address=10.0.0.1:6379": "cluster/test_two_hosts.py::test_a_host_that_is_cut_off_commits_nothing",
    "make up": "flows/test_flows.py::test_the_deployment_runs_the_job",
    "make down": "flows/test_flows.py::test_the_deployment_runs_the_job",
    "prefect deployment run math-mt-ppo/math-mt-ppo --watch": "flows/test_flows.py::test_the_deployment_runs_the_job",
    'prefect deployment run math-mt-ppo/math-mt-ppo --watch -p overrides=\'["run.name=short", "run.iterations=2"]\'': (
        "flows/test_flows.py::test_the_deployment_runs_the_job"
    ),
    "python -c 'from http.server import *": "retrain/test_schedule.py::"
    "test_an_automation_calls_a_webhook_with_the_payload_of_an_event",
    "python -c 'from prefect.blocks.webhook import Webhook; "
    'print(Webhook(url="http://127.0.0.1:8099").save("serving"))\'': "retrain/test_schedule.py::"
    "test_an_automation_calls_a_webhook_with_the_payload_of_an_event",
    "prefect automation create --from-file tell-serving.yaml": "retrain/test_schedule.py::"
    "test_an_automation_calls_a_webhook_with_the_payload_of_an_event",
}
"""The test that runs each command line, perhaps with another store or a smaller configuration."""
NOT_RUN = {
    "make setup": "it made the environment that this test runs in",
    "make setup-agents": "it needs a package index; continuous integration runs it before the tests",
    "make check": "continuous integration runs it before the tests",
    "make test": "it runs this test",
    "make test-fast": "it runs a part of the tests",
    'make test ARGS="-k rollout"': "it runs a part of the tests",
    "make test-long": "over ten minutes",
    "make bench": "over ten minutes, and its numbers mean nothing while other tests run",
    "make bench ARGS=growth": "five minutes, and its numbers mean nothing while other tests run",
    "make bench ARGS=training": "its numbers mean nothing while other tests run",
    "make bench-peers": "half an hour, and it needs a package index",
    'make bench-peers ARGS="short --pairs 1"': "it needs a package index, and its numbers mean nothing while tests run",
    "make pictures": "twenty minutes; its result is in the repository",
    "make format": "it changes the source tree",
    "make lock": "it needs a package index",
    "make demo": "ten minutes; the tests run the same flow with the configuration smoke",
    "make demo-tools": "many minutes; the tests run the same flow with the configuration smoke",
    "make retrain-demo": "fifteen minutes; the tests run nights of seconds",
    "make cluster-demo": "many minutes, with three vLLM servers; the tests run the same flow on such a cluster",
    "ray up tasks/cluster/ray-up.yaml": "it needs hosts; cluster/test_manifests.py checks the file",
    "kubectl apply -f tasks/cluster/kuberay.yaml": "it needs Kubernetes; cluster/test_manifests.py checks the file",
    "python -m flows.math_mt_ppo gsm8k-7b storage.root=s3://bucket/prefix cluster.address=auto": "needs GPUs",
    "make experiment-control": "25 minutes",
    "make experiment-staleness": "40 minutes",
    "make experiment-tools": "40 minutes",
    "make experiment-baselines": "five minutes; train/test_advantages.py trains one of its toys",
    "make experiment-limits": "train/test_losses.py computes what it prints",
    "make audit ARGS=demo": "the Makefile's line is python -m flows.audit_trajectories demo",
    "make read ARGS=demo": "the Makefile's line is python -m tasks.audit read demo",
    "make setup GPU=1": "needs a GPU",
    "python -m flows.math_mt_ppo gsm8k-1.5b": "needs a GPU",
    "python -m flows.math_mt_ppo gsm8k-1.5b inference.replicas=3 cluster.workers_per_node=2": "needs GPUs",
    "python -m flows.math_mt_ppo my.yaml": "the file is the reader's own",
    "source .venv/bin/activate": "changes the shell that it is typed in",
}


def commands(page: Path) -> list[str]:
    """Return the command lines of a page, without comments: indented ones, and those after a `$` in fenced blocks."""
    lines, fenced = [], False
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced and line.startswith("$ "):
            lines.append(line[2:])
        elif not fenced and line.startswith("    ") and _COMMAND.fullmatch(line[4:]):
            lines.append(line[4:])
    return [re.sub(r"\s+# .*", "", line).removesuffix(" &") for line in lines]


ALL = {command: page for page in PAGES for command in commands(page)}
ON_A_KEPT_STORE = [
    command
    for command in ALL
    if command not in RUN_BY and command.startswith(tuple(f"python -m {name} " for name in PROGRAMS))
]


def test_every_command_line_is_run_or_has_a_reason() -> None:
    """A new command line on a page needs a test or a reason here; a removed one must be removed here, too."""
    known = RUN_BY.keys() | NOT_RUN.keys() | set(ON_A_KEPT_STORE)
    assert {command: str(page.relative_to(ROOT)) for command, page in ALL.items() if command not in known} == {}
    assert known - ALL.keys() == set()


@pytest.mark.parametrize("test", sorted(set(RUN_BY.values())))
def test_the_tests_that_run_command_lines_exist(test: str) -> None:
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_makefile_has_every_target() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {command.split()[1] for command in ALL if command.startswith("make ")} <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_pictures_exist(page: Path) -> None:
    links = [link for link in _LINK.findall(page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder whose `var` is a kept store with a run `half` and an alias `champion`."""
    folder = tmp_path_factory.mktemp("pages")
    with tarfile.open(ROOT / "tests/kept_stores/2026-11.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    (folder / "store").rename(folder / "var")
    return folder


@pytest.mark.parametrize("command", ON_A_KEPT_STORE)
def test_a_command_line_works_as_its_page_says(
    command: str, kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Command lines of a page succeed in its order and print something. The run of a kept store replaces `demo`."""
    _, _, name, *arguments = shlex.split(command)
    replaced = [argument.replace("demo", "half").replace("0+15", "0+9") for argument in arguments]
    monkeypatch.chdir(kept)
    monkeypatch.setattr("sys.argv", ["command", *replaced])
    assert PROGRAMS[name]() == 0
    assert capsys.readouterr().out
