"""What the fingerprint of a user's own code covers, and when a run that continues with other code is refused."""

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs import Config, ConfigError, load
from configs.evaluate import HELD_OUT
from storage import layout
from storage.version_names import ProblemsVersion
from storage.versions.drafts import JournaledDraft
from tasks import registry
from tasks.evaluate.protocol import greedy
from tasks.registry import fingerprint
from tasks.score.verdict import Answer
from tasks.score.verifier import Verifier, VerifierBrokenError
from tests.score.test_verifier import workers_of
from tests.support.begun import commit, start

FILES = {
    "maze_agent.py": "import json, numpy, tasks.registry\nfrom maze import walls\ndef load():\n    import late\n",
    "maze/__init__.py": "",
    "maze/walls.py": "from . import doors\nfrom .paths import *\nfrom ..beyond import nothing\n",
    "maze/doors.py": "",
    "maze/paths.py": "import maze_agent  # a circle\n",
    "maze/unused.py": "",
    "late.py": "",
    "alone.py": "def score(answer): return True\n",
}


@pytest.fixture
def folder(plain: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's folder, on Python's path."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    later()


def later() -> None:
    """Forget the fingerprints, as a new process does."""
    registry._read.cache_clear()
    registry.import_own.cache_clear()
    sys.modules.pop("alone", None)


def own(folder: Path, *overrides: str) -> list[str]:
    """Overrides for the user's agent, and a store of the test's own."""
    entry = "agent={type: openai, args: {entry: 'maze_agent:load'}}"
    return [entry, f"storage.root={folder}/var", f"storage.cache={folder}/cache", *overrides]


def configured(folder: Path, *overrides: str) -> Config:
    return load("smoke", own(folder, *overrides))


def test_what_is_covered(folder: Path) -> None:
    """The module, its packages, and what they import of the user's; neither libraries nor this program."""
    covered = registry.own_code(configured(folder))
    assert list(covered) == sorted(FILES.keys() - {"maze/unused.py", "alone.py"})
    assert fingerprint("alone:score") == hashlib.sha256((folder / "alone.py").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "override",
    [
        "environment={type: 'alone:Game'}",
        "environment={type: gymnasium, args: {id: 'alone:Guess-v0'}}",
        "agent.tools=[{type: 'alone:tool'}]",
        "score.type={default: environment, maze: 'alone:score'}",
        "agent={type: command, args: {argv: [python, FOLDER/alone.py]}}",
    ],
)
def test_where_code_is_named(folder: Path, override: str) -> None:
    """Agents, environments, tools and scorers are covered alike, wherever their names are."""
    options = ["policy={path: x}", override.replace("FOLDER", str(folder))]
    named = registry.own_code(load("smoke", options))
    assert [Path(path).name for path in named] == ["alone.py"]


@pytest.mark.parametrize("name", ["yaml:load", "json:loads", "tasks.agents.tool_loop:solve", "no_such:thing", "a: b"])
def test_what_is_not_ones_own(name: str) -> None:
    """Of an installed package only its own files count; Python's library, this program and plain texts do not."""
    code = registry.files_of(name)
    assert {path.partition("/")[0] for path in code} == ({"yaml"} if name == "yaml:load" else set())


def test_what_a_library_puts_on_the_path_is_not_ones_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray does so with its psutil and setuptools with its packaging: in its processes, a user's code is the same."""
    (folder / "alone.py").write_text("import psutil\n")
    within = folder / "lib/site-packages/ray/thirdparty_files"
    (within / "psutil").mkdir(parents=True)
    (within / "psutil/__init__.py").write_text("")
    before = registry.files_of("alone:score")
    later()
    monkeypatch.syspath_prepend(str(within))
    registry.refuse_other(registry.files_of("alone:score"), before)


def test_a_run_is_not_continued_with_other_code_by_accident(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The refusal names the files; `run.accept_code` continues, and what is played then names the new code.

    A shard of the first data set, and no more, is enough.
    """
    workspace = start(*own(folder))
    commit(workspace, layout.checkpoint("smoke", 0), "checkpoint")
    draft = JournaledDraft(workspace.store, layout.trajectories("smoke", 0), "trajectories")
    path = workspace.cache / "part-00000.parquet"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"rows")
    draft.add_shard(path, path.name, 1, [])
    start(*own(folder))
    (folder / "maze/doors.py").write_text("locked = True\n")
    (folder / "late.py").unlink()
    later()
    message = r"other code or models of yours \(runs/smoke/\S+\): late.py, maze/doors.py\n"
    with pytest.raises(ConfigError, match=message) as refused:
        start(*own(folder))
    assert "run.accept_code=true" in str(refused.value)
    assert "begin another run with run.name=…" in str(refused.value)
    workspace = start(*own(folder, "run.accept_code=true"))
    assert "late.py, maze/doors.py. It goes on" in caplog.text
    commit(workspace, layout.trajectories("smoke", 1), "trajectories")
    commit(workspace, layout.checkpoint("smoke", 1), "checkpoint")
    start(*own(folder))  # it is the code of the newest data set now


def test_a_fit_is_not_continued_with_other_code_by_accident(folder: Path) -> None:
    """It has played nothing: its newest checkpoint says with which code it was trained."""
    workspace = start(*own(folder, "fit.data=[runs/played/trajectories/000000]"))
    for number in range(4):  # more than run.iterations, which does not count in a fit
        commit(workspace, layout.checkpoint("smoke", number), "checkpoint")
    (folder / "maze/doors.py").write_text("locked = True\n")
    later()
    message = r"was trained with other code or models of yours \(runs/smoke/checkpoints/000003\): maze/doors.py\n"
    with pytest.raises(ConfigError, match=rf"{message}.*\n.*--fork smoke@3"):
        start(*own(folder, "fit.data=[runs/played/trajectories/000000]"))


def test_code_may_change_before_it_has_played(folder: Path) -> None:
    """A mistake that policy version 0 or the first rollout shows is corrected without a word."""
    commit(start(*own(folder)), layout.checkpoint("smoke", 0), "checkpoint")
    (folder / "late.py").write_text("corrected = True\n")
    later()
    start(*own(folder))


def test_an_evaluation_with_other_code_is_another(folder: Path) -> None:
    """The gate compares champion and challenger with the same environment; other scorers only score again."""
    problems = ProblemsVersion("problems/1f0c")
    old = greedy(load("smoke", []), HELD_OUT, problems)
    assert old == greedy(load("smoke", ["score.type=alone:score"]), HELD_OUT, problems)
    before = greedy(configured(folder), HELD_OUT, problems)
    (folder / "late.py").write_text("new = True\n")
    later()
    assert greedy(configured(folder), HELD_OUT, problems) != before


def test_code_that_is_imported_later_is_that_of_the_fingerprint(folder: Path) -> None:
    """An agent that was edited between its fingerprint and its import is refused, and so is another host's code."""
    expected = registry.files_of("alone:score")
    (folder / "alone.py").write_text("def score(answer): return False\n")
    for _ in range(2):
        with pytest.raises(registry.CodeChangedError, match=r"^alone.py changed since this run has read it"):
            registry.import_own("alone:score")
    later()  # as in a worker on a node
    with pytest.raises(registry.CodeChangedError, match="the same code on all hosts"):
        registry.refuse_other(registry.files_of("alone:score"), expected)
    assert registry.import_own("alone:score").score is not None


def test_a_worker_that_starts_again_refuses_a_scorer_that_was_edited(folder: Path) -> None:
    """What was imported before grades on; nothing is graded by new code under the old fingerprint."""
    answer = Answer({"turns": [{"text": "19", "verdict": "wrong"}], "solutions": ["19"], "ungraded": []}, 0)
    others = workers_of()
    with Verifier(workers=1) as verifier:
        assert verifier.call("alone:score", [(answer, {})])[0].name == "correct"
        (folder / "alone.py").write_text("def score(answer): return False\n")
        assert verifier.call("alone:score", [(answer, {})])[0].name == "correct"
        (worker,) = workers_of() - others
        worker.kill()
        with pytest.raises(VerifierBrokenError, match=r"the verifier broke: alone.py changed since"):
            verifier.call("alone:score", [(answer, {})])
