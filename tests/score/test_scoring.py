"""The fingerprint of a verifier: everything that verdicts depend on."""

import importlib.metadata

import pytest
from packaging.requirements import Requirement

from configs.score import Score
from tasks.score.scoring import scorer_fingerprint


def verifier_libraries() -> set[str]:
    """Return math-verify and all its direct and indirect requirements on this machine."""
    found, pending = set[str](), ["math-verify"]
    while pending:
        name = pending.pop()
        found.add(name)
        needed = [Requirement(line) for line in importlib.metadata.requires(name) or []]
        here = [library.name for library in needed if not library.marker or library.marker.evaluate({"extra": ""})]
        pending += set(here) - found
    return found


def test_every_library_of_the_verifier_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of any of these libraries may change verdicts, so it changes the fingerprint."""
    installed, libraries, now = importlib.metadata.version, verifier_libraries(), scorer_fingerprint(Score())
    assert libraries >= {"math-verify", "sympy"}
    for changed in libraries:
        monkeypatch.setattr(
            "importlib.metadata.version", lambda name, changed=changed: installed(name) + changed * (name == changed)
        )
        assert scorer_fingerprint(Score()) != now, changed


def test_every_limit_that_decides_verdicts_names_the_verifier() -> None:
    """Time and memory limits change the fingerprint; number of workers and allowed failures do not."""
    now = scorer_fingerprint(Score())
    assert now != scorer_fingerprint(Score(timeout_s=6))
    assert scorer_fingerprint(Score(workers=3, max_failure_share=0.5)) == now
