"""A program is an agent, whatever it does to its processes."""

import secrets
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from configs.rollout import Rollout
from storage.records import Trajectory
from tasks.agents.chat import Chat
from tasks.agents.command_agent import CommandAgent
from tasks.environments.math_verify import MathVerifyEnvironment
from tasks.registry import files_of
from tasks.score.verifier import Verifier
from tests.support.rollout_helpers import ScriptedEngine, context, play
from tests.support.sandbox_helpers import wait_gone

ASK = """
import json, os, sys, urllib.request
problem = json.loads(sys.stdin.readline())

def post(path, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))

def ask():
    messages = [{"role": "user", "content": problem["prompt"]}]
    answer = post("/chat/completions", {"model": os.environ["OPENAI_MODEL"], "messages": messages})
    return answer["choices"][0]["message"]["content"]
"""


def the_one(chat: Chat, verifier: Verifier, code: str, deadline_s: float = 60, **own: Any) -> Trajectory:
    environment = own.pop("environment", MathVerifyEnvironment)
    agent = CommandAgent(context(chat), **{"argv": [sys.executable, "-c", ASK + code]} | own)
    engine, settings = ScriptedEngine(chat, lambda *_: r"\boxed{3}"), Rollout(episode_deadline_s=deadline_s)
    (row,) = play(engine, agent, verifier, None, 1, settings, environment)
    return row


@pytest.mark.parametrize(
    "code", ["print(ask())", "ask()", "print(post('/environment/step', {'action': ask()})['reward'])"]
)
def test_a_command_answers(chat: Chat, verifier: Verifier, code: str) -> None:
    """The answer is what the command prints, or its newest completion; a step of its own counts, too."""
    row = the_one(chat, verifier, code)
    assert row.status == "completed", row.reason
    assert [turn.verdict for turn in row.turns][:1] == ["correct"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("sys.exit('no idea')", "ended with status 1: no idea"),
        ("ask(); os.kill(os.getpid(), 9)", "ended with status 137"),
        ("ask(); print('x' * 1_000_001)", "printed more than 1,000,000 bytes"),
        ("print('4')", "ended without a completion"),
    ],
)
def test_a_failed_command_fails_its_episode(chat: Chat, verifier: Verifier, code: str, reason: str) -> None:
    """The reason names the status and what the command said."""
    row = the_one(chat, verifier, code)
    assert row.status == "failed"
    assert reason in row.reason


def test_a_command_gets_what_it_was_promised(
    chat: Chat, verifier: Verifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No secrets, and an empty folder; PYTHONPATH=. still means the folder in which the pipeline was started."""
    (tmp_path / "beside.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for name, value in {"PYTHONPATH": ".", "AWS_SECRET_ACCESS_KEY": "swordfish", "WANTED": "1"}.items():
        monkeypatch.setenv(name, value)
    check = "assert os.listdir('.') == [] and 'WANTED' in os.environ and 'AWS_SECRET_ACCESS_KEY' not in os.environ"
    row = the_one(chat, verifier, f"import beside; {check}; print(ask())", pass_environment=["WANTED"])
    assert (row.status, row.reason) == ("completed", "")


@pytest.mark.parametrize("leave", ["sleep({})", "sleep({'start_new_session': True})", "sleep({}).wait()"])
def test_no_process_stays(chat: Chat, verifier: Verifier, leave: str) -> None:
    """Whatever a command starts ends with its episode, in whichever process group it is."""
    seconds, waits = f"600.{secrets.randbelow(10**9)}", "wait" in leave
    code = f"import subprocess\ndef sleep(options): return subprocess.Popen(['sleep', '{seconds}'], **options)\n"
    row = the_one(chat, verifier, f"{code}{leave}\nask()", 5.0 if waits else 60.0)
    assert row.status == ("failed" if waits else "completed"), row.reason
    processes = psutil.process_iter(["cmdline"])
    wait_gone([process for process in processes if seconds in (process.info["cmdline"] or ())], within_s=2)


class Broken(MathVerifyEnvironment):
    """An environment that cannot grade."""

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        raise LookupError("no rubric")


def test_an_environment_that_fails_is_named(chat: Chat, verifier: Verifier) -> None:
    """A command hears of status 500; the reason of the episode has the environment's error."""
    row = the_one(chat, verifier, "a = ask(); post('/environment/step', {'action': a})", environment=Broken)
    assert row.status == "failed"
    assert "500 environment_failed: LookupError: no rubric" in row.reason


def test_an_episode_of_a_command_that_was_edited_fails(chat: Chat, verifier: Verifier, tmp_path: Path) -> None:
    """A command starts again in each episode, and plays no other code than that of the run's fingerprint."""
    command = tmp_path / "solve.py"
    command.write_text("print(3)")
    files_of(str(command))
    command.write_text("print(4)")
    row = the_one(chat, verifier, "", argv=[sys.executable, str(command)])
    assert (row.status, row.fault) == ("failed", "set-up")
    assert "solve.py changed since" in row.reason
