"""What names a judge: all that verdicts depend on."""

import importlib.metadata

import pytest
from packaging.requirements import Requirement

from configs.schema import Score
from tasks.score.scoring import scorer_fingerprint


def judging_libraries() -> set[str]:
    """math-verify and all that it needs here, whatever these need included."""
    found, pending = set[str](), ["math-verify"]
    while pending:
        name = pending.pop()
        found.add(name)
        needed = [Requirement(line) for line in importlib.metadata.requires(name) or []]
        here = [each.name for each in needed if not each.marker or each.marker.evaluate({"extra": ""})]
        pending += set(here) - found
    return found


def test_every_library_of_the_judge_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of any of them may come to other verdicts: then it is another judge."""
    installed, libraries, now = importlib.metadata.version, judging_libraries(), scorer_fingerprint(Score())
    assert libraries >= {"math-verify", "sympy"}
    for changed in libraries:
        monkeypatch.setattr(
            "importlib.metadata.version", lambda name, changed=changed: installed(name) + changed * (name == changed)
        )
        assert scorer_fingerprint(Score()) != now, changed


def test_every_limit_that_decides_verdicts_names_the_judge() -> None:
    """Limits of time and memory do; how many processes judge, and when a run stops, do not."""
    now = scorer_fingerprint(Score())
    assert len({now, scorer_fingerprint(Score(timeout_s=6)), scorer_fingerprint(Score(memory_mb=1024))}) == 3
    assert scorer_fingerprint(Score(workers=3, max_failure_share=0.5)) == now
