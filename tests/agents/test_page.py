"""What the page of agents shows is what works."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from flows.run.configuration import resolve
from storage.records import Call
from tasks.agents.chat import Chat
from tasks.score.verifier import Verifier
from tests.support.paths import ROOT
from tests.support.tool_calling import call, played, the_calls

PAGE = (ROOT / "tasks/agents/README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_function_is_an_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, qwen3: Chat, verifier: Verifier
) -> None:
    """The first example, started as its command line says, calls a tool and answers."""
    (tmp_path / "my_solver.py").write_text(blocks("python")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    line = next(line for line in PAGE.splitlines() if "my_solver:solve" in line)
    _, _, _, _, name, *overrides = shlex.split(line)
    agent = resolve(name, overrides).agent
    says = [call("calculator", expression="1 + 2"), r"\boxed{3}"]
    row = played(qwen3, verifier, agent.type, says, agent.args)
    assert (row.status, len(row.sequence_starts), row.turns[-1].verdict) == ("completed", 1, "correct")
    assert the_calls(row) == [Call(0, "", "calculator", '{"expression": "1 + 2"}', "3", "answered")]
    assert [tool.type for tool in agent.tools] == ["calculator"]


def test_the_versions_are_those_that_the_tests_run() -> None:
    """Each `package version` of the table is in a lock file."""
    locked = {line.strip() for name in ("cpu", "agents") for line in (ROOT / f"requirements-{name}.lock").open()}
    section = PAGE.partition("## What ran")[2].partition("\n## ")[0]
    cells = [row.split("|")[2] for row in section.splitlines() if row.startswith("| ")]
    versions = re.findall(r"([a-z][a-z0-9-]+) (\d+\.[\d.]+)", " ".join(cells))
    assert len(versions) > 6
    assert {f"{package}=={version}" for package, version in versions} <= locked


@pytest.mark.parametrize("block", blocks("yaml"))
def test_the_configurations_are_valid(block: str) -> None:
    """Each block of the page, put into a configuration to start from."""
    sections = yaml.safe_load(block)
    if sections.get("environment", sections["agent"])["type"] == "gymnasium":
        pytest.importorskip("gymnasium", reason="make setup-agents")
    resolve("gsm8k-1.5b", [f"{name}={json.dumps(section)}" for name, section in sections.items()])
